"""Everything that takes an optimizer takes a sequence of them: Muon for matrices, AdamW for the rest.

Elsewhere: checkpoints in `test_resume.py` and `property_tests/test_checkpoint_laws.py`, bytes in `test_planned_bytes.py`,
trainers in `tests/outside/integrations/`.
"""

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer, lr_scheduler

import zero_fn as zf
from tests.support.messages import refused
from tests.support.on_ranks import on_ranks
from tests.support.programs import STAGES
from tests.support.ranks import axis
from tests.support.worlds import WIDTH, Tower, noise
from zero_fn import errors
from zero_fn.values.chained_optimizer import ChainedOptimizer, as_one

Two = tuple[Optimizer, Optimizer]


def made(stage="zero3", **tiers):
    """A tower, Muon for its matrices, and AdamW for its biases."""
    torch.manual_seed(0)
    model = STAGES[stage](Tower(), axis())
    model = zf.offload(model, **tiers) if tiers else model
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim != 2]
    muon = zf.by_owner(torch.optim.Muon(matrices, lr=0.02))
    adamw = torch.optim.AdamW(others, lr=0.01)
    return model, (zf.streamed(muon), zf.streamed(adamw)) if tiers else (muon, adamw)


def backward(model, seed=0):
    model(noise(4, WIDTH, seed=seed)).square().mean().backward()


def step(optimizers):
    for optimizer in optimizers:
        optimizer.step()
    for optimizer in optimizers:
        optimizer.zero_grad()


def wholes(model):
    return [parameter.full_tensor().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("tiers", [{}, {"optim": zf.cpu()}], ids=["in memory", "on the host"])
@on_ranks(2)
def test_what_is_planned_is_what_is_held_and_sent(tiers):
    model, two = made(**tiers)
    planned = zf.plan(model, two)
    alone = [zf.plan(model, each) for each in two]
    nothing = zf.plan(model, optimizer_nbytes_per_element=0)
    assert planned.sent_nbytes == sum(each.sent_nbytes for each in alone) - nothing.sent_nbytes
    assert planned.memory.optimizer == sum(each.memory.optimizer for each in alone)
    for number in range(2):
        with zf.traffic() as sent:
            backward(model, number)
            for optimizer in two:
                optimizer.step()
            held = zf.memory(model, two)
            model.zero_grad()
    assert planned.sent_nbytes == sum(sent.by_axis.values())
    assert (planned.memory.optimizer, planned.memory.tiers) == (held.optimizer, held.tiers)
    lines = str(zf.describe(model, two)).splitlines()
    assert sum("ByOwner" in line or "Streamed" in line for line in lines) == (2 if tiers else 1)


@on_ranks(2)
def test_a_check_wants_all_parameters_in_one_of_them():
    model, two = made()
    zf.check(model, [two])
    with pytest.raises(zf.errors.StaleError):
        zf.check(model, two[0])
    twice = torch.optim.SGD([next(model.parameters())], lr=0.1)
    for call in (zf.check, zf.memory, zf.plan, zf.profile, zf.metrics):
        with refused("parameter_in_two_optimizers"):
            call(model, (*two, twice))
    with refused("sequence_without_optimizers"):
        zf.check(model, [])


@on_ranks(2)
def test_metrics_measure_all_gradients_before_the_first_steps():
    model, two = made()
    with zf.metrics(model, two, every=1) as metrics:
        for seed in range(3):
            backward(model, seed)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            step(two)
            found = metrics.step()
            assert found["zero_fn_grad_norm"] == pytest.approx(float(norm.full_tensor()), rel=1e-5)
    assert found["zero_fn_steps_total"] == 3 and found["zero_fn_skipped_steps_total"] == 0
    assert [found[f'zero_fn_learning_rate{{group="{at}"}}'] for at in range(2)] == [0.02, 0.01]
    assert isinstance(seconds := found["zero_fn_optimizer_step_seconds"], list) and len(seconds) == 1


@on_ranks(2)
def test_a_step_that_is_skipped_is_skipped_by_all(folder):
    model, two = made()
    with zf.metrics(model, two, every=1, on_spike="load", checkpoints=folder) as metrics:
        backward(model)
        step(two)
        metrics.step()
        zf.save(f"{folder}/step-1", model, two)
        before = wholes(model)
        backward(model)
        for parameter in model.parameters():
            parameter.grad.mul_(float("nan"))
        step(two)
        found = metrics.step()
    assert found["zero_fn_skipped_steps_total"] == 1
    assert metrics.loaded is not None
    assert all(map(torch.equal, before, wholes(model)))


@on_ranks(2)
def test_a_step_of_a_profile_ends_once_each_has_stepped_and_an_offloaded_model_is_stepped_by_none():
    model, two = made()
    with zf.profile(model, two) as profile:
        for seed, order in enumerate((two, two[::-1], two)):
            backward(model, seed)
            step(order)
    assert len(profile.steps) == 3 * 2, "of each rank"
    assert all(0 < each.parts["optimizer"] < each.seconds for each in profile.steps)
    zf.offload_states(model, two)
    for optimizer in two:
        with pytest.raises(zf.errors.StateError):
            optimizer.step()
    zf.reload_states(model)
    backward(model)
    step(two)


@on_ranks(2)
def test_one_schedule_moves_the_rates_of_all():
    """As one optimizer, for a scheduler or a trainer: the numbers of a loop over both."""
    results = []
    for is_one in (False, True):
        model, two = made()
        one = as_one(two)
        schedule = lr_scheduler.StepLR(one, 1, 0.5)
        for seed in range(3):
            backward(model, seed)
            if is_one:
                one.step()
                one.zero_grad()
            else:
                step(two)
                one._opt_called = True
            schedule.step()
        results.append(wholes(model))
        assert [group["lr"] for group in one.param_groups] == [0.0025, 0.00125]
        again = as_one(made()[1])
        again.load_state_dict(one.state_dict())
        assert [group["lr"] for group in again.param_groups] == [0.0025, 0.00125]
        assert len(again.state) == len(one.state) == len([*model.parameters()])
    assert isinstance(one, ChainedOptimizer) and all(map(torch.equal, *results))
    assert one.step(lambda: 3.0) == 3.0
    with refused("group_for_several_optimizers"):
        one.add_param_group({"params": [torch.zeros(1)]})


# -- a checkpoint of one of them --------------------------------------------------------------------------------------


@on_ranks(2)
def test_an_optimizer_that_a_save_leaves_out_is_named_once(folder):
    model, (muon, adamw) = made()
    backward(model)
    step((muon, adamw))
    errors._said.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zf.save(f"{folder}/both", model, (muon, adamw))
        zf.save(f"{folder}/weights", model)  # as one who wants no states
    with pytest.warns(UserWarning, match=r"left_out +: AdamW\n.*parameters : 17, such as enter.bias, blocks.0.gate"):
        zf.save(f"{folder}/muon", model, muon)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zf.save(f"{folder}/again", model, muon)
    with pytest.raises(zf.errors.CheckpointError, match=r"bias/exp_avg: in the checkpoint, and not in the optimizer"):
        zf.load(f"{folder}/both", model, muon)
    with pytest.raises(zf.errors.CheckpointError, match=r"bias: no states of an optimizer in the checkpoint"):
        zf.load(f"{folder}/muon", model, (muon, adamw))
    with refused("checkpoint_of_shards_as_extra"):
        zf.save(f"{folder}/extra", model, muon, extra={"adamw": adamw})


@on_ranks(2)
def test_ranks_that_disagree_about_optimizers_are_told(folder):
    model, two = made()
    mine = (two[0], two[0]) if dist.get_rank() else two
    with pytest.raises(zf.errors.StateError):
        zf.save(f"{folder}/step-1", model, mine)
    assert not Path(folder, "step-1").exists()
    with pytest.raises(zf.errors.StateError):
        zf.load(f"{folder}/step-1", model, mine)


@on_ranks(2)
def test_two_models_that_train_together_are_one_checkpoint_and_one_copy(folder):
    """An actor and a critic, each with its optimizer: one schedule of copies, and both go back to one step."""

    def parts():
        torch.manual_seed(0)
        both = nn.ModuleDict(
            {"actor": zf.shard_params(Tower(), axis()), "critic": zf.shard_grads(nn.Linear(WIDTH, 1), axis())}
        )
        actor, critic = both.values()
        return both, (torch.optim.AdamW(actor.parameters()), torch.optim.SGD(critic.parameters(), 0.1, momentum=0.9))

    both, two = parts()
    with_copies = zf.checkpoint.memory_copies(folder, both, two, every=4)
    for seed in range(9):
        both["critic"](both["actor"](noise(4, WIDTH, seed=seed))).square().mean().backward()
        step(two)
        if with_copies.update(extra={"step": seed}):
            last, expected = seed, wholes(both)
    again, other = parts()
    said = zf.resume(folder, again, other)
    assert said is not None and said["step"] == last
    assert all(map(torch.equal, expected, wholes(again)))
    assert all(state for optimizer in other for state in optimizer.state.values())
    with_copies.close()
