"""Folders of torch.distributed.checkpoint: those that FSDP2 and stock `dcp.save` write.

    step-120/
        .metadata          a pickle: names, shapes and boxes, and in which bytes of
                           which file each box is
        __0_0.distcp       of rank 0: one archive of `torch.save` behind the other,
                           each a box or a value

A name is a path in what was saved: `("model", "blocks.0.weight")`. What has `param_groups` is an
optimizer, as `get_state_dict` gives it, flattened or not. The tensors beside it are the model, the
rest is `extra`.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zero_fn.checkpoint.format.files import StoredBox, TensorReader, damaged, understood
from zero_fn.checkpoint.others.torch_files import (
    Foreign,
    Stub,
    TensorInFile,
    opened_pickle,
    read_torch_file,
    refused,
)
from zero_fn.errors import CheckpointError
from zero_fn.values.box import Box

__all__ = ["METADATA", "DcpFolder"]

METADATA = ".metadata"

KeyPath = tuple[Any, ...]


class _Entry(NamedTuple):
    """Bytes of a file in which `torch.save` has written a box or a value."""

    path: Path
    offset: int
    nbytes: int

    def value(self) -> Any:
        return read_torch_file(*self)


_STUBS = (
    *(("torch.distributed.checkpoint.metadata", name) for name in (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
)  # fmt: skip


class MetadataUnpickler(pickle._Unpickler):
    """Reads `.metadata`, in which nothing is called but what stands in `find_class`.

    The unpickler in C takes 16 bytes for each number below the one by which a pickle remembers a
    value: one flipped bit took 60 GiB.
    """

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _STUBS:
            return Stub
        if module == "torch" and isinstance(found := vars(torch).get(name), torch.dtype):
            return found
        known = {
            ("torch", "Size"): tuple,
            ("collections", "OrderedDict"): OrderedDict,
            ("builtins", "set"): set,
        }
        if (module, name) in known:
            return known[module, name]
        raise refused(Path(METADATA), f"{module}.{name}")


class DcpFolder(Foreign):
    """A checkpoint that torch.distributed.checkpoint has written."""

    def __init__(self, path: Path, rename: Callable[[str], str], *, has_states: bool) -> None:
        super().__init__(path, rename, has_states=has_states)
        with understood(path / METADATA, "not what torch writes"):
            with opened_pickle(path / METADATA) as file:
                said = MetadataUnpickler(file).load().state
            stored = ((index.state, info.state) for index, info in said["storage_data"].items())
            self._entries = {
                (index["fqn"], tuple(index.get("offset") or ())): self._entry(info)
                for index, info in stored
            }
            # The offsets have no checksum.
            for one, other in pairwise(sorted(self._entries.values())):
                if one.path == other.path and one.offset + one.nbytes > other.offset:
                    raise ValueError(f"entries of {one.path.name} overlap at byte {other.offset}")
            self._tensors: dict[str, dict[str, Any]] = {
                n: each.state for n, each in said["state_dict_metadata"].items()
            }
            # Nothing in `.metadata` has a checksum, but all of it names the same things,
            # and a name is its path, joined.
            paths = {name: tuple(path) for name, path in (said["planner_data"] or {}).items()}
            paths = paths or {name: (name,) for name in self._tensors}  # it was saved without paths
            names = {name for name, _ in self._entries}
            are_alike = paths.keys() == self._tensors.keys() == names
            if not are_alike or len(self._entries) != len(said["storage_data"]):
                raise ValueError("its tables have different names")
            if any(".".join(map(str, path)) != name for name, path in paths.items()):
                raise ValueError("a name is not its path")
            self._list({name: paths[name] for name in self._tensors})

    def _entry(self, info: dict[str, Any]) -> _Entry:
        file = info["relative_path"]
        if info.get("transform_descriptors") or "/" in file:
            raise CheckpointError(
                "This folder of torch.distributed.checkpoint was written through extensions, "
                "or into other folders.",
                file=self.path / METADATA,
                fix="save it with dcp.FileSystemWriter, without extensions",
            )
        return _Entry(self.path / file, info["offset"], info["length"])

    def _list(self, paths: dict[str, KeyPath]) -> None:
        """Finds what each name is: of the model, a state or an option
        of an optimizer, or `extra`."""
        ends = {path[: at + 1] for path in paths.values() for at in range(len(path))}
        optimizers = {path[:-1] for path in ends if _begins(path[-1], "param_groups")}
        roots = {name: _root(path, optimizers) for name, path in paths.items()}
        model = _model_root(
            path[:-1] for name, path in paths.items() if self._tensors[name] and roots[name] is None
        )
        options: dict[str | int, dict[str, Any]] = {}  # by parameter, or by the number of a group
        for name, path in paths.items():
            root = roots[name]
            if root is not None and self._has_states:
                self._add_state_or_option(path[len(root) :], name, options)
            elif root is None and "chunks" in self._tensors[name] and path[: len(model)] == model:
                self._add_boxes("model", ".".join(map(str, path[len(model) :])), "", name)
            elif root is None:
                self._add_extra(path, name)
        for owner, each in options.items():
            self.add_group(each.pop("params") if isinstance(owner, int) else [owner], each)

    def _add_state_or_option(
        self, path: KeyPath, name: str, options: dict[str | int, dict[str, Any]]
    ) -> None:
        tail = ".".join(map(str, path))
        parameter, _, state = tail.partition(".")[2].rpartition(".")
        if tail.startswith("state.") and self._tensors[name]:
            self._add_boxes("optimizer", parameter, state, name)
        elif tail.startswith("state."):
            self.add_state(parameter, state, self._entries[name, ()].value())
        elif path[0] == "param_groups" and isinstance(path[1], int):
            options.setdefault(path[1], {})[path[2]] = self._entries[name, ()].value()
        else:  # flattened: of one parameter
            options.setdefault(parameter, {})[state] = self._entries[name, ()].value()

    def _add_boxes(self, kind: str, parameter: str, state: str, name: str) -> None:
        said = self._tensors[name]
        dtype, shape = said["properties"].state[0], tuple(said["size"])
        for chunk in said["chunks"]:
            box = Box(tuple(chunk.state["offsets"]), tuple(chunk.state["sizes"]))
            if not isinstance(dtype, torch.dtype) or box.meet(box) not in (box, None):
                raise ValueError(f"{name} has no dtype, or no box")
            opened = partial(self._opened_box, self._entries[name, box.starts], dtype, box.sizes)
            self.add_box(kind, state, StoredBox(parameter, dtype, shape, box, open=opened))

    def _add_extra(self, path: KeyPath, name: str) -> None:
        """Adds a value beside the model and the optimizer; it is read when it is asked for."""
        inside: Any = self.extra
        for step in path[:-1]:
            inside = inside.setdefault(step, {})
        if self._tensors[name]:
            key = ".".join(map(str, path))
            self._add_boxes("extra", key, "", name)
            inside[path[-1]] = ("extra", key)
        else:
            inside[path[-1]] = self._entries[name, ()]

    def value(self, rank: int, encoded: Any) -> Any:
        """A value as it was saved."""
        if isinstance(encoded, _Entry):
            return super().value(rank, encoded.value())
        if isinstance(encoded, tuple) and encoded in self.pieces:
            return self.whole(encoded)
        if isinstance(encoded, dict) and encoded and all(isinstance(key, int) for key in encoded):
            return [self.value(rank, encoded[key]) for key in sorted(encoded)]
        return super().value(rank, encoded)

    def _opened_box(
        self, entry: _Entry, dtype: torch.dtype, sizes: tuple[int, ...]
    ) -> TensorReader:
        """Opens a box, once its bytes are found to be those that were written."""
        found = entry.value()
        if not isinstance(found, TensorInFile) or (found.dtype, found.shape) != (dtype, sizes):
            raise damaged(
                entry.path,
                where=f"from byte {entry.offset} on",
                why=f"there is no {list(sizes)} of {dtype}",
            )
        return self.open_tensor(found)


def _begins(step: Any, word: str) -> bool:
    return isinstance(step, str) and (step == word or step.startswith(f"{word}."))


def _root(path: KeyPath, optimizers: set[KeyPath]) -> KeyPath | None:
    """The path of the optimizer that a path leads into; None if it leads into none."""
    for at, step in enumerate(path):
        if path[:at] in optimizers and (_begins(step, "state") or _begins(step, "param_groups")):
            return path[:at]
    return None


def _model_root(found: Iterable[KeyPath]) -> KeyPath:
    """The path of the model, of the paths that have tensors:
    one that ends in "model", or the shortest."""
    # Of two paths as short, the one that was saved first is taken, on every rank.
    roots = sorted(dict.fromkeys(found), key=len)
    return next((root for root in roots if root[-1:] == ("model",)), roots[0] if roots else ())
