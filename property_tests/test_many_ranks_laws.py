"""Laws 1 and 5 on 8 to 64 ranks, simulated: what rests is DTensor's own, and so is what optimizers and norms make of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from property_tests.programs import Chain, Leaf, Tree, apply, build
from property_tests.strategies import FLOATS, chains, leaves, trees
from tests.support.local_tensor import LocalTensors, World
from tests.support.profiles import examples
from zero_fn.dtensor.refused import note_mesh
from zero_fn.resting import on_spec, resting_parameter
from zero_fn.values.layout import ShardLayout, is_shardable, shard_layout

SIZES = st.sampled_from([8, 8, 8, 9, 12, 16, 16, 31])  # a case takes n * n copies; 64 ranks are among the examples
LARGE = Leaf((65, 2), (1, 0))  # cut along the second dim: the outermost in memory
UNEVEN = Leaf((13, 3, 2), (0, 1, 2))
REAL = (*FLOATS, torch.int64, torch.bool)


def parameters(dtypes: tuple[torch.dtype, ...] = REAL) -> st.SearchStrategy[Leaf]:
    """Parameters with a row to cut."""
    return leaves(dtypes=dtypes, max_size=17, frozen=False).filter(lambda leaf: is_shardable(leaf.shape))


def cut(whole: Tensor, n: int) -> ShardLayout:
    return shard_layout(whole.shape, whole.stride(), n)


def at_rest(world: World, whole: Tensor, layout: ShardLayout) -> DTensor:
    """The resting DTensor that every rank builds from its own shard."""

    def shard(rank: int) -> Tensor:
        empty = torch.empty_strided(
            layout.local_shape(rank), layout.strides_of(layout.local_shape(rank)), dtype=whole.dtype
        )
        return empty.copy_(whole.narrow(layout.dim, *layout.owned_rows(rank)))

    meta = TensorMeta(whole.shape, layout.stride, whole.dtype)
    spec = DTensorSpec(world.axis.mesh, (Shard(layout.dim),), tensor_meta=meta)
    return on_spec(world.each(shard), spec)


@given(leaf=parameters(), n=SIZES)
@example(LARGE, 64)
@example(UNEVEN, 64)
@example(Leaf((1, 2, 4), (0, 1, 2)), 64)  # one rank owns everything
def test_the_shards_of_all_ranks_are_the_whole_and_those_that_torch_would_cut(
    local_tensor: LocalTensors, leaf: Leaf, n: int
) -> None:
    """Also where ranks outnumber rows: then the shape of the empty shard must be torch's, for checkpoints name it."""
    whole = leaf.values()
    layout = cut(whole, n)
    with local_tensor(n) as world:
        ours = at_rest(world, whole, layout)
        replicated = ours.redistribute(world.mesh, [Replicate()])
        for copy in world.values(replicated):
            assert torch.equal(copy, whole)
        theirs = distribute_tensor(whole, world.mesh, [Shard(layout.dim)])
        assert ours.shape == theirs.shape
        for other in (theirs, replicated.redistribute(world.mesh, [Shard(layout.dim)])):
            for mine, one in zip(world.values(ours), world.values(other), strict=True):
                assert mine.shape == one.shape
                assert torch.equal(mine, one)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.1, weight_decay=0.3, foreach=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=True),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@examples(dev=6, ci=60, deep=1200)
@given(group=st.lists(parameters((torch.float32, torch.float64)), min_size=1, max_size=4), n=SIZES)
@example([UNEVEN, LARGE], 64)
def test_an_optimizer_on_shards_is_the_optimizer_on_the_whole(
    local_tensor: LocalTensors, optimizer: str, group: list[Leaf], n: int
) -> None:
    """Not of 16 bits: there torch's `add(alpha=)` rounds otherwise in the last elements of a tensor than in the others."""
    wholes = [nn.Parameter(leaf.values()) for leaf in group]
    grads = [[leaf.values() for leaf in group] for _ in range(2)]
    layouts = [cut(whole, n) for whole in wholes]
    with local_tensor(n) as world:
        resting = []
        for whole, layout in zip(wholes, layouts, strict=True):
            shards = at_rest(world, whole.detach(), layout)
            resting.append(resting_parameter(shards._local_tensor, shards._spec, requires_grad=True))
        sharded = OPTIMIZERS[optimizer](resting)
        for step in grads:
            for parameter, grad, layout in zip(resting, step, layouts, strict=True):
                parameter.grad = at_rest(world, grad, layout)
            sharded.step()
        found = [world.values(parameter.full_tensor())[0] for parameter in resting]
        for parameter, layout in zip(resting, layouts, strict=True):
            for name, value in sharded.state[parameter].items():
                if name != "step" and value is not None:
                    assert value.placements == (Shard(layout.dim),)
                    assert [v.shape for v in world.values(value)] == [layout.local_shape(r) for r in range(n)]
    alone = OPTIMIZERS[optimizer](wholes)
    for step in grads:
        for parameter, grad in zip(wholes, step, strict=True):
            parameter.grad = grad
        alone.step()
    for parameter, value in zip(wholes, found, strict=True):
        assert torch.equal(parameter.detach(), value)


@pytest.mark.parametrize("p", [1.0, 2.0, float("inf")])
@examples(dev=6, ci=48, deep=960)
@given(group=st.lists(parameters((torch.float32,)), min_size=1, max_size=4), n=SIZES)
@example([UNEVEN, LARGE], 8)
@example([Leaf((64, 2), (0, 1)), Leaf((128,), (0,))], 64)
def test_clipping_sees_the_norm_of_the_whole_and_no_padding(
    local_tensor: LocalTensors, p: float, group: list[Leaf], n: int
) -> None:
    grads = [leaf.values() for leaf in group]
    layouts = [cut(grad, n) for grad in grads]
    exact = torch.linalg.vector_norm(torch.cat([grad.double().reshape(-1) for grad in grads]), p).item()
    with local_tensor(n) as world:
        note_mesh(world.mesh)
        parameters = []
        for grad, layout in zip(grads, layouts, strict=True):
            resting = at_rest(world, grad, layout)
            parameters.append(resting_parameter(resting._local_tensor, resting._spec, requires_grad=True))
            parameters[-1].grad = at_rest(world, grad, layout)
        total = nn.utils.clip_grad_norm_(parameters, 0.5, norm_type=p)
        norms = [value.item() for value in world.values(total.full_tensor())]
        clipped = [world.values(parameter.grad.full_tensor())[-1] for parameter in parameters]
    assert len(set(norms)) == 1
    # One rounding for each power, each addition, and the few of the root and of the norm of norms.
    roundings = sum(grad.numel() for grad in grads) + n + 8
    assert abs(norms[0] - exact) <= roundings * 2**-24 / (1 - roundings * 2**-24) * exact
    scale = torch.clamp(0.5 / (torch.tensor(norms[0]) + 1e-6), max=1.0)
    for grad, value in zip(grads, clipped, strict=True):
        assert torch.equal(grad * scale, value)


@examples(dev=6, ci=48, deep=960)
@given(tree=trees(dtypes=REAL), chain=chains(), n=SIZES)
def test_a_state_dict_has_the_names_and_shapes_of_the_module_and_shards_of_its_values(
    local_tensor: LocalTensors, tree: Tree, chain: Chain, n: int
) -> None:
    expected = build(tree).state_dict()
    with local_tensor(n) as world:
        found = apply(chain, build(tree), world.mesh).state_dict()
        assert list(found) == list(expected)
        for name, entry in found.items():
            assert entry.shape == expected[name].shape
            whole = world.values(entry.full_tensor() if isinstance(entry, DTensor) else entry)[-1]
            assert torch.equal(whole, expected[name])
            shards = world.values(entry)
            if isinstance(entry, DTensor) and entry.placements[0].is_shard():
                assert sum(shard.numel() for shard in shards) == entry.numel()
            else:
                assert all(torch.equal(shard, expected[name]) for shard in shards)
