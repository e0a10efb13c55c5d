"""A step whose states are on a disk: what clipping by the global norm costs it.

    python examples/benchmarks/streamed.py --path /local_nvme --numel 100000000

Ways, interleaved:

    forth           every step visits the chunks in the same order: it begins by waiting for the disk
    back and forth  as it is: a step begins with the chunks that the one before it computed last
    in memory       `torch.optim.AdamW(fused=True)`

each without clipping, with `clip_grad_norm_` by a bound that the norm does not reach, and by one that it exceeds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import zero_fn as zf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--path", default=".", help="a folder of the disk to measure")
    parser.add_argument("--numel", type=int, default=100_000_000, help="parameters")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rows = options.numel // 16 // 1024
    parameters = [nn.Parameter(torch.randn(rows, 1024)) for _ in range(16)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    stock = torch.optim.AdamW(parameters, fused=True)
    tier = zf.nvme(options.path)
    forth = zf.streamed(torch.optim.AdamW(parameters, fused=True), tier)
    both = zf.streamed(torch.optim.AdamW(parameters, fused=True), tier)

    def always_forth() -> None:
        forth._steps.is_backwards = False
        forth.step()

    ways: dict[str, Callable[[], object]] = {
        "forth": always_forth,
        "back and forth": both.step,
        "in memory": stock.step,
    }
    bounds = {"no clipping": None, "not reached": 1e9, "exceeded": 1.0}
    times: dict[tuple[str, str], list[float]] = {}
    for round_ in range(options.rounds + 1):
        for name, step in ways.items():
            for kind, bound in bounds.items():
                start = time.perf_counter()
                if bound is not None:
                    nn.utils.clip_grad_norm_(parameters, bound)
                step()
                if round_:  # the first makes the states
                    times.setdefault((name, kind), []).append(time.perf_counter() - start)
    load = Path("/proc/loadavg").read_text().split()[0]
    print(f"{options.numel / 1e6:.0f} M parameters, {options.rounds} rounds, load average {load}; ms, best (median)")
    print(f"{'way':<16}" + "".join(f"{kind:>18}" for kind in bounds))
    for name in ways:
        cells = [
            f"{min(t) * 1e3:.0f} ({statistics.median(t) * 1e3:.0f})" for t in (times[name, kind] for kind in bounds)
        ]
        print(f"{name:<16}" + "".join(f"{cell:>18}" for cell in cells))
    print(both)


if __name__ == "__main__":
    main()
