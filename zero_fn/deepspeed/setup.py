"""`from_deepspeed`: applies a DeepSpeed config to a model,
by transforms and stock objects of torch, without an engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import isfinite, sqrt
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zero_fn.checkpoint.huggingface.read import load_pretrained
from zero_fn.deepspeed.entries import (
    Config,
    TakenEntry,
    config_of,
    filled,
    leaves_of,
    outcomes_text,
)
from zero_fn.deepspeed.loss_scale import Scaler
from zero_fn.deepspeed.optimizers import finished
from zero_fn.deepspeed.placement import placed_by, ready_to_run
from zero_fn.deepspeed.reporter import Reporter
from zero_fn.deepspeed.settings import Settings, settings_of
from zero_fn.deepspeed.tensor_parallel import cut_by_its_plan, other_axes, split
from zero_fn.errors import ConfigError
from zero_fn.monitor.gradient_norm import clip_grad_norm
from zero_fn.transforms.accumulation_window import AccumulationWindow
from zero_fn.transport.agree import axes_of, done_over, same_along, sum_along
from zero_fn.values.chained_optimizer import Optimizers
from zero_fn.values.mesh import mesh_axis
from zero_fn.values.units import Units

__all__ = ["DeepSpeedSetup", "agreed_settings", "from_deepspeed"]

M = TypeVar("M", bound=nn.Module)

_NOT_PLACING = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "optimizer",
    "scheduler",
)
"""Entries that do not say where a model rests.

Their `"auto"` may have no value yet when it is loaded.
"""


@dataclass(slots=True)
class DeepSpeedSetup(Generic[M]):
    """What `from_deepspeed` returns. Printed, it lists the outcome of each entry of the config.

    `zf.save(folder, setup.model, setup.optimizer, extra={"setup": setup})` saves all of it, and
    `zf.load` with the same arguments loads it.

    Attributes:
        model: The transformed model.
        optimizer: The optimizer of the model's parameters; a `Streamed` if states,
            gradients or parameters are offloaded.
        scheduler: The learning-rate scheduler; None if the config has none.
        scaler: The loss scaler of float16; None for other dtypes.
        settings: What the config asks for: `settings.max_norm`, `settings.skips_overflow`, ...
        mesh: The ranks that have batches of their own, for a sampler: `setup.mesh.size()`,
            `setup.mesh.get_local_rank()`. Other axes that the config has cut out of them
            are in its root.
        pipeline: The axis over which a pipeline was cut; its ranks agree
            on norms and on skipped steps.
        device: The device that computes, to which batches go.
        reporter: What prints and logs; None if the config asks for nothing of it.
        steps: Calls of `step`, skipped ones too: `global_steps` of DeepSpeed.
        skipped_steps: Those of them that were skipped because gradients were not finite.
        micro_steps: Microbatches of `zero_fn.deepspeed.backward` so far.
        norm: Of all gradients in the last step, before clipping; None if it was not measured.
        window: In which `zero_fn.deepspeed.backward` sums the gradients of microbatches.
    """

    model: M
    optimizer: Optimizer
    scheduler: LRScheduler | None
    scaler: Scaler | None
    settings: Settings
    mesh: DeviceMesh
    pipeline: DeviceMesh | None
    device: torch.device
    reporter: Reporter | None = None
    steps: int = 0
    skipped_steps: int = 0
    micro_steps: int = 0
    norm: float | None = None
    window: AccumulationWindow = field(default_factory=AccumulationWindow)

    @property
    def micro_batch_size(self) -> int:
        """Samples of one microbatch on each rank."""
        return self.settings.micro_batch_size

    @property
    def accumulation_steps(self) -> int:
        """Microbatches of one step."""
        return self.settings.accumulation_steps

    @property
    def outcomes(self) -> tuple[TakenEntry, ...]:
        """The outcome of each entry of the config."""
        return self.settings.outcomes

    @property
    def rates(self) -> list[float]:
        """The learning rate of each parameter group in the next step."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """What is neither in the model nor in the optimizer: the scheduler,
        the loss scale, and the counts of steps."""
        states = {name: part.state_dict() for name, part in self._parts.items() if part is not None}
        return {**states, "steps": self.steps, "skipped_steps": self.skipped_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads what `state_dict` returned."""
        for name, part in self._parts.items():
            if part is not None and name in state:
                part.load_state_dict(state[name])
        self.resume(state["steps"], state["skipped_steps"])

    def resume(self, steps: int, skipped: int) -> None:
        """Goes on after so many steps."""
        self.steps = steps
        self.skipped_steps = skipped
        self.micro_steps = steps * self.accumulation_steps
        if self.reporter is not None:
            self.reporter.resume(steps, skipped)

    @property
    def _parts(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler, "scaler": self.scaler}

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss to call `backward()` on: divided by `accumulation_steps`,
        times the loss scale of float16."""
        part = loss / self.accumulation_steps
        if self.reporter is not None:
            self.reporter.note(part)
        factor = self.settings.loss_factor(self.mesh)
        part = part if factor == 1 else part * factor
        return part if self.scaler is None else self.scaler.scale(part)

    def step(self) -> float | None:
        """Does what DeepSpeed's engine does after the last microbatch: clips gradients, steps the
        optimizer, updates loss scale and learning rates, and sets gradients to None.

        If gradients are not finite (in float16, and in bf16 unless `check_grad_overflow` is false)
        every rank leaves parameters, states and rates as they are.

        Communicates: what `clip_grad_norm_` does, over sharded gradients; the norm, along
        `pipeline`; what the config logs.

        Returns:
            The norm of all gradients before clipping; None if gradients are
            neither clipped nor checked.

        Raises:
            StateError: float16 gradients overflow at the smallest loss scale.
        """
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        self.norm = None
        if self.settings.max_norm or self.settings.skips_overflow:
            own = clip_grad_norm(
                self.model.parameters(), None if self.pipeline else self.settings.max_norm or None
            )
            self.norm = float(own) if self.pipeline is None else self._shared(own)
        is_taken = not self.settings.skips_overflow or (
            self.norm is not None and isfinite(self.norm)
        )
        if self.scaler is not None:
            if not is_taken:
                self.scaler.skip()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            is_taken = not self.scaler.has_skipped
        elif is_taken:
            self.optimizer.step()
        if is_taken and self.scheduler is not None:
            self.scheduler.step()
        self.optimizer.zero_grad()
        self.steps += 1
        self.skipped_steps += not is_taken
        if self.reporter is not None:
            samples = self.micro_batch_size * self.accumulation_steps * self.mesh.size()
            self.reporter.step(samples=samples, norm=self.norm, scaler=self.scaler)
        return self.norm

    def _shared(self, own: Tensor) -> float:
        """The norm of the gradients of all stages of a pipeline,
        to which those of this one are clipped."""
        assert self.pipeline is not None, "no pipeline"
        norm = sqrt(sum_along(self.pipeline, float(own) ** 2, "the norm of gradients"))
        if self.settings.max_norm:
            nn.utils.clip_grads_with_norm_(
                list(self.model.parameters()), self.settings.max_norm, own.new_tensor(norm)
            )
        return norm

    def __str__(self) -> str:
        return outcomes_text(self.outcomes)


def from_deepspeed(
    model: M,
    config: Config,
    mesh: DeviceMesh,
    *,
    auto: Mapping[str, object] | None = None,
    optimizer: Callable[[M], Optimizers] | None = None,
    weights: str | os.PathLike[str] | None = None,
    units: Units = None,
    pipeline: DeviceMesh | None = None,
    donate: bool = False,
) -> DeepSpeedSetup[M]:
    """Applies a DeepSpeed config to a model, by transforms and stock objects of torch.

        setup = zf.from_deepspeed(model, "ds_config.json", mesh["dp"])
        print(setup)  # what became of each entry
        for batch in batches:
            with zf.accumulate(setup.model):
                for x, y in microbatches(batch):
                    setup.scaled(loss(setup.model(x), y)).backward()
            setup.step()

    The stage, offload, `bf16` and `fp16` become transforms; `optimizer` becomes one of torch.optim.
    Trained parameters rest in float32, whatever dtype they were loaded in. Clipping and the
    skipping of overflows are in `setup.step()`. Defaults are DeepSpeed's (0.19): clipping at 1.0,
    an `Adam` that decays as AdamW, and no weight decay; but gradients are summed in float32 unless
    `communication_data_type` says otherwise. Entries about speed only (sizes of buckets, overlap,
    buffers) are checked and have no effect. Entries that are unknown, or ask for what is not done
    here, are refused, all at once. `zero_fn.deepspeed.KEYS` is the table of all entries.

    Communicates 16 bytes per rank, by which ranks learn that all have the same config;
    and what the transforms do.

    Args:
        model: Any module: in memory, or on `meta` with `weights`. Or one that is placed as the
            config says, by `placed` of `zero_fn.integrations.transformers` or by hand; adapters
            that were added since are placed, too.
        config: The path of a JSON file, or its content as a dict or text (in base64, too). `"auto"`
            is accepted where nothing has to be set, and for a batch size that follows from the
            other two; see `auto`.
        mesh: One axis, `mesh["dp"]`. `autotp_size`, `sequence_parallel_size` and
            `zero_hpz_partition_size` divide its ranks, neighbours together; an axis "tp" beside it,
            or over which parameters are cut, is taken for the first. Or two axes: the ranks of a
            secondary partition on the second, or those that have experts of their own.
        auto: Values for entries that are `"auto"` or missing, by their paths:
            `{"optimizer.params.lr": 3e-4}`.
        optimizer: A function that makes the optimizer, or a sequence of them, from the transformed
            model, in place of the config's.
        weights: A folder of safetensors, of which each rank reads its shards once the model is
            placed; see `load_pretrained`. None: values stay as they are, and of a model on `meta`
            you load them.
        units: What is gathered together; see `shard_params`.
        pipeline: The axis of a pipeline, of which `model` is this rank's part: `mesh["pp"]`.
        donate: Free each whole parameter as soon as its shard is cut; `model` can no longer run.

    Returns:
        The transformed model and what trains it. `model` is unchanged and
        still runs (unless donated).

    Raises:
        ConfigError: Entries are unknown, have wrong values, contradict others, ask for what is not
            done here, or are still "auto". Names all of them by their paths, before anything is
            done. Or `model` was placed in another way.
        CheckpointError: The files of `weights` do not fit.
        DisagreementError: Ranks have different configs.
        MeshError: `mesh` does not have the axes that the config needs.
        TierError, StorageError: As `offload` and `streamed` raise them.

    Source:
        The configuration of DeepSpeed 0.19.8, https://www.deepspeed.ai/docs/config-json/.
    """
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 2:
        mesh_axis(mesh, verb="from_deepspeed")
    others = other_axes(mesh, pipeline, model)
    settings = agreed_settings(
        config, lambda _: auto or {}, mesh, others=others, makes=optimizer is None
    )
    make = settings.stock if optimizer is None else optimizer
    if make is None:
        raise ConfigError(
            "There is no optimizer, neither in the DeepSpeed config nor beside it.",
            entry="optimizer",
            got="nothing",
            fix="zf.from_deepspeed(..., optimizer=lambda model: "
            "torch.optim.AdamW(model.parameters(), lr=3e-4))",
        )
    if isinstance(make, Optimizer) or not callable(make):
        raise ConfigError(
            "optimizer= is a function of the transformed model.",
            got=f"{type(optimizer).__name__}",
            why="an optimizer that was built before holds the parameters of before",
            fix="optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-4)",
        )
    whole, own, tensor = split(mesh, settings.cuts, others)
    axes = [*others.values(), *([] if tensor is None or "tensor" in others else [tensor])]

    def made() -> tuple[M, Optimizer, Reporter | None]:
        placed = model if tensor is None else cut_by_its_plan(model, tensor)
        placed = placed_by(settings, whole, placed, units, donate=donate)
        if weights is not None:
            load_pretrained(placed, weights)
        placed = ready_to_run(settings, placed, tensor)
        stepped = finished(make(placed), settings.sharding.tiers)
        reporter = (
            None if settings.reporting is None else Reporter(settings.reporting, placed, stepped)
        )
        return placed, stepped, reporter

    # An error of one stage of a pipeline, or of the ranks that log,
    # is told to those that share no axis of data with it.
    lines = [line for axis in axes for line in axes_of(axis, range(axis.ndim), "from_deepspeed")]
    placed, stepped, reporter = done_over(lines, made, "Applying a DeepSpeed config", Exception)
    if optimizer is not None:
        outcomes = (
            replace(each, became="not used: optimizer= was given")
            if each.entry.startswith("optimizer.")
            else each
            for each in settings.outcomes
        )
        settings = replace(settings, outcomes=tuple(outcomes))
    return DeepSpeedSetup(
        model=placed,
        optimizer=stepped,
        scheduler=None if settings.scheduler is None else settings.scheduler(stepped),
        scaler=None if settings.scaler is None else settings.scaler(mesh.device_type),
        settings=settings,
        mesh=own,
        pipeline=pipeline,
        device=torch.empty(0, device=mesh.device_type).device,  # with its index
        reporter=reporter,
    )


def agreed_settings(
    config: Config,
    auto: Callable[[Mapping[str, object]], Mapping[str, object]],
    mesh: DeviceMesh,
    *,
    is_placing: bool = False,
    others: Mapping[str, DeviceMesh] | None = None,
    makes: bool = True,
) -> Settings:
    """The settings of a config, once all ranks of `mesh` and of `others` have the same one;
    an error comes on all.

    `auto`, given the config, has values for its `"auto"`, by their paths. With `is_placing` only
    what says where a model rests is looked at. Without `others`, the other axes, a config may not
    divide the ranks. Communicates 16 bytes per rank.
    """
    failure: ConfigError | None = None
    sizes = None if others is None else {kind: axis.size() for kind, axis in others.items()}
    try:
        found = config_of(config)
        values = {path.replace("bfloat16.", "bf16."): value for path, value in auto(found).items()}
        if is_placing:
            found = {
                name: value
                for name, value in filled(found, values).items()
                if name not in _NOT_PLACING
            }
            values = {"train_micro_batch_size_per_gpu": 1}
        settings = settings_of(found, mesh.size(), values, others=sizes, makes=makes)
        # Ranks need not agree on folders of disks.
        said = (*leaves_of(found), *leaves_of(values))
        rows = [f"{path} = {value!r}" for path, value in said if not path.endswith("nvme_path")]
    except ConfigError as error:
        failure, rows = error, str(error).splitlines()
    meshes = (mesh, *(others or {}).values())
    same_along(
        meshes, rows, "DeepSpeed configs", fix="the same file, or the same dict, on every rank"
    )
    if failure is not None:
        raise failure
    return settings
