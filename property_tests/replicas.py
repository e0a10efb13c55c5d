"""The oracle: plain replicas, one for each rank, whose gradients are added in the order of the ranks and divided.

It follows a program rule by rule and compares all that the ranks hold after each: parameters, gradients (and which are None),
what is trained, outputs. Everything must be equal to the bit, with two exceptions:

    the norm that clipping returns    sums over shards are in another order: it must lie within the rounding of the sum, and
                                      the replicas then scale with the norm that the ranks found
    sums in another order             where a program adds the same addends in two legal orders (`is_reordered`), gradients
                                      lie within 1024 roundings of the largest one; replicas go on with those of the ranks
"""

from contextlib import contextmanager

import torch
from torch import nn

from property_tests.rules import Accumulate, Backward, Training, same, whole
from tests.support.reference import mean_in_rank_order

__all__ = ["Replicas", "differences"]


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
    def accumulating(self):
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
            held = [rank.held[name] for rank in seen]
            if any(one.trained != parameter.requires_grad for one in held):
                found.append(f"requires_grad of {name} differs")
            values = whole([one.values for one in held], held[0].dim)
            if not same(values, parameter):
                found.append(f"{name} differs{_by_how_much(values, parameter)}")
            grads = [one.grad for one in held if one.grad is not None]
            if len(grads) not in (0, len(held)):
                found.append(f"grad of {name} is None on some ranks")
            elif bool(grads) != (parameter.grad is not None):
                found.append(f"grad of {name} is {'there' if grads else 'None'}")
            elif grads and parameter.grad is not None:
                found += self._compare_grad(name, whole(grads, held[0].dim), parameter)
        return found

    def _compare_grad(self, name, grad, parameter):
        assert parameter.grad is not None
        if same(grad, parameter.grad):
            return []
        if self.is_reordered and grad is not None and grad.shape == parameter.shape:
            grads = [
                p.grad.abs().max().double() for p in self.models[0].parameters() if p.grad is not None and p.numel()
            ]
            roundings = 8 if grad.itemsize < 4 else 1024
            bound = roundings * torch.finfo(grad.dtype).eps * torch.stack(grads).nan_to_num(1.0).max()
            is_near = (grad.double() - parameter.grad.double()).abs() <= bound
            if bool((is_near | ~(grad.isfinite() | parameter.grad.isfinite())).all()):
                parameter.grad = grad.clone()
                return []
        return [f"grad of {name} differs{_by_how_much(grad, parameter.grad)}"]


def is_reordered(program):
    """Whether some sum of the program has two legal orders.

    A unit that runs several times in a backward adds its uses one by one, to what an `accumulate` block has so far; in a
    backward that is not the first after its forwards, it reduces them one by one. A replica adds all uses of a parameter in a
    backward first.
    """
    passes = [one for rule in program.rules for one in _passes(rule)]
    several = program.model.twice >= 0 or any(one.together and one.forwards > 1 for one in passes)
    one_by_one = (
        any(isinstance(rule, Accumulate) for rule in program.rules)
        or any(one.retain or one.forwards > 1 for one in passes)
        or (several and bool(program.model.ties))
        or "odd" in program.model.kinds()  # one of its parameters is bfloat16, whose sums are float32 on ranks
        or "recurrent" in program.model.kinds()  # uses its weights at every time
        or "normed" in program.model.kinds()  # uses its weight twice
        or "reentrant" in program.model.kinds()  # every use ends in a backward of its own, and is reduced there
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
