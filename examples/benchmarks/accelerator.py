"""One accelerator: what its links and the host allow, and training steps with more and more on the host and on a disk.

    python examples/benchmarks/accelerator.py --path /local_nvme --gpt 24x2048x1024 --tokens 4096 16384 65536

First the bounds: pinned copies each way and both at once, an in-place stream of both memories, torch's fused AdamW by threads
of the host and on the device, the disk. Then a GPT, computed in bfloat16 and clipped by its norm, one way after the other:

    device          everything on the accelerator, torch's AdamW
    states          states on the host: gradients and parameters visit them (plain ZeRO-Offload)
    host            parameters, gradients and states on the host
    host, forward   the same; the next forward finishes the step, unit by unit
    disk            parameters, gradients and states on the disk

With --traces FOLDER one more step of each way is profiled: its trace is written there for a browser (chrome://tracing), and a
line says how long the device computed, copied, did both at once, and neither.

Prints for each the median of a step, its ratio to "device", what `zf.plan` says crosses the link and is on the host, the most
memory of the device where it says so, and the last loss: those with the step on the host agree to the last digit.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from contestants import GPT
from measured import table
from torch import Tensor, nn

import zero_fn as zf

WAYS = ("device", "states", "host", "host, forward", "disk")
_PARAMETERS = 50_000_000  # of the bounds


def seconds(run: Callable[[], object], rounds: int = 7) -> float:
    """The median of some runs, the device waited for; the first two do not count."""
    times = []
    for _ in range(rounds + 2):
        torch.accelerator.synchronize()
        start = time.perf_counter()
        run()
        torch.accelerator.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def bounds(device: torch.device, path: str | None, numel: int) -> Iterator[str]:
    yield str(zf.measure_links(path=path, nbytes=4 * numel))
    one, two = (torch.ones(numel, pin_memory=device.type == "cuda") for _ in range(2))
    here, there = torch.ones(2, numel, device=device)
    streams = [torch.Stream(device) for _ in range(2)]

    def both() -> None:
        with streams[0]:
            here.copy_(one, non_blocking=True)
        with streams[1]:
            two.copy_(there, non_blocking=True)

    yield f"{'both ways at once':<20} {8 * numel / seconds(both) / 1e9:8.2f} GB/s"
    for name, place in [("the device", device), ("the host", torch.device("cpu"))]:
        for threads in (1,) if place == device else sorted({1, 2, 4, 8, 16, os.cpu_count() or 1}):
            if threads > (os.cpu_count() or 1):
                continue
            torch.set_num_threads(threads)
            parameter = nn.Parameter(torch.ones(numel, device=place))
            parameter.grad = torch.ones_like(parameter)
            optimizer = torch.optim.AdamW([parameter], fused=place.type in ("cpu", "cuda"))
            how = "" if place == device else f", {threads} threads"
            yield f"{f'AdamW on {name}{how}':<32} {1e12 * seconds(optimizer.step) / numel:8.1f} ms for a billion parameters"


def profiled(step: Callable[[], object], file: str) -> str:
    """What the device did in one step, in milliseconds; the trace goes to a file."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.accelerator.synchronize()
    profile.export_chrome_trace(file)
    with open(file) as trace:
        events = [event for event in json.load(trace)["traceEvents"] if "dur" in event]
    if not any(event.get("cat") in ("kernel", "gpu_memcpy") for event in events):
        return "the profiler saw nothing on the device"
    times = {
        "computes": _covered([event for event in events if event.get("cat") == "kernel"]),
        "copies": _covered([event for event in events if event.get("cat") == "gpu_memcpy"]),
        "either": _covered([event for event in events if event.get("cat") in ("kernel", "gpu_memcpy")]),
    }
    started = min(event["ts"] for event in events)
    whole = max(event["ts"] + event["dur"] for event in events) - started
    both = times["computes"] + times["copies"] - times["either"]
    said = {"computes": times["computes"], "copies": times["copies"], "both": both, "neither": whole - times["either"]}
    return ", ".join(f"{name} {microseconds / 1e3:.1f} ms" for name, microseconds in said.items())


def _covered(events: Sequence[dict[str, Any]]) -> float:
    """The time in which at least one of the events runs."""
    total, end = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event["ts"]):
        begun, ended = event["ts"], event["ts"] + event["dur"]
        total += max(0.0, ended - max(begun, end))
        end = max(end, ended)
    return total


def trained(
    way: str, task: tuple[int, int, int], count: int, device: torch.device, path: str, rounds: int, traces: str | None
) -> Any:
    """A row of the table."""
    depth, width, sequence = task
    torch.manual_seed(0)
    model: nn.Module = zf.precision(GPT(depth, width, sequence).to(device))
    tier = zf.nvme(path) if way == "disk" else zf.cpu()
    if way not in ("device", "states"):
        model = zf.offload(model, params=tier, grads=tier, optim=tier, reshard_after="backward", donate=True)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=way != "device" or device.type == "cuda")
    if way == "states":
        optimizer = zf.streamed(optimizer, tier)
    elif way != "device":
        optimizer = zf.streamed(optimizer, finish="forward" if way.endswith("forward") else "step")
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(256, (max(count // sequence, 1), sequence + 1), generator=generator).to(device)
    losses: list[Tensor] = []

    def step() -> None:
        loss = F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    found = seconds(step, rounds)
    if traces is not None:
        print(f"{way}: {profiled(step, f'{traces}/trace, {way}.json')}", flush=True)
    planned = zf.plan(model, optimizer)
    return {
        "way": way,
        "tokens": f"{tokens[:, 1:].numel():,}",
        "ms": 1e3 * found,
        "to device MB": f"{planned.link.to_device / 1e6:,.1f}",
        "from it MB": f"{planned.link.from_device / 1e6:,.1f}",
        "host MB": f"{planned.host_nbytes / 1e6:,.1f}",
        "device MB": f"{torch.cuda.max_memory_allocated(device) / 1e6:,.0f}" if device.type == "cuda" else "",
        "loss": f"{losses[-1].item():.6f}",
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--path", help="a folder of a disk; without it nothing is on one")
    parser.add_argument("--gpt", default="12x1024x1024", help="layers x width x sequence")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384], help="of a step")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--traces", help="a folder: one more step of each way is profiled, and its trace written there")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--numel", type=int, default=_PARAMETERS, help="elements of the bounds")
    options = parser.parse_args(arguments)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None:
        raise SystemExit("there is no accelerator; examples/benchmarks/offload.py is for the CPU")
    threads = torch.get_num_threads()
    for line in bounds(device, options.path, options.numel):
        print(line, flush=True)
    torch.set_num_threads(threads)
    depth, width, sequence = map(int, options.gpt.split("x"))
    numel = sum(parameter.numel() for parameter in GPT(depth, width, sequence).parameters())
    print(f"\nGPT {options.gpt}, {numel / 1e6:.0f} M parameters, {threads} threads")
    for count in options.tokens:
        rows = []
        for way in options.ways:
            if way == "disk" and options.path is None:
                continue
            task = depth, width, sequence
            rows.append(trained(way, task, count, device, options.path or "", options.rounds, options.traces))
            gc.collect()
        first = rows[0]["ms"]
        print(table([{**row, "ms": f"{row['ms']:.1f}", "/ first": f"{row['ms'] / first:.2f}"} for row in rows]))


if __name__ == "__main__":
    main()
