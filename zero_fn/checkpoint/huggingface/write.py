"""`save_pretrained`: writes shards as a folder that `from_pretrained` loads, a tensor at a time.

begin    ranks agree: all were given the same arguments and have tensors of the same names; rank 0 makes a hidden folder
         inside the folder
write    tensor after tensor is gathered, and written by the rank that writes its file
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

from zero_fn.checkpoint.format.files import BUFFER_NBYTES, StoredBox, TensorFile, require_dtype, sync_folder
from zero_fn.checkpoint.format.folders import Draft
from zero_fn.checkpoint.huggingface.read import INDEX, WEIGHTS, packed, rewrite_index, weights_name, write_index
from zero_fn.checkpoint.live.held_tensors import ModelTensors
from zero_fn.checkpoint.rank_meeting import RankMeeting, failure_of
from zero_fn.checkpoint.saving import SAVING, wait_for_saving
from zero_fn.errors import CheckpointError
from zero_fn.tiers.tier_tensor import in_memory
from zero_fn.values.box import whole_box
from zero_fn.values.tiers import nbytes_of_text

__all__ = ["export", "require_own_names", "save_pretrained"]

Convert = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
"""Given a tensor of the model by its name, returns the tensors that files have in its place, by their names."""


def save_pretrained(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard: int | str = "5GB",
) -> None:
    """Writes a folder of safetensors that `from_pretrained` of Hugging Face loads. All ranks call it.

        zf.save_pretrained(model, "llama-3-8b-tuned", dtype=torch.bfloat16)

    Parameters and persistent buffers are gathered one after the other, so no rank holds two of them whole. The ranks write
    the files in turn. Tied parameters are written once. The config and generation config of a model of transformers are
    written, too. Files are written into a hidden folder and moved into place when they are on the disk, last the one that
    readers look for: a save that fails, or is killed, leaves no model.

    Communicates an all-gather of each parameter, two messages of 640 bytes from each rank to rank 0, and two back.

    Args:
        model: Any module, transformed or not, in memory or in tiers.
        folder: The folder to write, on a disk that all ranks share. It may exist, without a model in it.
        dtype: The dtype of floating-point tensors in the files; None: that in which they rest.
        max_shard: The most bytes of a file, as a number or as text; a larger tensor gets a file of its own.

    Raises:
        CheckpointError: There is a model in the folder, ranks have tensors of different names, or something cannot be saved.
            Raised on every rank.
        StorageError: A disk refused, on this rank or another. Raised on every rank; there is no model.
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
    """`save_pretrained`, for a Trainer: with `replaces`, the model takes the place of one in the folder at once, so a reader
    finds one of the two at any moment."""
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
        """Moves the files into the folder. A reader finds one whole model at any moment: the old one until a single file gets
        its name, the new one from then on. Readers take the file of all weights, and if there is none, the index."""
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
        for file in (self._folder / WEIGHTS, self._folder / INDEX, *self._folder.glob("model-*-of-*.safetensors")):
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
        number = next(number for number in count(1) if not any(name.startswith(f"model-{number}-") for name in used))
        names = {name: re.sub("^model-", f"model-{number}-", name) for name in names}
        index = json.loads((self.path / INDEX).read_bytes())
        index["weight_map"] = {name: names[file] for name, file in index["weight_map"].items()}
        (self.path / INDEX).unlink()
        rewrite_index(self.path, index)
        return names


def require_own_names(model: nn.Module) -> None:
    """Refuses models whose tensors have other names in files of transformers than in the model."""
    if hasattr(model, "peft_config"):
        raise CheckpointError(
            "A model with adapters is not what from_pretrained loads.",
            model=type(model).__name__,
            fix="ZeroTrainer.save_model() writes adapters; or merge them before the transform: "
            "model.merge_and_unload()",
        )
    if getattr(model, "is_quantized", False):
        raise CheckpointError(
            "A quantised model is not saved in a way that from_pretrained loads.",
            model=type(model).__name__,
            why="in files of transformers, a quantised weight and what it was quantised with have names of their own",
            fix="zf.save(folder, model); or, before the transform, model.save_pretrained(folder) on rank 0",
        )


@dataclass
class _Export:
    """What is written."""

    dtype: torch.dtype | None
    convert: Convert | None
    names: dict[str, list[Tensor]] = field(default_factory=dict)  # in order, with the tiles of each
    files: list[list[StoredBox]] = field(default_factory=list)

    def add(self, model: nn.Module, most: int) -> None:
        """Adds the tensors of a model, in files of at most `most` bytes."""
        require_own_names(model)
        named = ModelTensors()
        named.add(model, None)
        by_id = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        pieces: list[StoredBox] = []
        for key, held in named.parameters.items():
            parts = self.names.setdefault(held.name, [])
            parts.append(by_id[key])
            if len(parts) == 1:
                whole = torch.empty(held.place.shape, dtype=held.dtype, device="meta")
                for name, tensor in self.in_files(held.name, whole).items():
                    require_dtype(name, tensor.dtype)
                    pieces.append(StoredBox(name, tensor.dtype, tuple(tensor.shape), whole_box(tensor.shape)))
        self.files = packed(pieces, most)

    def in_files(self, name: str, whole: Tensor) -> Mapping[str, Tensor]:
        """What files have in place of a tensor of the model."""
        whole = whole.to(self.dtype) if self.dtype is not None and whole.is_floating_point() else whole
        return {name: whole} if self.convert is None else self.convert({name: whole})


def _write(model: nn.Module, plan: _Export, draft: Draft, meeting: RankMeeting, made: str) -> Exception | None:
    """Takes part in every gather, and writes the files of this rank. Returns what went wrong on this rank."""
    files: list[TensorFile] = []
    own: dict[str, tuple[StoredBox, TensorFile]] = {}  # what this rank writes, by the name in files

    def begin() -> None:
        for number in range(meeting.rank, len(plan.files), meeting.size):
            draft.require(made)
            files.append(TensorFile(draft.path / weights_name(number, len(plan.files)), plan.files[number], ""))
            own.update({piece.name: (piece, files[-1]) for piece in plan.files[number]})
        if meeting.rank == 0:
            _write_beside(model, plan, draft.path)

    def append(name: str, wholes: list[Tensor]) -> None:
        if plan.convert is None and name not in own:
            return
        whole = wholes[0] if len(wholes) == 1 else torch.cat(wholes)
        for stored, values in plan.in_files(name, whole).items():
            if stored in own:
                _append(*own[stored], values)

    failure = failure_of(begin)
    for name, parts in plan.names.items():
        wholes: list[Tensor] = []
        lost = failure_of(partial(_gather, parts, meeting, wholes))
        if lost is not None:  # a tier failed, on every rank of the mesh, or a rank is lost
            failure = failure or lost
            break
        failure = failure or failure_of(partial(append, name, wholes))
    for file in files:
        failure = failure or failure_of(file.finish)
        file.close()
    return failure


def _gather(parts: list[Tensor], meeting: RankMeeting, wholes: list[Tensor]) -> None:
    """Adds the parts of a tensor, whole, to `wholes`. What is not sharded is that of rank 0."""
    for part in parts:
        if isinstance(part, DTensor):
            wholes.append(in_memory(part.full_tensor()))
        else:
            wholes.append(meeting.from_first(in_memory(part)))


def _append(piece: StoredBox, file: TensorFile, values: Tensor) -> None:
    flat = values.reshape(-1)
    step = BUFFER_NBYTES // values.element_size()
    for first in range(0, flat.numel(), step):
        file.append(piece, flat[first : first + step].cpu())


def _write_beside(model: nn.Module, plan: _Export, folder: Path) -> None:
    write_index(folder, plan.files)
    config: Any = getattr(model, "config", None)
    if hasattr(config, "save_pretrained"):
        config = copy.deepcopy(config)
        config.architectures = [type(model).__name__]
        config.dtype = plan.dtype or next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
        config.save_pretrained(folder)
        generation: Any = getattr(model, "generation_config", None)
        if hasattr(generation, "save_pretrained"):
            generation.save_pretrained(folder)
