"""`ZeroStrategy`: Lightning over modules that are transformed in `configure_model`.

class Model(L.LightningModule):
    def configure_model(self):
        if not zf.inspect.is_transformed(self.model):
            self.model = zf.shard_params(self.model, init_device_mesh("cuda", (dist.get_world_size(),)))

trainer = L.Trainer(strategy=ZeroStrategy(), accumulate_grad_batches=4, gradient_clip_val=0.5)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
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
from zero_fn.integrations.placing import plain_trained
from zero_fn.integrations.states import (
    load_extra,
    load_states,
    load_weights,
    save_states,
    whole_state,
)
from zero_fn.integrations.window import AccumulationWindow

__all__ = ["ZeroStrategy"]


class ZeroStrategy(DDPStrategy):
    """DDPStrategy without DDP: the transformed module reduces its gradients by itself.

    Gradients are reduced once a step, whatever `accumulate_grad_batches`. A checkpoint is a folder
    of `zf.save`: each rank writes what it owns, and any number of ranks can load it, at any stage.
    `configure_optimizers` returns an optimizer that looks at whole tensors as
    `zf.by_owner(optimizer)`.

    Args:
        save_distributed_checkpoint: False makes a checkpoint one file with whole values, which the
            first rank gathers in its host memory. Such a file can be loaded at any stage, too.
        **options: Those of DDPStrategy, for how processes are started.

    Raises:
        StateError: A trained parameter belongs to no transformed module.
        ConfigError: `sync_batchnorm=True`; `storage_options` for a folder.
        CheckpointError: A folder holds no checkpoint, or its tensors do not fit.
    """

    model: Any
    lightning_module: Any
    optimizers: Any
    is_global_zero: bool

    def __init__(self, *, save_distributed_checkpoint: bool = True, **options: Any) -> None:
        super().__init__(**options)
        self._window = AccumulationWindow()
        self._is_blocked = False
        self._saves_folders = save_distributed_checkpoint
        self._folder: Path | None = None  # the folder that is being loaded; None for a file

    def setup(self, trainer: Any) -> None:
        """Prepares the module and its optimizers.

        Nothing is broadcast: a transform compares initial values on all ranks.
        """
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if is_fitting and self._layer_sync:
            raise zf.errors.ConfigError(
                "sync_batchnorm=True would replace modules of a transformed module.",
                fix="in configure_model, before the transform: "
                "nn.SyncBatchNorm.convert_sync_batchnorm(self.model)",
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
        """Sums gradients inside the block; the next backward outside
        of it reduces them all, once."""
        self._is_blocked = True
        try:
            with self._window.dropped_on_error():
                self._window.begin(self.model)
                yield
        finally:
            self._is_blocked = False

    def post_backward(self, closure_loss: Tensor) -> None:
        """Reduces what `block_backward_sync` has summed, if this is
        the last microbatch of a step."""
        if not self._is_blocked:
            self._window.end()

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: nn.Module | None = None,
        **options: Any,
    ) -> Any:
        """Steps, after the backward of the last microbatch: no step is allowed
        before that has closed the window."""
        if self._window.modules:
            with self._window.dropped_on_error():
                closure = iter([closure()]).__next__  # the optimizer may ask for it once
        return super().optimizer_step(optimizer, closure, model, **options)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole values, on the rank that writes the file; empty where ranks write a folder."""
        if self._saves_folders:
            return {}
        return whole_state(self.lightning_module, keep=self.is_global_zero)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Whole states by the names of parameters, on the rank that writes the file;
        empty where ranks write a folder."""
        if self._saves_folders:
            return {}
        return get_optimizer_state_dict(
            self.lightning_module,
            _bare(optimizer),
            options=StateDictOptions(full_state_dict=True, cpu_offload=True),
        )

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Writes a checkpoint.

        In a folder, Lightning's own entries of the first rank lie beside the shards of each rank.
        """
        if not self._saves_folders:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if storage_options is not None:
            raise zf.errors.ConfigError(
                "storage_options are those of a plugin that writes files, "
                "and ranks write a folder.",
                fix="ZeroStrategy(save_distributed_checkpoint=False)",
            )
        file = BytesIO()
        torch.save(checkpoint, file)
        folder, beside = self.broadcast((str(filepath), file.getvalue()))
        save_states(
            Path(folder),
            [self.lightning_module],
            self._owned() if "optimizer_states" in checkpoint else [],
            {"lightning": torch.frombuffer(bytearray(beside), dtype=torch.uint8)},
        )

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Reads Lightning's own entries.

        Shards are read later, when there is a model, and when there are optimizers.
        """
        folder = Path(self.broadcast(str(checkpoint_path)))
        self._folder = folder if folder.is_dir() else None
        if self._folder is None:
            plain: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
            return plain
        file = BytesIO(load_extra(folder)["lightning"].numpy().tobytes())
        found: dict[str, Any] = torch.load(file, weights_only=weights_only is not False)
        return found

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads the part of the weights that this rank owns."""
        if self._folder is None:
            super().load_model_state_dict(checkpoint, strict)
        else:
            load_weights(self._folder, self.lightning_module, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads the part of the optimizer states that this rank owns."""
        if self._folder is not None:
            load_states(self._folder, [], self._owned(), only="optimizer")
            return
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            set_optimizer_state_dict(
                self.lightning_module,
                _bare(optimizer),
                state,
                options=StateDictOptions(full_state_dict=True),
            )

    def _owned(self) -> list[tuple[nn.Module, Optimizer]]:
        return [(self.lightning_module, _bare(optimizer)) for optimizer in self.optimizers]


def _bare(optimizer: Any) -> Optimizer:
    """The optimizer inside Lightning's wrapper."""
    bare: Optimizer = getattr(optimizer, "_optimizer", optimizer)
    return bare


def _require_transformed(module: nn.Module) -> None:
    """Refuses trained parameters that no transform holds: nothing would reduce their gradients."""
    plain = plain_trained(module)
    if plain:
        raise zf.errors.StateError(
            f"{len(plain)} trained parameters belong to no transformed module.",
            first=plain[0],
            why="ZeroStrategy wraps nothing in DDP: their gradients would stay those of one rank",
            fix="def configure_model(self): self.model = zf.shard_params(self.model, mesh['dp'])",
        )
