"""`ZeroStrategy`: Lightning over modules that `configure_model` transforms.

class Model(L.LightningModule):
    def configure_model(self):
        if not zf.is_transformed(self.model):
            self.model = zf.zero3(self.model, init_device_mesh("cuda", (dist.get_world_size(),)))

trainer = L.Trainer(strategy=ZeroStrategy(), accumulate_grad_batches=4, gradient_clip_val=0.5)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

import zero_fn as zf
from zero_fn.integrations.states import whole_state
from zero_fn.integrations.window import AccumulationWindow
from zero_fn.runtime.registry import slot_of

__all__ = ["ZeroStrategy"]


class ZeroStrategy(DDPStrategy):
    """Lightning's strategy for several processes, whose module reduces its gradients by itself: nothing is wrapped in DDP.

    A step reduces once, whatever `accumulate_grad_batches`. Checkpoints are plain files with whole values, of the module and
    of the states of its optimizers: they load on any number of ranks and at any stage.

    Args:
        **options: As of DDPStrategy, for how processes are started.

    Raises:
        StateError: Parameters to be trained belong to no transformed module.
        ConfigError: `sync_batchnorm=True`.
    """

    model: Any
    lightning_module: Any
    optimizers: Any
    is_global_zero: bool

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._window = AccumulationWindow()
        self._is_blocked = False

    def setup(self, trainer: Any) -> None:
        """Prepares module and optimizers. What DDP's would broadcast, a transform has made the same on all ranks."""
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if is_fitting and self._layer_sync:
            raise zf.ConfigError(
                "sync_batchnorm=True would replace modules of a transformed module.",
                fix="in configure_model, before the transform: nn.SyncBatchNorm.convert_sync_batchnorm(self.model)",
            )
        _require_transformed(self.model)
        self.accelerator.setup(trainer)
        self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if is_fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Does not reduce the gradients of what runs inside: the next backward outside reduces them all, once."""
        self._is_blocked = True
        try:
            with self._window.dropping():
                self._window.begin(self.model)
                yield
        finally:
            self._is_blocked = False

    def post_backward(self, closure_loss: Tensor) -> None:
        """Ends what `block_backward_sync` began, if gradients are to be reduced now."""
        if not self._is_blocked:
            self._window.end()

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: nn.Module | None = None, **options: Any
    ) -> Any:
        """Steps. The last microbatch comes first: its backward ends the window, in which nothing may be stepped."""
        if self._window.modules:
            with self._window.dropping():
                closure = iter([closure()]).__next__  # the optimizer may ask for it once
        return super().optimizer_step(optimizer, closure, model, **options)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole values, on the rank that writes the file."""
        return whole_state(self.lightning_module, keep=self.is_global_zero)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Whole states by the names of parameters, on the rank that writes the file."""
        return get_optimizer_state_dict(
            self.lightning_module, _bare(optimizer), options=StateDictOptions(full_state_dict=True, cpu_offload=True)
        )

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Each rank takes its part of the states in a file."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            set_optimizer_state_dict(
                self.lightning_module, _bare(optimizer), state, options=StateDictOptions(full_state_dict=True)
            )


def _bare(optimizer: Any) -> Optimizer:
    """The optimizer itself, without what Lightning puts around it."""
    bare: Optimizer = getattr(optimizer, "_optimizer", optimizer)
    return bare


def _require_transformed(module: nn.Module) -> None:
    """Nothing else would reduce the gradients of what no transform holds."""
    plain = [name for name, p in module.named_parameters() if p.requires_grad and slot_of(p) is None]
    if plain:
        raise zf.StateError(
            f"{len(plain)} parameters to be trained belong to no transformed module.",
            first=plain[0],
            why="ZeroStrategy wraps nothing in DDP: their gradients would stay those of one rank",
            fix="def configure_model(self): self.model = zf.zero3(self.model, mesh['dp'])",
        )
