"""Where ranks are that do not return: the stacks that their faulthandler writes on SIGUSR1."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path

from zero_fn.local import rank as inside
from zero_fn.local.peer import Peer

__all__ = ["innermost", "stacks_of"]

_STACKS_S = 1.0
_SHOWN_FRAMES = 3


def stacks_of(stuck: Sequence[Peer]) -> dict[int, str]:
    """Where ranks are, by faulthandler: rank -> text, most recent call first."""
    for peer in stuck:
        peer.child.send_signal(signal.SIGUSR1)
    end_s = time.monotonic() + _STACKS_S
    written: dict[int, int] = {}
    while time.monotonic() < end_s:
        time.sleep(0.05)
        now = {peer.rank: peer.stacks.stat().st_size for peer in stuck if peer.stacks.exists()}
        if now == written and len(now) == len(stuck) and all(now.values()):
            break
        written = now
    return {peer.rank: _of_user(peer.stacks.read_text()) if peer.rank in written else "" for peer in stuck}


def _of_user(stack: str) -> str:
    """A faulthandler text without the frames below the user's function, which are the same on every rank."""
    lines = stack.splitlines()
    ours = [i for i, line in enumerate(lines) if f'"{inside.__file__}"' in line and line.endswith("in _perform")]
    return "\n".join(lines[: ours[0]] if ours else lines)


def innermost(stack: str) -> str:
    """One line of a faulthandler text: the innermost frames outside torch."""
    lines = [line.strip() for line in stack.split("\n\n")[-1].splitlines() if line.strip().startswith("File")]
    outside = [line for line in lines if "/torch/" not in line]
    where = []
    for line in (outside or lines)[:_SHOWN_FRAMES]:
        file, _, rest = line.removeprefix('File "').partition('", line ')
        number, _, function = rest.partition(" in ")
        where.append(f"{function} at {Path(file).name}:{number}")
    return ", called by ".join(where) or "unknown: it did not answer SIGUSR1"
