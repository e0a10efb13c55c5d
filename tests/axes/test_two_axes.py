"""Two data axes of one mesh: every pair of stages, in both orders, equal to replicas that average over one, then the other.

Four ranks, outer x inner. Means are hierarchical and summed in the order of the ranks, so all is compared to the bit.
Accumulation over two axes, and what ranks skip, are drawn by `property_tests/test_axes_laws.py`.
"""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import zero_fn as zf
from tests.axes.grids import Decoder, adam, averaging, batch, cast_by_hand, differing, grid, loss_of, step, unlike
from tests.support.on_ranks import on_ranks
from tests.support.programs import STAGES
from tests.support.ranks import axis
from tests.support.seeds import seed_generator
from tests.support.wholes import full
from zero_fn.transport.links import BY_BACKEND
from zero_fn.transport.native import Native


def _built():
    seed_generator(0)
    return Decoder()


def _over(inner, outer, *, inner_first=True):
    mesh = grid("outer", "inner")
    model = _built()
    chain = [(inner, "inner"), (outer, "outer")]
    for stage, name in chain if inner_first else reversed(chain):
        model = STAGES[stage](model, mesh[name])
    return model


def _replicas(*names, steps=2):
    mesh, model = grid("outer", "inner"), _built()
    optimizer, average = adam(model), averaging(*(mesh[name] for name in names))
    rank = dist.get_rank()
    return [step(model, optimizer, i, rank, average=average) for i in range(steps)]


def _wrong(case, model, expected):
    """Where a model trains otherwise than replicas, or sends or holds otherwise than planned."""
    lines = unlike(case, model, expected, dist.get_rank())
    optimizer = adam(model)
    with zf.traffic() as sent:
        loss_of(model, 7, dist.get_rank()).backward()
    optimizer.step()
    held, planned = zf.memory(model, optimizer), zf.plan(model)
    if dict(sent.by_axis) != planned.sent_by_axis:
        lines.append(f"{case}: sent {sent.by_axis}, planned {planned.sent_by_axis}")
    for state in ("parameters", "gradients", "optimizer"):
        if getattr(held, state) != getattr(planned.memory, state) + getattr(planned.padding, state):
            lines.append(f"{case}: holds {getattr(held, state)} B of {state}")
    return lines


@pytest.mark.parametrize("inner", STAGES)
@on_ranks(4)
def test_every_pair_of_stages_is_bitwise_replicas_and_as_planned(inner):
    """Any order of transforms is the law of `property_tests/test_axes_laws.py`."""
    inner_first, outer_first = _replicas("inner", "outer"), _replicas("outer", "inner")
    level = list(STAGES).index(inner)
    for number, outer in enumerate(STAGES):
        # The axis that shards more is summed over first: what travels over the other is smaller.
        expected = inner_first if level >= number else outer_first
        model = _over(inner, outer, inner_first=(level + number) % 2 == 1)
        assert _wrong(f"inner {inner}, outer {outer}", model, expected) == []


@on_ranks(4)
def test_collectives_that_pad_give_the_same():
    """Two ranks on each axis: a sum of two does not depend on their order."""
    assert BY_BACKEND.get("nccl", Native) is Native
    expected = _replicas("inner", "outer")
    with patch.dict(BY_BACKEND):
        del BY_BACKEND["gloo"]
        for inner, outer in (("zero3", "zero3"), ("zero3", "zero2"), ("zero2", "replicate")):
            assert _wrong(f"{inner}, {outer}", _over(inner, outer), expected) == []


@on_ranks(4)
def test_computing_in_bf16_is_casting_by_hand():
    """Over one axis, too: the same casts, the same order of summation."""
    mesh, rank = grid("outer", "inner"), dist.get_rank()
    one = zf.precision(zf.shard_params(_built(), axis()), compute=torch.bfloat16)
    assert unlike("one axis", one, cast_by_hand(_built, averaging(axis()), rank), rank) == []
    expected = cast_by_hand(_built, averaging(mesh["inner"], mesh["outer"]), rank)
    for inner, outer in (("zero3", "replicate"), ("zero3", "zero2"), ("zero1", "zero1")):
        model = zf.precision(_over(inner, outer), compute=torch.bfloat16)
        assert _wrong(f"{inner}, {outer}", model, expected) == []


class Few(nn.Module):
    """Parameters of so few rows that some ranks hold nothing of them."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Parameter(torch.randn(1, 5)), nn.Parameter(torch.randn(2, 7))
        self.three, self.none = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(()))

    def forward(self, x):
        return (self.one.sum() + self.two.pow(3).sum() + self.three.pow(2).sum() + self.none) * x


@pytest.mark.parametrize("norm_type", [torch.inf, 2.0])
@on_ranks(4)
def test_norms_count_every_element_once_where_ranks_hold_nothing(norm_type):
    mesh, found = grid("outer", "inner"), []
    for inner, outer in (("replicate", "replicate"), ("zero3", "zero3"), ("zero3", "zero1"), ("zero1", "replicate")):
        seed_generator(0)
        model = STAGES[inner](STAGES[outer](Few().double(), mesh["outer"]), mesh["inner"])
        model(torch.ones((), dtype=torch.float64)).backward()
        found.append(
            full(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None], norm_type))
        )
    assert all(torch.allclose(norm, found[0], rtol=0, atol=1e-11) for norm in found), found


@pytest.mark.parametrize(("outer", "inner"), [(4, 1), (1, 4)])
@on_ranks(4)
def test_an_axis_of_one_rank_changes_nothing(outer, inner):
    mesh = init_device_mesh("cpu", (outer, inner), mesh_dim_names=("outer", "inner"))
    one = zf.shard_params(_built(), axis())
    found = step(one, adam(one), 0, dist.get_rank())
    expected = {name: full(value) for name, value in found.items()}
    for transform in (zf.shard_params, zf.shard_optimizer):
        model = zf.shard_params(transform(_built(), mesh["outer"]), mesh["inner"])
        assert unlike(transform.__name__, model, [expected], dist.get_rank()) == []


def _sent(inner, outer):
    """By the forward and by the backward of a second step."""
    model = _over(inner, outer)
    step(model, adam(model), 0, dist.get_rank())
    with zf.traffic() as forward:
        loss = loss_of(model, 1, dist.get_rank())
    with zf.traffic() as backward:
        loss.backward()
    return [forward, backward]


@on_ranks(4)
def test_a_hosted_part_serves_the_gathers_of_backward():
    """hpZ of ZeRO++: sharded over both axes at rest, gathered along the outer one once in a step, never in backward."""
    forward, backward = _sent("zero3", "zero2")
    assert forward.by_axis["outer"] > 0
    assert forward.by_axis["inner"] > 0
    assert backward.by_collective["all-gather"] > 0
    _, gradients_alone = _sent("zero2", "zero2")  # whose parameters are gathered once, too
    assert backward.by_axis["outer"] == gradients_alone.by_axis["outer"] > 0


@on_ranks(4)
def test_hybrid_shards_inside_and_replicates_outside():
    mesh = grid("outer", "inner")
    model = zf.hybrid(_built(), mesh, reshard_after="backward")
    other = zf.shard_params(zf.replicate(_built(), mesh["outer"]), mesh["inner"], reshard_after="backward")
    for one, same in zip(model.parameters(), other.parameters(), strict=True):
        assert isinstance(one, DTensor)
        assert isinstance(same, DTensor)
        assert one.device_mesh == mesh
        assert one.placements == same.placements == (Replicate(), Shard(0) if one.dim() else Replicate())
    assert zf.plan(model) == zf.plan(other)
    sent = zf.plan(model).sent_by_axis
    numel = sum(parameter.numel() for parameter in model.parameters())
    assert 0 < sent["outer"] <= 2 * 4 * (numel // 2 + 200)  # 2 (m - 1)/m Ψ/n b, and odd rows
    assert unlike("hybrid", model, _replicas("inner", "outer", steps=1), dist.get_rank()) == []


@on_ranks(4)
def test_buffers_over_two_axes_are_those_of_the_first_rank_of_all():
    """What ranks skip, and parameters of every awkward kind, are drawn by `property_tests/test_axes_laws.py`."""
    mesh = grid("outer", "inner")
    for inner, outer in (("zero3", "zero2"), ("zero3", "zero3"), ("zero1", "zero1")):
        model, plain = nn.BatchNorm1d(5), nn.BatchNorm1d(5)
        model = STAGES[inner](STAGES[outer](model, mesh["outer"]), mesh["inner"])
        data = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(2):
            x = torch.randn(4, 5, generator=data)
            for buffer in plain.buffers():
                dist.broadcast(buffer, 0)
            plain(x)
            model(x).square().mean().backward()
        assert differing(dict(plain.named_buffers()), dict(model.named_buffers())) == []


@on_ranks(4)
def test_ranks_must_shard_over_the_same_axes():
    outer = "zero1" if dist.get_rank() == 2 else "zero2"  # the join of both axes is the same
    with pytest.raises(zf.errors.DisagreementError, match="Ranks 0 and 2 hold different layouts"):
        _over("zero3", outer)(batch(0, 0)[0])
