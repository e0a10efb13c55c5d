"""Tensor parallelism on one axis of a mesh and every stage on the other: equal to replicas of the tensor-parallel model.

Four ranks, dp x tp. On dp the sum is ours, so it is compared to the bit with replicas whose gradients are added in the order
of the ranks; the whole is compared with one process in float64, where only errors of meaning are left.
"""

import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import zero_fn as zf
from tests.axes.grids import (
    Decoder,
    adam,
    averaging,
    cast_by_hand,
    differing,
    grid,
    loss_of,
    parallelized,
    snapshot,
    step,
    styles,
    unlike,
)
from tests.support.on_ranks import on_ranks
from tests.support.programs import STAGES
from tests.support.ranks import axis
from tests.support.wholes import full
from tests.support.worlds import DAILY
from zero_fn.runtime.registry import units_of
from zero_fn.values.dtensors import local_of

KINDS = ("columns", "sequence")
_TOLERANCE = 1e-11  # of float64


def _average_over_dp(model):
    for parameter in model.parameters():
        grad = parameter.grad
        if isinstance(grad, DTensor) and isinstance(parameter, DTensor) and grad.placements != parameter.placements:
            parameter.grad = grad.redistribute(placements=parameter.placements)
    averaging(grid("dp", "tp")["dp"])(model)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(4)
def test_every_stage_is_bitwise_the_replicas_of_a_tensor_parallel_model(kind):
    mesh = grid("dp", "tp")
    rank = mesh["dp"].get_local_rank()
    replica = parallelized(mesh["tp"], kind)
    optimizer = adam(replica)
    expected = [step(replica, optimizer, number, rank, average=_average_over_dp) for number in range(2)]
    for stage, transform in STAGES.items():
        assert unlike(stage, transform(parallelized(mesh["tp"], kind), mesh["dp"]), expected, rank) == []


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(4)
def test_tensor_parallel_training_is_that_of_one_process(kind):
    """With clipping by torch and two accumulated microbatches. A norm that counted a replicated part twice would differ."""
    mesh = grid("dp", "tp")
    rank = mesh["dp"].get_local_rank()
    torch.manual_seed(0)
    alone = Decoder().double()
    optimizer = adam(alone)
    expected = []
    for number in range(2 if kind == "sequence" else 1):
        losses = [loss_of(alone, 2 * number + i, r) for i in range(2) for r in range(2)]
        torch.stack(losses).mean().backward()
        norm = nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        expected.append({"norm": norm, **{name: p.detach().clone() for name, p in alone.named_parameters()}})
    for stage in DAILY:
        model = STAGES[stage](parallelized(mesh["tp"], kind, torch.float64), mesh["dp"])
        optimizer = adam(model)
        for number, state in enumerate(expected):
            found = step(model, optimizer, number, rank, microbatches=2, clip=0.5)
            for name, value in state.items():
                other = full(found[name])
                assert other is not None
                assert torch.allclose(value, other, rtol=0, atol=_TOLERANCE), f"{stage}, step {number}: {name}"


@on_ranks(4)
def test_parameters_rest_on_the_full_mesh():
    mesh = grid("dp", "tp")
    plain = snapshot(parallelized(mesh["tp"], "sequence"))
    model = zf.shard_params(parallelized(mesh["tp"], "sequence"), mesh["dp"])
    placed = dict(model.named_parameters())
    assert {parameter.device_mesh for parameter in placed.values()} == {mesh}
    for name, placements in {
        "scale": (Replicate(), Replicate()),
        "mix.weight": (Shard(0), Replicate()),
        "blocks.0.norm.weight": (Shard(0), Replicate()),
        "blocks.0.down.weight": (Shard(0), Shard(1)),
        **dict.fromkeys(
            ("embedding.weight", "head.bias", "blocks.0.up.weight"), (_StridedShard(0, split_factor=2), Shard(0))
        ),
    }.items():
        assert placed[name].placements == placements
    assert differing(plain, snapshot(model)) == []
    assert "S(0) S(0) S(0), tp: S(1)" in str(zf.describe(model))


@on_ranks(4)
def test_a_placed_parameter_is_a_view_in_flight_and_freed_after():
    """Autograd remembers addresses, not DTensors: a block is freed before the next one runs, and both after backward."""
    mesh = grid("dp", "tp")
    model = zf.shard_params(parallelized(mesh["tp"], "columns"), mesh["dp"])
    used = []

    def are_freed():
        return all((storage := reference()) is None or not storage.nbytes() for reference in used)

    def look(module, *_):
        assert are_freed()
        weight = module.weight
        assert (type(weight), type(model.mix.weight)) == (DTensor, Tensor)
        assert (weight.device_mesh, weight.placements) == (mesh["tp"], (Shard(0),))
        gathered = [unit.gather.whole for unit in units_of(model) if unit.gather.whole is not None]
        memory = [buffer.untyped_storage().data_ptr() for each in gathered for buffer in each.buffers]
        storage = weight.to_local().untyped_storage()
        assert storage.data_ptr() in memory
        used.append(weakref.ref(storage))

    for block in model.blocks:
        block.up.register_forward_pre_hook(look)
    for number in range(2):
        loss_of(model, number, 0).backward()
        assert len(used) == 2 and are_freed()
        used.clear()


@on_ranks(4)
def test_computing_in_bf16_is_casting_by_hand():
    mesh = grid("dp", "tp")
    rank = mesh["dp"].get_local_rank()
    expected = cast_by_hand(lambda: parallelized(mesh["tp"]), _average_over_dp, rank)
    for stage in ("zero1", "zero3"):
        model = zf.precision(STAGES[stage](parallelized(mesh["tp"]), mesh["dp"]), compute=torch.bfloat16)
        assert unlike(stage, model, expected, rank) == []


@on_ranks(4)
def test_a_transform_without_an_axis_keeps_the_placements():
    mesh = grid("dp", "tp")
    placed = parallelized(mesh["tp"], "columns")
    model = zf.precision(placed, compute=torch.float32)
    assert differing(snapshot(placed), snapshot(model)) == []
    assert all(parameter.device_mesh == mesh["tp"] for parameter in model.parameters())
    later, now = zf.shard_grads(model, mesh["dp"]), zf.shard_grads(parallelized(mesh["tp"], "columns"), mesh["dp"])
    for one, other in zip(later.parameters(), now.parameters(), strict=True):
        assert one.placements == other.placements
        assert torch.equal(local_of(one), local_of(other))


@on_ranks(4)
def test_editing_and_loading_take_whole_parameters():
    mesh = grid("dp", "tp")
    model = zf.shard_params(parallelized(mesh["tp"], "columns"), mesh["dp"])
    wholes = snapshot(model)
    with zf.unsharded(model, writeback=True), torch.no_grad():
        weight = model.get_parameter("blocks.0.up.weight")
        assert weight.data.device_mesh == mesh["tp"]
        weight.mul_(2)
    assert differing({**wholes, "blocks.0.up.weight": 2 * wholes["blocks.0.up.weight"]}, snapshot(model)) == []
    wholes = {name: value + 1 for name, value in wholes.items()}
    model.load_state_dict(wholes)
    other = zf.shard_optimizer(parallelized(mesh["tp"], "columns"), mesh["dp"])
    other.load_state_dict(model.state_dict())
    assert differing(wholes, snapshot(model)) == differing(wholes, snapshot(other)) == []


class Resettable(Decoder):
    def reset_parameters(self):
        nn.init.constant_(self.scale, 1.5)


@on_ranks(4)
def test_a_placed_model_from_meta_has_the_values_of_one_process():
    mesh = grid("dp", "tp")
    with torch.device("meta"):
        placed, plain = Resettable(), Resettable()
    model = zf.shard_params(parallelize_module(placed, mesh["tp"], styles("sequence")), mesh["dp"])
    torch.manual_seed(3)
    zf.materialize(model, "cpu")
    torch.manual_seed(3)
    assert differing(snapshot(zf.materialize(zf.shard_optimizer(plain, axis()), "cpu")), snapshot(model)) == []


@on_ranks(8)
def test_tensor_parallelism_below_two_data_axes():
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("outer", "inner", "tp"))
    rank = 2 * mesh["outer"].get_local_rank() + mesh["inner"].get_local_rank()
    replica = parallelized(mesh["tp"], "columns")
    expected = step(replica, adam(replica), 0, rank, average=averaging(mesh["inner"], mesh["outer"]))
    for number, outer in enumerate((zf.replicate, zf.shard_grads)):
        model = parallelized(mesh["tp"], "columns")
        if number:
            model = zf.shard_params(outer(model, mesh["outer"]), mesh["inner"])
        else:
            model = outer(zf.shard_params(model, mesh["inner"]), mesh["outer"])
        assert unlike(outer.__name__, model, [expected], rank) == []
        assert all(isinstance(p, DTensor) and p.device_mesh == mesh for p in model.parameters())
    placements = model.get_parameter("blocks.0.down.weight").placements
    assert placements == (_StridedShard(0, split_factor=2), Shard(0), Shard(1))


@on_ranks(4)
def test_a_process_may_build_another_mesh():
    """DTensor gives the second model the first mesh of one axis that is equal, cut from another root: it was refused."""
    for shape, names in (((2, 2), ("dp", "tp")), ((2, 2), ("data", "tp")), ((2, 1, 2), ("dp", "cp", "tp"))):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        data = mesh[names[0]]
        replica, model = parallelized(mesh["tp"], "columns"), parallelized(mesh["tp"], "columns")
        rank = data.get_local_rank()
        expected = step(replica, adam(replica), 0, rank, average=averaging(data))
        assert unlike(str(names), zf.shard_params(model, data), [expected], rank) == []
