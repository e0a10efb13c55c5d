"""A DeepSpeed config in a ZeroAccelerator, read as accelerate reads it for DeepSpeed,
which need not be installed.

`"auto"` is what the program says: its loader, its `mixed_precision`, its DummyOptim.
The step clips, as DeepSpeed's does.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DeepSpeedPlugin
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

import zero_fn as zf
from zero_fn.deepspeed.auto import BATCHES, left_to, values_of
from zero_fn.deepspeed.entries import leaves_of
from zero_fn.deepspeed.optimizers import finished
from zero_fn.deepspeed.placement import made_by, mesh_of, require_placed
from zero_fn.deepspeed.reporter import Reporter
from zero_fn.deepspeed.settings import Settings
from zero_fn.deepspeed.setup import agreed_settings
from zero_fn.integrations.model_placement import all_ranks
from zero_fn.values.tiers import IN_MEMORY

__all__ = ["AcceleratorConfig", "config_asked", "follow_settings"]


def config_asked(deepspeed: Any, place: object, options: dict[str, Any]) -> Any:
    """The DeepSpeed config of a ZeroAccelerator: that of an argument, or of a DeepSpeedPlugin,
    which is taken out of the options.

    With neither, and no `place`, that of the environment in which
    `accelerate launch` starts processes.

    Raises:
        ConfigError: There are two, or several plugins.
    """
    plugins = [options.pop(name, None) for name in ("deepspeed_plugin", "deepspeed_plugins")]
    is_launched = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    if is_launched and place is None and deepspeed is None and not any(plugins):
        plugins = [DeepSpeedPlugin()]
    found = [each for each in (deepspeed, place, *plugins) if each is not None]
    if len(found) > 1 or any(isinstance(each, dict) for each in plugins):
        raise zf.errors.ConfigError(
            "A ZeroAccelerator was given several ways to place its model.",
            given=", ".join(type(each).__name__ for each in found),
            fix='one of deepspeed="ds_config.json", '
            "deepspeed_plugin=DeepSpeedPlugin(...) and place=",
        )
    if not isinstance(found[0] if found else None, DeepSpeedPlugin):
        return deepspeed
    # The plugin silences DeepSpeed by an infinite number of steps.
    return {
        name: value
        for name, value in found[0].deepspeed_config.items()
        if name != "steps_per_print"
    }


def follow_settings(accelerator: Any, settings: Settings, mesh: DeviceMesh) -> None:
    """Lets a ZeroAccelerator, also that of a Trainer, scale losses, skip steps and reduce
    microbatches as a config says."""
    accelerator.scaler = None if settings.scaler is None else settings.scaler(mesh.device_type)
    accelerator.skips_overflow = settings.skips_overflow
    accelerator.reduces_each = settings.sharding.stage > 1
    accelerator.loss_factor = settings.loss_factor(mesh)


def _is_prepared(item: Any) -> bool:
    return getattr(item, "_is_accelerate_prepared", False)


class AcceleratorConfig:
    """A DeepSpeed config that a ZeroAccelerator follows."""

    def __init__(self, config: Any, mesh: DeviceMesh | None, precision: str) -> None:
        self.settings: Settings | None = None  # until the first model that is trained
        self.is_clipped = False  # whether the gradients of this step were
        self._config = config
        self._mesh = mesh
        self._precision = precision  # accelerate's `mixed_precision`
        self._own: list[LRScheduler] = []
        self.steps = self.skipped = 0  # so far, of which skipped
        self._reporter: Reporter | None = None  # from the first step on

    def follow(self, accelerator: Any, objects: Sequence[Any]) -> None:
        """Reads the config once there is a model to train; checks what is prepared with it.

        Raises:
            ConfigError: As `zf.from_deepspeed`; or `mixed_precision` says otherwise.
            DisagreementError: Ranks have different configs.
        """
        for model in objects:
            if not isinstance(model, nn.Module) or not any(
                each.requires_grad for each in model.parameters()
            ):
                continue
            own = mesh_of(model)
            mesh = self._mesh or own or all_ranks(accelerator.device.type)
            if self.settings is None:
                values = partial(_auto_of, accelerator, objects, self._precision)
                self.settings = settings = agreed_settings(self._config, values, mesh)
                accelerator.place = partial(made_by, settings, mesh)
                follow_settings(accelerator, settings, mesh)
                accelerator.gradient_accumulation_steps = settings.accumulation_steps
            if own is not None:
                require_placed(self.settings, mesh, model)

    def with_optimizers(self, accelerator: Any, objects: Sequence[Any]) -> tuple[Any, ...]:
        """The objects, with the optimizer of the config in place of a DummyOptim.

        Raises:
            ConfigError: The config and the program have an optimizer or a
                scheduler each, or neither has.
        """
        own = self.settings
        models = [*accelerator._models, *(each for each in objects if isinstance(each, nn.Module))]
        found = []
        for each in objects:
            if not _is_prepared(each):
                _require_one("optimizer", own and own.stock, each, Optimizer, DummyOptim)
                _require_one("scheduler", own and own.scheduler, each, LRScheduler, DummyScheduler)
            if own and own.stock and isinstance(each, DummyOptim):
                each = own.stock.over(each.params, models)
            found.append(each)
        return tuple(found)

    def completed(self, accelerator: Any, objects: Sequence[Any]) -> tuple[Any, ...]:
        """The objects, with optimizers as the config has them stepped (streamed, by owners), and
        schedulers in place of a DummyScheduler."""
        tiers = IN_MEMORY if self.settings is None else self.settings.sharding.tiers
        found: list[Any] = [
            finished(each, tiers)
            if isinstance(each, Optimizer) and not _is_prepared(each)
            else each
            for each in objects
        ]
        optimizers = [each.optimizer for each in accelerator._optimizers]
        optimizers += [each for each in found if isinstance(each, Optimizer)]
        different = {
            id(own): own for own in (getattr(each, "optimizer", each) for each in optimizers)
        }
        if len(different) > 1:
            raise zf.errors.ConfigError(
                "A DeepSpeed config was given several optimizers, each with steps of its own.",
                optimizers=", ".join(type(each).__name__ for each in different.values()),
                why="it clips, skips overflows and counts in the step of one",
                fix="accelerator.prepare(model, (muon, adamw), loader), "
                "which gives one that steps both",
            )
        for number, each in enumerate(found):
            if isinstance(each, DummyScheduler):
                make: Any = each.lr_scheduler_callable or (
                    self.settings and self.settings.scheduler
                )
                found[number] = make(optimizers[-1])
                self._own.append(found[number])
        return tuple(found)

    def follow_steps(self, accelerator: Any, prepared: Sequence[Any]) -> None:
        """Makes optimizers clip before they step, and the config's schedulers step once with them,
        as DeepSpeed's do."""
        for each in prepared:
            if isinstance(each, AcceleratedOptimizer):
                each.step = partial(self._step, accelerator, each)
            elif isinstance(each, AcceleratedScheduler) and any(
                each.scheduler is own for own in self._own
            ):
                each.split_batches = True

    def norm_to_clip_to(self, max_norm: float) -> float:
        """Requires that a program clips to the norm of the config,
        which is infinite where the config says 0.

        Raises:
            ConfigError: It is another one.
        """
        own = math.inf if self.settings is None else self.settings.max_norm or math.inf
        if max_norm != own:
            raise zf.errors.ConfigError(
                "A DeepSpeed config clips gradients, and the program to another norm.",
                config=own,
                program=max_norm,
                fix='the same "gradient_clipping" in the config; '
                "or no call of clip_grad_norm_: optimizer.step() clips",
            )
        self.is_clipped = True
        return own

    @property
    def counts(self) -> dict[str, int]:
        """What a checkpoint has for `resume`."""
        return {"steps": self.steps, "skipped": self.skipped}

    def resume(self, steps: int = 0, skipped: int = 0) -> None:
        """Goes on after so many steps.

        What is open of reports is closed; the next step opens it anew.
        """
        self.steps = steps
        self.skipped = skipped
        if self._reporter is not None:
            self._reporter.close()
            self._reporter = None

    def _step(self, accelerator: Any, optimizer: AcceleratedOptimizer, closure: Any = None) -> None:
        settings = self.settings
        if accelerator.sync_gradients and settings is not None:
            if not self.is_clipped and (settings.max_norm or settings.skips_overflow):
                models = [
                    model for model in accelerator._models if zf.inspect.is_transformed(model)
                ]
                parameters = [parameter for model in models for parameter in model.parameters()]
                accelerator.clip_grad_norm_(parameters, settings.max_norm or math.inf)
            self.is_clipped = False
            # Made before the step, which is counted, too.
            if settings.reporting is not None and self._reporter is None:
                model = next(
                    model for model in accelerator._models if zf.inspect.is_transformed(model)
                )
                self._reporter = Reporter(
                    settings.reporting, model, optimizer.optimizer, self.steps, self.skipped
                )
        type(optimizer).step(optimizer, closure)
        if accelerator.scaler is not None:
            # accelerate does not see a step that is fused.
            optimizer._is_overflow = accelerator.optimizer_step_was_skipped
        if accelerator.sync_gradients and settings is not None:
            self.steps += 1
            self.skipped += bool(optimizer.step_was_skipped)
            if self._reporter is None:
                return
            samples = (
                settings.micro_batch_size * settings.accumulation_steps * accelerator.num_processes
            )
            self._reporter.step(samples=samples, norm=None, scaler=accelerator.scaler)


def _auto_of(
    accelerator: Any, objects: Sequence[Any], precision: str, config: Mapping[str, object]
) -> Mapping[str, object]:
    """What the program says where the config says `"auto"`, by the paths of entries."""
    ranks = accelerator.num_processes
    # Whose loaders and schedulers count batches and steps of all ranks together.
    shared = ranks if accelerator.split_batches else 1
    sizes: list[Any] = [each.batch_size for each in objects if isinstance(each, DataLoader)]
    arguments = {
        "per_device_train_batch_size": None if not sizes or None in sizes else min(sizes) // shared,
        "gradient_accumulation_steps": accelerator.gradient_accumulation_steps,
        "max_grad_norm": 1.0,
        "bf16": precision == "bf16",
        "fp16": precision == "fp16",
    }
    for each in objects:
        if isinstance(each, DummyOptim):
            arguments |= {"learning_rate": each.lr, "weight_decay": each.weight_decay}
        elif isinstance(each, DummyScheduler) and each.lr_scheduler_callable is None:
            rates = getattr(each.optimizer, "defaults", None) or vars(each.optimizer)
            arguments["learning_rate"] = rates.get("lr")
            arguments["warmup_steps"] = max(1, each.warmup_num_steps)
            if each.total_num_steps is not None:
                arguments["the steps of the training"] = math.ceil(
                    each.total_num_steps * shared / ranks
                )
    _require_one_dtype(precision, dict(leaves_of(config)))
    values = values_of(arguments, config, ranks)
    return left_to(values, config, {*BATCHES, f"{precision}.enabled"})


def _require_one_dtype(precision: str, said: Mapping[str, object]) -> None:
    """Requires that a config computes in the dtype of `mixed_precision`."""
    asked, dtypes = f"{precision}.enabled", {"bf16.enabled", "fp16.enabled"}
    if precision != "no" and (
        asked not in dtypes
        or said.get(asked) is False
        or any(said.get(path) is True for path in dtypes - {asked})
    ):
        raise zf.errors.ConfigError(
            "A DeepSpeed config contradicts the mixed_precision of its Accelerator.",
            mixed_precision=precision,
            config=", ".join(f"{path} = {said.get(path)}" for path in sorted(dtypes)),
            fix='the same dtype in both; or "auto" in the config',
        )


def _require_one(name: str, own: object, each: Any, kind: type, dummy: type) -> None:
    """Requires that the optimizer or the scheduler is made in one way: `own`,
    by the config, or by the program."""
    if own is not None and isinstance(each, kind):
        raise zf.errors.ConfigError(
            f"There are two ways to make the {name}: the DeepSpeed config, and the program.",
            program=type(each).__name__,
            fix=f"accelerate.utils.deepspeed.{dummy.__name__}(...) in the program; "
            f'or no "{name}" in the config',
        )
    if own is None and isinstance(each, dummy) and not getattr(each, "lr_scheduler_callable", None):
        raise zf.errors.ConfigError(
            f"A {dummy.__name__} stands for the {name} of a DeepSpeed config, and there is none.",
            fix=f'"{name}": {{...}} in the config; or the {name} itself, '
            "prepared with or after its model",
        )
