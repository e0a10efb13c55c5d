"""`record_step` keeps what each step began with; `recorded_steps` begins them again, on any number of ranks.

runs/a/steps/record-000107/   a checkpoint (`zf.save`) of nothing but values: of each rank the batch, random states, digests
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from zero_fn.checkpoint import Checkpoint, checkpoints, save
from zero_fn.checkpoint.format.catalog import Catalog
from zero_fn.checkpoint.others.find import saved_as
from zero_fn.checkpoint.rank_meeting import RankMeeting, failure_of
from zero_fn.errors import CheckpointError, LayoutError, StateError, StorageError, warn_once
from zero_fn.resting import local_of
from zero_fn.runtime.uncompiled import uncompiled
from zero_fn.state_digests import StateDigests, digests_of

__all__ = ["RecordedStep", "StepRecorder", "record_step", "recorded_steps"]

_NAME = "record-"

_SHOWN = 8
"""Names of tensors in an error."""


def record_step(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    keep: int = 20,
    digests: int = 1,
) -> StepRecorder:
    """Keeps what each step needs to run again alone: its batch, random states, and digests of the model and the optimizer.

        record = zf.record_step("runs/a/steps", model, optimizer)
        for step in range(1, 1000):
            batch = next(batches)
            record(batch, step=step)
            loss_of(model, batch).backward()

    A step that failed is begun again from the checkpoint before it with `zf.recorded_steps`, on as many ranks or on one.
    Communicates nothing; a record does what `zf.save` does.

    Args:
        folder: A folder of its own, on a disk that all ranks share.
        model: A module, transformed or not, after the last transform.
        optimizer: The optimizer of its parameters, any of torch or a streamed one.
        keep: How many records are kept: the newest. Those since the last checkpoint are what is needed.
        digests: In which records there are digests, for which parameters and states are read, in tiers, too: 1, in each; k,
            in the first and in each k-th after it. Only a step with digests can be the first that runs again.

    Raises:
        LayoutError: `keep` or `digests` is less than 1.
    """
    if keep < 1 or digests < 1:
        raise LayoutError(
            "keep and digests are numbers from 1 on.", keep=keep, digests=digests, fix="keep=20, digests=1"
        )
    return StepRecorder(Path(os.path.abspath(folder)), model, optimizer, keep, digests)


class StepRecorder:
    """Records steps; `zf.record_step` makes it."""

    def __init__(self, folder: Path, model: nn.Module, optimizer: Optimizer | None, keep: int, digests: int) -> None:
        self._folder, self._model, self._optimizer, self._keep, self._digests = folder, model, optimizer, keep, digests
        self._records = 0

    @uncompiled
    @torch.no_grad()
    def __call__(self, batch: Any, *, step: int) -> None:
        """Keeps what a step begins with. All ranks call it before the forward, when the step before has ended. Communicates
        what `zf.save` does.

        Args:
            batch: What this rank has of it, all micro-batches: numbers, strings, lists, tuples, dicts and plain tensors.
            step: The number of the step. Records of this step and of later ones, which the run has gone back from, are
                removed.

        Raises:
            LayoutError: `step` is negative.
            CheckpointError: The batch has something else in it. No record was made.
            StorageError: The disk refused, on this rank or another. No record was made; training may go on.
            DisagreementError: Ranks are at different steps.
            LostRankError: A rank has ended, or did not record.
        """
        if step < 0:
            raise LayoutError("Steps have numbers from 0 on.", step=step, fix="record(batch, step=step)")
        device = _device_of(self._model).type
        said = {"batch": batch, "random": _random_state(device), "device": device}
        if self._records % self._digests == 0:
            found, layout = digests_of(self._model, self._optimizer)
            said |= {"parts": found.parts, "wholes": found.wholes, "layout": layout}
        if RankMeeting().rank == 0 and self._folder.is_dir():
            with suppress(StorageError):  # on this rank alone; if one of this step stays, `save` raises on all
                for number, each in _records_in(self._folder).items():
                    if number >= step:
                        shutil.rmtree(each.path, ignore_errors=True)
        save(self._folder / f"{_NAME}{step:06d}", extra=said, keep=self._keep)
        self._records += 1


def recorded_steps(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    first: int,
    compare: Literal["each", "first"] = "each",
) -> Iterator[RecordedStep]:
    """The steps that `zf.record_step` has kept, from one on, to be run again in a loop. All ranks go through it, after
    `zf.load` of the checkpoint before the first.

        zf.load("runs/a/step-000100", model, optimizer)
        for recorded in zf.recorded_steps("runs/a/steps", model, optimizer, first=101):
            for batch in recorded.batches():
                (loss_of(model, batch) / len(recorded.ranks)).backward()
            optimizer.step()
            optimizer.zero_grad()

    On as many ranks, cut as they were, steps give the same bits, as far as kernels do. On fewer ranks each takes the batches
    of several, with the random states that those had; sums are then in another order. A schedule of rates is the caller's to
    load and step, as in the run.

    Communicates at the begin of each step a message of 640 bytes from each rank to rank 0 and one back, and the digests.

    Args:
        folder: The folder that `record_step` was given.
        model: The model, at any stage, mesh and tier.
        optimizer: Its optimizer, if one was recorded.
        first: The first step. What the model and the optimizer are now must have the digests that were recorded then.
        compare: "each": digests are compared at each further step that has some, too, where ranks, shards, torch and the kind
            of device are those that recorded. "first": only at the first, for code that was changed on purpose.

    Raises:
        CheckpointError: There is no such record, it is damaged, ranks cannot share the batches evenly, or values are not
            those that were recorded; lists tensors that differ. Raised on every rank.
        StorageError: The disk refused. Raised on every rank.
        DisagreementError: Ranks were given different arguments, or see different files.
        LayoutError: `compare` is neither of the two.
    """
    meeting, path, found = RankMeeting(), Path(os.path.abspath(folder)), list[Checkpoint]()
    if compare not in ("each", "first"):
        raise LayoutError("compare= names nothing that is known.", compare=compare, fix='compare="each" or "first"')
    failure = failure_of(lambda: found.extend(_found(path, first, meeting.size)))
    same = str(path), first, compare, [saved_as(each.path) for each in found]
    meeting.agree(_DOING, failure, same=None if failure else same)
    for each in found:
        share, said, step = each.ranks // meeting.size, list[dict[str, Any]](), each.step or 0
        whose = range(meeting.rank * share, (meeting.rank + 1) * share)

        def read(each: Checkpoint = each, whose: range = whose, said: list[dict[str, Any]] = said) -> None:
            source = Catalog(each.path, lambda name: name, (meeting.rank, meeting.size))
            for rank in whose:
                said.append({name: source.value(rank, value) for name, value in source.said(rank, "extra").items()})
            source.close()

        meeting.agree(_DOING, failure_of(read))
        if step == first or (compare == "each" and share == 1):
            _compare(meeting, step, said, model, optimizer, is_first=step == first)
        recorded = RecordedStep(step, whose, said, _device_of(model))
        recorded._set_random(0)
        yield recorded


class RecordedStep:
    """A step that is to be run again; `zf.recorded_steps` makes it.

    Attributes:
        step: Its number.
        ranks: Whose batches this rank has: its own, on as many ranks as have recorded.
    """

    def __init__(self, step: int, ranks: range, said: Sequence[dict[str, Any]], device: torch.device) -> None:
        self.step, self.ranks, self._said, self._device = step, ranks, said, device

    @property
    def batch(self) -> Any:
        """The batch that this rank had. Tensors are in memory of the host.

        Raises:
            StateError: This rank has the batches of several ranks, and goes through `batches()`.
        """
        if len(self._said) > 1:
            raise StateError(
                f"This rank has the batches of {len(self._said)} ranks.",
                why="more ranks have recorded the step",
                fix="for batch in recorded.batches(): (loss_of(model, batch) / len(recorded.ranks)).backward()",
            )
        return self._said[0]["batch"]

    def batches(self) -> Iterator[Any]:
        """The batch of each of `ranks`. Before each, random states become those of the rank that had it."""
        for at, said in enumerate(self._said):
            self._set_random(at)
            yield said["batch"]

    def _set_random(self, at: int) -> None:
        state, recorded_on = self._said[at]["random"], self._said[at]["device"]
        random.setstate(state["python"])
        kind, keys, *rest = state["numpy"]
        np.random.set_state((kind, keys.numpy(), *rest))
        torch.set_rng_state(state["torch"])
        if recorded_on != self._device.type:
            warn_once(
                "Random numbers on an accelerator are not those that were recorded.",
                recorded_on=recorded_on,
                now_on=self._device.type,
                fix="run the steps again on the kind of device that recorded them, or without dropout",
            )
        elif recorded_on != "cpu":
            torch.get_device_module(self._device).set_rng_state(state["device"])


_DOING = "Running steps again"


def _records_in(folder: Path) -> dict[int, Checkpoint]:
    return {each.step or 0: each for each in checkpoints(folder) if each.path.name.startswith(_NAME)}


def _found(folder: Path, first: int, readers: int) -> list[Checkpoint]:
    """The records from the first one on, without a gap."""
    known = {step: each for step, each in _records_in(folder).items() if each.is_complete}
    steps = sorted(step for step in known if step >= first)
    missing = next(
        (step for step, found in zip(range(first, first + len(steps)), steps, strict=True) if step != found), None
    )
    if not steps or missing is not None:
        raise CheckpointError(
            f"Step {first if missing is None else missing} was not recorded.",
            folder=folder,
            found=", ".join(map(str, sorted(known)[-20:])) or "no recorded steps",
            fix="a step that was: record = zf.record_step(folder, model, optimizer), with more to keep= if it was removed",
        )
    ranks = known[first].ranks
    if ranks % readers:
        raise CheckpointError(
            f"{readers} ranks cannot share the batches of {ranks} evenly.",
            why="each rank must run as many forwards and backwards as the others",
            fix=f"{', '.join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)} ranks",
        )
    return [known[step] for step in steps]


def _compare(
    meeting: RankMeeting,
    step: int,
    said: Sequence[dict[str, Any]],
    model: nn.Module,
    optimizer: Optimizer | None,
    *,
    is_first: bool,
) -> None:
    """Raises on every rank if values are not those that were recorded. Waits."""
    here: dict[str, Any] = {}

    def collect() -> None:
        if all("layout" in each for each in said):
            now, layout = digests_of(model, optimizer)
            before = StateDigests()
            for each in said:
                before.add(StateDigests(each["parts"], each["wholes"]))
            here["each"] = [(each.parts, each.wholes) for each in (before, now)]
            here["is_alike"] = (said[0]["layout"], said[0]["device"]) == (layout, _device_of(model).type)
        elif is_first:
            raise CheckpointError(
                f"Step {step} was recorded without digests: nothing tells whether it begins as it did.",
                fix="begin at a step that has some: digests= of zf.record_step, so that the step after each checkpoint does",
            )

    meeting.agree(_DOING, failure_of(collect))
    heard = meeting.all_of(here)
    if not all("each" in each for each in heard) or not (is_first or all(each["is_alike"] for each in heard)):
        return
    before, now = StateDigests(), StateDigests()
    for each in heard:
        for digests, (parts, wholes) in zip((before, now), each["each"], strict=True):
            digests.add(StateDigests(parts, wholes))
    wrong = before.differing(now)
    if not wrong:
        return
    shown = [*wrong[:_SHOWN], *([f"and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else [])]
    listed = {str(number): line for number, line in enumerate(shown, 1)}
    if is_first:
        raise CheckpointError(
            f"Step {step} did not begin with these values.",
            **listed,
            why="they are of another step, or of another model",
            fix="zf.load of model and optimizer, from the checkpoint that was saved just before it",
        )
    raise CheckpointError(
        f"Step {step} does not begin as it did: a step before it went otherwise.",
        **listed,
        why="the program is another one, the rates are, or kernels do not give the same bits each time",
        fix='the program and the schedule of the run; compare="first" if they are others on purpose',
    )


def _device_of(model: nn.Module) -> torch.device:
    return next((local_of(parameter).device for parameter in model.parameters()), torch.device("cpu"))


def _random_state(device: str) -> dict[str, Any]:
    kind, keys, *rest = np.random.get_state()
    found = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.array(keys)), *rest),
        "torch": torch.get_rng_state(),
    }
    return found if device == "cpu" else {**found, "device": torch.get_device_module(device).get_rng_state()}
