"""Numbers for TensorBoard."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy

from zero_fn.monitor.sinks.outlet import Numbers, Outlet, flat, library

__all__ = ["TensorBoard"]


class TensorBoard(Outlet):
    """Scalars, named as by `flat`, and the distributions of histograms:
    `tensorboard --logdir runs`.

    Args:
        folder: Where event files are written. A run that is started again names the same.

    Raises:
        ConfigError: The package tensorboard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str] = "runs") -> None:
        self._new_writer = library("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._writer: Any = self._new_writer(os.fspath(folder))
        super().__init__(os.fspath(folder))

    def _write(self, step: int, numbers: Numbers) -> None:
        # A writer that failed fails for ever, so the next step has a new one, whose file
        # TensorBoard reads after the others.
        writer, self._writer = self._writer or self._new_writer(self.where), None
        for name, number in flat(numbers).items():
            writer.add_scalar(name, number, step)
        for key, values in numbers.items():
            if isinstance(values, Sequence) and values:
                writer.add_histogram(key, numpy.asarray(values), step)
        writer.flush()
        self._writer = writer

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
