"""States in 8 bits are the same numbers however a tensor is cut (`zf.states8bit`).

The oracle is the same optimizer over plain replicas whose gradients are averaged in the order of the ranks, and that one
is compared with blocks that are coded one after the other from a sorted table. How values are coded is in
`tests/units/kernels/test_codes.py`; drawn shapes and ranks are in `property_tests/test_optimizer_laws.py`.
"""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zero_fn as zf
from tests.axes.grids import grid
from tests.promises.trials import TORCH, note_states
from tests.support.messages import refusals
from tests.support.on_ranks import on_ranks
from tests.support.programs import STAGES
from tests.support.ranks import axis
from tests.support.seeds import seed_generator
from tests.support.wholes import full
from tests.support.worlds import ALL, differences, noise
from zero_fn.errors import PlacementError, StateError
from zero_fn.kernels.codes import decode, encode
from zero_fn.values.dtensors import local_of

WIDTH = 48


class Blocks(nn.Module):
    """Rows that are whole blocks, rows that are none, a vector, and an image whose channels lie last."""

    def __init__(self):
        super().__init__()
        self.enter, self.middle = nn.Linear(WIDTH, 252), nn.Linear(252, 256)  # a cut falls into a block
        self.whole = nn.Linear(256, 32)  # rows of one block; the bias has fewer elements than are coded
        self.vector = nn.Parameter(torch.randn(5000))
        self.image = nn.Parameter(torch.randn(64, 16, 2, 3).to(memory_format=torch.channels_last))

    def forward(self, x):
        extra = (self.vector * torch.arange(5000).sin()).mean() + (self.image**2).mean()
        scaled = self.whole(torch.tanh(self.middle(torch.tanh(self.enter(x))))) * extra
        return scaled


OPTIMIZERS = {name: make for name, make in TORCH.items() if name not in ("Adafactor", "ASGD", "Muon", "Rprop")}
"""Those whose states have a form in 8 bits."""


# -- the same numbers --------------------------------------------------------------------------------------------------


def _coded(values, *, is_signed):
    """Values as they come back from 8 bits (tests/units/kernels/test_codes.py), block by block of a whole tensor."""
    codes, scales = torch.empty(values.numel(), dtype=torch.uint8), torch.empty(-(-values.numel() // 256))
    encode(values.reshape(-1), codes, scales, is_signed=is_signed)
    found = torch.empty(values.numel())
    decode(codes, scales, found, is_signed=is_signed)
    return found.view(values.shape)


def test_a_step_is_decoded_stepped_and_coded():
    seed_generator(0)
    weight = nn.Parameter(torch.randn(64, 65))
    stepped = nn.Parameter(weight.detach().clone())
    stock = torch.optim.AdamW([weight], lr=1e-2, fused=True)
    optimizer = zf.states8bit(torch.optim.AdamW([stepped], lr=1e-2, fused=True))
    for _ in range(3):
        weight.grad = torch.randn(64, 65) * torch.randn(64, 1).exp()
        stepped.grad = weight.grad.clone()
        stock.step()
        optimizer.step()
        own = stock.state[weight]
        own["exp_avg"].copy_(_coded(own["exp_avg"], is_signed=True))
        own["exp_avg_sq"].copy_(_coded(own["exp_avg_sq"], is_signed=False))
        assert torch.equal(weight, stepped)
    found = optimizer.state_dict()["state"][0]
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(found[name], own[name]), name
    assert optimizer.tier_nbytes() == {None: 2 * (64 * 65) + 2 * 4 * 17}


def _noted(world, model, optimizer):
    for step in range(3):
        world.step(model, optimizer, model(noise(4, WIDTH, seed=step)).square().mean())
    world.note_model(model)
    note_states(world, optimizer)


def _steps(names, world):
    for name in names:
        model = world.build(Blocks)
        _noted(world, model, zf.states8bit(OPTIMIZERS[name]([*model.parameters()])))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_every_optimizer_steps_as_over_replicas(ranks, n):
    names, stages = ([*OPTIMIZERS], ["zero3"]) if n == 2 else (["AdamW", "SGD"], ALL)
    names = [name for name in names if name != "AdamW, fused" or n == 1]  # it rounds the ends of shards otherwise
    assert ranks(n).run(differences, partial(_steps, names), stages=stages) == [[]] * n


class _Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 384, bias=False), nn.Linear(384, 64, bias=False)

    def forward(self, x):
        out = self.down(torch.relu(self.up(x)))
        return out


@pytest.mark.parametrize("stage", ["", "zero1", "zero3"])
@on_ranks(4)
def test_columns_that_tensor_parallelism_cuts_share_blocks(stage):
    seed_generator(0)
    plain = _Wide()
    seed_generator(0)
    mesh, style = grid("dp", "tp"), {"up": ColwiseParallel(), "down": RowwiseParallel()}
    model = parallelize_module(_Wide(), mesh["tp"], style)
    model = STAGES[stage](model, mesh["dp"]) if stage else model
    stock, optimizer = (zf.states8bit(OPTIMIZERS["AdamW"]([*each.parameters()])) for each in (plain, model))
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for resting, whole in zip(model.parameters(), plain.parameters(), strict=True):
            whole.grad = torch.randn(whole.shape, generator=generator)
            resting.grad = distribute_tensor(whole.grad, resting.device_mesh, resting.placements, src_data_rank=None)
        optimizer.step()
        stock.step()
    assert len(optimizer.states.divided) >= 1
    for (fqn, resting), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(full(resting), whole), fqn


def _beside_rounded_parameters(folder, mode, world):
    """2.03 bytes of states beside 2 of a parameter (and 2 of what rounding has cut off)."""
    for tier in (None, zf.nvme(folder)):
        model = zf.precision(world.build(Blocks), rest=torch.bfloat16, round=mode)
        optimizer = zf.states8bit(OPTIMIZERS["AdamW"]([*model.parameters()]))
        _noted(world, model, optimizer if tier is None else zf.streamed(optimizer, tier, buffer="64KiB"))


@pytest.mark.parametrize("mode", ["stochastic", "kahan"])
def test_they_go_with_parameters_in_bfloat16(ranks, tmp_path, mode):
    trial = partial(_beside_rounded_parameters, str(tmp_path), mode)
    assert ranks(2).run(differences, trial, beside="replicate", stages=["zero1", "zero3"]) == [[]] * 2


@on_ranks(2)
def test_what_is_no_number_shows_on_every_rank_that_has_a_part_of_the_block():
    model = zf.shard_params(Blocks(), axis())
    optimizer = zf.states8bit(OPTIMIZERS["AdamW"]([*model.parameters()]))
    model(noise(4, WIDTH, seed=0)).sum().backward()
    cut = 126 * WIDTH  # the last element of rank 0 lies in a block with the first ones of rank 1
    if dist.get_rank() == 0:
        local_of(model.enter.weight.grad)[-1, -1] = torch.nan
    optimizer.step()
    first = cut // 256 * 256
    number = [name for name, _ in model.named_parameters()].index("enter.weight")
    found = full(optimizer.state_dict()["state"][number]["exp_avg"]).view(-1)
    assert found[first : first + 256].isnan().all()
    assert found.isnan().sum() == 256


# -- saved and loaded --------------------------------------------------------------------------------------------------


def _made(place, folder):
    seed_generator(len(place))
    model = Blocks()
    if place.startswith("zero"):
        model = STAGES[place.partition(",")[0]](model, axis())
    if place.endswith("kahan"):
        model = zf.precision(model, rest=torch.bfloat16, round="kahan")
    optimizer = OPTIMIZERS["AdamW"]([*model.parameters()])
    if not place.endswith("float"):
        optimizer = zf.states8bit(optimizer)
    if place.endswith("disk"):
        optimizer = zf.streamed(optimizer, zf.nvme(folder), buffer="24KiB")
    return model, optimizer


def _train(model, optimizer, *steps):
    for step in steps:
        seed_generator(step)
        model(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _now(model, optimizer):
    states = optimizer.state_dict()["state"]
    found = {
        f"{number}.{name}": full(torch.as_tensor(each)) for number, own in states.items() for name, each in own.items()
    }
    return {name: value.clone() for name, value in found.items()} | {
        name: full(p).detach().clone() for name, p in model.named_parameters()
    }


def _saved(place, folder):
    model, optimizer = _made(place, folder)
    _train(model, optimizer, 0, 1)
    zf.save(Path(folder) / "saved", model, optimizer)


def _loaded(place, folder):
    model, optimizer = _made(place, folder)
    zf.load(Path(folder) / "saved", model, optimizer)
    before = _now(model, optimizer)
    _train(model, optimizer, 2)
    return [before, _now(model, optimizer)]


def _unequal(one, other):
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def test_a_checkpoint_holds_codes(tmp_path):
    _saved("plain", tmp_path)
    files = sum(file.stat().st_size for file in (tmp_path / "saved").glob("optimizer/*"))
    coded_numel = 252 * WIDTH + 252 * 256 + 256 * 32 + 5000 + 64 * 16 * 2 * 3
    assert 2 * coded_numel < files < 2.1 * coded_numel + 30_000


def test_states_in_float32_become_codes_as_they_are_loaded(ranks, tmp_path):
    ranks(2).run(_saved, "zero3, float", str(tmp_path))
    (expected,) = ranks(1).run(_loaded, "plain", str(tmp_path))
    for place, count in (("zero3", 4), ("zero3, disk", 2)):
        for found in ranks(count).run(_loaded, place, str(tmp_path)):
            assert [_unequal(*pair) for pair in zip(expected, found, strict=True)] == [[], []], place


@on_ranks(2)
def test_a_state_dict_goes_to_and_from_a_stock_optimizer():
    model, optimizer = _made("zero3", "")
    _train(model, optimizer, 0, 1)
    other, stock = _made("zero3, float", "")
    other.load_state_dict(model.state_dict())
    stock.load_state_dict(optimizer.state_dict())
    assert not _unequal(_now(model, optimizer), _now(other, stock))
    again = zf.states8bit(stock)  # the same codes, from states that it has
    assert not _unequal(_now(model, optimizer), _now(other, again))
    _train(model, optimizer, 2)
    _train(other, again, 2)
    assert not _unequal(_now(model, optimizer), _now(other, again))


# -- bytes -------------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_bytes_are_those_of_the_plan(folder):
    for tier in (None, zf.nvme(folder)):
        model = zf.shard_params(Blocks(), axis())
        optimizer = zf.states8bit(torch.optim.AdamW(model.parameters(), foreach=True))
        optimizer = optimizer if tier is None else zf.streamed(optimizer, tier)
        plan = zf.plan(model, optimizer)
        with zf.traffic() as sent:
            model(noise(4, WIDTH, seed=0)).sum().backward()
            optimizer.step()
        held = zf.memory(model, optimizer)
        assert (held.optimizer, held.buffers, held.tiers) == (
            plan.memory.optimizer,
            plan.memory.buffers,
            plan.memory.tiers,
        )
        assert sent.nbytes == plan.sent_nbytes
        assert sent.calls["all-to-all"] == 2


def test_a_step_moves_a_third_of_the_bytes_of_a_disk(tmp_path):
    moved = []
    for make in (zf.states8bit, lambda stock: stock):
        model = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(9))
        stock = torch.optim.AdamW(model.parameters(), fused=True)
        plan = zf.plan(zf.precision(model), zf.streamed(make(stock), zf.nvme(tmp_path)))
        moved.append(sum(each.read + each.written for each in plan.moved.values()))
    assert moved[0] <= moved[1] / 3


# -- refused -----------------------------------------------------------------------------------------------------------


def _fused():
    return torch.optim.AdamW(nn.Linear(64, 64).parameters(), fused=True)


test_refusals = refusals(
    {
        "states8bit_without_a_form": lambda: zf.states8bit(torch.optim.Rprop(nn.Linear(64, 64).parameters())),
        "states8bit_after_streamed": lambda: zf.states8bit(zf.streamed(_fused(), zf.cpu())),
        "streamed_optimizer_of_whole_matrices": lambda: zf.states8bit(
            torch.optim.Muon([nn.Parameter(torch.ones(4, 4))])
        ),
    }
)


def test_narrow_parameters_and_owners_are_refused():
    with pytest.raises(PlacementError):
        zf.states8bit(torch.optim.AdamW(nn.Linear(64, 64).bfloat16().parameters()))
    with pytest.raises(StateError):
        zf.by_owner(zf.states8bit(_fused()))


def test_small_parameters_keep_float32():
    small, large = nn.Parameter(torch.randn(4095)), nn.Parameter(torch.randn(4096))
    optimizer = zf.states8bit(torch.optim.SGD([small, large], momentum=0.9))
    small.grad, large.grad = torch.randn(4095), torch.randn(4096)
    optimizer.step()
    states = optimizer.state_dict()["state"]
    assert torch.equal(states[0]["momentum_buffer"], small.grad)
    assert not torch.equal(states[1]["momentum_buffer"], large.grad)


# -- how near to float32 ----------------------------------------------------------------------------------------------


def _streams():
    """Gradients of a step, 256 a row, and how far from float32's updates those in 8 bits may be, as a part of their norm."""

    def normal(generator):
        return torch.randn(64, 256, generator=generator)

    scales = torch.exp(1.5 * normal(torch.Generator().manual_seed(1)))
    signs = normal(torch.Generator().manual_seed(2)).sign()

    def of_tokens(generator):
        is_there = torch.rand(64, 4, 1, generator=generator) < 0.125
        return (normal(generator).view(64, 4, 64) * is_there).view(64, 256)

    def smaller(share):
        values = torch.full((64, 256), share)
        values[:, 0] = 1
        return lambda _: signs * values

    return {
        "normal": (normal, 0.02),
        "of many sizes": (lambda generator: scales * normal(generator), 0.05),
        "rows of tokens, of which one in eight is there": (of_tokens, 0.02),
        **{
            f"{share:g} of the largest": (smaller(share), most)
            for share, most in ((0.01, 0.03), (1e-4, 0.15), (1e-6, 0.35))
        },
    }


@pytest.mark.parametrize("stream", _streams())
def test_updates_are_nearer_to_those_of_float32_than_with_dynamic_codes(stream, monkeypatch):
    """Those of torchao, as of bitsandbytes, have decimal decades down to 1e-7: a smaller second moment becomes zero."""
    theirs = pytest.importorskip("torchao.optim").AdamW8bit
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # what it compiles for each tensor
    make, most = _streams()[stream]
    options = {"weight_decay": 0.0}
    ways = {
        "float32": lambda p: torch.optim.AdamW([p], lr=1e-3, fused=True, **options),
        "ours": lambda p: zf.states8bit(torch.optim.AdamW([p], lr=1e-3, fused=True, **options)),
        "theirs": lambda p: theirs([p], lr=torch.tensor(1e-3), **options),
    }
    found = {}
    for name, way in ways.items():
        parameter = nn.Parameter(torch.zeros(64, 256))
        optimizer, generator = way(parameter), torch.Generator().manual_seed(0)
        for _ in range(20):
            parameter.grad = make(generator)
            optimizer.step()
        found[name] = parameter.detach()[:, 1:]
    ours, other = ((found[name] - found["float32"]).norm() / found["float32"].norm() for name in ("ours", "theirs"))
    assert ours < most
    assert ours < 1.25 * other
