"""Training with everything on a disk: a step that is finished at once, and one that the next forward finishes.

    python examples/benchmarks/waiting.py --path /local_nvme --width 1024 --blocks 12 --rows 256

Both train the same model to the same bits, in turns in one process; "in memory" is the same without a disk. Prints
milliseconds of a whole training step (forward, backward, norm of all gradients, optimizer): median, best, and ratios round by
round.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from measured import ratios_of, shown
from torch import Tensor, nn

import zero_fn as zf


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = self.down(torch.relu(self.up(self.norm(x))))
        return x + changed


def built(width: int, blocks: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(width) for _ in range(blocks)])


def training(model: nn.Module, optimizer: torch.optim.Optimizer, rows: int, width: int) -> Callable[[], float]:
    generator = torch.Generator().manual_seed(1)

    def step() -> float:
        x = torch.randn(rows, width, generator=generator)
        loss = model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--path", default=".", help="a folder of the disk")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--rows", type=int, default=256, help="tokens of a batch")
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    disk = zf.nvme(options.path)
    ways: dict[str, Callable[[], float]] = {}
    for finish in ("step", "forward"):
        model = zf.offload(built(options.width, options.blocks), params=disk, grads=disk, optim=disk, donate=True)
        stock = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        optimizer = zf.streamed(stock, finish=finish)
        ways[f'finish="{finish}"'] = training(model, optimizer, options.rows, options.width)
    plain = built(options.width, options.blocks)
    stock = torch.optim.AdamW(plain.parameters(), lr=1e-4, fused=True)
    ways["in memory"] = training(plain, stock, options.rows, options.width)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(options.rounds + 2):
        losses = []
        for name, step in ways.items():
            start = time.perf_counter()
            losses.append(step())
            if number > 1:
                times[name].append(time.perf_counter() - start)
        assert losses[0] == losses[1], "the two ways are the same to the bit"
    numel = sum(parameter.numel() for parameter in plain.parameters())
    load = Path("/proc/loadavg").read_text().split()[0]
    print(f"{numel / 1e6:.0f} M parameters, {options.rows} rows, {options.rounds} rounds, load average {load}")
    base = times['finish="step"']
    for name, each in times.items():
        middle = sorted(each)[len(each) // 2]
        print(
            f"{name:<18} {middle * 1e3:6.0f} ms, best {min(each) * 1e3:6.0f}, {shown(ratios_of(each, base))} of the first"
        )


if __name__ == "__main__":
    main()
