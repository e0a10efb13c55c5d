"""Fewer bits at rest: states in 8 bits, and parameters in bfloat16 without a master. What a step takes, and what it learns.

    python examples/benchmarks/narrow.py                        # seconds of a step beside torch's fused AdamW, by turns
    python examples/benchmarks/narrow.py --steps 500            # losses of a small GPT, minutes for each way
    python examples/benchmarks/narrow.py --steps 500 --ways float32 states8bit

Ways of the second: `float32` and `states8bit`, computed in float32; and, computed in bfloat16, `master` (float32 at rest),
`plain`, `stochastic`, `kahan` and `stochastic8bit` (bfloat16 at rest). Each begins with the same weights and sees the same
batches. Of the losses: the mean of the last 100 steps, and that of 256 sequences of other files.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from measured import ratios_of, shown, table
from torch import Tensor, nn

import zero_fn as zf

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from pretrain import GPT

SEQ, BATCH, LAST, HELD_OUT = 256, 16, 100, 256
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"}


def step_times(layers: int, width: int, rounds: int) -> str:
    """A table of the time of a step of all ways, which take turns."""
    ways: dict[str, Callable[[torch.optim.Optimizer], torch.optim.Optimizer]] = {
        "fused AdamW of torch": lambda optimizer: optimizer,
        "zf.states8bit": zf.states8bit,
    }
    steps = {}
    for name, wrapped in ways.items():
        parameters = [nn.Parameter(torch.randn(width, width)) for _ in range(layers)]
        for parameter in parameters:
            parameter.grad = torch.randn(width, width)
        steps[name] = wrapped(torch.optim.AdamW(parameters, fused=True)).step
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 1):  # the first makes states
        for name in sorted(steps, reverse=bool(turn % 2)):
            begin = time.perf_counter()
            steps[name]()
            taken[name] += [time.perf_counter() - begin] * (turn > 0)
    base = taken["fused AdamW of torch"]
    return table([
        {"step": name, "ms": f"{1e3 * statistics.median(each):.1f}", "ratio": shown(ratios_of(each, base))}
        for name, each in taken.items()
    ])  # fmt: skip


def texts() -> tuple[Tensor, Tensor]:
    """Python's standard library as bytes: what is learnt, and files to validate on, about a tenth."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [path for path in root.rglob("*.py") if SKIPPED.isdisjoint(path.relative_to(root).parts)]
    parts = bytearray(), bytearray()
    for path in sorted(files, key=lambda path: hashlib.sha256(str(path.relative_to(root)).encode()).digest()):
        text = path.read_bytes()
        parts[len(parts[1]) * 10 < len(parts[0]) + len(parts[1])].extend(text)
    train, validation = (torch.frombuffer(part, dtype=torch.uint8).long() for part in parts)
    return train, validation


def placed(way: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and the optimizer of a way."""
    torch.manual_seed(0)
    model: nn.Module = GPT(4, 176, 4, SEQ)
    if way in ("master", "plain"):
        model = zf.precision(model, rest=torch.float32 if way == "master" else torch.bfloat16)
    elif way not in ("float32", "states8bit"):
        model = zf.precision(model, rest=torch.bfloat16, round="kahan" if way == "kahan" else "stochastic")
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=way != "plain"
    )
    if way in ("stochastic", "kahan"):
        optimizer = zf.streamed(optimizer)
    return model, zf.states8bit(optimizer) if way.endswith("8bit") else optimizer


def loss_of(model: nn.Module, text: Tensor, starts: Tensor) -> Tensor:
    tokens = text[starts[:, None] + torch.arange(SEQ + 1)]
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def learnt(way: str, steps: int, lr: float, train: Tensor, validation: Tensor) -> tuple[float, float]:
    """The mean loss of the last steps, and that of sequences of other files."""
    model, optimizer = placed(way)
    draws, losses = torch.Generator().manual_seed(1), []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min((step + 1) / 10, (30 / (step + 1)) ** 0.5, 1.0)
        loss = loss_of(model, train, torch.randint(len(train) - SEQ, (BATCH,), generator=draws))
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    draws.manual_seed(2)
    starts = torch.randint(len(validation) - SEQ, (HELD_OUT,), generator=draws)
    with torch.no_grad():
        held_out = [loss_of(model, validation, part).item() for part in torch.split(starts, BATCH)]
    return statistics.mean(losses[-LAST:]), statistics.mean(held_out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ways = ["float32", "states8bit", "master", "plain", "stochastic", "kahan", "stochastic8bit"]
    parser.add_argument("--layers", type=int, default=12, help="matrices that are stepped (default: 12)")
    parser.add_argument("--width", type=int, default=2048, help="rows and columns of each (default: 2048)")
    parser.add_argument("--rounds", type=int, default=15, help="turns (default: 15)")
    parser.add_argument("--steps", type=int, default=0, help="train for so many steps, and show losses")
    parser.add_argument("--lr", type=float, default=3e-3, help="highest learning rate (default: 3e-3)")
    parser.add_argument("--ways", nargs="+", choices=ways, default=ways, help="which ways learn")
    given = parser.parse_args()
    if not given.steps:
        print(step_times(given.layers, given.width, given.rounds))
        return
    train, validation = texts()
    bases: dict[bool, tuple[float, float]] = {}  # by whether it computes in float32, the first way
    for way in given.ways:
        found = learnt(way, given.steps, given.lr, train, validation)
        base = bases.setdefault(way in ("float32", "states8bit"), found)
        off = "  ".join(f"{100 * (one / other - 1):+.3f} %" for one, other in zip(found, base, strict=True))
        print(f"{way:15} last {LAST}: {found[0]:.5f}  other files: {found[1]:.5f}  off by {off}", flush=True)


if __name__ == "__main__":
    main()
