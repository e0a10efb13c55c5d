"""`ZeroAccelerator`: accelerate's Accelerator, whose models are transformed where it would wrap them in DDP.

accelerator = ZeroAccelerator(place=lambda model: zf.zero3(model, mesh["dp"]), gradient_accumulation_steps=4)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite, prod
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

import zero_fn as zf
from zero_fn.integrations.placing import Place, exchange_parameters, place_module, plain_trained, refuse_stale
from zero_fn.integrations.states import load_states, model_of, save_states, whole_state
from zero_fn.integrations.window import AccumulationWindow
from zero_fn.runtime.entry import runs_of

__all__ = ["STATES", "ZeroAccelerator", "bare", "require_own_samples"]

STATES = "zero_fn"
"""The folder, in a checkpoint of accelerate or of a Trainer, that holds what ranks own."""


def bare(optimizer: Optimizer) -> Optimizer:
    """The optimizer itself, without what accelerate puts around it."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def require_own_samples(model: nn.Module, processes: int) -> None:
    """Raises unless each process may have samples of its own, which accelerate and the Trainer give it.

    Raises:
        MeshError: Gradients are averaged over fewer ranks: the others share samples, as in tensor parallelism.
    """
    for run in runs_of(model, verb="a trainer"):
        axes = run.transport.axes
        if prod(axis.size for axis in axes) != processes:
            raise zf.MeshError(
                "A trainer gives each process samples of its own, and some processes of this model must share them.",
                averaged_over=" x ".join(map(str, axes)) or "no ranks",
                processes=processes,
                fix="transforms over all processes; with tensor parallelism a loop of your own, and DistributedSampler("
                "data, mesh['dp'].size(), mesh['dp'].get_local_rank())",
            )


class ZeroAccelerator(Accelerator):
    """An Accelerator that trains transformed models in place of replicas in DDP.

    `prepare` transforms each model that has something to train, and gives its new parameters to the optimizers beside it. A
    model that was transformed before is left as it is. `accumulate` and `no_sync` reduce once; `save_state` and `load_state`
    write and read what each rank owns, for any number of ranks and any stage; `get_state_dict` has whole values on the main
    process alone. Models that are not transformed are treated as ever.

    Args:
        *args: As of Accelerator.
        place: Any chain of transforms; None leaves plain models to accelerate.
        **options: As of Accelerator.
    """

    place: Place[nn.Module] | None = None
    skips_overflow = False  # whether a step whose norm of gradients is not finite is none: DeepSpeed does so in bf16
    _models: list[nn.Module]
    _optimizers: list[Any]
    _own_window: AccumulationWindow | None = None

    def __init__(self, *args: Any, place: Place[nn.Module] | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.place = place

    def prepare(self, *objects: Any, **options: Any) -> Any:
        """Prepares models, then optimizers, loaders and schedulers, in the order in which they were given.

        Raises:
            StateError: An optimizer took steps before its model was transformed.
            StaleError: An optimizer was built before its model was transformed elsewhere.
            MeshError: A loader is given, and its samples are not those that each process of the model must have.
        """
        new: dict[int, nn.Parameter] = {}
        objects = tuple(self._placed(item, new) if isinstance(item, nn.Module) else item for item in objects)
        optimizers = [bare(item) for item in objects if isinstance(item, Optimizer)]
        for optimizer in optimizers:
            exchange_parameters(optimizer, new)
        if any(isinstance(item, DataLoader) for item in objects):
            for item in objects:
                if isinstance(item, nn.Module) and zf.is_transformed(item):
                    require_own_samples(item, self.num_processes)
        refuse_stale(optimizers)
        return super().prepare(*objects, **options)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepares a model: casts and compiles it as accelerate does, and transforms it unless it is for evaluation."""
        if not evaluation_mode:
            model = self._placed(model, {})
        transformed = zf.is_transformed(model)
        prepared: nn.Module = super().prepare_model(
            model, False if transformed else device_placement, evaluation_mode or transformed
        )
        return prepared

    @property
    def _window(self) -> AccumulationWindow:
        """Of the microbatches of this step. The Trainer makes this class of an Accelerator: no `__init__` was called."""
        if self._own_window is None:
            self._own_window = AccumulationWindow()
        return self._own_window

    def _placed(self, model: nn.Module, new: dict[int, nn.Parameter]) -> nn.Module:
        """The model transformed, if it is to be; notes what took the place of its parameters."""
        if self.place is None or not plain_trained(model):
            return model
        transformed, replaced = place_module(self.place, model, self.device if self.device_placement else None)
        new.update(replaced)
        return transformed

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Does not reduce the gradients of what runs inside: the next `backward` outside reduces them all, once."""
        if not zf.is_transformed(model):
            with super().no_sync(model):
                yield
            return
        with self._window.dropping():
            self._window.begin(model)
            yield

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Scales a loss and goes backward; ends what `no_sync` began if gradients are to be reduced now."""
        with self._window.dropping():
            super().backward(loss, **options)
        if self.sync_gradients:
            self._window.end()

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divides gradients by the scale of the loss; accelerate does it under its own fp16 alone."""
        if self.native_amp or self.scaler is None:
            super().unscale_gradients(optimizer)
            return
        for each in self._optimizers if optimizer is None else [optimizer]:
            self.scaler.unscale_(bare(each))

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step was none. accelerate takes a fused optimizer, which skips by itself, to have stepped."""
        return bool(getattr(self.scaler, "has_skipped", False) or super().optimizer_step_was_skipped)

    def clip_grad_norm_(self, parameters: Any, max_norm: Any, norm_type: Any = 2) -> Any:
        """Clips gradients and measures them; drops them, so that nothing is stepped, where overflows are skipped."""
        norm = super().clip_grad_norm_(parameters, max_norm, norm_type)
        if self.skips_overflow and self.scaler is None:
            for optimizer in self._optimizers:
                optimizer._is_overflow = not isfinite(norm)  # which is what a Trainer asks before it moves rates
                if optimizer._is_overflow:
                    optimizer.optimizer.zero_grad()
        return norm

    def free_memory(self, *objects: Any) -> Any:
        """Forgets models and optimizers, and gradients that were not reduced yet."""
        if self._window.modules:
            self._window.end(InterruptedError("the microbatches of this step were given up"))
        return super().free_memory(*objects)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The state dict of a model. Of a transformed one all ranks call it, and the main process has it, whole."""
        if not zf.is_transformed(model):
            plain: dict[str, Any] = super().get_state_dict(model, unwrap)
            return plain
        return whole_state(self.unwrap_model(model, keep_torch_compile=False), keep=self.is_main_process)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **options: Any) -> Any:
        """Saves everything that was prepared or registered. What ranks own is written by them, below `zero_fn`."""
        with self._without_transformed() as (models, optimizers):
            folder = super().save_state(output_dir, safe_serialization, **options)
        if models:
            save_states(Path(folder) / STATES, models, optimizers)
        return folder

    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **options: Any) -> None:
        """Loads what `save_state` saved, also on another number of ranks and at another stage.

        Raises:
            CheckpointError: The folder does not hold the states of transformed models.
        """
        folders: list[str] = []
        handle = self.register_load_state_pre_hook(lambda _, folder: folders.append(folder))
        try:
            with self._without_transformed() as (models, optimizers):
                super().load_state(input_dir, load_kwargs, **options)
        finally:
            handle.remove()
        if models:
            load_states(Path(folders[0]) / STATES, models, optimizers)

    @contextmanager
    def _without_transformed(self) -> Iterator[tuple[list[nn.Module], list[tuple[nn.Module, Optimizer]]]]:
        """Hides transformed models and their optimizers from accelerate, which would save one rank's shards of them."""
        models, optimizers = self._models, self._optimizers
        transformed = [model for model in models if zf.is_transformed(model)]
        owners = [model_of(optimizer, transformed) for optimizer in optimizers]
        self._models = [model for model in models if not zf.is_transformed(model)]
        self._optimizers = [optimizer for optimizer, owner in zip(optimizers, owners, strict=True) if owner is None]
        try:
            yield (
                [self.unwrap_model(model, keep_torch_compile=False) for model in transformed],
                [
                    (self.unwrap_model(owner, keep_torch_compile=False), bare(optimizer))
                    for optimizer, owner in zip(optimizers, owners, strict=True)
                    if owner is not None
                ],
            )
        finally:
            self._models, self._optimizers = models, optimizers
