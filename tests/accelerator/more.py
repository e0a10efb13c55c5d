"""Programs that say most on a real accelerator: compiled blocks, float16 with a loss scale, NCCL beside the engine of
autograd, optimizers that torch has for such devices.

`python -m tests.accelerator.more cuda` prints for each "right" or what is wrong. The oracle is the plain model on the device.
The device "pretend" runs those of `ON_PRETEND`: there blocks are compiled by `aot_eager`.
"""

import functools
import json
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import zero_fn as zf
from tests.accelerator import device
from tests.accelerator.programs import adamw, all_away, batches, net, require_same, trained, values

__all__ = ["ON_PRETEND", "PROGRAMS"]


def compiled_blocks(mesh):
    """Blocks compiled after the transform, at each stage."""
    for stage in ("zero1", "zero2", "zero3"):
        model, plain = getattr(zf, stage)(net(), mesh), net()
        compile_blocks(model)
        require_same(model, adamw(model), plain, adamw(plain))


def compile_blocks(model):
    for block in model.blocks:
        block.compile(backend=backend())


def backend():
    return "aot_eager" if device.NAME == "pretend" else "inductor"


def compiled_blocks_with_all_away(mesh):
    for place in (lambda model: model, lambda model: zf.zero3(model, mesh)):
        for dtype in (torch.float32, torch.bfloat16):
            model, plain = net(), net()
            if dtype is torch.bfloat16:
                model, plain = zf.precision(model), zf.precision(plain)
            model = all_away(place(model), device.host())
            for each in (model, plain):  # what is compiled rounds less often to bfloat16
                compile_blocks(each)
            require_same(model, zf.streamed(adamw(model)), plain, adamw(plain))


def compiled_whole(mesh):
    model, plain = zf.zero3(net(), mesh), net()
    optimizer = adamw(model)
    found = trained(torch.compile(model, backend=backend()), optimizer)
    assert device.same(found, trained(plain, adamw(plain)))


def in_float16(mesh):
    """A loss scale that begins too large: steps are skipped on every rank, then train."""
    results = []
    for place in (lambda model: model, lambda model: zf.zero3(model, mesh)):
        model = place(net())
        optimizer, scaler = adamw(model), torch.amp.GradScaler(device.NAME, init_scale=2.0**20)
        found = []
        for tokens in batches(8):
            with torch.autocast(device.NAME, torch.float16):
                loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            found += [loss.item(), scaler.get_scale()]
        results.append(found)
    assert results[0][1::2] == results[1][1::2], results
    assert device.same(*results), results


def fused_and_foreach_on_shards(mesh):
    for options in ({"fused": True}, {"foreach": True}, {"foreach": False}, {"capturable": True}):
        model, plain = zf.zero3(net(), mesh), net()
        optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, **options) for each in (model, plain)]
        require_same(model, optimizers[0], plain, optimizers[1])


def fused_with_all_away(mesh):
    """The oracle is torch's fused AdamW on the device."""
    with tempfile.TemporaryDirectory() as folder:
        for tier in (device.host(), zf.nvme(folder)):
            for finish in ("step", "forward"):
                model, plain = all_away(zf.zero3(net(), mesh), tier), net()
                optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, fused=True) for each in (model, plain)]
                require_same(model, zf.streamed(optimizers[0], finish=finish), plain, optimizers[1])


def muon(mesh):
    """Over one rank no matrix is cut, so what looks at whole matrices is right at stage 3, too."""
    if not hasattr(torch.optim, "Muon"):
        raise ModuleNotFoundError(name="torch.optim.Muon")
    found = []
    for place in (lambda model: model, lambda model: zf.zero3(model, mesh)):
        torch.manual_seed(0)
        model = place(nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4))).to(device.NAME))
        optimizer = torch.optim.Muon(model.parameters(), lr=1e-2)
        for _ in range(3):
            model(torch.ones(2, 64, device=device.NAME)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(values(model))
    assert device.same(*found)


def many_steps_ahead_of_the_device(mesh):
    """The host runs many steps ahead: memory that is given back too early would be written by a later step."""
    for away in (False, True):
        model, plain = zf.zero3(net(), mesh), net()
        model = all_away(model, device.host()) if away else model
        optimizer = zf.streamed(adamw(model)) if away else adamw(model)
        other = adamw(plain)
        width = 64 if device.NAME == "pretend" else 4096
        busy = torch.ones(width, width, device=device.NAME)
        for tokens in [next(batches())] * 20:
            for each, own in ((model, optimizer), (plain, other)):
                busy = (busy @ busy).clamp_(-1, 1)  # the device is behind
                F.cross_entropy(each(tokens).flatten(0, 1), tokens.flatten()).backward()
                own.step()
                own.zero_grad()
        assert device.same(values(model), values(plain)), away


ON_PRETEND = (
    many_steps_ahead_of_the_device,
    fused_and_foreach_on_shards,
    fused_with_all_away,
    muon,
    compiled_blocks,  # which takes long on a real device
    compiled_blocks_with_all_away,
    compiled_whole,
)
PROGRAMS = (in_float16, *ON_PRETEND)


def main(where):
    device.choose(where)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        mesh = device.begin_group(f"{folder}/store", 0, 1)
        for run in ON_PRETEND if device.NAME == "pretend" else PROGRAMS:
            found[run.__name__] = device.outcome(run.__name__, functools.partial(run, mesh))
        dist.destroy_process_group()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
