"""Parameters of every awkward shape, stride and dtype. Random trees of them are in the laws."""

from functools import partial

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from property_tests.programs import Leaf, Node, Tree, batch, build
from tests.promises.tables import each_as_replicas
from tests.support.on_ranks import on_ranks
from tests.support.programs import STAGES
from tests.support.ranks import axis
from tests.support.wholes import named_fulls
from tests.support.worlds import as_replicas, noise


def leaf(shape, dtype=torch.float32, trained=True, order=""):
    """A parameter whose dims lie in memory in this order."""
    return Leaf(shape, tuple(map(int, order)) if order else tuple(range(len(shape))), dtype, trained)


MIXED = [
    leaf((5, 3)),
    leaf((4,), torch.float64),
    leaf((3,), torch.complex64),
    leaf((2, 3), torch.complex128),
    *(leaf((3, 3), dtype, trained=False) for dtype in (torch.int64, torch.int32, torch.bool, torch.uint8)),
    leaf((6, 2), torch.float8_e4m3fn, trained=False),
]

SHAPES = [
    *(leaf(()), leaf((), torch.float64), leaf((1,)), leaf((17,)), leaf((1, 7)), leaf((5, 3)), leaf((2, 3, 5))),
    *(leaf((0, 4)), leaf((3, 0, 2), torch.float64), leaf((0,), trained=False)),
]
"""Scalars, uneven rows and fewer than ranks, no elements."""
TURNED = [leaf((4, 3), order="10"), leaf((2, 3, 5), order="201"), leaf((5, 1, 4), order="120")]


def odd(leaves):
    """A root and two units, all of whose parameters reach the loss."""
    return build(Tree(Node((leaves[0],), (Node(tuple(leaves)), Node(tuple(leaves))))))


def _backward(model, run, number):
    output = model(batch(number, axis().get_local_rank()))
    run.backward(output.square().mean())
    return output


CASES = {
    "shapes": (partial(odd, [*SHAPES, *TURNED]), _backward, {"n": 3, "optimizer": "adamw"}),
    "shapes, reversed": (partial(odd, [*TURNED, *SHAPES[::-1]]), _backward, {"n": 4, "optimizer": "adamw"}),
    "nothing": (partial(odd, [leaf((0,))]), _backward),
    # The sums of 16-bit gradients are made in float32; with one rank or two, so are those of replicas, to the bit.
    "all dtypes": (partial(odd, [*MIXED, leaf((3, 2), torch.bfloat16), leaf((7,), torch.float16)]), _backward),
    "all dtypes, reversed": (partial(odd, MIXED[::-1]), _backward, {"n": 3}),
}

test_parameters_of_any_kind_are_trained_as_in_replicas = each_as_replicas(CASES)


@on_ranks(2)
def test_state_dicts_keep_what_a_parameter_is(folder):
    """Names, shapes, dtypes, strides and values, through a checkpoint too."""
    plain = odd(SHAPES)
    for stage in STAGES.values():
        dcp.save(stage(odd(SHAPES), axis()).state_dict(), checkpoint_id=folder)
        other = stage(odd(SHAPES), axis())
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        state = other.state_dict()
        dcp.load(state, checkpoint_id=folder)
        other.load_state_dict(state)
        wholes = named_fulls(other.state_dict())
        assert wholes.keys() == plain.state_dict().keys()
        for name, value in plain.state_dict().items():
            whole = wholes[name]
            assert (whole.shape, whole.dtype, whole.stride()) == (value.shape, value.dtype, value.stride()), name
            assert torch.equal(whole, value), name


def _turned():
    turned = nn.Linear(6, 5)
    turned.weight = nn.Parameter(torch.randn(6, 5).t())
    body = nn.Sequential(
        nn.Conv2d(3, 5, 3, padding=1), nn.GroupNorm(1, 5), nn.ReLU(), nn.ConvTranspose2d(5, 6, 3, padding=1)
    )
    return nn.Sequential(body.to(memory_format=torch.channels_last), nn.AdaptiveAvgPool2d(1), nn.Flatten(), turned)


@as_replicas(_turned)
def test_channels_last_and_transposed_modules(model, run, number):
    strides = []
    hook = model[0][0].register_forward_pre_hook(lambda module, _: strides.append(module.weight.stride()))
    run.backward(model(noise(2, 3, 4, 4, seed=number).to(memory_format=torch.channels_last)).square().mean())
    hook.remove()
    assert strides == [(27, 1, 9, 3)]
    return [tuple(parameter.stride()) for parameter in model.parameters()]
