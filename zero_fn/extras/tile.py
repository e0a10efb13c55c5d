"""Cuts huge linears and embeddings into parts that are gathered one by
one (memory-centric tiling)."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zero_fn.errors import CheckpointError, LayoutError, PlacementError, StateError, UnitError
from zero_fn.runtime.registry import units_of
from zero_fn.runtime.replaced_parameters import Replacement, call_site, note_replacement
from zero_fn.transforms.closures import follow_forwards, refuse_captured
from zero_fn.transforms.selection import Where, selected
from zero_fn.transforms.substitute import Donated, carry_over
from zero_fn.values.tiled import Tiled, TiledEmbedding, TiledLinear, is_tile
from zero_fn.values.units import NamedParameter, distinct_parameters

__all__ = ["tile", "untiled"]

M = TypeVar("M", bound=nn.Module)


def tile(module: M, *, where: Where, parts: int, donate: bool = False) -> M:
    """Cuts huge linears and embeddings into parts that are gathered one by one,
    so that the whole weight never exists.

        model = zf.tile(model, where="lm_head.*", parts=8)
        model = zf.shard_params(model, mesh["dp"])

    Both are cut by the rows of the weight: output features, or the vocabulary. Each part is a unit
    (wrap group) of its own, whatever `units=` says: gathered before it runs and freed after, in
    forward and backward, and its gradient is reduced alone. At most two parts are gathered at
    once; `zf.plan(model).in_flight_nbytes` says how much that saves. It saves memory where a
    transform frees gathered parameters (`shard_params`, or `offload(params=)` at any stage), and
    little elsewhere.

    Numbers: those of the whole up to the rounding of one dot product, as a BLAS may sum in an order
    that depends on the shape of the matrix; those of an embedding to the bit. Stage and tier change
    no bit of a tiled model.

    Names: the parameters of part i are `<name>.tiles.<i>.weight` and `.bias`. `load_state_dict`
    also takes the names of the model before tiling, and `zf.transforms.untiled` gives whole tensors these
    names again.

    Communicates nothing itself. Later transforms send the same bytes in `parts` times as many
    collectives; where `checkpoint_activations` recomputes a module that holds tiles, each is
    gathered once more in backward.

    Args:
        module: A module that no other transform returned: tile first. Parameters on `meta` are cut
            on `meta`, and `materialize` then draws the values of one part after the other.
        where: Which parameters: patterns of parameter names, or a function of name and parameter.
            The linears and embeddings that own them are tiled, with their bias.
        parts: Number of parts of each; their rows differ by one at most.
        donate: Let parts be views of the parameters instead of copies, and keep all other
            parameters; `module` can no longer run.

    Returns:
        A new module with the type and the outputs of `module`.
        `module` is unchanged and still runs (unless donated).

    Raises:
        LayoutError: `parts` is less than 2 or more than the rows; `where` selects nothing, or
            parameters of other modules than `nn.Linear` and `nn.Embedding`; or one with a forward,
            or with hooks of parameters, of its own.
        PlacementError: The weight lies on an axis of a mesh, or the gradient is not by rows
            (`max_norm`, `scale_grad_by_freq`, `sparse`).
        UnitError: The weight is tied to another: parts would have to stay gathered for both.
        StateError: A transform came first.

    Source:
        ZeRO-Infinity, Rajbhandari et al. 2021, section 5.1.3.
    """
    _require_first(module)
    chosen = _owners(module, where)
    for name, child in chosen.items():
        _require_tileable(name, child)
        rows = len(child.weight)  # type: ignore[arg-type]
        if not isinstance(parts, int) or isinstance(parts, bool) or not 2 <= parts <= rows:
            raise LayoutError(
                "A module cannot be cut into that many parts.",
                parts=parts,
                module=f"{name or 'root'}: {child}",
                rows=rows,
                fix=f"parts=2 to {rows}: as many as bring the bytes of a part below "
                "what may be gathered at once",
            )
    memo: dict[int, Any] = {}
    if donate:
        memo.update((id(parameter), parameter) for parameter in module.parameters())
    site = call_site("tile")
    for name, child in chosen.items():
        memo[id(child)] = _tiled(name, child, parts, site, donate=donate)
    for child in chosen.values():
        _keep_written(child, memo[id(child)], memo)
    twin: M = copy.deepcopy(module, memo)
    named = distinct_parameters(module)
    tiled = {
        id(parameter) for child in chosen.values() for parameter in child.parameters(recurse=False)
    }
    stale = named if not donate else [each for each in named if id(each.parameter) in tiled]
    follow_forwards(twin, memo)
    refuse_captured(
        twin,
        {id(child): name for name, child in module.named_modules() if id(child) in memo},
        stale,
    )
    for each in stale:
        if id(each.parameter) not in tiled:
            carry_over(each.parameter, memo[id(each.parameter)], memo)
    if donate:
        module.__dict__["forward"] = Donated(site)
    return twin


def untiled(module: nn.Module, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Gives the state_dict of a tiled model the names and shapes of the model before `tile`.

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        whole = get_model_state_dict(model, options=options)
        torch.save(zf.transforms.untiled(model, whole), "model.pt")

    Communicates nothing.

    Args:
        module: The tiled model, transformed or not.
        state_dict: Its state_dict, with whole tensors. Entries that are missing (on ranks that were
            given none) are passed over.

    Returns:
        A new dict. Parts are concatenated, which copies them; other entries are the same objects.

    Raises:
        CheckpointError: A part is a shard, or some parts of a parameter are missing.
    """
    found = dict(state_dict)
    for name, child in module.named_modules():
        if not isinstance(child, Tiled):
            continue
        for attribute in child.whole_shapes():
            path = f"{name}.".lstrip(".")
            keys = [f"{path}tiles.{number}.{attribute}" for number in range(len(child.tiles))]
            missing = [key for key in keys if key not in found]
            if len(missing) == len(keys):
                continue
            if missing:
                raise CheckpointError(
                    f"The state_dict has some parts of {path}{attribute} only.",
                    missing=", ".join(missing),
                    fix="pass the state_dict of the whole tiled model",
                )
            found[f"{path}{attribute}"] = _whole(
                [found.pop(key) for key in keys], f"{path}{attribute}"
            )
    return found


def _whole(parts: list[Tensor], name: str) -> Tensor:
    for part in parts:
        if isinstance(part, DTensor) and not all(
            placement.is_replicate() for placement in part.placements
        ):
            raise CheckpointError(
                f"The parts of {name} are shards, and the whole would have to be gathered.",
                placements=part.placements,
                fix="get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, "
                "cpu_offload=True)) of torch.distributed.checkpoint.state_dict has whole tensors",
            )
    return torch.cat([part._local_tensor if isinstance(part, DTensor) else part for part in parts])


def _require_first(module: nn.Module) -> None:
    if isinstance(module.__dict__.get("forward"), Donated):
        module.forward()
    units = units_of(module)
    if units:
        raise StateError(
            "tile() was given a module that is transformed already.",
            module=type(module).__name__,
            why="its parameters rest in units that would have to be gathered whole to be cut",
            fix="tile first: model = zf.shard_params(zf.tile(model, "
            "where=..., parts=...), mesh['dp'])",
        )


def _owners(module: nn.Module, where: Where) -> dict[str, nn.Module]:
    """The modules that own the selected parameters, by name."""
    modules = dict(module.named_modules())
    chosen: dict[str, nn.Module] = {}
    for named in selected(distinct_parameters(module), where):
        for name, attribute in named.places:
            owner = modules[name]
            if type(owner) not in (nn.Linear, nn.Embedding):
                raise LayoutError(
                    "tile() cuts nn.Linear and nn.Embedding, "
                    "and where= selects a parameter of another module.",
                    parameter=f"{name}.{attribute}".lstrip("."),
                    module="a part of a tiled module" if is_tile(owner) else type(owner).__name__,
                    fix="name them: where='lm_head.*', or where=lambda name, p: "
                    "name in ('head.weight', 'emb.weight')",
                )
            chosen[name] = owner
    for named in distinct_parameters(module):
        if any(name in chosen for name, _ in named.places):
            _require_untied(named, modules)
    return chosen


def _require_untied(named: NamedParameter, modules: dict[str, nn.Module]) -> None:
    if len({id(modules[name]) for name, _ in named.places}) > 1:
        raise UnitError(
            "A tied weight cannot be tiled.",
            places=", ".join(f"{name}.{attribute}".lstrip(".") for name, attribute in named.places),
            why="its parts would belong to the unit that contains all of these modules, "
            "and stay gathered while it runs",
            fix="leave it out of where=, or untie it: "
            "head.weight = nn.Parameter(head.weight.detach().clone())",
        )


def _require_tileable(name: str, child: nn.Module) -> None:
    for attribute, parameter in child.named_parameters(recurse=False):
        if isinstance(parameter, DTensor):
            raise PlacementError(
                "tile() cuts whole weights, and this one lies on a mesh.",
                parameter=f"{name}.{attribute}".lstrip("."),
                placements=parameter.placements,
                fix='tile first, then parallelize the parts: {"head.tiles.*": RowwiseParallel()}',
            )
    parameters = list(child.parameters(recurse=False))
    obstacles = {
        "hooks of its parameters": any(
            p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters
        ),
        "hooks of its state_dict": any(getattr(child, hooks) for hooks in _HOOKS_OF_STATE),
        "a forward of its own": "forward" in child.__dict__,
    }
    for obstacle, is_there in obstacles.items():
        if is_there:
            raise LayoutError(
                f"A module with {obstacle} cannot be tiled.",
                module=f"{name or 'root'}: {child}",
                why="it is written for the whole layer, and tile() puts parts in the place of that",
                fix="tile first, then add it to the parts",
            )
    if isinstance(child, nn.Embedding) and (child.max_norm is not None or child.scale_grad_by_freq):
        raise PlacementError(
            "An embedding that looks at all its tokens cannot be tiled.",
            module=f"{name or 'root'}: {child}",
            fix="build it without max_norm and scale_grad_by_freq",
        )


def _tiled(name: str, child: nn.Module, parts: int, site: str, *, donate: bool) -> Tiled:
    rows = len(child.weight)  # type: ignore[arg-type]
    sizes = [rows // parts + (number < rows % parts) for number in range(parts)]
    made: Tiled
    if isinstance(child, nn.Linear):
        made = TiledLinear(child, sizes)
    else:
        assert isinstance(child, nn.Embedding)
        made = TiledEmbedding(child, sizes)
    for attribute, whole in child.named_parameters(recurse=False):
        for part, start, count in made.rows():
            values = whole.detach().narrow(0, start, count)
            own = nn.Parameter(
                values if donate else values.clone(), requires_grad=whole.requires_grad
            )
            vars(own).update(vars(whole))
            part.register_parameter(attribute, own)
        note_replacement(whole, Replacement(f"{name}.tiles.0.{attribute}".lstrip("."), own, site))
    return made


_HOOKS_OF_STATE = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def _keep_written(child: nn.Module, made: Tiled, memo: dict[int, Any]) -> None:
    """What users wrote on the module, and the hooks they gave it, stay with it."""
    for attribute, value in child.__dict__.items():
        # Hooks of the module; those of its state_dict are not carried over.
        is_hooks = attribute.startswith(("_forward", "_backward"))
        if is_hooks or attribute not in made.__dict__:
            made.__dict__[attribute] = copy.deepcopy(value, memo)
    for module in made.modules():
        module.training = child.training
