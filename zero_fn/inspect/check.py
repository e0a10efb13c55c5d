"""Questions about modules: whether one was transformed, and whether an optimizer belongs to it."""

from __future__ import annotations

from torch import nn

from zero_fn.advice import say_if_alone
from zero_fn.errors import StaleError
from zero_fn.runtime.elementwise import require_elementwise
from zero_fn.runtime.module_tree import refuse_late
from zero_fn.runtime.registry import runs_of, units_of
from zero_fn.runtime.replaced_parameters import replacement_of
from zero_fn.runtime.slot import slot_of
from zero_fn.streamed import Streamed
from zero_fn.values.chained_optimizer import Optimizers, members_of

__all__ = ["check", "is_transformed"]


def is_transformed(module: nn.Module) -> bool:
    """Whether a transform of zero_fn returned this module or a module inside it.

    Such a module reduces its own gradients over ranks: it must not be wrapped in
    `DistributedDataParallel`. Communicates nothing.
    """
    return bool(units_of(module))


def check(module: nn.Module, optimizer: Optimizers) -> None:
    """Raises an error if the optimizer would not update all trained parameters of the module.

    Call it once after building the optimizer. It may hold parameters of other transformed modules;
    of plain ones on several ranks, such as a loss, this warns, as nobody reduces their gradients.
    Communicates nothing.

    Args:
        module: A transformed module.
        optimizer: Any torch optimizer, an object with its `param_groups`, or a sequence of them.

    Raises:
        StateError: `module` was not transformed.
        StaleError: The optimizer was built before a transform or for another module, or lacks
            trained parameters of the module.
        PlacementError: A parameter was replaced or added after the transform; or the optimizer
            needs whole matrices or tensors (Muon, Adafactor, LAMB) and a parameter is sharded,
            which `step()` refuses, too.
    """
    runs = runs_of(module, verb="check")
    for unit in units_of(module):
        unit.follow_moved()
    for run in runs:
        if (root := run.root()) is not None:
            refuse_late(root, run.live_units())
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    members = members_of(optimizer)
    groups = [
        parameter
        for each in members
        for group in each.param_groups
        for parameter in group["params"]
    ]
    foreign = [parameter for parameter in groups if id(parameter) not in names]
    # Whether the optimizer steps other modules, too: transformed or plain ones (`say_if_alone`).
    is_beside = len(foreign) < len(groups)
    foreign = [
        p
        for p in foreign
        if replacement_of(p) is not None or not (is_beside or slot_of(p) is not None)
    ]
    if foreign:
        replacement = replacement_of(foreign[0])
        raise StaleError(
            f"The optimizer holds {len(foreign)} parameters that the model does not have.",
            first=f"{replacement.fqn}, replaced by {replacement.site}"
            if replacement is not None
            else (
                f"{str(foreign[0].dtype).removeprefix('torch.')}{list(foreign[0].shape)}, "
                "of no transformed module"
            ),
            why="a transform returns a new module; step() would update the old one "
            "and the loss would not move",
            fix="build the optimizer after the last transform: AdamW(model.parameters())",
        )
    for each in members:
        require_elementwise(each.inner if isinstance(each, Streamed) else each)
    known = {id(parameter) for parameter in groups}
    missing = [
        name
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and id(parameter) not in known
    ]
    if missing:
        raise StaleError(
            f"The optimizer lacks {len(missing)} trained parameters of the model.",
            first=missing[0],
            why="they would get gradients and never move",
            fix="pass all model.parameters() to the optimizer, or freeze these: "
            "parameter.requires_grad_(False)",
        )
    for each in members:
        say_if_alone(each)
