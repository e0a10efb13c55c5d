"""Folders of DeepSpeed: of ZeRO-1, 2 and 3, of pipelines, and universal ones.

    global_step2/                                               ZeRO-1 and 2                      ZeRO-3
        mp_rank_00_model_states.pt                              names, buffers, frozen tensors    -
        zero_pp_rank_0_mp_rank_00_model_states.pt               -                                 the same, of rank 0
        zero_pp_rank_0_mp_rank_00_optim_states.pt               parameters and moments of rank 0  the same
    latest                                                      "global_step2"

ZeRO-1 and 2 lay all parameters of a group one after the other, and cut that at the ranks. ZeRO-3 cuts each parameter at the
ranks, and lays the parts of a rank one after the other. A universal folder has a file for each parameter and state. In each
case a file holds ranges of the elements of parameters, so any rank can read them.

The stages of a pipeline have these files each, as `mp_rank_00`, `mp_rank_01`, ..., and there is a `layer_00-model_states.pt`
of each layer, of which buffers and frozen parameters are read.

[Note: the order in a group] It is that of `param_shapes`. `param_slice_mappings` says so, too, but not with
`round_robin_gradients`: DeepSpeed 0.19 then names parameters in another order than they lie in, and `ds_to_universal` gives
each the values of another.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain, product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from zero_fn.checkpoint.format.files import damaged, disk, understood
from zero_fn.checkpoint.others.torch_files import Foreign, TensorInFile, read_torch_file
from zero_fn.errors import CheckpointError

__all__ = ["DeepSpeedFolder", "deepspeed_folder"]

_MODEL = re.compile(r"(zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<part>\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(bf16_|fp16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<part>\d+)_optim_states\.pt")
_LAYER = re.compile(r"layer_(?P<layer>\d+)(-model_(?P<slice>\d+))?-model_states\.pt")
_LATEST = ("latest", "latest_universal")

_OWN = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params", "frozen_param_fragments",
    "data_sampler", "random_ltd", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config",
    "ds_version", "universal_checkpoint_info",
}  # fmt: skip
"""Entries of a file of the model that are DeepSpeed's own; the others are what the user has asked it to keep."""

Shape = tuple[int, ...]

Shapes = dict[str, Shape]

Run = tuple[int, int, int]

Fragment = tuple[int, str, int, int, int]
"""A group's number; a parameter's name, the first of its elements and how many; the first of these in the group."""


def deepspeed_folder(folder: Path) -> Path | None:
    """The folder with the files of DeepSpeed: this one, or the one that `latest` in it names; None if it has none."""
    with disk(folder, "Looking for checkpoints"):
        names = {path.name for path in folder.iterdir()}
        if any(map(_MODEL.fullmatch, names)):
            return folder
        for latest in _LATEST:
            tag = (folder / latest).read_text(errors="replace").strip() if latest in names else ""
            if tag and "/" not in tag and tag in names - {".", ".."}:
                return deepspeed_folder(folder / tag)
    return None


class _Part(NamedTuple):
    """A stage of a pipeline, or the model: what one number of `mp_rank` stands for."""

    said: dict[str, Any]  # by the first rank of ZeRO
    models: list[Path]  # by rank, where each has written one
    groups: list[Shapes]
    frozen: Shapes  # of ZeRO-3, where each rank has a part of each


class DeepSpeedFolder(Foreign):
    """A checkpoint that DeepSpeed has written."""

    def __init__(self, path: Path, rename: Callable[[str], str], *, has_states: bool) -> None:
        super().__init__(path, rename, has_states=has_states)
        self._holders: dict[str, dict[int, Shape]] = {}  # the shape of each tensor in the parts that have it
        with disk(path, "Reading a checkpoint"):
            names = sorted(found.name for found in path.iterdir())
        with understood(path, "not the layout of DeepSpeed 0.19"):
            layers = _matches(_LAYER, names)
            self._require_known(names, layers)
            self._parts = [_part_of(models) for models in self._by_part(_MODEL, names)]
            for number, part in enumerate(self._parts):
                for name, shape in chain.from_iterable(shapes.items() for shapes in (*part.groups, part.frozen)):
                    self._holders.setdefault(name, {})[number] = shape
            self.extra = {name: value for name, value in self._parts[0].said.items() if name not in _OWN}
            if "zero" in names:
                self._add_universal(path / "zero")
            elif optimizers := self._by_part(_OPTIMIZER, names):
                for number, (part, paths) in enumerate(zip(self._parts, optimizers, strict=True)):
                    self._add_optimizers(number, part.groups, paths)
            modules = [part.said["module"] or {} for part in self._parts]
            self._add_untrained(self._of_layers(layers) if layers else modules)

    def _require_known(self, names: list[str], layers: list[re.Match[str]]) -> None:
        """Requires that the files say where in the model each tensor in them is."""
        others = [name for name in names if "expert" in name or "expp_rank" in name]
        others += [found.string for found in layers if int(found["slice"] or 0)]
        if not (layers or "zero" in names):
            others += [found.string for found in _matches(_MODEL, names) if int(found["part"])]
        if others:
            raise CheckpointError(
                "DeepSpeed has cut this model in other ways than by ZeRO, and its files do not say how.",
                checkpoint=self.path,
                found=", ".join(others[:3]),
                fix="python -m deepspeed.checkpoint.ds_to_universal makes a folder of whole parameters of it",
            )

    def _by_part(self, pattern: re.Pattern[str], names: list[str]) -> list[list[Path]]:
        """The files of each part of the model, by rank of ZeRO."""
        found: dict[int, dict[int, Path]] = {}
        for match in _matches(pattern, names):
            found.setdefault(int(match["part"]), {}).setdefault(int(match["rank"] or 0), self.path / match.string)
        for ranks in (sorted(found), *map(sorted, found.values())):
            if ranks != list(range(len(ranks))):
                raise damaged(self.path, why=f"there are files of ranks {ranks}, and none of those between")
        return [[found[part][rank] for rank in sorted(found[part])] for part in sorted(found)]

    def _put(self, number: int, kind: str, name: str, state: str, tensor: TensorInFile, run: Run | None = None) -> None:
        """Adds what a part has of a tensor. What is tied is in several stages: then that of the first is read."""
        holders = self._holders[name]
        if holders[number] != holders[min(holders)]:
            raise damaged(self.path, tensor=name, why="stages of the pipeline have other shapes of it")
        if number == min(holders):
            self.add(kind, name, state, holders[number], tensor, run=run)

    def _add_untrained(self, modules: list[dict[str, TensorInFile]]) -> None:
        """Adds buffers and frozen parameters: what the optimizer does not step."""
        buffers = {name for part in self._parts for name in part.said["buffer_names"]}
        shared = {alias: name for part in self._parts for alias, name in (part.said["shared_params"] or {}).items()}
        self.aliases |= {self.rename(alias): self.rename(name) for alias, name in shared.items()}
        trained = self._holders.keys() | shared.keys()
        for number, module in enumerate(modules):
            for name, tensor in module.items():
                if name in buffers or name not in trained:
                    self._holders.setdefault(name, {})[number] = tensor.shape
                    self._put(number, "model", name, "", tensor)
        for number, part in enumerate(self._parts):
            each = [part.said, *map(read_torch_file, part.models[1:])] if part.frozen else []
            for (rank, said), (name, shape) in product(enumerate(each), part.frozen.items()):
                at, count = _part(prod(shape), rank, len(each))
                self._put(number, "model", name, "", said["frozen_param_fragments"][name], (at, count, 0))

    def _of_layers(self, layers: list[re.Match[str]]) -> list[dict[str, TensorInFile]]:
        """What is in the files of layers, by the names that it has in the pipeline.

        What layers have that are tied is not known by their numbers, but by the name of the tie.
        """
        known = {name for part in self._parts for name in part.said["buffer_names"]} | self._holders.keys()
        tied = {name.split(".", 2)[2]: name for name in sorted(known) if name.startswith("tied_modules.")}
        found: dict[str, TensorInFile] = {}
        for layer in layers:
            tensors = read_torch_file(self.path / layer.string)
            names = {key: f"{int(layer['layer'])}.{key}" for key in tensors}
            if known.isdisjoint(names.values()) and tied.keys() >= names.keys():
                names = tied
            found |= {names[key]: tensor for key, tensor in tensors.items()}
        return [found]

    def _add_optimizers(self, number: int, groups: list[Shapes], paths: list[Path]) -> None:
        """Adds parameters and states of ZeRO, of one part: each rank has some elements of each group."""
        begins: Counter[int] = Counter()
        for rank, path in enumerate(paths):
            said = read_torch_file(path)["optimizer_state_dict"]
            is_cut = "fp32_flat_groups" in said
            base = said["optimizer_state_dict" if is_cut else "base_optimizer_state"]
            counts = said["partition_count"]
            if self._has_states and (isinstance(base, list) or said.get("ds_zero_partition_groups")):
                raise CheckpointError(
                    "DeepSpeed has written states of this optimizer in a way that is not read.",
                    file=path,
                    why="elastic_checkpoint, or experts",
                    fix='"elastic_checkpoint": false in its config; or without states: zf.load(folder, model, only="model")',
                )
            if any(count != len(paths) for count in (counts if isinstance(counts, list) else [counts])):
                raise damaged(path, why=f"{counts} ranks have written states, and there are files of {len(paths)}")
            values = said["fp32_flat_groups" if is_cut else "single_partition_of_fp32_groups"]
            gaps = said.get("param_alignment_paddings") or [[0] * len(each) for each in groups]
            for group, name, at, count, first in (
                _cut_each(groups, rank, len(paths)) if is_cut else _cut_all(groups, gaps, values, begins)
            ):
                states = base["state"].get(group, {}) if self._has_states else {}
                self._put(number, "model", name, "", values[group], (at, count, first))
                for state, value in states.items():
                    if _is_of_elements(value):
                        self._put(number, "optimizer", name, state, value, (at, count, first))
            if rank == 0 and self._has_states:
                self._add_groups(base, groups)

    def _add_groups(self, base: dict[str, Any], groups: list[Shapes]) -> None:
        """Adds options of groups, and states that are numbers: the same for all parameters of a flat group."""
        for group in base["param_groups"]:
            self.add_group([name for flat in group["params"] for name in groups[flat]], group)
            for flat in group["params"]:
                numbers = {"step": group["step"]} if "step" in group else {}
                states = base.get("state", {}).get(flat, {})
                numbers |= {state: value for state, value in states.items() if not _is_of_elements(value)}
                for name in groups[flat]:
                    for state, value in numbers.items():
                        if ("optimizer", f"{self.rename(name)}/{state}") not in self.pieces:
                            self.add_state(name, state, value)

    def _add_universal(self, path: Path) -> None:
        """Adds parameters and states of a universal folder: a file for each."""
        groups = [part.groups for part in self._parts]
        merged = [dict(chain.from_iterable(map(dict.items, each))) for each in zip(*groups, strict=True)]
        for name in chain.from_iterable(merged):
            holders = self._holders[name]
            with disk(path / name, "Reading a checkpoint"):
                files = sorted((path / name).glob("*.pt"))
            for file in files:
                found = read_torch_file(file)
                value = found["param"] if isinstance(found, dict) else found
                shape = value.shape if len(holders) > 1 else holders[min(holders)]
                if file.stem == "fp32":
                    self.add("model", name, "", shape, value)
                elif _is_of_elements(value):
                    self.add("optimizer", name, file.stem, shape, value)
                else:
                    self.add_state(name, file.stem, value)
        if self._has_states:
            said = read_torch_file(path / "optimizer_state.pt")
            self._add_groups(said.get("optimizer_state_dict", said), merged)


def _matches(pattern: re.Pattern[str], names: list[str]) -> list[re.Match[str]]:
    return [found for found in map(pattern.fullmatch, names) if found]


def _part_of(models: list[Path]) -> _Part:
    said = read_torch_file(models[0])
    is_cut = models[0].name.startswith("zero_pp_rank")
    groups = [dict(each) for each in said["param_shapes"] or ()]
    return _Part(said, models, groups, said.get("frozen_param_shapes") or {} if is_cut else {})


def _is_of_elements(state: Any) -> bool:
    """Whether a state has a number for each element, and is not one number."""
    return isinstance(state, TensorInFile) and bool(state.shape)


def _cut_all(
    groups: list[Shapes], gaps: list[list[int]], values: list[TensorInFile], begins: Counter[int]
) -> Iterator[Fragment]:
    """What a rank has of groups that were cut as wholes; `begins` is how much of each group the ranks before have."""
    for group, (shapes, paddings, tensor) in enumerate(zip(groups, gaps, values, strict=True)):
        begin, end, start = begins[group], begins[group] + prod(tensor.shape), 0
        for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
            low, high = max(start, begin), min(start + prod(shape), end)
            if low < high:
                yield group, name, low - start, high - low, low - begin
            start += prod(shape) + padding
        begins[group] = end


def _cut_each(groups: list[Shapes], rank: int, ranks: int) -> Iterator[Fragment]:
    """What a rank has of groups of which each parameter was cut."""
    for group, shapes in enumerate(groups):
        first = 0
        for name, shape in shapes.items():
            at, count = _part(prod(shape), rank, ranks)
            yield group, name, at, count, first
            first += -(-prod(shape) // ranks)


def _part(numel: int, rank: int, ranks: int) -> tuple[int, int]:
    """The first element that a rank has of a parameter that ZeRO-3 has cut, and how many."""
    size = -(-numel // ranks)
    at = min(rank * size, numel)
    return at, min(size, numel - at)
