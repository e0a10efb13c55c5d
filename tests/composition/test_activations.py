"""`checkpoint_activations`: the same gradients, less memory, whole inputs or parts of them."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import zero_fn as zf
from tests.composition.grids import Block, Decoder, grid, loss_of, parallelized
from tests.distributed.training import STAGES, gradients
from tests.ranks import Ranks, axis


class Dropped(nn.Module):
    """A block that draws random numbers, takes two tensors and a switch, and returns a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)
        self.calls = 0

    def forward(self, x: Tensor, shift: Tensor, *, doubles: bool = False) -> tuple[Tensor, Tensor]:
        self.calls += 1
        y = x + self.down(torch.dropout(torch.tanh(self.up(x + shift)), 0.3, self.training))
        return (2 * y if doubles else y), shift + 1


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Dropped() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        shift = torch.ones(6)
        for number, block in enumerate(self.blocks):
            x, shift = block(x, shift, doubles=number == 1)
        return x.square().mean() + shift.mean()


def _alike(stage: str, order: str) -> tuple[bool, list[int]]:
    """Whether gradients and losses are those without checkpoints; and how often each block ran."""
    given: list[Any] = []
    model: Any = None
    for is_checkpointed in (False, True):
        torch.manual_seed(0)
        model = Tower()
        if is_checkpointed and order == "before":
            model = zf.checkpoint_activations(model, units="blocks.*")
        model = STAGES[stage](model, axis())
        if is_checkpointed and order == "after":
            model = zf.checkpoint_activations(model, units=Dropped)
        if is_checkpointed and order == "twice":
            model = zf.checkpoint_activations(zf.checkpoint_activations(model))
        torch.manual_seed(5)
        loss = model(torch.randn(4, 6))
        loss.backward()
        given.append((loss.item(), gradients(model)))
    (one, one_grads), (other, other_grads) = given
    is_equal = one == other and all(
        grad is not None and torch.equal(grad, other_grads[name])  # type: ignore[arg-type]
        for name, grad in one_grads.items()
    )
    return is_equal, [block.calls for block in model.blocks]


@pytest.mark.parametrize("order", ["before", "after", "twice"])
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_those_without_checkpoints(ranks: Ranks, stage: str, order: str) -> None:
    assert ranks(2).run(_alike, stage, order) == [(True, [2, 2, 2])] * 2


def _partitioned(stage: str) -> list[str]:
    """Where a tensor parallel model with partitioned checkpoints differs from one without, to the bit."""
    mesh = grid("dp", "tp")
    seen = []
    for partition in (None, mesh["tp"]):
        model = STAGES[stage](parallelized(mesh["tp"]), mesh["dp"])
        if partition is not None:
            model = zf.checkpoint_activations(model, units=Block, partition=partition)
        for number in range(2):
            loss_of(model, number, mesh["dp"].get_local_rank()).backward()
        seen.append({name: p.grad for name, p in model.named_parameters()})
    one, other = seen
    return [
        name
        for name, grad in one.items()
        if grad is None or other[name] is None or not torch.equal(grad.full_tensor(), other[name].full_tensor())  # type: ignore[attr-defined, union-attr]
    ]


@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_inputs_cut_over_tensor_parallel_ranks_give_the_same_gradients(ranks: Ranks, stage: str) -> None:
    assert ranks(4).run(_partitioned, stage) == [[]] * 4


def _kept(partition: bool) -> tuple[int, int]:
    """Bytes of activations that wait for backward: what autograd saved, and whole inputs of blocks that are alive."""
    mesh = grid("dp", "tp")
    model = zf.checkpoint_activations(
        nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4))),
        units="?",
        partition=mesh["tp"] if partition else None,
    )
    inputs: list[weakref.ref[Tensor]] = []
    for block in model:
        block.register_forward_pre_hook(lambda _, args: inputs.append(weakref.ref(args[0])))
    saved = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal saved
        saved += tensor.nbytes
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(torch.ones(32, 64)).sum()
    alive = sum(x().nbytes for x in inputs if x() is not None)  # type: ignore[union-attr]
    loss.backward()
    return saved, alive


def test_partition_lets_go_of_whole_inputs(ranks: Ranks) -> None:
    whole_nbytes = 32 * 64 * 4
    for saved, alive in ranks(4).run(_kept, False):
        assert saved < whole_nbytes
        assert alive == 4 * whole_nbytes
    for saved, alive in ranks(4).run(_kept, True):
        assert saved < whole_nbytes
        assert alive == 0


def _refused() -> list[str]:
    mesh = grid("dp", "tp")
    said = []
    model = zf.checkpoint_activations(Decoder(), units=Block, partition=mesh["dp"])
    with pytest.raises(zf.DisagreementError) as caught:
        loss_of(model, 0, mesh["dp"].get_local_rank())
    said.append(str(caught.value).splitlines()[0])
    with pytest.raises(zf.UnitError) as missing:
        zf.checkpoint_activations(nn.Linear(2, 2))
    said.append(str(missing.value).splitlines()[0])
    with pytest.raises(zf.MeshError):
        zf.checkpoint_activations(Decoder(), units=Block, partition=mesh)
    return said


def test_an_axis_along_which_activations_differ_is_refused(ranks: Ranks) -> None:
    assert (
        ranks(4).run(_refused)
        == [["Ranks 0 and 1 hold different activations.", "checkpoint_activations found no module to recompute."]] * 4
    )
