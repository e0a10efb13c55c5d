"""Optimizers of users are streamed at their word: what they keep in states is kept as in memory, the others are refused."""

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import zero_fn as zf


class Users(Optimizer):
    """SGD whose update is a function of users: it gets a parameter and its states."""

    def __init__(self, params, update):
        super().__init__(params, {"lr": 0.1})
        self.update, self.counts = update, [0]

    @torch.no_grad()
    def step(self, closure=None):
        self.counts[0] += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(self.update(p, self.state[p]), alpha=-group["lr"])


def exchanges_states(p, state):
    if not state:
        state["one"], state["other"] = torch.zeros_like(p), torch.ones_like(p)
    state["one"], state["other"] = state["other"], state["one"]
    one = state["one"].add_(p.grad)
    return one + 0.5 * state["other"]


def hands_states_on(p, state):
    assert p.grad is not None
    if not state:
        state["last"], state["before"], state["first"] = (torch.full_like(p, i) for i in range(3))
    state["first"], state["before"], state["last"] = state["before"], state["last"], p.grad.clone()
    found = state["last"] + 0.5 * state["before"] + 0.1 * state["first"]
    return found


def reads_dims_and_attributes(p, state):
    state["momentum"] = momentum = 0.5 * state.get("momentum", 0.0) + p.grad
    update = momentum * p.scale
    return update + 0.1 * p if p.ndim > 1 else update


def shares_memory_of_states(p, state):
    if not state:
        state["momentum"] = torch.zeros_like(p)
        state["flat"] = state["momentum"].view(-1)
    momentum = state["momentum"]
    return momentum


KEPT = [exchanges_states, hands_states_on, reads_dims_and_attributes]


def parameters():
    generator = torch.Generator().manual_seed(0)
    shapes = [(40, 30), (40, 30), (20_000,), (), (130, 140)]
    found = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    for number, parameter in enumerate(found):
        parameter.scale = 1 + number
    return found


def steps(optimizer, ours):
    for number in range(4):
        generator = torch.Generator().manual_seed(number)
        for at, p in enumerate(ours):
            grad = torch.randn(p.shape, generator=generator)
            p.grad = grad if number != 2 or at else None
        optimizer.step()


@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("update", KEPT)
def test_what_it_keeps_in_states_is_kept(tmp_path, update, away):
    """In several chunks; with parameters on the disk too, in one for each parcel."""
    plain = parameters()
    held = nn.ParameterList(parameters())
    if away:
        held = zf.offload(held, params=zf.nvme(tmp_path))
    inner = Users(held.parameters(), update)
    optimizer = zf.streamed(inner, zf.nvme(tmp_path), buffer="1MiB" if away else "64KiB", elementwise=True)
    assert away or len(optimizer.states.chunks) > 1
    assert inner.counts == [0], "the trial step stepped the optimizer itself"
    steps(Users(plain, update), plain)
    steps(optimizer, list(held.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(held.parameters(), plain, strict=True))


class Derived(torch.optim.AdamW):
    """May do anything before or after the step that it is derived from."""


@pytest.mark.parametrize(
    ("update", "word"), [(None, False), *((update, False) for update in KEPT), (shares_memory_of_states, True)]
)
def test_others_are_refused(tmp_path, update, word):
    """Those for which nobody gave a word, and one whose states share memory. They go on as ever."""
    plain, ours = parameters(), parameters()
    stock, optimizer = (Derived(ps) if update is None else Users(ps, update) for ps in (plain, ours))
    fix = "keep one of them" if word else "elementwise=True"
    with pytest.raises(zf.PlacementError, match=rf"(?s)cannot be streamed.*fix.*{fix}"):
        zf.streamed(optimizer, zf.nvme(tmp_path), elementwise=word)
    steps(optimizer, ours)
    steps(stock, plain)
    assert all(torch.equal(one, other) for one, other in zip(ours, plain, strict=True))


def test_an_option_that_looks_at_whole_tensors_is_refused_later_too(tmp_path):
    optimizer = zf.streamed(Users(parameters(), exchanges_states), zf.nvme(tmp_path), elementwise=True)
    optimizer.param_groups[0]["cautious"] = True
    with pytest.raises(zf.PlacementError, match=r"(?s)The states of Users cannot be streamed.*whole tensors"):
        optimizer.step()


def test_tensors_of_groups_stay_the_same(tmp_path):
    rate = torch.tensor(0.1)
    optimizer = Users(parameters(), exchanges_states)
    optimizer.param_groups[0]["lr"] = rate
    streamed = zf.streamed(optimizer, zf.nvme(tmp_path), buffer="64KiB", elementwise=True)
    steps(streamed, list(optimizer.param_groups[0]["params"]))
    assert streamed.param_groups[0]["lr"] is rate
    assert rate == 0.1
