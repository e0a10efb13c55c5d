"""Norms and extremes of parameters of which some ranks hold nothing: those ranks raised once, and the others hung."""

from math import inf

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import zero_fn as zf
from tests.axes.grids import grid
from tests.support.ranks import axis
from tests.support.wholes import full


def _norm(p, foreach):
    """Of gradients that are the parameters themselves."""
    torch.manual_seed(0)
    model = zf.shard_params(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)), axis())
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    total = torch.nn.utils.get_total_norm(
        [p.grad for p in model.parameters() if p.grad is not None], norm_type=p, foreach=foreach
    )
    return float(total.full_tensor())


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("p", [inf, -inf, -1.0])
def test_a_norm_of_any_order_passes_over_ranks_that_hold_nothing(ranks, p, foreach):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    elements = torch.cat([parameter.detach().double().reshape(-1) for parameter in model.parameters()])
    exact = torch.linalg.vector_norm(elements, p).item()
    roundings = (
        0 if abs(p) == inf else elements.numel() + 4 + 8
    )  # for each power and addition, and the few of the roots
    for found in ranks(4).run(_norm, p, foreach):
        assert abs(found - exact) <= roundings * 2**-24 / (1 - roundings * 2**-24) * exact


READS = {
    "max": lambda p: p.abs().max(),
    "min": lambda p: p.min(),
    "amax(0)": lambda p: p.amax(0),
    "amax(1)": lambda p: p.amax(1),
    "of bools": lambda p: (p > 0.4).amax(0),
    "argmax": lambda p: p.argmax(),
    "argmin(0)": lambda p: p.argmin(0),
    "norm(inf)": lambda p: p.norm(inf),
    "norm(inf, 0)": lambda p: p.norm(inf, dim=0),
    "norm(inf, 1)": lambda p: p.norm(inf, dim=1),
    "norm(-inf, 0, keepdim)": lambda p: p.norm(-inf, dim=0, keepdim=True),
    "norm of rows": lambda p: torch.linalg.matrix_norm(p, inf),
}
"""Reductions of a matrix that have no value where there is nothing, and their kin."""


def _linear(rows):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, rows, bias=False))


def _along_data(rows):
    return zf.shard_params(_linear(rows), axis())


def _below_tensor_parallelism(rows):
    mesh = grid("dp", "tp")
    return zf.shard_params(parallelize_module(_linear(rows), mesh["tp"], {"0": ColwiseParallel()}), mesh["dp"])


def _read_and_gradients(make, rows):
    found = []
    for name, read in READS.items():
        (parameter,) = make(rows).parameters()
        value = read(parameter)
        parts = [full(value)]
        if value.requires_grad:
            value.sum().backward()
            parts.append(full(parameter.grad))
        found.append((name, parts))
    return found


@pytest.mark.parametrize(
    ("rows", "make"),
    [(1, _along_data), (5, _along_data), (1, _below_tensor_parallelism), (3, _below_tensor_parallelism)],
)
def test_extremes_and_their_gradients_are_those_of_the_whole(ranks, make, rows):
    expected = _read_and_gradients(_linear, rows)
    for found in ranks(4).run(_read_and_gradients, make, rows):
        for (name, ours), (_, theirs) in zip(found, expected, strict=True):
            for value, plain in zip(ours, theirs, strict=True):
                assert value is not None and plain is not None and torch.equal(value, plain), name
