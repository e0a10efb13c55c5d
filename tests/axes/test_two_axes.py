"""Two data axes of one mesh: every pair of stages, in both orders, equal to replicas that average over one, then the other.

Four ranks, outer x inner. Means are hierarchical and summed in the order of the ranks, so all is compared to the bit; with
the plain mean over four ranks, within the bound on rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import zero_fn as zf
from tests.axes.grids import Decoder, averaging, batch, differing, grid, kept, loss_of, snapshot, step
from tests.support.programs import STAGES
from tests.support.ranks import Ranks, axis
from tests.support.seeds import seed_generator
from tests.support.wholes import full
from zero_fn.runtime.entry import units_of
from zero_fn.transport.links import BY_BACKEND
from zero_fn.transport.native import Native


def _built() -> nn.Module:
    seed_generator(0)
    return Decoder()


def _over(inner: str, outer: str, *, inner_first: bool = True) -> nn.Module:
    mesh = grid("outer", "inner")
    model = _built()
    chain = [(inner, "inner"), (outer, "outer")]
    for stage, name in chain if inner_first else reversed(chain):
        model = STAGES[stage](model, mesh[name])
    return model


def _replicas(*names: str, steps: int = 2, microbatches: int = 1) -> list[dict[str, Tensor | None]]:
    mesh = grid("outer", "inner")
    model = _built()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    average = averaging(*(mesh[name] for name in names))
    rank = dist.get_rank()
    return [step(model, optimizer, i, rank, microbatches=microbatches, average=average) for i in range(steps)]


def _orders(inner: str) -> list[tuple[str, bool]]:
    """Outer stages, and whether the inner axis comes first. Any order is the law of `property_tests/test_axes_laws.py`."""
    stages = list(STAGES)
    return [(outer, (stages.index(inner) + number) % 2 == 1) for number, outer in enumerate(stages)]


def _pairs_are_replicas(inner: str) -> list[str]:
    rank = dist.get_rank()
    inner_first, outer_first = _replicas("inner", "outer"), _replicas("outer", "inner")
    stages = list(STAGES)
    lines = []
    for outer, in_order in _orders(inner):
        # The axis that shards more is summed over first: what travels over the other is smaller.
        expected = inner_first if stages.index(inner) >= stages.index(outer) else outer_first
        model = _over(inner, outer, inner_first=in_order)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for number in range(2):
            with zf.traffic() as sent:
                loss_of(model, number, rank).backward()
            found = {f"gradient of {name}": kept(p.grad) for name, p in model.named_parameters()}
            optimizer.step()
            held = zf.held(model, optimizer)
            optimizer.zero_grad()
            found.update({name: kept(parameter) for name, parameter in model.named_parameters()})
            case = f"inner {inner}, outer {outer}, {'inner' if in_order else 'outer'} first, step {number}"
            lines += [f"{case}: {name}" for name in differing(expected[number], found)]
        planned = zf.plan(model)
        if dict(sent.by_axis) != planned.sent_by_axis:
            lines.append(f"{case}: sent {sent.by_axis}, planned {planned.sent_by_axis}")
        for state in ("parameters", "gradients", "optimizer"):
            if getattr(held, state) != getattr(planned.held, state) + getattr(planned.padding, state):
                lines.append(f"{case}: holds {getattr(held, state)} B of {state}")
    return lines


@pytest.mark.parametrize("inner", STAGES)
def test_every_pair_of_stages_is_bitwise_replicas_and_as_planned(ranks: Ranks, inner: str) -> None:
    assert ranks(4).run(_pairs_are_replicas, inner) == [[]] * 4


def _stepped(
    model: nn.Module, optimizer: torch.optim.Optimizer, number: int, rank: int
) -> tuple[zf.Sent, dict[str, Tensor | None]]:
    """A step: what its backward sent and its parameters as they rest after it."""
    with zf.traffic() as sent:
        loss_of(model, number, rank).backward()
    optimizer.step()
    optimizer.zero_grad()
    return sent, {name: kept(parameter) for name, parameter in model.named_parameters()}


def _with_collectives_of_the_backend() -> list[str]:
    expected = _replicas("inner", "outer")
    rank = dist.get_rank()
    before = BY_BACKEND.pop("gloo")
    try:
        lines = []
        for inner, outer in (("zero3", "zero3"), ("zero3", "zero2"), ("zero2", "replicate")):
            model = _over(inner, outer)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            for number in range(2):
                sent, found = _stepped(model, optimizer, number, rank)
                wanted = {name: expected[number][name] for name in found}
                lines += [f"{inner}, {outer}, step {number}: {name}" for name in differing(wanted, found)]
            if dict(sent.by_axis) != zf.plan(model).sent_by_axis:
                lines.append(f"{inner}, {outer}: sent {sent.by_axis}, planned {zf.plan(model).sent_by_axis}")
    finally:
        BY_BACKEND["gloo"] = before
    return lines


def test_collectives_that_pad_give_the_same(ranks: Ranks) -> None:
    """Two ranks on each axis: a sum of two does not depend on their order."""
    assert BY_BACKEND.get("nccl", Native) is Native
    assert ranks(4).run(_with_collectives_of_the_backend) == [[]] * 4


def _clipped_and_accumulated() -> list[str]:
    rank = dist.get_rank()
    expected = _replicas("inner", "outer", microbatches=2)
    lines = []
    norms = []
    for inner, outer in (("zero3", "replicate"), ("zero3", "zero1"), ("zero2", "zero2")):
        model = _over(inner, outer)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for number in range(2):
            found = step(model, optimizer, number, rank, microbatches=2)
            lines += [f"{inner}, {outer}, step {number}: {name}" for name in differing(expected[number], found)]
        norm = step(model, optimizer, 2, rank, clip=0.1)["norm"]
        assert norm is not None
        norms.append(norm)
        if dict(_sent(model, rank).by_axis) != zf.plan(model).sent_by_axis:
            lines.append(f"{inner}, {outer}: sent otherwise than planned")
    # The same gradients over all three: `clip_grad_norm_` counts each element once, wherever it is.
    if not all(torch.allclose(norm, norms[0], rtol=0, atol=1e-6) for norm in norms):
        lines.append(f"norms {norms}")
    return lines


def _sent(model: nn.Module, rank: int) -> zf.Sent:
    with zf.traffic() as sent:
        loss_of(model, 7, rank).backward()
    model.zero_grad()
    return sent


def test_accumulation_and_clipping_over_two_axes(ranks: Ranks) -> None:
    assert ranks(4).run(_clipped_and_accumulated) == [[]] * 4


def _in_bf16() -> list[str]:
    mesh, rank = grid("outer", "inner"), dist.get_rank()
    master = _built()
    optimizer = torch.optim.AdamW(master.parameters(), lr=1e-2)
    expected = []
    for number in range(2):
        compute = copy.deepcopy(master).bfloat16()
        loss_of(compute, number, rank).backward()
        for mine, theirs in zip(compute.parameters(), master.parameters(), strict=True):
            assert mine.grad is not None
            theirs.grad = mine.grad.float()
        averaging(mesh["inner"], mesh["outer"])(master)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(snapshot(master))
    lines = []
    for inner, outer in (("zero3", "replicate"), ("zero3", "zero2"), ("zero1", "zero1")):
        model = zf.precision(_over(inner, outer), compute=torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for number in range(2):
            sent, found = _stepped(model, optimizer, number, rank)
            lines += [f"{inner}, {outer}, step {number}: {name}" for name in differing(expected[number], found)]
        planned = zf.plan(model)
        if dict(sent.by_axis) != planned.sent_by_axis:
            lines.append(f"{inner}, {outer}: sent {sent.by_axis}, planned {planned.sent_by_axis}")
        if zf.held(model).parameters != planned.held.parameters + planned.padding.parameters:
            lines.append(f"{inner}, {outer}: holds {zf.held(model).parameters} B, planned {planned.held}")
    return lines


def test_computing_in_bf16_over_two_axes_is_casting_by_hand(ranks: Ranks) -> None:
    assert ranks(4).run(_in_bf16) == [[]] * 4


class Few(nn.Module):
    """Parameters of so few rows that some ranks hold nothing of them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Parameter(torch.randn(1, 5)), nn.Parameter(torch.randn(2, 7))
        self.three, self.none = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor) -> Tensor:
        return (self.one.sum() + self.two.pow(3).sum() + self.three.pow(2).sum() + self.none) * x


def _norms() -> list[str]:
    mesh = grid("outer", "inner")
    lines = []
    for norm_type in (torch.inf, 2.0):
        found = []
        for inner, outer in (
            ("replicate", "replicate"),
            ("zero3", "zero3"),
            ("zero3", "zero1"),
            ("zero1", "replicate"),
        ):
            seed_generator(0)
            model = STAGES[inner](STAGES[outer](Few().double(), mesh["outer"]), mesh["inner"])
            model(torch.ones((), dtype=torch.float64)).backward()
            norm = full(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None], norm_type))
            assert norm is not None
            found.append(norm)
        if not all(torch.allclose(norm, found[0], rtol=0, atol=1e-11) for norm in found):
            lines.append(f"{norm_type}: {found}")
    return lines


def test_norms_count_every_element_once_where_ranks_hold_nothing(ranks: Ranks) -> None:
    assert ranks(4).run(_norms) == [[]] * 4


def _with_an_axis_of_one_rank(outer: int, inner: int) -> list[str]:
    mesh = init_device_mesh("cpu", (outer, inner), mesh_dim_names=("outer", "inner"))
    rank = dist.get_rank()
    one = zf.shard_params(_built(), axis())
    expected = step(one, torch.optim.AdamW(one.parameters(), lr=1e-2), 0, rank)
    lines = []
    for transform in (zf.shard_params, zf.shard_optimizer):
        model = zf.shard_params(transform(_built(), mesh["outer"]), mesh["inner"])
        found = step(model, torch.optim.AdamW(model.parameters(), lr=1e-2), 0, rank)
        wholes = {name: full(value) for name, value in expected.items()}
        lines += [f"{outer} x {inner}: {name}" for name in differing(wholes, found)]
    return lines


def test_an_axis_of_one_rank_changes_nothing(ranks: Ranks) -> None:
    for outer, inner in ((4, 1), (1, 4)):
        assert ranks(4).run(_with_an_axis_of_one_rank, outer, inner) == [[]] * 4


def _within_rounding_of_the_plain_mean() -> list[str]:
    model, plain = _over("zero3", "zero2"), _built()
    for one in (model, plain):
        loss_of(one, 0, dist.get_rank()).backward()
    magnitudes = {}
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        magnitudes[name] = parameter.grad.abs()
        dist.all_reduce(magnitudes[name])
        magnitudes[name] /= 4
    averaging(axis())(plain)
    k = (4 + 1) * 2**-24
    lines = []
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        found = full(parameter.grad)
        assert found is not None
        assert other.grad is not None
        if not ((found - other.grad).abs() <= 2 * k / (1 - k) * magnitudes[name]).all():
            lines.append(name)
    return lines


def test_hierarchical_means_are_within_rounding_of_the_plain_mean(ranks: Ranks) -> None:
    """The bound N3: 2 gamma(n + 1) times the mean of the magnitudes."""
    assert ranks(4).run(_within_rounding_of_the_plain_mean) == [[]] * 4


def _backward_gathers() -> tuple[int, int, int, int]:
    """Bytes of parameters along (outer, inner) in the forward, and in the backward of a step."""
    model = _over("zero3", "zero2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: list[int] = []
    for number in range(2):
        with zf.traffic() as forward:
            loss = loss_of(model, number, dist.get_rank())
        with zf.traffic() as backward:
            loss.backward()
        found = [
            forward.by_axis["outer"],
            forward.by_axis["inner"],
            backward.by_axis["outer"] - _gradient_nbytes_along_outer(model),
            backward.by_collective["all-gather"],
        ]
        optimizer.step()
        optimizer.zero_grad()
    return found[0], found[1], found[2], found[3]


def _gradient_nbytes_along_outer(model: nn.Module) -> int:
    """What reductions send along the outer axis: of each rank's inner piece, the part that the other rank keeps."""
    total = 0
    for unit in units_of(model):
        for slot in unit.slots:
            part = slot.path.sublayout
            if part is None:  # the scalar, which is in no piece of the second inner rank
                total += (slot.path.numel > slot.path.rank) * slot.dtype.itemsize
            else:
                total += (part.numel - slot.path.local_numel) * slot.dtype.itemsize
    return total


def test_a_hosted_part_serves_the_gathers_of_backward(ranks: Ranks) -> None:
    """hpZ of ZeRO++: sharded over both axes at rest, gathered along the outer one once in a step, never in backward."""
    for outer, inner, outer_in_backward, gathered_in_backward in ranks(4).run(_backward_gathers):
        assert outer > 0
        assert inner > 0
        assert outer_in_backward == 0
        assert gathered_in_backward > 0


def _hybrid() -> None:
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
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    assert differing(_replicas("inner", "outer", steps=1)[0], step(model, optimizer, 0, dist.get_rank())) == []


def test_hybrid_shards_inside_and_replicates_outside(ranks: Ranks) -> None:
    ranks(4).run(_hybrid)


class Uneven(nn.Module):
    """Parameters that some ranks do not use, none uses, or that are smaller than the mesh; statistics; a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.statistics = nn.BatchNorm1d(5)
        self.single = nn.Parameter(torch.randn(1, 5))
        self.wave = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.unused = nn.Parameter(torch.randn(3))
        self.wide = nn.Parameter(torch.randn(3, 7).t())
        self.blocks[0].requires_grad_(False)

    def forward(self, x: Tensor, skip: bool) -> Tensor:
        x = self.blocks[0](x) + self.single
        extra = self.blocks[1](x)
        x = x + (extra.detach() if skip else extra)
        y: Tensor = self.statistics(self.blocks[2](x)) * self.wave.abs().sum() + self.wide.sum() + self.empty.sum()
        return y


def _awkward() -> list[str]:
    mesh, rank = grid("outer", "inner"), dist.get_rank()
    data = torch.Generator().manual_seed(rank)
    inputs = [torch.randn(4, 5, generator=data) for _ in range(2)]

    def run(model: nn.Module, average: Callable[[nn.Module], None] | None) -> dict[str, Tensor | None]:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        found: dict[str, Tensor | None] = {}
        for number, x in enumerate(inputs):
            if average is not None:
                for buffer in model.buffers():
                    dist.broadcast(buffer, 0)
            model(x, rank == 3).square().mean().backward()
            if average is not None:
                for name, parameter in model.named_parameters():
                    if name.startswith("blocks.1") and parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                average(model)
            found.update({f"gradient {number} of {n}": full(p.grad) for n, p in model.named_parameters()})
            optimizer.step()
            optimizer.zero_grad()
            found.update({f"{name} after {number}": value for name, value in snapshot(model).items()})
        found.update({name: buffer.clone() for name, buffer in model.named_buffers()})
        return found

    seed_generator(0)
    expected = run(Uneven(), averaging(mesh["inner"], mesh["outer"]))
    lines = []
    for inner, outer in (("zero3", "zero2"), ("zero3", "zero3"), ("zero1", "zero1")):
        seed_generator(0)
        model = STAGES[inner](STAGES[outer](Uneven(), mesh["outer"]), mesh["inner"])
        lines += [f"{inner}, {outer}: {name}" for name in differing(expected, run(model, None))]
    return lines


def test_awkward_parameters_and_buffers_over_two_axes(ranks: Ranks) -> None:
    """What one rank skips counts as zeros, what nobody uses has no gradient, buffers are those of the first rank of all."""
    assert ranks(4).run(_awkward) == [[]] * 4


def _ranks_that_differ() -> None:
    seed_generator(dist.get_rank() // 2)  # the inner ranks agree, the outer ones do not
    model = zf.hybrid(Decoder(), grid("outer", "inner"))
    with pytest.raises(zf.DisagreementError, match="Ranks 0 and 2 hold different initial values"):
        model(batch(0, 0)[0])


def _axes_that_differ() -> None:
    outer = "zero1" if dist.get_rank() == 2 else "zero2"  # the join of both axes is the same
    with pytest.raises(zf.DisagreementError, match="Ranks 0 and 2 hold different layouts"):
        _over("zero3", outer)(batch(0, 0)[0])


def test_ranks_of_both_axes_must_agree(ranks: Ranks) -> None:
    ranks(4).run(_ranks_that_differ)


def test_ranks_must_shard_over_the_same_axes(ranks: Ranks) -> None:
    ranks(4).run(_axes_that_differ)
