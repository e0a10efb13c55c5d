"""The step of Muon over the matrices of a GPT: on every rank, or each matrix on one rank, its owner. Prints ratios.

    python examples/benchmarks/owners.py                                    # 12 x 512, on 2 and on 4 ranks
    python examples/benchmarks/owners.py --shape 12x1024 --ranks 2 --rounds 1 --alone       # the memory of a step

All ways live in the same processes, begin with the same weights and see the same tokens; the order rotates from round to
round. Embeddings, norms and biases are frozen, so the step is that of the matrices:

    ddp             DDP, and `torch.optim.Muon` on every rank, which steps all matrices
    gathered        FSDP2. Each rank gathers all gradients, steps all matrices and takes over its rows
    deepspeed2      Muon of DeepSpeed at ZeRO-2, where it is installed, with torch's iteration; and what it does at the end
                    of backward
    replicate, zero1, zero2, zero3      `zf.by_owner(torch.optim.Muon(...))`

Reported of the step are medians over rounds; ratios are to ddp in the same round, with a 95 % bootstrap interval:

    CPU ms, most    of all threads of a rank: mean over ranks, and that of the busiest one
    wall ms         of the slowest rank
    payload MB      sent by a rank, as zero_fn counts it
    sockets MB      that went over the sockets of the host, per rank. On one host zero_fn shares memory
    states MB       mean over ranks
    raised MB       by how much the step raises the resident memory of a rank at most: with --alone, which runs each way in
                    processes of its own. Shared pages count in every process
    loss            of the last step, mean over ranks; the program fails if they differ

At last the work of the busiest rank over that of the mean one, as the matrices of Llamas are dealt, by the products of
Newton-Schulz.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import contestants
import torch
import torch.distributed as dist
from contestants import GPT, Contestant
from measured import Meter, ratios_of, shown, table
from scale import Layer, Shape
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import zero_fn as zf

RATE, SEQ, WARMUP = 0.002, 16, 2
LLAMAS = {"7B": Shape(32, 4096, 11008, 4096), "8B": Shape(32, 4096, 14336, 1024), "70B": Shape(80, 8192, 28672, 1024)}
Numbers = dict[str, list[float]]


def muon(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Muon([parameter for parameter in parameters if parameter.requires_grad], lr=RATE)


def way(
    model: nn.Module, optimizer: Any, meter: Meter, step: Callable[[], Any] | None = None, backward: Any = None
) -> Contestant:
    step = meter.over(step or optimizer.step)

    def update() -> None:
        step()
        optimizer.zero_grad()

    def held() -> int:
        values = [value for state in optimizer.state.values() for value in state.values()]
        return sum(value.nbytes for value in values if isinstance(value, Tensor))

    return Contestant(model, backward or torch.autograd.backward, update, held)


def ddp(model: GPT, mesh: DeviceMesh, meter: Meter) -> Contestant:
    return way(contestants.ddp(model, mesh, False).model, muon(model.parameters()), meter)


def gathered(model: Any, mesh: DeviceMesh, meter: Meter) -> Contestant:
    model = contestants.fsdp2(reshards=True)(model, mesh, False).model
    shards: list[Any] = [parameter for parameter in model.parameters() if parameter.requires_grad]
    wholes = [nn.Parameter(shard.detach().full_tensor()) for shard in shards]
    optimizer = muon(wholes)

    @torch.no_grad()
    def step() -> None:
        for shard, whole in zip(shards, wholes, strict=True):
            whole.grad, shard.grad = shard.grad.full_tensor(), None
        optimizer.step()
        for shard, whole in zip(shards, wholes, strict=True):
            shard.copy_(distribute_tensor(whole, mesh, shard.placements, src_data_rank=None))

    return way(model, optimizer, meter, step)


def deepspeed2(model: GPT, mesh: DeviceMesh, meter: Meter) -> Contestant:
    for parameter in model.parameters():
        parameter.use_muon = parameter.requires_grad  # type: ignore[attr-defined]
    options = {"lr": RATE, "momentum": 0.95, "weight_decay": 0.1, "ns_method": "standard"}
    engine: Any = contestants.deepspeed(2, {"type": "Muon", "params": options})(model, mesh, False).model
    engine.optimizer.get_flat_partition = meter.over(engine.optimizer.get_flat_partition)  # has Newton-Schulz
    return way(engine, engine.optimizer.optimizer, meter, engine.step, engine.backward)


def owned(transform: Callable[..., nn.Module]) -> Callable[[GPT, DeviceMesh, Meter], Contestant]:
    def build(model: GPT, mesh: DeviceMesh, meter: Meter) -> Contestant:
        sharded = transform(model, mesh)
        return way(sharded, zf.by_owner(muon(sharded.parameters())), meter)

    return build


WAYS: dict[str, Callable[[GPT, DeviceMesh, Meter], Contestant]] = {
    "ddp": ddp,
    "gathered": gathered,
    "deepspeed2": deepspeed2,
    **{name: owned(getattr(zf, name)) for name in ("replicate", "zero1", "zero2", "zero3")},
}


def interleaved(names: Sequence[str], layers: int, dim: int, rounds: int) -> dict[str, Numbers]:
    """What each step of each way cost this rank, a step of each in turn; bytes held; the losses."""
    if len(names) == 1:
        ctypes.CDLL(None).mallopt(-3, 64 * 1024)  # M_MMAP_THRESHOLD: what is freed goes back to the system
    torch.set_num_threads(1)
    mesh, meter = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",)), Meter()
    ways: dict[str, Contestant] = {}
    for name in names:
        torch.manual_seed(0)
        model = GPT(layers, dim, SEQ)
        for path, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.ndim == 2 and path.startswith("blocks"))
        ways[name] = WAYS[name](model, mesh, meter)
    found: dict[str, Numbers] = {name: {key: [] for key in (*Meter.KEYS, "states", "loss")} for name in names}
    for number in range(rounds + WARMUP):
        generator = torch.Generator().manual_seed(97 * number + mesh.get_rank())
        tokens = torch.randint(256, (1, SEQ + 1), generator=generator)
        turn = number % len(names)
        for name in (*names[turn:], *names[:turn]):
            dist.all_reduce(loss := ways[name].step(tokens))
            cost = meter.read() | {"states": float(ways[name].held() or 0), "loss": loss.item() / mesh.size()}
            for key, value in cost.items() if number >= WARMUP else ():
                found[name][key].append(value)
    return found


def report(ranks: Sequence[dict[str, Numbers]]) -> str:
    """The table of one run."""

    def of(name: str, key: str, over: Callable[[list[float]], float] = statistics.mean) -> list[float]:
        return [over([*values]) for values in zip(*(rank[name][key] for rank in ranks), strict=True)]

    rows = []
    for name in ranks[0]:
        cpu, wall = of(name, "CPU"), of(name, "wall", max)
        row = {"": name, "CPU ms": f"{statistics.median(cpu) * 1e3:.0f}"}
        row["most"] = f"{statistics.median(of(name, 'CPU', max)) * 1e3:.0f}"
        row["/ ddp"] = shown(ratios_of(cpu, of("ddp", "CPU")))
        row["wall ms"] = f"{statistics.median(wall) * 1e3:.0f}"
        row["wall / ddp"] = shown(ratios_of(wall, of("ddp", "wall", max)))
        for key in ("payload", "sockets", "states"):
            row[f"{key} MB"] = f"{min(of(name, key)) / 1e6:.1f}"
        row["raised MB"] = f"{max(of(name, 'raised', max)) / 1e6:.0f}"
        row["loss"] = f"{ranks[0][name]['loss'][-1]:.4f}"
        rows.append(row)
    return table(rows)


def dealt(name: str, ranks: Sequence[int]) -> dict[str, str]:
    """Work of the busiest rank over that of the mean one, by the number of ranks. From shapes alone."""
    row = {"matrices of": name}
    for size in ranks:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
        with torch.device("meta"):
            model = nn.ModuleList(Layer(LLAMAS[name]) for _ in range(LLAMAS[name].layers))
        sharded = zf.shard_params(model, init_device_mesh("cpu", (size,), mesh_dim_names=("dp",)), units=Layer)
        matrices = [parameter for parameter in sharded.parameters() if parameter.ndim == 2]
        optimizer: Any = zf.by_owner(muon(matrices))
        work = [0] * size
        for parameter in matrices:
            short, long = sorted(parameter.shape)
            work[optimizer.owner_of(parameter).number] += short * short * (2 * long + short)
        dist.destroy_process_group()
        row[f"{size} ranks"] = f"{max(work) * size / sum(work):.3f}"
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="12x512", help="layers x width")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--alone", action="store_true", help="one way after another, each in processes of its own")
    args = parser.parse_args()
    layers, dim = (int(size) for size in args.shape.split("x"))
    names = [name for name in WAYS if name != "deepspeed2" or name in contestants.available()]
    agreed = True
    for count in args.ranks:
        ranks: list[dict[str, Numbers]] = [{} for _ in range(count)]
        for together in [[name] for name in names] if args.alone else [names]:
            found: Any = zf.launch(interleaved, count, together, layers, dim, args.rounds, timeout_s=None)
            for rank, own in zip(ranks, found, strict=True):
                rank |= own
        print(f"\n{args.shape}, {count} ranks, {args.rounds} rounds, torch {torch.__version__}\n{report(ranks)}")
        losses = [own["loss"][-1] for own in ranks[0].values()]
        agreed &= max(losses) < 1.01 * min(losses)
    print(f"\n{'all losses agree' if agreed else 'losses differ'}\n")
    print(table([dealt(name, (2, 4, 8, 16, 32, 64)) for name in LLAMAS]))
    sys.exit(0 if agreed else 1)


if __name__ == "__main__":
    main()
