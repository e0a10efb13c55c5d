"""Training on the ranks of the pool: the same program over any transform, and over DDP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zero_fn as zf
from tests.support.models import batch
from tests.support.ranks import axis
from tests.support.seeds import seed_generator
from tests.support.wholes import held, wholes

__all__ = ["OPTIMIZERS", "STAGES", "gradients", "loss_of", "parameters", "train", "train_ddp"]

STAGES: dict[str, Callable[..., nn.Module]] = {
    "replicate": zf.replicate,
    "zero1": zf.shard_optimizer,
    "zero2": zf.shard_grads,
    "zero3": zf.shard_params,
}

OPTIMIZERS: dict[str, Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]] = {
    "adam": lambda ps: torch.optim.Adam(ps, lr=1e-2),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
    "adamw_foreach": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=True),
    "adamw_fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=1e-2),
}


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """Whole parameters by name."""
    named = dict(model.named_parameters())
    found = wholes([held(parameter) for parameter in named.values()])
    return {name.removeprefix("module."): value for name, value in zip(named, found, strict=True) if value is not None}


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Whole gradients by name."""
    named = dict(model.named_parameters())
    found = wholes([held(parameter.grad) for parameter in named.values()])
    return {name.removeprefix("module."): grad for name, grad in zip(named, found, strict=True)}


def loss_of(model: nn.Module, seed: int) -> Tensor:
    tokens, targets = batch(seed, dist.get_rank())
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())


def train(
    build: Callable[[], nn.Module],
    stage: str,
    *,
    steps: int = 4,
    microbatches: int = 1,
    optimizer: str = "adamw",
    clip: float | None = None,
    options: dict[str, object] | None = None,
    transform: Callable[[nn.Module], nn.Module] | None = None,
) -> dict[str, Tensor]:
    """Trains a seeded model and returns its whole parameters."""
    seed_generator(0)
    model = STAGES[stage](build(), axis(), **(options or {}))
    if transform is not None:
        model = transform(model)
    trained = OPTIMIZERS[optimizer]([p for p in model.parameters() if p.requires_grad])
    for step in range(steps):
        with zf.accumulate(model) if microbatches > 1 else nullcontext():
            for microbatch in range(microbatches):
                (loss_of(model, step * microbatches + microbatch) / microbatches).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        trained.step()
        trained.zero_grad()
    return parameters(model)


def train_ddp(
    build: Callable[[], nn.Module], *, steps: int = 4, microbatches: int = 1, optimizer: str = "adamw"
) -> dict[str, Tensor]:
    """The same training under DistributedDataParallel."""
    seed_generator(0)
    model = DistributedDataParallel(build(), find_unused_parameters=True)
    trained = OPTIMIZERS[optimizer]([p for p in model.parameters() if p.requires_grad])
    for step in range(steps):
        for microbatch in range(microbatches):
            with nullcontext() if microbatch == microbatches - 1 else model.no_sync():
                (loss_of(model, step * microbatches + microbatch) / microbatches).backward()
        trained.step()
        trained.zero_grad()
    return parameters(model)
