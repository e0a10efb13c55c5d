"""How parameters are grouped: the default, and every way to choose."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import zero_fn as zf
import zero_fn.values.units
from tests.support.messages import Headed, changed, refusals
from tests.support.worlds import WIDTH, Tower
from zero_fn.values.units import (
    LARGE_NBYTES,
    anchors_of,
    by_size,
    innermost_common,
)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(4, 12)
        self.out = nn.Linear(4, 4)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))


class GPT(nn.Module):
    def __init__(self, depth=3, *, tied=True):
        super().__init__()
        self.embedding = nn.Embedding(32, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 32, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


# -- which modules are units ------------------------------------------------------------------------------------------


class WideBlock(Block):
    """A subclass of a block."""


class Stage(nn.Sequential):
    """A subclass of a container."""


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3)
        self.downsample = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))


def holding(**children):
    model = nn.Module()
    for name, child in children.items():
        model.add_module(name, child)
    return model


def linears(*widths, bias=True):
    return [nn.Linear(width, width, bias=bias) for width in widths]


def twice():
    block = nn.Linear(2, 2)
    return nn.Sequential(block, nn.Linear(2, 2), block)


def nested():
    return nn.ModuleDict({"stages": nn.ModuleList(nn.Sequential(*linears(2, 2)) for _ in range(2))})


def sizes():
    return nn.Sequential(*linears(8, 8), nn.Sequential(*linears(4, 4)))  # of 288 and 80 bytes


def tied():
    model = nn.Sequential(*linears(8, 8, bias=False))
    model[1].weight = model[0].weight
    return model


def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


def resnet():
    layers = [nn.Sequential(*(Residual() for _ in range(count))) for count in (2, 3)]
    return holding(stem=nn.Conv2d(3, 3, 7), layer1=layers[0], layer2=layers[1], fc=nn.Linear(3, 10))


@pytest.mark.parametrize(
    ("make", "units", "expected"),
    [
        (GPT, None, "blocks.0 blocks.1 blocks.2"),  # the mlp of a block is a Sequential of two Linears: no two units
        (resnet, None, "layer1.0 layer1.1 layer2.0 layer2.1 layer2.2"),
        (nested, None, "stages.0.0 stages.0.1 stages.1.0 stages.1.1"),
        (mlp, None, "0 2 4"),  # without activations
        (lambda: nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 3)}), None, "a b"),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU()), None, ""),  # a container of one is no repetition
        (lambda: holding(layers=nn.ModuleList([Block()])), None, "layers.0.mlp.0 layers.0.mlp.2"),  # and is looked into
        (lambda: nn.Sequential(Stage(*linears(2, 2)), Stage(*linears(2))), None, "0 1"),
        (lambda: nn.Sequential(nn.ReLU(), nn.ReLU()), None, ""),
        (lambda: nn.Linear(2, 2), None, ""),
        (twice, None, "0 1"),
        (lambda: GPT(2), Block, "blocks.0 blocks.1"),
        (lambda: GPT(1), (nn.Embedding, Attention), "embedding blocks.0.attention"),
        (lambda: nn.Sequential(WideBlock(), Block()), Block, "0 1"),
        (lambda: GPT(2), "blocks.?", "blocks.0 blocks.1"),
        (lambda: GPT(2), ("head", "blocks.*.mlp"), "blocks.0.mlp blocks.1.mlp head"),  # in the order of registration
        (lambda: GPT(2), ["head", Block], "blocks.0 blocks.1 head"),
        (sizes, by_size(nbytes=288), "0 1"),  # the innermost modules that are large enough
        (sizes, by_size(nbytes=160), "0 1 2"),
        (sizes, by_size(nbytes=80), "0 1 2.0 2.1"),
        (sizes, by_size(nbytes=10_000), ""),
        (lambda: nn.Sequential(nn.Sequential(*linears(8, 4)), *linears(4)), by_size(nbytes=288), "0.0"),
        (tied, by_size(nbytes=256), "0"),  # a tied parameter counts once
        (lambda: holding(experts=nn.ModuleList(linears(4, 4, 4, 4))), by_size(nbytes=320), ""),  # which has no forward
    ],
)
def test_units_beside_the_root_are_found_by_repetition_or_as_asked_for(make, units, expected):
    assert anchors_of(make(), units) == ["", *expected.split()]


# -- large modules beside the blocks -----------------------------------------------------------------------------------


def gpt_of(nbytes, *, tied=False):
    """Of which the token table and the head take so many bytes each."""
    with torch.device("meta"):
        model = GPT(2, tied=False)
        model.embedding, model.head = nn.Embedding(nbytes // 16, 4), nn.Linear(4, nbytes // 16, bias=False)
        if tied:
            model.head.weight = model.embedding.weight
    return model


def around_nested_blocks():
    model = holding(model=gpt_of(4 * LARGE_NBYTES), head=nn.Linear(2, 2))
    model.model.blocks[1].mlp[0] = nn.Linear(2**13, 2**12, device="meta")
    return model


def that_nobody_calls():
    size = 2**13
    weights = nn.ParameterList([nn.Parameter(torch.empty(size, size, device="meta"))])
    return holding(layers=nn.ModuleList([nn.Linear(size, size, device="meta")]), weights=weights)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (gpt_of(LARGE_NBYTES), "blocks.0 blocks.1"),
        (gpt_of(LARGE_NBYTES + 16), "embedding blocks.0 blocks.1 head"),
        (gpt_of(LARGE_NBYTES + 16).bfloat16(), "blocks.0 blocks.1"),  # bytes, not elements
        (gpt_of(4 * LARGE_NBYTES, tied=True), "blocks.0 blocks.1"),  # of the unit of the root
        (around_nested_blocks(), "model.embedding model.blocks.0 model.blocks.1 model.head"),
        (that_nobody_calls(), "layers.0"),  # it is looked through
    ],
)
def test_large_modules_beside_the_blocks_are_units_of_their_own(model, expected):
    assert anchors_of(model, None) == ["", *expected.split()]


def test_parts_of_a_tiled_module_are_its_units():
    model = zf.tile(gpt_of(4 * LARGE_NBYTES), parts=2, where="head.*")
    assert [name for name in anchors_of(model, None) if name.startswith("head")] == []


def test_activations_of_blocks_are_recomputed_and_not_those_of_large_modules(monkeypatch):
    monkeypatch.setattr(zero_fn.values.units, "LARGE_NBYTES", 100)
    model, calls = Tower(), Counter[str]()
    assert {"enter", "leave"} <= set(anchors_of(model, None))
    for name in ("enter", "blocks.1.up", "leave"):
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: calls.update([name]))
    zf.checkpoint_activations(model)(torch.ones(2, WIDTH)).sum().backward()
    assert calls == {"enter": 1, "blocks.1.up": 2, "leave": 1}


# -- ties ------------------------------------------------------------------------------------------------------------


def test_names_that_begin_alike_are_not_nested():
    assert innermost_common(["", "layers.1"], ["layers.10"]) == ""
    assert innermost_common(["", "layers.1", "layers.10"], ["layers.10.mlp"]) == "layers.10"


# -- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("units", [(int,), (None,)])
def test_units_of_another_type_are_refused(units):
    with pytest.raises(zf.errors.UnitError):
        anchors_of(GPT(1), units)


def _with_weight_of_a_subclass(model):
    model.head.weight = nn.Parameter(TwoTensor(torch.zeros(3, 4), torch.ones(3, 4)))


test_refusals = refusals(
    {
        "units_are_no_rule": lambda two: zf.shard_params(Headed(), two, units=(3,)),
        "units_of_no_size": lambda: zf.by_size(nbytes=0),
        "units_pattern_matches_nothing": lambda two: zf.shard_params(Headed(), two, units=("layers.*", "blocks.*")),
        "parameter_is_lazy": lambda two: zf.shard_params(nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4)), two),
        "parameter_is_of_a_subclass": lambda two: zf.shard_params(changed(_with_weight_of_a_subclass), two),
        "module_is_scripted": lambda two: zf.shard_params(
            nn.Sequential(nn.Linear(4, 4), torch.jit.trace(nn.Linear(4, 4), torch.zeros(1, 4))), two
        ),
    }
)
