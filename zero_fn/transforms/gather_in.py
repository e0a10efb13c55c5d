"""Methods other than `forward`."""

from __future__ import annotations

import inspect
from typing import TypeVar

from torch import nn

from zero_fn.errors import LayoutError
from zero_fn.transforms.substitute import substitute
from zero_fn.values.assignment import Assignment

__all__ = ["gather_in"]

M = TypeVar("M", bound=nn.Module)


def gather_in(module: M, *methods: str) -> M:
    """Lets methods other than `forward` read whole parameters, gathered as `forward` gathers them.

        model = zf.register_forward_method(model, "encode", "decoder.generate")

    Only a method that reads weights itself (`x @ self.weight`) needs this. One that calls modules,
    or `self(x)`, works as it is. An undeclared method meets this rank's shard, and torch raises
    ("got mixed torch.Tensor and DTensor"). The unit (wrap group) of the module is gathered while
    the method runs, and its gradients are reduced as those of `forward`.

    Communicates: in each call, what `forward` of the same unit does. All ranks call the method.

    Args:
        module: Any module, transformed or not; before or after the other transforms.
        *methods: Names of methods of the module, or of modules inside
            it as `name.of.module.method`.

    Returns:
        A new module with the type and the parameter names of `module`, which is unchanged.

    Raises:
        LayoutError: There is no such method; or it is a generator or a coroutine,
            whose body runs after it has returned.
        StateError: `module` is running, or was donated.
    """
    for name in methods:
        _require_method(module, name)
    request = Assignment(methods=tuple(name for name in methods if name != "forward"))
    return substitute(module, request, verb="gather_in")


def _require_method(module: nn.Module, name: str) -> None:
    path, _, attribute = name.rpartition(".")
    modules = dict(module.named_modules())
    method = (
        inspect.getattr_static(type(modules[path]), attribute, None) if path in modules else None
    )
    if not inspect.isfunction(method):
        raise LayoutError(
            f"There is no method {name!r}.",
            module=type(module).__name__,
            fix="name methods of its class, or of modules inside it: zf.register_forward_method(model, "
            "'encode', 'decoder.generate')",
        )
    if (
        inspect.isgeneratorfunction(method)
        or inspect.iscoroutinefunction(method)
        or inspect.isasyncgenfunction(method)
    ):
        raise LayoutError(
            f"{name!r} runs after it has returned, when its unit is no longer gathered.",
            module=type(module).__name__,
            fix=f"collect the results in {attribute} and return them, "
            "or read weights inside `with zf.unsharded(model):`",
        )
