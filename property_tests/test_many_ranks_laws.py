"""Laws 1 and 5 on 8 to 64 ranks, simulated by torch: what rests is DTensor's own. What is trained: test_training_laws.py."""

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, distribute_tensor

from property_tests.programs import Leaf, Link, Node, Tree, apply, build
from property_tests.strategies import FLOATS, chains, trees
from tests.support.profiles import examples

SIZES = st.sampled_from([8, 8, 8, 9, 12, 16, 16, 31])  # a case takes n * n copies; 64 ranks are among the examples
REAL = (*FLOATS, torch.int64, torch.bool)
UNEVEN = Leaf((13, 3, 2), (0, 1, 2))
TURNED = Leaf((65, 2), (1, 0))  # cut along the second dim: the outermost in memory
ONE_ROW = Leaf((1, 2, 4), (0, 1, 2))  # one rank owns everything


@examples(dev=6, ci=48, deep=960)
@given(tree=trees(dtypes=REAL), chain=chains(), n=SIZES)
@example(Tree(Node((UNEVEN, TURNED, ONE_ROW))), (Link("shard_params"),), 64)
def test_a_state_dict_has_the_names_and_shapes_of_the_module_and_shards_of_its_values(local_tensor, tree, chain, n):
    """Those that torch would cut, also where ranks outnumber rows. Shapes of empty shards: test_value_laws.py."""
    expected = build(tree).state_dict()
    with local_tensor(n) as world:
        found = apply(chain, build(tree), world.mesh).state_dict()
        assert list(found) == list(expected)
        for name, entry in found.items():
            assert entry.shape == expected[name].shape
            whole = world.values(entry.full_tensor() if isinstance(entry, DTensor) else entry)[-1]
            assert torch.equal(whole, expected[name])
            cut = expected[name]
            if isinstance(entry, DTensor):
                cut = distribute_tensor(cut, world.mesh, entry.placements)
            assert all(map(torch.equal, world.values(entry), world.values(cut)))
