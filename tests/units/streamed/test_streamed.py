"""Optimizers whose states are in another tier: the bits of the same one without, bounded memory, typed errors."""

import copy
import errno
import importlib
import re
import sys
from contextlib import nullcontext
from ctypes import CDLL
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

import zero_fn as zf
from tests.promises.test_optimizers import ELEMENTWISE
from tests.support.groups import alone
from tests.support.messages import Headed, a_batch, refusals, refused
from tests.support.resident import forget_peak, in_new_process, peak_nbytes
from tests.units.storage.disks import answers, failing
from zero_fn.kernels import Library
from zero_fn.kernels.adam import Rounding
from zero_fn.storage.host_memory import Available

KIB = 1024
fused_adam = importlib.import_module("zero_fn.streamed.fused_adam")  # `zero_fn.streamed` is the function


class Users(Optimizer):
    """As users write them: no `foreach`; its update is a function that gets a parameter and its states."""

    def __init__(self, params, update, lr=0.1):
        super().__init__(params, {"lr": lr})
        self.update, self.counts = update, [0]

    @torch.no_grad()
    def step(self, closure=None):
        self.counts[0] += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(self.update(p, self.state[p]), alpha=-group["lr"])


def lion(p, state):
    """A state that is made at the first step and is another tensor each time, and a count beside it."""
    average, state["count"] = state.get("exp_avg", torch.zeros_like(p)), state.get("count", 0) + 1
    state["exp_avg"] = average * 0.99 + p.grad * 0.01
    return average.mul(0.9).add(p.grad, alpha=0.1).sign_() / state["count"] + 0.1 * p


def exchanges_states(p, state):
    if not state:
        state["one"], state["other"] = torch.zeros_like(p), torch.ones_like(p)
    state["one"], state["other"] = state["other"], state["one"]
    return state["one"].add_(p.grad) + 0.5 * state["other"]


def hands_states_on(p, state):
    if not state:
        state["last"], state["before"], state["first"] = (torch.full_like(p, i) for i in range(3))
    state["first"], state["before"], state["last"] = state["before"], state["last"], p.grad.clone()
    return state["last"] + 0.5 * state["before"] + 0.1 * state["first"]


def reads_dims_and_attributes(p, state):
    state["momentum"] = 0.5 * state.get("momentum", 0.0) + p.grad
    update = state["momentum"] * p.scale
    return update + 0.1 * p if p.ndim > 1 else update


def shares_memory_of_states(p, state):
    if not state:
        state["momentum"] = torch.zeros_like(p)
        state["flat"] = state["momentum"].view(-1)
    return state["momentum"]


KEPT = {update.__name__: update for update in (lion, exchanges_states, hands_states_on, reads_dims_and_attributes)}
"""What optimizers of users keep in states as in memory, at their word."""

OPTIMIZERS = {
    **ELEMENTWISE,
    "adamw": torch.optim.AdamW,
    "adamw, fused": lambda ps: torch.optim.AdamW(ps, fused=True),
    "adamw, foreach, amsgrad": lambda ps: torch.optim.AdamW(ps, foreach=True, amsgrad=True),
    "adamw, fused, amsgrad": lambda ps: torch.optim.AdamW(ps, fused=True, amsgrad=True, maximize=True),
    "adamw, fused, tensor": lambda ps: torch.optim.AdamW(ps, fused=True, lr=torch.tensor(0.01)),
    "adam, fused": lambda ps: torch.optim.Adam(ps, fused=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "sgd, momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
    "sgd, momentum, fused": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, fused=True),
    "rprop": torch.optim.Rprop,
    "asgd": lambda ps: torch.optim.ASGD(ps, lr=0.1, t0=1),
    **{name: partial(Users, update=update) for name, update in KEPT.items()},
}


def make(name, shapes, turned=False):
    """Parameters in two groups, and an optimizer over them."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    values = [value.t() if turned and value.dim() == 2 else value for value in values]
    parameters = [nn.Parameter(value) for value in values]
    for number, parameter in enumerate(parameters):
        parameter.scale = 1 + number
    return parameters, over(name, parameters)


def beside(path, name, shapes, **options):
    """Parameters and a streamed optimizer, and the same in memory."""
    (parameters, inner), (twins, stock) = make(name, shapes), make(name, shapes)
    return parameters, zf.streamed(inner, zf.nvme(path), **options), twins, stock


def over(name, parameters):
    half = len(parameters) // 2
    groups = [{"params": parameters[:half], "lr": 0.02}] if half else []
    return OPTIMIZERS[name]([*groups, {"params": parameters[half:]}])


def run(parameters, optimizer, steps, skipped=0):
    """Steps with seeded gradients; parameter number `skipped - 1` gets its first gradient in step 1.

    Fused optimizers get gradients that lie as their parameters do, which backward sees to: given others, those of torch
    for the CPU take the wrong elements (2.13).
    """
    for step in steps:
        for number, parameter in enumerate(parameters):
            generator = torch.Generator().manual_seed(100 * step + number)
            grad = torch.randn(parameter.shape, generator=generator)
            if optimizer.param_groups[0].get("fused"):
                grad = torch.empty_like(parameter).copy_(grad)
            parameter.grad = None if number == skipped - 1 and step == 0 else grad
        optimizer.step()


def same(one, other):
    """Whether two state dicts, lists or values are equal to the bit."""
    if isinstance(one, Tensor):
        return type(one) is type(other) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


shapes = st.lists(
    st.one_of(
        st.tuples(), st.tuples(st.integers(0, 5000)), st.tuples(st.integers(1, 130), st.integers(1, 130))
    ),
    min_size=1,
    max_size=5,
)  # fmt: skip


@given(
    name=st.sampled_from(sorted(OPTIMIZERS)),
    shapes=shapes,
    buffer=st.sampled_from([13, 16, 20, 31, 64, 200]),
    turned=st.booleans(),
    on_disk=st.booleans(),
    skipped=st.integers(0, 5),
    warm=st.integers(0, 1),
    fraction=st.sampled_from([1.0, 0.25, 0.9]),
    has_kernels=st.booleans(),
    loads=st.booleans(),
)
@example("adamw, fused", [(9973,), (3,)], 13, False, True, 0, 0, 1.0, True, True)
@example("adamw, fused, amsgrad", [(70, 100), (3,), (9973,)], 31, False, True, 1, 0, 1.0, False, False)
@example("adamw, fused, tensor", [(70, 100), (3,), (9973,)], 31, False, True, 1, 0, 1.0, True, False)
@example("adam, fused", [(200_003,)], 13, False, False, 0, 0, 1.0, True, False)
@example("sgd, momentum, fused", [(200_003,)], 13, False, False, 0, 0, 1.0, True, False)
@example("Adagrad", [(70, 100), (3,), ()], 16, False, True, 0, 1, 1.0, True, True)
@example("exchanges_states", [(40, 30), (20_000,), ()], 64, False, True, 1, 0, 1.0, True, False)
@example("hands_states_on", [(40, 30), (20_000,), ()], 64, False, True, 0, 1, 1.0, True, True)
@example("reads_dims_and_attributes", [(40, 30), (130, 140), ()], 64, False, True, 1, 0, 1.0, True, False)
@example("lion", [(120, 130), (7, 5), ()], 13, True, True, 1, 1, 0.25, True, True)
def test_streaming_changes_no_bit(
    tmp_path_factory,
    name,
    shapes,
    buffer,
    turned,
    on_disk,
    skipped,
    warm,
    fraction,
    has_kernels,
    loads,
):
    """Of parameters, states and groups; with states from before, or loaded, and with parameters that join later."""
    expected, stock = make(name, shapes, turned)
    parameters, inner = make(name, shapes, turned)
    tier = zf.nvme(tmp_path_factory.getbasetemp()) if on_disk else zf.cpu()
    options = {"buffer": buffer * KIB, "elementwise": name in KEPT, "fraction": fraction}
    lacking = (
        nullcontext() if has_kernels else patch("zero_fn.kernels.compiler.library", lambda: Library(None, "a test"))
    )
    with lacking:
        run(expected, stock, range(2), skipped)
        run(parameters, inner, range(warm), skipped)
        optimizer = zf.streamed(inner, tier, **options)
        run(parameters, optimizer, range(warm, 2), skipped)
        if loads:
            optimizer = zf.streamed(over(name, parameters), tier, **options)
            optimizer.load_state_dict(copy.deepcopy(stock.state_dict()))
        run(expected, stock, range(2, 4), skipped)
        run(parameters, optimizer, range(2, 4), skipped)
    assert same(parameters, expected)
    assert same(optimizer.state_dict(), stock.state_dict())


@pytest.mark.parametrize("name", KEPT)
def test_what_optimizers_of_users_keep_is_kept_where_parameters_are_on_the_disk_too(tmp_path, name):
    """In a chunk for each parcel. What it steps is not the optimizer that was given."""
    plain, stock = make(name, [(40, 30), (130, 140)])
    held = zf.offload(nn.ParameterList(make(name, [(40, 30), (130, 140)])[0]), params=zf.nvme(tmp_path))
    for number, parameter in enumerate(held.parameters()):
        parameter.scale = 1 + number
    inner = over(name, list(held.parameters()))
    optimizer = zf.streamed(inner, zf.nvme(tmp_path), buffer="1MiB", elementwise=True)
    assert inner.counts == [0], "the trial step stepped the optimizer itself"
    run(plain, stock, range(3))
    run(list(held.parameters()), optimizer, range(3))
    assert all(map(torch.equal, held.parameters(), plain))


class Clipping(torch.optim.AdamW):
    """May do anything before or after the step that it is derived from."""


@pytest.mark.parametrize("name", ["streamed_optimizer_that_clips", "streamed_states_share_memory"])
def test_others_are_refused_and_go_on_as_ever(tmp_path, name):
    """Those for which nobody gave a word, and one whose states share memory."""
    shares = "share" in name
    (ours, _), (plain, _) = make("sgd", [(40, 30), (5,)]), make("sgd", [(40, 30), (5,)])
    optimizer, stock = (Users(ps, shares_memory_of_states) if shares else Clipping(ps) for ps in (ours, plain))
    with refused(name):
        zf.streamed(optimizer, zf.nvme(tmp_path), elementwise=shares)
    run(ours, optimizer, range(3), skipped=1)
    run(plain, stock, range(3), skipped=1)
    assert same(ours, plain)


def test_an_option_that_looks_at_whole_tensors_is_refused_later_too(tmp_path):
    optimizer = zf.streamed(make("lion", [(40, 30)])[1], zf.nvme(tmp_path), elementwise=True)
    optimizer.param_groups[0]["cautious"] = True
    with pytest.raises(zf.errors.PlacementError, match=r"(?s)The states of Users cannot be streamed.*whole tensors"):
        optimizer.step()


def test_tensors_of_groups_stay_the_same(tmp_path):
    rate = torch.tensor(0.1)
    parameters, inner = make("exchanges_states", [(40, 30), (20_000,)])
    inner.param_groups[0]["lr"] = rate
    optimizer = zf.streamed(inner, zf.nvme(tmp_path), buffer="64KiB", elementwise=True)
    run(parameters, optimizer, range(2))
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate == 0.1


def test_a_flattened_checkpoint_of_an_optimizer_without_states_is_loaded(tmp_path):
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model = nn.Linear(3, 2)
    optimizer = zf.streamed(torch.optim.SGD(model.parameters(), lr=0.5), zf.nvme(tmp_path))
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    fresh = zf.streamed(torch.optim.SGD(model.parameters(), lr=0.1), zf.nvme(tmp_path))
    set_optimizer_state_dict(model, fresh, saved, options=options)
    assert fresh.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("driver", ["a schedule of before", "a schedule", "a compiler"])
def test_what_drives_an_optimizer_drives_a_streamed_one(tmp_path, driver):
    """A compiler traced the pipeline of chunks: values were wrong, or it failed inside."""
    torch._dynamo.reset()
    found = []
    for stream in (False, True):
        parameters, optimizer = make("adamw", [(120, 130), (7, 5)])
        early = CosineAnnealingLR(optimizer, 4) if driver == "a schedule of before" else None
        optimizer = zf.streamed(optimizer, zf.nvme(tmp_path), buffer="20KiB") if stream else optimizer
        late = CosineAnnealingLR(optimizer, 4) if driver == "a schedule" else None
        step = torch.compile(optimizer.step, backend="eager") if stream and driver == "a compiler" else optimizer.step
        driven = SimpleNamespace(step=step, param_groups=optimizer.param_groups)
        for number in range(4):
            run(parameters, driven, [number])
            for schedule in filter(None, (early, late)):
                schedule.step()
        found.append((parameters, optimizer.state_dict()["param_groups"]))
    assert same(*found)


@pytest.mark.parametrize("first", [1, 2, 7])
@pytest.mark.parametrize("name", ["adamw", "sgd, momentum"])
@pytest.mark.parametrize("away", [False, True])
def test_a_group_that_is_added_is_streamed(tmp_path, name, first, away):
    """It may share a unit with others: each of the two wrote back what the other had changed, and the disk was blamed."""
    found = []
    for stream in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        model = zf.offload(model, params=zf.nvme(tmp_path)) if stream and away else model
        parameters = list(model.parameters())
        optimizer = OPTIMIZERS[name](parameters[:first])
        optimizer = zf.streamed(optimizer, zf.nvme(tmp_path), buffer="16KiB") if stream else optimizer
        for step in range(4):
            if step == 2:
                optimizer.add_param_group({"params": parameters[first:], "lr": 0.05})
            model.zero_grad()
            model(torch.ones(2, 8) * step).square().sum().backward()
            optimizer.step()
        found.append(([p.detach().clone() for p in parameters], optimizer.state_dict()))
    assert same(*found)


def test_a_buffer_too_small_is_told_what_all_parcels_need(tmp_path):
    model = zf.offload(nn.Sequential(nn.Linear(8, 8), nn.Linear(64, 64)), params=zf.nvme(tmp_path))
    optimizer = torch.optim.AdamW(model.parameters())
    with refused("streamed_in_too_small_a_buffer") as told:
        zf.streamed(optimizer, zf.nvme(tmp_path), buffer=64)
    (needed,) = re.findall(r"buffer=(\d+) or more", told.value.fix)
    zf.streamed(optimizer, zf.nvme(tmp_path), buffer=int(needed))


def test_closures_hooks_and_scalers_see_one_step(tmp_path):
    parameters, inner = make("adamw", [(30, 40)])
    calls = []
    inner.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer = zf.streamed(inner, zf.nvme(tmp_path), buffer="16KiB")
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))

    def closure():
        loss = parameters[0].square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).requires_grad
    assert calls == ["pre", "post"]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = copy.deepcopy(optimizer.state_dict()), parameters[0].detach().clone()
    scaler.scale(torch.zeros(()))
    parameters[0].grad = torch.full_like(parameters[0], torch.inf)
    scaler.step(optimizer)
    scaler.update()
    assert same((optimizer.state_dict(), parameters[0].detach()), before)
    optimizer.zero_grad()
    assert parameters[0].grad is None


def _growth_of_steps(path):
    parameters = [nn.Parameter(torch.ones(1 << 20)) for _ in range(8)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    inner = torch.optim.AdamW(parameters, fused=True)
    warm = nn.Parameter(torch.ones(1 << 20))  # what any first step loads, and what the allocator learns from it
    warm.grad = torch.ones_like(warm)
    zf.streamed(torch.optim.AdamW([warm], fused=True), zf.nvme(path), buffer="512KiB").step()
    forget_peak()
    before = peak_nbytes()
    optimizer = zf.streamed(inner, zf.nvme(path), buffer="512KiB")
    assert optimizer.buffers_nbytes == 2 << 20
    for _ in range(2):
        optimizer.step()
    assert zf.memory(nn.ParameterList(parameters), optimizer).buffers == 2 << 20
    return peak_nbytes() - before


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the peak of memory")
def test_resident_memory_is_bounded_by_the_buffers(tmp_path):
    """States of 64 MiB, buffers of 2 MiB; 2.5 MiB were seen."""
    assert in_new_process(_growth_of_steps, str(tmp_path)) < 4 << 20


def test_buffers_are_no_larger_than_what_passes_through_them(tmp_path):
    parameters, inner = make("adamw", [(64, 64), (3,)])
    optimizer = zf.streamed(inner, zf.nvme(tmp_path))
    assert optimizer.buffers_nbytes == 36 * KIB  # one chunk: 32 KiB and a little, in whole pages
    run(parameters, optimizer, [0])
    late = nn.Parameter(torch.ones(128, 128))
    optimizer.add_param_group({"params": [late]})
    assert optimizer.buffers_nbytes == (36 + 128) * KIB
    run([*parameters, late], optimizer, [1])


def test_a_step_inside_accumulate_is_refused_as_ever(tmp_path):
    with alone() as mesh:
        model = zf.shard_params(Headed(), mesh)
        optimizer = zf.streamed(torch.optim.AdamW(model.parameters()), zf.nvme(tmp_path))
        with zf.accumulate(model), refused("step_inside_accumulate"):
            model(a_batch()).sum().backward()
            optimizer.step()


# -- faults ----------------------------------------------------------------------------------------------------------


def test_a_disk_that_fails_while_states_move_leaves_them(tmp_path, monkeypatch):
    parameters, inner = make("adamw", [(100, 100)] * 4)
    run(parameters, inner, [0])
    answers(monkeypatch, lambda request, result: -errno.EIO if request.begin else result)
    with pytest.raises(zf.errors.StorageError, match="Writing to states of AdamW"):
        zf.streamed(inner, zf.nvme(tmp_path), buffer="128KiB")
    expected, stock = make("adamw", [(100, 100)] * 4)
    run(expected, stock, [0])
    assert same(inner.state_dict(), stock.state_dict())


def test_memory_too_small_for_the_buffers_is_refused(tmp_path, monkeypatch):
    _, inner = make("adamw", [(100, 100)])
    monkeypatch.setattr("zero_fn.storage.host_memory.available", lambda: Available(64 * KIB, "cgroup /job"))
    with pytest.raises(zf.errors.TierError, match=r"(?s)buffers of states of AdamW need 80\.00 KiB.*cgroup /job"):
        zf.streamed(inner, zf.nvme(tmp_path))
    zf.streamed(inner, zf.nvme(tmp_path), buffer="16KiB")


@pytest.mark.parametrize(("chunks", "expected"), [(3, [0, 0, 0, 0]), (9, [0, 5, 5, 5])])
def test_a_step_begins_with_what_is_in_memory_still(tmp_path, monkeypatch, chunks, expected):
    """The four chunks that the step before computed last are not read. Whatever comes between leaves the bits alone."""
    reads = []
    parameters, optimizer, twins, stock = beside(tmp_path, "adamw", [(100, 100)] * chunks, buffer="128KiB")
    answers(monkeypatch, lambda request, result: reads.append(not request.is_write) or result)
    found = []
    for step in range(4):
        reads.clear()
        run(parameters, optimizer, [step])
        found.append(sum(reads))
    assert found == expected
    assert same(optimizer.state_dict()["state"][0]["step"], torch.tensor(4.0))  # leaves other chunks in the buffers
    run(parameters, optimizer, range(4, 7), skipped=2)
    run(twins, stock, range(4))
    run(twins, stock, range(4, 7), skipped=2)
    assert same(parameters, twins)
    assert same(optimizer.state_dict(), stock.state_dict())


@pytest.mark.parametrize("kind", [torch.optim.Muon, torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.SparseAdam])
def test_optimizers_that_cannot_be_cut_are_refused(tmp_path, kind):
    matrix = nn.Parameter(torch.randn(64, 64))
    for word in (False, True):
        with pytest.raises(zf.errors.PlacementError, match="cannot be streamed"):
            zf.streamed(kind([matrix]), zf.nvme(tmp_path), elementwise=word)


def test_states_are_read_through_the_state_dict(tmp_path):
    parameters, inner = make("adamw", [(3, 4)])
    optimizer = zf.streamed(inner, zf.nvme(tmp_path))
    run(parameters, optimizer, range(2))
    (states,) = optimizer.state.values()
    assert states["step"] == 2 and states["exp_avg"] is None
    edits = [
        lambda: optimizer.state.clear(),
        lambda: optimizer.state.pop(parameters[0]),
        lambda: states.update(step=1),
        lambda: states.__setitem__("step", 1),
        lambda: setattr(optimizer, "state", {}),
    ]
    for edit in edits:
        with pytest.raises(AttributeError):
            edit()


@pytest.mark.parametrize(
    "use",
    [
        lambda inner, _: inner.step(),
        lambda inner, _: inner.state_dict(),
        lambda inner, saved: inner.load_state_dict(saved),
        lambda inner, _: zf.streamed(inner, zf.cpu()),
        lambda inner, _: zf.streamed(
            zf.streamed(torch.optim.AdamW(inner.param_groups[0]["params"]), zf.cpu()), zf.cpu()
        ),
    ],
)
def test_the_optimizer_that_was_given_is_not_used_any_more(tmp_path, use):
    """It had stepped with states of its own, saved none, and dropped what it loaded, silently."""
    parameters, inner = make("adamw", [(3, 4)])
    optimizer = zf.streamed(inner, zf.nvme(tmp_path))
    run(parameters, optimizer, range(2))
    with refused("step_of_what_was_streamed"):
        use(inner, optimizer.state_dict())
    twins, stock = make("adamw", [(3, 4)])
    run(twins, stock, range(3))
    run(parameters, optimizer, range(2, 3))
    assert same(parameters, twins)


def test_a_parameter_that_was_cast_or_has_another_shape_is_refused_before_any_update(tmp_path):
    parameters, inner = make("adamw", [(30, 40), (5,)])
    optimizer = zf.streamed(inner, zf.nvme(tmp_path))
    run(parameters, optimizer, [0])
    before = [p.detach().clone() for p in parameters]
    for data in (before[0].double(), before[0].view(40, 30), before[0].view(1, 1200)):
        parameters[0].grad = None
        parameters[0].data = data
        parameters[0].grad = torch.ones_like(data)
        is_cast = data.dtype == torch.float64
        with (
            refused("streamed_parameter_was_cast")
            if is_cast
            else pytest.raises(zf.errors.StateError, match="has changed since")
        ):
            optimizer.step()
        assert torch.equal(parameters[0].view(-1).float(), before[0].view(-1)) and torch.equal(parameters[1], before[1])


# -- refused -----------------------------------------------------------------------------------------------------------


def _linear():
    model = nn.Linear(64, 64)
    model(torch.ones(1, 64)).sum().backward()
    return model, torch.optim.AdamW(model.parameters())


def _after_a_failed_step(folder):
    optimizer = zf.streamed(_linear()[1], zf.nvme(folder), buffer="16KiB")
    optimizer.step()
    with failing(reads=False), pytest.raises(zf.errors.StorageError):
        optimizer.step()
    optimizer.step()


def _of_a_sparse_gradient():
    model, inner = _linear()
    model.bias.grad = torch.ones(64).to_sparse()
    zf.streamed(inner, zf.cpu()).step()


def _of_a_gradient_elsewhere(one):
    model = zf.shard_params(nn.Linear(4, 4), one)
    optimizer = zf.streamed(torch.optim.AdamW(model.parameters()), zf.cpu())
    other = init_device_mesh("cpu", (1,), mesh_dim_names=("other",))
    model.weight.grad = distribute_tensor(torch.ones(4, 4), other, [Shard(0)])
    optimizer.step()


def _of_a_state_of_another_shape():
    optimizer = zf.streamed(torch.optim.Adagrad(nn.Linear(4, 3).parameters()), zf.cpu())
    saved = optimizer.state_dict()
    saved["state"][0]["sum"] = torch.zeros(2, 4)
    optimizer.load_state_dict(saved)


def _of_a_matrix_with_gaps(folder):
    matrix = nn.Parameter(torch.ones(64, 128)[:, ::2])
    zf.streamed(torch.optim.AdamW([matrix]), zf.nvme(folder), buffer="8KiB")


def _clipped_inside_accumulate(model):
    with zf.accumulate(model):
        model(a_batch()).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def _by_owner(model):
    return zf.by_owner(torch.optim.SGD(model.parameters()))


def _by_owner_of_a_sparse_gradient():
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    _by_owner(table).step()


test_refusals = refusals(
    {
        "tier_buffer_is_too_small": lambda: zf.streamed(_linear()[1], zf.cpu(), buffer="4KiB"),
        "streamed_without_a_tier": lambda: zf.streamed(_linear()[1]),
        "streamed_of_no_fraction": lambda: zf.streamed(_linear()[1], zf.cpu(), fraction=2.0),
        "streamed_until_no_moment": lambda: zf.streamed(_linear()[1], zf.cpu(), finish="backward"),
        "streamed_optimizer_cannot_wait": lambda: zf.streamed(
            Users(_linear()[0].parameters(), lion), zf.cpu(), finish="forward", elementwise=True
        ),
        "streamed_and_copied": lambda folder: copy.deepcopy(zf.streamed(_linear()[1], zf.nvme(folder))),
        "streamed_after_a_failed_step": _after_a_failed_step,
        "streamed_gradient_is_sparse": _of_a_sparse_gradient,
        "streamed_gradient_rests_elsewhere": _of_a_gradient_elsewhere,
        "streamed_state_of_another_shape": _of_a_state_of_another_shape,
        "streamed_matrix_is_cut": _of_a_matrix_with_gaps,
        "gradient_read_inside_accumulate": _clipped_inside_accumulate,
        "embedding_is_sparse": lambda two: zf.shard_params(
            nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4)), two
        ),
        "owners_are_copied": lambda model: copy.deepcopy(_by_owner(model)),
        "step_by_owners_of_sparse_gradients": _by_owner_of_a_sparse_gradient,
    }
)


# -- one pass --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_kernels", [True, False])
def test_gradients_in_bfloat16_are_stepped_as_if_cast_before(tmp_path, monkeypatch, has_kernels):
    if not has_kernels:
        monkeypatch.setattr("zero_fn.kernels.compiler.library", lambda: Library(None, "for this test"))
    parameters, optimizer, expected, stock = beside(tmp_path, "adamw, fused", [(70, 100), (9973,)], buffer="31KiB")
    for step in range(3):
        for number, (parameter, twin) in enumerate(zip(parameters, expected, strict=True)):
            generator = torch.Generator().manual_seed(100 * step + number)
            parameter.grad_dtype = torch.bfloat16
            parameter.grad = torch.randn(parameter.shape, generator=generator).bfloat16()
            twin.grad = parameter.grad.float()
        optimizer.step()
        stock.step()
    assert same(parameters, expected)


def test_what_the_kernel_does_not_do_is_done_by_torch(monkeypatch):
    """Other classes, other groups, other dtypes, other strides, a scale left to the optimizer; seen by whom is called."""
    calls = []
    monkeypatch.setattr(fused_adam, "in_c", lambda pieces, *_: calls.append(len(pieces)))
    monkeypatch.setattr(fused_adam, "rounding", lambda rates: Rounding(True, 2, 1, 8))

    class Mine(torch.optim.AdamW):
        pass

    def made(kind=torch.optim.AdamW, dtype=torch.float32, **options):
        return kind([nn.Parameter(torch.ones(8, 4, dtype=dtype))], **options)

    def stepped(inner, grad=None, **scales):
        (parameter,) = inner.param_groups[0]["params"]
        optimizer = zf.streamed(inner, zf.cpu(), elementwise=type(inner) is Mine)
        vars(inner).update(scales)
        parameter.grad = torch.ones_like(parameter) if grad is None else grad
        calls.clear()
        optimizer.step()
        return calls

    for kind in (torch.optim.AdamW, torch.optim.Adam):
        assert stepped(made(kind, fused=True)) == [1]
    others = [made(), made(foreach=True), made(Mine, fused=True), made(torch.optim.SGD, fused=True)]
    others += [made(dtype=dtype, fused=True) for dtype in (torch.float64, torch.bfloat16)]
    assert not any(map(stepped, others))
    assert not stepped(made(fused=True), torch.ones(4, 8).t())
    overflown = made(fused=True)
    assert not stepped(overflown, found_inf=torch.ones(()), grad_scale=torch.ones(()))
    assert torch.equal(overflown.param_groups[0]["params"][0], torch.ones(8, 4))


def test_an_optimizer_says_who_steps_it(monkeypatch):
    """So that no path is taken in silence."""

    def says(optimizer):
        return repr(zf.streamed(optimizer, zf.cpu())).partition("\n")[0]

    def adamw(**options):
        return torch.optim.AdamW([nn.Parameter(torch.ones(3))], **options)

    way = Rounding(True, 2, 1, 8)
    monkeypatch.setattr(fused_adam, "rounding", lambda rates: way)
    monkeypatch.setattr(fused_adam, "library", lambda: Library(CDLL(None), "cc 1.0"))
    assert says(adamw(fused=True)).endswith("; stepped by compiled kernels (cc 1.0) in one pass)")
    assert says(adamw()).endswith("; stepped by torch; with fused=True by a kernel in one pass)")
    assert says(torch.optim.SGD([nn.Parameter(torch.ones(3))])).endswith("; stepped by torch)")
    monkeypatch.setattr(fused_adam, "rounding", lambda rates: None)
    assert "stepped by torch (the kernel does not have the bits of this step)" in says(adamw(fused=True))
    monkeypatch.setattr(fused_adam, "library", lambda: Library(None, "no C compiler was found"))
    assert "stepped by torch (no kernels: no C compiler was found)" in says(adamw(fused=True))
