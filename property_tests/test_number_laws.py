"""An expression over parameters and gradients at rest gives the number of the whole tensors, or raises: never another number.

Torch alone has some of them wrong: `zero_fn/dtensor/refused.py` has a row for each.
"""

from math import inf

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor

from tests.support.profiles import examples
from tests.support.programs import STAGES

SHAPES = ((4, 6), (7, 6), (1, 6), (5,), (1,), (), (2, 3))
"""Even rows, uneven ones, one row, which all ranks but one lack, and a scalar."""

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of the deviation of one number, and the like

STARTS = {
    "a parameter": lambda ts: ts[0],
    "uneven rows": lambda ts: ts[1],
    "a row": lambda ts: ts[2],
    "a bias": lambda ts: ts[3],
    "an element": lambda ts: ts[4],
    "a scalar": lambda ts: ts[5],
    "transposed": lambda ts: ts[1].t(),
    "a norm": lambda ts: ts[1].norm(),
    "norms": lambda ts: torch.stack([t.norm() for t in ts]),
    "norms of order 1": lambda ts: torch.stack([t.norm(1) for t in ts]),
    "joined norms": lambda ts: torch.cat([t.norm()[None] for t in ts]),
    "norms of columns": lambda ts: torch.stack([t.norm(dim=0) for t in ts[:3]]),
    "norms at once": lambda ts: torch.stack(torch._foreach_norm(ts)),
    "largest": lambda ts: torch.stack([t.abs().max() for t in ts]),
    "least": lambda ts: torch.stack([t.min() for t in ts]),
    "sums": lambda ts: torch.stack([t.sum() for t in ts]),
    "means": lambda ts: torch.stack([t.mean() for t in ts]),
    "numbers of all kinds": lambda ts: torch.stack([ts[0].norm(), ts[1].sum(), ts[2].norm(1), ts[3].max()]),
    "sums of columns": lambda ts: ts[1].sum(0),
    "flat": lambda ts: torch.cat([t.flatten() for t in ts]),
    "a sum of norms": lambda ts: sum(t.norm() for t in ts),
    "a product of norms": lambda ts: ts[0].norm() * ts[1].norm(),
    "a quotient of norms": lambda ts: ts[0].norm() / ts[1].norm(),
    "a norm above another": lambda ts: torch.where(ts[0].norm() > ts[1].norm(), ts[0].norm(), ts[1].norm()),
    "the larger norm": lambda ts: torch.maximum(ts[0].norm(), ts[1].norm()),
    "a maximum less a norm": lambda ts: ts[0].max() - ts[1].norm(),
    "a distance": lambda ts: ts[0].max() - ts[1].min(),
}
STEPS = {
    **{
        f"{name}({dim})": lambda v, name=name, dim=dim: getattr(v, name)(*dim)
        for name in (
            *("sum", "mean", "std", "var", "prod", "amax", "amin", "argmax", "argmin", "nansum", "nanmean", "all"),
        )
        for dim in ((), (0,), (-1,))
        if dim or name != "nanmean"
    },
    **{
        f"{name}({dim})": lambda v, name=name, dim=dim: getattr(v, name)(dim)
        for name in ("cumsum", "cumprod", "softmax", "log_softmax", "logsumexp", "unsqueeze", "flip")
        for dim in (0, -1)
    },
    **{
        f"norm({order}, {dim})": lambda v, order=order, dim=dim: v.norm(order, dim=dim)
        for order in (1, 2, 3, inf, -inf, 0)
        for dim in (None, 0, -1)
    },
    **{
        name: lambda v, name=name: getattr(v, name)()
        for name in (
            *("max", "min", "median", "abs", "exp", "neg", "sign", "reciprocal", "sigmoid", "relu", "square", "clone"),
            *("isfinite", "count_nonzero", "nonzero", "unique", "trace", "tril", "diagonal", "squeeze", "t"),
        )
    },
    "max(0)": lambda v: v.max(0)[0],
    "sort": lambda v: v.sort(0)[0],
    "topk": lambda v: v.topk(1, 0)[0],
    "clamp": lambda v: v.clamp(-0.1, 0.5),
    "+ 1": lambda v: v + 1,
    "1 -": lambda v: 1 - v,
    "* -2": lambda v: v * -2,
    "/ 3": lambda v: v / 3,
    "1 /": lambda v: 1 / v,
    "v + v": lambda v: v + v,
    "v * v": lambda v: v * v,
    "/ norm": lambda v: v / (v.norm() + 1e-6),
    "> mean": lambda v: (v > v.mean()).double(),
    "any": lambda v: (v > 0.5).any(0),
    "share": lambda v: (v > 0).double().mean(),
    "where": lambda v: torch.where(v > 0, v, torch.zeros_like(v)),
    "where mean": lambda v: torch.where(v > v.mean(), v, v.mean()),
    "maximum": lambda v: torch.maximum(v, v.mean()),
    "masked_fill": lambda v: v.masked_fill(v > 0, -1.0),
    "dot": lambda v: v.dot(v),
    "@": lambda v: v @ v.t(),
    "einsum ij,ij": lambda v: torch.einsum("ij,ij->", v, v),
    "einsum ij,ik": lambda v: torch.einsum("ij,ik->jk", v, v),
    "einsum ij": lambda v: torch.einsum("ij->j", v),
    "first": lambda v: v[0],
    "last": lambda v: v[-1],
    "rest": lambda v: v[1:],
    "column": lambda v: v[:, 0],
    "of a mask": lambda v: v[v > 0],
    "chunk": lambda v: v.chunk(2)[-1],
    "items": lambda v: sum(x for x in v),
    "stack": lambda v: torch.stack([v, v + 1]),
    "stack(1)": lambda v: torch.stack([v, v * 2], 1),
    "cat": lambda v: torch.cat([v, v * 2]),
    "repeat": lambda v: v.repeat(2, *[1] * (v.ndim - 1)),
    "flatten": lambda v: v.flatten(),
    "view": lambda v: v.view(1, -1),
    "item": lambda v: torch.tensor(v.item()),
    "bool": lambda v: torch.tensor(bool(v < 0.5)),
    "text": lambda v: torch.tensor(float(f"{v:.9f}")),
    "normalize": lambda v: F.normalize(v, dim=0),
    "cosine": lambda v: F.cosine_similarity(v, v + 1, dim=0),
    "aminmax": lambda v: torch.aminmax(v)[1],
    "std_mean": lambda v: torch.std_mean(v)[0],
    "mse": lambda v: F.mse_loss(v, v + 1),
    "l1": lambda v: F.l1_loss(v, v * 2),
    "add_": lambda v: v.clone().add_(1.0),
    "mul_": lambda v: v.clone().mul_(-2.0),
    "clamp_": lambda v: v.clone().clamp_(-0.1, 0.1),
    "sqrt_": lambda v: v.abs().clone().sqrt_(),
}


class Held(nn.Module):
    def __init__(self, values):
        super().__init__()
        self.held = nn.ParameterList(nn.Parameter(value) for value in values)


def _at_rest(world, stage, values):
    model = STAGES[stage](Held([world.each(lambda _, value=value: value.clone()) for value in values]), world.mesh)
    return [p.detach() for p in model.held]


def _value(start, steps, tensors):
    value = STARTS[start](tensors)
    for step in steps:
        value = STEPS[step](value)
    return value


def _wrong(world, start, steps, plain, resting):
    """What ranks hold of an expression over resting tensors, if it is another number than that of the plain ones."""
    try:
        expected = _value(start, steps, plain)
    except (RuntimeError, IndexError, TypeError, ValueError):
        return None  # it is none of plain tensors either
    try:
        found = _value(start, steps, resting)
        found = found.full_tensor() if isinstance(found, DTensor) else found
    except Exception as error:  # whatever it is, it is seen, unless the simulator of ranks is broken
        return str(error) if "process group" in str(error) else None
    for value in world.values(found):
        if value.shape != expected.shape or not torch.allclose(value, expected, rtol=1e-7, atol=1e-9, equal_nan=True):
            return f"{start} {steps}: {value.flatten()[:3].tolist()} for {expected.flatten()[:3].tolist()}"
    return None


def _plain():
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64) for shape in SHAPES]


@examples(dev=15, ci=300, deep=5_000)
@given(
    stage=st.sampled_from(["zero1", "zero2", "zero3"]),
    n=st.sampled_from([2, 2, 3]),
    start=st.sampled_from(sorted(STARTS)),
    steps=st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=4),
)
@example("zero3", 2, "norms", ["sum(())"])
@example("zero3", 2, "joined norms", ["sum((0,))"])
@example("zero3", 2, "norms", ["nansum(())"])
@example("zero3", 2, "norms", ["cat", "unsqueeze(0)", "sum((-1,))"])
@example("zero3", 2, "a maximum less a norm", ["norm(inf, None)"])
def test_a_number_is_that_of_whole_tensors_or_raises(local_tensor, stage, n, start, steps):
    plain = _plain()
    with local_tensor(n) as world:
        assert _wrong(world, start, steps, plain, _at_rest(world, stage, plain)) is None


@pytest.mark.nightly
@pytest.mark.parametrize("start", STARTS)
def test_every_step_from_a_start_gives_the_number_of_whole_tensors_or_raises(local_tensor, start):
    plain = _plain()
    with local_tensor(2) as world:
        resting = _at_rest(world, "zero3", plain)
        assert [line for step in STEPS if (line := _wrong(world, start, [step], plain, resting))] == []


def test_most_numbers_are_given(local_tensor):
    """The law would hold of a library that raised each time."""
    plain, raised = _plain(), []
    with local_tensor(2) as world:
        resting = _at_rest(world, "zero3", plain)
        for start in STARTS:
            try:
                _value(start, ["sum(())"], resting)
            except Exception as error:
                raised.append(f"{start}: {error}")
    assert raised == []
