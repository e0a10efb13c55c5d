"""Trains the same GPT on the same batches under every contestant, one step of each in turn, and prints ratios.

    python examples/benchmarks/compare.py                                   # 8 x 512, sequence 64, 1 sequence per rank
    python examples/benchmarks/compare.py --shape 6x256x256x4 8x512x64x1 --ranks 2 4 --out /tmp/results

A shape is layers x width x sequence x sequences per rank. Machines are shared and noisy: a ratio of two steps that ran one
after the other says more than two times. All contestants live in the same processes and the order rotates from round to
round. Reported for each:

    step ms, CPU ms     medians; CPU time is of all threads of rank 0
    / ddp, / fsdp2      median over rounds of the ratio of step times in the same round, with a 95 % bootstrap interval
    waited              share of the time in which threads of rank 0 were ready and the machine ran something else: where it
                        is not near 0 the machine is loaded, and frameworks with more waits between ranks look worse
    held MB             parameters and optimizer state of rank 0, between steps
    payload MB          of parameters and gradients, as zero_fn counts it
    sockets MB          least that went over the sockets of the host in a step, per rank. On one host zero_fn shares memory
    peak MB             with --memory: resident memory at most over that after the imports, each contestant in processes of
                        its own. Shared pages count in every process
    loss                of the last step, mean over ranks; the program fails if they differ

With --out, everything goes to a JSON file and the ratios to a PNG (matplotlib) for each shape, dtype and number of ranks.
Where CUDA is available the ranks take one device each, and times include its work.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from contestants import CONTESTANTS, GPT, Contestant, available
from measured import (
    draw_ratios,
    forget_peak,
    ratios_of,
    resident_nbytes,
    shown,
    sockets_nbytes,
    table,
    waited_s,
)
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zero_fn as zf

LOSS_TOLERANCE = {False: 1e-3, True: 3e-2}  # relative, by whether in bfloat16
BASES = ("ddp", "fsdp2")


@dataclass(frozen=True)
class Task:
    """What is trained, and for how long."""

    layers: int
    dim: int
    seq: int
    batch: int
    bf16: bool
    rounds: int
    warmup: int
    device: str

    def __str__(self) -> str:
        dtype = "bf16" if self.bf16 else "fp32"
        return f"{self.layers} x {self.dim}, sequence {self.seq} x {self.batch} per rank, {dtype}"


@dataclass
class Cost:
    """What the steps of one contestant cost rank 0."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    waited_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    sockets_nbytes: list[int] = field(default_factory=list)
    payload_nbytes: int = 0
    held_nbytes: int | None = None
    peak_nbytes: int | None = None


def batches(task: Task, rank: int, world: int, device: torch.device) -> list[Tensor]:
    """The tokens of each step on this rank, "batch seq+1": bytes of these programs."""
    text = torch.frombuffer(
        bytearray(b"".join(p.read_bytes() for p in sorted(Path(__file__).parent.glob("*.py")))), dtype=torch.uint8
    )
    text = text.repeat(-(-2 * (task.seq + 1) // len(text)) + 1).long()
    found = []
    for step in range(task.rounds + task.warmup):
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(text) - task.seq - 1, (world * task.batch,), generator=generator).tolist()
        own = starts[rank * task.batch : (rank + 1) * task.batch]
        found.append(torch.stack([text[start : start + task.seq + 1] for start in own]).to(device))
    return found


def build(name: str, task: Task, mesh: DeviceMesh, device: torch.device) -> Contestant:
    torch.manual_seed(0)
    return CONTESTANTS[name](GPT(task.layers, task.dim, task.seq).to(device), mesh, task.bf16)


def place(task: Task) -> tuple[DeviceMesh, torch.device]:
    """The mesh of all ranks, and the device of this one."""
    torch.set_num_threads(1)
    mesh = init_device_mesh(task.device, (dist.get_world_size(),), mesh_dim_names=("dp",))
    if task.device == "cuda":
        torch.cuda.set_device(dist.get_rank())
        return mesh, torch.device("cuda", dist.get_rank())
    return mesh, torch.device(task.device)


def interleaved(names: Sequence[str], task: Task) -> dict[str, Cost]:
    """All contestants on one rank, a step of each in turn."""
    mesh, device = place(task)
    data = batches(task, dist.get_rank(), dist.get_world_size(), device)
    contestants = {name: build(name, task, mesh, device) for name in names}
    costs = {name: Cost() for name in names}
    for number, tokens in enumerate(data):
        turn = number % len(names)
        for name in (*names[turn:], *names[:turn]):
            step(contestants[name], costs[name], tokens, keeps=number >= task.warmup)
    for name in names:
        costs[name].held_nbytes = contestants[name].held()
    return costs


def step(contestant: Contestant, cost: Cost, tokens: Tensor, *, keeps: bool) -> None:
    """One step between two barriers."""
    dist.barrier()
    sockets, waited = sockets_nbytes(), waited_s()
    cpu, wall = time.process_time(), time.perf_counter()
    with zf.traffic() as sent:
        loss = contestant.step(tokens)
        if tokens.is_cuda:
            torch.cuda.synchronize()
    dist.barrier()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    waited, sockets = waited_s() - waited, sockets_nbytes() - sockets
    dist.all_reduce(loss)
    if keeps:
        cost.wall_s.append(wall)
        cost.cpu_s.append(cpu)
        cost.waited_s.append(waited)
        cost.sockets_nbytes.append(sockets // dist.get_world_size())
        cost.losses.append(loss.item() / dist.get_world_size())
        cost.payload_nbytes = sent.nbytes


def peak(name: str, task: Task) -> int:
    """Bytes of memory at most, of one contestant alone, over that after the imports."""
    mesh, device = place(task)
    forget_peak()
    before = resident_nbytes()
    contestant = build(name, task, mesh, device)
    for tokens in batches(task, dist.get_rank(), dist.get_world_size(), device)[:4]:
        contestant.step(tokens)
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else resident_nbytes(peak=True) - before


def disagreement(costs: dict[str, Cost], bf16: bool) -> str | None:
    """What is wrong with the losses, if anything."""
    first, *others = costs
    for name in others:
        for number, (one, other) in enumerate(zip(costs[first].losses, costs[name].losses, strict=True)):
            if abs(one - other) > LOSS_TOLERANCE[bf16] * abs(one):
                return f"losses differ in round {number}: {first} {one:.6f}, {name} {other:.6f}"
    return None


def megabytes(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / 1e6:.1f}"


def report(costs: dict[str, Cost]) -> str:
    """The table of one run."""
    rows = []
    for name, cost in costs.items():
        row: dict[str, object] = {"": name}
        row["step ms"] = f"{statistics.median(cost.wall_s) * 1e3:.1f}"
        row["CPU ms"] = f"{statistics.median(cost.cpu_s) * 1e3:.1f}"
        for base in BASES:
            if base in costs:
                row[f"/ {base}"] = shown(ratios_of(cost.wall_s, costs[base].wall_s))
        if "ddp" in costs:
            row["CPU / ddp"] = shown(ratios_of(cost.cpu_s, costs["ddp"].cpu_s))
        row["waited"] = f"{statistics.median(w / s for w, s in zip(cost.waited_s, cost.wall_s, strict=True)):.0%}"
        row["held MB"] = megabytes(cost.held_nbytes)
        row["payload MB"] = megabytes(cost.payload_nbytes or None)
        row["sockets MB"] = megabytes(min(cost.sockets_nbytes))
        row["peak MB"] = megabytes(cost.peak_nbytes)
        row["loss"] = f"{cost.losses[-1]:.4f}"
        rows.append(row)
    return table(rows)


def run(names: Sequence[str], task: Task, ranks: int, *, memory: bool, out: Path | None) -> bool:
    """One table. Returns whether the losses agreed."""
    costs: dict[str, Cost] = zf.launch(interleaved, ranks, list(names), task, timeout_s=None)[0]  # type: ignore[assignment]
    if memory:
        for name in names:
            costs[name].peak_nbytes = max(zf.launch(peak, ranks, name, task, timeout_s=None))  # type: ignore[type-var]
    wrong = disagreement(costs, task.bf16)
    title = f"{task}, {ranks} ranks, {task.device}, torch {torch.__version__}"
    print(f"\n{title}, {task.rounds} rounds\n{report(costs)}\n{wrong or 'all losses agree'}", flush=True)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        stem = f"{task.layers}x{task.dim}x{task.seq}x{task.batch}-{'bf16' if task.bf16 else 'fp32'}-{ranks}"
        found = {
            base: {n: ratios_of(c.wall_s, costs[base].wall_s) for n, c in costs.items()}
            for base in BASES
            if base in costs
        }
        everything = {
            "task": asdict(task),
            "ranks": ranks,
            "costs": {n: asdict(c) for n, c in costs.items()},
            "ratios": found,
        }
        (out / f"{stem}.json").write_text(json.dumps(everything, indent=1))
        if found:
            draw_ratios(out / f"{stem}.png", title, found)
    return wrong is None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shape", nargs="+", default=["8x512x64x1"], help="layers x width x sequence x sequences per rank"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--dtype", nargs="+", choices=["fp32", "bf16"], default=["fp32"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--modes", nargs="+", choices=list(CONTESTANTS), default=available())
    parser.add_argument("--memory", action="store_true", help="peak memory too, one launch per contestant")
    parser.add_argument("--out", type=Path, help="folder for JSON and PNG")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    agreed = True
    for shape in args.shape:
        layers, dim, seq, batch = (int(size) for size in shape.split("x"))
        for ranks in args.ranks:
            for dtype in args.dtype:
                task = Task(layers, dim, seq, batch, dtype == "bf16", args.rounds, args.warmup, device)
                agreed &= run(args.modes, task, ranks, memory=args.memory, out=args.out)
    sys.exit(0 if agreed else 1)


if __name__ == "__main__":
    main()
