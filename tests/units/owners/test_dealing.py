"""Who owns which tensor, and what travels together."""

from collections import Counter

import torch
from torch import nn

import zero_fn as zf
from tests.support.groups import pretended, pretended_grid
from zero_fn.owners.assignment import Dealing, batches, cost_of


def test_the_cost_of_a_matrix_is_that_of_its_products():
    shapes = {(): 1, (5,): 5, (3, 7): 63, (7, 3): 63, (2, 3, 7): 126, (4, 0): 0}
    assert {shape: cost_of(torch.empty(shape)) for shape in shapes} == shapes


def test_loads_are_balanced_and_go_on_where_they_were():
    with pretended(4) as mesh:
        model = zf.shard_params(nn.ModuleList(nn.Linear(8, n, bias=False) for n in range(20, 60)), mesh)
        dealing, parameters = Dealing(cost_of), [*model.parameters()]
        dealt = dealing.deal([*parameters[:20], torch.empty(3)]) + dealing.deal(parameters[20:])
        assert {id(each.parameter) for each in dealt} == {id(p) for p in parameters}, "plain tensors have no owner"
        sums = Counter()
        for each in dealt:
            sums[each.number] += int(cost_of(each.parameter))
        (load,) = dealing.load.values()
        assert load == [sums[number] for number in range(4)]
        assert max(load) <= 1.05 * sum(load) / 4
        assert dealt[0].parameter is parameters[19], "the largest goes first"


def test_a_batch_has_tensors_of_one_way_and_bounded_bytes_of_each_owner():
    with pretended(2) as mesh:
        layers = nn.ModuleList(nn.Linear(8, n) for n in (1, 2, 3, 40, 5, 6, 7))
        model = zf.shard_params(zf.replicate(layers, mesh, where="6.*"), mesh)
        dealt = Dealing(cost_of).deal([*model.parameters()])
        found = batches(dealt, 500)
        assert Counter(each for batch in found for each in batch) == Counter(dealt)
        for batch in found:
            assert len({each.route.family for each in batch}) == 1
            for number in range(2):
                own = [2 * each.parameter.numel() * 4 for each in batch if each.number == number]
                assert sum(own) <= 500 or len(own) == 1


def test_a_tensor_goes_over_the_axis_that_cut_it_last_first_and_has_one_owner_on_a_grid():
    with pretended_grid(4, 2) as mesh:
        model = zf.shard_params(zf.shard_params(nn.Linear(16, 16, bias=False), mesh["tp"]), mesh["dp"])
        (dealt,) = Dealing(cost_of).deal([*model.parameters()])
        assert {leg.axis.name: leg.numel for leg in dealt.route.legs} in ({"tp": 256, "dp": 128}, {"dp": 256, "tp": 64})
        assert (dealt.number, dealt.owner, dealt.is_mine) == (0, (0, 0), True)
