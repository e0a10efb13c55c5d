"""A training program on the ranks of a transformed model, and what each rank holds after every rule."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import zero_fn as zf
from property_tests.modules import build_model
from property_tests.programs import apply
from property_tests.rules import (
    Accumulate,
    Backward,
    Copy,
    Edit,
    Evaluate,
    Fail,
    Failed,
    Freeze,
    Load,
    Program,
    Rule,
    Step,
    Transform,
    ZeroGrad,
    backwards,
    edited,
    evaluated,
    expecting_failure,
    failing,
    set_frozen,
)
from tests.simulation import axis as simulated_axis

__all__ = ["Held", "OnRank", "Seen", "run_program", "same", "whole"]


@dataclass(frozen=True)
class Held:
    """What one rank holds of one parameter: its part of the values and of the gradient, and along which dim it is one."""

    values: Tensor
    dim: int | None
    grad: Tensor | None
    trained: bool


@dataclass
class Seen:
    """One rank after one rule."""

    held: dict[str, Held]
    outputs: list[Tensor] = field(default_factory=list)
    norm: Tensor | None = None


class OnRank:
    """One rank of a program over an axis; `do` runs one rule."""

    def __init__(self, program: Program, axis: DeviceMesh) -> None:
        self.spec, self.program, self.axis = program.model, program, axis
        self.rank = axis.get_local_rank()
        self.model: nn.Module = apply(program.chain, build_model(program.model), axis)
        self._new_optimizer()

    def do(self, rule: Rule, seed: int) -> Seen:
        """Runs a rule, and looks at what is held then."""
        outputs: list[Tensor] = []
        norm: Tensor | None = None
        match rule:
            case Backward():
                self._backward(rule, seed)
            case Accumulate():
                self._accumulate(rule, seed)
            case Evaluate():
                outputs = evaluated(self.model, self.spec, rule.mode, seed, self.rank)
            case Step():
                norm = self._step(rule)
            case ZeroGrad():
                self.optimizer.zero_grad(set_to_none=rule.to_none)
            case Freeze():
                set_frozen(self.model, rule)
            case Edit():
                outputs = self._edit(rule, seed)
            case Load():
                self._load(rule)
            case Transform():
                self.model = apply(rule.chain, self.model, self.axis)
                self._new_optimizer()
            case Copy():
                self.model = copy.deepcopy(self.model)
                self._new_optimizer()
            case Fail():
                self._fail(rule, seed)
        return Seen(_held(self.model), outputs, norm)

    def _backward(self, rule: Backward, seed: int) -> None:
        for call in backwards(self.model, self.spec, rule, seed, self.rank):
            call()

    def _accumulate(self, rule: Accumulate, seed: int) -> None:
        with expecting_failure(), zf.accumulate(self.model):
            for number, microbatch in enumerate(rule.microbatches):
                if number == rule.fails_at:
                    raise Failed
                self._backward(microbatch, seed + 10 * number)
                if rule.evaluates:
                    evaluated(self.model, self.spec, "no_grad", seed, self.rank)

    def _step(self, rule: Step) -> Tensor | None:
        norm = None
        if rule.clip is not None:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), rule.clip, norm_type=rule.norm)
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        if not rule.keeps:
            self.optimizer.zero_grad()
        return norm

    def _edit(self, rule: Edit, seed: int) -> list[Tensor]:
        with zf.unsharded(self.model, writeback=rule.writeback):
            edited(self.model, rule)
            return evaluated(self.model, self.spec, "no_grad", seed, self.rank) if rule.forward else []

    def _load(self, rule: Load) -> None:
        with zf.unsharded(self.model):
            state = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        self.model = apply(rule.chain, build_model(self.spec, seed=1), self.axis)
        self.model.load_state_dict(state)
        self._new_optimizer()

    def _fail(self, rule: Fail, seed: int) -> None:
        block = zf.accumulate(self.model) if rule.accumulating else nullcontext()
        with expecting_failure(), failing(self.model, rule), block:
            self._backward(Backward(), seed)
        self.model.zero_grad()

    def _new_optimizer(self) -> None:
        self.optimizer = self.program.optimizer.build(list(self.model.parameters()))
        self.scheduler = self.program.optimizer.schedule(self.optimizer)


def run_program(program: Program, axis: Callable[[], DeviceMesh] = simulated_axis) -> list[Seen]:
    """Runs all rules on the calling rank of an axis."""
    me = OnRank(program, axis())
    return [me.do(rule, 100 * number) for number, rule in enumerate(program.rules)]


def _held(model: nn.Module) -> dict[str, Held]:
    """Asks nothing of other ranks: whole tensors are put together by who looks at all ranks."""
    found: dict[str, Held] = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if isinstance(parameter, DTensor):
            (placement,) = parameter.placements
            assert grad is None or (isinstance(grad, DTensor) and grad.placements == parameter.placements), name
            local_grad = grad._local_tensor.detach().clone() if isinstance(grad, DTensor) else None
            dim = placement.dim if placement.is_shard() else None  # type: ignore[attr-defined]
            found[name] = Held(parameter._local_tensor.detach().clone(), dim, local_grad, parameter.requires_grad)
        else:
            found[name] = Held(
                parameter.detach().clone(), None, None if grad is None else grad.clone(), parameter.requires_grad
            )
    return found


def whole(parts: list[Tensor], dim: int | None) -> Tensor | None:
    """Puts the parts of all ranks together; None if they should be equal and are not."""
    if dim is not None:
        return torch.cat(parts, dim)
    return parts[0] if all(same(part, parts[0]) for part in parts) else None


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal; NaN is equal to NaN. Programs may train until their numbers overflow."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())
