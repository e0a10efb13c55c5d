"""Every way in which a model and its optimizer may rest, by name: where checkpoints come from, and where they go to."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import loss_parallel
from torch.optim import Optimizer

import zero_fn as zf
from tests.axes.grids import Decoder, grid, loss_of, parallelized
from tests.support.programs import STAGES
from tests.support.ranks import axis
from tests.support.seeds import seed_generator
from tests.support.wholes import full
from zero_fn.values.chained_optimizer import members_of

__all__ = ["WORLDS", "Tied", "World", "differing", "everything", "made", "stepped"]


class World(NamedTuple):
    """A number of ranks, and what they make of a model; `path` is a folder for tiers."""

    ranks: int
    place: Callable[[nn.Module, str], nn.Module]
    stream: Callable[[Optimizer, str], Optimizer] = lambda optimizer, _: optimizer
    styles: str | None = None


def _tensor_parallel(model, _):
    return zf.shard_params(model, grid("dp", "tp")["dp"])


def _away(model, path):
    return zf.offload(zf.shard_params(model, axis()), params=zf.nvme(path), grads=zf.cpu())


def _staged(ranks, stage):
    return World(ranks, lambda model, _: STAGES[stage](model, axis()))


def _hpz(model, _):
    mesh = grid("outer", "inner")
    return zf.shard_grads(zf.shard_params(model, mesh["inner"]), mesh["outer"])


WORLDS = {
    "plain": World(1, lambda model, _: model),
    "replicas": World(2, lambda model, _: model),
    "replicate": _staged(2, "replicate"),
    "zero1": _staged(2, "zero1"),
    "zero2": _staged(3, "zero2"),
    "zero3": _staged(2, "zero3"),
    "zero3 on 3": _staged(3, "zero3"),
    "zero3 on 4": _staged(4, "zero3"),
    "hybrid": World(4, lambda model, _: zf.hybrid(model, grid("outer", "inner"))),
    "hpz": World(4, _hpz),
    "tensor parallel": World(4, _tensor_parallel, styles="columns"),
    "sequence parallel": World(4, _tensor_parallel, styles="sequence"),
    "streamed": World(
        2,
        lambda model, _: zf.shard_params(model, axis()),
        lambda optimizer, path: zf.streamed(optimizer, zf.nvme(path), buffer="16KiB"),
    ),
    "away": World(3, _away, lambda optimizer, path: zf.streamed(optimizer, zf.nvme(path), buffer="16MiB")),
}


class Tied(nn.Module):
    """One parameter under two names."""

    def __init__(self, first, second):
        super().__init__()
        setattr(self, first, nn.Linear(3, 3, bias=False))
        setattr(self, second, nn.Linear(3, 3, bias=False))
        self.get_submodule(second).weight = self.get_submodule(first).weight


def made(name, path, seed):
    """A seeded decoder and its optimizer, of which a group has other options."""
    world = WORLDS[name]
    seed_generator(seed)
    model = Decoder() if world.styles is None else parallelized(grid("dp", "tp")["tp"], world.styles)
    model.register_buffer("seen", torch.arange(5.0) + seed)
    for parameter in model.norm.parameters():
        parameter.requires_grad_(False)
    model = world.place(model, path)
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for name, p in named.items() if "bias" not in name and p.requires_grad]},
        {"params": [p for name, p in named.items() if "bias" in name and p.requires_grad], "weight_decay": 0.0},
    ]
    return model, world.stream(torch.optim.AdamW(groups, lr=0.01 + seed, betas=(0.8, 0.9)), path)


def stepped(model, optimizer, number):
    """One step, on the same data everywhere: meshes have other data-parallel ranks."""
    with loss_parallel():
        loss_of(model, number, 0).backward()
    optimizer.step()
    optimizer.zero_grad()


def everything(model, optimizer):
    """Whole parameters, buffers and states, and options of groups. All ranks call it."""
    found = {name: full(value) for name, value in model.state_dict().items()}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for member in members_of(optimizer):
        saved = member.state_dict()
        for group, options in zip(member.param_groups, saved["param_groups"], strict=True):
            for parameter, number in zip(group["params"], options["params"], strict=True):
                own = {key: value for key, value in options.items() if key not in ("params", "param_names")}
                found[f"options of {names[id(parameter)]}"] = own
                for key, value in saved["state"].get(number, {}).items():
                    found[f"{key} of {names[id(parameter)]}"] = full(value) if isinstance(value, Tensor) else value
    return found


def differing(one, other):
    """Names under which values differ by a bit."""
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    return [name for name, value in one.items() if not _is_equal(value, other[name])]


def _is_equal(one, other):
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)
