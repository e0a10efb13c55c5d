"""Programs on an accelerator, in a process of their own.

The oracle is the same program with everything on the device. The operations of "pretend" are those of the CPU, so a step on
the host has its bits there; on a real device it has its numbers, within rounding (`device.same`).
"""

import copy
import functools
import itertools
import tempfile
import threading
from contextlib import suppress
from types import SimpleNamespace
from unittest.mock import call, patch

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW

import zero_fn as zf
from tests.accelerator import device
from zero_fn.kernels.threads import more_threads
from zero_fn.runtime import ending
from zero_fn.runtime.registry import units_of
from zero_fn.storage import Transfer
from zero_fn.streamed import state_codes
from zero_fn.tiers import side_stream, tier_tensor
from zero_fn.transforms.offloaded_activations import Parking
from zero_fn.values.dtensors import local_of
from zero_fn.values.tiers import Cpu

__all__ = ["PROGRAMS", "results"]

VOCABULARY, WIDTH, STEPS = 20, 16, 4
PROGRAMS = {}


def program(function):
    PROGRAMS[function.__name__] = function
    return function


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 33), nn.GELU(), nn.Linear(33, WIDTH)) for _ in range(3)
        )
        self.leave = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.enter(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.leave(x)


def net():
    torch.manual_seed(0)
    return Net().to(device.NAME)


def adamw(model):
    return AdamW(model.parameters(), lr=1e-2)


def batches(steps=STEPS, skipped=0):
    generator = torch.Generator().manual_seed(1)
    for step in range(skipped + steps):
        tokens = torch.randint(VOCABULARY, (4, 6), generator=generator)
        if step >= skipped:
            yield tokens.to(device.NAME)


def trained(model, optimizer, tokens=None):
    """Losses and norms of some steps; half of them are clipped."""
    found = []
    for batch in tokens or batches():
        loss = F.cross_entropy(model(batch).float().flatten(0, 1), batch.flatten())
        loss.backward()
        found += [loss.item(), float(nn.utils.clip_grad_norm_(model.parameters(), 1.5))]
        optimizer.step()
        optimizer.zero_grad()
    return found


def values(model):
    """Whole, on the host."""
    return [
        (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone().cpu()
        for value in model.state_dict().values()
    ]


def require_same(
    model,
    optimizer,
    plain,
    plain_optimizer,
    tokens=batches,
):
    """Both train to the same numbers, and stay where they are."""
    devices = {parameter.device for parameter in plain.parameters()}
    assert device.same(trained(model, optimizer, tokens()), trained(plain, plain_optimizer, tokens()))
    assert device.same(values(model), values(plain))
    assert {parameter.device for parameter in model.parameters()} == devices


def all_away(model, tier):
    return zf.offload(model, params=tier, grads=tier, optim=tier)


@program
def a_step_that_waits(tier):
    """Units are stepped on the host by the forward that reads them, while the device computes those before."""
    plain, model = net(), all_away(net(), tier)
    optimizer = zf.streamed(adamw(model), finish="forward")
    require_same(model, optimizer, plain, adamw(plain))
    trained(model, optimizer, batches(1))
    progress = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: progress.append(optimizer._steps.waiting.progress))
    model(next(batches()))
    assert len(set(progress)) > 1, progress


@program
def bytes_over_the_link(tier):
    """For each parameter and step: two to the device and four from it, where all rests on the host and computes in bfloat16.
    Norms, clipping and what is loaded or saved cost nothing."""

    def moved_by(model, act):
        device.moved()
        act()
        numel = sum(parameter.numel() for parameter in model.parameters())
        there, back = device.moved()
        return round(there / numel, 1), round(back / numel, 1)

    def passed(model):
        return lambda: model(x).float().square().mean().backward()

    def wide():
        return nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).to(device.NAME)

    x = torch.ones(2, 256).to(device.NAME)
    model = zf.offload(zf.precision(wide()), params=tier, grads=tier, optim=tier, reshard_after="backward")
    optimizer = zf.streamed(adamw(model))
    assert not isinstance(tier, Cpu) or optimizer.buffers_nbytes == 0, "it is stepped where it rests"
    passed(model)()
    optimizer.step()  # copies in bfloat16 are made by the first forward
    optimizer.zero_grad()
    assert moved_by(model, passed(model)) == (2, 4)
    assert moved_by(model, passed(model)) == (2, 4), "the second gradient is added on the host"
    assert moved_by(model, lambda: nn.utils.clip_grad_norm_(model.parameters(), 1e-3)) == (0, 0)
    assert moved_by(model, optimizer.step) == (0, 0)
    states, values = optimizer.state_dict(), {name: value.cpu() for name, value in model.state_dict().items()}
    assert moved_by(model, lambda: (optimizer.state_dict(), optimizer.load_state_dict(states))) == (0, 0)
    assert moved_by(model, lambda: (model.load_state_dict(values), optimizer.zero_grad(set_to_none=False))) == (0, 0)

    model = zf.offload(zf.precision(wide()), params=tier, grads=tier, optim=tier)
    passed(model)()
    assert moved_by(model, passed(model)) == (3.5, 4), "all but the last layer are gathered again in backward"


@program
def fewer_bits_at_rest(tier):
    """States in 8 bits, on the device and on the host, of parameters in float32 and of those that are rounded."""
    with patch.object(state_codes, "_LEAST_NUMEL", 1):
        for rounding in (None, "stochastic", "kahan"):
            models = [net(), net()]
            if rounding is not None:
                models = [zf.precision(each, rest=torch.bfloat16, round=rounding) for each in models]
            plain, model = models
            here, there = (zf.states8bit(adamw(each)) for each in models)
            require_same(model, zf.streamed(there, tier), plain, here)


@program
def norms_on_the_host(tier):
    """That of a large gradient is near to the truth, and clipping that changes nothing writes nothing. Both take the threads
    that a rank may have. Where it is stepped it is one parcel, for one call of a kernel; on the way to a disk, several."""
    model = zf.offload(nn.Linear(2048, 1025, bias=False).to(device.NAME), grads=tier, optim=tier)
    model(torch.randn(64, 2048).to(device.NAME)).square().sum().backward()
    (gradient,) = (parameter.grad for parameter in model.parameters())
    parcels = local_of(gradient).record.parcels
    assert len(parcels) == (1 if isinstance(tier, Cpu) else 3)
    for order in (1.0, 2.0, 3.0, torch.inf):
        truth = torch.linalg.vector_norm(gradient.detach().cpu().double(), order).item()
        versions = [parcel.version for parcel in parcels]
        found = nn.utils.clip_grad_norm_(model.parameters(), 1e30, norm_type=order).item()
        assert abs(found / truth - 1) < (1e-6 if order < 3 else 1e-3), (order, found, truth)
        assert [parcel.version for parcel in parcels] == versions
        with patch.object(tier_tensor, "more_threads", side_effect=more_threads) as of_torchrun:
            assert nn.utils.clip_grad_norm_(model.parameters(), found / 2, norm_type=order).item() == found
        assert of_torchrun.call_args_list == [call(gradient.numel())] * 2  # the norm, and the scaling
        assert [parcel.version for parcel in parcels] != versions


@program
def what_moves_was_planned(tier):
    """Over the link, to the byte, wherever it rests; to and from the host as a tier, the same. Disks are counted in
    tests/units/inspect/test_planned_tiers.py."""
    x = torch.ones(2, 256, device=device.NAME)
    forms = ("optim", "params optim", "grads optim", "params grads optim", "params grads")
    for form, grads, fraction in itertools.product(forms, (None, torch.bfloat16), (1.0, 0.5)):
        layers = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4))).to(device.NAME)
        layers[1].requires_grad_(False)
        model, tiers = zf.precision(layers, compute=torch.float32, grads=grads), dict.fromkeys(form.split(), tier)
        if "optim" in form:
            model = zf.offload(model, **tiers, fraction=fraction)
            optimizer = zf.streamed(adamw(model))
        else:
            model = zf.offload(model, **tiers)
            optimizer = zf.streamed(adamw(model), tier, fraction=fraction)
        for _ in range(2):
            device.moved()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        planned = zf.plan(model, optimizer)
        assert tuple(planned.link) == device.moved(), (form, fraction, planned.link)
        assert not isinstance(tier, Cpu) or planned.moved[str(tier)] == planned.link, (form, fraction)
    coded = zf.precision(nn.Linear(256, 256, bias=False).to(device.NAME).requires_grad_(False), gather=zf.wire.int8())
    coded = zf.offload(coded, params=tier)
    for _ in range(2):  # the first codes what rests exactly
        device.moved()
        coded(x)
    assert zf.plan(coded).link.to_device == device.moved()[0] == 256 * (256 + 4), "a byte an element, and a scale"


def require_same_layers(tier, bias, kind, said, begin, **how):
    """Eight layers with momentum in a tier train as on the device, also with a gradient that lies in another order."""
    layers = nn.Sequential(*(nn.Linear(64, 64, bias=bias) for _ in range(8))).to(device.NAME)
    models = [layers, copy.deepcopy(layers)]
    plain, inner = (kind(each.parameters(), lr=0.1, momentum=0.9) for each in models)
    streamed = zf.streamed(inner, tier, buffer="32KiB", elementwise=True, **how)
    assert f"parameters and gradients through {said} buffers" in str(streamed)
    for optimizer, each in ((plain, models[0]), (streamed, models[1])):
        for _ in range(3):
            begin()
            optimizer.zero_grad()
            each(torch.ones(2, 64).to(device.NAME)).square().mean().backward()
            each[2].weight.grad = each[2].weight.grad.t().contiguous().t()
            optimizer.step()
    assert device.same(values(models[0]), values(models[1]))


@program
def copies_go_on_while_the_host_steps(tier):
    """The next chunks come from the device while one is stepped, and the last one goes back."""
    seen = []

    class Noting(SGD):
        def step(self, closure=None):
            with suppress(device.Unmeasured):
                seen.append(device.waiting())
            return super().step(closure)

    require_same_layers(tier, True, Noting, "4", seen.clear)
    device.waiting()  # which a real device does not tell
    assert len(seen) >= 4
    assert all(seen[:-1]), seen


@program
def chunks_that_stay_on_the_device_take_no_buffer(tier):
    """A chunk had come into the buffer of the last one before that was back: every other one passes through two."""
    require_same_layers(tier, False, SGD, "2", lambda: None, fraction=0.5)


@program
def copies_go_on_while_the_device_computes(tier):
    """The next unit is on its way to the device while one computes, and so are gradients of the last one from it."""
    model = zf.offload(zf.precision(net()), params=tier, grads=tier)
    trained(model, zf.streamed(adamw(model), tier), batches(1))
    seen = {"forward": [], "backward": []}
    for number in range(3):
        model.blocks[number][2].register_forward_hook(lambda *_: seen["forward"].append(device.waiting()))
        model.blocks[number][2].register_full_backward_hook(lambda *_: seen["backward"].append(device.waiting()))
    model(next(batches())).float().square().mean().backward()
    assert all(seen["forward"]), seen
    assert all(seen["backward"]), seen


class Block(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.LayerNorm(64))


@program
def one_wait_and_one_copy_for_a_unit(tier):
    """Parameters that lie one after another on the host and on the device come as one; gradients have one end."""
    blocks = nn.Sequential(*(Block() for _ in range(4))).to(device.NAME)
    plain, model = copy.deepcopy(blocks), zf.offload(blocks, params=tier, grads=tier, units=Block)
    x = torch.ones(2, 64, device=device.NAME)
    for each in (model, plain):
        each(x).square().sum().backward()
    assert device.same([p.grad.cpu() for p in model.parameters()], [p.grad.cpu() for p in plain.parameters()])
    model.zero_grad()
    loss = model(x).square().sum()
    device.streams()
    loss.backward()
    _, copies, events = device.streams()
    assert (copies, events) == (3 + 4 * 6, 3 + 4), (copies, events)  # the last unit has stayed there since the forward


@program
def large_copies_are_made_in_pieces(tier):
    plain, model = net(), all_away(net(), tier)
    with patch.object(side_stream, "_PIECE_NBYTES", 100):
        require_same(model, zf.streamed(adamw(model)), plain, adamw(plain))
        device.streams()
        model(next(batches()))
    pieces = device.streams()[1]
    model(next(batches()))
    assert pieces > 2 * device.streams()[1]


@program
def a_backward_that_raises(tier):
    """Autograd runs it in a thread of the device, and lets go of it there, at any moment after the program goes on: here as
    late as can be, in the midst of something else."""

    class Deliberate(Exception):
        pass

    def fail(_):
        raise Deliberate

    held = []

    def queued(callback):
        held.append(callback)
        own.queue_callback(lambda: held[-1]())

    def let_go():
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()

    def waited(transfer):
        let_go()
        own_wait(transfer)

    own, own_wait = ending.Variable._execution_engine, Transfer.wait
    model, plain = zf.offload(net(), params=tier), net()
    tokens = next(batches())
    for number in range(3):
        handle = model.blocks[1].register_forward_hook(lambda _module, _args, out: out.register_hook(fail) and None)
        engine = SimpleNamespace(_execution_engine=SimpleNamespace(queue_callback=queued))
        with patch.object(ending, "Variable", engine), suppress(Deliberate):
            model(tokens).square().mean().backward()
        handle.remove()
        model.zero_grad()  # of units that backward was done with
        plain.zero_grad()
        if number == 0:  # with names, and no more, in the thread of the engine
            entered = [unit for unit in units_of(model) if unit.visible.in_backward is not None]
            modules = [place.module for unit in entered for slot in unit.slots for place in slot.places]
            assert any("weight" in vars(module) for module in modules)
            let_go()
            assert all(unit.visible.in_backward is not None for unit in entered)
            assert not any("weight" in vars(module) for module in modules)
        with patch.object(Transfer, "wait", waited), zf.unsharded(model, writeback=True), torch.no_grad():
            let_go()
            model.blocks[2][1].weight.mul_(0.5)
            plain.blocks[2][1].weight.mul_(0.5)
        model(tokens).square().mean().backward()
        plain(tokens).square().mean().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert device.same(one.grad.cpu(), other.grad.cpu())


@program
def host_memory_outlives_what_is_copied(tier):
    """Of activations that nobody takes back, and of a model that goes while its parameters are on their way."""
    parking, tensors = Parking(tier), [torch.ones(1 << 18, device=device.NAME) for _ in range(2)]
    waiting = [parking.park(tensor) for tensor in tensors]
    waiting[0].fetch()
    del parking, waiting, tensors
    model = zf.offload(net(), params=tier)
    model(next(batches()))
    for unit in units_of(model):
        unit.unshard()
    del model, unit
    torch.accelerator.synchronize()  # copies that are still under way would read or write memory that is gone


def require_away(model, tier):
    """No parameter takes memory of the device."""
    with torch.no_grad():
        model(next(batches()))  # what was moved goes to its tier
    held = zf.memory(model)
    assert (held.on_device, held.tiers.get(str(tier), 0) > 0) == (0, True), held


@program
def read_in_place_and_as_codes(tier):
    """Exact weights stay in a folder; codes rest in the tier from the first forward on."""
    plain, tokens = net().requires_grad_(False), next(batches())
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        zf.save_pretrained(plain, folder)
        for options in ({"compute": torch.float32}, {"compute": torch.float32, "gather": zf.wire.int8()}):
            model = zf.offload(zf.precision(net().requires_grad_(False).to("meta"), **options), params=tier)
            zf.load_pretrained(model, folder, copy=False, device=device.NAME)
            expected = zf.precision(plain, **options)
            for _ in range(3):
                assert device.same(model(tokens).cpu(), expected(tokens).cpu())
            for one, other in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(one.cpu(), other.cpu())


@program
def moved_there_and_back(tier):
    """A model of the host goes to the device with its tier, is trained there, computes on the host, and is trained again."""
    model, plain = zf.offload(net().cpu(), params=tier).to(device.NAME), net()
    require_away(model, tier)
    require_same(model, zf.streamed(adamw(model), tier), plain, adamw(plain))
    model, plain, tokens = model.cpu(), plain.cpu(), next(batches()).cpu()
    assert device.same(model(tokens), plain(tokens))
    model, plain = model.to(device.NAME), plain.to(device.NAME)
    require_away(model, tier)
    require_same(model, zf.streamed(adamw(model), tier), plain, adamw(plain))


@program
def made_on_meta(tier):
    with torch.device("meta"):
        model = Net()
    model, plain = zf.materialize(all_away(model, tier), device.NAME), net()
    require_away(model, tier)
    plain.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    require_same(model, zf.streamed(adamw(model)), plain, adamw(plain))


@program
def memory_runs_out(tier):
    """Wherever it does in a step, the error is torch's, and the step is taken once there is room again."""
    width = 512 if device.NAME == "pretend" else 2048

    def wide():
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(4))).to(device.NAME)

    x = torch.ones(2, width, device=device.NAME)
    model, plain = all_away(wide(), tier), wide()
    optimizer, other = zf.streamed(adamw(model)), adamw(plain)
    failed = []
    for room in [*(part * 4 * width * width // 2 for part in range(7)), None]:
        try:
            with device.limited(room):
                model(x).square().mean().backward()
        except torch.OutOfMemoryError:
            failed.append(room)
            model.zero_grad()
            model(x).square().mean().backward()
        plain(x).square().mean().backward()
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
        assert device.same(values(model), values(plain)), (room, failed)
    assert 0 < len(failed) < 8, failed


@program
def checkpoints(tier):
    """What is on the device while it is copied may change as soon as `save(background=True)`, or `update()`, has returned."""
    for is_away in (False, True):
        plain, model = net(), all_away(net(), tier) if is_away else net()
        plain_optimizer, optimizer = adamw(plain), zf.streamed(adamw(model)) if is_away else adamw(model)
        require_same(model, optimizer, plain, plain_optimizer)
        with tempfile.TemporaryDirectory() as folder:
            zf.save(f"{folder}/step-1", model, optimizer, background=True)
            zf.save(f"{folder}/step-2", plain, plain_optimizer)
            trained(model, optimizer, batches(2))
            trained(plain, plain_optimizer, batches(1))
            zf.load(f"{folder}/step-1", plain, plain_optimizer)
            zf.load(f"{folder}/step-2", model, optimizer)
            copies = zf.checkpoint.memory_copies(f"{folder}/copied", model, optimizer, every=1)
            copies.update()
            trained(model, optimizer, batches(2))
            for each, of_each in ((plain, plain_optimizer), (model, optimizer)):
                zf.resume(f"{folder}/copied", each, of_each)
            copies.close()
        require_same(model, optimizer, plain, plain_optimizer)


@program
def counts_of_steps_stay_on_the_host(tier):
    """A count on the device would be waited for once a parameter (prime-rl#3258)."""
    for is_away in (True, False):
        model = all_away(net(), tier) if is_away else net()
        optimizer = zf.streamed(adamw(model)) if is_away else adamw(model)
        with tempfile.TemporaryDirectory() as folder:
            trained(model, optimizer, batches(2))
            zf.save(f"{folder}/saved", model, optimizer)
            zf.load(f"{folder}/saved", model, optimizer)
            trained(model, optimizer, batches(1))
        if not is_away:
            zf.offload_states(model, optimizer, to=device.host())
            zf.reload_states(model)
        counts = [state["step"] for state in optimizer.state.values()]
        assert counts and {count.device.type for count in counts} == {"cpu"}
        assert {count.item() for count in counts} == {3}
    model(next(batches())).square().mean().backward()
    device.waits()
    optimizer.step()
    assert device.waits() == 0


def results(tiers, chosen):
    """What became of each program in each tier: "right", or a traceback."""
    found = {}
    for tier in tiers:
        for name, run in chosen.items():
            case = f"{name}, {type(tier).__name__}"
            found[case] = device.outcome(case, functools.partial(run, tier))
    return found
