"""Folders of torch.distributed.checkpoint: those that FSDP2 and stock `dcp.save` write.

    step-120/
        .metadata          a pickle: names, shapes and boxes, and in which bytes of which file each is
        __0_0.distcp       of rank 0: one archive of `torch.save` behind the other, each a box or a value

A name is a path in what was saved: `("model", "blocks.0.weight")`. What has `param_groups` is an optimizer, as
`get_state_dict` gives it, flattened or not. The tensors beside it are the model, the rest is `extra`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zero_fn.checkpoint.boxes import Box
from zero_fn.checkpoint.files import StoredBox, TensorReader, damaged, understood
from zero_fn.checkpoint.foreign import Foreign
from zero_fn.checkpoint.pickles import PlacedTensor, read_lone_pickle, read_pickle
from zero_fn.errors import CheckpointError

__all__ = ["METADATA", "DcpFolder"]

METADATA = ".metadata"

KeyPath = tuple[Any, ...]


class _Archive(NamedTuple):
    """Bytes of a file that `torch.save` has written."""

    path: Path
    offset: int
    nbytes: int


class DcpFolder(Foreign):
    """A checkpoint that torch.distributed.checkpoint has written."""

    def __init__(self, path: Path, rename: Callable[[str], str], *, has_states: bool) -> None:
        """Reads what is in it, but for the elements of tensors.

        Args:
            path: The folder.
            rename: What names in the checkpoint are in the model.
            has_states: Whether states of the optimizer are wanted.

        Raises:
            CheckpointError: It is damaged, or of a kind that is not read.
            StorageError: The disk refused.
        """
        super().__init__(path, rename)
        with understood(path / METADATA, "it says what torch does not say"):
            self._list(read_lone_pickle(path / METADATA).state, has_states=has_states)

    def _list(self, said: dict[str, Any], *, has_states: bool) -> None:
        places = {
            (index.state["fqn"], tuple(index.state.get("offset") or ())): self._archive_of(info.state)
            for index, info in said["storage_data"].items()
        }
        paths: dict[str, KeyPath] = said.get("planner_data") or {}
        found = {name: tuple(paths.get(name, (name,))) for name in said["state_dict_metadata"]}
        ends = {path[: at + 1] for path in found.values() for at in range(len(path))}
        optimizers = {path[:-1] for path in ends if _begins(path[-1], "param_groups")}
        tensors = [path for name, path in found.items() if said["state_dict_metadata"][name].state]
        roots = {path[:-1] for path in tensors if _root(path, optimizers) is None}
        model = next(
            (root for root in sorted(roots, key=len) if root[-1:] == ("model",)), min(roots, default=(), key=len)
        )
        options: dict[str, dict[str, Any]] = {}
        groups: dict[Any, dict[str, Any]] = {}
        for name, stored in said["state_dict_metadata"].items():
            path = found[name]
            root = _root(path, optimizers)
            boxes = stored.state.get("chunks")  # None: a value
            if root is not None and has_states:
                self._list_state(path[len(root) :], name, stored, places, options, groups)
            elif root is None and boxes is not None and path[: len(model)] == model:
                self._add_boxes("model", ".".join(map(str, path[len(model) :])), "", name, stored, places)
            elif root is None:
                self._add_extra(path, name, stored, places)
        for group in groups.values():
            self.add_group(group.pop("params"), group)
        for parameter, each in options.items():
            self.add_group([parameter], each)

    def _archive_of(self, info: dict[str, Any]) -> _Archive:
        file = info["relative_path"]
        if info.get("transform_descriptors") or "/" in file:
            raise CheckpointError(
                "This folder of torch.distributed.checkpoint was written through extensions, or into other folders.",
                file=self.path / METADATA,
                fix="save it with dcp.FileSystemWriter, without extensions",
            )
        return _Archive(self.path / file, info["offset"], info["length"])

    def _list_state(
        self,
        path: KeyPath,
        name: str,
        stored: Any,
        places: dict[Any, _Archive],
        options: dict[str, dict[str, Any]],
        groups: dict[Any, dict[str, Any]],
    ) -> None:
        """A state of a parameter, or an option of a group: of all its parameters, or of one."""
        tail = ".".join(map(str, path))
        parameter, _, state = tail.partition(".")[2].rpartition(".")
        if tail.startswith("state."):
            if stored.state:
                self._add_boxes("optimizer", parameter, state, name, stored, places)
            else:
                self.add_state(parameter, state, _read(places[name, ()]))
        elif path[0] == "param_groups" and isinstance(path[1], int):
            groups.setdefault(path[1], {})[path[2]] = _read(places[name, ()])
        else:
            options.setdefault(parameter, {})[state] = _read(places[name, ()])

    def _add_boxes(
        self, kind: str, parameter: str, state: str, name: str, stored: Any, places: dict[Any, _Archive]
    ) -> None:
        dtype, shape = stored.state["properties"].state[0], tuple(stored.state["size"])
        for chunk in stored.state["chunks"]:
            box = Box(tuple(chunk.state["offsets"]), tuple(chunk.state["sizes"]))
            if not isinstance(dtype, torch.dtype) or box.meet(box) not in (box, None):
                raise ValueError(f"{name} has no dtype, or no box")
            opened = partial(self._opened_archive, places[name, box.starts], dtype, box.sizes)
            self.add_box(kind, state, StoredBox(parameter, dtype, shape, box, open=opened))

    def _add_extra(self, path: KeyPath, name: str, stored: Any, places: dict[Any, _Archive]) -> None:
        """A value beside the model and the optimizer, at its path; it is read when it is wanted."""
        inside: Any = self.extra
        for step in path[:-1]:
            inside = inside.setdefault(step, {})
        if stored.state:
            key = ".".join(map(str, path))
            self._add_boxes("extra", key, "", name, stored, places)
            inside[path[-1]] = ("extra", key)
        else:
            inside[path[-1]] = places[name, ()]

    def value(self, rank: int, encoded: Any) -> Any:
        """A value as it was saved."""
        if isinstance(encoded, _Archive):
            return super().value(rank, _read(encoded))
        if isinstance(encoded, tuple) and encoded in self.pieces:
            return self.whole(encoded)
        if isinstance(encoded, dict) and encoded and all(isinstance(key, int) for key in encoded):
            return [self.value(rank, encoded[key]) for key in sorted(encoded)]
        return super().value(rank, encoded)

    def _opened_archive(self, archive: _Archive, dtype: torch.dtype, sizes: tuple[int, ...]) -> TensorReader:
        """Opens the archive of a box, once its bytes are as they were written."""
        found = _read(archive)
        if not isinstance(found, PlacedTensor) or (found.dtype, found.shape) != (dtype, sizes):
            raise damaged(
                archive.path, where=f"from byte {archive.offset} on", why=f"there is no {list(sizes)} of {dtype}"
            )
        return self.open_tensor(found)


def _read(archive: _Archive) -> Any:
    return read_pickle(*archive)


def _begins(step: Any, word: str) -> bool:
    return isinstance(step, str) and (step == word or step.startswith(f"{word}."))


def _root(path: KeyPath, optimizers: set[KeyPath]) -> KeyPath | None:
    """Which optimizer a path leads into."""
    for at, step in enumerate(path):
        if path[:at] in optimizers and (_begins(step, "state") or _begins(step, "param_groups")):
            return path[:at]
    return None
