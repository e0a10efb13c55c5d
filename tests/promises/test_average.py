"""`zf.ema`: an average of the weights that is cut as they are equals one kept over replicas, to the bit."""

import copy
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import zero_fn as zf
from tests.support.groups import alone
from tests.support.messages import refusals, refused
from tests.support.programs import STAGES
from tests.support.wholes import full
from tests.support.worlds import ALL, DAILY, Tower, differences, noise
from tests.units.checkpoint.worlds import differing


def decay(number):
    return min(0.9, number / (number + 2))


class ByHand:
    """What `zf.ema` does, over whole tensors."""

    updates = 0

    def __init__(self, model):
        self.model = model
        named = {name: full(p.detach()) for name, p in model.named_parameters() if p.requires_grad}
        self.tensors = {name: p.to(torch.promote_types(p.dtype, torch.float32), copy=True) for name, p in named.items()}

    def update(self):
        self.updates += 1
        for name, average in self.tensors.items():
            value = full(self.model.get_parameter(name).detach())
            average.sub_(value).mul_(decay(self.updates)).add_(value)

    @contextmanager
    def shown(self):
        own = copy.deepcopy(self.model.state_dict())
        self.model.load_state_dict(self.tensors, strict=False)
        yield
        self.model.load_state_dict(own)


def _trained(world, dtype, rests, path):
    model = Tower().to(dtype)
    model.get_parameter("leave.bias").requires_grad_(False)
    model = world.place(model)
    is_away = rests == "away" and not world.is_replica
    if is_away:
        model = zf.offload(model, params=zf.nvme(path), grads=zf.nvme(path))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.125)  # exact in bfloat16
    if is_away:
        optimizer = zf.streamed(optimizer, zf.nvme(path), buffer="16MiB", finish="forward")
    tier = {"device": None, "host": zf.cpu()}.get(rests, zf.nvme(path))
    average = ByHand(model) if world.is_replica else zf.ema(model, decay, tier=tier)

    def loss(seed):
        found = model(noise(4, 6, seed=seed, dtype=dtype)).float().square().mean()
        return found

    for number in range(3):
        loss(number).backward()
        world.reduce(model)
        optimizer.step()
        optimizer.zero_grad()
        with zf.traffic() as sent:
            average.update()
        assert sent.nbytes == 0
    for name, value in average.tensors.items():
        world.note(name, value)
    with average.shown():
        world.note_model(model)
        world.note("a loss of the average", loss(7))
    world.note_model(model)
    loss(8).backward()
    world.reduce(model)
    world.note_model(model)


@pytest.mark.parametrize(
    ("n", "dtype", "rests", "stages"),
    [
        (1, torch.float32, "device", DAILY),
        (2, torch.bfloat16, "device", ALL),
        (3, torch.float32, "host", ALL),
        (2, torch.bfloat16, "disk", DAILY),
        (3, torch.float32, "away", DAILY),
    ],
)
def test_an_average_is_that_of_replicas_to_the_bit(ranks, n, dtype, rests, stages, tmp_path):
    trial = lambda world: _trained(world, dtype, rests, str(tmp_path))  # noqa: E731
    assert ranks(n).run(differences, trial, stages=stages) == [[]] * n


@pytest.mark.parametrize("stage", ["plain", *ALL])
def test_an_average_refuses_what_it_cannot_follow_and_gives_parameters_back(stage, tmp_path):
    with alone() as mesh:
        plain = Tower()
        model = plain if stage == "plain" else STAGES[stage](plain, mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        average, before = zf.ema(model, 0.5), ByHand(model).tensors
        other = nn.Linear(2, 2)
        elsewhere = torch.optim.SGD(other.parameters(), lr=0.1)
        output = model(noise(2, 6, seed=0))
        with pytest.raises(ZeroDivisionError), average.shown():
            with pytest.raises(RuntimeError, match=r"changed between|inplace"):  # with gradients of the average
                output.sum().backward()
            with refused("average_is_shown_in_a_step"):
                optimizer.step()
            for act in (average.update, average.shown().__enter__, lambda: zf.save("nowhere", extra={"a": average})):
                with pytest.raises(zf.errors.StateError):
                    act()
            zf.save_pretrained(model, tmp_path)  # what is shown
            elsewhere.step()
            with torch.no_grad():
                model.enter.weight.mul_(2)  # dropped
            raise ZeroDivisionError
        assert differing(ByHand(model).tensors, before) == []
        assert differing(load_file(tmp_path / "model.safetensors"), before) == []
        model(noise(2, 6, seed=0)).sum().backward()
        optimizer.step()
        average.update()
        if stage != "plain":
            with zf.unsharded(model), pytest.raises(zf.errors.StaleError):
                average.update()
            with zf.accumulate(model), pytest.raises(zf.errors.StateError), average.shown():
                pass
        model.enter.requires_grad_(False)
        average.update()
        assert average.updates == 2, "what is frozen later is averaged"
        edited = copy.deepcopy(model)
        kept = zf.ema(edited)
        edited.double()
        with pytest.raises(zf.errors.StaleError):
            kept.update()


def _transformed(mesh):
    model = nn.Linear(2, 2)
    average = zf.ema(model)
    kept_alive = zf.shard_params(model, mesh)
    average.update()
    del kept_alive


def _frozen_at_first():
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    average = zf.ema(model)
    model.requires_grad_(True)
    average.update()


test_refusals = refusals(
    {
        "average_of_no_decay": lambda: zf.ema(nn.Linear(2, 2), 1.5),
        "average_of_what_is_frozen": lambda: zf.ema(nn.Linear(2, 2).requires_grad_(False)),
        "average_of_meta": lambda: zf.ema(nn.Linear(2, 2, device="meta")),
        "average_of_a_model_that_was_transformed": lambda one: _transformed(one),
        "average_of_a_parameter_that_was_frozen": _frozen_at_first,
    }
)
