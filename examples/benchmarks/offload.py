"""Steps whose optimizer states are off the device: zero_fn against DeepSpeed, one process each, on a CPU.

    python examples/benchmarks/offload.py --path /local_nvme --peer /path/to/a/python/with/deepspeed
    python examples/benchmarks/offload.py --path /local_nvme --peer ... --gpt 6x256x128x8

Each way is a process that waits for its turn; they step one after the other, so that a loaded machine slows all alike, and
ratios are of steps of the same round: their median with a 95 % bootstrap interval. The model is a stack of linear layers
with one row of input, so that the optimizer dominates; or with --gpt, layers x width x sequence x sequences, a GPT, so that
computation does. float32, AdamW, clipped by the norm.

    memory      zero_fn, states in memory
    cpu         zero_fn, `zf.streamed(optimizer, zf.cpu())`
    nvme        zero_fn, stage 3, `zf.streamed(optimizer, zf.nvme(path))`
    ds-cpu      DeepSpeed, stage 2, offload_optimizer to cpu (its CPUAdam, compiled at first use)
    ds-nvme     DeepSpeed, stage 3, offload_optimizer to nvme, read and written in a pipeline, for which its default of 4
                buffers is too few; its aio with the settings that were fastest of six

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
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from contestants import GPT
from measured import ratios_of, shown, table
from torch import Tensor, nn

OURS, PEERS = ("memory", "cpu", "nvme"), ("ds-cpu", "ds-nvme")
BOUND = 1.0


Loss = Callable[[nn.Module], Tensor]


@dataclass(frozen=True)
class Task:
    """What is trained: a stack of linear layers, or a GPT of layers x width x sequence x sequences."""

    width: int
    layers: int
    gpt: str | None

    def build(self) -> tuple[nn.Module, Loss]:
        """The model, and its loss on the batch, which is the same in each step."""
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(1)
        if self.gpt is None:
            row = torch.randn(1, self.width, generator=generator)
            layers = [nn.Linear(self.width, self.width, bias=False) for _ in range(self.layers)]
            return nn.Sequential(*layers), lambda model: model(row).square().mean()
        depth, width, sequence, count = map(int, self.gpt.split("x"))
        tokens = torch.randint(256, (count, sequence + 1), generator=generator)
        targets = tokens[:, 1:].flatten()
        return GPT(depth, width, sequence), lambda model: F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), targets)


def ours(way: str, path: str, task: Task) -> Callable[[], float]:
    """A step, which returns the loss."""
    import zero_fn as zf

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{_free_port()}", rank=0, world_size=1)
    axis = dist.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    module, loss_of = task.build()
    model = zf.shard_params(module, axis, donate=True)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    if way != "memory":
        optimizer = zf.streamed(optimizer, zf.cpu() if way == "cpu" else zf.nvme(path))

    def step() -> float:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), BOUND)
        optimizer.step()
        return float(loss.detach())

    return step


def deepspeed(way: str, path: str, task: Task) -> Callable[[], float]:
    """A step, which returns the loss."""
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_SIZE="1", MASTER_ADDR="127.0.0.1", RANK="0", WORLD_SIZE="1")
    os.environ.update(LOCAL_RANK="0", MASTER_PORT=str(_free_port()))
    import deepspeed as ds  # type: ignore[import-not-found,unused-ignore]

    ds.init_distributed(dist_backend="gloo")
    offload: dict[str, Any] = {"device": way.removeprefix("ds-"), "pin_memory": False}
    if way == "ds-nvme":
        offload |= {"nvme_path": path, "buffer_count": 12, "pipeline_read": True, "pipeline_write": True}
    zero = {"stage": 3 if way == "ds-nvme" else 2, "offload_optimizer": offload, "sub_group_size": 16_000_000}
    adamw = {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": BOUND,
        "optimizer": {"type": "AdamW", "params": adamw},
        "zero_optimization": zero,
        "aio": {"block_size": 8 << 20, "queue_depth": 8, "overlap_events": True, "intra_op_parallelism": 4},
    }
    model, loss_of = task.build()
    engine, *_ = ds.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step() -> float:
        loss = loss_of(engine)
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def take_turns(way: str, path: str, task: Task) -> None:
    """A child: steps once for each line it reads, and answers with seconds, CPU seconds, loss and the peak of its memory."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed
    step = (ours if way in OURS else deepspeed)(way, path, task)
    print("ready", file=answers, flush=True)
    for _ in sys.stdin:
        start, cpu = time.perf_counter(), time.process_time()
        loss = step()
        took_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu
        peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
        print(json.dumps([took_s, cpu_s, loss, int(peak.split()[1]) * 1024]), file=answers, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--path", default=".", help="a folder of the disk")
    parser.add_argument("--peer", default=sys.executable, help="the interpreter that has deepspeed")
    parser.add_argument("--ways", nargs="+", default=[*OURS, *PEERS], choices=[*OURS, *PEERS])
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--gpt", help="layers x width x sequence x sequences, as 6x256x128x8")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    options = parser.parse_args()
    task = Task(options.width, options.layers, options.gpt)
    if options.way:
        take_turns(options.way, options.path, task)
        return
    with TemporaryDirectory(dir=options.path) as path:
        children = {way: _child(options, way, path) for way in options.ways}
        steps: dict[str, list[_Step]] = {way: [] for way in children}
        for round_ in range(options.rounds + 2):
            turn = round_ % len(children)
            for way in (*options.ways[turn:], *options.ways[:turn]):
                step = _asked(children[way], way)
                if round_ > 1:  # the first make states and files
                    steps[way].append(step)
        for child in children.values():
            _input_of(child).close()
            child.wait()
    load = Path("/proc/loadavg").read_text().split()[0]
    numel = sum(parameter.numel() for parameter in task.build()[0].parameters())
    print(f"{numel / 1e6:.0f} M parameters, {options.rounds} rounds, load average {load}")
    print(_report(steps))


class _Step(NamedTuple):
    """What one step of a child was like."""

    took_s: float
    cpu_s: float
    loss: float
    peak_nbytes: int


def _report(steps: dict[str, list[_Step]]) -> str:
    took = {way: [step.took_s for step in own] for way, own in steps.items()}
    rows = []
    for way, own in steps.items():
        row: dict[str, object] = {"": way, "ms, best": f"{min(took[way]) * 1e3:.0f}"}
        row["median"] = f"{statistics.median(took[way]) * 1e3:.0f}"
        row["CPU ms"] = f"{statistics.median(step.cpu_s for step in own) * 1e3:.0f}"
        if "memory" in took:
            row["/ memory"] = shown(ratios_of(took[way], took["memory"]))
        base = way.removeprefix("ds-")
        row["/ ours"] = shown(ratios_of(took[way], took[base])) if base in took else ""
        row["peak MB"] = f"{own[-1].peak_nbytes / 1e6:.0f}"
        row["loss of the last step"] = f"{own[-1].loss:.9g}"
        rows.append(row)
    return table(rows)


def _child(options: argparse.Namespace, way: str, path: str) -> subprocess.Popen[str]:
    python = options.peer if way in PEERS else sys.executable
    shape = [f"--width={options.width}", f"--layers={options.layers}"]
    shape += [f"--gpt={options.gpt}"] if options.gpt else []
    command = [python, __file__, f"--way={way}", f"--path={path}", *shape]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    if child.stdout.readline().strip() != "ready":
        sys.exit(f"{way} did not start, see above")
    return child


def _input_of(child: subprocess.Popen[str]) -> IO[str]:
    assert child.stdin is not None
    return child.stdin


def _asked(child: subprocess.Popen[str], way: str) -> _Step:
    print("step", file=_input_of(child), flush=True)
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        sys.exit(f"{way} ended, see above")
    return _Step(*json.loads(line))


if __name__ == "__main__":
    main()
