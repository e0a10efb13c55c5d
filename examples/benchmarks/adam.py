"""The CPU step: one pass by the compiled kernel against torch's fused AdamW and against the stream of memory.

    python examples/benchmarks/adam.py --numel 50000000 --rounds 7

Every way steps the same number of elements; rounds are interleaved, so that a loaded machine slows all alike. Ways:

    stream        `x.mul_(c)` over 28 bytes per element, in place, by torch: what memory gives
    for-loop      torch.optim.AdamW as it comes
    fused         torch.optim.AdamW(fused=True)
    kernel        the same step in one pass in C
    kernel, cores by all cores that this process may use: with OMP_NUM_THREADS=1, what a lone rank of torchrun takes by itself
    mixed, 3 ops  bfloat16 gradients cast, torch's fused step, parameters cast to bfloat16
    mixed, parts  the same in parts that fit the cache: what there is without a compiler
    mixed, kernel the same in one pass in C
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from zero_fn.kernels import library
from zero_fn.kernels.adam import AdamPiece, AdamRates, by_torch, in_c, rounding
from zero_fn.kernels.threads import threads_for

RATES = AdamRates(1e-3, 0.9, 0.999, 1e-8, 0.01, is_decoupled=True, amsgrad=False, maximize=False)


def ways(numel: int) -> dict[str, tuple[Callable[[], object], int]]:
    """What to run, and the bytes that it must move per element."""
    param, grad = torch.randn(2, numel)
    half, send = grad.bfloat16(), torch.empty(numel, dtype=torch.bfloat16)
    averages = torch.zeros(2, numel)
    plain = AdamPiece(param, grad, averages[0], averages[1], None, 10)
    mixed = AdamPiece(param, half, averages[0], averages[1], None, 10, send)
    stream = torch.ones(numel * 28 // 8)  # each element is read and written
    whole = grad.clone()

    def three_ops() -> None:
        whole.copy_(half)
        by_torch([AdamPiece(param, whole, averages[0], averages[1], None, 10)], RATES)
        send.copy_(param)

    def stock(*, fused: bool) -> Callable[[], object]:
        parameter = torch.nn.Parameter(param)
        parameter.grad = grad
        optimizer = torch.optim.AdamW([parameter], fused=fused)
        optimizer.state[parameter] = {"step": torch.tensor(9.0), "exp_avg": averages[0], "exp_avg_sq": averages[1]}
        return optimizer.step

    found: dict[str, tuple[Callable[[], object], int]] = {
        "stream": (lambda: stream.mul_(1.0), 28),
        "for-loop": (stock(fused=False), 28),
        "fused": (stock(fused=True), 28),
        "mixed, 3 ops": (three_ops, 28),
        "mixed, parts": (lambda: by_torch([mixed], RATES), 28),
    }
    how = rounding(RATES)
    if how is not None:
        found["kernel"] = (lambda: in_c([plain], RATES, how), 28)
        found["kernel, cores"] = (lambda: in_c([plain], RATES, how, len(os.sched_getaffinity(0))), 28)
        found["mixed, kernel"] = (lambda: in_c([mixed], RATES, how), 28)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--numel", type=int, default=50_000_000, help="parameters")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    times: dict[str, list[float]] = {}
    running = ways(options.numel)
    for round_ in range(options.rounds + 1):
        for name, (run, _) in running.items():
            start = time.perf_counter()
            run()
            if round_:  # the first touches all memory
                times.setdefault(name, []).append(time.perf_counter() - start)
    load = Path("/proc/loadavg").read_text().split()[0]
    threads = f"{torch.get_num_threads()} threads, the kernel {threads_for(options.numel)}"
    print(f"{options.numel / 1e6:.0f} M elements, {threads}, load average {load}; {library()}")
    print(f"{'way':<14}{'ms, best':>10}{'median':>10}{'GB/s':>8}{'of stream':>11}")
    best_stream_s = min(times["stream"])
    for name, took_s in times.items():
        rate = running[name][1] * options.numel / min(took_s)
        share = rate / (28 * options.numel / best_stream_s)
        print(
            f"{name:<14}{min(took_s) * 1e3:>10.1f}{statistics.median(took_s) * 1e3:>10.1f}{rate / 1e9:>8.1f}{share:>11.2f}"
        )


if __name__ == "__main__":
    main()
