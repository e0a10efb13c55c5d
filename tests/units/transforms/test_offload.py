"""Parameters that rest in another tier: the bits of the same model without, bounded memory, typed errors on every rank."""

import copy
import io
import re
import sys
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import zero_fn as zf
from tests.support.groups import alone
from tests.support.messages import Headed, refusals, refused
from tests.support.models import Language, Odd
from tests.support.on_ranks import on_ranks
from tests.support.ranks import axis
from tests.support.resident import forget_peak, in_new_process, peak_nbytes
from tests.support.wholes import full
from tests.support.worlds import DAILY, differences, trained
from tests.units.storage.disks import answers
from zero_fn.tiers.tier_tensor import TierTensor

MIB = 1 << 20


def tokens(seed):
    return torch.randint(37, (2, 5), generator=torch.Generator().manual_seed(seed))


def is_away(module):
    """Whether every parameter of it rests in another tier."""
    return all(map(is_in_tier, module.parameters()))


def is_in_tier(tensor):
    return isinstance(tensor._local_tensor if isinstance(tensor, DTensor) else tensor, TierTensor)


@pytest.mark.parametrize("away", ["params", "params grads optim", "grads optim"])
@on_ranks(3)
def test_offload_changes_no_bit_of_parameters_of_any_kind(folder, away):
    """At every stage, with recomputation; one step is several backwards, of which one gathers once, and an edit of wholes."""

    def program(model, run, step):
        with run.accumulate(unshard=step == 1):
            for micro in range(2):
                run.backward(model(tokens(100 * step + 10 * axis().get_local_rank() + micro)).real.square().mean())
        run.backward(model(tokens(step)).sum())
        with run.world.unsharded(model.head), torch.no_grad():
            model.head.weight.mul_(1.5)

    def leaves(model):
        model = zf.offload(model, **dict.fromkeys(away.split(), zf.nvme(folder)))
        assert is_away(model) == ("params" in away)
        return zf.checkpoint_activations(model, units=type(model.blocks[0]))

    def streams(optimizer):
        return zf.streamed(optimizer, None if "optim" in away else zf.nvme(folder))

    trial = trained(Odd, program, optimizer="adamw", transform=leaves, stream=streams)
    assert differences(trial, stages=("replicate", "zero2") if away == "grads optim" else DAILY) == []


# -- what else reads and writes parameters ---------------------------------------------------------------------------


@pytest.fixture(params=["plain", "zero3"])
def pair(request, tmp_path):
    """A model, and the same offloaded."""
    torch.manual_seed(3)
    model, tier = Language(), zf.nvme(tmp_path)
    if request.param == "plain":
        yield model, lambda m: zf.offload(m, params=tier)
        return
    with alone() as mesh:
        yield model, lambda m: zf.offload(zf.shard_params(m, mesh), params=tier)


def equal(one, other):
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(full(a), full(b)) and a.dtype == b.dtype for a, b in pairs)


def test_reading_a_parameter_reads_the_tier_and_writing_writes_it(pair):
    model, offload = pair
    away = offload(model)
    for p in (*model.parameters(), *away.parameters()):
        with torch.no_grad():
            p.mul_(0.5)
            if p.dim() == 2:
                local = p.data.to_local() if isinstance(p, DTensor) else p.data
                local.t()[1:3].add_(1)  # a view of a view
    assert equal(away, model)
    assert torch.equal(away(tokens(0)), model(tokens(0)))
    for module in (model, away):
        penalty = sum(p.square().sum() for p in module.parameters())
        penalty.backward()
    assert all(
        torch.equal(full(a.grad), b.grad) for a, b in zip(away.parameters(), model.parameters(), strict=True)
    )  # fmt: skip


def test_a_complex_parameter_away_is_not_read_as_its_own_conjugate(tmp_path):
    """A conjugate is a view with a flag, which what has no memory cannot carry."""
    plain = nn.Linear(2, 2, bias=False, dtype=torch.complex64)
    away = zf.offload(copy.deepcopy(plain), params=zf.nvme(tmp_path))
    for read in (torch.conj, torch.adjoint, lambda p: p.conj().imag, torch.view_as_real):
        with pytest.raises(zf.errors.StateError):
            read(away.weight)
    assert torch.equal(away.weight.detach().clone().conj(), plain.weight.conj())
    assert torch.equal(away.weight.conj_physical(), plain.weight.conj())


def test_state_dicts_are_saved_and_loaded(pair):
    model, offload = pair
    away = offload(model)
    file = io.BytesIO()
    torch.save(away.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert all(torch.equal(full(value), model.state_dict()[key]) for key, value in loaded.items())
    for assign in (False, True):
        other = offload(Language())
        other.load_state_dict(model.state_dict(), assign=assign)
        assert torch.equal(other(tokens(1)), model(tokens(1)))
        assert equal(other, model)
        assert is_away(other)


def test_casts_go_to_the_tier_again(pair):
    """Copies, too, are drawn by the laws."""
    model, offload = pair
    away = offload(model)
    parameters = list(away.parameters())
    expected = copy.deepcopy(model)
    for dtype in (torch.float64, torch.bfloat16):
        away.to(dtype)
        expected.to(dtype)
        optimizer = zf.streamed(torch.optim.AdamW(away.parameters(), lr=0.1), zf.cpu())
        stock = torch.optim.AdamW(expected.parameters(), lr=0.1)
        for module, stepped in ((away, optimizer), (expected, stock)):
            module(tokens(2)).float().logsumexp(-1).mean().backward()
            stepped.step()
            stepped.zero_grad()
        assert is_away(away)
        assert equal(away, expected)
    assert all(a is b for a, b in zip(away.parameters(), parameters, strict=True))
    assert zf.memory(away).parameters == 0


def test_another_transform_keeps_what_was_asked(tmp_path):
    tier = zf.nvme(tmp_path)
    with alone() as mesh:
        model = zf.offload(Language(), params=tier, where="blocks.*")
        model = zf.precision(zf.shard_params(model, mesh), compute=torch.bfloat16)
        assert {row.tier for row in zf.describe(model).rows if row.unit != "root"} == {f"params in {tier}"}
        assert {row.tier for row in zf.describe(model).rows if row.unit == "root"} == {"cpu"}
        assert is_away(model.blocks)


def test_nothing_of_the_place_before_is_carried_over(tmp_path):
    """Parameters that were offloaded first and sharded then kept the room of before."""
    with alone() as mesh:
        before = zf.offload(Language(), params=zf.nvme(tmp_path))
        room = weakref.ref(next(before.parameters()).record)
        model = zf.shard_params(before, mesh)
        del before
        assert room() is None
        assert is_away(model)


def test_the_host_is_the_own_memory_of_a_model_on_the_cpu():
    model = zf.offload(Language(), params=zf.cpu())
    assert not any(isinstance(p, TierTensor) for p in model.parameters())
    assert all(row.tier == "params in cpu(), the device's own" for row in zf.describe(model).rows)
    assert str(zf.describe(model)).count("the device's own") == 1
    optimizer = torch.optim.AdamW(model.parameters())
    model(tokens(0)).sum().backward()
    optimizer.step()  # a stock one


def test_a_stock_optimizer_is_refused_before_it_updates(tmp_path):
    model = zf.offload(Language(), params=zf.nvme(tmp_path))
    before = [full(p) for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(tokens(0)).sum().backward()
    with refused("step_that_is_not_streamed"):
        optimizer.step()
    assert all(torch.equal(full(p), value) for p, value in zip(model.parameters(), before, strict=True))


# -- memory ----------------------------------------------------------------------------------------------------------


def _growth_of_passes(path):
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(24)))
    tier = zf.nvme(path)
    x = torch.ones(1, 1024)

    def passes(model):
        with torch.inference_mode():
            model(x)
            model(x)

    warm = zf.materialize(zf.offload(copy.deepcopy(model[:3]), params=tier), "cpu")
    passes(warm)
    del warm
    forget_peak()
    before = peak_nbytes()
    model = zf.materialize(zf.offload(model, params=tier), "cpu")
    passes(model)
    assert zf.memory(model).parameters == 0
    return peak_nbytes() - before


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the peak of memory")
def test_resident_memory_is_bounded_by_units_and_buffers(tmp_path):
    """96 MiB of parameters in 24 units of 4 MiB: three gathered, a staging; 12.2 MiB were seen."""
    assert in_new_process(_growth_of_passes, str(tmp_path)) < 20 * MIB


def test_the_optimizer_goes_where_the_verb_says(tmp_path):
    tier = zf.nvme(tmp_path)
    model = zf.offload(nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300)), optim=tier, where="0.*")
    model = zf.offload(model, optim=zf.cpu(), where="1.*")
    model(torch.ones(300)).sum().backward()
    stock = torch.optim.AdamW(model.parameters())
    with pytest.raises(zf.errors.StateError, match=f"optim in {re.escape(str(tier))}"):
        stock.step()
    optimizer = zf.streamed(stock)
    optimizer.step()
    assert set(optimizer.tier_nbytes()) == {tier, zf.cpu()}
    with pytest.raises(zf.errors.LayoutError):
        zf.offload(model, params=tier, fraction=0.5)
    half = zf.offload(nn.Linear(1024, 1024), optim=tier, fraction=0.5)
    half(torch.ones(1024)).sum().backward()
    optimizer = zf.streamed(torch.optim.AdamW(half.parameters()))
    optimizer.step()
    assert optimizer.tier_nbytes()[tier] == pytest.approx(4 * MIB, rel=0.1)


def test_a_step_reads_each_gradient_once(tmp_path, monkeypatch):
    """And writes none: 10 MiB of parameters are read and written, and as much of gradients read."""
    model = zf.offload(nn.Linear(1024, 2560, bias=False), params=zf.nvme(tmp_path), grads=zf.nvme(tmp_path))
    optimizer = zf.streamed(torch.optim.AdamW(model.parameters()), zf.cpu())
    model(torch.ones(1024)).sum().backward()
    assert f"params in {zf.nvme(tmp_path)}, grads in" in str(zf.describe(model))
    assert "chunks: " in str(zf.describe(model, optimizer))
    given = answers(monkeypatch, lambda _, result: result)
    optimizer.step()
    assert sum(given) == 30 * MIB


# -- refused ---------------------------------------------------------------------------------------------------------


def _assign_data_in_a_tier(one, folder):
    model = zf.offload(zf.shard_params(Headed(), one), params=zf.nvme(folder))
    model.head.weight.data = model.head.weight.data * 2


def _replace_memory(tiered):
    with torch.no_grad():
        next(tiered.parameters()).set_(torch.zeros(3, 4))


test_refusals = refusals(
    {
        "offload_without_a_tier": lambda: zf.offload(Headed()),
        "offload_of_no_fraction": lambda: zf.offload(Headed(), optim=zf.nvme("/tmp"), fraction=0.0),
        "offload_of_no_resident_part": lambda: zf.offload(Headed(), optim=zf.nvme("/tmp"), resident=0.5),
        "view_of_a_tensor_in_a_tier": lambda tiered: next(tiered.parameters()).data.view(torch.int32),
        "memory_of_a_tensor_in_a_tier_is_shared": lambda tiered: torch.from_dlpack(next(tiered.parameters()).detach()),
        "memory_of_a_tensor_in_a_tier_is_replaced": _replace_memory,
        "data_of_a_parameter_in_a_tier_was_assigned": _assign_data_in_a_tier,
    }
)
