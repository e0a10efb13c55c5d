"""Ctrl-C between any two lines: the model heals by itself, or says what to load. Nothing is silently wrong afterwards.

A tracer raises `KeyboardInterrupt` at a line of zero_fn in a step, a save or a load. Then states are loaded, or nothing is,
and what the model computes is compared with a plain model. One model is interrupted again and again, as in a notebook.
"""

from __future__ import annotations

import functools
import linecache
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from types import FrameType
from typing import Any
from zlib import crc32

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zero_fn as zf
from tests.support.groups import alone
from tests.support.models import Layer, Stack
from tests.support.ranks import Ranks, axis

_ROOT = os.path.dirname(zf.__file__) + os.sep
_WIDTH = 8

_OUT_OF_STEP = (zf.LostRankError, zf.DisagreementError)

Line = tuple[str, int]  # file and number
Moment = tuple[Line, int]  # a line, and how often it had been run before


@functools.cache
def _is_of_a_mode(file: str, line: int) -> bool:
    """Whether a line enters and leaves a mode of torch: one that is interrupted as it leaves stays on, here as anywhere."""
    text = linecache.getline(file, line)
    return "with " in text and ("no_grad()" in text or "inference_mode(" in text)


class _Tracer:
    """Counts the lines of zero_fn that an action runs, and interrupts it at one of them."""

    def __init__(self, moment: Moment | None = None) -> None:
        self.counts: Counter[Line] = Counter()
        self.is_hit = False
        self._moment = moment

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        return self._line if code.co_filename.startswith(_ROOT) and code.co_name != "__del__" else None

    def _line(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line" and not self.is_hit and not _is_of_a_mode(frame.f_code.co_filename, frame.f_lineno):
            line = frame.f_code.co_filename[len(_ROOT) :], frame.f_lineno
            if (line, self.counts[line]) == self._moment:
                self.is_hit = True
                raise KeyboardInterrupt
            self.counts[line] += 1
        return self._line

    def run(self, act: Callable[[], object]) -> None:
        before = sys.gettrace()
        sys.settrace(self)
        try:
            act()
        finally:
            sys.settrace(before)


def _batch(number: int) -> Tensor:
    return torch.randn(4, _WIDTH, generator=torch.Generator().manual_seed(number))


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    return type(value)(map(_copied, value)) if isinstance(value, list | tuple) else value


class Patient:
    """A model that is interrupted, the optimizer that trains it, and a plain model with the same values."""

    def __init__(self, where: str, folder: str, mesh: Any) -> None:
        torch.manual_seed(0)
        self.folder = folder = _shared_folder(folder)
        self.plain, self.saves = Stack(_WIDTH, _WIDTH, 2), 0
        self.is_streamed = where in ("disk", "waiting")
        model = (
            zf.shard_optimizer(Stack(_WIDTH, _WIDTH, 2), mesh)
            if where == "stage 1"
            else zf.shard_params(Stack(_WIDTH, _WIDTH, 2), mesh, units=Layer)
        )
        if self.is_streamed:
            disk = zf.nvme(folder) if where == "disk" else zf.cpu()
            model = zf.offload(model, params=disk, grads=disk, optim=disk)
        self.model = model
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=self.is_streamed or None)
        self.optimizer = optimizer
        if self.is_streamed:
            self.optimizer = zf.streamed(optimizer, finish="forward" if where == "waiting" else "step")
        for number in range(2):
            self.step(number)
        self.first = _copied((model.state_dict(), self.optimizer.state_dict()))
        zf.save(f"{folder}/first", model, self.optimizer)
        self.wanted = [self.step(number) for number in (2, 3)]

    # -- what is interrupted -------------------------------------------------------------------------------------------

    def step(self, number: int = 9) -> Tensor:
        self.optimizer.zero_grad()
        output = self.model(_batch(number))
        output.square().mean().backward()
        self.optimizer.step()
        found: Tensor = output.detach()
        return found

    def accumulated(self, *, unshard: bool = False) -> None:
        self.optimizer.zero_grad()
        with zf.accumulate(self.model, unshard=unshard):
            for number in range(2):
                self.model(_batch(number)).square().mean().backward()
        self.optimizer.step()

    def whole(self) -> None:
        self.accumulated(unshard=True)

    def evaluate(self) -> None:
        with torch.no_grad():
            self.model(_batch(9))

    def edit(self) -> None:
        with zf.unsharded(self.model, writeback=True), torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(0.5)

    def save(self) -> None:
        self.saves += 1
        zf.save(f"{self.folder}/save-{self.saves}", self.model, self.optimizer)

    def load(self) -> None:
        zf.load(f"{self.folder}/first", self.model, self.optimizer)

    def load_states(self) -> None:
        model, optimizer = _copied(self.first)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)

    def save_again(self) -> None:
        """Saves after an interrupted save: what is loaded is one or the other."""
        self.load()
        self.save()
        zf.load(f"{self.folder}/save-{self.saves}", self.model, self.optimizer)

    # -- what is asked afterwards --------------------------------------------------------------------------------------

    def is_consistent(self) -> bool:
        """Whether the model computes what a plain one with its parameters computes."""
        with torch.no_grad():
            found = self.model(_batch(5))
            for own, parameter in zip(self.plain.parameters(), self.model.parameters(), strict=True):
                own.copy_(parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter)
            return torch.equal(found, self.plain(_batch(5)))

    def is_exact(self) -> bool:
        """Whether the steps after the checkpoint are those of a run that was not interrupted."""
        return all(torch.equal(self.step(number), wanted) for number, wanted in zip((2, 3), self.wanted, strict=True))


WHERE = ("stage 1", "stage 3", "disk", "waiting")
ACTS = ("step", "accumulated", "evaluate", "edit", "whole", "save", "load", "load_states")
THEN = ("load", "load_states", "save_again", "nothing")


def interrupted(where: str, act: str, count: int, seed: int) -> Counter[str]:
    """Interrupts an action so many times, and counts what came of it. On several ranks each is interrupted at the same.

    Raises:
        LostRankError, DisagreementError: An interrupt came in the midst of a collective, and ranks are told so.
    """
    draw, found = random.Random(seed), Counter[str]()
    folder = _shared_folder()
    try:
        with zf.guard(deadline_s=5), nullcontext(axis()) if _has_ranks() else alone() as mesh:
            patient = Patient(where, folder, mesh)
            for _ in range(2):  # the second time, what is made once is made
                patient.load_states()
                clean = _Tracer()
                clean.run(getattr(patient, act))
            moments = _shared_moments(clean.counts)
            hits = 0
            for _ in range(3 * count):
                if hits == count:
                    break
                moment, then = draw.choice(moments), draw.choice(THEN)
                patient.load_states()
                tracer = _Tracer(moment)
                came = ""
                try:
                    tracer.run(getattr(patient, act))
                except KeyboardInterrupt:
                    pass
                except _OUT_OF_STEP:
                    raise
                except Exception as error:
                    came = f", the interrupt became {type(error).__name__}"
                hits += tracer.is_hit
                outcome = _outcome(patient, then) + came
                found[outcome if outcome == "right" else f"{outcome} ({act} {moment}, then {then})"] += 1
                if outcome.startswith("broken"):
                    patient = Patient(where, folder, mesh)
            assert hits, "a campaign that interrupts nothing would find nothing"
            if _has_ranks():
                dist.barrier()
    finally:
        if not _has_ranks() or dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
    return found


def _outcome(patient: Patient, then: str) -> str:
    said = ""
    if then == "nothing":
        try:
            if not patient.is_consistent():
                return "SILENTLY WRONG, nothing loaded"
        except _OUT_OF_STEP:
            raise
        except zf.StateError as error:
            said = f", said {error.summary[:60]}"
        except Exception as error:
            said = f", raised {type(error).__name__} {str(error)[:100]}"
        then = "load_states"
    problem = ""
    for attempt in (1, 2, 3):
        try:
            getattr(patient, then)()
            if not patient.is_exact():
                return "SILENTLY WRONG" + said
            return ("right" if attempt == 1 else f"right at load {attempt}, after {problem}") + said
        except _OUT_OF_STEP:
            raise
        except Exception as error:
            problem = f"{type(error).__name__} {str(error)[:160]}"
    return f"broken: {problem}{said}"


def _has_ranks() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _shared_folder(within: str | None = None) -> str:
    box = [tempfile.mkdtemp(prefix="zero_fn_", dir=within) if not _has_ranks() or dist.get_rank() == 0 else ""]
    if _has_ranks():
        dist.broadcast_object_list(box)
    return box[0]


def _shared_moments(counts: Counter[Line]) -> list[Moment]:
    """The moments that every rank comes to: a loop that waits for a peer takes as many turns as it needs."""
    boxes = [counts]
    if _has_ranks():
        boxes = [Counter()] * dist.get_world_size()
        dist.all_gather_object(boxes, counts)
    lines = sorted(line for line in boxes[0] if all(other[line] == boxes[0][line] for other in boxes))
    return [(line, number) for line in lines for number in range(boxes[0][line])]


# -- the tests ---------------------------------------------------------------------------------------------------------


def _seed(where: str, act: str) -> int:
    return crc32(f"{where}, {act}".encode())


def _require_right(found: Counter[str]) -> None:
    assert not {what: count for what, count in found.items() if not what.startswith("right")}


@pytest.mark.parametrize("count", [3, pytest.param(75, marks=pytest.mark.long)])
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("where", WHERE)
def test_what_comes_after_an_interrupt_is_right(where: str, act: str, count: int) -> None:
    _require_right(interrupted(where, act, count, count + _seed(where, act)))


def _on_two_ranks(ranks: Ranks, where: str, act: str, seed: int) -> bool:
    """Interrupts both ranks at the same line. Returns whether they stayed in step; if not, they were told."""
    try:
        for found in ranks(2).run(interrupted, where, act, 1, seed):
            _require_right(found)
    except _OUT_OF_STEP:
        return False
    return True


@pytest.mark.parametrize(
    ("where", "act", "times"),
    [
        *((where, "step", 2) for where in ("stage 1", "stage 3")),
        *(pytest.param(where, act, 10, marks=pytest.mark.long) for where in WHERE for act in ACTS),
    ],
)
def test_ranks_that_are_interrupted_alike_stay_in_step_or_are_told(
    ranks: Ranks, where: str, act: str, times: int
) -> None:
    stayed = [_on_two_ranks(ranks, where, act, _seed(where, act) + number) for number in range(times)]
    assert sum(stayed) >= times // 2


@pytest.mark.parametrize("then", ["load", "load_states", "edit"])
@pytest.mark.parametrize("stage", ["stage 1", "stage 3"])
def test_weights_that_come_after_an_interrupt_of_a_users_module_are_used(stage: str, then: str) -> None:
    """As in a notebook: Ctrl-C in the midst of a long forward, other weights, and on."""
    folder = _shared_folder()
    with alone() as mesh:
        patient = Patient(stage, folder, mesh)
        handle = patient.model.layers[0].register_forward_hook(_interrupt)
        with pytest.raises(KeyboardInterrupt):
            patient.step()
        handle.remove()
        getattr(patient, then)()
        assert patient.is_consistent()
        patient.load()
        assert patient.is_exact()
    shutil.rmtree(folder)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("stage", ["stage 1", "stage 3"])
def test_parameters_that_are_taken_over_after_a_move_survive_an_interrupt(stage: str) -> None:
    folder = _shared_folder()
    with alone() as mesh:
        patient = Patient(stage, folder, mesh)

        def moved() -> None:
            patient.model.to(torch.float64).to(torch.float32)
            patient.evaluate()

        patient.evaluate()
        wanted = patient.model(_batch(5)).detach()
        clean = _Tracer()
        clean.run(moved)
        moments = [moment for moment in _shared_moments(clean.counts) if moment[0][0] == "runtime/moved.py"]
        for moment in random.Random(0).sample(moments, 10):
            with pytest.raises(KeyboardInterrupt):
                _Tracer(moment).run(moved)
            assert torch.equal(patient.model.to(torch.float32)(_batch(5)), wanted), moment
    shutil.rmtree(folder)
