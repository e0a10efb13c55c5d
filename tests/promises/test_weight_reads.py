"""A forward may read any weight of its model by name, as losses in chunks read that of a head that is a unit.

trl, Liger, Cut Cross Entropy and Unsloth do so. Every real vocabulary makes the head a unit.
"""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import zero_fn as zf
from tests.support.messages import a_batch, refusals
from tests.support.on_ranks import on_ranks
from tests.support.programs import STAGES
from tests.support.ranks import axis
from tests.support.worlds import ALL, as_replicas, noise, trained

_VOCABULARY, _WIDTH = 11, 4
_UNITS = ["layers.?", "table", "head"]


class _Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(_WIDTH, _WIDTH)
        self.others = []  # a plain list: no children

    def forward(self, x):
        for other in self.others:
            weight = other.weight
            x = x + 0.1 * F.linear(F.linear(x, weight).tanh(), weight.t())
        y = x + self.mix(x).tanh()
        return y


class _Language(nn.Module):
    """A language model whose loss is computed in chunks of two tokens."""

    def __init__(self, ways, chunk=2):
        super().__init__()
        self.ways, self.chunk = ways.split(", "), chunk
        self.table = nn.Embedding(_VOCABULARY, _WIDTH)
        self.layers = nn.ModuleList(_Layer() for _ in range(3))
        self.head = nn.Linear(_WIDTH, _VOCABULARY, bias=False)
        self.head.weight.requires_grad_("frozen" not in self.ways)
        for layer in self.layers if "in blocks" in self.ways else ():
            layer.others = [self.head]

    def _loss(self, x, labels):
        weight = self.head.weight
        return F.cross_entropy(F.linear(x, weight), labels, reduction="sum")

    def forward(self, tokens, labels):
        ways = self.ways
        weight = self.head.weight if "early" in ways else None
        if "without gradients" in ways:
            with torch.no_grad():
                total = self.head.weight.norm()
        x = F.embedding(tokens, self.table.weight) if "looked up" in ways else self.table(tokens)
        total = 0.0 * x.sum() + (total if "without gradients" in ways else 0.0)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if "recomputed blocks" in ways else layer(x)
            if weight is not None:
                total = total + F.linear(x, weight).square().mean()
        if "penalty" in ways:
            total = total + sum(layer.mix.weight.square().sum() for layer in self.layers)
        if "called, too" in ways:
            total = total + self.head(x).square().mean()
        for some, targets in zip(x[labels > 0].split(self.chunk), labels[labels > 0].split(self.chunk), strict=True):
            if "recomputed" in ways:
                total = total + checkpoint(self._loss, some, targets, use_reentrant=False)
            else:
                total = total + self._loss(some, targets)
        if "called, too" in ways:
            total = total + self.head(x).square().mean()
        return total


def _batch(number):
    """Tokens and labels of this rank: the second rank has no label in the second batch, so no chunk at all."""
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    tokens, labels = torch.randint(1, _VOCABULARY, (2, 2, 5), generator=generator)
    labels[:, 3 - dist.get_rank() :] = 0
    return tokens, labels * (dist.get_rank() != 1 or number != 1)


def _program(model, run, number):
    loss = model(*_batch(number))
    run.backward(loss)
    with run.accumulate():
        run.backward(model(*_batch(number + 10)))
        run.backward(model(*_batch(number + 1)))
    with torch.no_grad():
        return [loss.detach(), model(*_batch(number))]


@pytest.mark.parametrize(
    "ways",
    [
        "plain",
        "recomputed",
        "recomputed, frozen",
        "looked up, penalty, without gradients",
        "early, recomputed, called, too",
        "early, frozen",
        "in blocks",
        "in blocks, recomputed blocks, recomputed",
        "in blocks, recomputed blocks, frozen",
    ],
)
@as_replicas(stages=ALL, tolerance=1e-12)
def test_a_weight_that_a_forward_reads_by_name_is_whole(world, ways):
    """Torch's error about mixed tensors at stages 1 and 3, also where ranks had different numbers of chunks."""
    trained(lambda: _Language(ways).double(), _program, steps=3, options={"units": _UNITS})(world)


_PLACES = {
    "freed after backward": lambda model, _: zf.shard_params(model, axis(), units=_UNITS, reshard_after="backward"),
    "two stages": lambda model, _: zf.shard_optimizer(
        zf.shard_params(model, axis(), where="head.*", units=_UNITS), axis()
    ),
    "host": lambda model, _: zf.offload(zf.shard_params(model, axis(), units=_UNITS), params=zf.cpu()),
    "disk": lambda model, path: zf.offload(zf.shard_params(model, axis(), units=_UNITS), params=zf.nvme(path)),
    "codes": lambda model, _: zf.precision(zf.shard_params(model, axis(), units=_UNITS), gather=zf.wire.int8()),
}


@pytest.mark.parametrize("place", _PLACES)
@on_ranks(2)
def test_a_weight_is_read_from_every_place(place, tmp_path):
    """Beside the same model in units that hold what they read."""

    def gradients(make):
        torch.manual_seed(0)
        model = make(_Language("recomputed, looked up"))
        found = []
        for number in range(2):
            loss = model(*_batch(number))
            loss.backward()
            found += [loss.detach(), *(p.grad.full_tensor() for p in model.parameters())]
            model.zero_grad()
        return found

    wire = {"gather": zf.wire.int8()} if place == "codes" else {"compute": torch.float32}
    one = gradients(lambda model: _PLACES[place](model, str(tmp_path)))
    other = gradients(lambda model: zf.precision(zf.shard_params(model, axis(), units="layers.?"), **wire))
    assert all(map(torch.equal, one, other))


@on_ranks(2)
def test_a_head_is_gathered_as_often_as_if_it_were_called_whatever_the_chunks():
    def sent(ways, chunk):
        torch.manual_seed(0)
        model = zf.shard_params(_Language(ways, chunk), axis(), units=_UNITS)
        for _ in range(2):
            with zf.traffic() as traffic:
                model(torch.ones(2, 8, dtype=torch.long), torch.ones(2, 8, dtype=torch.long)).backward()
        return traffic.nbytes, traffic.calls["all-gather"], traffic.calls["reduce-scatter"]

    assert sent("recomputed", 1) == sent("recomputed", 16) == sent("plain", 3)


class _Reading(nn.Module):
    """Reads the weight of a block, and then does what the test says."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(2))
        self.then = lambda weight: None

    def forward(self, x):
        weight = self.blocks[1].weight
        self.then(weight)
        y = self.blocks[1](F.linear(self.blocks[0](x), weight))
        return y


@pytest.mark.parametrize("stage", ["zero1", "zero3"])
@on_ranks(2)
def test_what_was_read_is_at_rest_after_the_forward_however_it_ends(stage):
    torch.manual_seed(0)
    model = STAGES[stage](_Reading(), axis())
    expected = model(noise(2, _WIDTH, seed=0))

    def fail(weight):
        raise ValueError("in the forward")

    model.then = fail
    with pytest.raises(ValueError, match="in the forward"):
        model(noise(2, _WIDTH, seed=0))
    assert isinstance(model.blocks[1].weight, DTensor)
    model.then = lambda weight: None
    for each in (model, copy.deepcopy(model)):
        assert isinstance(each.blocks[1].weight, DTensor)
        assert torch.equal(each(noise(2, _WIDTH, seed=0)), expected)
        assert isinstance(each.get_parameter("blocks.1.weight"), DTensor)
    model.then = lambda weight: weight.add_(1)
    with torch.no_grad(), pytest.raises(zf.errors.PlacementError):
        model(noise(2, _WIDTH, seed=0))


@on_ranks(2)
def test_a_weight_that_is_read_has_the_compute_dtype_also_in_a_block_that_gathers_once():
    model = zf.precision(zf.shard_params(_Reading(), axis()))
    dtypes = []
    model.then = lambda weight: dtypes.append(weight.dtype)
    model(noise(2, _WIDTH, seed=0)).sum().backward()
    with zf.accumulate(model, unshard=True):
        model(noise(2, _WIDTH, seed=0)).sum().backward()
    assert dtypes == [torch.bfloat16] * 2


def _in_a_selective_checkpoint(model):
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    checkpoint(model, a_batch(), use_reentrant=False, context_fn=contexts)


test_refusals = refusals({"unit_in_a_selective_checkpoint": _in_a_selective_checkpoint})
