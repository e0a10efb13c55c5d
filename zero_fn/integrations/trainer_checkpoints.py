"""Whole values for files that anybody reads, and checkpoints of a run,
to which each rank writes the shards that it owns."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import zero_fn as zf
from zero_fn.checkpoint.agreement import RankMeeting
from zero_fn.checkpoint.format.folders import Draft
from zero_fn.values.chained_optimizer import as_one

__all__ = [
    "STATES",
    "load_states",
    "load_weights",
    "model_of",
    "note_overwriting",
    "require_not_overwritten",
    "save_states",
    "whole_state",
]

STATES = "zero_fn"
"""The folder, inside a checkpoint of accelerate or of a Trainer,
to which each rank writes the shards that it owns."""


def whole_state(
    module: nn.Module,
    *,
    keep: bool,
    names: Collection[str] | None = None,
    dtype: torch.dtype | None = None,
) -> dict[str, Any]:
    """The state dict of a module with whole values in host memory,
    in another `dtype` if there is one.

    Tied entries stay one tensor. All ranks call it; those that do not `keep`
    the values get an empty dict.

    Communicates what `zf.weights` does for the parameters and buffers, or for those of `names`.
    """
    entries = {
        name: value
        for name, value in module.state_dict(keep_vars=True).items()
        if names is None or name in names
    }
    asked = nn.Module()  # which holds what is asked for, and nothing else
    for name, value in entries.items():
        if isinstance(value, Tensor):
            is_parameter = isinstance(value, nn.Parameter)
            kept: dict[str, Any] = asked._parameters if is_parameter else asked._buffers
            kept[name] = value
    wholes: dict[int, Tensor] = {}
    for name, whole in zf.weights(asked, names={}, dtype=dtype):
        if keep:
            wholes[id(entries[name])] = whole.to("cpu", copy=True)
    return {name: wholes.get(id(value), value) for name, value in entries.items() if keep}


def save_states(
    folder: Path,
    models: Sequence[nn.Module],
    optimizers: Sequence[tuple[nn.Module, Optimizer]],
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Saves models, and optimizers with the model of each, as one checkpoint. All ranks call it.

    Each is a `zf.save` of its own into a hidden folder, and one rename commits them all: whenever
    this is killed, all that is loaded is of the save before, or all of this one. The save before is
    removed then. `extra` is saved with the first entry.
    """
    meeting, doing = RankMeeting(), "Saving the states of a trainer"

    def next_number() -> str:
        return str(1 + max(map(_number, folder.glob("save-*")), default=0))

    agreed = meeting.agree(doing, None, next_number)
    draft = Draft(folder / f"save-{agreed.text}", kinds=())
    try:
        meeting.agree(doing, None, draft.make)
        for at, (name, model, optimizer, where) in enumerate(_entries(models, optimizers)):
            zf.save(draft.path / name, model, optimizer, extra=None if at else extra, where=where)
        meeting.agree(doing, None, draft.commit)
    except BaseException:
        draft.drop()
        raise
    if meeting.rank == 0:
        for old in {*folder.glob("save-*")} - {draft.target}:
            shutil.rmtree(old, ignore_errors=True)


def _number(path: Path) -> int:
    digits = path.name.removeprefix("save-")
    return int(digits) if digits.isdecimal() else 0


def _newest(folder: Path) -> Path:
    """The folder with the entries that were committed last."""
    return max(folder.glob("save-*"), key=_number, default=folder)


_OVERWRITING = "overwriting"


def note_overwriting(folder: Path) -> None:
    """Notes, before files beside the folder are overwritten, what was saved last.

    One rank calls it.
    """
    folder.mkdir(exist_ok=True)
    (folder / _OVERWRITING).write_text(_newest(folder).name)


def require_not_overwritten(folder: Path) -> None:
    """Requires that what is in the folder was saved after files beside it were overwritten."""
    note, newest = folder / _OVERWRITING, _newest(folder)
    if note.is_file() and note.read_text() == newest.name:
        raise zf.errors.CheckpointError(
            "A save into this folder was killed: what is in it is of two steps.",
            folder=folder.parent,
            why="schedulers, random numbers and samplers may be of the later one, "
            "models and optimizers are not",
            fix=f"a folder for each save: save_state(f'step-{{step}}'); "
            f"to load this one all the same: rm {note}",
        )


def load_weights(folder: Path, model: nn.Module) -> None:
    """Loads the weights of the first model that `save_states` saved. Every rank calls it."""
    alone = _newest(folder) / "model-0"
    zf.load(alone if alone.is_dir() else alone.with_name("optimizer-0"), model, only="model")


def load_states(
    folder: Path,
    models: Sequence[nn.Module],
    optimizers: Sequence[tuple[nn.Module, Optimizer]],
) -> dict[str, Any]:
    """Loads what `save_states` saved, on any number of ranks and at any stage; returns its `extra`.

    Every rank calls it.
    """
    newest, extra = _newest(folder), dict[str, Any]()
    for name, model, optimizer, where in _entries(models, optimizers):
        if not (newest / name).is_dir():
            raise zf.errors.CheckpointError(
                "The checkpoint holds no states of a transformed model.",
                folder=folder,
                why="it was saved without them (save_only_model=True), "
                "by replicas, or not to its end",
                fix="begin another run from its weights: from_pretrained(checkpoint), "
                "and train() without resuming",
            )
        extra |= zf.load(newest / name, model, optimizer, where=where)
    return extra


Chosen = Callable[[str, nn.Parameter], bool] | None


def _entries(
    models: Sequence[nn.Module], optimizers: Sequence[tuple[nn.Module, Optimizer]]
) -> Iterator[tuple[str, nn.Module, Optimizer | None, Chosen]]:
    """The entries of a checkpoint: name, model, optimizer,
    and which parameters are saved (None: all).

    A model is saved with all of its optimizers. Of a model of PEFT only trained parameters are
    saved: its frozen base can be read again from where it came.
    """
    of_model: dict[nn.Module, list[Optimizer]] = {}
    for model, optimizer in optimizers:
        of_model.setdefault(model, []).append(optimizer)
    for number, (model, several) in enumerate(of_model.items()):
        own = as_one(several)
        held = {id(parameter) for group in own.param_groups for parameter in group["params"]}
        yield (
            f"optimizer-{number}",
            model,
            own,
            partial(_is_held, held) if hasattr(model, "peft_config") else None,
        )
    for number, model in enumerate(models):
        if model not in of_model:
            yield f"model-{number}", model, None, None


def _is_held(held: set[int], name: str, parameter: nn.Parameter) -> bool:
    return id(parameter) in held


def model_of(optimizer: Optimizer, models: Sequence[nn.Module]) -> nn.Module | None:
    """The model whose parameters an optimizer holds, which may be of one;
    None if it holds parameters of none of them."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    found = [
        model for model in models if any(id(parameter) in held for parameter in model.parameters())
    ]
    if len(found) > 1:
        raise zf.errors.StateError(
            "The states of an optimizer that steps several models cannot be "
            "saved by the names of one.",
            models=", ".join(type(model).__name__ for model in found),
            fix="an optimizer for each model; or one module of both: nn.ModuleDict({'actor': "
            "actor, 'critic': critic})",
        )
    return found[0] if found else None
