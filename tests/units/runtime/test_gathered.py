"""The memory of gathered parameters comes and goes, and whoever holds a part of it keeps what he has."""

import pytest
import torch
from torch import Tensor, nn

import zero_fn as zf
from tests.support.groups import pretended
from zero_fn.runtime.registry import units_of
from zero_fn.runtime.run import run_of
from zero_fn.transport.line import Line

WIDTH = 8


class Block(nn.Linear):
    """A unit; calls `look` with its weight in forward, and `look_back` when backward comes to it."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.look = lambda weight: None
        self.look_back = lambda weight: None

    def forward(self, x):
        self.look(self.weight)
        y = super().forward(x)
        return _Reached.apply(y, self)


class _Reached(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, block):
        ctx.block = block
        return y.clone()

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            ctx.block.look_back(ctx.block.weight)
        return grad, None


def build():
    """Three units of ZeRO-3 on the first of two ranks, and the first unit, which is freed between forward and backward."""
    torch.manual_seed(0)
    with pretended(2) as axis:
        model = zf.shard_params(nn.Sequential(*(Block() for _ in range(3))), axis, units=Block)
    return model, next(unit for unit in units_of(model) if unit.name == "0")


def train(model, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, WIDTH)).square().mean().backward()
        optimizer.step()


def memory_of(unit):
    """The whole buffers of a unit at rest, to be used again."""
    memory = unit.gather.whole
    assert unit.gather.is_at_rest and memory is not None, "it was not kept"
    return memory


def lent_by(unit):
    """What the unit shows in backward."""
    lent = memory_of(unit).lent
    assert lent is not None, "nothing is shown in backward"
    return lent


def test_a_buffer_that_nobody_holds_gets_memory_again():
    model, unit = build()
    seen = []
    model[0].look = lambda weight: seen.append(weight.untyped_storage())
    train(model, 3)
    assert len(seen) == 3
    assert len({storage._cdata for storage in seen}) == 1
    assert seen[0].nbytes() == 0  # at rest
    assert memory_of(unit).buffers[0].untyped_storage() is seen[0]


@pytest.mark.parametrize(
    "hold",
    [lambda weight: weight, lambda weight: weight.detach(), lambda weight: weight.t()[:1]],
    ids=["the tensor", "another tensor", "a view"],
)
@pytest.mark.parametrize("moment", ["look", "look_back"])
def test_whoever_holds_a_part_of_a_gathered_buffer_keeps_it(hold, moment):
    """In forward the tensors are new each time; in backward they are lent, and one may be held without a view of it."""
    model, _ = build()
    train(model, 2)
    held = []

    def look(weight):
        part = hold(weight)
        held.append((part, part.detach().numpy().tobytes()))

    setattr(model[0], moment, look)
    train(model, 3)
    assert len({part.untyped_storage()._cdata for part, _ in held}) == 3
    for part, values in held:
        assert part.untyped_storage().nbytes()
        assert part.detach().numpy().tobytes() == values  # of the other rank's half too, which nothing was sent for


def test_a_buffer_that_numpy_has_seen_is_dropped():
    """torch refuses to resize it, also when the array is gone."""
    model, _ = build()
    seen = []

    def look(weight):
        weight.detach().numpy()
        seen.append(weight.untyped_storage()._cdata)

    model[0].look = look
    train(model, 2)
    assert len(seen) == 2


def test_what_backward_shows_is_made_once():
    model, unit = build()
    train(model, 1)
    lent = lent_by(unit)
    train(model, 2)
    assert lent_by(unit) is lent


@pytest.mark.parametrize("changes", [False, True])
def test_what_backward_has_shown_and_somebody_used_is_shown_no_more(changes):
    model, unit = build()
    train(model, 1)
    lent = lent_by(unit)
    model[0].look_back = lambda weight: weight.register_hook(lambda _: None)
    if changes:
        model[0].look_back = lambda weight: weight.mul_(1.0)
        with pytest.raises(zf.errors.PlacementError, match=r"changed '0.weight' in place"):
            train(model, 1)
    else:
        train(model, 1)
    model[0].look_back = lambda weight: None
    train(model, 1)
    assert lent_by(unit) is not lent


def test_parameters_that_were_frozen_are_shown_without_a_history():
    model, _ = build()
    train(model, 1)
    seen = []
    model[0].look_back = lambda weight: seen.append(weight.requires_grad)
    train(model, 1)
    model[0].weight.requires_grad_(False)
    train(model, 1)
    assert seen == [True, False]


def test_a_hook_of_the_user_comes_after_ours_once_a_unit_around_has_run():
    """Our hooks are taken out of modules inside a unit while it runs, and put back before those of the user."""
    with pretended(2) as axis:
        model = zf.shard_params(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), axis)
    seen = []
    model[0].register_forward_pre_hook(lambda linear, _: seen.append(type(linear.weight)))
    for called in (model, model[0]):
        called(torch.ones(2, WIDTH))
    assert seen == [Tensor, Tensor]  # a DTensor at rest


def test_names_show_resting_parameters_when_the_engine_drops_a_backward_in_its_own_thread():
    """As that of an accelerator does: it may do no more there."""
    model, unit = build()
    train(model, 1)
    run, resting = run_of(unit), model[0].weight
    seen = []

    def look_back(weight):
        assert weight is not resting and run.backward is not None
        run.show_resting(run.backward.ending)
        seen.append(model[0].weight is resting)

    model[0].look_back = look_back
    train(model, 1)
    assert seen == [True]


def test_what_rests_in_the_compute_dtype_is_sent_from_where_it_rests():
    model, unit = build()
    train(model, 1)
    ((_, plan),) = unit.gather.moves[-1].sends
    (pack,) = plan.packs
    assert [piece is slot.flat for piece, slot in zip(pack.pieces, unit.slots, strict=True)] == [True, True]


def test_ranks_say_how_a_disk_did_before_they_gather(tmp_path, monkeypatch):
    """The host reads the answer. Where a communicator has one queue, it would wait for the gather as well."""
    with pretended(2) as mesh:
        plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        model = zf.shard_params(zf.offload(plain, params=zf.nvme(tmp_path)), mesh)
        texts = []
        for name in ("all_gather", "any"):
            method = getattr(Line, name)
            monkeypatch.setattr(
                Line, name, lambda *a, m=method, n=name, **k: (texts.append(f"{n} {a[2]}"), m(*a, **k))[1]
            )
        model(torch.ones(2, 8))
    about = [text for text in texts if "Fetching unit" in text or "all_gather parameters" in text]
    assert ["Fetching" in text for text in about] == [True, False] * 2, texts
