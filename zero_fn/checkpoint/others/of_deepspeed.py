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
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, product
from math import prod
from pathlib import Path
from typing import Any

from zero_fn.checkpoint.format.files import damaged, disk, understood
from zero_fn.checkpoint.others.torch_files import Foreign, TensorInFile, read_torch_file
from zero_fn.errors import CheckpointError
from zero_fn.runtime.box import Box, spans, strides_of, whole_box

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

Pairs = list[tuple[Box, Box]]
"""Boxes of a part of a tensor, and where they are in the whole."""

_NOT_READ = (
    "parameter_to_average_patterns", "parameter_with_2_sub_params_cat_dim_0", "autotp_unsupported_parameter_patterns",
)  # fmt: skip

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


class DeepSpeedFolder(Foreign):
    """A checkpoint that DeepSpeed has written."""

    def __init__(self, path: Path, rename: Callable[[str], str], *, has_states: bool) -> None:
        super().__init__(path, rename, has_states=has_states)
        self._holders: dict[
            str, dict[int, Shape]
        ] = {}  # the shape of each tensor in the parts of the model that have it
        self._cuts: dict[str, tuple[Shape, list[Pairs]]] = {}
        with disk(path, "Reading a checkpoint"):
            names = sorted(found.name for found in path.iterdir())
        with understood(path, "not the layout of DeepSpeed 0.19"):
            self._require_known(names)
            layers = [found for found in map(_LAYER.fullmatch, names) if found]
            models = self._by_part(_MODEL, names)
            said = [read_torch_file(paths[0]) for paths in models]
            self._info = said[0].get("universal_checkpoint_info")
            self._slices = len({found["slice"] for found in layers} or models)  # parts of a stage
            self._groups: list[list[Shapes]] = [[dict(group) for group in each["param_shapes"] or ()] for each in said]
            for number, groups in enumerate(self._groups):
                self._note((number, name, shape) for group in groups for name, shape in group.items())
            self.extra = {name: value for name, value in said[0].items() if name not in _OWN}
            if "zero" in names:
                self._add_universal(path / "zero")
            else:
                for number, paths in enumerate(self._by_part(_OPTIMIZER, names)):
                    self._add_optimizers(number, paths)
            self._add_untrained(said, models, layers)

    def _require_known(self, names: list[str]) -> None:
        """Requires that the files say where in the model each tensor in them is."""
        others = [name for name in names if "expert" in name or "expp_rank" in name]
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
        for match in filter(None, map(pattern.fullmatch, names)):
            found.setdefault(int(match["part"]), {}).setdefault(int(match["rank"] or 0), self.path / match.string)
        for ranks in (sorted(found), *map(sorted, found.values())):
            if ranks != list(range(len(ranks))):
                raise damaged(self.path, why=f"there are files of ranks {ranks}, and none of those between")
        return [[found[part][rank] for rank in sorted(found[part])] for part in sorted(found)]

    def _note(self, tensors: Iterable[tuple[int, str, Shape]]) -> None:
        """Notes which parts of the model have which tensors."""
        for number, name, shape in tensors:
            self._holders.setdefault(name, {})[number] = tuple(shape)

    def _put(self, number: int, kind: str, name: str, state: str, tensor: TensorInFile, run: Run | None = None) -> None:
        """Adds what a part has of a tensor. What is tied is in several stages: then that of the first is read."""
        holders, slices = self._holders[name], self._slices
        begin = min(holders) // slices * slices
        if holders[number] != holders[begin + number % slices]:
            raise damaged(self.path, tensor=name, why="stages of the pipeline have other shapes of it")
        if number < begin + slices:
            try:
                if name not in self._cuts:
                    self._cuts[name] = _cut(name, [holders[begin + part] for part in range(slices)], self._info)
            except ValueError as error:
                raise CheckpointError(
                    "DeepSpeed has cut a parameter by tensor parallelism in a way that is not read.",
                    checkpoint=self.path,
                    parameter=name,
                    why=error,
                    fix='save_checkpoint(client_state={"universal_checkpoint_info": ...}) says how; AutoTP 0.19 adds it',
                ) from error
            whole, pairs = self._cuts[name]
            self.add(kind, name, state, holders[number], tensor, run=run, cut=(whole, pairs[number - begin]))

    def _add_untrained(self, said: list[dict[str, Any]], models: list[list[Path]], layers: list[re.Match[str]]) -> None:
        """Adds buffers and frozen parameters: what the optimizer does not step."""
        buffers = {name for each in said for name in each["buffer_names"]}
        shared = {alias: name for each in said for alias, name in (each["shared_params"] or {}).items()}
        self.aliases |= {self.rename(alias): self.rename(name) for alias, name in shared.items()}
        known, is_cut = self._holders.keys() | shared.keys(), models[0][0].name.startswith("zero_pp_rank")
        modules = self._of_layers(layers, known | buffers) if layers else [each["module"] or {} for each in said]
        found: list[tuple[int, str, Shape, TensorInFile, Run | None]] = [
            (number, name, tensor.shape, tensor, None)
            for number, module in enumerate(modules)
            for name, tensor in module.items()
            if name in buffers or not (is_cut or name in known)
        ]
        for number, paths in enumerate(models if is_cut and said[0].get("frozen_param_shapes") else ()):
            parts = [said[number], *map(read_torch_file, paths[1:])]
            for (rank, part), (name, shape) in product(enumerate(parts), said[number]["frozen_param_shapes"].items()):
                fragment = part["frozen_param_fragments"][name]
                found.append((number, name, shape, fragment, (*_part(prod(shape), rank, len(parts)), 0)))
        self._note(each[:3] for each in found)
        for number, name, shape, tensor, run in found:
            if name in buffers:
                self._cuts[name] = _same([shape] * self._slices)
            self._put(number, "model", name, "", tensor, run)

    def _of_layers(self, layers: list[re.Match[str]], known: set[str]) -> list[dict[str, TensorInFile]]:
        """What is in the files of layers, by its name in the pipeline: of a tied layer by that of the tie."""
        tied = {name.split(".", 2)[2]: name for name in sorted(known) if name.startswith("tied_modules.")}
        found: list[dict[str, TensorInFile]] = [{} for _ in range(self._slices)]
        for layer in layers:
            tensors = read_torch_file(self.path / layer.string)
            names = {key: f"{int(layer['layer'])}.{key}" for key in tensors}
            if known.isdisjoint(names.values()) and tied.keys() >= names.keys():
                names = tied
            found[int(layer["slice"] or 0)] |= {names[key]: tensor for key, tensor in tensors.items()}
        return found

    def _add_optimizers(self, number: int, paths: list[Path]) -> None:
        """Adds parameters and states of ZeRO, of one part: each rank has some elements of each group."""
        begins: Counter[int] = Counter()
        groups = self._groups[number]
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
        groups = [dict(chain.from_iterable(map(dict.items, each))) for each in zip(*self._groups, strict=True)]
        for name in chain.from_iterable(groups):
            shape = next(iter(self._holders[name].values()))
            with disk(path / name, "Reading a checkpoint"):
                files = sorted((path / name).glob("*.pt"))
            for file in files:
                found = read_torch_file(file)
                value = found["param"] if isinstance(found, dict) else found
                shape = shape if prod(value.shape) in (1, prod(shape)) else value.shape
                if file.stem == "fp32":
                    self.add("model", name, "", shape, value)
                elif _is_of_elements(value):
                    self.add("optimizer", name, file.stem, shape, value)
                else:
                    self.add_state(name, file.stem, value)
        if self._has_states:
            said = read_torch_file(path / "optimizer_state.pt")
            self._add_groups(said.get("optimizer_state_dict", said), groups)


def _same(shapes: list[Shape]) -> tuple[Shape, list[Pairs]]:
    """Parts that are the whole each: the first is read."""
    return shapes[0], [[(whole_box(shapes[0]), whole_box(shapes[0]))], *([] for _ in shapes[1:])]


def _cut(name: str, shapes: list[Shape], info: Mapping[str, Any] | None) -> tuple[Shape, list[Pairs]]:
    """The shape of a whole parameter, and which boxes of it the parts are that ranks of tensor parallelism have."""

    def said(*what: str) -> str | None:
        patterns = chain.from_iterable((info or {}).get(each) or () for each in what)
        return next((pattern for pattern in patterns if re.match(pattern, name)), None)

    if len(shapes) == 1:
        return _same(shapes)
    if info is None:
        raise ValueError("there is no universal_checkpoint_info, which says along which dim")
    maps = info.get("affine_map") or {"version": 1, "params": {}}
    if entry := next((maps["params"][pattern] for pattern in maps["params"] if re.match(pattern, name)), None):
        whole, found = tuple(entry["logical_shape"]), _of_map(entry["ranks"], shapes, tuple(entry["logical_shape"]))
    elif said("tp_replicated_parameter_patterns") and len(set(shapes)) == 1:
        whole, found = _same(shapes)
    else:
        dim, at, found = int(said("parameter_with_row_parallelism_patterns") is not None), 0, []
        whole = (*shapes[0][:dim], sum(shape[dim] for shape in shapes), *shapes[0][dim + 1 :])
        kept = (
            (min(whole[0], info["original_vocab_size"]), *whole[1:]) if said("vocabulary_parameter_patterns") else whole
        )
        for shape in shapes:
            there = whole_box(whole).narrow(dim, at, shape[dim]).meet(whole_box(kept))
            found.append([(Box((0,) * len(kept), there.sizes), there)] if there else [])
            at += shape[dim]
        whole = kept
    blocks = [pattern for each in info.get("parameter_with_sub_params") or () for pattern in each["patterns"]]
    if (not entry and (said(*_NOT_READ) or any(re.match(pattern, name) for pattern in blocks))) or maps["version"] > 1:
        raise ValueError("its parts have blocks of it or its mean, or a later version of affine_map says how")
    if any(inner.sizes[1:] != shape[1:] for pairs, shape in zip(found, shapes, strict=True) for inner, _ in pairs):
        raise ValueError("its parts have blocks that are not whole rows of them")
    return whole, found


def _of_map(ranks: Mapping[int, Any], shapes: list[Shape], whole: Shape) -> list[Pairs]:
    """What a map of all elements says, by an offset and strides in the part and in the whole."""
    found: list[Pairs] = [[] for _ in shapes]
    for part, piece in ((index, piece) for index in range(len(shapes)) for piece in ranks[index]["pieces"]):
        ends = ((*piece["dest"], shapes[part]), (*piece["source"], whole))
        if piece.get("scale", 1) != 1 or any(tuple(strides) != strides_of(shape) for _, strides, shape in ends):
            raise ValueError("its parts are scaled, or no boxes of it")
        if part == min(piece["locations"]) and 0 not in piece["shape"]:
            inner, outer = (Box(next(spans(shape, at, at + 1)).starts, tuple(piece["shape"])) for at, _, shape in ends)
            found[part].append((inner, outer))
    return found


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
