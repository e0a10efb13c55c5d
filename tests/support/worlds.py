"""One training program in several worlds: plain replicas, and every stage. What it notes must be equal to the bit.

A *trial* is a function of a `World`. It builds its modules with `world.place`, trains them, and notes whole gradients and
parameters. In the world of replicas `place` returns the plain module and `reduce` averages gradients in the order of the
ranks, as zero_fn does on the CPU; in the world of a stage `place` transforms and `reduce` has nothing to do.

`tests/promises/oracle.py` is this oracle for trials that are the same steps over and over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_fn as zf
from tests.distributed.training import STAGES
from tests.support.models import Block
from tests.support.profiles import PROFILE
from tests.support.ranks import axis
from tests.support.seeds import seed_generator
from tests.support.wholes import Held, held, means, wholes

__all__ = ["ALL", "DAILY", "WIDTH", "Tower", "Trial", "World", "differences", "noise"]

WIDTH = 6
ALL = tuple(STAGES)
DAILY = ("zero1", "zero3") if PROFILE == "dev" else ALL
"""What a trial runs in if it names no stages. ZeRO-2 has the parameters of the one and the gradients of the other, and
`replicate` shards nothing: `distributed/test_training.py` and the laws compare all four every day."""

M = TypeVar("M", bound=nn.Module)


def noise(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """An input of this rank."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    return torch.randn(*shape, generator=generator, dtype=dtype)


class Tower(nn.Module):
    """Three blocks, each a unit with a scalar and uneven rows, between two linears of the root."""

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, 7)
        self.blocks = nn.ModuleList(Block(7) for _ in range(3))
        self.dropout = nn.Dropout(dropout)
        self.leave = nn.Linear(7, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = self.dropout(block(x))
        output: Tensor = self.leave(x)
        return output


class World:
    """Where a trial runs.

    Attributes:
        stage: A name in `STAGES`, or None: plain replicas.
        history: What this rank noted so far.
    """

    def __init__(self, stage: str | None) -> None:
        self.stage = stage
        self.history: list[tuple[str, Held]] = []

    @property
    def is_replica(self) -> bool:
        """Whether modules stay plain."""
        return self.stage is None

    def build(self, make: Callable[[], M], *, seed: int = 0, **options: object) -> M:
        """A seeded module, placed."""
        seed_generator(seed)
        return self.place(make(), **options)

    def place(self, module: M, **options: object) -> M:
        """The module as this world trains it."""
        return module if self.stage is None else STAGES[self.stage](module, axis(), **options)  # type: ignore[return-value]

    def accumulate(self, *modules: nn.Module) -> AbstractContextManager[object]:
        """`zf.accumulate`, which plain replicas that reduce once need not."""
        return nullcontext() if self.is_replica else zf.accumulate(*modules)

    def reduce(self, *modules: nn.Module) -> None:
        """Averages the gradients of replicas; a parameter without gradient on some ranks counts as zeros there."""
        if not self.is_replica:
            return
        everything = list({p: None for module in modules for p in module.parameters()})
        for parameter, mean in zip(everything, means([p.grad for p in everything], everything), strict=True):
            parameter.grad = None  # may have other strides than what is assigned
            parameter.grad = mean

    def note(self, name: str, value: Tensor | None) -> None:
        """Remembers a value, of which the whole will be compared."""
        self.history.append((name, held(value)))

    def note_model(self, *modules: nn.Module) -> None:
        """Remembers all gradients and parameters of modules."""
        for i, module in enumerate(modules):
            for name, parameter in module.named_parameters():
                self.note(f"{i}.{name}.grad", parameter.grad)
                self.note(f"{i}.{name}", parameter)

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        """Backward, reduce, note, step, zero_grad."""
        loss.backward()
        self.reduce(model)
        self.note("loss", loss)
        self.note_model(model)
        optimizer.step()
        model.zero_grad()  # also of what the optimizer does not hold: `reduce` averages what it finds


Trial = Callable[[World], object]


def differences(
    trial: Trial, *, stages: Sequence[str] = DAILY, tolerance: float = 0.0, beside: str | None = None
) -> list[str]:
    """Where a stage differs from plain replicas, as lines of text; empty when none does. To be called on the ranks.

    Args:
        trial: What to run in every world.
        stages: Names in `STAGES`.
        tolerance: By how much an element may be off, for trials in float64 whose sums have several legal orders.
        beside: The stage to compare with; None: plain replicas.
    """
    expected = _history(trial, beside)
    assert expected, "the trial noted nothing"
    found = []
    for stage in stages:
        for step, (one, other) in enumerate(zip(expected, _history(trial, stage), strict=True)):
            if line := _difference(one, other, tolerance):
                found.append(f"{stage}, note {step}: {line}")
    return found


def _history(trial: Trial, stage: str | None) -> list[tuple[str, Tensor | None]]:
    seed_generator(0)
    world = World(stage)
    trial(world)
    return list(zip([name for name, _ in world.history], wholes([part for _, part in world.history]), strict=True))


def _difference(one: tuple[str, Tensor | None], other: tuple[str, Tensor | None], tolerance: float) -> str | None:
    (name, expected), (other_name, value) = one, other
    if name != other_name:
        return f"{other_name} was noted in place of {name}"
    if expected is None or value is None:
        return None if expected is value else f"{name} is {'None' if value is None else 'not None'}"
    if expected.shape != value.shape or expected.dtype != value.dtype:
        return f"{name} is {value.dtype}{list(value.shape)}, not {expected.dtype}{list(expected.shape)}"
    if torch.equal(expected, value) or (tolerance and torch.allclose(expected, value, rtol=0, atol=tolerance)):
        return None
    return f"{name} is off by {(expected - value).abs().max().item():.2e}"
