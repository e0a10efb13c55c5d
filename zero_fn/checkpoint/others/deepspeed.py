"""Folders of DeepSpeed: of ZeRO-1, 2 and 3, also with models in parts, and universal ones.

    global_step2/
        mp_rank_00_model_states.pt                   ZeRO-1 and 2: names, buffers, frozen tensors
        zero_pp_rank_0_mp_rank_00_model_states.pt    ZeRO-3: the same, of rank 0
        zero_pp_rank_0_mp_rank_00_optim_states.pt    parameters and moments of rank 0
    latest                                           "global_step2"

ZeRO-1 and 2 lay all parameters of a group one after the other, and cut that at the ranks. ZeRO-3
cuts each parameter at the ranks, and lays the parts of a rank one after the other. A universal
folder has a file for each parameter and state. In each case a file holds ranges of the elements of
parameters, so any rank can read them.

Stages of a pipeline and ranks of tensor parallelism have these files each, as `mp_rank_00`,
`mp_rank_01`, ... Layers of a pipeline (`layer_00-model_states.pt`) and experts have files, too, of
which buffers and frozen parameters are read.

[Note: the order in a group] It is that of `param_shapes`. `param_slice_mappings` says so, too, but
not with `round_robin_gradients`: DeepSpeed 0.19 then names parameters in another order than they
lie in, and `ds_to_universal` gives each the values of another.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain, product, zip_longest
from math import prod
from pathlib import Path
from typing import Any

from zero_fn.checkpoint.format.files import damaged, disk, understood
from zero_fn.checkpoint.others.torch_files import Foreign, TensorInFile, read_torch_file
from zero_fn.errors import CheckpointError
from zero_fn.values.box import Box, spans, strides_of, whole_box

__all__ = ["DeepSpeedFolder", "deepspeed_folder"]

_MODEL = re.compile(r"(zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<part>\d+)_model_states\.pt")
_OPTIMIZER = re.compile(
    r"(bf16_|fp16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<part>\d+)_optim_states\.pt"
)
_LAYER = re.compile(r"layer_(?P<layer>\d+)(-model_(?P<slice>\d+))?-model_states\.pt")
_EXPERT = re.compile(r"layer_\d+_expert_\d+_mp_rank_\d+_model_states\.pt")
_NUMBER = re.compile(r"(?<=\.deepspeed_experts\.)(\d+)")
_UNIVERSAL = (
    "python -m deepspeed.checkpoint.ds_to_universal makes a folder of whole parameters of it"
)
_SAID = (
    'save_checkpoint(client_state={"universal_checkpoint_info": ...}) says it; '
    "AutoTP of DeepSpeed 0.19 adds it"
)
_DATA_FIRST = "use_data_before_expert_parallelism"
_NOT_READ = (
    "parameter_to_average_patterns", "parameter_with_2_sub_params_cat_dim_0",
    "parameter_with_sub_params", "autotp_unsupported_parameter_patterns",
)  # fmt: skip
_LATEST = ("latest", "latest_universal")

_OWN = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "data_sampler", "random_ltd", "dp_world_size", "mp_world_size",
    "checkpoint_parallel_dimensions", "ds_config", "ds_version",
    "universal_checkpoint_info", "num_experts", "ds_autoep_layers",
}  # fmt: skip
"""Entries of a file of the model that are DeepSpeed's own;
the others are what the user has asked it to keep."""

Shape = tuple[int, ...]
Shapes = dict[str, Shape]
Run = tuple[int, int, int]

Pairs = list[tuple[Box, Box]]
"""Boxes of a part of a tensor, and where they are in the whole."""

Fragment = tuple[int, str, int, int, int]
"""A group's number; a parameter's name, the first of its elements and how many;
the first of these in the group."""


def deepspeed_folder(folder: Path) -> Path | None:
    """The folder with the files of DeepSpeed: this one, or the one that `latest` in it names;
    None if it has none."""
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
        # The shape of each tensor in the parts that have it.
        self._holders: dict[str, dict[int, Shape]] = {}
        self._cuts: dict[str, tuple[Shape, list[Pairs]]] = {}
        with disk(path, "Reading a checkpoint"):
            names = sorted(found.name for found in path.iterdir())
        with understood(path, "not the layout of DeepSpeed 0.19"):
            layers = [found for found in map(_LAYER.fullmatch, names) if found]
            models = self._by_part(_MODEL, names)
            said = [read_torch_file(paths[0]) for paths in models]
            self._info = said[0].get("universal_checkpoint_info")
            files = [
                read_torch_file(path / name).items() for name in names if _EXPERT.fullmatch(name)
            ]
            experts: dict[str, TensorInFile] = dict(chain.from_iterable(files))
            self._experts = Counter(
                layer for layer, _ in {tuple(_NUMBER.split(name, 1)[:2]) for name in experts}
            )
            if said[0].get("ds_autoep_layers") or (
                experts and (len(models) > 1 or said[0]["ds_config"].get(_DATA_FIRST))
            ):
                raise self._unread(
                    f"experts of AutoEP, with {_DATA_FIRST}, or in parts of a model", _UNIVERSAL
                )
            self._buffers = {name for each in said for name in each["buffer_names"]}
            self._slices = len({found["slice"] for found in layers} or models)  # parts of a stage
            self._groups: list[list[Shapes]] = [
                [dict(group) for group in each["param_shapes"] or ()] for each in said
            ]
            for number, groups in enumerate(self._groups):
                for name, shape in chain.from_iterable(map(dict.items, groups)):
                    self._holders.setdefault(name, {})[number] = shape
            self.extra = {name: value for name, value in said[0].items() if name not in _OWN}
            if "zero" in names:
                self._add_universal(path / "zero")
            else:
                for number, paths in enumerate(self._by_part(_OPTIMIZER, names)):
                    self._add_optimizers(number, paths)
            said[0]["module"] = {**(said[0]["module"] or {}), **experts}
            self._add_untrained(said, models, layers)

    def _by_part(self, pattern: re.Pattern[str], names: list[str]) -> list[list[Path]]:
        """The files of each part of the model, by rank of ZeRO."""
        found: dict[int, dict[int, Path]] = {}
        for match in filter(None, map(pattern.fullmatch, names)):
            found.setdefault(int(match["part"]), {}).setdefault(
                int(match["rank"] or 0), self.path / match.string
            )
        for ranks in (sorted(found), *map(sorted, found.values())):
            if ranks != list(range(len(ranks))):
                raise damaged(
                    self.path, why=f"there are files of ranks {ranks}, and none of those between"
                )
        return [[found[part][rank] for rank in sorted(found[part])] for part in sorted(found)]

    def _put(
        self,
        number: int,
        kind: str,
        name: str,
        state: str,
        tensor: TensorInFile,
        run: Run | None = None,
    ) -> None:
        """Adds what a part has of a tensor.

        What is tied is in several stages: then that of the first is read.
        """
        holders, slices = self._holders[name], self._slices
        begin = min(holders) // slices * slices
        if holders[number] != holders[begin + number % slices]:
            raise damaged(
                self.path, tensor=name, why="stages of the pipeline have other shapes of it"
            )
        if number < begin + slices:
            if name not in self._cuts:
                self._cuts[name] = self._cut(
                    name, [holders[begin + part] for part in range(slices)]
                )
            whole, pairs = self._cuts[name]
            self.add(
                kind,
                name,
                state,
                holders[number],
                tensor,
                run=run,
                cut=(whole, pairs[number - begin]),
            )

    def _unread(self, why: str, fix: str) -> CheckpointError:
        return CheckpointError(
            "This model is cut in a way that is not read.", checkpoint=self.path, why=why, fix=fix
        )

    def _cut(self, name: str, shapes: list[Shape]) -> tuple[Shape, list[Pairs]]:
        """The shape of a whole parameter, and which boxes of it the parts are that
        ranks of tensor parallelism have."""
        info, whole = self._info or {}, shapes[0]
        found: list[Pairs] = [[(whole_box(whole), whole_box(whole))], *([] for _ in shapes[1:])]
        if len(shapes) == 1 or name in self._buffers:
            return whole, found
        if self._info is None:
            raise self._unread(
                f"{name}: there is no universal_checkpoint_info, which says along which dim", _SAID
            )

        def said(*what: str) -> bool:
            found = chain.from_iterable(info.get(each) or () for each in what)
            patterns = chain.from_iterable(
                [each] if isinstance(each, str) else each["patterns"] for each in found
            )
            return any(re.match(pattern, name) for pattern in patterns)

        maps = info.get("affine_map") or {"version": 1, "params": {}}
        entry = next(
            (maps["params"][pattern] for pattern in maps["params"] if re.match(pattern, name)), None
        )
        is_read = not (entry is None and said(*_NOT_READ)) and maps["version"] == 1
        if entry:
            whole, found = tuple(entry["logical_shape"]), [[] for _ in shapes]
            of_ranks = (entry["ranks"][each]["pieces"] for each in range(len(shapes)))
            for part, pieces in enumerate(of_ranks):
                for piece in pieces:
                    ends = ((*piece["dest"], shapes[part]), (*piece["source"], whole))
                    sizes = tuple(piece["shape"])
                    is_read &= piece.get("scale", 1) == 1 and all(
                        tuple(by) == strides_of(shape) for _, by, shape in ends
                    )
                    if is_read and part == min(piece["locations"]) and 0 not in sizes:
                        inner, outer = (
                            Box(next(spans(shape, at, at + 1)).starts, sizes)
                            for at, _, shape in ends
                        )
                        found[part].append((inner, outer))
        elif not said("tp_replicated_parameter_patterns"):
            dim, at = int(said("parameter_with_row_parallelism_patterns")), 0
            padded = (*whole[:dim], sum(shape[dim] for shape in shapes), *whole[dim + 1 :])
            rows = (
                min(padded[0], info["original_vocab_size"])
                if said("vocabulary_parameter_patterns")
                else padded[0]
            )
            whole = (rows, *padded[1:])
            for part, shape in enumerate(shapes):
                there = whole_box(padded).narrow(dim, at, shape[dim]).meet(whole_box(whole))
                found[part] = [(Box((0,) * len(whole), there.sizes), there)] if there else []
                at += shape[dim]
        rows_of = (
            (box.sizes[1:], shape[1:])
            for pairs, shape in zip(found, shapes, strict=True)
            for box, _ in pairs
        )
        if not is_read or any(sizes != shape for sizes, shape in rows_of):
            raise self._unread(
                f"{name}: its parts are scaled, or its mean, or blocks of it", _UNIVERSAL
            )
        return whole, found

    def _add_untrained(
        self, said: list[dict[str, Any]], models: list[list[Path]], layers: list[re.Match[str]]
    ) -> None:
        """Adds buffers and frozen parameters: what the optimizer does not step."""
        shared = {
            alias: name for each in said for alias, name in (each["shared_params"] or {}).items()
        }
        self.aliases |= {self.rename(alias): self.rename(name) for alias, name in shared.items()}
        known = self._holders.keys() | shared.keys()
        is_cut = models[0][0].name.startswith("zero_pp_rank")
        modules = (
            self._of_layers(layers, known | self._buffers)
            if layers
            else [each["module"] or {} for each in said]
        )
        found: list[tuple[int, str, Shape, TensorInFile, Run | None]] = [
            (number, name, tensor.shape, tensor, None)
            for number, module in enumerate(modules)
            for name, tensor in module.items()
            if name in self._buffers or not (is_cut or name in known)
        ]
        are_cut = is_cut and said[0].get("frozen_param_shapes")
        for number, paths in enumerate(models if are_cut else ()):
            parts = [said[number], *map(read_torch_file, paths[1:])]
            frozen = said[number]["frozen_param_shapes"]
            for (rank, part), (name, shape) in product(enumerate(parts), frozen.items()):
                fragment = part["frozen_param_fragments"][name]
                found.append(
                    (number, name, shape, fragment, (*_part(prod(shape), rank, len(parts)), 0))
                )
        for number, name, shape, *_ in found:
            self._holders.setdefault(name, {})[number] = tuple(shape)
        for number, name, _, tensor, run in found:
            self._put(number, "model", name, "", tensor, run)

    def _of_layers(
        self, layers: list[re.Match[str]], known: set[str]
    ) -> list[dict[str, TensorInFile]]:
        """What is in the files of layers, by its name in the pipeline:
        of a tied layer by that of the tie."""
        tied = {
            name.split(".", 2)[2]: name
            for name in sorted(known)
            if name.startswith("tied_modules.")
        }
        found: list[dict[str, TensorInFile]] = [{} for _ in range(self._slices)]
        for layer in layers:
            tensors = read_torch_file(self.path / layer.string)
            names = {key: f"{int(layer['layer'])}.{key}" for key in tensors}
            if known.isdisjoint(names.values()) and tied.keys() >= names.keys():
                names = tied
            found[int(layer["slice"] or 0)] |= {
                names[key]: tensor for key, tensor in tensors.items()
            }
        return found

    def _add_optimizers(self, number: int, paths: list[Path]) -> None:
        """Adds parameters and states of ZeRO, of one part: each rank has
        some elements of each group."""
        begins: Counter[str] = Counter()
        for rank, path in enumerate(paths):
            said = read_torch_file(path)["optimizer_state_dict"]
            is_cut = "fp32_flat_groups" in said
            base = said["optimizer_state_dict" if is_cut else "base_optimizer_state"]
            if self._has_states and (
                isinstance(base, list) or said.get("ds_zero_partition_groups")
            ):
                raise CheckpointError(
                    "DeepSpeed has written states of this optimizer in a way that is not read.",
                    file=path,
                    why="elastic_checkpoint, or experts",
                    fix='"elastic_checkpoint": false in its config; or without states: '
                    'zf.load(folder, model, only="model")',
                )
            sizes = [
                int(each["name"][8:]) if each.get("moe") else 1
                for each in (base["param_groups"] if self._experts else ())
            ]
            counts = (
                said["partition_count"]
                if isinstance(said["partition_count"], list)
                else [said["partition_count"]]
            )
            if any(
                count * size != len(paths)
                for count, size in zip_longest(counts, sizes, fillvalue=1)
            ):
                raise damaged(
                    path,
                    why=f"{counts} ranks have written states, and there are files of {len(paths)}",
                )
            values = said["fp32_flat_groups" if is_cut else "single_partition_of_fp32_groups"]
            groups = self._groups[number]
            if sizes:
                groups = [
                    self._of_rank(group, rank, ranks)
                    for group, ranks in zip(groups, sizes, strict=True)
                ]
            gaps = said.get("param_alignment_paddings") or [[0] * len(each) for each in groups]
            cut = (
                _cut_each(groups, rank, len(paths))
                if is_cut
                else _cut_all(groups, gaps, values, begins)
            )
            for group, name, at, count, first in cut:
                states = base["state"].get(group, {}) if self._has_states else {}
                self._put(number, "model", name, "", values[group], (at, count, first))
                for state, value in states.items():
                    if _is_of_elements(value):
                        self._put(number, "optimizer", name, state, value, (at, count, first))
            if rank < max([1, *sizes]) and self._has_states:
                self._add_groups(base, groups)

    def _of_rank(self, group: Shapes, rank: int, ranks: int) -> Shapes:
        """A group by names in the whole: each of so many ranks counts its own experts."""
        first = {layer: rank % ranks * (count // ranks) for layer, count in self._experts.items()}
        named = [
            _NUMBER.sub(lambda own: str(int(own[0]) + first[own.string[: own.start()]]), name)
            for name in group
        ]
        self._holders |= {
            name: {0: shape} for name, shape in zip(named, group.values(), strict=True)
        }
        return dict(zip(named, group.values(), strict=True))

    def _add_groups(self, base: dict[str, Any], groups: list[Shapes]) -> None:
        """Adds options of groups, and states that are numbers:
        the same for all parameters of a flat group."""
        for group in base["param_groups"]:
            group = {
                key: value
                for key, value in group.items()
                if key not in ("name", "moe") or not self._experts
            }
            self.add_group([name for flat in group["params"] for name in groups[flat]], group)
            for flat in group["params"]:
                numbers = {"step": group["step"]} if "step" in group else {}
                states = base.get("state", {}).get(flat, {})
                numbers |= {
                    state: value for state, value in states.items() if not _is_of_elements(value)
                }
                for name, (state, value) in product(groups[flat], numbers.items()):
                    if ("optimizer", f"{self.rename(name)}/{state}") not in self.pieces:
                        self.add_state(name, state, value)

    def _add_universal(self, path: Path) -> None:
        """Adds parameters and states of a universal folder: a file for each."""
        groups = [
            dict(chain.from_iterable(map(dict.items, each)))
            for each in zip(*self._groups, strict=True)
        ]
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


def _is_of_elements(state: Any) -> bool:
    """Whether a state has a number for each element, and is not one number."""
    return isinstance(state, TensorInFile) and bool(state.shape)


def _cut_all(
    groups: list[Shapes], gaps: list[list[int]], values: list[TensorInFile], begins: Counter[str]
) -> Iterator[Fragment]:
    """What a rank has of groups that were cut as wholes; `begins`, by first names,
    is how much the ranks before have."""
    for group, (shapes, paddings, tensor) in enumerate(zip(groups, gaps, values, strict=True)):
        key, start = next(iter(shapes), ""), 0
        begin, end = begins[key], begins[key] + prod(tensor.shape)
        for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
            low, high = max(start, begin), min(start + prod(shape), end)
            if low < high:
                yield group, name, low - start, high - low, low - begin
            start += prod(shape) + padding
        begins[key] = end


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
