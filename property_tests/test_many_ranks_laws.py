"""Laws 1 and 5 on 8 to 64 ranks, simulated: what rests is DTensor's own. What is trained there: test_training_laws.py."""

from __future__ import annotations

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from property_tests.programs import Chain, Leaf, Tree, apply, build
from property_tests.strategies import FLOATS, chains, leaves, trees
from tests.support.local_tensor import LocalTensors, World
from tests.support.profiles import examples
from zero_fn.resting import on_spec
from zero_fn.values.layout import ShardLayout, is_shardable, shard_layout

SIZES = st.sampled_from([8, 8, 8, 9, 12, 16, 16, 31])  # a case takes n * n copies; 64 ranks are among the examples
LARGE = Leaf((65, 2), (1, 0))  # cut along the second dim: the outermost in memory
UNEVEN = Leaf((13, 3, 2), (0, 1, 2))
REAL = (*FLOATS, torch.int64, torch.bool)
PARAMETERS = leaves(dtypes=REAL, max_size=17, frozen=False).filter(lambda leaf: is_shardable(leaf.shape))
"""Those with a row to cut."""


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


@given(leaf=PARAMETERS, n=SIZES)
@example(LARGE, 64)
@example(UNEVEN, 64)
@example(Leaf((1, 2, 4), (0, 1, 2)), 64)  # one rank owns everything
def test_the_shards_of_all_ranks_are_the_whole_and_those_that_torch_would_cut(
    local_tensor: LocalTensors, leaf: Leaf, n: int
) -> None:
    """Also where ranks outnumber rows: then the shape of the empty shard must be torch's, for checkpoints name it."""
    whole = leaf.values()
    layout = shard_layout(whole.shape, whole.stride(), n)
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
