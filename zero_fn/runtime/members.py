"""Notices parameters and modules that are added to a model after a transform.

They belong to no unit: each rank would train them with its own gradients. So adding them is refused at once, by torch's
public hooks for registrations, which the first transform installs. A module that no transform returned costs them one
look-up in its `__dict__`. What bypasses registration (writing `module._parameters`) is found by `check`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from zero_fn.errors import PlacementError
from zero_fn.runtime.access import MEMBER
from zero_fn.runtime.entry import units_of
from zero_fn.runtime.registry import slot_of
from zero_fn.runtime.uncompiled import uncompiled

__all__ = ["note_members", "refuse_unregistered", "watch_registrations"]

_installed: list[Any] = []


def watch_registrations() -> None:
    """Installs the hooks, once."""
    if not _installed:
        _installed.append(register_module_parameter_registration_hook(_before_parameter))
        _installed.append(register_module_module_registration_hook(_before_module))


def note_members(modules: Mapping[str, nn.Module]) -> None:
    """Remembers that these modules, by name, make up a transformed model."""
    for name, module in modules.items():
        module.__dict__[MEMBER] = name


@uncompiled
def _before_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    if MEMBER in module.__dict__ and module._parameters.get(name) is None:  # else it replaces one: see `Unit.readopt`
        _refuse_late(f"{module.__dict__[MEMBER]}.{name}".lstrip("."), parameter)


@uncompiled
def _before_module(module: nn.Module, name: str, child: nn.Module | None) -> None:
    if child is None or MEMBER not in module.__dict__:
        return
    path = f"{module.__dict__[MEMBER]}.{name}".lstrip(".")
    late = [(fqn, parameter) for fqn, parameter in child.named_parameters() if slot_of(parameter) is None]
    if late:
        for unit in units_of(child):  # of a deep copy that did not run yet
            unit.readopt()
        for fqn, parameter in late:
            if slot_of(parameter) is None:
                _refuse_late(f"{path}.{fqn}", parameter)
    for inner, grandchild in child.named_modules():
        if MEMBER not in grandchild.__dict__:
            grandchild.__dict__[MEMBER] = f"{path}.{inner}".rstrip(".")


def refuse_unregistered(module: nn.Module) -> None:
    """Finds parameters that were written into `module._parameters` behind the hooks.

    Raises:
        PlacementError: There is one.
    """
    for name, child in module.named_modules():
        if MEMBER in child.__dict__:
            for attribute, parameter in child._parameters.items():
                if parameter is not None and slot_of(parameter) is None:
                    _refuse_late(f"{name}.{attribute}".lstrip("."), parameter)


def _refuse_late(fqn: str, parameter: nn.Parameter) -> None:
    raise PlacementError(
        f"{fqn!r} was added after the transform.",
        parameter=f"{str(parameter.dtype).removeprefix('torch.')}{list(parameter.shape)}",
        why="it would be trained on each rank alone and never reduced",
        fix="add parameters and modules before the transform, or transform what you add: zf.shard_params(added, axis)",
    )
