"""Races that others have shipped, as programs of zero_fn: DeepSpeed #8186 (three), torchrec #4231, and one of an order.

In each, the device is busy when a copy is issued, so that a copy that waits for less than it has to comes too early there. On
"pretend" it raises, or is as late as it may be. The oracle is the same program with everything on the device, to the bit:
rates and momenta are powers of two, so the host rounds as the device does.
"""

import sys
import time

import torch
from torch import nn
from torch.optim import SGD

import zero_fn as zf
from tests.accelerator import device, programs
from tests.accelerator.programs import all_away
from zero_fn.runtime.registry import units_of
from zero_fn.transforms.offloaded_activations import Parking
from zero_fn.values.tiers import Cpu

__all__ = ["PROGRAMS"]

PROGRAMS = {}


def program(function):
    PROGRAMS[function.__name__] = function
    return function


def real(size, small):
    """A size on a real device, and on "pretend"."""
    return small if device.NAME == "pretend" else size


def rounds(tier):
    return 20 if isinstance(tier, Cpu) else 6


def keep_busy():
    """Lets the device compute for some 20 ms."""
    square = torch.ones(real(8192, 8), real(8192, 8), device=device.NAME)
    torch.mm(square, square)


def layers(width, count=4):
    """Units of one matrix each, which begins where its buffer does: kernels are chosen by such things."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count))).to(device.NAME)


def held_by(model):
    """The units that have parameters."""
    return [unit for unit in units_of(model) if unit.slots]


def sgd(model):
    return SGD(model.parameters(), lr=2.0**-8, momentum=0.5)


def draws(width):
    return torch.randn(64, width, generator=torch.Generator().manual_seed(1)).to(device.NAME)


def require_equal(found, expected):
    """To the bit; says how far they are apart, as a race and a rounding differ in that."""
    assert len(found) == len(expected)
    for number, pair in enumerate(zip(found, expected, strict=True)):
        one, other = (each.detach().cpu() for each in pair)
        if not torch.equal(one, other):
            apart, largest = (one.double() - other.double()).abs(), other.double().abs().max().item()
            raise AssertionError(
                f"number {number} of {len(found)}: {int((one != other).sum())} of {one.numel()} elements differ, "
                f"by {apart.max().item()} at most, where the largest is {largest}"
            )


def require_same_training(model, optimizer, plain, width, steps):
    """The host reads nothing before the end, so that it runs ahead."""
    found = []
    for each, own in ((model, optimizer), (plain, sgd(plain))):
        x, losses = draws(width), []
        for _ in range(steps):
            keep_busy()
            loss = each(x).square().mean(dim=0).sum()
            loss.backward()
            own.step()
            own.zero_grad()
            losses.append(loss.detach())
        found.append([*losses, *each.state_dict().values()])
    require_equal(*found)


@program
def a_copy_to_the_device_comes_after_the_step_on_the_host(tier):
    """DeepSpeed #8186: what the optimizer writes. It is written by the forward that reads it, unit by unit."""
    width = real(1024, 64)
    model = all_away(layers(width), tier)
    optimizer = zf.streamed(sgd(model), finish="forward")
    require_same_training(model, optimizer, layers(width), width, rounds(tier))


@program
def a_copy_to_the_host_comes_after_what_is_computed(tier):
    """DeepSpeed #8186: what the device writes. Gradients leave as soon as they are issued, through four buffers in turn."""
    width = real(1024, 64)
    model = layers(width, 8)
    optimizer = zf.streamed(sgd(model), tier, buffer=4 * width * width)
    assert "through 4 buffers" in str(optimizer), optimizer
    require_same_training(model, optimizer, layers(width, 8), width, rounds(tier))


@program
def memory_is_written_after_its_copies_have_left(tier):
    """DeepSpeed #8186: buffers that are used again too early. Parameters are edited on the host, where they rest, while the
    device is still far from the copies of what they were, of more units than a disk has stagings, which are used again."""
    width = real(1024, 64)
    x, ways = draws(width), (lambda model: model, lambda model: zf.precision(model, compute=torch.bfloat16))
    writes = (
        lambda weight: weight.mul_(-0.5),
        lambda weight: weight.copy_(torch.ones_like(weight)),
        lambda weight: weight.data.zero_(),
        lambda weight: weight.add_(2.0),
    )
    for way in ways:
        model, plain = zf.offload(way(layers(width, 8)), params=tier), way(layers(width, 8))
        found, expected = [], []
        with torch.no_grad():
            for number in range(rounds(tier)):
                model(x)  # makes the copies in fewer bits
                keep_busy()
                for unit in held_by(model):
                    unit.unshard()
                before = [layer.weight.clone() for layer in plain]
                for layer in (*model, *plain):
                    writes[number % len(writes)](layer.weight)
                for unit, weight in zip(held_by(model), before, strict=True):
                    unit.await_gathered()
                    found.append(unit.gather.whole.tensors()[0].clone())
                    expected.append(weight.to(found[-1].dtype))
                    unit.reshard()
                keep_busy()
                found.append(model(x))
                expected.append(plain(x))
                for layer in (*model, *plain):
                    layer.weight.add_(0.25)
        require_equal([*found, *model.state_dict().values()], [*expected, *plain.state_dict().values()])


@program
def fresh_memory_is_filled_after_it_was_read(tier):
    """DeepSpeed #8186: the memory of a buffer was an activation's, which the device has still to read."""
    width = real(2048, 64)
    model = zf.offload(layers(width), params=tier)
    (first, *_), expected = held_by(model), model[0].weight.detach().cpu().to(device.NAME)
    first.unshard()
    first.reshard()  # what it takes from now on is memory, not buffers
    sums, known, taken = [], [], 0
    for number in range(rounds(tier)):
        if device.NAME != "pretend":
            torch.accelerator.empty_cache()  # so that what is given back here is what is taken next
        activation = torch.full((width, width), float(number), device=device.NAME)
        place = activation.data_ptr()
        keep_busy()
        sums.append(activation.sum(dim=0))
        known.append(torch.full((width,), float(width * number)))
        del activation
        first.unshard()
        first.await_gathered()
        (weight,) = first.gather.whole.tensors()
        taken += weight.data_ptr() == place
        sums.append((weight != expected).sum(dim=0))
        known.append(torch.zeros(width, dtype=torch.long))
        del weight
        first.reshard()
    require_equal(sums, known)
    assert taken, "no buffer has taken the memory of an activation: nothing was tried"


@program
def memory_is_given_up_after_its_copy(tier):
    """torchrec #4231: storages that are resized to nothing while they are copied to the host."""
    width = real(1024, 64)
    model = zf.offload(layers(width), params=tier)
    expected = [layer.weight.detach().cpu() for layer in model]
    parking, found = Parking(tier), []
    for _ in range(rounds(tier)):
        keep_busy()
        parked = []
        for unit in held_by(model):
            unit.unshard()
            unit.await_gathered()
            parked.append(parking.park(unit.gather.whole.tensors()[0]))
            unit.reshard()
        over = [torch.full((width, width), 7.0, device=device.NAME) for _ in parked]
        found += [each.take() for each in parked[::-1]][::-1]
        del over
    require_equal(found, expected * rounds(tier))


@program
def a_small_copy_behind_a_large_one(tier):
    """Copies to a device are done in the order in which they are issued. Prints what a small one of the user then takes."""
    width, halves = real(4096, 64), []
    model = zf.offload(nn.Sequential(*(nn.Linear(width, width) for _ in range(4))).to(device.NAME), params=tier)
    expected = [value.detach().cpu() for value in model.state_dict().values()]
    tokens = torch.arange(64)
    tokens = tokens if device.NAME == "pretend" else tokens.pin_memory()
    for is_behind in (False, True) * (rounds(tier) // 4):
        torch.accelerator.synchronize()
        for unit in held_by(model) if is_behind else ():
            unit.unshard()
        started = time.perf_counter()
        there = tokens.to(device.NAME, non_blocking=True)
        torch.accelerator.current_stream().record_event().synchronize()
        halves.append((is_behind, time.perf_counter() - started))
        require_equal([there], [tokens])
        if is_behind:
            found = []
            for unit in held_by(model):
                unit.await_gathered()
                found += [tensor.clone() for tensor in unit.gather.whole.tensors()]
                unit.reshard()
            require_equal(found, expected)
    alone, behind = (sorted(s for each, s in halves if each is way) for way in (False, True))
    nbytes = 4 * 4 * width * width
    print(
        f"a small copy to the device, microseconds: {1e6 * alone[len(alone) // 2]:.0f} alone, "
        f"{1e6 * behind[len(behind) // 2]:.0f} behind a prefetch of {nbytes / 2**20:.0f} MiB from {type(tier).__name__}",
        file=sys.stderr,
        flush=True,
    )


@program
def many_steps_ahead_of_the_device(tier):
    """The host runs many steps ahead: memory that is given back too early would be written by a later step."""
    width, tokens = real(4096, 64), next(programs.batches())
    model, plain = all_away(programs.net(), tier), programs.net()
    pairs = ((model, zf.streamed(sgd(model))), (plain, sgd(plain)))
    busy = torch.ones(width, width, device=device.NAME)
    for _ in range(20):
        for each, optimizer in pairs:
            busy = (busy @ busy).clamp_(-1, 1)  # the device is behind
            each(tokens).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert device.same(programs.values(model), programs.values(plain))
