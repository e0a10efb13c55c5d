"""`zf.metrics`: the numbers of a run are what they say, and a step that goes wrong is named, skipped or undone."""

import logging
import math
import time
from statistics import median

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW

import zero_fn as zf
from tests.support.groups import alone
from tests.support.messages import refused
from tests.support.models import Layer
from tests.support.on_ranks import on_ranks
from tests.support.ranks import axis
from zero_fn.monitor.sinks.outlet import split
from zero_fn.monitor.sinks.prometheus import NAMES
from zero_fn.monitor.spikes import Spike, Spikes
from zero_fn.values import watching


class Kept:
    """A sink that keeps what it is given."""

    def __init__(self):
        self.rows = []
        self.is_closed = False

    def log(self, step, numbers):
        self.rows.append((step, numbers))

    def close(self):
        self.is_closed = True


def built(**offloaded):
    model = zf.shard_params(nn.Sequential(*(Layer(32) for _ in range(4))), axis(), units=Layer)
    if offloaded:
        model = zf.offload(model, **offloaded)
    optimizer = AdamW(model.parameters(), fused=True)
    return model, zf.streamed(optimizer) if offloaded else optimizer


def step(model, optimizer, x=None):
    x = torch.randn(8, 32) if x is None else x
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def values_of(model):
    return [parameter.full_tensor().clone() for parameter in model.parameters()]


@on_ranks(2)
def test_numbers_are_what_they_say(folder):
    tier = zf.nvme(folder)
    model, optimizer = built(params=tier, optim=tier)
    sink = Kept()
    began = time.perf_counter()
    with zf.metrics(model, optimizer, sinks=[sink], every=5) as metrics:
        for _ in range(10):
            time.sleep(0.1 * dist.get_rank())  # the slower rank
            with zf.traffic() as sent:
                loss = step(model, optimizer)
            found = metrics.step(loss, tokens=8, samples=2)
    took = time.perf_counter() - began
    assert sink.is_closed and watching.watchers == ()
    assert [at for at, _ in sink.rows] == ([5, 10] if dist.get_rank() == 0 else [])
    assert {split(name)[0] for name in found} <= set(NAMES)
    losses = [torch.zeros(()) for _ in range(2)]
    dist.all_gather(losses, loss)
    assert found["zero_fn_loss"] == pytest.approx(sum(map(float, losses)) / 2)
    assert found["zero_fn_steps_total"] == 10 and found["zero_fn_skipped_steps_total"] == 0
    assert found["zero_fn_ranks"] == 2 and found["zero_fn_slowest_rank"] == 1
    assert found['zero_fn_learning_rate{group="0"}'] == 1e-3
    assert 0.02 < found["zero_fn_slowest_rank_excess_seconds"] < took
    for name in ("step", "forward", "backward", "optimizer_step", "waiting", "tier_wait"):
        seconds = found[f"zero_fn_{name}_seconds"]
        assert len(seconds) == 5 and all(0 < each < took for each in seconds)
    phases = [found[f"zero_fn_{name}_seconds"] for name in ("forward", "backward", "optimizer_step", "step")]
    assert all(sum(parts) <= whole for *parts, whole in zip(*phases, strict=True)), "a phase is counted twice"
    assert len(found["zero_fn_gather_seconds"]) == 5 * 7  # the last unit stays gathered into the backward
    assert found['zero_fn_sent_bytes_total{axis="dp"}'] == pytest.approx(10 * sent.by_axis["dp"], rel=0.1)
    assert found["zero_fn_tokens_per_second"] > 2 * 8 * 5 / took
    planned = zf.plan(model, optimizer).moved[str(tier)]
    for way, nbytes in (("read", planned.read), ("written", planned.written)):
        assert found[f'zero_fn_tier_{way}_bytes_total{{tier="nvme"}}'] == pytest.approx(10 * nbytes, rel=0.1)
        assert found[f'zero_fn_tier_{way}_bytes_per_second{{tier="nvme"}}'] > 0
    for name in ("host", "disk"):
        used, free, limit = (found[f'zero_fn_memory{what}_bytes{{tier="{name}"}}'] for what in ("", "_free", "_limit"))
        assert 0 < used < limit and 0 < free < limit
    assert found['zero_fn_step_peak_memory_bytes{tier="host"}'] > 0
    assert 0 < found["zero_fn_checkpoint_age_seconds"] <= took


@on_ranks(2)
def test_the_norm_is_that_of_all_gradients_and_the_age_that_of_the_last_save(folder):
    model, optimizer = built()
    with zf.metrics(model, optimizer, every=1) as metrics:
        model(torch.randn(8, 32)).square().mean().backward()
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        optimizer.step()
        assert metrics.step()["zero_fn_grad_norm"] == pytest.approx(float(norm.full_tensor()))
        time.sleep(0.5)  # the age of what was never saved
        step(model, optimizer)
        late = metrics.step(grad_norm=2.0)
        zf.save(f"{folder}/a", model, optimizer)
        step(model, optimizer)
        early = metrics.step()
    assert late["zero_fn_grad_norm"] == 2.0
    age = "zero_fn_checkpoint_age_seconds"
    assert late[age] > max(0.5, early[age])


@on_ranks(2)
def test_a_scaler_that_skips_is_counted():
    """Of a run that goes on."""
    sink, (model, optimizer) = Kept(), built()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with zf.metrics(model, optimizer, sinks=[sink], every=1, step=120) as metrics:
        for number in range(3):
            x = torch.full((8, 32), float("inf") if number == 1 else 0.5)
            scaler.scale(model(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            found = metrics.step(scaler=scaler)
    assert (found["zero_fn_skipped_steps_total"], metrics.skipped) == (1, 1)
    assert found["zero_fn_steps_total"] == 123
    assert [at for at, _ in sink.rows] == ([] if dist.get_rank() else [121, 122, 123])
    assert (found["zero_fn_loss_scale"], found["zero_fn_loss_scale_at_minimum"]) == (1.0, 1.0)


@pytest.mark.parametrize("answer", ["report", "skip", "load"])
@on_ranks(2)
def test_a_gradient_that_is_not_finite_is_named_and_answered(answer, folder):
    """It begins in block 2 of rank 1: in backward the blocks after it are fine."""
    model, optimizer = built()
    zf.save(f"{folder}/step-0", model, optimizer, extra={"step": 0})
    saved, records = values_of(model), []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("zero_fn").addHandler(handler)
    with zf.metrics(model, optimizer, every=1, on_spike=answer, checkpoints=folder) as metrics:
        for number in range(3):
            before = values_of(model)
            if number == 2 and dist.get_rank() == 1:
                model[2].register_forward_hook(
                    lambda _m, _a, out: out.register_hook(lambda grad: grad * math.nan) and None
                )
            loss = step(model, optimizer)
            found = metrics.step(loss)
    logging.getLogger("zero_fn").removeHandler(handler)
    after = values_of(model)
    assert [(spike.step, spike.what, spike.rank, spike.unit) for spike in metrics.spikes] == [(2, "gradient", 1, "2")]
    assert f"step 2: gradient is nan, first in unit 2 of rank 1: {answer}" in records
    assert found["zero_fn_not_finite_total"] == 1 and found["zero_fn_spikes_total"] == 0
    assert metrics.skipped == (answer != "report")
    if answer == "report":
        assert not all(tensor.isfinite().all() for tensor in after)
    elif answer == "skip":
        assert all(map(torch.equal, after, before)) and metrics.loaded is None
    else:
        assert all(map(torch.equal, after, saved)) and metrics.loaded == {"step": 0}


@on_ranks(2)
def test_a_spike_is_answered_by_a_function_alike_on_all_ranks():
    model, optimizer = built()
    seen = []
    took = []

    def answer(spike):
        seen.append(spike)
        return "skip"

    with zf.metrics(model, optimizer, every=1, on_spike=answer) as metrics:
        for number in range(14):
            began = time.perf_counter()
            if number == 12:
                time.sleep(20 * median(took))  # a spike, however busy the machine is
            before = values_of(model)
            x = torch.randn(8, 32) * (1000.0 if number == 13 else 1.0)
            metrics.step(step(model, optimizer, x))
            took.append(time.perf_counter() - began)
    assert [(spike.step, spike.what) for spike in seen if spike.what != "loss"] == [(12, "step"), (13, "gradient")]
    assert all(map(torch.equal, values_of(model), before)) and metrics.skipped == 1
    assert f"{seen[-1].value / seen[-1].usual:.0f} times the median" in str(seen[-1])


def test_few_numbers_make_no_spike():
    spikes = Spikes()
    assert all(spikes.look_at(number, "loss", value) is None for number, value in enumerate([1.0] * 9 + [50.0]))
    found = spikes.look_at(10, "loss", 51.0)
    assert (found.usual, found.value) == (1.0, 51.0)
    assert spikes.look_at(11, "loss", math.inf) == Spike(11, "loss", math.inf, 1.0)


def test_mistakes_are_refused():
    with alone() as mesh:
        model = zf.shard_params(Layer(), mesh)
        optimizer = AdamW(model.parameters())
        with refused("metrics_of_no_step"):
            zf.metrics(model, optimizer, every=0)
        with refused("spikes_are_answered_by_no_word"):
            zf.metrics(model, optimizer, on_spike="stop")
        with refused("spikes_load_from_nowhere"):
            zf.metrics(model, optimizer, on_spike="load")
        with pytest.raises(zf.errors.ConfigError):
            zf.metrics(model, optimizer, sinks=["nowhere"])
        with pytest.raises(zf.errors.StateError):
            zf.metrics(nn.Linear(2, 2), optimizer)
    assert watching.watchers == () and not optimizer._optimizer_step_pre_hooks
