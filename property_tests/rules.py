"""Training programs as values: lists of rules. What each means for one model, and the ranks that follow them.

A rule is complete in itself: when it ends, gradients are reduced and the model is at rest. So ranks and oracle can be
compared after every one.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import zero_fn as zf
from property_tests.modules import Model, build_model, inputs, outputs_of, part_of
from property_tests.programs import Chain, apply
from tests.simulation import axis as simulated_axis
from tests.support.seeds import seed_generator
from tests.support.wholes import held


@dataclass(frozen=True)
class Backward:
    """Forwards, then a backward of their sum or, if not `together`, one of each."""

    forwards: int = 1
    together: bool = True
    output: int = -1  # which output the loss is made of; -1 is all of them
    retain: bool = False  # every backward runs twice
    unused: bool = False  # a forward before, whose graph is dropped


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

    def of(self, model):
        """The optimizer of a model."""
        parameters = list(model.parameters())
        options = {"lr": 0.05, "momentum": 0.9} if self.kind == "sgd" else {"lr": 1e-2}
        kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
        made = kinds[self.kind](parameters, foreach=self.foreach, **options)
        return Stepper(made, torch.optim.lr_scheduler.ExponentialLR(made, 0.7) if self.scheduled else None)


@dataclass(frozen=True)
class Stepper:
    """An optimizer of a model, and the schedule of its learning rate, if it has one."""

    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler | None

    def step(self, rule):
        """A step, once gradients are clipped."""
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        if not rule.keeps:
            self.optimizer.zero_grad()


@dataclass(frozen=True)
class Program:
    """A model, the transforms it starts with, an optimizer, and what happens."""

    model: Model
    chain: Chain
    rules: tuple[Rule, ...]
    optimizer: Optimizer = field(default_factory=Optimizer)


# -- what a rule does to one model --------------------------------------------------------------------------------------


def loss(model, spec, seed, rank, output):
    """The loss of one forward."""
    seed_generator(1000 * seed + rank)  # dropout
    outputs = outputs_of(model(inputs(spec, seed, rank)))
    chosen = outputs if output < 0 else [outputs[output % len(outputs)]]
    total = chosen[0].square().mean()
    for value in chosen[1:]:
        total = total + value.square().mean()
    return total


def backwards(model, spec, rule, seed, rank):
    """Runs the forwards of a rule; returns its backwards, each to be called once. Frozen models have none."""
    if rule.unused:
        loss(model, spec, seed + 50, rank, rule.output)
    losses = [loss(model, spec, seed + number, rank, rule.output) for number in range(rule.forwards)]
    if rule.together:
        total = losses[0]
        for other in losses[1:]:
            total = total + other
        losses = [total]
    calls = []
    for value in losses:
        if value.requires_grad:
            calls += [_backward(value, retain=True)] * rule.retain + [_backward(value, retain=False)]
    return calls


def _backward(value, *, retain):
    return lambda: value.backward(retain_graph=retain)


def evaluated(model, spec, mode, seed, rank):
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


def set_frozen(model, rule):
    """Freezes a part or trains its floating point parameters."""
    for parameter in part_of(model, rule.part).parameters():
        if parameter.is_floating_point():
            parameter.requires_grad_(not rule.frozen)


def edited(model, rule):
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
def failing(model, rule):
    """In this block a part raises `Failed`."""
    part = part_of(model, rule.part)

    def in_forward(*_):
        raise Failed

    def in_backward(_module, _args, output):
        if isinstance(output, Tensor) and output.is_floating_point() and not output.requires_grad:
            # As where this rank chose a frozen expert: it is to raise on every rank, and as late.
            output = output + torch.zeros_like(output, requires_grad=True)
        for value in outputs_of(output):
            if value.requires_grad:
                value.register_hook(in_forward)
        return output

    def in_recomputation(*_):
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


# -- ranks that follow them ---------------------------------------------------------------------------------------------


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

    def __init__(self, program, axis):
        self.spec, self.program, self.axis = program.model, program, axis
        self.rank = axis.get_local_rank()
        self.model = apply(program.chain, build_model(program.model), axis)
        self.stepper = self.program.optimizer.of(self.model)

    def do(self, rule, seed):
        """Runs a rule, and looks at what is held then."""
        outputs = []
        norm = None
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
                self.stepper.optimizer.zero_grad(set_to_none=rule.to_none)
            case Freeze():
                set_frozen(self.model, rule)
            case Edit():
                outputs = self._edit(rule, seed)
            case Load():
                self._load(rule)
            case Transform():
                self.model = apply(rule.chain, self.model, self.axis)
                self.stepper = self.program.optimizer.of(self.model)
            case Copy():
                self.model = copy.deepcopy(self.model)
                self.stepper = self.program.optimizer.of(self.model)
            case Fail():
                self._fail(rule, seed)
        return Seen(_held(self.model), outputs, norm)

    def _backward(self, rule, seed):
        for call in backwards(self.model, self.spec, rule, seed, self.rank):
            call()

    def _accumulate(self, rule, seed):
        with suppress(Failed), zf.accumulate(self.model):
            for number, microbatch in enumerate(rule.microbatches):
                if number == rule.fails_at:
                    raise Failed
                self._backward(microbatch, seed + 10 * number)
                if rule.evaluates:
                    evaluated(self.model, self.spec, "no_grad", seed, self.rank)

    def _step(self, rule):
        norm = None
        if rule.clip is not None:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), rule.clip, norm_type=rule.norm)
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        self.stepper.step(rule)
        return norm

    def _edit(self, rule, seed):
        with zf.unsharded(self.model, writeback=rule.writeback):
            edited(self.model, rule)
            return evaluated(self.model, self.spec, "no_grad", seed, self.rank) if rule.forward else []

    def _load(self, rule):
        with zf.unsharded(self.model):
            state = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        self.model = apply(rule.chain, build_model(self.spec, seed=1), self.axis)
        self.model.load_state_dict(state)
        self.stepper = self.program.optimizer.of(self.model)

    def _fail(self, rule, seed):
        block = zf.accumulate(self.model) if rule.accumulating else nullcontext()
        with suppress(Failed), failing(self.model, rule), block:
            self._backward(Backward(), seed)
        self.model.zero_grad()


def run_program(program, axis=simulated_axis):
    """Runs all rules on the calling rank of an axis."""
    me = OnRank(program, axis())
    return [me.do(rule, 100 * number) for number, rule in enumerate(program.rules)]


def _held(model):
    """Asks nothing of other ranks: whole tensors are put together by who looks at all ranks."""
    found = {}
    for name, parameter in model.named_parameters():
        (values, dim), (grad, grad_dim) = held(parameter), held(parameter.grad)
        assert values is not None and (grad is None or grad_dim == dim), name
        found[name] = Held(values, dim, grad, parameter.requires_grad)
    return found


def whole(parts, dim):
    """Puts the parts of all ranks together; None if they should be equal and are not."""
    if dim is not None:
        return torch.cat(parts, dim)
    return parts[0] if all(same(part, parts[0]) for part in parts) else None


def same(one, other):
    """Whether two tensors are equal; NaN is equal to NaN. Programs may train until their numbers overflow."""
    if one is None or other is None:
        return one is other
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())
