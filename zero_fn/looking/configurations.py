"""The stages, tiers and meshes that a model could be trained with on some ranks of a
machine that need not be there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, partial
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import AdamW, Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

from zero_fn.errors import ConfigError
from zero_fn.planning.activations import Compute, activations_of
from zero_fn.planning.links import LinkSpeeds
from zero_fn.planning.machines import Machine
from zero_fn.planning.models import PlannedModel
from zero_fn.planning.proposals import (
    STAGES,
    Proposal,
    on_meta,
    predicted,
    proposal_of,
    without_collecting,
)
from zero_fn.planning.repeated import Stack, cut_to, of_all_layers, stacks_of
from zero_fn.streamed.pieces import Planner
from zero_fn.transforms.hybrid import hybrid
from zero_fn.transforms.precision import precision
from zero_fn.transforms.shard import shard_grads, shard_params
from zero_fn.values.tiers import IN_MEMORY, Tier, Tiers, cpu, nvme
from zero_fn.values.units import repeated_blocks

__all__ = [
    "Configuration",
    "Mesh",
    "Training",
    "compute_of",
    "configurations",
    "pretended",
    "shapes_of",
]

Mesh = tuple[tuple[str, int], ...]
"""Names and sizes of the axes of a mesh."""

_MOST_WITH_TIERS = 1024
_NO_ACTIVATIONS = Compute(0, 0.0)


@dataclass(frozen=True)
class Training:
    """What is trained with, beside the model.

    Attributes:
        ranks: Devices, of which each has one rank.
        machine: What they are.
        reserved: Bytes of a device that are left to its driver, to NCCL,
            and to gaps of torch's allocator.
        host, disk: Bytes that a node has for tiers; None: it has no such tier.
        computes_in: Dtype of forward and backward; parameters rest in float32.
        states_in_8_bits: The states of Adam rest in 8 bits, not in float32.
        microbatches: Microbatches of a step.
        utilisation: The part of the device's peak that matrix products attain.
    """

    ranks: int
    machine: Machine
    reserved: int = 3 * 10**9
    host: int | None = None
    disk: int | None = None
    computes_in: torch.dtype = torch.bfloat16
    states_in_8_bits: bool = False
    microbatches: int = 1
    utilisation: float = 0.5

    def tiers(self) -> list[Tier]:
        """The tiers, with the part of each that one rank has;
        none for thousands of ranks, whose memory is enough."""
        if self.ranks > _MOST_WITH_TIERS:
            return []
        shared = min(self.ranks, self.machine.per_node)
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


@dataclass(frozen=True)
class Configuration:
    """A mesh, what is placed along it, where state rests, and what it needs.

    Attributes:
        mesh: The axes.
        proposal: Bytes and seconds; `transform` says what is placed along the axes.
        recompute: Whether activations of layers are checkpointed.
        activations: Bytes of them.
        sent: Bytes that a rank sends in a step.
        latency: Seconds of a step that collectives take beside those of their bytes.
        tokens: Tokens of all ranks in a step; 0 if not known.
    """

    mesh: Mesh
    proposal: Proposal
    recompute: bool
    activations: int
    sent: int
    latency: float
    tokens: int

    @property
    def ranks(self) -> int:
        """Those of the mesh."""
        return prod(size for _, size in self.mesh)

    @property
    def nbytes(self) -> int:
        """Most bytes of the device in a step."""
        return self.proposal.nbytes + self.activations

    @property
    def mesh_text(self) -> str:
        """The axes, such as "outer 8 x inner 8"."""
        return " x ".join(f"{name} {size}" for name, size in self.mesh)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.proposal.step_s

    def usd_per_billion_tokens(self, usd_per_hour: float) -> float:
        """What 1e9 tokens cost, where one device costs so much an hour. `tokens` is known."""
        return 1e9 / self.tokens_per_second / 3600 * usd_per_hour * self.ranks


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
    compute: Sequence[Compute | None],
    meshes: Sequence[Mesh],
) -> list[Configuration]:
    """For each placement along each mesh, with and without checkpoints of activations, the tiers of
    the fastest step that fits, or of the one that exceeds least.

    Those that fit come first, and of these the fastest. Tiers are tried where the memory of the
    device is too small without.
    """
    found: list[Configuration] = []
    stacks = stacks_of(model.module)

    @cache
    def bare(depths: tuple[tuple[Stack, int], ...]) -> nn.Module:
        few = on_meta(model.module)
        cut_to(few, depths)
        return precision(few) if training.computes_in != torch.float32 else few

    for mesh in meshes:
        ranks = prod(size for _, size in mesh)
        tokens = model.tokens * training.microbatches * ranks
        with pretended(ranks), without_collecting():
            shape = torch.arange(ranks).view([size for _, size in mesh])
            devices = DeviceMesh("cuda", shape, mesh_dim_names=tuple(name for name, _ in mesh))
            for name, place in _placements_of(mesh).items():
                ways = _Ways(
                    bare,
                    stacks,
                    partial(place, mesh=devices),
                    training,
                    training.machine.links(*_apart(mesh)),
                )
                for recompute, needed in enumerate(compute):
                    if needed is not None:
                        best, numbers = ways.best(name, needed)
                        moved = int(numbers["sent"]), numbers["latency"]
                        found.append(
                            Configuration(
                                mesh, best, bool(recompute), needed.nbytes, *moved, tokens
                            )
                        )
    return sorted(found, key=lambda each: (not each.proposal.fits, each.proposal.step_s))


class _Ways:
    """What one placement needs: without tiers, and with each choice of them."""

    def __init__(
        self,
        # The model with so many layers of each stack.
        bare: Callable[[tuple[tuple[Stack, int], ...]], nn.Module],
        stacks: Sequence[Stack],
        place: Callable[[nn.Module], nn.Module],
        training: Training,
        links: LinkSpeeds,
    ) -> None:
        self._bare = bare
        self._place = place
        self._training = training
        self._links = links
        self._in_memory = [(IN_MEMORY, of_all_layers(self._of_few, stacks))]

    def _of_few(self, depths: Sequence[tuple[Stack, int]]) -> Mapping[str, float]:
        return next(self._predicted(self._bare(tuple(depths)), ()))[1]

    def _predicted(
        self, module: nn.Module, tiers: Sequence[Tier]
    ) -> Iterator[tuple[Tiers, dict[str, float]]]:
        training = self._training
        return predicted(
            self._place(module),
            tiers,
            training.optimizer,
            self._links,
            backwards=training.microbatches,
        )

    @cached_property
    def _all(self) -> list[tuple[Tiers, dict[str, float]]]:
        return list(self._predicted(self._bare(()), self._training.tiers()))

    def best(self, name: str, needed: Compute) -> tuple[Proposal, Mapping[str, float]]:
        """With so many activations: what fits and is fastest,
        or exceeds least; and all numbers of it."""
        training, tiers = self._training, self._training.tiers()
        room = training.machine.device.memory - training.reserved - needed.nbytes
        seconds = {"compute_s": training.microbatches * needed.flops / training.flops}

        def of(
            ways: Sequence[tuple[Tiers, dict[str, float]]], tiers: Sequence[Tier]
        ) -> tuple[Proposal, Mapping[str, float]]:
            found = [
                (proposal_of(name, chosen, numbers | seconds, "cuda", tiers, room), numbers)
                for chosen, numbers in ways
            ]
            return min(found, key=lambda each: _order(each[0], room))

        found = of(self._in_memory, ())
        # Nothing in a tier makes a step faster, nor what is in flight less.
        if found[0].fits or found[0].in_flight > room or not tiers:
            return found
        return of(self._all, tiers)


def _order(proposal: Proposal, room: int) -> tuple[bool, float]:
    return not proposal.fits, proposal.step_s if proposal.fits else proposal.nbytes - room


def _apart(mesh: Mesh) -> list[tuple[str, int, int]]:
    """Of each axis the name, the size, and how many ranks neighbours are apart."""
    found, stride = [], 1
    for name, size in reversed(mesh):
        found.append((name, size, stride))
        stride *= size
    return found


def compute_of(model: PlannedModel, training: Training) -> list[Compute | None]:
    """What a microbatch needs without and with checkpoints of repeated blocks.

    None: there are none. Without inputs nothing is known.
    """
    if model.inputs is None:
        return [_NO_ACTIVATIONS, None]
    needed = partial(
        activations_of, model.module, model.inputs, training.computes_in, stacks_of(model.module)
    )
    has_blocks = next(repeated_blocks(model.module), None) is not None
    return [needed(recompute=False), needed(recompute=True) if has_blocks else None]
