"""`precision(gather=, reduce=)`: what travels in fewer bits is what it would be if replicas coded it by hand, at every stage,
on any number of ranks and axes, in every tier, and as many bytes as were planned."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import SGD, AdamW
from torch.utils.checkpoint import checkpoint

import zero_fn as zf
from tests.axes.grids import grid
from tests.support.groups import alone, pretended
from tests.support.messages import refused
from tests.support.on_ranks import on_ranks
from tests.support.profiles import by_night
from tests.support.programs import STAGES
from tests.support.ranks import axis
from tests.support.wholes import full
from zero_fn.kernels.wire_codes import decode, decode_mean, encode
from zero_fn.values.wire import row_numel

FORMATS = {
    "int8": {"gather": zf.wire.int8()},
    "int8, int4": {"gather": zf.wire.int8(symmetric=False, block=64), "reduce": zf.wire.int4()},
    "int4, both": {"gather": zf.wire.int4(rotate=True), "reduce": zf.wire.int4(symmetric=False, block=48, rotate=True)},
    "float8": {"gather": zf.wire.float8(), "reduce": zf.wire.float8(dtype=torch.float8_e5m2)},
    "differences": {"gather": zf.wire.delta4(), "reduce": zf.wire.int8(rotate=True)},
}
DTYPES = (torch.float32, torch.bfloat16)


class Model(nn.Module):
    """Matrices whose rows ranks share unevenly, one that lies the other way round in memory, a tied one, and small ones."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(41, 64)
        self.up = nn.Linear(64, 301)
        self.norm = nn.LayerNorm(301)
        self.turned = nn.Parameter(torch.randn(67, 301).t() / 20)
        self.down = nn.Linear(67, 64)
        self.filter = nn.Conv1d(16, 4, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Linear(40, 40)
        self.frozen = nn.Linear(64, 64, bias=False).requires_grad_(False)
        self.head = nn.Linear(64, 41)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.frozen(self.embedding(tokens) * self.scale)
        x = self.down(F.gelu(self.norm(self.up(x))) @ self.turned)
        x = x + self.filter(x.view(-1, 16, 4)).mean()
        logits = self.head(x)
        return logits


def _built():
    torch.manual_seed(0)
    return Model()


def _loss(model, step, rank=None):
    rank = dist.get_rank() if rank is None else rank
    tokens = torch.randint(0, 41, (2, 6), generator=torch.Generator().manual_seed(100 * step + rank))
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())


# -- by hand -----------------------------------------------------------------------------------------------------------


def _rows(values):
    """What shares blocks, in the order of memory; None of what travels as it is."""
    order = sorted(range(values.dim()), key=lambda dim: -values.stride(dim))
    row = row_numel(values.shape, order) if values.dim() else 0
    return values.permute(order).reshape(-1, row) if row else None


def _like(rows, values):
    """The values that rows stand for."""
    order = sorted(range(values.dim()), key=lambda dim: -values.stride(dim))
    back = [order.index(dim) for dim in range(values.dim())]
    return rows.reshape([values.shape[dim] for dim in order]).permute(back)


class ByHand:
    """Replicas that compute with what would have travelled, and average what would have come."""

    def __init__(self, model, gather, reduce, compute):
        self.model, self.gather, self.reduce, self.compute = model, gather, reduce, compute
        self.held = {}

    def seen(self):
        """A copy with the values that a forward sees."""
        seen = copy.deepcopy(self.model).to(self.compute)
        with torch.no_grad():
            for name, parameter in seen.named_parameters():
                parameter.copy_(self._travelled(name, parameter.detach()))
        return seen

    def _travelled(self, name, values):
        rows = _rows(values)
        if self.gather is None or rows is None:
            return values
        held = self.held.get(name)
        if self.gather.is_difference and held is None:
            self.held[name] = rows.clone()
            return values
        records = self.gather.records(rows.shape[1])
        coded = torch.empty(len(rows), records.row_nbytes, dtype=torch.uint8)
        encode(rows.contiguous(), records, coded, held=held if self.gather.is_difference else None)
        out = held if self.gather.is_difference and held is not None else torch.empty_like(rows)
        decode(coded, records, out, add=self.gather.is_difference)
        return _like(out, values)

    def mean(self, grad):
        """What the addends of all ranks become at rest."""
        addends = [torch.empty(grad.shape, dtype=grad.dtype) for _ in range(dist.get_world_size())]
        dist.all_gather(addends, grad.contiguous())
        rows = _rows(grad)
        if self.reduce is None or rows is None:
            return sum(addends[1:], addends[0].float()) / len(addends)
        records, parts = self.reduce.records(rows.shape[1]), []
        for addend in addends:
            addend = torch.empty_strided(grad.shape, grad.stride(), dtype=grad.dtype).copy_(addend)
            parts.append(torch.empty(len(rows), records.row_nbytes, dtype=torch.uint8))
            laid = _rows(addend)
            assert laid is not None
            encode(laid.contiguous(), records, parts[-1])
        out = torch.empty(rows.shape)
        decode_mean(parts, records, out)
        return _like(out, grad)

    def step(self, optimizer, number):
        seen = self.seen()
        loss = _loss(seen, number)
        loss.backward()
        for name, parameter in self.model.named_parameters():
            grad = seen.get_parameter(name).grad
            if grad is not None:
                laid = torch.empty_strided(parameter.shape, parameter.stride(), dtype=grad.dtype).copy_(grad)
                parameter.grad = torch.empty_like(parameter).copy_(self.mean(laid))
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()


def _by_hand(wires, compute, steps=3):
    model = _built()
    hand = ByHand(model, wires.get("gather"), wires.get("reduce"), compute)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    losses = [hand.step(optimizer, number) for number in range(steps)]
    return losses, [parameter.detach() for parameter in model.parameters()]


def _step(model, optimizer, number):
    loss = _loss(model, number)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _trained(model, optimizer=None, steps=3):
    optimizer = AdamW(model.parameters(), lr=1e-2) if optimizer is None else optimizer
    losses = [_step(model, optimizer, number) for number in range(steps)]
    return losses, [full(parameter) for parameter in model.parameters()]


def _require_same(found, wanted, what):
    assert found[0] == wanted[0], (what, found[0], wanted[0])
    assert all(map(torch.equal, found[1], wanted[1])), what


def _stages(wires):
    """Those at which something is kept, for differences."""
    differs = "gather" in wires and wires["gather"].is_difference
    return [stage for stage in STAGES if not (differs and stage == "zero3")]


# -- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("n", [1, 3, pytest.param(2, marks=pytest.mark.nightly)])
def test_every_stage_computes_what_replicas_code_by_hand(ranks, name, n):
    ranks(n, deadline_s=120).run(_every_stage, name)


def _every_stage(name):
    wires = FORMATS[name]
    for compute in DTYPES:
        wanted = _by_hand(wires, compute)
        for stage in _stages(wires):
            model = zf.precision(STAGES[stage](_built(), axis()), compute=compute, **wires)
            _require_same(_trained(model), wanted, (stage, compute))


GRIDS = {
    "shard_params twice": lambda m, mesh: zf.shard_params(zf.shard_params(m, mesh["inner"]), mesh["outer"]),
    "hpZ": lambda m, mesh: zf.shard_grads(zf.shard_params(m, mesh["inner"]), mesh["outer"]),
    "hybrid": lambda m, mesh: zf.replicate(zf.shard_params(m, mesh["inner"]), mesh["outer"]),
    "replicate twice": lambda m, mesh: zf.replicate(zf.replicate(m, mesh["inner"]), mesh["outer"]),
}


@pytest.mark.parametrize("name", FORMATS)
@on_ranks(4, deadline_s=120)
def test_all_mixtures_over_two_axes_have_the_same_bits_and_send_what_was_planned(name):
    wires, mesh = FORMATS[name], grid("outer", "inner")
    wanted = None
    for mixture, place in GRIDS.items():
        differs = wires["gather"].is_difference
        if differs and mixture in ("shard_params twice", "hybrid"):
            continue
        model = place(zf.precision(_built(), **wires), mesh)  # transforms come in any order
        optimizer = AdamW(model.parameters(), lr=1e-2)
        found = _trained(model, optimizer)
        wanted = found if wanted is None else wanted
        _require_same(found, wanted, mixture)
        with zf.traffic() as sent:
            _step(model, optimizer, 3)
        plan = zf.plan(model, optimizer)
        assert dict(sent.by_axis) == dict(plan.sent_by_axis), mixture
        assert zf.memory(model).parameters == plan.memory.parameters + plan.padding.parameters, mixture


class Wide(nn.Module):
    """Rows of parts on a model axis are long enough to be coded."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 130), nn.Linear(130, 64)

    def forward(self, x):
        y = self.down(F.gelu(self.up(x)))
        return y


@on_ranks(4)
def test_parts_on_a_model_axis_travel_alike_at_every_stage():
    mesh, found = grid("dp", "tp"), []
    for stage in ("zero1", "zero3"):
        torch.manual_seed(0)
        wide = parallelize_module(Wide(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        model = zf.precision(getattr(zf, stage)(wide, mesh["dp"]), **FORMATS["int8, int4"])
        optimizer = SGD(model.parameters(), lr=0.1)
        for number in range(3):
            x = torch.randn(3, 64, generator=torch.Generator().manual_seed(10 * number + mesh["dp"].get_local_rank()))
            with zf.traffic() as sent:
                model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert dict(sent.by_axis) == dict(zf.plan(model, optimizer).sent_by_axis), stage
        found.append([full(parameter) for parameter in model.parameters()])
    assert all(map(torch.equal, *found))


def _program(model, optimizer):
    """Microbatches, a recomputed forward, gradients that torch returns, clipping, and copies."""
    losses = []
    for number in range(2):
        with zf.accumulate(model):
            for part in range(2):
                _loss(model, 10 * number + part).backward()
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        losses.append(_step(model, optimizer, number))
        tokens = torch.arange(12).view(2, 6) + dist.get_rank()
        checkpoint(model, tokens, use_reentrant=False).float().square().mean().backward()
        (given,) = torch.autograd.grad(_loss(model, number), [model.up.weight])
        assert model.up.weight.grad is not None and given.shape == model.up.weight.shape
        optimizer.step()
        optimizer.zero_grad()
    model = copy.deepcopy(model)
    return [*losses, _loss(model, 9).item()]


def _offloaded(tiers):
    return lambda model, axis, units: zf.offload(zf.shard_params(model, axis, units=units), **tiers)


@pytest.mark.parametrize("name", by_night(FORMATS, ("int8, int4", "differences")))
@on_ranks(2)
def test_programs_of_every_day_compute_the_same_at_every_stage_and_in_tiers(name, folder):
    wires, found = FORMATS[name], []
    tiers = {"optim": zf.cpu()}, dict.fromkeys(("params", "grads", "optim"), zf.nvme(folder))
    places = [STAGES[stage] for stage in _stages(wires)]
    places += [] if wires["gather"].is_difference else [_offloaded(each) for each in tiers]
    for place in places:
        model = zf.precision(place(_built(), axis(), units=nn.Linear), **wires)
        optimizer = AdamW(model.parameters(), lr=1e-2)
        optimizer = optimizer if place in STAGES.values() else zf.streamed(optimizer)
        found.append((_program(model, optimizer), [full(p) for p in model.parameters()]))
    for each, place in zip(found[1:], places[1:], strict=True):
        _require_same(each, found[0], place)


# -- bytes -------------------------------------------------------------------------------------------------------------


def _matrices():
    return nn.Sequential(*(nn.Sequential(nn.Linear(256, 256, bias=False), nn.ReLU()) for _ in range(4)))


PSI = 4 * 256 * 256
AGAIN = 7 / 4  # gathers of a step of ZeRO-3: the last of four units stays from the forward to the backward
BYTES = {  # of a step, for each element of which a rank sends a part
    "bf16": ("zero3", {}, AGAIN * 2 + 2),
    "int8, int4": ("zero3", {"gather": zf.wire.int8(), "reduce": zf.wire.int4()}, AGAIN * 260 / 256 + 132 / 256),
    "asymmetric": ("zero3", {"gather": zf.wire.int8(symmetric=False)}, AGAIN * 264 / 256 + 2),
    "blocks of 64": ("zero3", {"gather": zf.wire.int4(block=64)}, AGAIN * 36 / 64 + 2),
    "ZeRO-2": ("zero2", {"gather": zf.wire.float8(), "reduce": zf.wire.int4()}, 260 / 256 + 132 / 256),
    "differences": ("zero2", {"gather": zf.wire.delta4(), "reduce": zf.wire.int4()}, 2 * 132 / 256),
}


@pytest.mark.parametrize("name", BYTES)
@on_ranks(2)
def test_as_many_bytes_travel_as_the_format_has(name):
    stage, wires, each = BYTES[name]
    model = zf.precision(STAGES[stage](_matrices(), axis(), units=nn.Linear), **wires)
    x = torch.ones(2, 256)
    for _ in range(3):
        with zf.traffic() as sent:
            model(x).float().sum().backward()
    assert sent.nbytes == zf.plan(model).sent_nbytes == each * PSI / 2


def test_records_are_in_flight_beside_what_they_are_made_of():
    with pretended(2) as mesh:
        found = []
        for wires in ({}, {"gather": zf.wire.int8()}, {"gather": zf.wire.int8(), "reduce": zf.wire.int4()}):
            found.append(
                zf.plan(zf.precision(zf.shard_params(_matrices(), mesh, units=nn.Linear), **wires)).in_flight_nbytes
            )
    unit = PSI // 4
    # Of two units at most, which are gathered, or whose gradients are whole: their records leave, and others come.
    assert found[1] - found[0] == 2 * unit * 260 // 256
    assert found[2] - found[1] == 2 * 2 * unit * 132 // 256


@on_ranks(4)
def test_a_part_that_is_kept_inside_a_node_is_kept_as_it_travelled():
    mesh = grid("outer", "inner")
    model = zf.shard_grads(zf.shard_params(_matrices(), mesh["inner"]), mesh["outer"])
    model = zf.precision(model, gather=zf.wire.int8(), reduce=zf.wire.int4())
    x = torch.ones(2, 256)
    for _ in range(3):
        with zf.traffic() as sent:
            model(x).float().sum().backward()
    # Between nodes once a step 8 bits of what is kept, and 4 bits of the sums: 1.5 of the 6 bytes of ZeRO-3, and scales.
    assert sent.by_axis["outer"] == PSI / 4 * (260 + 132) / 256
    assert zf.memory(model).parameters == PSI // 4 * 4 + PSI // 2 * 260 // 256


# -- what cannot be coded ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spoilt", [torch.inf, -torch.inf, torch.nan])
@on_ranks(2)
def test_a_gradient_that_is_no_number_on_one_rank_is_none_on_any(spoilt):
    """A loss scaler must see it: where DeepSpeed quantises gradients, norms became zero (#6926)."""
    for stage in STAGES:
        model = zf.precision(STAGES[stage](_built(), axis()), **FORMATS["int8, int4"])
        (_loss(model, 0) * (spoilt if dist.get_rank() else 1.0)).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert not full(norm).isfinite(), stage


class Odd(nn.Module):
    """Complex numbers, integers, and rows that are too narrow."""

    def __init__(self):
        super().__init__()
        self.narrow = nn.Linear(31, 50)
        self.turn = nn.Parameter(torch.randn(64, 64, dtype=torch.complex64))
        self.table = nn.Parameter(torch.arange(128).view(2, 64), requires_grad=False)

    def forward(self, x):
        y = self.narrow(x).float().sum() + (self.turn.abs() * self.table.sum()).mean()
        return y


@on_ranks(2)
def test_small_and_odd_parameters_travel_as_they_are():
    found = []
    for wires in ({}, FORMATS["int8, int4"]):
        torch.manual_seed(0)
        model = zf.precision(zf.shard_params(Odd(), axis()), **wires)
        optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        for _ in range(2):
            model(torch.ones(3, 31)).backward()
            optimizer.step()
        found.append([full(parameter) for parameter in model.parameters()])
    assert all(map(torch.equal, *found))


# -- differences -------------------------------------------------------------------------------------------------------


def _seen(model):
    """What a forward computes with."""
    seen = []
    with torch.no_grad():
        hook = model.up.register_forward_hook(lambda module, *_: seen.append(module.weight.detach().clone()))
        model(torch.arange(12).view(2, 6))
        hook.remove()
    return seen[0]


@on_ranks(2)
def test_what_coding_rounds_away_is_sent_later():
    model = zf.precision(zf.shard_grads(_built(), axis()), compute=torch.float32, gather=zf.wire.delta4())
    optimizer = SGD(model.parameters(), lr=1.0)
    _loss(model, 0).backward()
    before = full(model.up.weight)
    optimizer.step()
    exact = full(model.up.weight)
    gaps = [(_seen(model) - exact).abs().max().item() for _ in range(8)]
    moved = (exact - before).abs().max().item()
    # Each difference is coded to a fifteenth of the largest of its block.
    assert 0 < gaps[0] <= moved / 14 and gaps[2] < moved / 1000 and gaps[-1] <= torch.finfo(torch.float32).eps * 64


@on_ranks(2)
def test_values_that_were_loaded_come_in_full():
    model = zf.precision(zf.shard_grads(_built(), axis()), **FORMATS["differences"])
    _trained(model, steps=2)
    model.load_state_dict({name: torch.zeros_like(full(value)) for name, value in model.state_dict().items()})
    assert not _seen(model).any()


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_differences_need_a_copy_that_they_can_be_added_to():
    with alone() as mesh:
        for place in (zf.shard_params, lambda m, axis: zf.offload(zf.shard_grads(m, axis), params=zf.nvme("/tmp"))):
            model = zf.precision(place(_built(), mesh), gather=zf.wire.delta4())
            for ask in (zf.plan, lambda model: model(torch.zeros(1, 2, dtype=torch.int64))):
                with refused("differences_that_nobody_holds"):
                    ask(model)


@on_ranks(2)
def test_ranks_with_other_formats_are_told_so():
    gather = zf.wire.int8(block=64 if dist.get_rank() else 256, symmetric=False)
    model = zf.precision(zf.shard_params(_built(), axis()), gather=gather, reduce=zf.wire.int4(rotate=True))
    with pytest.raises(
        zf.errors.DisagreementError, match=r"bf16 \(int8, asymmetric, block 64\)/fp32 \(int4, rotated\)"
    ):
        model(torch.zeros(1, 2, dtype=torch.int64))
