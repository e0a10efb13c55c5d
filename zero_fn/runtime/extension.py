"""How a parameter of a tensor subclass is made of the one plain tensor in it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

__all__ = ["EXTENSION", "Extension"]

EXTENSION = "_zero_fn_extension"
"""The attribute of a plain tensor which holds its `Extension`, until a transform replaces it."""


@dataclass(eq=False)
class Extension:
    """How a parameter of a tensor subclass is made of the one plain tensor in it."""

    kind: Any  # the class
    part: str  # the name of the plain tensor in it
    context: Any  # of `__tensor_flatten__`
    module: Callable[[], nn.Module | None] = lambda: None  # that holds the parameter
    # Bytes of the whole parameter as it travels; None before the first gather.
    sent_nbytes: int | None = None

    def rebuilt(self, part: Tensor) -> Any:
        """The tensor of the class on the memory of a plain tensor."""
        return self.kind.__tensor_unflatten__(
            {self.part: part}, self.context, part.size(), part.stride()
        )

    def held_by(self, module: nn.Module) -> Extension:
        """The same extension, for a parameter of this module."""
        return replace(self, module=weakref.ref(module))
