"""`accumulate` for loops that run microbatches one by one: `no_sync` of a trainer, `backward` of
DeepSpeed's engine.

Gradients are reduced once for all microbatches of a step: the window opens with the first of them,
and closes in the backward of the last, before gradients are clipped and the optimizer steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from zero_fn.transforms.accumulate import accumulate

__all__ = ["AccumulationWindow"]


class AccumulationWindow:
    """The blocks of `zf.accumulate` that are open, one for each module."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []  # whose gradients are being summed
        self._blocks = ExitStack()

    def begin(self, module: nn.Module) -> None:
        """Sums the gradients of a transformed module from here on.

        Does nothing if they are summed already.
        """
        if not any(module is other for other in self.modules):
            self._blocks.enter_context(accumulate(module))
            self.modules.append(module)

    def end(self, error: BaseException | None = None) -> None:
        """Reduces the summed gradients, or drops them after an error.

        Does nothing if no window is open.
        """
        blocks, self._blocks, self.modules = self._blocks, ExitStack(), []
        blocks.__exit__(type(error) if error is not None else None, error, None)

    @contextmanager
    def dropped_on_error(self) -> Iterator[None]:
        """Drops the summed gradients if the block raises."""
        try:
            yield
        except BaseException as error:
            self.end(error)
            raise
