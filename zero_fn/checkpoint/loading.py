"""`load`: each rank reads the elements that it holds, whichever rank has written them.

choose   ranks agree: rank 0 says which checkpoint
check    each rank checks names, shapes, dtypes and options, and puts all that is wrong into one
         error; then it reads and verifies every block that it will load
agree    no rank has failed, or nothing has changed anywhere
write    elements are read to where they rest, through a buffer
agree    every rank has loaded everything
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import nn

from zero_fn.checkpoint.agreement import RankMeeting, failure_of
from zero_fn.checkpoint.format.contents import Contents
from zero_fn.checkpoint.format.folders import KINDS
from zero_fn.checkpoint.live.load_plan import LoadPlan
from zero_fn.checkpoint.live.match import match_all
from zero_fn.checkpoint.live.tensors import ModelTensors
from zero_fn.checkpoint.others.find import find_checkpoint, opened, saved_as
from zero_fn.checkpoint.saving import wait_for_saving
from zero_fn.errors import CheckpointError, LayoutError
from zero_fn.transforms.selection import Where
from zero_fn.values.chained_optimizer import Optimizers, members_of

__all__ = ["Rename", "fill_on_all_ranks", "load", "renamed_by"]

Rename = Mapping[str, str] | Callable[[str], str] | None

LOADING = "Loading a checkpoint"


def load(
    folder: str | os.PathLike[str],
    model: nn.Module | None = None,
    optimizer: Optimizers | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    only: str | Sequence[str] | None = None,
    where: Where = None,
    strict: bool = True,
    rename: Rename = None,
    verify: Literal["first", "once"] = "first",
) -> dict[str, Any]:
    """Loads what `zf.save` has saved, on any number of ranks, mesh, stage and tier.

    All ranks call it.

        step = zf.load("runs/a", model, optimizer, extra={"scheduler": scheduler})["step"]

    Values, moments and step counts are those that were saved, to the bit. Each rank reads the
    elements that it holds, through a buffer of 64 MiB. It verifies digests whenever it reads: once
    before anything changes, and once more as it loads.

    Folders of DeepSpeed are read as well: of ZeRO-1, 2 and 3, of models in parts (pipelines,
    AutoTP, experts), and universal ones. What it has kept beside the model (`global_steps`,
    `lr_scheduler`, the client state) is returned as `extra`. So are folders of
    torch.distributed.checkpoint, as FSDP2 has them. Pickles in them run no code.

    Communicates three messages of 640 bytes from each rank to rank 0, and three back; where ranks
    have parameters of different names, a fourth of a byte for each tensor.

    Args:
        folder: A checkpoint, or a folder with checkpoints,
            of which the one that was committed last is meant.
        model: The module whose parameters and buffers are loaded.
        optimizer: The optimizer of its parameters, whose states and options of groups are loaded;
            or a sequence of them. It need not be the sequence that was saved: each parameter has
            its states under its name.
        extra: Objects with `load_state_dict`, by the names under which they were saved; they are
            loaded, too. So is an average of the model (`zf.ema`).
        only: What to load: "model", "optimizer" or "extra",
            or several of these. The rest is left as it is.
        where: Which parameters and buffers are loaded: patterns of names,
            or a predicate of name and tensor; None: all.
        strict: Whether each tensor must be in both, the checkpoint and the model.
            Shapes must always agree.
        rename: Names in the model for names in the checkpoint: regular expressions and their
            replacements, or a function.
        verify: "first": the digests of everything are verified before anything changes, which reads
            the files twice. "once": the files are read once; if a block is damaged, the model is
            partly loaded when that is found.

    Returns:
        What was saved as `extra`, by name: of this rank, where as many ranks have saved as load.

    Raises:
        CheckpointError: There is no checkpoint, it is damaged, or it does not fit; lists all that
            does not. Raised on every rank. Nothing has changed, unless the message says so.
        StorageError: The disk refused. Raised on every rank.
        DisagreementError: Ranks were given different arguments.
        LostRankError: A rank has ended, or did not call `load`.
        LayoutError: `verify` or `only` names nothing that is known.
    """
    wait_for_saving()
    kinds = KINDS if only is None else (only,) if isinstance(only, str) else tuple(only)
    if verify not in ("first", "once") or not set(kinds) <= set(KINDS):
        raise LayoutError(
            "verify= or only= names nothing that is known.",
            verify=verify,
            only=only,
            fix='verify="first", only=("model", "optimizer")',
        )
    meeting = RankMeeting()
    path, named = Path(os.path.abspath(folder)), ModelTensors()

    def prepare() -> None:
        members_of(optimizer)  # raises
        if model is not None:
            named.add(model, where)

    failure = failure_of(prepare)
    names = [(held.name, held.place.shape) for held in named.held_tensors]
    same = (str(path), kinds, strict, verify)

    def choose() -> str:
        found = find_checkpoint(path)
        return f"{saved_as(found)}\n{found.relative_to(path)}"

    agreed = meeting.agree(LOADING, failure, choose, same=same, same_names=names)
    chosen, name = agreed.text.split("\n", 1)
    plan = LoadPlan(
        named,
        model if "model" in kinds else None,
        members_of(optimizer) if "optimizer" in kinds else (),
    )

    def match() -> Contents:
        reader = (meeting.rank, meeting.size)
        if saved_as(path / name) != chosen:
            raise CheckpointError(
                "This rank does not see the checkpoint that rank 0 loads.",
                path=path / name,
                why="each host has a folder of its own at this path, "
                "with another checkpoint in it or none",
                fix="load from a folder that all hosts share, or copy the whole checkpoint to each",
            )
        source = opened(
            path / name, renamed_by(rename), has_states=bool(plan.optimizers), reader=reader
        )
        match_all(
            plan,
            source,
            meeting,
            (extra or {}) if "extra" in kinds else None,
            where,
            is_strict=strict,
        )
        return source

    fill_on_all_ranks(
        meeting,
        plan,
        match,
        have_same_names=agreed.have_same_names,
        is_strict=strict and where is None,
        verifies=verify == "first",
    )
    return plan.values


def fill_on_all_ranks(
    meeting: RankMeeting,
    plan: LoadPlan,
    match: Callable[[], Contents],
    allocate: Callable[[], None] = lambda: None,
    *,
    have_same_names: bool,
    is_strict: bool,
    verifies: bool,
) -> None:
    """Fills a model and an optimizer from files, once every rank has found that all fits."""
    sources: list[Contents] = []

    def check() -> None:
        sources.append(match())
        if have_same_names and is_strict:
            plan.note_unexpected(plan.missed(sources[0]))
        plan.require(sources[0].path)
        if have_same_names:
            plan.verify(sources[0], everything=verifies)

    def check_with_others() -> None:
        plan.require_wanted(sources[0], meeting, is_strict=is_strict)
        plan.verify(sources[0], everything=verifies)

    def put() -> None:
        allocate()
        plan.put(sources[0])

    try:
        meeting.agree(LOADING, failure_of(check))
        if not have_same_names:
            meeting.agree(LOADING, failure_of(check_with_others))
        consequence = "the model is partly loaded: load a checkpoint before training goes on"
        failure = failure_of(put)
        if failure is not None:
            failure.add_note(
                "The model and the optimizer are partly loaded: "
                "load a checkpoint before training goes on."
            )
        meeting.agree(LOADING, failure, consequence=consequence)
    finally:
        for source in sources:
            source.close()


def renamed_by(rename: Rename) -> Callable[[str], str]:
    """The function from names in files to names in the model that `rename=` means."""
    if rename is None:
        return lambda name: name
    if callable(rename):
        return rename
    patterns = [(re.compile(pattern), by) for pattern, by in rename.items()]

    def renamed(name: str) -> str:
        for pattern, by in patterns:
            name = pattern.sub(by, name)
        return name

    return renamed
