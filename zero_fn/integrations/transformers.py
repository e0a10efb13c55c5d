"""The Trainer of transformers, and its subclasses such as trl's, over transformed models.

    from zero_fn.integrations.transformers import ZeroTrainer, ZeroTrainerMixin

    place = lambda model: zf.shard_params(model, mesh["dp"])
    trainer = ZeroTrainer(model=model, args=args, train_dataset=..., place=place)

    trainer = ZeroTrainer(model=model, args=args, train_dataset=..., deepspeed="ds_config.json")

    class ZeroSFTTrainer(ZeroTrainerMixin, SFTTrainer): ...

[Note: when a model is placed] A trainer's `__init__` changes its model: it adds adapters, resizes
embeddings, fuses heads, and copies it as a reference model. So the model is transformed after
`__init__`, and before the optimizer is built.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import Trainer

import zero_fn as zf
from zero_fn.deepspeed.optimizers import finished, whole_where_needed
from zero_fn.deepspeed.placement import made_by, mesh_of, require_placed
from zero_fn.deepspeed.settings import Settings
from zero_fn.integrations.accelerate import (
    ZeroAccelerator,
    bare,
    begin_placing,
    require_own_samples,
)
from zero_fn.integrations.accelerator_config import follow_settings
from zero_fn.integrations.from_pretrained import placed
from zero_fn.integrations.metrics import LogsMetrics, ReportsCallback
from zero_fn.integrations.model_files import load_model, write_model
from zero_fn.integrations.model_placement import (
    Place,
    all_ranks,
    exchange_parameters,
    place_module,
    plain_trained,
    refuse_stale,
    run_together,
)
from zero_fn.integrations.trainer_checkpoints import STATES, load_states, save_states
from zero_fn.integrations.trainer_config import settings_for
from zero_fn.values.chained_optimizer import ChainedOptimizer, as_one

__all__ = ["ZeroTrainer", "ZeroTrainerMixin", "placed"]

SCHEDULER = "scheduler.pt"  # the Trainer's own name


if TYPE_CHECKING:
    from transformers import Trainer as _AnyTrainer
else:
    _AnyTrainer = object  # the mixin is used beside a Trainer, which it need not be one itself


class ZeroTrainerMixin(LogsMetrics, _AnyTrainer):
    """Any Trainer over a transformed model.

    It is named first: `class ZeroSFTTrainer(ZeroTrainerMixin, SFTTrainer): ...`.

    Losses and gradient norms are those of DDP. Gradients are reduced once a step, however many
    microbatches it has, and held whole until then; under a DeepSpeed config of stage 2 or 3 in each
    microbatch, as there, and held in shards. A checkpoint holds whole weights, which
    `from_pretrained` reads, and the shards and optimizer states of each rank, which
    `train(resume_from_checkpoint=True)` loads on any number of ranks and at any stage.

    Args:
        *args: Those of the Trainer. `optimizers=((muon, adamw), None)` are stepped one after the
            other, and scheduled together.
        place: Any chain of transforms, applied to the model after the Trainer's `__init__`; None if
            `model` is transformed already. It is applied once more if a transformed model has
            adapters that were added since, and to the reference model of a trainer of trl with
            `sync_ref_model=True`.
        finish: A function applied to the optimizer, such as `zf.streamed`. None: `zf.by_owner`, if
            it looks at whole tensors (`optim="adafactor"`) and the model is in shards; nothing
            else. Offloaded states of such a one: `lambda optimizer:
            zf.streamed(zf.by_owner(optimizer))`.
        deepspeed: A DeepSpeed config, as a path or the object itself, in place of `place` and
            `finish`. `args` decide where it says `"auto"` or lacks a batch size. See
            `zf.from_deepspeed`; `settings.outcomes` says what became of each entry. The model may
            be placed already, by `placed` or by hand, as the config says.
        mesh: The mesh for that config; None takes that of a placed model,
            or makes one axis of all ranks.
        weights: For a model on `meta`, or a plain one, a folder of safetensors of which each rank
            reads its shards once the model is placed, by `zf.load_pretrained`: files have the names
            of parameters. Others, such as experts of Mixtral, `placed` reads.
        metrics: True adds the numbers of `zf.metrics` to what the Trainer logs, and so to all that
            it reports to; or options of `zf.metrics`, such as `{"on_spike": "report", "sinks":
            ["prometheus:9400"]}`.
        **options: Those of the Trainer.

    Raises:
        StateError: There is neither `place` nor a transformed model,
            or an optimizer has stepped before the transform.
        StaleError: An optimizer was built before the model was transformed elsewhere.
        MeshError: The model is transformed over fewer ranks than there are processes,
            as with tensor parallelism.
        ConfigError: An argument of the Trainer asks for something that a transformed model cannot
            do (`sync_ref_model=True` without `place`), an entry of the DeepSpeed config cannot be
            followed or contradicts an argument, or the model was placed in another way.

    Attributes:
        settings: What the DeepSpeed config asks for; None without one.
    """

    model: nn.Module
    optimizer: Any
    lr_scheduler: Any
    settings: Settings | None = None
    _place: Place[nn.Module] | None = None
    _finish: Any = None
    _weights: str | os.PathLike[str] | None = None
    _is_finished = False  # whether `finish` was applied
    _is_read = False  # whether the model has been placed once, with its weights
    _settings_at: Callable[[int], Settings]

    def __init__(
        self,
        *args: Any,
        place: Place[nn.Module] | None = None,
        finish: Any = None,
        deepspeed: Any = None,
        mesh: DeviceMesh | None = None,
        weights: str | os.PathLike[str] | None = None,
        metrics: bool | Mapping[str, Any] = False,
        **options: Any,
    ) -> None:
        self._place = place
        self._finish = finish
        self._is_configured = deepspeed is not None
        self._weights = weights
        super().__init__(*args, **options)
        _refuse_arguments(self.args)
        self.optimizer = None if self.optimizer is None else as_one(self.optimizer)
        if deepspeed is not None:
            self._follow_config(deepspeed, mesh)
        self._place_model()
        if metrics is not False:
            self.measure({} if metrics is True else metrics)

    def _follow_config(self, config: Any, mesh: DeviceMesh | None) -> None:
        """Reads from the DeepSpeed config how to place the model,
        scale losses, and finish the optimizer."""
        if self._place is not None or self._finish is not None:
            raise zf.errors.ConfigError(
                "A ZeroTrainer was given a DeepSpeed config, and another way to place its model.",
                fix='deepspeed="ds_config.json" alone; or place=, finish= without it',
            )
        own = mesh_of(self.model)
        mesh = mesh or own or all_ranks(self.args.device.type)
        self._settings_at = partial(settings_for, config, self.args, mesh)
        settings = self._settings_at(max(0, self.args.max_steps))
        if own is not None:
            require_placed(settings, mesh, self.model)
        # The model recomputes its own activations; inside, ours would compute them once more.
        if self.args.gradient_checkpointing:
            settings = replace(settings, computing=replace(settings.computing, recomputes=False))
        self.settings = settings
        self._place = partial(made_by, settings, mesh)
        if settings.reporting is not None:
            self.add_callback(ReportsCallback(self, settings))
        self._finish = partial(finished, tiers=settings.sharding.tiers)
        follow_settings(self.accelerator, settings, mesh)

    def _place_model(self) -> None:
        """Transforms the model if it is not yet, or if it has adapters
        that came after its transform.

        Called at the end of `__init__`, and before training,
        because `train` may have made another model.
        """
        is_plain = not zf.inspect.is_transformed(self.model)
        if is_plain or (self._place is not None and plain_trained(self.model)):
            if self._place is None:
                raise zf.errors.StateError(
                    "A ZeroTrainer was given a plain model, and not what to make of it.",
                    model=type(self.model).__name__,
                    fix=f"{type(self).__name__}(..., place=lambda model: "
                    "zf.shard_params(model, mesh['dp']))",
                )
            device = self.args.device if self.place_model_on_device else None
            model, new = place_module(self._place, self.model, device)
            self.model = self.model_wrapped = self.callback_handler.model = model
            if self.optimizer is not None:
                exchange_parameters(bare(self.optimizer), new)
        if self._weights is not None and (is_plain or not self._is_read):
            zf.load_pretrained(self.model, self._weights)
        self._is_read = True
        require_own_samples(self.model, self.args.world_size)
        run_together(self.model)
        if self.optimizer is not None:
            refuse_stale([bare(self.optimizer)])
        if getattr(self.args, "sync_ref_model", False):
            _place_reference(self, self._place)

    def _move_model_to_device(self, model: nn.Module, device: Any) -> None:
        # A plain model stays where it is: the transform moves each shard to the
        # device of its mesh as it is cut.
        if zf.inspect.is_transformed(model):
            super()._move_model_to_device(model, device)

    def _build_accelerator_args(self, **options: Any) -> dict[str, Any]:
        arguments: dict[str, Any] = super()._build_accelerator_args(**options)
        if self._is_configured:
            # The config's precision is a transform, and autocast would come on top.
            arguments["mixed_precision"] = "no"
        return arguments

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        # The Trainer offers no way to choose the class of its accelerator.
        self.accelerator.__class__ = ZeroAccelerator
        begin_placing(self.accelerator, None)

    @property
    def skipped_steps(self) -> int:
        """The steps, of `state.global_step`, whose gradients were not finite:
        they moved neither weights nor rates.

        It is read off the scheduler, so it goes on after a resume. Not with
        `lr_scheduler_type="reduce_lr_on_plateau"` or "greedy", whose schedulers do not count steps.
        """
        return int(self.state.global_step - getattr(self.lr_scheduler, "last_epoch", 0))

    def _prepare_for_training(self, *args: Any, **options: Any) -> Any:
        self._place_model()
        return super()._prepare_for_training(*args, **options)

    def create_optimizer(self, *args: Any, **options: Any) -> Any:
        is_new = self.optimizer is None
        if is_new and self.settings is not None and self.settings.stock is not None:
            self.optimizer = self.settings.stock(self.model)
        super().create_optimizer(*args, **options)
        if is_new or not self._is_finished:
            self._is_finished = True
            finish = self._finish or whole_where_needed
            own = self.optimizer
            is_chained = isinstance(own, ChainedOptimizer)
            self.optimizer = own.wrapped_by(finish) if is_chained else finish(own)
        zf.check(self.model, bare(self.optimizer))
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.lr_scheduler is None and self.settings is not None:
            # The number of steps is known from here on.
            self.settings = settings = self._settings_at(num_training_steps)
            if settings.scheduler is not None:
                self.lr_scheduler = settings.scheduler(bare(self.optimizer))
                self._created_lr_scheduler = True
        return super().create_scheduler(num_training_steps, optimizer)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        if not load_model(self.model, resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if not load_model(self.model, self.state.best_model_checkpoint):
            super()._load_best_model()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes a folder that `from_pretrained` loads.

        All ranks call it, and return when it is complete.

        Values have the dtype in which they rest; that in which the model computes if a DeepSpeed
        config has `stage3_gather_16bit_weights_on_model_save`.
        """
        output_dir = output_dir if output_dir is not None else str(self.args.output_dir)
        dtype = None if self.settings is None else self.settings.computing.saved
        write_model(self, output_dir, dtype)
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save_states(Path(output_dir) / STATES, [], [(self.model, bare(self.optimizer))])
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        load_states(Path(checkpoint) / STATES, [], [(self.model, bare(self.optimizer))])
        self.lr_scheduler.load_state_dict(
            torch.load(Path(checkpoint) / SCHEDULER, weights_only=True)
        )


def _place_reference(trainer: Any, place: Place[nn.Module] | None) -> None:
    """Transforms the reference model of a trainer of trl as the policy,
    towards which it is moved parameter by parameter."""
    plain = getattr(trainer, "ref_model", None)
    if plain is None or zf.inspect.is_transformed(plain):
        return
    if place is None:
        raise zf.errors.ConfigError(
            "sync_ref_model=True would mix a policy in shards with a whole reference model.",
            reference=type(plain).__name__,
            fix=f"a plain policy, and {type(trainer).__name__}(..., place=lambda model: "
            "zf.shard_params(model, mesh['dp'])), which places both; "
            "or ref_model= transformed in the same way, where the trainer takes one",
        )
    device = trainer.args.device if trainer.place_model_on_device else None
    trainer.ref_model, _ = place_module(place, plain.requires_grad_(False), device)
    for callback in trainer.callback_handler.callbacks:
        if getattr(callback, "ref_model", None) is plain:
            callback.ref_model = trainer.ref_model


class ZeroTrainer(ZeroTrainerMixin, Trainer):
    """The Trainer of transformers over a transformed model.

    Arguments: see ZeroTrainerMixin and Trainer.
    """


def _refuse_arguments(args: Any) -> None:
    """Refuses arguments of a Trainer that a transformed model cannot follow."""
    asked = {
        "auto_find_batch_size=True": (
            args.auto_find_batch_size,
            "a rank that runs out of memory alone would try another size alone, "
            "and the others would wait for it",
            "per_device_train_batch_size=...; "
            "zf.plan(model) says the bytes of everything but activations",
        ),
        "deepspeed=...": (
            args.deepspeed,
            "DeepSpeed would shard the model, and so do its transforms",
            "leave it out of the arguments: ZeroTrainer(..., deepspeed=config)",
        ),
        "fsdp=...": (
            args.fsdp_plugin_args,
            "FSDP would shard the model, and so do its transforms",
            "leave it out: place=lambda model: zf.shard_params(model, mesh['dp'])",
        ),
        "several devices for one process": (
            args.n_gpu > 1,
            "DataParallel would copy the model to them",
            "a process for each device: torchrun --nproc-per-node=...",
        ),
    }
    for name, (is_asked, why, fix) in asked.items():
        if is_asked:
            raise zf.errors.ConfigError(
                "A ZeroTrainer cannot follow one of its arguments.", argument=name, why=why, fix=fix
            )
