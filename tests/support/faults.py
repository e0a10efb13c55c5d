"""Real faults on real ranks: a rank is killed, stopped, or goes astray at a chosen collective, and what the others say.

Every case takes fresh processes from the warm fork server. Survivors write what they got into files, for the pool itself
reports only the rank that died.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_fn as zf
from tests.support.metronome import Metronome
from tests.support.programs import STAGES
from tests.support.ranks import axis
from zero_fn.local import first_failure
from zero_fn.local.first_failure import RankDied
from zero_fn.local.launcher import LocalRanks
from zero_fn.transport.line import Line, Work

__all__ = ["ASTRAY", "ENDINGS", "Fault", "FreshRanks", "Said"]

ENDINGS = ("kill", "exit", "stop")
"""Faults that strike at a collective: SIGKILL, `os._exit`, SIGSTOP."""

ASTRAY = (
    "skips a layer",
    "runs a layer twice",
    "other order",
    "raises and goes on",
    "skips a backward",
    "skips a step",
    "extra forward",
)
"""Faults of the program of one rank, which strike in one step."""

_CASE_S = 30.0


@dataclass(frozen=True)
class Fault:
    """What happens to which rank.

    Attributes:
        kind: One of `ENDINGS` or `ASTRAY`.
        victim: The rank.
        at: The collective at which an ending strikes, or the step in which a rank goes astray.
        deadline_s: Of every wait, in seconds of this machine: more by the clock while others use it. See `metronome`.
    """

    kind: str
    victim: int
    at: int
    deadline_s: float = 300.0


@dataclass(frozen=True)
class Said:
    """What a rank that lives got.

    Attributes:
        error: The name of its error.
        text: What the error says.
        after_s: From the fault to the error, by the clock.
        late_s: Of that, what was not the deadline, in seconds of this machine.
        slowness: Seconds of the clock for one of this machine.
    """

    error: str
    text: str
    after_s: float
    late_s: float
    slowness: float


class _Reported(Exception):
    """Ends a case in which ranks noticed a fault."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * torch.tanh(self.inner(x))


class Wandering(nn.Module):
    """Runs its layers in an order that can be set."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.leave = nn.Linear(5, 3)
        self.order = [0, 1, 2]

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.layers[index](x)
        output: Tensor = self.leave(x)
        return output


class FreshRanks:
    """The fixture `fresh_ranks`: `fresh_ranks(2, "zero3", fault)` is what each rank that lives got, None if nothing.

    Attributes:
        executed: Cases so far.
    """

    def __init__(self) -> None:
        self.executed = 0

    def __call__(self, n: int, stage: str, fault: Fault) -> dict[int, Said | None]:
        self.executed += 1
        with tempfile.TemporaryDirectory() as directory, Metronome() as metronome, LocalRanks(n) as ranks:
            fault = replace(fault, deadline_s=fault.deadline_s * metronome.slowness())
            patience = patch.object(first_failure, "GRACE_S", _CASE_S / 2)  # survivors of a loaded machine need longer
            with contextlib.suppress(RankDied, _Reported), patience:
                ranks.run(_train, (directory, stage, fault), timeout_s=_CASE_S)
            struck_s = json.loads((Path(directory) / "struck").read_text())["at_s"]
            due_s = struck_s + (fault.deadline_s if fault.kind == "stop" else 0.0)
            said: dict[int, Said | None] = {}
            for rank in range(n):
                if rank == fault.victim and fault.kind in ENDINGS:
                    continue
                report = json.loads((Path(directory) / f"rank{rank}").read_text())
                said[rank] = None
                if report["error"]:
                    late_s = metronome.seconds(due_s, report["at_s"])
                    after_s = report["at_s"] - struck_s
                    said[rank] = Said(report["error"], report["text"], after_s, late_s, metronome.slowness())
            return said

    def close(self) -> None:
        """Nothing is left: every case ends its ranks."""


def _train(directory: str, stage: str, fault: Fault) -> None:
    report: dict[str, object] = {"error": "", "text": "", "at_s": 0.0}
    with zf.distributed.set_deadline(fault.deadline_s):
        try:
            _steps(Path(directory), stage, fault)
        except zf.ZeroError as error:
            report = {"error": type(error).__name__, "text": str(error), "at_s": time.monotonic()}
    path = Path(directory) / f"rank{dist.get_rank()}"
    path.with_suffix(".part").write_text(json.dumps(report))
    path.with_suffix(".part").rename(path)
    alive = dist.get_world_size() - (fault.kind in ENDINGS)
    end_s = time.monotonic() + fault.deadline_s + 2.0
    while len(list(Path(directory).glob("rank?"))) < alive and time.monotonic() < end_s:
        time.sleep(0.01)  # leave only when the others that live have seen it too: an exit is a closed connection
    if fault.kind == "stop" and dist.get_rank() != fault.victim:
        with contextlib.suppress(ProcessLookupError):  # another has ended it: nobody waits for one that stands still
            os.kill(json.loads((Path(directory) / "struck").read_text())["pid"], signal.SIGKILL)
    if report["error"]:
        raise _Reported


def _steps(directory: Path, stage: str, fault: Fault) -> None:
    is_victim = dist.get_rank() == fault.victim
    torch.manual_seed(0)
    model = STAGES[stage](Wandering(), axis())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dist.barrier()  # nobody is late because it was still being made
    if fault.kind in ENDINGS and is_victim:
        _strike_at(directory, fault)
    for step in range(4):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        goes_astray = is_victim and fault.kind in ASTRAY and step == fault.at
        if goes_astray:
            _note(directory)
            _go_astray(model, fault.kind, x)
        loss = model(x).square().mean()
        model.order = [0, 1, 2]
        if not (goes_astray and fault.kind == "skips a backward"):
            loss.backward()
        if not (goes_astray and fault.kind == "skips a step"):
            optimizer.step()
        optimizer.zero_grad()


def _strike_at(directory: Path, fault: Fault) -> None:
    issue = Line._issue

    def struck(self: Line, *operation: Any, **checked: Any) -> Work:
        if self.shared.count == fault.at:
            _note(directory)
            if fault.kind == "exit":
                os._exit(3)
            os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
        return issue(self, *operation, **checked)

    Line._issue = struck  # type: ignore[method-assign]


def _note(directory: Path) -> None:
    (directory / "struck").write_text(json.dumps({"at_s": time.monotonic(), "pid": os.getpid()}))


def _go_astray(model: nn.Module, kind: str, x: Tensor) -> None:
    if kind == "raises and goes on":
        hook = model.layers[1].register_forward_pre_hook(_raise)
        with contextlib.suppress(ZeroDivisionError):
            model(x)
        hook.remove()
    elif kind == "extra forward":
        model.layers[1](x)
    elif not kind.startswith("skips a ") or kind == "skips a layer":
        model.order = {"skips a layer": [0, 2], "runs a layer twice": [0, 1, 1, 2], "other order": [1, 0, 2]}[kind]


def _raise(*_: object) -> None:
    raise ZeroDivisionError
