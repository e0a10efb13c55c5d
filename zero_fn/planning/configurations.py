"""The stages, tiers and meshes that a model could be trained with on some ranks of a
machine that need not be there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import AdamW, Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

from zero_fn.errors import ConfigError
from zero_fn.planning.activations import Compute, activations_of
from zero_fn.planning.machines import Machine
from zero_fn.planning.models import PlannedModel, on_meta
from zero_fn.planning.proposals import (
    STAGES,
    Mesh,
    Proposal,
    predicted,
    proposal_of,
    without_collecting,
)
from zero_fn.planning.repeated_layers import Stack, cut_to, of_all_layers, stacks_of
from zero_fn.streamed.pieces import Planner
from zero_fn.transforms.hybrid import hybrid
from zero_fn.transforms.precision import precision
from zero_fn.transforms.shard import shard_grads, shard_params
from zero_fn.values.tiers import IN_MEMORY, Tier, Tiers, cpu, nvme
from zero_fn.values.units import repeated_blocks

__all__ = [
    "UNKNOWN",
    "Training",
    "compute_of",
    "configurations",
    "pretended",
    "shapes_of",
]

_MOST_WITH_TIERS = 1024
UNKNOWN = Compute(0, 0.0)
"""What a forward and backward need where nobody said what goes in."""


@dataclass(frozen=True)
class Training:
    """What is trained with, beside the model.

    Attributes:
        machine: The devices, of which each has one rank, and what lies between them.
        reserved: Bytes of a device that are left to its driver, to NCCL,
            and to gaps of torch's allocator.
        host, disk: Bytes that a node has for tiers; None: it has no such tier.
        computes_in: Dtype of forward and backward; parameters rest in float32.
        states_in_8_bits: The states of Adam rest in 8 bits, not in float32.
        microbatches: Microbatches of a step.
        utilisation: The part of the device's peak that matrix products attain.
    """

    machine: Machine
    reserved: int = 3 * 10**9
    host: int | None = None
    disk: int | None = None
    computes_in: torch.dtype = torch.bfloat16
    states_in_8_bits: bool = False
    microbatches: int = 1
    utilisation: float = 0.5

    def tiers(self, ranks: int) -> list[Tier]:
        """The tiers of so many ranks, with the part of each that one has;
        none for thousands of ranks, whose memory is enough."""
        if ranks > _MOST_WITH_TIERS:
            return []
        shared = min(ranks, self.machine.per_node)
        found: list[Tier] = [] if self.host is None else [cpu(limit=self.host // shared)]
        if self.disk is None:
            return found
        return [*found, nvme("/local_nvme", limit=self.disk // shared)]

    def optimizer(self, parameters: Iterable[Tensor]) -> Optimizer | Planner:
        """AdamW, or how `states8bit` cuts its states."""
        adamw = AdamW(parameters, fused=True)
        return Planner(adamw, codes=True) if self.states_in_8_bits else adamw

    @property
    def flops(self) -> float:
        """Floating-point operations per second that are attained."""
        device = self.machine.device
        return self.utilisation * (
            device.flops32 if self.computes_in == torch.float32 else device.flops16
        )


@contextmanager
def pretended(ranks: int) -> Iterator[None]:
    """torch's fake process group of so many ranks, of which this is the first."""
    if dist.is_initialized():
        raise ConfigError(
            "Ranks cannot be pretended beside a process group.", fix="plan in a process of its own"
        )
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def shapes_of(ranks: int, per_node: int) -> list[Mesh]:
    """One axis of all ranks, and the meshes of two in which groups of whole
    nodes hold a model together."""
    shapes: list[Mesh] = [(("dp", ranks),)]
    inner = per_node
    while inner < ranks:
        if ranks % inner == 0:
            shapes.append((("outer", ranks // inner), ("inner", inner)))
        inner *= 8
    return shapes


_Placed = Callable[..., nn.Module]

_OVER_ONE: dict[str, _Placed] = {
    name: lambda module, mesh, transform=transform: transform(module, mesh["dp"])
    for name, transform in STAGES.items()
}
_OVER_TWO: dict[str, _Placed] = {
    "hybrid": hybrid,
    "shard_params, shard_grads outer": lambda module, mesh: shard_grads(
        shard_params(module, mesh["inner"]), mesh["outer"]
    ),
}


def _placements_of(mesh: Mesh) -> dict[str, _Placed]:
    """What can be placed along the axes of a mesh. Alone all stages are one."""
    if len(mesh) > 1:
        return _OVER_TWO
    return {"shard_params": _OVER_ONE["shard_params"]} if mesh[0][1] == 1 else _OVER_ONE


def configurations(
    model: PlannedModel,
    training: Training,
    compute: Sequence[Compute],
    meshes: Sequence[Mesh],
) -> list[Proposal]:
    """For each placement along each mesh, with and without checkpoints of activations, the tiers of
    the fastest step that fits, or of the one that exceeds least.

    Those that fit come first, and of these the fastest. Tiers are tried where the memory of the
    device is too small without.
    """
    stacks = stacks_of(model.module)

    @cache
    def bare(depths: tuple[tuple[Stack, int], ...]) -> nn.Module:
        few = on_meta(model.module)
        cut_to(few, depths)
        return precision(few) if training.computes_in != torch.float32 else few

    def placed(
        place: _Placed, devices: DeviceMesh, depths: Sequence[tuple[Stack, int]]
    ) -> nn.Module:
        return place(bare(tuple(depths)), devices)

    found: list[Proposal] = []
    for mesh in meshes:
        ranks = prod(size for _, size in mesh)
        with pretended(ranks), without_collecting():
            shape = torch.arange(ranks).view([size for _, size in mesh])
            devices = DeviceMesh("cuda", shape, mesh_dim_names=tuple(name for name, _ in mesh))
            for name, place in _placements_of(mesh).items():
                few = partial(placed, place, devices)
                found += _proposals_of(name, mesh, few, stacks, training, compute)
    tokens = model.tokens * training.microbatches
    found = [replace(each, tokens=tokens * each.ranks) for each in found]
    return sorted(found, key=lambda each: each.order)


_Choice = tuple[Tiers, Mapping[str, float]]


def _proposals_of(
    name: str,
    mesh: Mesh,
    placed: Callable[[Sequence[tuple[Stack, int]]], nn.Module],
    stacks: Sequence[Stack],
    training: Training,
    compute: Sequence[Compute],
) -> Iterator[Proposal]:
    """Of one placement, for each of what activations may need: what fits and is fastest,
    or exceeds least.

    `placed` makes the placed model with so many layers of each stack.
    """
    links = training.machine.links(*_apart(mesh))
    tiers = training.tiers(prod(size for _, size in mesh))
    memory = training.machine.device.memory - training.reserved

    def choices(depths: Sequence[tuple[Stack, int]], tiers: Sequence[Tier]) -> Iterator[_Choice]:
        return predicted(
            placed(depths), tiers, training.optimizer, links, backwards=training.microbatches
        )

    def best(found: Sequence[_Choice], needed: Compute) -> Proposal:
        room = memory - needed.nbytes
        seconds = {"compute_s": training.microbatches * needed.flops / training.flops}
        proposals = (
            proposal_of(name, chosen, {**numbers, **seconds}, "cuda", room, mesh)
            for chosen, numbers in found
        )
        first = min(proposals, key=lambda each: each.order)
        return replace(first, activations=needed.nbytes)

    in_memory = [(IN_MEMORY, of_all_layers(lambda depths: next(choices(depths, ()))[1], stacks))]
    in_tiers: list[_Choice] = []
    for recompute, needed in enumerate(compute):
        found = best(in_memory, needed)
        # Nothing in a tier makes a step faster, nor what is in flight less.
        if tiers and not found.fits and found.in_flight + needed.nbytes <= memory:
            in_tiers = in_tiers or list(choices((), tiers))
            found = best(in_tiers, needed)
        yield replace(found, recompute=bool(recompute))


def _apart(mesh: Mesh) -> list[tuple[str, int, int]]:
    """Of each axis the name, the size, and how many ranks neighbours are apart."""
    found, stride = [], 1
    for name, size in reversed(mesh):
        found.append((name, size, stride))
        stride *= size
    return found


def compute_of(model: PlannedModel, training: Training) -> list[Compute]:
    """What a microbatch needs, and with checkpoints of repeated blocks, if there are some."""
    if model.inputs is None:
        return [UNKNOWN]
    needed = partial(
        activations_of, model.module, model.inputs, training.computes_in, stacks_of(model.module)
    )
    has_blocks = next(repeated_blocks(model.module), None) is not None
    return [needed(recompute=recompute) for recompute in (False, True)[: 1 + has_blocks]]
