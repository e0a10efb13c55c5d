"""Predictions of `autoplan` against what happens: each stage, with nothing and more and more on a disk, on local ranks.

    python examples/benchmarks/predicted.py --path /local_nvme --ranks 2

A stack of wide linear layers and a batch of one row: a step is collectives, optimizer and disk, and little computation.
The time of a forward and backward of one rank without collectives is measured and given to `autoplan` as `compute_s`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zero_fn as zf


def stack(width: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])


def median_s(run: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds + 2):
        dist.barrier()
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def _compute_s(model: nn.Module, x: torch.Tensor, rounds: int) -> float:
    return median_s(lambda: model(x).sum().backward(), rounds)


def compare(path: str, width: int, layers: int, rounds: int) -> list[str]:
    axis = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))["dp"]
    x = torch.randn(1, width)
    compute_s = _compute_s(stack(width, layers), x, rounds)
    links = zf.measure_links(axis, path=path)
    found = zf.autoplan(stack(width, layers), axis, "1TiB", links=links, tier=zf.nvme(path), compute_s=compute_s)
    lines = [
        str(links),
        f"{'transform':<16} {'on the disk':<30} {'predicted ms':>13} {'measured ms':>12} {'ratio':>6}  bound by",
    ]
    for proposal in found.all:
        model = proposal.place(stack(width, layers), axis, donate=True)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        if proposal.tier is not None:
            optimizer = zf.streamed(optimizer)

        def step(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

        took_s = median_s(step, rounds)
        lines.append(
            f"{proposal.transform:<16} {proposal.away:<30} {proposal.step_s * 1e3:>13.0f} {took_s * 1e3:>12.0f} "
            f"{took_s / proposal.step_s:>6.2f}  {proposal.bound}"
        )
        del model, optimizer, step
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--path", default=".", help="a folder of the disk")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    arguments = (options.path, options.width, options.layers, options.rounds)
    lines = zf.launch(compare, options.ranks, *arguments)[0]
    load = Path("/proc/loadavg").read_text().split()[0]
    elements = options.layers * options.width**2
    print(f"{elements / 1e6:.0f} M parameters, {options.ranks} ranks, load average {load}")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
