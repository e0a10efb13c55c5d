"""`load`: each rank reads the elements that it holds, whichever rank has written them.

choose   ranks agree: rank 0 says which checkpoint
check    each rank checks names, shapes, dtypes and options, and puts all that is wrong into one error; then it reads and
         verifies every block that it will load
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
from torch.optim import Optimizer

from zero_fn.checkpoint.format.contents import Contents
from zero_fn.checkpoint.format.folders import KINDS
from zero_fn.checkpoint.live.fit import Fit
from zero_fn.checkpoint.live.leaves import Named
from zero_fn.checkpoint.others.opening import chosen, opened
from zero_fn.checkpoint.saving import wait_for_saving
from zero_fn.checkpoint.together import Together, failure_of
from zero_fn.errors import LayoutError
from zero_fn.transforms.selection import Where

__all__ = ["Rename", "fill_together", "load", "renamed_by"]

Rename = Mapping[str, str] | Callable[[str], str] | None

LOADING = "Loading a checkpoint"


def load(
    folder: str | os.PathLike[str],
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    only: str | Sequence[str] | None = None,
    where: Where = None,
    strict: bool = True,
    rename: Rename = None,
    verify: Literal["first", "once"] = "first",
) -> dict[str, Any]:
    """Loads what `zf.save` has saved, on any number of ranks, mesh, stage and tier. All ranks call it.

        step = zf.load("runs/a", model, optimizer, extra={"scheduler": scheduler})["step"]

    Values, moments and step counts are those that were saved, to the bit. Each rank reads the elements that it holds, through
    a buffer of 64 MiB. It verifies digests whenever it reads: once before anything changes, and once more as it loads.

    Folders of DeepSpeed are read as well: of ZeRO-1, 2 and 3, on any number of ranks, and universal ones. What it has kept
    beside the model (`global_steps`, `lr_scheduler`, the client state) is returned as `extra`. So are folders of
    torch.distributed.checkpoint, as FSDP2 has them. Pickles in them run no code.

    Communicates three messages of 640 bytes from each rank to rank 0, and three back; where ranks have parameters of
    different names, a fourth of a byte for each tensor.

    Args:
        folder: A checkpoint, or a folder with checkpoints, of which the one that was committed last is meant.
        model: The module whose parameters and buffers are loaded.
        optimizer: The optimizer of its parameters, whose states and options of groups are loaded.
        extra: Objects with `load_state_dict`, by the names under which they were saved; they are loaded, too.
        only: What to load: "model", "optimizer" or "extra", or several of these. The rest is left as it is.
        where: Which parameters and buffers are loaded: patterns of names, or a predicate of name and tensor; None: all.
        strict: Whether each tensor must be in both, the checkpoint and the model. Shapes must always agree.
        rename: Names in the model for names in the checkpoint: regular expressions and their replacements, or a function.
        verify: "first": the digests of everything are verified before anything changes, which reads the files twice.
            "once": the files are read once; if a block is damaged, the model is partly loaded when that is found.

    Returns:
        What was saved as `extra`, by name: of this rank, where as many ranks have saved as load.

    Raises:
        CheckpointError: There is no checkpoint, it is damaged, or it does not fit; lists all that does not. Raised on every
            rank. Nothing has changed, unless the message says so.
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
    together = Together()
    path, named = Path(os.path.abspath(folder)), Named()
    failure = None if model is None else failure_of(lambda: named.add(model, where))
    names = [(leaf.name, leaf.place.shape) for leaf in named.leaves]
    same = (str(path), kinds, strict, verify)
    agreed = together.agree(LOADING, failure, lambda: str(chosen(path).relative_to(path)), same=same, kind=names)
    fit = Fit(named, model if "model" in kinds else None, optimizer if "optimizer" in kinds else None)

    def match() -> Contents:
        reader = (together.rank, together.size)
        source = opened(path / agreed.text, renamed_by(rename), has_states=fit.optimizer is not None, reader=reader)
        if fit.model is not None:
            fit.match_model(source, is_strict=strict)
            fit.match_local_buffers(source, together)
        if fit.optimizer is not None:
            fit.match_optimizer(source, fit.optimizer, is_strict=strict)
        if "extra" in kinds:
            fit.match_extra(source, together, extra or {}, is_strict=strict)
        return source

    fill_together(
        together,
        fit,
        match,
        is_of_one_kind=agreed.is_of_one_kind,
        is_strict=strict and where is None,
        verifies=verify == "first",
    )
    return fit.values


def fill_together(
    together: Together,
    fit: Fit,
    match: Callable[[], Contents],
    allocate: Callable[[], None] = lambda: None,
    *,
    is_of_one_kind: bool,
    is_strict: bool,
    verifies: bool,
) -> None:
    """Fills a model and an optimizer from files, once every rank has found that all fits."""
    sources: list[Contents] = []

    def check() -> None:
        sources.append(match())
        if is_of_one_kind and is_strict:
            fit.note_unexpected(fit.missed(sources[0]))
        fit.require(sources[0].path)
        if is_of_one_kind:
            fit.verify(sources[0], everything=verifies)

    def check_with_others() -> None:
        fit.require_wanted(sources[0], together, is_strict=is_strict)
        fit.verify(sources[0], everything=verifies)

    def put() -> None:
        allocate()
        fit.put(sources[0])

    try:
        together.agree(LOADING, failure_of(check))
        if not is_of_one_kind:
            together.agree(LOADING, failure_of(check_with_others))
        consequence = "the model is partly loaded: load a checkpoint before training goes on"
        failure = failure_of(put)
        if failure is not None:
            failure.add_note(
                "The model and the optimizer are partly loaded: load a checkpoint before training goes on."
            )
        together.agree(LOADING, failure, consequence=consequence)
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
