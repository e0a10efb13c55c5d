"""`precision(round=)`: parameters in bfloat16 without a master are what a step in float32, rounded by hand, would make them:
on any number of ranks, at any stage, in any tier, stepped in pieces or by owners."""

import warnings
from functools import partial
from itertools import product
from zlib import crc32

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adagrad, AdamW, RMSprop

import zero_fn as zf
from tests.axes.grids import Decoder, grid, parallelized
from tests.axes.grids import loss_of as loss_of_decoder
from tests.support.groups import alone
from tests.support.messages import Headed, a_batch, refusals, refused
from tests.support.models import Odd
from tests.support.on_ranks import on_ranks
from tests.support.profiles import by_night
from tests.support.programs import STAGES
from tests.support.ranks import axis
from tests.support.wholes import full, fulls

SEED = 5
MODES = {"stochastic": {"round": "stochastic", "seed": SEED}, "kahan": {"round": "kahan"}}
OPTIMIZERS = {
    "AdamW": partial(AdamW, lr=1e-2, fused=False),
    "SGD": partial(SGD, lr=1e-2),  # without states of its own
    "RMSprop": partial(RMSprop, lr=1e-2, momentum=0.5),
    "Adagrad": partial(Adagrad, lr=1e-2),  # which makes its states when it is made
}
BOTH = pytest.mark.parametrize("mode", MODES)


# -- a step by hand ----------------------------------------------------------------------------------------------------


def _mixed(x):
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return np.asarray(x ^ (x >> np.uint32(16)))


def _by_chance(values, name, step):
    """Finite values, rounded as the numbers of their elements, their name and the step say."""
    key = np.uint32(crc32(f"{SEED} {name}".encode())) ^ _mixed(np.array([step + 0x9E3779B9], np.uint32))
    numbers = np.arange(values.numel(), dtype=np.uint32)
    noise = _mixed(numbers ^ _mixed(key)) >> np.uint32(16)
    bits = values.contiguous().view(-1).numpy().view(np.uint32) + noise
    halves = torch.from_numpy((bits >> np.uint32(16)).astype(np.int16))
    return halves.view(torch.bfloat16).view(values.shape)


class ByHand:
    """Whole parameters, each with a stock optimizer that steps it in float32."""

    def __init__(self, model, make, mode):
        self.mode, self.count = mode, dict.fromkeys(dict(model.named_parameters()), 0)
        self.values = {name: full(p).detach().clone() for name, p in model.named_parameters()}
        self.lost = {name: torch.zeros_like(value) for name, value in self.values.items()}
        trained = {name: value for name, value in self.values.items() if value.is_floating_point()}
        self.wide = {name: nn.Parameter(value.float()) for name, value in trained.items()}
        self.optimizer = make([*self.wide.values()])

    def step(self, model):
        """With the gradients of the model."""
        grads = {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        for name, wide in self.wide.items():
            wide.data = self.values[name].float() + self.lost[name].float()
            wide.grad = grads[name].float() if name in grads else None
        self.optimizer.step()
        for name in grads:
            wide = self.wide[name].detach()
            if self.mode == "kahan":
                self.values[name] = wide.bfloat16()
                self.lost[name] = (wide - self.values[name].float()).bfloat16()
            else:
                self.values[name] = _by_chance(wide, name, self.count[name])
            self.count[name] += 1

    def require_same(self, model, what=""):
        wholes = [full(p) for p in model.parameters()]
        for (name, _), whole in zip(model.named_parameters(), wholes, strict=True):
            assert torch.equal(whole, self.values[name]), (what, name, whole, self.values[name])


def _built(mode):
    torch.manual_seed(0)
    model = Odd()
    model.wave.requires_grad_(False)  # complex: it is not rounded, and sums of four are not exact
    model.wide = nn.Parameter(0.1 * torch.randn(90, 61))  # several pieces
    return zf.precision(model, rest=torch.bfloat16, **MODES[mode])


def _backward(model, step):
    """The same on all ranks, so that means are exact, and gradients do not depend on their number."""
    generator = torch.Generator().manual_seed(step)
    for part in range(2):
        model(torch.randint(0, 37, (4, 5), generator=generator)).float().square().mean().backward()
        assert part or step != 1 or model.zero_grad() is None


def _train(model, optimizer, steps, by_hand=None):
    for step in steps:
        _backward(model, step)
        if step == 2:
            nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        if by_hand is not None:
            by_hand.step(model)
        optimizer.step()
        optimizer.zero_grad()


# -- worlds ------------------------------------------------------------------------------------------------------------


def _offloaded(model, folder):
    return zf.offload(zf.shard_params(model, axis()), **dict.fromkeys(("params", "grads", "optim"), zf.nvme(folder)))


def _streamed(optimizer, _, **options):
    return zf.streamed(optimizer, **options)


WORLDS = {
    **{stage: (lambda m, _, place=place: place(m, axis()), _streamed) for stage, place in STAGES.items()},
    "on disk": (_offloaded, _streamed),
    "in pieces": (
        lambda m, _: zf.shard_optimizer(m, axis()),
        lambda o, folder: zf.streamed(o, zf.nvme(folder), buffer="12KiB"),
    ),
    "of no mesh": (lambda m, folder: zf.offload(m, params=zf.nvme(folder)), _streamed),
    "by owners": (lambda m, _: zf.shard_params(m, axis()), lambda o, _: zf.by_owner(o)),
    "by owners, on disk": (_offloaded, lambda o, _: zf.streamed(zf.by_owner(o))),
}


def _placed(world, mode, optimizer, folder):
    place, stepped = WORLDS[world]
    model = place(_built(mode), folder)
    return model, stepped(OPTIMIZERS[optimizer](model.parameters()), folder)


def _as_by_hand(mode, optimizer, worlds, folder):
    ends = []
    for world in worlds:
        model, stepping = _placed(world, mode, optimizer, folder)
        by_hand = ByHand(model, OPTIMIZERS[optimizer], mode)
        _train(model, stepping, range(3), by_hand)
        by_hand.require_same(model, world)
        ends.append(fulls(model.parameters()))
    return ends


SOME = {1: ["zero1", "of no mesh"], 2: [*WORLDS], 4: ["zero2", "zero3", "by owners"]}


@pytest.mark.parametrize("mode", ["stochastic", pytest.param("kahan", marks=pytest.mark.nightly)])
def test_no_bit_depends_on_ranks_stages_tiers_or_owners(ranks, mode, tmp_path):
    rows = [ranks(n).run(_as_by_hand, mode, "AdamW", worlds, str(tmp_path)) for n, worlds in SOME.items()]
    first, *others = [end for row in rows for on_rank in row for end in on_rank]
    assert all(all(map(torch.equal, end, first)) for end in others)


@pytest.mark.parametrize(
    ("mode", "optimizer"),
    by_night(product(MODES, ("SGD", "RMSprop", "Adagrad")), [("stochastic", "SGD"), ("kahan", "Adagrad")]),
)
@on_ranks(2)
def test_other_optimizers_step_in_float32(mode, optimizer, folder):
    _as_by_hand(mode, optimizer, ["zero2", "on disk", "in pieces", "by owners"], folder)


@BOTH
@on_ranks(4)
def test_numbers_are_those_of_the_whole_tensor_over_all_axes(mode):
    mesh = grid("dp", "tp")
    for stage, place in STAGES.items():
        model = place(parallelized(mesh["tp"]), mesh["dp"])
        model = zf.precision(model, compute=torch.float32, rest=torch.bfloat16, **MODES[mode])
        assert isinstance(model, Decoder)
        optimizer = zf.streamed(AdamW(model.parameters(), lr=1e-2, fused=False))
        by_hand = ByHand(model, OPTIMIZERS["AdamW"], mode)
        for step in range(2):
            loss_of_decoder(model, step, mesh["dp"].get_local_rank()).backward()
            by_hand.step(model)
            optimizer.step()
            optimizer.zero_grad()
        by_hand.require_same(model, stage)


# -- bytes, words, refusals --------------------------------------------------------------------------------------------


def _drifting(mode):
    """Weights of one after 500 steps of a tenth of a thousandth."""
    options = {} if mode is None else MODES[mode]
    model = zf.precision(nn.Linear(1, 4096, bias=False), rest=torch.bfloat16, **options)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = SGD(model.parameters(), lr=1e-4)
    optimizer = optimizer if mode is None else zf.streamed(optimizer)
    for _ in range(500):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
    return model.weight.detach().float()


def test_small_steps_are_taken_which_plain_rounding_takes_none_of():
    assert _drifting(None).eq(1).all()
    assert (_drifting("kahan") - 0.95).abs().max() < 2**-8
    found = _drifting("stochastic")
    # Each goes down by 1/256 with a probability of 0.0256 a step: 12.8 times of 500, with a variance below that.
    sigma = 12.8**0.5 / 256
    assert abs(float(found.mean()) - 0.95) < 5 * sigma / 4096**0.5
    assert 0.8 * sigma < float(found.std()) < 1.1 * sigma


@BOTH
def test_a_skipped_step_is_not_counted(mode):
    with alone() as mesh:
        model = zf.shard_params(_built(mode), mesh)
        optimizer = zf.streamed(OPTIMIZERS["AdamW"](model.parameters()))
        by_hand, scaler = ByHand(model, OPTIMIZERS["AdamW"], mode), torch.amp.GradScaler("cpu", init_scale=2.0)
        for step in range(3):
            scaler.scale(model(torch.full((2, 5), step)).float().square().mean()).backward()
            if step == 1:
                model.scale.grad.fill_(torch.inf)
            scaler.unscale_(optimizer)
            if step != 1:
                by_hand.step(model)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        by_hand.require_same(model, mode)


def _rounded():
    return zf.precision(Headed().bfloat16(), round="stochastic", seed=1)


test_refusals = refusals(
    {
        "precision_rounds_float32": lambda: zf.precision(Headed(), round="stochastic"),
        "precision_twice_with_other_roundings": lambda: zf.precision(_rounded(), round="stochastic"),
    }
)


@pytest.mark.parametrize(
    "options",
    [
        {"round": "kahan", "rest": torch.float32},
        {"round": "stochastic", "rest": torch.float16},
    ],
)
def test_what_rounds_nothing_is_refused(options):
    with pytest.raises(zf.errors.LayoutError):
        zf.precision(nn.Linear(4, 4), **options)
    for other in ({"round": "kahan"}, {"rest": torch.float32}):
        with pytest.raises(zf.errors.LayoutError):
            zf.precision(_rounded(), **other)


@BOTH
def test_an_optimizer_that_would_round_by_itself_is_refused(mode):
    with alone() as mesh, warnings.catch_warnings():
        warnings.simplefilter("error")  # nor is anything said of masters
        model = zf.shard_params(_built(mode), mesh)
        before = fulls(model.parameters())
        optimizer = AdamW(model.parameters(), fused=False)
        _backward(model, 0)
        with pytest.raises(zf.errors.StateError):
            optimizer.step()
        assert all(map(torch.equal, fulls(model.parameters()), before))
        assert not optimizer.state


def test_states_that_torch_has_rounded_are_refused():
    model = _rounded()
    model(a_batch()).float().sum().backward()
    optimizer = zf.by_owner(AdamW(model.parameters(), fused=False))
    optimizer.step()
    stock = AdamW(model.parameters(), fused=False)
    stock.load_state_dict(optimizer.state_dict())
    with refused("states_that_were_rounded_before_they_are_streamed"):
        zf.streamed(stock)


@on_ranks(2)
def test_ranks_with_other_seeds_are_told():
    model = zf.shard_params(zf.precision(Odd(), rest=torch.bfloat16, round="stochastic", seed=dist.get_rank()), axis())
    with pytest.raises(zf.errors.DisagreementError, match="stochastic, seed 1"):
        _backward(model, 0)
