"""Ctrl-C between any two lines: the model heals by itself, or says what to load. Nothing is silently wrong afterwards.

A tracer raises `KeyboardInterrupt` at a line of zero_fn in a step, a save or a load. Then states are loaded, or nothing is,
and what the model computes is compared with a plain model. One model is interrupted again and again, as in a notebook.
"""

import copy
import linecache
import os
import random
import sys
from collections import Counter
from contextlib import nullcontext
from functools import cache, partial
from zlib import crc32

import pytest
import torch
import torch.distributed as dist

import zero_fn as zf
from tests.support.groups import alone
from tests.support.models import Layer, Stack
from tests.support.ranks import axis
from tests.support.wholes import full

_ROOT = os.path.dirname(zf.__file__) + os.sep
_WIDTH = 8

_OUT_OF_STEP = (zf.errors.LostRankError, zf.errors.DisagreementError)
_MESSAGES = ("transport/", "one_host/", "kernels/")
"""Where a message is under way: some ranks may be interrupted when it has left, others before."""


@cache
def _is_of_a_mode(file, line):
    """Whether a line enters and leaves a mode of torch: one that is interrupted as it leaves stays on, here as anywhere."""
    text = linecache.getline(file, line)
    return "with " in text and ("no_grad()" in text or "inference_mode(" in text)


class _Tracer:
    """Counts the lines of zero_fn that an action runs, and interrupts it at a moment: at one of them, so often run before."""

    def __init__(self, moment=None):
        self.counts = Counter()
        self.is_hit = False
        self._moment = moment

    def __call__(self, frame, event, arg):
        code = frame.f_code
        return self._line if code.co_filename.startswith(_ROOT) and code.co_name != "__del__" else None

    def _line(self, frame, event, arg):
        if event == "line" and not self.is_hit and not _is_of_a_mode(frame.f_code.co_filename, frame.f_lineno):
            line = frame.f_code.co_filename[len(_ROOT) :], frame.f_lineno
            if (line, self.counts[line]) == self._moment:
                self.is_hit = True
                raise KeyboardInterrupt
            self.counts[line] += 1
        return self._line

    def run(self, act):
        before = sys.gettrace()
        sys.settrace(self)
        try:
            act()
        finally:
            sys.settrace(before)


def _moments(act):
    """Those of an action to which every rank comes: a loop that waits for a peer takes as many turns as it needs."""
    tracer = _Tracer()
    tracer.run(act)
    rows = [Counter()] * dist.get_world_size()
    dist.all_gather_object(rows, tracer.counts)
    lines = sorted(line for line in rows[0] if all(row[line] == rows[0][line] for row in rows))
    return [(line, number) for line in lines for number in range(rows[0][line])]


def _batch(number):
    return torch.randn(4, _WIDTH, generator=torch.Generator().manual_seed(number))


class Patient:
    """A model that is interrupted, the optimizer that trains it, and a plain model that takes over its values."""

    def __init__(self, where, folder, mesh):
        torch.manual_seed(0)
        self.folder, self.saves, self.plain = folder, 0, Stack(_WIDTH, _WIDTH, 2)
        model, is_streamed = Stack(_WIDTH, _WIDTH, 2), where in ("disk", "waiting")
        model = zf.shard_optimizer(model, mesh) if where == "stage 1" else zf.shard_params(model, mesh, units=Layer)
        if is_streamed:
            tier = zf.nvme(folder) if where == "disk" else zf.cpu()
            model = zf.offload(model, params=tier, grads=tier, optim=tier)
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=is_streamed or None)
        if is_streamed:
            self.optimizer = zf.streamed(self.optimizer, finish="forward" if where == "waiting" else "step")
        for number in range(2):
            self.step(number)
        self.first = copy.deepcopy((model.state_dict(), self.optimizer.state_dict()))
        zf.save(folder / "first", model, self.optimizer)
        self.wanted = [self.step(number) for number in (2, 3)]

    # -- what is interrupted -------------------------------------------------------------------------------------------

    def step(self, number=9):
        self.optimizer.zero_grad()
        output = self.model(_batch(number))
        output.square().mean().backward()
        self.optimizer.step()
        return output.detach()

    def accumulated(self, *, unshard=False):
        self.optimizer.zero_grad()
        with zf.accumulate(self.model, unshard=unshard):
            for number in range(2):
                self.model(_batch(number)).square().mean().backward()
        self.optimizer.step()

    def whole(self):
        self.accumulated(unshard=True)

    @torch.no_grad()
    def evaluate(self):
        self.model(_batch(9))

    def move(self):
        self.model.to(torch.float64).to(torch.float32)
        self.evaluate()

    def edit(self):
        with zf.unsharded(self.model, writeback=True), torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(0.5)

    def save(self):
        self.saves += 1
        zf.save(self.folder / f"save-{self.saves}", self.model, self.optimizer)

    def load(self, name="first"):
        zf.load(self.folder / name, self.model, self.optimizer)

    def load_states(self):
        model, optimizer = copy.deepcopy(self.first)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)

    def save_again(self):
        """Saves after an interrupted save: what is loaded is one or the other."""
        self.load()
        self.save()
        self.load(f"save-{self.saves}")

    # -- what is asked afterwards --------------------------------------------------------------------------------------

    def is_consistent(self):
        """Whether the model computes what a plain one with its parameters computes."""
        with torch.no_grad():
            found = self.model(_batch(5))
            for own, parameter in zip(self.plain.parameters(), self.model.parameters(), strict=True):
                own.copy_(full(parameter))
            return torch.equal(found, self.plain(_batch(5)))

    def goes_on(self, then):
        """Whether the steps after a load are those of a run without interrupts."""
        getattr(self, then)()
        return all(torch.equal(self.step(number), wanted) for number, wanted in zip((2, 3), self.wanted, strict=True))

    def is_right(self, then):
        """Whether nothing is wrong in silence: as it is, the model is consistent or raises; one of three loads works."""
        if then == "nothing":
            if _found(self.is_consistent) is False:
                return False
            then = "load_states"
        for _ in range(3):
            found = _found(partial(self.goes_on, then))
            if isinstance(found, bool):
                return found
        raise AssertionError(f"{then}: {found!r}")


def _found(act):
    """What an action gives, or raises, unless ranks are told that they are out of step."""
    try:
        return act()
    except _OUT_OF_STEP:
        raise
    except (Exception, KeyboardInterrupt) as error:  # code around an interrupt may make another error of it
        return error


WHERE = ("stage 1", "stage 3", "disk", "waiting")
ACTS = ("step", "accumulated", "evaluate", "edit", "whole", "save", "load", "load_states")
THEN = ("load", "load_states", "save_again", "nothing")


def interrupted(where, acts, count, number, folder):
    """Interrupts each action so many times, on several ranks each at the same line, and asks what came of it.

    Returns:
        For each interrupt its file, whether it came, and whether ranks were told that they are out of step; then it ends.
    """
    draw, found = random.Random(number + crc32(f"{where}, {acts}".encode())), []
    with zf.distributed.set_deadline(5), nullcontext(axis()) if dist.is_initialized() else alone() as mesh:
        patient = Patient(where, folder, mesh)
        for act in acts:
            for _ in range(2):  # the second time, what is made once is made
                patient.load_states()
                moments = _moments(getattr(patient, act))
            for _ in range(count):
                moment, then = draw.choice(moments), draw.choice(THEN)
                (file, _), _ = moment
                tracer = _Tracer(moment)
                try:
                    patient.load_states()
                    came = _found(partial(tracer.run, getattr(patient, act)))
                    assert patient.is_right(then), (act, moment, came, then)
                    found.append((file, tracer.is_hit, False))
                except _OUT_OF_STEP:
                    return [*found, (file, tracer.is_hit, True)]
    return found


def _campaigns(daily_acts, daily, nightly):
    """Where, which actions, and how many interrupts of each."""
    night = pytest.mark.nightly
    return [
        *(pytest.param(where, daily_acts, daily, id=where) for where in ("stage 3", "disk")),
        *(pytest.param(where, [act], nightly, marks=night, id=f"{where}, {act}") for where in WHERE for act in ACTS),
    ]


@pytest.mark.parametrize(("where", "acts", "count"), _campaigns(ACTS, 2, 75))
def test_what_comes_after_an_interrupt_is_right(where, acts, count, tmp_path):
    """In a module of the user: `test_exceptions.py`."""
    found = interrupted(where, acts, count, count, tmp_path)
    assert not any(is_told for *_, is_told in found), "there is no other rank"
    assert sum(is_hit for _, is_hit, _ in found) > len(found) // 2, "few interrupts came"


@pytest.mark.parametrize(("where", "acts", "count"), _campaigns(["step"], 3, 12))
def test_ranks_that_are_interrupted_alike_stay_in_step_or_are_told(ranks, where, acts, count, tmp_path):
    """All of them, and told only where an interrupt came in the midst of a message."""
    done = number = 0
    while done < count:
        (folder := tmp_path / str(number)).mkdir()
        found = ranks(2, deadline_s=200).run(interrupted, where, acts, count - done, number, folder)
        assert [(file, is_told) for file, _, is_told in found[0]] == [(file, is_told) for file, _, is_told in found[1]]
        told = [file for file, _, is_told in found[0] if is_told]
        assert all(file.startswith(_MESSAGES) for file in told), told
        if told:
            ranks.close()  # they have lost one another
        done, number = done + len(found[0]), number + 1


@pytest.mark.parametrize("stage", ["stage 1", "stage 3"])
def test_parameters_that_are_taken_over_after_a_move_survive_an_interrupt(stage, tmp_path):
    with alone() as mesh:
        patient = Patient(stage, tmp_path, mesh)
        patient.evaluate()
        wanted = patient.model(_batch(5)).detach()
        moments = [moment for moment in _moments(patient.move) if moment[0][0] == "runtime/moved_memory.py"]
        for moment in random.Random(0).sample(moments, 10):
            with pytest.raises(KeyboardInterrupt):
                _Tracer(moment).run(patient.move)
            assert torch.equal(patient.model.to(torch.float32)(_batch(5)), wanted), moment
