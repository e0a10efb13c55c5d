"""One training program in several worlds: plain replicas, and every stage. What it notes must be equal to the bit.

A *trial* is a function of a `World`. It builds its modules with `world.place`, trains them, and notes whole gradients and
parameters. In the world of replicas `place` returns the plain module and `reduce` averages gradients in the order of the
ranks, as zero_fn does on the CPU; in the world of a stage `place` transforms and `reduce` has nothing to do.

A *program* is what a user does in one step; `trained` makes a trial of it. `as_replicas` makes a test of either.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import zero_fn as zf
from tests.support.models import WIDTH, Tower
from tests.support.programs import OPTIMIZERS, STAGES
from tests.support.ranks import Ranks, axis
from tests.support.seeds import seed_generator
from tests.support.wholes import Held, held, means, wholes

__all__ = [
    "ALL",
    "DAILY",
    "WIDTH",
    "Program",
    "Run",
    "Tower",
    "Trial",
    "World",
    "as_replicas",
    "differences",
    "mean_of_ranks",
    "noise",
    "one_backward",
    "trained",
]

ALL = tuple(STAGES)
DAILY = ("zero1", "zero3")
"""What a trial runs in if it names no stages. ZeRO-2 has the parameters of the one and the gradients of the other, and
`replicate` shards nothing: `promises/test_stages_agree.py` and the laws compare all four."""

M = TypeVar("M", bound=nn.Module)


def noise(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """An input of this rank."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    return torch.randn(*shape, generator=generator, dtype=dtype)


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

    def accumulate(self, *modules: nn.Module, unshard: bool = False) -> AbstractContextManager[object]:
        """`zf.accumulate`, which plain replicas that reduce once need not."""
        return nullcontext() if self.is_replica else zf.accumulate(*modules, unshard=unshard)

    def unsharded(self, module: nn.Module) -> AbstractContextManager[object]:
        """Whole parameters, which are written back."""
        return nullcontext() if self.is_replica else zf.unsharded(module, writeback=True)

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

    def train(self, model: nn.Module, optimizer: torch.optim.Optimizer, *seeds: int) -> None:
        """A step on the batch of each seed."""
        for seed in seeds:
            self.step(model, optimizer, model(noise(4, WIDTH, seed=seed)).square().mean())


Trial = Callable[[World], object]


class Run:
    """How the gradients of a program reach the other ranks: replicas do by hand what a transformed model does."""

    def __init__(self, world: World, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.world, self.model, self.optimizer = world, model, optimizer
        self._is_reducing = False
        self._earlier: list[Tensor | None] = []

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """`loss.backward(**kwargs)`, reduced at its end, or at the end of `accumulate`."""
        with self._reducing() if self.world.is_replica else nullcontext():
            loss.backward(**kwargs)

    def accumulate(self, *, unshard: bool = False) -> AbstractContextManager[object]:
        """Backwards inside are summed on each rank and reduced once."""
        return self._reducing() if self.world.is_replica else zf.accumulate(self.model, unshard=unshard)

    def zero_grad(self, *, set_to_none: bool, by_model: bool = False) -> None:
        """`zero_grad` of the optimizer, or of the model."""
        (self.model if by_model else self.optimizer).zero_grad(set_to_none=set_to_none)
        self._earlier = [None if grad is None or set_to_none else torch.zeros_like(grad) for grad in self._earlier]

    def mean(self, grad: Tensor | None) -> Tensor | None:
        """A gradient that `torch.autograd.grad` gave, as it is over all ranks."""
        return mean_of_ranks(grad) if grad is not None and self.world.is_replica else grad

    @contextmanager
    def _reducing(self) -> Iterator[None]:
        """What was in `.grad` before is set aside; what comes inside is reduced and added. An exception drops that."""
        if self._is_reducing:
            yield
            return
        everything = list(self.model.parameters())
        self._earlier = [parameter.grad for parameter in everything]
        for parameter in everything:
            parameter.grad = None
        self._is_reducing = True
        try:
            yield
        except BaseException:
            for parameter, grad in zip(everything, self._earlier, strict=True):
                parameter.grad = grad
            raise
        finally:
            self._is_reducing = False
        fresh = means([parameter.grad for parameter in everything], everything)
        for parameter, grad, mean in zip(everything, self._earlier, fresh, strict=True):
            parameter.grad = None  # may have other strides than what is assigned
            parameter.grad = grad if mean is None else mean if grad is None else grad + mean


Program = Callable[[Any, Run, int], object]


def one_backward(model: Any, run: Run, number: int) -> None:
    """A program: one backward, of a batch of the step."""
    run.backward(model(noise(3, WIDTH, seed=number)).square().mean())


def mean_of_ranks(tensor: Tensor) -> Tensor:
    """The sum in the order of the ranks, divided by their number."""
    (mean,) = means([tensor.detach()], [tensor])
    assert mean is not None
    return mean


def trained(
    build: Callable[[], nn.Module],
    program: Program,
    *,
    steps: int = 2,
    optimizer: str = "sgd",
    options: Mapping[str, object] | None = None,
    transform: Callable[[nn.Module], nn.Module] = lambda model: model,
    stream: Callable[[torch.optim.Optimizer], torch.optim.Optimizer] = lambda optimizer: optimizer,
    zeroes: bool = True,
) -> Trial:
    """A trial: the same program in each step. What it returns is compared, too.

    Args:
        build: Makes the plain model; seeded before each call.
        program: Takes the model, a `Run` and the number of the step.
        steps: Optimizer steps: the second starts from states, and follows the order that the first has recorded.
        optimizer: A name in `OPTIMIZERS`.
        options: Of each stage.
        transform: Applied to each transformed model.
        stream: Applied to the optimizer of each of them.
        zeroes: Whether gradients are dropped after each step.
    """

    def trial(world: World) -> None:
        model: nn.Module = world.build(build, **(options or {}))
        model = model if world.is_replica else transform(model)
        made = OPTIMIZERS[optimizer]([p for p in model.parameters() if p.dtype.is_floating_point or p.is_complex()])
        run = Run(world, model, made if world.is_replica else stream(made))
        for step in range(steps):
            seed_generator(step)
            for number, leaf in enumerate(tree_leaves(program(model, run, step))):
                is_tensor = leaf is None or isinstance(leaf, Tensor)
                world.note(f"result {number} of step {step}", leaf if is_tensor else torch.as_tensor(leaf))
            world.note_model(model)
            run.optimizer.step()
            if zeroes:
                run.optimizer.zero_grad()
        world.note_model(model)

    return trial


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


def as_replicas(
    build: Callable[[], nn.Module] | None = None,
    *,
    n: int | None = 2,
    stages: Sequence[str] = DAILY,
    tolerance: float = 0.0,
    **how: Any,
) -> Callable[[Callable[..., object]], Callable[..., None]]:
    """Makes a test of a trial or, for the model of `build`, of a program: on `n` ranks stages give what replicas give.

    It is given the parameters of the test. Without `build`, or with `n=None`, these are parameters of the test, too.
    """

    def test_of(act: Callable[..., object]) -> Callable[..., None]:
        first, *own = inspect.signature(act).parameters
        is_program = first == "model"
        names = ["ranks", *(own[2:] if is_program else own)]
        names += ["build"] * (is_program and build is None) + ["n"] * (n is None)

        def test(ranks: Ranks, **given: Any) -> None:
            size = n or given.pop("n")
            make = build or (given.pop("build") if is_program else None)
            trial: Any = partial(act, **given)
            trial = trial if make is None else trained(make, trial, **how)
            assert ranks(size).run(differences, trial, stages=stages, tolerance=tolerance) == [[]] * size

        test.__doc__ = act.__doc__
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        test.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
        return test

    return test_of
