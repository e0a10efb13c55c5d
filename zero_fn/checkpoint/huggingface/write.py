"""`save_pretrained`: writes shards as a folder that `from_pretrained` loads, a tensor at a time.

begin    ranks agree: all were given the same arguments and have tensors of the same names; rank 0
         makes a hidden folder inside the folder
write    tensors are gathered by `zf.weights`; each is written by the rank that writes its file
commit   ranks agree; rank 0 moves the files into the folder, last the file that readers look for
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zero_fn.checkpoint.agreement import RankMeeting, failure_of
from zero_fn.checkpoint.format.files import StoredBox, require_dtype, sync_folder
from zero_fn.checkpoint.format.folders import Draft
from zero_fn.checkpoint.format.writer import Writer
from zero_fn.checkpoint.huggingface.own_names import require_own_names
from zero_fn.checkpoint.huggingface.read import (
    INDEX,
    WEIGHTS,
    packed,
    rewrite_index,
    weights_name,
    write_index,
)
from zero_fn.checkpoint.live.tensors import ModelTensors
from zero_fn.checkpoint.saving import SAVING, wait_for_saving
from zero_fn.errors import CheckpointError
from zero_fn.values.tiers import nbytes_of_text
from zero_fn.weights import weights

__all__ = ["export", "save_pretrained"]

Convert = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
"""Given a tensor of the model by its name, returns the tensors that files have
in its place, by their names."""


def save_pretrained(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard: int | str = "5GB",
) -> None:
    """Writes a folder of safetensors that `from_pretrained` of Hugging Face loads.

    All ranks call it.

        zf.save_pretrained(model, "llama-3-8b-tuned", dtype=torch.bfloat16)

    Parameters and persistent buffers are gathered one after the other, as by `zf.weights`, so no
    rank holds two of them whole. The ranks write the files in turn. Tied parameters are
    written once. The config and generation config of a model of transformers are written, too.
    Files are written into a hidden folder and moved into place when they are on the disk, last the
    one that readers look for: a save that fails, or is killed, leaves no model.

    Communicates what `zf.weights` does, a broadcast of what is not sharded, two messages of 640
    bytes from each rank to rank 0, and two back.

    Args:
        model: Any module, transformed or not, in memory or in tiers.
        folder: The folder to write, on a disk that all ranks share.
            It may exist, without a model in it.
        dtype: The dtype of floating-point tensors in the files; None: that in which they rest.
        max_shard: The most bytes of a file, as a number or as text;
            a larger tensor gets a file of its own.

    Raises:
        CheckpointError: There is a model in the folder, ranks have tensors of different names, or
            something cannot be saved. Raised on every rank.
        StorageError: A disk refused, on this rank or another.
            Raised on every rank; there is no model.
        TierError: `max_shard` is no size.
        DisagreementError: Ranks were given different arguments.
        LostRankError: A rank has ended, or did not call `save_pretrained`.
    """
    export(model, folder, dtype=dtype, max_shard=max_shard)


def export(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard: int | str = "5GB",
    convert: Convert | None = None,
    replaces: bool = False,
) -> None:
    """`save_pretrained`, for a Trainer: with `replaces`, the model takes the place of one in the
    folder at once, so a reader finds one of the two at any moment."""
    wait_for_saving()
    meeting, target = RankMeeting(), Path(os.path.abspath(folder))
    draft, plan = _WeightsDraft(target, replaces=replaces), _Export(dtype, convert)
    failure = failure_of(lambda: plan.add(model, nbytes_of_text(max_shard, "max_shard")))
    names = [[piece.name, piece.dtype, piece.shape] for pieces in plan.files for piece in pieces]
    same = (str(target), dtype, max_shard, replaces)
    try:
        agreed = meeting.agree(SAVING, failure, draft.make, same=same, same_names=names)
        if not agreed.have_same_names:
            raise CheckpointError(
                "Ranks have tensors of different names, and no rank could write a file of all.",
                why="stages of a pipeline, or experts under names of their own",
                fix="zf.save(folder, model), which each rank writes for itself",
            )
        failure = _write(model, plan, draft, meeting, agreed.text)
        meeting.agree(SAVING, failure, draft.commit, waits_for_disks=True)
    except BaseException:
        draft.drop()
        raise


class _WeightsDraft(Draft):
    """A hidden folder whose files are moved into the folder that it is in."""

    def __init__(self, folder: Path, *, replaces: bool) -> None:
        super().__init__(folder / WEIGHTS, kinds=())
        self._folder = folder
        self._replaces = replaces

    def _require_free(self) -> None:
        found = [name for name in (WEIGHTS, INDEX) if os.path.lexists(self._folder / name)]
        if found and not self._replaces:
            raise CheckpointError(
                "There is a model in this folder already.",
                path=self._folder / found[0],
                why="a save that is killed would leave a mixture of both",
                fix="save to another folder, or remove it before",
            )

    def _rename(self) -> None:
        """Moves the files into the folder.

        A reader finds one whole model at any moment: the old one until a single file gets its
        name, the new one from then on. Readers take the file of all weights, and if there is
        none, the index.
        """
        self._require_free()
        made = set(os.listdir(self.path))
        names = {name: name for name in made - {WEIGHTS, INDEX}}
        if INDEX in made:
            names = self._beside_those_in_use(names)
        for name, its_name in names.items():
            os.replace(self.path / name, self._folder / its_name)
        sync_folder(self._folder)
        decides = INDEX if INDEX in made else WEIGHTS
        os.replace(self.path / decides, self._folder / decides)
        sync_folder(self._folder)
        for file in (
            self._folder / WEIGHTS,
            self._folder / INDEX,
            *self._folder.glob("model-*-of-*.safetensors"),
        ):
            if file.name not in (decides, *names.values()):
                file.unlink(missing_ok=True)
        self.path.rmdir()

    def _undo(self) -> None:
        """Does nothing: the new model is there, and the files of the old one are gone."""

    def _beside_those_in_use(self, names: dict[str, str]) -> dict[str, str]:
        """Gives the new files names that the old index does not have."""
        is_read = (self._folder / INDEX).exists() and not (self._folder / WEIGHTS).exists()
        used = set(os.listdir(self._folder)) if is_read else set()
        if not any(name.startswith("model-") and name in used for name in names):
            return names
        number = next(
            number
            for number in count(1)
            if not any(name.startswith(f"model-{number}-") for name in used)
        )
        names = {name: re.sub("^model-", f"model-{number}-", name) for name in names}
        index = json.loads((self.path / INDEX).read_bytes())
        index["weight_map"] = {name: names[file] for name, file in index["weight_map"].items()}
        (self.path / INDEX).unlink()
        rewrite_index(self.path, index)
        return names


@dataclass
class _Export:
    """What is written."""

    dtype: torch.dtype | None
    convert: Convert | None
    unsharded: set[str] = field(default_factory=set)  # names of tensors that rank 0 decides
    files: list[list[StoredBox]] = field(default_factory=list)

    def add(self, model: nn.Module, most: int) -> None:
        """Adds the tensors of a model, in files of at most `most` bytes."""
        require_own_names(model)
        named = ModelTensors()
        named.add(model, None)
        tensors = (*model.parameters(), *model.buffers())
        sharded = {id(tensor) for tensor in tensors if isinstance(tensor, DTensor)}
        held = {each.name: each for each in named.held_tensors}  # tiles of a tensor have one name
        self.unsharded = {each.name for key, each in named.parameters.items() if key not in sharded}
        pieces: list[StoredBox] = []
        for each in held.values():
            whole = torch.empty(each.place.shape, dtype=each.dtype, device="meta")
            for name, tensor in self.in_files(each.name, whole).items():
                require_dtype(name, tensor.dtype)
                pieces.append(StoredBox.of_whole(name, tensor))
        self.files = packed(pieces, most)

    def in_files(self, name: str, whole: Tensor) -> Mapping[str, Tensor]:
        """What files have in place of a tensor of the model."""
        whole = (
            whole.to(self.dtype) if self.dtype is not None and whole.is_floating_point() else whole
        )
        return {name: whole} if self.convert is None else self.convert({name: whole})


def _write(
    model: nn.Module, plan: _Export, draft: Draft, meeting: RankMeeting, made: str
) -> Exception | None:
    """Takes part in every gather, and writes the files of this rank.

    Returns what went wrong on this rank.
    """
    writer = Writer(draft.path)
    own: dict[str, StoredBox] = {}  # what this rank writes, by the name in files
    failures: list[Exception | None] = []

    def begin() -> None:
        for number in range(meeting.rank, len(plan.files), meeting.size):
            draft.require(made)
            writer.make("model", weights_name(number, len(plan.files)), plan.files[number])
            own.update({piece.name: piece for piece in plan.files[number]})
        if meeting.rank == 0:
            _write_beside(model, plan, draft.path)

    def append(name: str, whole: Tensor) -> None:
        if plan.convert is None and name not in own:
            return
        for stored, values in plan.in_files(name, whole).items():
            if stored in own:
                writer.append(own[stored], values)

    def gather() -> None:
        with weights(model, names=None, dtype=plan.dtype, bucket=1) as items:
            for name, whole in items:
                whole = meeting.from_first(whole) if name in plan.unsharded else whole
                if not any(failures):  # others gather on, and are told at the end
                    failures.append(failure_of(partial(append, name, whole)))
                del whole  # before the next one is read

    failures.append(failure_of(begin))
    failures.append(failure_of(gather))
    if not any(failures):
        failures.append(failure_of(writer.finish))
    writer.close()
    return next(filter(None, failures), None)


def _write_beside(model: nn.Module, plan: _Export, folder: Path) -> None:
    write_index(folder, plan.files)
    config: Any = getattr(model, "config", None)
    if hasattr(config, "save_pretrained"):
        config = copy.deepcopy(config)
        config.architectures = [type(model).__name__]
        config.dtype = plan.dtype or next(
            (p.dtype for p in model.parameters() if p.is_floating_point()), None
        )
        config.save_pretrained(folder)
        generation: Any = getattr(model, "generation_config", None)
        if hasattr(generation, "save_pretrained"):
            generation.save_pretrained(folder)
