"""Training programs as values: lists of rules. What each means for one model, whoever runs it.

A rule is complete in itself: when it ends, gradients are reduced and the model is at rest. So ranks and oracle can be
compared after every one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from property_tests.modules import Model, called_parts, inputs, outputs_of
from property_tests.programs import Chain
from tests.support.seeds import seed_generator

__all__ = [
    "Accumulate",
    "Backward",
    "Copy",
    "Edit",
    "Evaluate",
    "Fail",
    "Freeze",
    "Load",
    "Optimizer",
    "Program",
    "Rule",
    "Step",
    "Transform",
    "ZeroGrad",
    "backwards",
    "edited",
    "evaluated",
    "expecting_failure",
    "failing",
    "set_frozen",
]


@dataclass(frozen=True)
class Backward:
    """Forwards, then a backward of their sum or, if not `together`, one of each.

    Attributes:
        forwards: How many.
        output: Which output the loss is made of; -1 is all of them.
        retain: Every backward runs twice.
        unused: A forward before, whose graph is dropped.
    """

    forwards: int = 1
    together: bool = True
    output: int = -1
    retain: bool = False
    unused: bool = False


@dataclass(frozen=True)
class Accumulate:
    """Several backwards, one reduction. At microbatch `fails_at` the block is left by an exception."""

    microbatches: tuple[Backward, ...] = (Backward(), Backward())
    evaluates: bool = False
    fails_at: int = -1


@dataclass(frozen=True)
class Evaluate:
    """A forward without backward; outputs are compared."""

    mode: str = "no_grad"


@dataclass(frozen=True)
class Step:
    """Clips (p-norm, at `clip`), steps, and drops gradients unless `keeps`."""

    clip: float | None = None
    norm: float = 2.0
    keeps: bool = False


@dataclass(frozen=True)
class ZeroGrad:
    """Drops gradients, or sets them to zero."""

    to_none: bool = True


@dataclass(frozen=True)
class Freeze:
    """Freezes a part, or trains it."""

    part: int = 0
    frozen: bool = True


@dataclass(frozen=True)
class Edit:
    """Edits whole parameters in `unsharded`; kept if `writeback`. With `forward`, a forward runs inside."""

    which: int = 0
    writeback: bool = True
    forward: bool = False


@dataclass(frozen=True)
class Load:
    """The whole state goes into a fresh module under another chain."""

    chain: Chain = ()


@dataclass(frozen=True)
class Transform:
    """Joins another chain."""

    chain: Chain = ()


@dataclass(frozen=True)
class Copy:
    """Goes on with a deep copy; the original is dropped."""


@dataclass(frozen=True)
class Fail:
    """Raises in a part: in its "forward", its "backward", or its "recomputation". Gradients are dropped after."""

    where: str = "forward"
    part: int = 0
    accumulating: bool = False


Rule = Backward | Accumulate | Evaluate | Step | ZeroGrad | Freeze | Edit | Load | Transform | Copy | Fail


@dataclass(frozen=True)
class Optimizer:
    """A stock optimizer, and a learning rate that falls after every step."""

    kind: str = "sgd"
    foreach: bool = True
    scheduled: bool = False

    def build(self, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of some parameters."""
        match self.kind:
            case "adam":
                return torch.optim.Adam(parameters, lr=1e-2, foreach=self.foreach)
            case "adamw":
                return torch.optim.AdamW(parameters, lr=1e-2, foreach=self.foreach)
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, foreach=self.foreach)

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        """The schedule of the learning rate; None without one."""
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7) if self.scheduled else None


@dataclass(frozen=True)
class Program:
    """A model, the transforms it starts with, an optimizer, and what happens."""

    model: Model
    chain: Chain
    rules: tuple[Rule, ...]
    optimizer: Optimizer = field(default_factory=Optimizer)


# -- what a rule does to one model --------------------------------------------------------------------------------------


def loss(model: nn.Module, spec: Model, seed: int, rank: int, output: int) -> Tensor:
    """The loss of one forward."""
    seed_generator(1000 * seed + rank)  # dropout
    outputs = outputs_of(model(inputs(spec, seed, rank)))
    chosen = outputs if output < 0 else [outputs[output % len(outputs)]]
    total = chosen[0].square().mean()
    for value in chosen[1:]:
        total = total + value.square().mean()
    return total


def backwards(model: nn.Module, spec: Model, rule: Backward, seed: int, rank: int) -> list[Callable[[], None]]:
    """Runs the forwards of a rule; returns its backwards, each to be called once. Frozen models have none."""
    if rule.unused:
        loss(model, spec, seed + 50, rank, rule.output)
    losses = [loss(model, spec, seed + number, rank, rule.output) for number in range(rule.forwards)]
    if rule.together:
        total = losses[0]
        for other in losses[1:]:
            total = total + other
        losses = [total]
    calls: list[Callable[[], None]] = []
    for value in losses:
        if value.requires_grad:
            calls += [_backward(value, retain=True)] * rule.retain + [_backward(value, retain=False)]
    return calls


def _backward(value: Tensor, *, retain: bool) -> Callable[[], None]:
    return lambda: value.backward(retain_graph=retain)


def evaluated(model: nn.Module, spec: Model, mode: str, seed: int, rank: int) -> list[Tensor]:
    """The outputs of one forward that nothing is learnt from."""
    seed_generator(1000 * seed + rank)
    x = inputs(spec, seed, rank)
    match mode:
        case "no_grad":
            with torch.no_grad():
                outputs = outputs_of(model(x))
        case "inference_mode":
            with torch.inference_mode():
                outputs = outputs_of(model(x))
        case _:
            model.eval()
            outputs = outputs_of(model(x))
            model.train()
    return [value.detach().clone() for value in outputs]


def set_frozen(model: nn.Module, rule: Freeze) -> None:
    """Freezes a part or trains its floating point parameters."""
    parts = called_parts(model)
    for parameter in parts[rule.part % len(parts)].parameters():
        if parameter.is_floating_point():
            parameter.requires_grad_(not rule.frozen)


def edited(model: nn.Module, rule: Edit) -> None:
    """Edits one whole parameter in place."""
    parameters = list(model.parameters())
    chosen = parameters[rule.which % len(parameters)]
    with torch.no_grad():
        if chosen.is_floating_point():
            chosen.mul_(0.5)
            chosen[..., :1].add_(0.25) if chosen.dim() else chosen.add_(0.25)


class Failed(Exception):
    """Raised in the middle of a program."""


@contextmanager
def failing(model: nn.Module, rule: Fail) -> Iterator[None]:
    """In this block a part raises `Failed`."""
    parts = called_parts(model)
    part = parts[rule.part % len(parts)]

    def in_forward(*_: object) -> None:
        raise Failed

    def in_backward(_module: nn.Module, _args: object, output: Any) -> Any:
        if isinstance(output, Tensor) and output.is_floating_point() and not output.requires_grad:
            # As where this rank chose a frozen expert: it is to raise on every rank, and as late.
            output = output + torch.zeros_like(output, requires_grad=True)
        for value in outputs_of(output):
            if value.requires_grad:
                value.register_hook(in_forward)
        return output

    def in_recomputation(*_: object) -> None:
        if torch._C._current_graph_task_id() != -1:
            raise Failed

    match rule.where:
        case "forward":
            handle = part.register_forward_pre_hook(in_forward)
        case "backward":
            handle = part.register_forward_hook(in_backward)
        case _:
            handle = getattr(part, "inner", part).register_forward_pre_hook(in_recomputation)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def expecting_failure() -> Iterator[None]:
    """Swallows `Failed`: the program goes on."""
    with suppress(Failed):
        yield
