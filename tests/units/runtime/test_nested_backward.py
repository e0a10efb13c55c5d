"""A backward inside a backward: reentrant checkpoints in a unit."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero_fn as zf
from tests.support.groups import pretended


class Part(nn.Module):
    """Two layers, of which a reentrant checkpoint computes the first one again."""

    def __init__(self):
        super().__init__()
        self.again, self.once = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = checkpoint(self.again, x, use_reentrant=True)
        return self.once(y) + self.again(x)


def test_a_unit_is_reduced_once_when_a_checkpoint_inside_it_has_a_backward_of_its_own():
    """Its gradients come while others of the unit are awaited, and were once reduced without waiting for these."""
    with pretended(2) as mesh:
        model = zf.shard_params(nn.Sequential(Part(), Part()), mesh, units=Part)
        for _ in range(3):
            with zf.traffic() as sent:
                model(torch.ones(2, 4, requires_grad=True)).sum().backward()
        assert sent.calls["reduce-scatter"] == 2


def test_units_are_reduced_while_the_backwards_of_others_are_to_come():
    """All whole gradients would be in memory at once."""
    issued = []
    with pretended(2) as mesh:
        model = zf.shard_params(nn.ModuleList(nn.Linear(4, 4) for _ in range(6)), mesh, units=nn.Linear)
        with zf.traffic() as sent:
            x = start = torch.ones(2, 4, requires_grad=True)
            start.register_hook(lambda _: issued.append(sent.calls["reduce-scatter"]))
            for layer in model:
                x = checkpoint(layer, x, use_reentrant=True)
            x.sum().backward()
    assert issued == [6]
