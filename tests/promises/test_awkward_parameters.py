"""Parameters of every awkward shape, stride and dtype. Random trees of them are in the laws."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import zero_fn as zf
from property_tests.programs import Leaf, Node, Tree, batch, build
from tests.support.on_ranks import on_ranks
from tests.support.programs import STAGES
from tests.support.ranks import axis
from tests.support.wholes import named_fulls
from tests.support.worlds import as_replicas, differences, noise, trained


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

CASES = {
    "shapes": (3, [*SHAPES, *TURNED]),
    "shapes, reversed": (4, [*TURNED, *SHAPES[::-1]]),
    "nothing": (2, [leaf((0,))]),
    # The sums of 16-bit gradients are made in float32; with one rank or two, so are those of replicas, to the bit.
    "all dtypes": (2, [*MIXED, leaf((3, 2), torch.bfloat16), leaf((7,), torch.float16)]),
    "all dtypes, reversed": (3, MIXED[::-1]),
}


def odd(leaves):
    """A root and two units, all of whose parameters reach the loss."""
    return build(Tree(Node((leaves[0],), (Node(tuple(leaves)), Node(tuple(leaves))))))


@pytest.mark.parametrize("case", CASES)
def test_parameters_of_any_kind_are_trained_as_in_replicas(ranks, case):
    n, leaves = CASES[case]

    def program(model, run, number):
        output = model(batch(number, axis().get_local_rank()))
        run.backward(output.square().mean())
        return output

    optimizer = "sgd" if "dtypes" in case else "adamw"
    assert ranks(n).run(differences, trained(lambda: odd(leaves), program, optimizer=optimizer)) == [[]] * n


SMALL = [leaf(shape, dtype) for shape in ((0,), (1,), (3, 5), (7, 1)) for dtype in (torch.float32, torch.bfloat16)]


def _small(stage, folder, *, is_saved):
    torch.manual_seed(0 if is_saved else 5)
    model = STAGES[stage](odd(SMALL), axis())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if not is_saved:
        zf.load(folder, model, optimizer)
    for number in range(2 * is_saved):
        model(batch(number, axis().get_local_rank())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if is_saved:
        zf.save(f"{folder}/{stage}", model, optimizer)
    return named_fulls(dict(model.named_parameters()))


def test_small_parameters_of_two_dtypes_have_the_same_bits_at_every_stage(ranks, tmp_path):
    """On three ranks, where sums in 16 bits are not those of replicas; and what they save loads on two."""
    found = [ranks(3).run(_small, stage, str(tmp_path), is_saved=True)[0] for stage in STAGES]
    found += ranks(2).run(_small, "zero2", f"{tmp_path}/zero3", is_saved=False)
    assert all(torch.equal(value, found[0][name]) for each in found for name, value in each.items())


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
