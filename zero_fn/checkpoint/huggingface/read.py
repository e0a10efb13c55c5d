"""`load_pretrained`: reads folders of safetensors, as Hugging Face has them, straight into shards.

folder/model.safetensors                  all tensors; or
folder/model-00001-of-00003.safetensors   some of the tensors, and
folder/model.safetensors.index.json       which file has which tensor
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zero_fn.checkpoint.agreement import RankMeeting, failure_of
from zero_fn.checkpoint.format.contents import Contents
from zero_fn.checkpoint.format.files import (
    StoredBox,
    TensorReader,
    damaged,
    disk,
    read_header,
    require_form,
    understood,
)
from zero_fn.checkpoint.format.folders import MANIFEST
from zero_fn.checkpoint.huggingface.in_place import leave_in_files, open_files, require_readable
from zero_fn.checkpoint.live.load_plan import LoadPlan
from zero_fn.checkpoint.live.match import match_model
from zero_fn.checkpoint.live.tensors import ModelTensors
from zero_fn.checkpoint.loading import LOADING, Rename, fill_on_all_ranks, renamed_by
from zero_fn.checkpoint.saving import wait_for_saving
from zero_fn.errors import CheckpointError
from zero_fn.runtime.slot import slot_of
from zero_fn.transforms.materialize import allocate, device_for, require_ways
from zero_fn.values.box import whole_box
from zero_fn.values.dtensors import local_of
from zero_fn.values.dtypes import DTYPES_IN_FILES

__all__ = [
    "INDEX",
    "WEIGHTS",
    "load_pretrained",
    "packed",
    "rewrite_index",
    "weights_name",
    "write_index",
]

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def load_pretrained(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    strict: bool = True,
    rename: Rename = None,
    device: torch.device | str | None = None,
    copy: bool = True,
) -> None:
    """Reads a folder of safetensors, such as Hugging Face has, into a model of any stage and tier.

    All ranks call it.

        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        model = zf.shard_params(model, mesh["dp"])
        zf.load_pretrained(model, "llama-3-8b")

    Each rank reads only the elements of its shards, through a buffer of 64 MiB at most. A model
    on `meta` gets memory for its shards; buffers that the files do not have, such as the
    frequencies of rotary embeddings, are computed by their modules, as in `materialize`.
    Floating-point values are rounded to the dtype that a parameter rests in. The files need one
    of the names of a tied parameter.

    A model whose files have other names than its parameters (experts of Mixtral, which transformers
    stacks) is loaded by `from_pretrained` inside `zero_fn.integrations.transformers.placed`.

    With `copy=False` parameters that would be copied to another tier stay in the files, where each
    use reads them: for inference with a model that memory does not hold, without a second copy of
    it on the disk.

        model = zf.offload(model.requires_grad_(False), params=zf.nvme("/local_nvme"))
        zf.load_pretrained(model, "llama-3-8b", copy=False)

    Communicates three messages of 640 bytes from each rank to rank 0, and three back; where ranks
    have parameters of different names, a fourth of a byte for each tensor.

    Args:
        model: Any module, transformed or not; what is on `meta` must be
            transformed. Changed in place.
        folder: A folder of safetensors, on a disk that all ranks see; or one such file.
        strict: Whether each tensor must be in both, the files and the model. Without, on
            `meta`, what the files lack is drawn by the module's own initialisation. Shapes
            must always agree.
        rename: Names in the model for names in the files: regular expressions and their
            replacements, or a function.
        device: The device on which parameters and buffers on `meta` get memory; None: that of the
            mesh, or without a mesh the CPU.
        copy: Whether parameters that rest in another tier are copied there. Without, they are on
            `meta` before, not trained, and in the dtype of the files; the files stay as they are as
            long as the model is used. A parameter of which a rank owns rows is read by rows. What
            is edited in place, or stepped, is refused.

    Raises:
        CheckpointError: There are no such files, one is damaged, they do not fit, or with
            `copy=False` cannot be read in place; lists all that does not. Raised on every rank, and
            nothing has changed, unless the message says so.
        MeshError: `device` is another one than that of the mesh.
        StateError: Something on `meta` is neither in the files nor initialised by its module.
        StorageError: The disk refused. Raised on every rank.
        DisagreementError: Ranks were given different arguments.
        LostRankError: A rank has ended, or did not call `load_pretrained`.
    """
    wait_for_saving()
    meeting, path = RankMeeting(), Path(os.path.abspath(folder))
    named = ModelTensors()

    def prepare() -> None:
        named.add(model, None, on_meta=True)
        _require_transformed(model)

    failure = failure_of(prepare)
    names = [(held.name, held.place.shape) for held in named.held_tensors]
    agreed = meeting.agree(
        LOADING, failure, same=(str(path), strict, copy, "pretrained"), same_names=names
    )
    plan = LoadPlan(named, model, rounds=True)

    sources: list[Contents] = []

    def match() -> Contents:
        source = files_of(path, renamed_by(rename), _unsaved(model))
        match_model(plan, source, is_strict=strict)
        if not plan.wrong:
            require_ways(model, _is_filled_by(plan))
            if not copy:
                require_readable(model, plan, source, device_for(model, device).type)
        sources.append(source)
        return source

    def give_memory() -> None:
        if any(held.local is not None and held.local.is_meta for held in named.held_tensors):
            if not copy:
                open_files(model)
            allocate(model, device, _is_filled_by(plan))
            there = ModelTensors()
            there.add(model, None)
            plan.follow(there)
            if not copy:
                plan.named = there
                leave_in_files(model, plan, sources[0])

    fill_on_all_ranks(
        meeting,
        plan,
        match,
        give_memory,
        have_same_names=agreed.have_same_names,
        is_strict=strict,
        verifies=False,
    )


def _is_filled_by(plan: LoadPlan) -> Callable[[Tensor], bool]:
    read = {held.name for _, held in plan.todo}
    known = plan.named.parameters
    return lambda tensor: id(tensor) in known and known[id(tensor)].name in read


def _unsaved(model: nn.Module) -> set[str]:
    """Names of non-persistent buffers: older files may have them, and no state_dict has."""
    return {
        f"{name}.{attribute}".lstrip(".")
        for name, child in model.named_modules()
        for attribute in child._non_persistent_buffers_set
    }


def _require_transformed(model: nn.Module) -> None:
    """Requires that parameters on `meta` were transformed: their units give them memory."""
    for name, parameter in model.named_parameters():
        if local_of(parameter).is_meta and slot_of(parameter) is None:
            raise CheckpointError(
                f"{name} is on meta, and no transform has said where it is to rest.",
                fix='zf.shard_params(model, mesh["dp"]), or zf.replicate, before; '
                'or model.to_empty(device="cpu")',
            )


def files_of(path: Path, rename: Callable[[str], str], ignored: set[str]) -> Contents:
    """Reads the headers of safetensors files."""
    source = Contents(path, rename)
    for file in _paths_of(path):
        begin, nbytes, table = read_header(file)
        opened = partial(TensorReader, file, begin, nbytes)
        for name, entry in table.items():
            if rename(name) in ignored:
                continue
            if ("model", rename(name)) in source.pieces:
                raise damaged(file, tensor=name, why="two tensors have one name")
            shape, offset = tuple(entry["shape"]), entry["data_offsets"][0]
            piece = StoredBox(
                name, DTYPES_IN_FILES[entry["dtype"]], shape, whole_box(shape), offset, open=opened
            )
            source.add_piece("model", name, "", piece)
    return source


def _paths_of(path: Path) -> list[Path]:
    """The safetensors files of a folder that make up its model."""
    if path.is_file():
        return [path]
    with disk(path, "Looking for safetensors"):
        inside = sorted(path.iterdir())
    indices = [file for file in inside if file.name.endswith(".safetensors.index.json")]
    if path / WEIGHTS in inside:
        return [path / WEIGHTS]
    if indices:
        index = path / INDEX if path / INDEX in indices else indices[0]
        with disk(index, "Reading a checkpoint"):
            text = index.read_bytes()
        with understood(index, "it is no index"):
            said = json.loads(text)
            require_form(said, {"weight_map": {str: str}})
            names = set(said["weight_map"].values())
            if any("\0" in name for name in names):
                raise ValueError("it names no files")
            return sorted(path / Path(name).name for name in names)
    found = [file for file in inside if file.suffix == ".safetensors"]
    if not found:
        is_ours = path / MANIFEST in inside or any((file / MANIFEST).exists() for file in inside)
        raise CheckpointError(
            "There are no safetensors in this folder.",
            folder=path,
            found=", ".join(file.name for file in inside[:8]) or "nothing",
            fix="zf.load(folder, model): zf.save has written it"
            if is_ours
            else (
                "model.save_pretrained(folder, safe_serialization=True), "
                "where the files are of pickle"
            ),
        )
    return found


def packed(pieces: Sequence[StoredBox], most: int) -> list[list[StoredBox]]:
    """Deals tensors in their order into files, each of at most `most` bytes or with one tensor."""
    files: list[list[StoredBox]] = [[]]
    room = most
    for piece in pieces:
        if piece.nbytes > room and files[-1]:
            files.append([])
            room = most
        room -= piece.nbytes
        files[-1].append(piece)
    return files


def weights_name(number: int, count: int) -> str:
    """The name of one of several files."""
    return WEIGHTS if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def write_index(folder: Path, files: list[list[StoredBox]]) -> None:
    """Writes the index, which says which file has which tensor, where there are several files."""
    if len(files) == 1:
        return
    total = sum(piece.nbytes for each in files for piece in each)
    homes = {
        piece.name: weights_name(number, len(files))
        for number, each in enumerate(files)
        for piece in each
    }
    rewrite_index(folder, {"metadata": {"total_size": total}, "weight_map": homes})


def rewrite_index(folder: Path, index: dict[str, Any]) -> None:
    """Writes an index, and makes sure that it is on the disk."""
    with disk(folder, "Writing an index"), (folder / INDEX).open("w") as file:
        json.dump(index, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
