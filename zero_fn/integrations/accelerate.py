"""`ZeroAccelerator`: accelerate's Accelerator, whose models are transformed
where it would wrap them in DDP.

accelerator = ZeroAccelerator(place=lambda model: zf.shard_params(model, mesh["dp"]),
gradient_accumulation_steps=4) accelerator = ZeroAccelerator(deepspeed="ds_config.json")
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from math import inf, isfinite, prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils.data import DataLoader

import zero_fn as zf
from zero_fn.deepspeed.optimizers import whole_where_needed
from zero_fn.integrations.accelerator_config import AcceleratorConfig, config_asked
from zero_fn.integrations.model_placement import (
    Place,
    exchange_parameters,
    place_module,
    plain_trained,
    refuse_stale,
    replaced_since,
)
from zero_fn.integrations.trainer_checkpoints import (
    STATES,
    load_states,
    model_of,
    note_overwriting,
    require_not_overwritten,
    save_states,
    whole_state,
)
from zero_fn.monitor.gradient_norm import clip_grad_norm
from zero_fn.runtime.registry import runs_of
from zero_fn.runtime.slot import slot_of
from zero_fn.transforms.accumulation_window import AccumulationWindow
from zero_fn.values.chained_optimizer import as_one

__all__ = ["ZeroAccelerator", "bare", "begin_placing", "require_own_samples"]


def bare(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside accelerate's AcceleratedOptimizer."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _is_optimizers(item: Any) -> bool:
    is_sequence = isinstance(item, list | tuple) and bool(item)
    return is_sequence and all(isinstance(each, Optimizer) for each in item)


def _is_bare(item: Any) -> bool:
    return isinstance(item, Optimizer) and bare(item) is item


def require_own_samples(model: nn.Module, processes: int) -> None:
    """Requires that gradients are averaged over all processes,
    to each of which a trainer gives samples of its own."""
    for run in runs_of(model, verb="a trainer"):
        axes = run.transport.axes
        if prod(axis.size for axis in axes) != processes:
            raise zf.errors.MeshError(
                "A trainer gives each process samples of its own, "
                "and some processes of this model must share them.",
                averaged_over=" x ".join(map(str, axes)) or "no ranks",
                processes=processes,
                fix="transforms over all processes; with tensor parallelism a loop of your own, "
                "and DistributedSampler(data, mesh['dp'].size(), mesh['dp'].get_local_rank())",
            )


def begin_placing(accelerator: Any, place: Place[nn.Module] | None) -> None:
    """Lets a ZeroAccelerator place models: what comes after the `__init__` of an Accelerator,
    to which a Trainer assigns this class.

    float16 is refused where accelerate would compute in float32 and scale no loss, without a word.
    """
    if accelerator.mixed_precision == "fp16" and not accelerator.native_amp:
        raise zf.errors.ConfigError(
            "accelerate has no float16 on this device: "
            "it would compute in float32, and scale no loss.",
            device=accelerator.device.type,
            fix='mixed_precision="bf16" (of a Trainer bf16=True); '
            'or a DeepSpeed config with "fp16": {"enabled": true}, '
            "whose loss scale works here, too: ZeroTrainer(..., "
            "deepspeed=config), zf.from_deepspeed",
        )
    accelerator.place = place
    accelerator._window = AccumulationWindow()


class ZeroAccelerator(Accelerator):
    """An Accelerator that transforms models where `Accelerator` would wrap them in DDP.

    `prepare` transforms each model that has trained parameters, and gives the new parameters to the
    optimizers beside it. A model that is transformed already is left as it is, unless it has
    trained parameters that were added since (adapters). An optimizer that looks at whole tensors is
    wrapped by `zf.by_owner`, unless you did so (`zf.streamed(zf.by_owner(...))`). `accumulate` and
    `no_sync` reduce gradients once a step. `save_state` and `load_state` write and read what each
    rank owns, for any number of ranks and any stage. `get_state_dict` returns whole values on the
    main process alone. Models without a transform are treated as by `Accelerator`.

    Args:
        *args: Those of Accelerator.
        place: Any chain of transforms; None leaves plain models to accelerate.
        deepspeed: A DeepSpeed config, as a path or the object itself, in place of `place`:
            `prepare` places the model as it says, or takes one that is, and streams the optimizer
            where it offloads. Its accumulation steps count. Where it says `"auto"`, the loader, the
            DummyOptim and the arguments of the Accelerator decide, as in accelerate. With
            `optimizer` and `scheduler` in it, `prepare` is given accelerate's DummyOptim and
            DummyScheduler. `optimizer.step()` clips and skips steps that overflow; DeepSpeed's
            `backward` does so.
        mesh: The mesh for that config; None takes that of a placed model,
            or makes one axis of all ranks.
        **options: Those of Accelerator. `deepspeed_plugin` is read as a config;
            DeepSpeed need not be installed.

    Raises:
        ConfigError: `mixed_precision="fp16"` on a CPU, where accelerate would do nothing;
            or both, a config and `place`.

    Attributes:
        config: The DeepSpeed config that is followed; `config.settings` is what it asks for,
            once a model is prepared.
    """

    place: Place[nn.Module] | None = None
    reduces_each = False  # whether each microbatch is reduced, as by DeepSpeed at stages 2 and 3
    loss_factor = 1  # what losses are multiplied with, where a DeepSpeed config adds gradients up
    # Whether a gradient norm that is not finite skips the step, as in DeepSpeed's bf16.
    skips_overflow = False
    _models: list[nn.Module]
    _optimizers: list[Any]
    _window: AccumulationWindow  # the microbatches of this step
    config: AcceleratorConfig | None = None

    def __init__(
        self,
        *args: Any,
        place: Place[nn.Module] | None = None,
        deepspeed: Any = None,
        mesh: DeviceMesh | None = None,
        **options: Any,
    ) -> None:
        config = config_asked(deepspeed, place, options)
        if config is None:
            super().__init__(*args, **options)
        else:
            own = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
            self.config = AcceleratorConfig(
                config, mesh, str(options.pop("mixed_precision", None) or own)
            )
            # Without this, accelerate would import DeepSpeed.
            with patch.dict(os.environ, ACCELERATE_USE_DEEPSPEED="false"):
                # The config's precision is a transform, and autocast would come on top.
                super().__init__(*args, mixed_precision="no", **options)
        begin_placing(self, place)

    def prepare(self, *objects: Any, **options: Any) -> Any:
        """Prepares models, then optimizers, loaders and schedulers,
        in the order in which they were given.

        Of a sequence of optimizers, `(muon, adamw)`, one comes back that steps them all.

        Raises:
            StateError: An optimizer took steps before its model was transformed.
            StaleError: An optimizer was built before its model was transformed elsewhere.
            MeshError: A loader is given, and some processes of a model must share samples,
                as in tensor parallelism.
            ConfigError: The DeepSpeed config cannot be followed; the model was placed in another
                way than it says; or the config and the program have an optimizer or a scheduler
                each, or neither has.
        """
        objects = tuple(as_one(item) if _is_optimizers(item) else item for item in objects)
        if self.config is not None:
            self.config.follow(self, objects)
            objects = self.config.with_optimizers(self, objects)
        new: dict[int, nn.Parameter] = {}
        objects = tuple(
            self._placed(item, new) if isinstance(item, nn.Module) else item for item in objects
        )
        for item in objects:
            if isinstance(item, Optimizer):
                exchange_parameters(bare(item), replaced_since(bare(item), self._models) | new)
        if any(isinstance(item, DataLoader) for item in objects):
            for item in objects:
                if isinstance(item, nn.Module) and zf.inspect.is_transformed(item):
                    require_own_samples(item, self.num_processes)
        refuse_stale([bare(item) for item in objects if isinstance(item, Optimizer)])
        if self.config is None:
            objects = tuple(whole_where_needed(it) if _is_bare(it) else it for it in objects)
            return super().prepare(*objects, **options)
        prepared = super().prepare(*self.config.completed(self, objects), **options)
        self.config.follow_steps(self, prepared if len(objects) > 1 else [prepared])
        return prepared

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Casts and compiles a model as accelerate does, and transforms it
        unless it is for evaluation."""
        if not evaluation_mode:
            model = self._placed(model, {})
        transformed = zf.inspect.is_transformed(model)
        prepared: nn.Module = super().prepare_model(
            model, False if transformed else device_placement, evaluation_mode or transformed
        )
        return prepared

    def _placed(self, model: nn.Module, new: dict[int, nn.Parameter]) -> nn.Module:
        """The model, transformed if it needs to be.

        Adds its new parameters to `new`, by the id of the replaced ones.
        """
        if self.config is not None and self.config.settings is None:
            self.config.follow(self, [model])
        if self.place is None or not plain_trained(model):
            return model
        transformed, replaced = place_module(
            self.place, model, self.device if self.device_placement else None
        )
        new.update(replaced)
        return transformed

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Sums gradients inside the block; the next `backward` outside
        of it reduces them all, once.

        With a DeepSpeed config of stage 2 or 3 each backward reduces its own, and shards add up.
        """
        if not zf.inspect.is_transformed(model):
            with super().no_sync(model):
                yield
            return
        if self.reduces_each:
            yield
            return
        with self._window.dropped_on_error():
            self._window.begin(model)
            yield

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Scales the loss and runs backward.

        Reduces what `no_sync` has summed if this is the last microbatch of a step.
        """
        with self._window.dropped_on_error():
            super().backward(loss if self.loss_factor == 1 else loss * self.loss_factor, **options)
        if self.sync_gradients:
            self._window.end()

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divides gradients by the loss scale. accelerate does so under its own fp16 only."""
        if self.native_amp or self.scaler is None:
            super().unscale_gradients(optimizer)
            return
        for each in self._optimizers if optimizer is None else [optimizer]:
            self.scaler.unscale_(bare(each))

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step was skipped. accelerate does not see that a fused
        optimizer has skipped by itself."""
        return bool(
            getattr(self.scaler, "has_skipped", False) or super().optimizer_step_was_skipped
        )

    def clip_grad_norm_(self, parameters: Any, max_norm: Any, norm_type: Any = 2) -> Any:
        """Clips gradients and returns their norm.

        Where overflows skip a step, a norm that is not finite drops gradients.

        Raises:
            ConfigError: A DeepSpeed config clips to another norm.
        """
        if self.config is not None:
            max_norm = self.config.norm_to_clip_to(max_norm)
        parameters = list(parameters)
        if norm_type == 2 and all(slot_of(parameter) is not None for parameter in parameters):
            self.unscale_gradients()
            norm = clip_grad_norm(parameters, None if max_norm == inf else max_norm)
        else:
            norm = super().clip_grad_norm_(parameters, max_norm, norm_type)
        if self.skips_overflow and self.scaler is None:
            for optimizer in self._optimizers:
                # A Trainer asks for this before it moves rates.
                optimizer._is_overflow = not isfinite(norm)
                if optimizer._is_overflow:
                    optimizer.optimizer.zero_grad()
        return norm

    def free_memory(self, *objects: Any) -> Any:
        """Forgets models, optimizers, and gradients that were summed but not reduced yet.

        Reports of a config end.
        """
        if self.config is not None:
            self.config.resume()
        if self._window.modules:
            self._window.end(InterruptedError("the microbatches of this step were given up"))
        return super().free_memory(*objects)

    def end_training(self) -> None:
        """Ends trackers, and what a DeepSpeed config reports to."""
        if self.config is not None:
            self.config.resume(**self.config.counts)
        super().end_training()

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The state dict of a model.

        Of a transformed one all ranks call it, and the main process alone gets whole values: in 16
        bits, if a DeepSpeed config says so of saving.
        """
        if not zf.inspect.is_transformed(model):
            plain: dict[str, Any] = super().get_state_dict(model, unwrap)
            return plain
        settings = None if self.config is None else self.config.settings
        return whole_state(
            self.unwrap_model(model, keep_torch_compile=False),
            keep=self.is_main_process,
            dtype=None if settings is None else settings.computing.saved,
        )

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **options: Any
    ) -> Any:
        """Saves everything that was prepared or registered.

        Each rank writes the shards that it owns, below `zero_fn/`.

        In a folder that is written again, `load_state` finds all of the new save, or all of the one
        before. It refuses what a kill has left between: accelerate overwrites its own files one by
        one, before those of models are there.
        """

        def begin(*given: Any) -> None:
            if models and self.is_main_process:
                note_overwriting(Path(given[-1]) / STATES)
            self.wait_for_everyone()

        with (
            self._without_transformed() as (models, optimizers),
            self.register_save_state_pre_hook(begin),
        ):
            folder = super().save_state(output_dir, safe_serialization, **options)
        if models:
            counts = None if self.config is None else self.config.counts
            save_states(Path(folder) / STATES, models, optimizers, counts)
        return folder

    def load_state(
        self, input_dir: str | None = None, load_kwargs: Any = None, **options: Any
    ) -> None:
        """Loads what `save_state` saved, also on another number of ranks and at another stage.

        Raises:
            CheckpointError: The folder does not hold the states of transformed models,
                or a save into it was killed.
        """
        folders: list[Path] = []

        def begin(_: Any, folder: str) -> None:
            folders.append(Path(folder) / STATES)
            require_not_overwritten(folders[0])

        with (
            self._without_transformed() as (models, optimizers),
            self.register_load_state_pre_hook(begin),
        ):
            super().load_state(input_dir, load_kwargs, **options)
        if models:
            counts = load_states(folders[0], models, optimizers)
            if self.config is not None:
                self.config.resume(**counts)

    @contextmanager
    def _without_transformed(
        self,
    ) -> Iterator[tuple[list[nn.Module], list[tuple[nn.Module, Optimizer]]]]:
        """Hides transformed models and their optimizers, which it yields with the model of each,
        from accelerate: it would save the shards of one rank only."""
        bare_model = partial(self.unwrap_model, keep_torch_compile=False)
        models = [model for model in self._models if zf.inspect.is_transformed(model)]
        owners = [(model_of(each, models), each) for each in self._optimizers]
        owned = [(bare_model(owner), bare(each)) for owner, each in owners if owner is not None]
        others = [model for model in self._models if not zf.inspect.is_transformed(model)]
        alone = [each for owner, each in owners if owner is None]
        with patch.multiple(self, _models=others, _optimizers=alone):
            yield [bare_model(model) for model in models], owned
