"""The legs of a unit are what `describe` lists, what a gather makes, and what `plan` adds up."""

from collections import Counter

import pytest
import torch
from torch import nn

import zero_fn as zf
from tests.support.groups import pretended, pretended_grid
from zero_fn.runtime.leg import Spot
from zero_fn.runtime.registry import units_of
from zero_fn.transport.line import Line

WIDTH = 64
BF16 = torch.bfloat16


def _hpz(model, mesh):
    return zf.shard_params(zf.shard_grads(model, mesh["tp"]), mesh["dp"])


ONE_AXIS = {
    "replicate": (zf.replicate, "stays", "local ==dp==> gradient (float32) ==dp==> gradient (float32)"),
    "zero1": (zf.shard_optimizer, "whole ==dp==> whole (float32)", "local ==dp==> gradient (float32)"),
    "zero3": (zf.shard_params, "rest ==dp==> whole (float32)", "local ==dp==> gradient (float32)"),
    "zero3 in bfloat16": (
        lambda model, axis: zf.shard_params(zf.precision(model, compute=BF16), axis),
        "rest -> whole (bfloat16) ==dp==> whole (bfloat16)",
        "local ==dp==> gradient (bfloat16)",
    ),
    "int8": (
        lambda model, axis: zf.shard_params(zf.precision(model, gather=zf.wire.int8(), reduce=zf.wire.int4()), axis),
        "rest -> codes (int8) ==dp==> codes (int8) -> whole (bfloat16)",
        "local ==dp==> gradient (int4)",
    ),
    "differences": (
        lambda model, axis: zf.shard_grads(zf.precision(model, gather=zf.wire.delta4()), axis),
        "rest -> codes (int4, difference) ==dp==> codes (int4, difference) -> whole (bfloat16)",
        "local ==dp==> gradient (bfloat16)",
    ),
}


@pytest.mark.parametrize("name", ONE_AXIS)
def test_legs_over_one_axis(name):
    transform, up, down = ONE_AXIS[name]
    with pretended(2) as axis:
        model = transform(nn.Linear(WIDTH, WIDTH, bias=False), axis)
        assert zf.describe(model, legs=True).legs == (f"root up: {up}", f"root down: {down}")
        _require_that_moves_follow(model)


TWO_AXES = {
    "hpz": (
        lambda model, mesh: _hpz(model, mesh),
        "rest -> inner (bfloat16) ==tp==> inner (bfloat16), kept; inner -> whole (bfloat16) ==dp==> whole (bfloat16)",
    ),
    "hpz in int8": (
        lambda model, mesh: _hpz(zf.precision(model, gather=zf.wire.int8()), mesh),
        "rest -> inner (int8) ==tp==> inner (int8), kept; inner ==dp==> codes (int8) -> whole (bfloat16)",
    ),
    "hpz by differences": (
        lambda model, mesh: _hpz(zf.precision(model, gather=zf.wire.delta4()), mesh),
        "rest -> codes (int4, difference) ==tp==> codes (int4, difference) -> inner (bfloat16), kept; "
        "inner -> whole (bfloat16) ==dp==> whole (bfloat16)",
    ),
    "zero3 over both": (
        lambda model, mesh: zf.shard_params(zf.shard_params(model, mesh["tp"]), mesh["dp"]),
        "rest -> whole (bfloat16) ==dp==> whole (bfloat16) ==tp==> whole (bfloat16)",
    ),
}


@pytest.mark.parametrize("name", TWO_AXES)
def test_legs_over_two_axes(name):
    transform, up = TWO_AXES[name]
    with pretended_grid(2, 2) as mesh:
        model = transform(zf.precision(nn.Linear(WIDTH, WIDTH, bias=False), compute=BF16), mesh)
        assert zf.describe(model, legs=True).legs[0] == f"root up: {up}"
        _require_that_moves_follow(model)


def test_legs_from_a_disk(tmp_path):
    with pretended(2) as axis:
        plain = nn.Linear(WIDTH, WIDTH, bias=False)
        model = zf.shard_params(zf.offload(plain, params=zf.nvme(tmp_path)), axis)
        assert zf.describe(model, legs=True).legs[0] == "root up: tier -> whole (float32) ==dp==> whole (float32)"
        _require_that_moves_follow(model)


@pytest.mark.parametrize("failing", [0, 1], ids=["the move that is kept", "the last move"])
def test_a_move_that_raises_was_not_made(failing, monkeypatch):
    """Memory may run out in a gather, and be there when the caller tries again."""
    what = []

    def all_gather(line, plan, text, *, issue=Line.all_gather):
        what.append(text)
        if len(what) == failing + 1:
            raise MemoryError
        return issue(line, plan, text)

    with pretended_grid(2, 2) as mesh:
        model = _hpz(nn.Linear(WIDTH, WIDTH, bias=False), mesh)
        (unit,) = units_of(model)
        monkeypatch.setattr(Line, "all_gather", all_gather)
        with pytest.raises(MemoryError):
            unit.unshard()
        assert unit.gather.is_at_rest and not unit.gather.is_whole
        unit.require_gathered()
        unit.reshard()
    inner, last = "inner parameters of unit root", "parameters of unit root"
    assert what == ([inner, inner, last] if failing == 0 else [inner, last, last])


def _require_that_moves_follow(model):
    """A gather makes a move for each leg along an axis, with the same steps on this rank."""
    (unit,) = units_of(model)
    with torch.no_grad():
        model(torch.zeros(1, WIDTH, dtype=unit.slots[0].kind.compute_dtype))
    (group,) = unit.memory.groups
    along = [leg for leg in group.kind.up if leg.hop is not None]
    moves = unit.gather.moves
    assert [move.is_kept for move in moves] == ([leg.is_kept for leg in along] or [False])
    sent = Counter(line.axes[0].name for move in moves for line, _ in move.sends)
    assert sent == Counter(group.slots[0].path.hops[leg.hop].axis.name for leg in along)
    decoded = [leg for leg in group.kind.up if leg.source is Spot.CODES and leg.hop is None]
    assert sum(len(move.decode) for move in moves) == len(decoded)
    assert unit.gather.is_at_rest == (not group.kind.is_kept)
