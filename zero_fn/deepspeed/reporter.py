"""What a config prints and logs (`steps_per_print`, breakdowns, monitors, profilers):
sinks of `zf.metrics`, and `zf.profile`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_fn.deepspeed.entries import Entries
from zero_fn.monitor import Comet, Csv, Print, TensorBoard, WandB
from zero_fn.monitor.metrics import metrics
from zero_fn.monitor.sinks.outlet import Outlet
from zero_fn.profiling import Profile, profile
from zero_fn.runtime.registry import runs_of
from zero_fn.transport.agree import done_over
from zero_fn.transport.traffic import Sent, traffic

__all__ = ["Reporter", "Reporting", "reporting_of"]


@dataclass(frozen=True, slots=True)
class Reporting:
    """What a config asks to be told."""

    every: int  # steps between lines; 0: none
    seconds: bool  # lines have the seconds of phases; and bytes of memory
    memory: bool
    counts: bool  # bytes sent are counted
    # Steps before those that are profiled: two, for operations are counted in the first alone.
    profiled: int | None
    profile_file: str | None
    sinks: tuple[Callable[[], Outlet], ...]  # each has the numbers of each step


class Reporter:
    """Tells of steps what a config asks for.

    On rank 0 it prints and logs; `sent` counts bytes on each rank.
    """

    def __init__(
        self,
        asked: Reporting,
        model: nn.Module,
        optimizer: Optimizer,
        steps: int = 0,
        skipped: int = 0,
    ) -> None:
        self.sent: Sent | None = None
        self._asked = asked
        self._profiled = partial(profile, model, optimizer, flops=True)
        self._profile: Profile | None = None
        self._loss: Tensor | None = None
        self._is_first = not dist.is_initialized() or dist.get_rank() == 0
        self._open = ExitStack()
        if asked.counts:
            self.sent = self._open.enter_context(traffic())
        self._line = runs_of(model, verb="from_deepspeed")[0].transport
        sinks = done_over(
            self._line.axes, self._sinks, "Opening the monitors of a DeepSpeed config", Exception
        )
        self._metrics = None
        if asked.sinks or asked.every:
            every = 1 if asked.sinks else asked.every
            self._metrics = self._open.enter_context(
                metrics(model, optimizer, sinks=sinks, every=every, norm=False)
            )
        self.resume(steps, skipped)

    def _sinks(self) -> list[Outlet]:
        """Those of rank 0."""
        asked = self._asked
        if not self._is_first:
            return []
        if asked.profile_file is not None:
            Path(asked.profile_file).parent.mkdir(parents=True, exist_ok=True)
            Path(asked.profile_file).touch()
        found = [make() for make in asked.sinks]
        if asked.every:
            more = None if self.sent is None else partial(repr, self.sent)
            found.append(
                Print(every=asked.every, seconds=asked.seconds, memory=asked.memory, more=more)
            )
        return found

    def resume(self, steps: int, skipped: int = 0) -> None:
        """Goes on after so many steps."""
        self._steps = steps
        if self._metrics is not None:
            self._metrics.steps, self._metrics.skipped = steps, skipped

    def note(self, loss: Tensor) -> None:
        """Adds the loss of a microbatch to that of its step."""
        if self._metrics is not None:
            self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()

    def step(self, *, samples: int, norm: float | None, scaler: Any) -> None:
        """Ends a step of so many samples of all ranks. A collective of all ranks."""
        self._steps += 1
        if self._metrics is not None:
            loss, self._loss = self._loss, None
            own = samples / self._line.size
            self._metrics.step(loss, samples=own, grad_norm=norm, scaler=scaler)
        if self._steps == self._asked.profiled:
            self._profile = self._profiled().__enter__()
        elif self._profile is not None and self._steps - 2 == self._asked.profiled:
            ended, self._profile = self._profile, None
            ended.__exit__(None)
            if self._is_first and self._asked.profile_file is not None:
                Path(self._asked.profile_file).write_text(f"{ended}\n", encoding="utf-8")
            elif self._is_first:
                print(ended, flush=True)

    def close(self) -> None:
        """Closes what is open, with the files of monitors; may be called again.

        A profile whose steps have not all come is given up, with a warning:
        ranks that end early would not meet.
        """
        if self._profile is not None:
            given_up, self._profile = self._profile, None
            given_up.__exit__(InterruptedError)
            warnings.warn(
                f"flops_profiler has shown nothing: the run ended after step {self._steps}, "
                f"and it looks at steps {self._asked.profiled} + 1 and + 2 (profile_step)",
                stacklevel=2,
            )
        self._open.close()


def reporting_of(entries: Entries) -> Reporting | None:
    """Reads the entries; None if the config asks for nothing of it."""
    sinks: list[Callable[[], Outlet]] = []
    if entries["tensorboard.enabled"]:
        folder = Path(entries["tensorboard.output_path"], entries["tensorboard.job_name"])
        sinks.append(lambda: TensorBoard(folder))
    if entries["csv_monitor.enabled"]:
        file = Path(entries["csv_monitor.output_path"], f"{entries['csv_monitor.job_name']}.csv")
        sinks.append(lambda: Csv(file))
    if entries["wandb.enabled"]:
        own = {"entity": entries["wandb.team"], "group": entries["wandb.group"]}
        sinks.append(lambda: WandB(entries["wandb.project"], **own))
    if entries["comet.enabled"]:
        names = ("workspace", "api_key", "experiment_key", "online", "mode")
        given = {
            name: entries[f"comet.{name}"] for name in names if entries.is_given(f"comet.{name}")
        }
        sinks.append(lambda: Comet(entries["comet.project"], **given))
    seconds, memory = entries["wall_clock_breakdown"], entries["memory_breakdown"]
    found = Reporting(
        every=int(entries["steps_per_print"] or 0) or int(seconds or memory),
        seconds=seconds,
        memory=memory,
        counts=entries["comms_logger.enabled"],
        profiled=max(1, entries["flops_profiler.profile_step"])
        if entries["flops_profiler.enabled"]
        else None,
        profile_file=entries["flops_profiler.output_file"],
        sinks=tuple(sinks),
    )
    asks = found.every or found.counts or found.sinks or found.profiled is not None
    return found if asks else None
