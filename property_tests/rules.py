"""Training programs as values: lists of rules. What each means for one model, and the ranks that follow them.

A rule is complete in itself: when it ends, gradients are reduced and the model is at rest. So ranks and oracle can be
compared after every one.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import zero_fn as zf
from property_tests.modules import Model, build_model, inputs, outputs_of
from property_tests.programs import OPTIMIZERS, Chain, apply
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
    """A stock optimizer, and whether its learning rate falls after every step."""

    kind: str = "sgd"
    foreach: bool = True
    scheduled: bool = False


@dataclass(frozen=True)
class Program:
    """A model, the transforms it starts with, an optimizer, and what happens."""

    model: Model
    chain: Chain
    rules: tuple[Rule, ...]
    optimizer: Optimizer = field(default_factory=Optimizer)


# -- what a rule does ---------------------------------------------------------------------------------------------------


class Training:
    """A program on some ranks, each with a model; `do` runs one rule. What ranks and plain replicas do otherwise is below."""

    def __init__(self, program, ranks):
        self.program, self.ranks = program, ranks
        self.start([self.placed(program.chain, self.built()) for _ in ranks])

    def start(self, models):
        """Goes on with these models, and a new optimizer of the first."""
        self.models, how = models, self.program.optimizer
        self.optimizer = OPTIMIZERS[how.kind](list(models[0].parameters()), foreach=how.foreach)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.7) if how.scheduled else None

    def built(self, seed=0):
        """The plain model."""
        return build_model(self.program.model, seed)

    def part(self, model, number):
        """One of the parts of a model, which run in every forward on every rank."""
        return model.parts[number % len(model.parts)]

    def do(self, rule, seed):
        """Runs a rule. Returns the outputs of each rank, of a rule that has some to compare."""
        match rule:
            case Backward():
                self.backward(rule, seed)
            case Accumulate():
                self._accumulate(rule, seed)
            case Evaluate():
                return self.evaluate(rule.mode, seed)
            case Step():
                self.step(rule)
            case ZeroGrad():
                self.optimizer.zero_grad(set_to_none=rule.to_none)
            case Freeze():
                for model in self.models:
                    set_trained(self.part(model, rule.part), not rule.frozen)
            case Edit():
                with self.unsharded(writeback=rule.writeback):
                    for model in self.models:
                        edit(list(model.parameters()), rule.which)
                    return self.evaluate("no_grad", seed) if rule.forward else []
            case Load():
                self._load(rule)
            case Transform():
                self.start([self.placed(rule.chain, model) for model in self.models])
            case Copy():
                self.start([copy.deepcopy(model) for model in self.models])
            case Fail():
                self._fail(rule, seed)
        return []

    def backward(self, rule, seed):
        """Forwards, and one backward after another, each on all ranks."""
        calls = [self.backwards(model, rule, seed, rank) for rank, model in zip(self.ranks, self.models, strict=True)]
        for at_once in zip(*calls, strict=True):
            self.run(at_once)

    def backwards(self, model, rule, seed, rank):
        """Runs the forwards of a rule; returns its backwards, each to be called once. Frozen models have none."""
        if rule.unused:
            self.loss(model, seed + 50, rank, rule.output)
        losses = [self.loss(model, seed + number, rank, rule.output) for number in range(rule.forwards)]
        losses = [sum(losses[1:], losses[0])] if rule.together else losses
        calls = []
        for value in losses:
            if value.requires_grad:
                calls += [partial(value.backward, retain_graph=True)] * rule.retain + [value.backward]
        return calls

    def loss(self, model, seed, rank, output=-1):
        """The loss of one forward."""
        outputs = self.forward(model, seed, rank)
        chosen = outputs if output < 0 else [outputs[output % len(outputs)]]
        squares = [value.square().mean() for value in chosen]
        return sum(squares[1:], squares[0])

    def forward(self, model, seed, rank):
        """The outputs of one forward."""
        seed_generator(1000 * seed + rank)  # dropout
        return outputs_of(model(inputs(self.program.model, seed, rank)))

    def evaluate(self, mode, seed):
        """The outputs of one forward on each rank, that nothing is learnt from."""
        found = []
        for rank, model in zip(self.ranks, self.models, strict=True):
            model.train(mode != "eval")
            with {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(mode, nullcontext)():
                outputs = self.forward(model, seed, rank)
            model.train()
            found.append([value.detach().clone() for value in outputs])
        return found

    def step(self, rule):
        """A step, once gradients are clipped."""
        if rule.clip is not None:
            self.clip(rule)
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        if not rule.keeps:
            self.optimizer.zero_grad()

    def _accumulate(self, rule, seed):
        with suppress(Failed), self.accumulating():
            for number, microbatch in enumerate(rule.microbatches):
                if number == rule.fails_at:
                    raise Failed
                self.backward(microbatch, seed + 10 * number)
                if rule.evaluates:
                    self.evaluate("no_grad", seed)

    def _load(self, rule):
        with self.unsharded(writeback=False):
            states = [
                {name: value.detach().clone() for name, value in model.state_dict().items()} for model in self.models
            ]
        self.start([self.placed(rule.chain, self.built(seed=1)) for _ in states])
        for model, state in zip(self.models, states, strict=True):
            model.load_state_dict(state)

    def _fail(self, rule, seed):
        for rank, model in zip(self.ranks, self.models, strict=True):
            block = self.accumulating() if rule.accumulating else nullcontext()
            with suppress(Failed), failing(self.part(model, rule.part), rule.where), block:
                for call in self.backwards(model, Backward(), seed, rank):
                    call()
            model.zero_grad()


def set_trained(module, trained):
    """Freezes or trains its floating point parameters."""
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.requires_grad_(trained)


def edit(parameters, which):
    """Edits one whole parameter in place."""
    chosen = parameters[which % len(parameters)]
    with torch.no_grad():
        if chosen.is_floating_point():
            chosen.mul_(0.5)
            chosen[..., :1].add_(0.25) if chosen.dim() else chosen.add_(0.25)


class Failed(Exception):
    """Raised in the middle of a program."""


@contextmanager
def failing(part, where):
    """In this block a part raises `Failed`."""

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

    match where:
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


class OnRank(Training):
    """One rank of a program over an axis."""

    def __init__(self, program, axis):
        self.axis = axis
        super().__init__(program, [axis.get_local_rank()])

    def placed(self, chain, model):
        return apply(chain, model, self.axis)

    def accumulating(self):
        return zf.accumulate(self.models[0])

    def unsharded(self, *, writeback):
        return zf.unsharded(self.models[0], writeback=writeback)

    def run(self, calls):
        for call in calls:
            call()

    def clip(self, rule):
        norm = nn.utils.clip_grad_norm_(self.models[0].parameters(), rule.clip, norm_type=rule.norm)
        self.norm = norm.full_tensor() if isinstance(norm, DTensor) else norm

    def see(self, rule, seed):
        """Runs a rule, and looks at what is held then."""
        self.norm = None
        outputs = self.do(rule, seed)
        return Seen(_held(self.models[0]), outputs[0] if outputs else [], self.norm)


def run_program(program, axis=simulated_axis):
    """Runs all rules on the calling rank of an axis."""
    me = OnRank(program, axis())
    return [me.see(rule, 100 * number) for number, rule in enumerate(program.rules)]


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
