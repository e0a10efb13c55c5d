"""Floating-point operations of a step by torch's counter, and the most that the device can do."""

from __future__ import annotations

from time import perf_counter

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from zero_fn.planning.machines import device_named
from zero_fn.values import watching
from zero_fn.values.watching import Moment, Watch

__all__ = ["Operations", "peak_of"]

_MEASURED: dict[tuple[str, torch.dtype], float] = {}


class Operations(Watch):
    """Counts the operations of one step, which it makes slower. The end of the step closes it."""

    def __init__(self) -> None:
        self.total = self.forward = (
            0  # of the step; and of its forwards, without those that are computed again in backward
        )
        self._counter = FlopCounterMode(display=False)
        self._before = 0  # up to the last backward

    def open(self) -> None:
        """Counts from now."""
        self._counter.__enter__()  # type: ignore[no-untyped-call]
        watching.look(self)

    def close(self) -> None:
        """Counts no more; may be called again."""
        if self in watching.watchers:
            watching.look_away(self)
            self.total = self._counter.get_total_flops()
            self._counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    @property
    def of_model(self) -> int:
        """Operations that the model needs: those of forward, and twice as many of backward, or what
        backward has if that is less (frozen parameters).

        What is computed again is not counted.
        """
        return min(self.total, 3 * self.forward)

    def note(self, moment: Moment, what: str = "") -> None:
        """Tells forward from backward."""
        if moment is Moment.BACKWARD:
            self.forward += self._counter.get_total_flops() - self._before
        elif moment is Moment.BACKWARD_END:
            self._before = self._counter.get_total_flops()


def peak_of(device_type: str, dtype: torch.dtype) -> float:
    """Operations a second that a device of this type can do: as its vendor says for 16 bits, or
    those of a large product of matrices, which is measured once."""
    known = device_named(torch.cuda.get_device_name()) if device_type == "cuda" else None
    if known is not None and dtype.itemsize == 2:
        return known.flops16
    if (device_type, dtype) not in _MEASURED:
        size = 1024 if device_type == "cpu" else 8192
        generator = torch.Generator(device_type).manual_seed(0)
        left = torch.randn(size, size, device=device_type, generator=generator).to(dtype)
        seconds = min(_seconds_of_product(left) for _ in range(10))
        _MEASURED[device_type, dtype] = 2 * size**3 / seconds
    return _MEASURED[device_type, dtype]


def _seconds_of_product(left: Tensor) -> float:
    begin = perf_counter()
    float((left @ left)[0, 0])  # waits for it
    return perf_counter() - begin
