"""Programs that need a real accelerator: compiled blocks, float16 with a loss scale, NCCL beside the engine of autograd.

`python -m tests.accelerator.more cuda` prints for each "right" or what is wrong. The oracle is the plain model on the device.
"""

from __future__ import annotations

import functools
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

import zero_fn as zf
from tests.accelerator import device
from tests.accelerator.programs import adamw, all_away, batches, net, require_same, trained, values

__all__ = ["PROGRAMS"]


def compiled_blocks(mesh: DeviceMesh) -> None:
    """Blocks compiled after the transform, at each stage."""
    for stage in ("zero1", "zero2", "zero3"):
        model, plain = getattr(zf, stage)(net(), mesh), net()
        for block in model.blocks:
            block.compile()
        require_same(model, adamw(model), plain, adamw(plain))


def compiled_whole(mesh: DeviceMesh) -> None:
    model, plain = zf.zero3(net(), mesh), net()
    optimizer = adamw(model)
    found = trained(torch.compile(model), optimizer)
    assert device.same(found, trained(plain, adamw(plain)))


def in_float16(mesh: DeviceMesh) -> None:
    """A loss scale that begins too large: steps are skipped on every rank, then train."""
    results = []
    for place in (lambda model: model, lambda model: zf.zero3(model, mesh)):
        model: Any = place(net())
        optimizer, scaler = adamw(model), torch.amp.GradScaler(device.NAME, init_scale=2.0**20)
        found: list[Any] = []
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


def fused_and_foreach_on_shards(mesh: DeviceMesh) -> None:
    for options in ({"fused": True}, {"foreach": True}, {"foreach": False}, {"capturable": True}):
        model, plain = zf.zero3(net(), mesh), net()
        optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, **options) for each in (model, plain)]
        require_same(model, optimizers[0], plain, optimizers[1])


def many_steps_ahead_of_the_device(mesh: DeviceMesh) -> None:
    """The host runs many steps ahead: memory that is given back too early would be written by a later step."""
    for away in (False, True):
        model, plain = zf.zero3(net(), mesh), net()
        model = all_away(model, device.host()) if away else model
        optimizer: Any = zf.streamed(adamw(model)) if away else adamw(model)
        other = adamw(plain)
        busy = torch.ones(4096, 4096, device=device.NAME)
        for tokens in [next(batches())] * 20:
            for each, own in ((model, optimizer), (plain, other)):
                busy = (busy @ busy).clamp_(-1, 1)  # the device is behind
                F.cross_entropy(each(tokens).flatten(0, 1), tokens.flatten()).backward()
                own.step()
                own.zero_grad()
        assert device.same(values(model), values(plain)), away


PROGRAMS: tuple[Callable[[DeviceMesh], None], ...] = (
    many_steps_ahead_of_the_device,
    fused_and_foreach_on_shards,
    in_float16,
    compiled_blocks,
    compiled_whole,
)


def main(name: str) -> None:
    device.use(name)
    with tempfile.TemporaryDirectory() as folder:
        mesh = device.begin_group(f"{folder}/store", 0, 1)
        for run in PROGRAMS:
            device.outcome(run.__name__, functools.partial(run, mesh))
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
