"""Linears and embeddings in parts: the numbers of the whole, the same bits at every stage and tier, and a smaller peak."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zero_fn as zf
from tests.axes.grids import grid
from tests.support.groups import alone, pretended
from tests.support.messages import Headed, a_batch, changed, refusals, refused
from tests.support.models import Block
from tests.support.models import Language as TiedLanguage
from tests.support.on_ranks import on_ranks
from tests.support.programs import STAGES
from tests.support.ranks import axis, sent_by_value
from tests.support.storages import Storages
from tests.support.wholes import full
from zero_fn.local.launcher import LocalRanks
from zero_fn.values.tiled import TiledEmbedding, TiledLinear

TILED = ("embedding.*", "blocks.*.up.*", "head.*")


class Language(TiedLanguage):
    """With a head of its own: what is tied is not tiled."""

    def __init__(self):
        super().__init__(blocks=2)
        self.embedding, self.head = nn.Embedding(37, 10, padding_idx=30), nn.Linear(10, 37)


def tokens(seed, rows=4):
    return torch.randint(37, (rows, 6), generator=torch.Generator().manual_seed(seed))


def wholes(model):
    """Parameters by the names of the model that was not tiled."""
    return zf.transforms.untiled(model, {name: full(p) for name, p in model.named_parameters()})


@pytest.mark.parametrize(
    ("build", "where", "parts", "tolerance"),
    [
        (Language, TILED, 2, 1e-12),
        (Language, TILED, 10, 1e-12),
        (lambda: nn.Embedding(37, 10, padding_idx=30), "weight", 5, 0.0),
    ],
)
def test_a_tiled_model_gives_the_numbers_of_the_whole_up_to_the_order_of_sums(build, where, parts, tolerance):
    """In float64, where the order of a sum shows at 1e-15; a wrong row would show at 1. An embedding has no sums."""
    model = build().double()
    tiled = zf.tile(model, where=where, parts=parts)
    kinds = {type(child) for child in tiled.modules() if hasattr(child, "tiles")}
    assert kinds == ({TiledEmbedding, TiledLinear} if where is TILED else {TiledEmbedding})
    given = tokens(0)
    given[0, :2] = torch.tensor([30, 36])  # the padding and the last row
    expected, found = model(given), tiled(given)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    expected.square().sum().backward()
    found.square().sum().backward()
    grads = zf.transforms.untiled(tiled, {name: p.grad for name, p in tiled.named_parameters()})
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=100 * tolerance, atol=100 * tolerance)
    for wrong in (-1, 37):
        with pytest.raises(IndexError):
            tiled(torch.tensor([wrong]))


# -- memory ----------------------------------------------------------------------------------------------------------

WIDE, NARROW, PARTS = 4096, 64, 8


def wide(parts=1):
    """One huge linear between two small ones."""
    middle = [nn.Linear(NARROW, WIDE), nn.ReLU(), nn.AvgPool1d(WIDE // NARROW)]
    model = nn.Sequential(nn.Linear(8, NARROW), *middle, nn.Linear(NARROW, 8))
    return zf.tile(model, where="1.*", parts=parts) if parts > 1 else model


def peak(parts, recomputed):
    """Bytes of the storages that the second step makes, above its gradients, and what the plan said of them; in weights."""
    model = zf.shard_params(wide(parts), axis(), units="")
    if recomputed:
        model = zf.checkpoint_activations(model, units=("", "1"))
    for _ in range(2):
        model.zero_grad()
        with Storages() as storages:
            model(torch.randn(1, 8)).square().mean().backward()
            gradients = zf.memory(model).gradients
    weight = WIDE * NARROW * 4
    return (storages.peak - gradients) / weight, zf.plan(model).in_flight_nbytes / weight


def test_the_weight_of_a_tiled_linear_never_exists_whole(ranks):
    """Two parts gathered and the gradients of two, where untiled there are the weight and its gradient."""
    for measured, planned in ranks(2).run(peak, 1, False):
        assert measured > 1.4 and planned > 1.9
    for measured, planned in ranks(2).run(peak, PARTS, False):
        assert measured <= planned + 0.15  # activations: some vectors of 4096
        assert planned <= 4.2 / PARTS
    for measured, _ in ranks(2).run(peak, PARTS, True):  # one part after the other
        assert measured <= 5.2 / PARTS


def test_the_schedule_before_the_first_forward_is_that_of_the_forward():
    """Parts run in their module: the trace that the plan assumes is the one that is recorded."""
    with alone() as mesh:
        model = zf.shard_params(zf.tile(Language(), where="blocks.*.up.*", parts=3), mesh)
        assumed = zf.plan(model).in_flight_nbytes
        model(tokens(0)).sum().backward()
        assert zf.plan(model).in_flight_nbytes == assumed


# -- names and checkpoints -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["replicate", "zero1", "zero3"])
@on_ranks(2)
def test_a_checkpoint_of_the_whole_loads_into_parts_and_parts_give_it_back(stage):
    """Whole tensors, and those of shards."""
    saved = Language()
    sharded = zf.shard_params(saved, axis())
    model = STAGES[stage](zf.tile(Language(), where=TILED, parts=3), axis())
    model.load_state_dict(saved.state_dict())
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    found, expected = zf.transforms.untiled(model, full), saved.state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)
    with torch.no_grad():
        sharded.head.weight.mul_(2)
    model.load_state_dict(sharded.state_dict())
    assert torch.equal(wholes(model)["head.weight"], 2 * expected["head.weight"])


@pytest.mark.parametrize("is_sharded", [True, False])
def test_a_shape_that_does_not_fit_loads_nothing(is_sharded):
    with alone() as mesh:
        model = zf.tile(Language(), where=TILED, parts=3)
        model = zf.shard_params(model, mesh) if is_sharded else model
        before = wholes(model)["embedding.weight"]
        with pytest.raises(zf.errors.CheckpointError if is_sharded else RuntimeError, match="head"):
            model.load_state_dict({**Language().state_dict(), "head.weight": torch.zeros(38, 10)})
        assert torch.equal(wholes(model)["embedding.weight"], before) or not is_sharded


# -- what it leaves alone ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("donate", [False, True])
def test_a_copy_keeps_what_users_put_on_what_is_not_tiled_and_shares_memory_if_it_is_donated(donate):
    """`copy.deepcopy` of a parameter drops its hooks and attributes."""
    model = Language()
    seen = []
    model.head.register_forward_hook(lambda module, args, output: output * 2)
    weight = model.blocks[0].norm.weight
    weight.no_decay = True
    weight.register_hook(lambda grad: seen.append("hook"))
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append("after"))
    expected = model(tokens(0))
    tiled = zf.tile(model, where=TILED, parts=3, donate=donate)
    found = tiled(tokens(0))
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    assert seen == ["hook", "after"]
    assert tiled.blocks[0].norm.weight.no_decay
    before, now = ({p.untyped_storage().data_ptr() for p in each.parameters()} for each in (model, tiled))
    assert now == before if donate else now.isdisjoint(before)
    assert (tiled.blocks[0].norm.weight is weight) == donate
    with pytest.raises(zf.errors.StateError) if donate else nullcontext():
        model(tokens(0))


def test_a_frozen_and_a_shared_linear_stay_what_they_are():
    inner = nn.Linear(6, 6)
    model = nn.ModuleDict({"one": inner, "other": inner})
    inner.bias.requires_grad_(False)
    tiled = zf.tile(model, where="one.*", parts=2)
    assert tiled["one"] is tiled["other"]
    assert [p.requires_grad for p in tiled.parameters()] == [True, False, True, False]


def test_meta_models_are_tiled_and_initialised_in_their_parts():
    with alone() as mesh:
        with torch.device("meta"):
            model = nn.Sequential(nn.Embedding(37, 10), nn.Linear(10, 37))
        tiled = zf.tile(model, where="*", parts=3)
        assert all(p.is_meta for p in tiled.parameters())
        model = zf.materialize(zf.shard_params(tiled, mesh), "cpu")
        assert model(tokens(0)).isfinite().all()
        assert full(model[1].tiles[2].weight).std() > 0.1  # uniform within 1/sqrt(10), as of the whole


def test_tiles_are_units_whatever_units_says():
    """Also after a second transform."""
    with pretended(2) as mesh:
        for units in (None, Block, zf.by_size(nbytes=10_000), "blocks.0"):
            model = zf.precision(zf.shard_params(zf.tile(Language(), where=TILED, parts=3), mesh, units=units))
            names = {row.unit for row in zf.describe(model).rows}
            assert {f"{name}.tiles.{i}" for name in ("head", "blocks.1.up") for i in range(3)} <= names


def test_blocks_are_checkpointed_and_tiles_are_not():
    model = zf.checkpoint_activations(zf.tile(Language(), where=TILED, parts=3))
    recomputed = [
        name for name, child in model.named_modules() if type(child.__dict__.get("forward")).__name__ == "Recomputed"
    ]
    assert recomputed == ["blocks.0", "blocks.1"]


# -- with what else there is -------------------------------------------------------------------------------------------


@on_ranks(4)
def test_tiles_are_parallelized_one_by_one():
    mesh = grid("dp", "tp")
    plain = zf.tile(Language().double(), where=TILED, parts=3)
    model = zf.tile(plain, where="blocks.*.down.*", parts=2)
    styles = {"head.tiles.*": RowwiseParallel(input_layouts=Replicate())}
    styles["blocks.*.down.tiles.*"] = ColwiseParallel(output_layouts=Replicate())
    parallel = zf.shard_params(parallelize_module(copy.deepcopy(model), mesh["tp"], styles), mesh["dp"])
    given = tokens(0)
    model(given).square().mean().backward()
    parallel(given).square().mean().backward()
    torch.testing.assert_close(parallel(given), model(given), rtol=0, atol=1e-12)
    for mine, own in zip(parallel.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(full(mine.grad), own.grad, rtol=0, atol=1e-12)


def told_in_recomputation():
    model = zf.checkpoint_activations(
        zf.shard_params(zf.tile(Language(), where="blocks.*.up.*", parts=3), axis()), units=Block
    )
    rank = axis().get_local_rank()
    first = model.blocks[0](model.embedding(tokens(rank)))
    second = model.blocks[1](first)
    with pytest.raises(zf.errors.DisagreementError) as told:
        (first if rank else second).square().mean().backward()  # another path on each rank
    return told.value.summary


def test_ranks_that_recompute_different_tiles_are_told():
    """The gathers of a recomputation are in no schedule, which a rank that does not recompute would follow."""
    # Those of the pool would be lost for the tests after this one.
    with LocalRanks(2) as fresh, sent_by_value(told_in_recomputation):
        values = fresh.run(told_in_recomputation, timeout_s=60)
    assert values == ["Ranks 0 and 1 of axis 'dp' (2) are at different collectives."] * 2


@pytest.mark.parametrize("donate", [False, True])
def test_functions_that_hold_a_part_of_what_is_tiled_are_refused(donate):
    """What else is: `test_closures.py`."""
    model = Language()
    model.head.register_forward_pre_hook(lambda _, args: args[0] + model.blocks[0].norm.weight)
    with refused("closure_over_a_module"):
        zf.tile(model, where=TILED, parts=3, donate=donate)


# -- refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.head.weight.register_hook(lambda grad: grad),
        lambda model: model.head.register_load_state_dict_post_hook(lambda *_: None),
    ],
)
def test_a_module_with_hooks_that_are_written_for_the_whole_layer_is_refused(change):
    with pytest.raises(zf.errors.LayoutError, match="hooks of its"):
        _tiled(change)


def _tiled(change, where="head.*"):
    return zf.tile(changed(change), where=where, parts=2)


def _in_two():
    return zf.tile(Headed(), where="head.*", parts=2)


def _cut_an_output():
    model = _in_two()
    model.head.tiles[1].register_forward_hook(lambda module, args, output: output[..., :0])
    model(a_batch())


def _untile_shards(two):
    model = zf.shard_params(_in_two(), two)
    zf.transforms.untiled(model, model.state_dict())


test_refusals = refusals(
    {
        "tiled_after_a_transform": lambda four: zf.tile(zf.shard_params(Headed(), four), where="head.*", parts=2),
        "tiled_embedding_has_a_norm": lambda: zf.tile(nn.Embedding(8, 4, max_norm=1.0), where="weight", parts=2),
        "tiled_forward_is_its_own": lambda: _tiled(lambda model: setattr(model.head, "forward", abs)),
        "tiled_in_too_many_parts": lambda: zf.tile(Headed(), where="head.*", parts=4),
        "tiled_norm": lambda: zf.tile(nn.LayerNorm(4), where="*", parts=2),
        "tiled_output_is_cut": _cut_an_output,
        "tiled_weight_is_on_a_mesh": lambda two: zf.tile(
            parallelize_module(Headed(), two, {"head": RowwiseParallel()}), where="head.weight", parts=2
        ),
        "tiled_weight_is_tied": lambda: _tiled(
            lambda model: setattr(model.layers[1], "weight", model.layers[0].weight), "layers.0.weight"
        ),
        "untiled_of_shards": _untile_shards,
        "untiled_of_some_parts": lambda: zf.transforms.untiled(_in_two(), {"head.tiles.1.weight": torch.zeros(1, 4)}),
    }
)
