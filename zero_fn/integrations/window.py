"""`zf.accumulate` for trainers that call for each microbatch alone.

A trainer enters its `no_sync` anew for each microbatch but the last. Gradients are reduced once for all of them: the window
begins with the first and ends in the backward of the last, before clipping and the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

import zero_fn as zf

__all__ = ["AccumulationWindow"]


class AccumulationWindow:
    """Blocks of `zf.accumulate` that are open, one for each module.

    Attributes:
        modules: Those modules.
    """

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self._blocks = ExitStack()

    def begin(self, module: nn.Module) -> None:
        """Gradients of a transformed module are summed from here on; does nothing if they are already."""
        if not any(module is other for other in self.modules):
            self._blocks.enter_context(zf.accumulate(module))
            self.modules.append(module)

    def end(self, error: BaseException | None = None) -> None:
        """Reduces what was summed; after an error it is dropped. Does nothing if nothing has begun."""
        blocks, self._blocks, self.modules = self._blocks, ExitStack(), []
        blocks.__exit__(type(error) if error is not None else None, error, None)

    @contextmanager
    def dropping(self) -> Iterator[None]:
        """Ends with whatever error passes."""
        try:
            yield
        except BaseException as error:
            self.end(error)
            raise
