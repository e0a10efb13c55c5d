"""Where ranks meet before there is a process group: a TCP store,
in a part of it that no earlier start has used.

[Note: the store outlives ranks] torchrun keeps one store for all its starts, and the addresses of
killed ranks stay in it. Its variables do not say which start this is: the number of restarts is
that of one host, and a host that came later counts anew. So rank 0 puts a fresh word into the
store, under which every rank says hello, and once all have, answers each hello. A rank that has
read the word of an earlier start gets no answer, and reads again.
"""

from __future__ import annotations

import os
import time
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from zero_fn.errors import LostRankError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["meet"]

_SHOWN = 8  # names of missing ranks in a message
_TOLD_S = 0.5  # in which the others read what rank 0 has found, while its store is there


def meet(address: str, port: int, rank: int, ranks: int, launcher: str, timeout_s: float) -> Store:
    """A store of the ranks of this start. All ranks call it; rank 0 answers each.

    Raises:
        LostRankError: Ranks have not come in time, and are named; or rank 0 cannot be reached.
    """
    end = time.monotonic() + timeout_s
    is_ours = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    seconds = timedelta(seconds=timeout_s)
    missing = ""
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            address, port, None, is_ours, seconds, wait_for_workers=False, multi_tenant=True
        )
        word = _answer_all(store, ranks, end) if rank == 0 else _say_hello(store, rank, end)
        if not word.startswith("missing "):
            return dist.PrefixStore(word, store)  # type: ignore[attr-defined]
        missing, why = word.removeprefix("missing "), "these did not come"
    except (dist.DistError, RuntimeError, OSError) as error:
        why = str(error).splitlines()[0]
    raise LostRankError(
        f"Rank {rank} of {ranks} did not meet {'rank ' + missing if missing else 'the others'}.",
        at=f"{address}:{port}, by {launcher}",
        why=why,
        waited=f"{timeout_s:g} s",
        fix="start all ranks within timeout_s; MASTER_ADDR is the host of rank 0, "
        "and MASTER_PORT is free there",
    )


def _answer_all(store: Store, ranks: int, end: float) -> str:
    """Rank 0: waits for every hello, and answers it.

    Returns the word of this start, or which ranks are missing.
    """
    word = os.urandom(8).hex()
    store.set("zero_fn/start", word)
    hellos = {rank: f"{word}/hello/{rank}" for rank in range(1, ranks)}
    waited_for = deque(hellos)
    while waited_for and time.monotonic() < end:
        if store.check([hellos[waited_for[0]]]):
            waited_for.popleft()
        else:
            time.sleep(0.005)
    missing = [rank for rank in waited_for if not store.check([hellos[rank]])]
    more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
    said = f"missing {', '.join(map(str, missing[:_SHOWN]))}{more}" if missing else word
    for rank in hellos.keys() - missing:
        store.set(f"{word}/answer/{rank}", f"{str(store.get(hellos[rank]), 'ascii')} {said}")
    time.sleep(_TOLD_S if missing else 0)
    return said


def _say_hello(store: Store, rank: int, end: float) -> str:
    """The others: what rank 0 answers."""
    own, before = os.urandom(8).hex(), ""
    while time.monotonic() < end + _TOLD_S:
        word = str(store.get("zero_fn/start"), "ascii")
        if word != before:
            store.set(f"{word}/hello/{rank}", own)
            before = word
        if store.check([f"{word}/answer/{rank}"]):
            to, _, said = str(store.get(f"{word}/answer/{rank}"), "ascii").partition(" ")
            if to == own:
                return said
        time.sleep(0.01)
    raise RuntimeError("rank 0 does not answer")
