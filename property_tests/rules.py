"""Training programs as values: lists of rules, the ranks that follow them, and the oracle.

A rule is complete in itself: when it ends, gradients are reduced and the model is at rest. So ranks and oracle are compared
after every one.

[Note: the oracle] Plain replicas, one for each rank, whose gradients are added in the order of the ranks and divided. All
that ranks hold is compared: parameters, gradients (and which are None), what is trained, outputs. Everything must be equal to
the bit, with two exceptions:

    the norm that clipping returns    sums over shards are in another order: it must lie within the rounding of the sum, and
                                      the replicas then scale with the norm that the ranks found
    sums in another order             where a program adds the same addends in two legal orders (`is_reordered`), gradients
                                      lie within 1024 roundings of the largest one; replicas go on with those of the ranks
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
from property_tests.programs import OPTIMIZERS, Chain, Model, apply, build_model, inputs, outputs_of
from tests.simulation import axis as simulated_axis
from tests.support.reference import mean_in_rank_order
from tests.support.seeds import seed_generator
from tests.support.wholes import Held, held


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
    unshard: bool = False


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
                return self.backward(rule, seed)
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
        """Forwards, and one backward after another, each on all ranks. Returns the losses of each."""
        losses = [self.losses(model, rule, seed, rank) for rank, model in zip(self.ranks, self.models, strict=True)]
        for at_once in zip(*(backwards(of_rank, retain=rule.retain) for of_rank in losses), strict=True):
            self.run(at_once)
        return [[loss.detach() for loss in of_rank] for of_rank in losses]

    def losses(self, model, rule, seed, rank):
        """What the forwards of a rule give."""
        if rule.unused:
            self.loss(model, seed + 50, rank, rule.output)
        losses = [self.loss(model, seed + number, rank, rule.output) for number in range(rule.forwards)]
        return [sum(losses[1:], losses[0])] if rule.together else losses

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
        with suppress(Failed), self.accumulating(unshard=rule.unshard):
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
                for call in backwards(self.losses(model, Backward(), seed, rank)):
                    call()
            model.zero_grad()


def backwards(losses, *, retain=False):
    """The backwards of losses, each to be called once. Frozen models have none."""
    calls = []
    for value in losses:
        if value.requires_grad:
            calls += [partial(value.backward, retain_graph=True)] * retain + [value.backward]
    return calls


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


@dataclass
class Seen:
    """One rank after one rule."""

    held: dict[str, tuple[Held, Held, bool]]  # of each parameter: values, gradient, whether it is trained
    outputs: list[Tensor] = field(default_factory=list)
    norm: Tensor | None = None


class OnRank(Training):
    """One rank of a program over an axis."""

    def __init__(self, program, axis):
        self.axis = axis
        super().__init__(program, [axis.get_local_rank()])

    def placed(self, chain, model):
        return apply(chain, model, self.axis)

    def accumulating(self, *, unshard=False):
        return zf.accumulate(self.models[0], unshard=unshard)

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
    named = model.named_parameters()
    return {name: (held(parameter), held(parameter.grad), parameter.requires_grad) for name, parameter in named}


def whole(parts):
    """Puts the parts of all ranks together; None if they should be equal and are not."""
    values = [part.values for part in parts]
    if parts[0].dim is not None:
        return torch.cat(values, parts[0].dim)
    return values[0] if all(same(one, values[0]) for one in values) else None


def same(one, other):
    """Whether two tensors are equal; NaN is equal to NaN. Programs may train until their numbers overflow."""
    if one is None or other is None:
        return one is other
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())


# -- the oracle ----------------------------------------------------------------------------------------------------------


class Replicas(Training):
    """N replicas of a program, of which the first is stepped; `follow` runs one rule and says where the ranks differ."""

    sums = None  # the gradients of each replica in an `accumulate` block

    def __init__(self, program, n):
        super().__init__(program, range(n))
        self.is_reordered = is_reordered(program)

    def follow(self, rule, seed, seen):
        """A line for each difference between the replicas and what the ranks held after a rule."""
        self.seen, self.found = seen, []
        for rank, outputs in enumerate(self.do(rule, seed)):
            others = seen[rank].outputs
            if len(outputs) != len(others) or not all(map(same, outputs, others)):
                self.found.append(f"outputs of rank {rank} differ")
        return self.found + self._compare(seen)

    # -- what ranks do otherwise ------------------------------------------------------------------------------------

    def placed(self, _chain, model):
        model.zero_grad()  # as a transform does
        return model

    @contextmanager
    def accumulating(self, *, unshard=False):
        self.sums = [[None] * len(list(model.parameters())) for model in self.models]
        try:
            yield
            self._reduce(self.sums)
        finally:
            self.sums = None

    @contextmanager
    def unsharded(self, *, writeback):
        parameters = [parameter for model in self.models for parameter in model.parameters()]
        before = [parameter.detach().clone() for parameter in parameters]
        yield
        if not writeback:
            _write(before, parameters)

    def run(self, calls):
        by_rank = [self._fresh(model, call) for model, call in zip(self.models, calls, strict=True)]
        if self.sums is None:
            self._reduce(by_rank)
        else:
            self.sums = [list(map(_added, one, other)) for one, other in zip(self.sums, by_rank, strict=True)]

    def clip(self, rule):
        norm = self.seen[0].norm
        assert norm is not None
        if not all(same(other.norm, norm) for other in self.seen):
            self.found.append("ranks clip with different norms")
        parameters = list(self.models[0].parameters())
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        self.found += _norm_differs(grads, rule.norm, norm)
        if grads:
            nn.utils.clip_grads_with_norm_(parameters, rule.clip, norm)

    def step(self, rule):
        super().step(rule)
        for model in self.models[1:]:
            _write(self.models[0].parameters(), model.parameters())

    # -- gradients --------------------------------------------------------------------------------------------------

    def _fresh(self, model, call):
        """The gradients of one backward alone."""
        parameters = list(model.parameters())
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        call()
        grads = [parameter.grad for parameter in parameters]
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad
        return [None if grad is None else _wide(grad) for grad in grads]

    def _reduce(self, by_rank):
        """Adds the mean over ranks to the gradients of the first replica. No gradient is a gradient of zeros if another rank
        has one."""
        for parameter, grads in zip(self.models[0].parameters(), zip(*by_rank, strict=True), strict=True):
            present = [grad for grad in grads if grad is not None]
            if not present:
                continue
            addends = [torch.zeros_like(present[0]) if grad is None else grad for grad in grads]
            mean = mean_in_rank_order(addends, addends[0].dtype).to(parameter.dtype)
            parameter.grad = mean if parameter.grad is None else parameter.grad + mean

    # -- comparison ---------------------------------------------------------------------------------------------------

    def _compare(self, seen):
        expected = dict(self.models[0].named_parameters())
        if any(rank.held.keys() != expected.keys() for rank in seen):
            return ["names differ"]
        found = []
        for name, parameter in expected.items():
            values, grads, trained = zip(*(rank.held[name] for rank in seen), strict=True)
            if {*trained} != {parameter.requires_grad}:
                found.append(f"requires_grad of {name} differs")
            if not same(whole(values), parameter):
                found.append(f"{name} differs{_by_how_much(whole(values), parameter)}")
            if {grad.values is None for grad in grads} != {parameter.grad is None}:
                found.append(f"grad of {name} is None on some ranks, or is not")
            elif parameter.grad is not None and not self._is_same_grad(whole(grads), parameter):
                found.append(f"grad of {name} differs{_by_how_much(whole(grads), parameter.grad)}")
        return found

    def _is_same_grad(self, grad, parameter):
        if same(grad, parameter.grad):
            return True
        if not self.is_reordered or grad is None or grad.shape != parameter.shape:
            return False
        grads = [p.grad.abs().max().double() for p in self.models[0].parameters() if p.grad is not None and p.numel()]
        roundings = 8 if grad.itemsize < 4 else 1024
        bound = roundings * torch.finfo(grad.dtype).eps * torch.stack(grads).nan_to_num(1.0).max()
        is_near = (grad.double() - parameter.grad.double()).abs() <= bound
        is_near |= ~(grad.isfinite() | parameter.grad.isfinite())
        if bool(is_near.all()):
            parameter.grad = grad.clone()
        return bool(is_near.all())


def is_reordered(program):
    """Whether some sum of the program has two legal orders.

    A unit that runs several times in a backward adds its uses one by one, to what an `accumulate` block has so far; in a
    backward that is not the first after its forwards, it reduces them one by one. A replica adds all uses of a parameter in a
    backward first.
    """
    passes = [one for rule in program.rules for one in _passes(rule)]
    several = program.model.twice >= 0 or any(one.together and one.forwards > 1 for one in passes)
    # A parameter of "odd" is bfloat16, whose sums are float32 on ranks; "recurrent" uses its weights at every time, "normed"
    # twice; every use of a "reentrant" one ends in a backward of its own, and is reduced there.
    one_by_one = (
        any(isinstance(rule, Accumulate) for rule in program.rules)
        or any(one.retain or one.forwards > 1 for one in passes)
        or (several and bool(program.model.ties))
        or bool(program.model.kinds() & {"odd", "recurrent", "normed", "reentrant"})
    )
    # A tied parameter may belong to a unit that is entered once for each module that holds it.
    return (several or bool(program.model.ties)) and one_by_one


def _passes(rule):
    if isinstance(rule, Accumulate):
        return rule.microbatches
    return (rule,) if isinstance(rule, Backward) else ()


def differences(program, by_rank):
    """Where what ranks held after each rule differs from replicas, as lines of text, up to the first rule that does."""
    replicas = Replicas(program, len(by_rank))
    for number, rule in enumerate(program.rules):
        found = replicas.follow(rule, 100 * number, [seen[number] for seen in by_rank])
        if found:
            return [f"after rule {number}, {rule}: {line}" for line in found]
    return []


def _write(values, parameters):
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)


def _wide(grad):
    """In the dtype of sums."""
    return grad.float() if grad.is_floating_point() and grad.itemsize < 4 else grad.clone()


def _added(one, other):
    return one + other if one is not None and other is not None else one if other is None else other


def _norm_differs(grads, p, norm):
    """The norm of all gradients against its value in float64, within the rounding of a sum in the dtype of the norm."""
    if not grads:
        return []
    exact = torch.linalg.vector_norm(torch.cat([grad.double().flatten() for grad in grads]), p)
    powers = exact.clamp(min=1.0) ** p if p != float("inf") else exact
    if not bool(powers < torch.finfo(norm.dtype).max):
        return []  # the sum of powers overflows, or nearly; with other orders in other places
    terms = sum(grad.numel() for grad in grads) + 32  # additions, powers and roots
    coarsest = max(torch.finfo(grad.dtype).eps for grad in grads) / 2
    u = min(
        coarsest, torch.finfo(torch.float32).eps / 2
    )  # sums of 16-bit numbers are float32, and rounded at their end
    gamma = (terms * u / (1 - terms * u) + 4 * coarsest) * max(1.0, 1 / p)
    if not bool((norm.double() - exact).abs() <= 2 * gamma * exact):
        return [f"the norm is {norm.item()!r}, not {exact.item()!r}"]
    return []


def _by_how_much(one, other):
    if one is None:
        return " between ranks"
    if one.shape != other.shape or one.dtype != other.dtype:
        return f": {list(one.shape)} {one.dtype} for {list(other.shape)} {other.dtype}"
    return f" by {(one.double() - other.detach().double()).abs().max().item():.3g}"
