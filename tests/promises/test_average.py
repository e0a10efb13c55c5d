"""`zf.ema`: an average of the weights that is cut as they are equals one kept over replicas, to the bit."""

import copy
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import zero_fn as zf
from tests.support.groups import alone
from tests.support.programs import STAGES
from tests.support.wholes import full
from tests.support.worlds import ALL, DAILY, Tower, differences, noise
from tests.units.checkpoint.worlds import WORLDS, differing, everything, made, stepped


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


def _averaged(world, path):
    """Whole averages of a run, which are those by hand; the run is saved."""
    model, optimizer = made(world, path, 0)
    average, expected = zf.ema(model, decay), ByHand(model)
    for number in range(2):
        stepped(model, optimizer, number)
        average.update()
        expected.update()
    found = {name: full(value) for name, value in average.tensors.items()}
    assert differing(found, dict(expected.tensors)) == []
    zf.save(f"{path}/saved", model, optimizer, extra={"average": average, "step": 2}, background=True).wait()
    return found


def _loaded(world, path, tier):
    model, optimizer = made(world, path, 7)
    average = zf.ema(model, decay, tier=zf.nvme(path) if tier == "disk" else None)
    expected = zf.load(f"{path}/saved", model, optimizer, extra={"average": average})
    assert (expected["step"], average.updates) == (2, 2)
    own = everything(model, optimizer)
    with average.shown():
        zf.save_pretrained(model, f"{path}/average")
    assert differing(everything(model, optimizer), own) == []
    return {name: full(value) for name, value in average.tensors.items()}


@pytest.mark.parametrize(
    ("one", "other", "tier"),
    [
        ("plain", "zero3 on 3", "disk"),
        ("zero1", "away", "device"),
        ("zero3 on 4", "tensor parallel", "disk"),
        ("sequence parallel", "hpz", "device"),
        ("hybrid", "replicas", "device"),
        ("away", "plain", "disk"),
    ],
)
def test_an_average_is_saved_and_loaded_by_any_ranks(ranks, one, other, tier, tmp_path):
    expected = ranks(WORLDS[one].ranks).run(_averaged, one, str(tmp_path))[0]
    for found in ranks(WORLDS[other].ranks).run(_loaded, other, str(tmp_path), tier):
        assert differing(found, expected) == []
    exported = nn.Module()
    for name, value in expected.items():
        exported.register_buffer(name.replace(".", "_"), torch.zeros_like(value))
    zf.load_pretrained(exported, tmp_path / "average", rename=lambda name: name.replace(".", "_"), strict=False)
    assert differing(dict(exported.named_buffers()), {n.replace(".", "_"): v for n, v in expected.items()}) == []


@pytest.mark.parametrize("stage", ["plain", *ALL])
def test_an_average_refuses_what_it_cannot_follow_and_gives_parameters_back(stage):
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
            for act in (optimizer.step, average.update, average.shown().__enter__):
                with pytest.raises(zf.StateError, match="inside average"):
                    act()
            with pytest.raises(zf.StateError, match="inside average"):
                zf.save("nowhere", model, extra={"average": average})
            elsewhere.step()
            with torch.no_grad():
                model.enter.weight.mul_(2)  # dropped
            raise ZeroDivisionError
        assert differing(ByHand(model).tensors, before) == []
        model(noise(2, 6, seed=0)).sum().backward()
        optimizer.step()
        average.update()
        assert average.updates == 1
        if stage != "plain":
            with zf.unsharded(model), pytest.raises(zf.StaleError, match="other parameters"):
                average.update()
            with zf.accumulate(model), pytest.raises(zf.StateError, match="in use"), average.shown():
                pass
        model.enter.requires_grad_(False)
        average.update()
        assert average.updates == 2, "what is frozen later is averaged"
        edited = copy.deepcopy(model)
        for edit in (lambda: zf.zero1(edited, mesh), lambda: edited.double()):
            kept = zf.ema(edited)
            kept_alive = edit()
            with pytest.raises(zf.StaleError, match="other parameters"):
                kept.update()
            del kept_alive
