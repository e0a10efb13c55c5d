"""Steps whose optimizer states are off the device: zero_fn against DeepSpeed, one process each, on a CPU.

    python examples/benchmarks/offload.py --path /local_nvme --peer /path/to/a/python/with/deepspeed

Each way is a process that waits for its turn; they step one after the other, so that a loaded machine slows all alike. The
model is a stack of linear layers with one row of input: the optimizer dominates. float32, AdamW, clipped by the norm.

    memory      zero_fn, states in memory
    cpu         zero_fn, `zf.streamed(optimizer, zf.cpu())`
    nvme        zero_fn, stage 3, `zf.streamed(optimizer, zf.nvme(path))`
    ds-cpu      DeepSpeed, stage 2, offload_optimizer to cpu (its CPUAdam, compiled at first use)
    ds-nvme     DeepSpeed, stage 3, offload_optimizer to nvme, read and written in a pipeline

`--peer` is the interpreter of an environment with deepspeed (`pip install deepspeed ninja`, and libaio's headers for nvme).
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import nn

OURS, PEERS = ("memory", "cpu", "nvme"), ("ds-cpu", "ds-nvme")
BOUND = 1.0


def stack(width: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])


def ours(way: str, path: str, width: int, layers: int) -> Callable[[], float]:
    """A step, which returns the loss."""
    import zero_fn as zf

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{_free_port()}", rank=0, world_size=1)
    axis = dist.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    model = zf.zero3(stack(width, layers), axis, donate=True)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    if way != "memory":
        optimizer = zf.streamed(optimizer, zf.cpu() if way == "cpu" else zf.nvme(path))
    x = torch.randn(1, width, generator=torch.Generator().manual_seed(1))

    def step() -> float:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), BOUND)
        optimizer.step()
        return float(loss.detach())

    return step


def deepspeed(way: str, path: str, width: int, layers: int) -> Callable[[], float]:
    """A step, which returns the loss."""
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_SIZE="1", MASTER_ADDR="127.0.0.1", RANK="0", WORLD_SIZE="1")
    os.environ.update(LOCAL_RANK="0", MASTER_PORT=str(_free_port()))
    import deepspeed as ds  # type: ignore[import-not-found,unused-ignore]

    ds.init_distributed(dist_backend="gloo")
    offload: dict[str, Any] = {"device": way.removeprefix("ds-"), "pin_memory": False}
    if way == "ds-nvme":
        offload |= {"nvme_path": path, "buffer_count": 4, "pipeline_read": True, "pipeline_write": True}
    zero = {"stage": 3 if way == "ds-nvme" else 2, "offload_optimizer": offload, "sub_group_size": 16_000_000}
    adamw = {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": BOUND,
        "optimizer": {"type": "AdamW", "params": adamw},
        "zero_optimization": zero,
        "aio": {"block_size": 1 << 20, "queue_depth": 8, "single_submit": False, "overlap_events": True},
    }
    model = stack(width, layers)
    engine, *_ = ds.initialize(model=model, model_parameters=model.parameters(), config=config)
    x = torch.randn(1, width, generator=torch.Generator().manual_seed(1))

    def step() -> float:
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def take_turns(way: str, path: str, width: int, layers: int) -> None:
    """A child: steps once for each line it reads, and answers with seconds, loss and the peak of its memory."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed
    step = (ours if way in OURS else deepspeed)(way, path, width, layers)
    print("ready", file=answers, flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        loss = step()
        took_s = time.perf_counter() - start
        peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
        print(json.dumps([took_s, loss, int(peak.split()[1]) * 1024]), file=answers, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--path", default=".", help="a folder of the disk")
    parser.add_argument("--peer", default=sys.executable, help="the interpreter that has deepspeed")
    parser.add_argument("--ways", nargs="+", default=[*OURS, *PEERS], choices=[*OURS, *PEERS])
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        take_turns(options.way, options.path, options.width, options.layers)
        return
    with TemporaryDirectory(dir=options.path) as path:
        children = {way: _child(options, way, path) for way in options.ways}
        times: dict[str, list[float]] = {way: [] for way in children}
        last: dict[str, tuple[float, int]] = {}
        for round_ in range(options.rounds + 2):
            for way, child in children.items():
                took_s, loss, peak_nbytes = _asked(child, way)
                last[way] = loss, peak_nbytes
                if round_ > 1:  # the first make states and files
                    times[way].append(took_s)
        for child in children.values():
            _input_of(child).close()
            child.wait()
    load = Path("/proc/loadavg").read_text().split()[0]
    print(f"{options.layers * options.width**2 / 1e6:.0f} M parameters, {options.rounds} rounds, load average {load}")
    print(f"{'way':<10}{'ms, best':>10}{'median':>10}{'peak MB':>10}  loss of the last step")
    for way, took in times.items():
        loss, peak_nbytes = last[way]
        print(
            f"{way:<10}{min(took) * 1e3:>10.0f}{statistics.median(took) * 1e3:>10.0f}{peak_nbytes / 1e6:>10.0f}  {loss:.9g}"
        )


def _child(options: argparse.Namespace, way: str, path: str) -> subprocess.Popen[str]:
    python = options.peer if way in PEERS else sys.executable
    shape = [f"--width={options.width}", f"--layers={options.layers}"]
    command = [python, __file__, f"--way={way}", f"--path={path}", *shape]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    if child.stdout.readline().strip() != "ready":
        sys.exit(f"{way} did not start, see above")
    return child


def _input_of(child: subprocess.Popen[str]) -> IO[str]:
    assert child.stdin is not None
    return child.stdin


def _asked(child: subprocess.Popen[str], way: str) -> tuple[float, float, int]:
    print("step", file=_input_of(child), flush=True)
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        sys.exit(f"{way} ended, see above")
    took_s, loss, peak_nbytes = json.loads(line)
    return took_s, loss, peak_nbytes


if __name__ == "__main__":
    main()
