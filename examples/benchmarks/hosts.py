"""Host cost of a unit: what a framework adds to the Python and dispatch time of forward and backward.

    python examples/benchmarks/hosts.py

One process, a fake process group (collectives return at once), units of 6 small parameters: what remains is what the host
does. Plain PyTorch, FSDP2 and the stages of zero_fn run in turn, rounds of each interleaved. Reported are medians of the CPU
time of the thread, which other programs on the machine disturb less than the clock: microseconds per unit for forward +
backward, above plain PyTorch in the same round and against FSDP2 with a 95 % bootstrap interval, and microseconds per
parameter for the optimizer step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from measured import ratios_of, shown, table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import zero_fn as zf


class Unit(nn.Module):
    """Six parameters of at most 64 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Stack(nn.Module):
    def __init__(self, units: int) -> None:
        super().__init__()
        self.units = nn.ModuleList(Unit() for _ in range(units))

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x)
        return x


def fsdp2(model: Stack, mesh: DeviceMesh) -> nn.Module:
    for unit in model.units:
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)  # in place
    return model


def of_units(transform: Callable[..., nn.Module]) -> Callable[[Stack, DeviceMesh], nn.Module]:
    return lambda model, mesh: transform(model, mesh, units=Unit)


MODES: dict[str, Callable[[Stack, DeviceMesh], nn.Module]] = {
    "plain": lambda model, mesh: model,
    "fsdp2": fsdp2,
    "replicate": of_units(zf.replicate),
    "zero1": of_units(zf.shard_optimizer),
    "zero2": of_units(zf.shard_grads),
    "zero3": of_units(zf.shard_params),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--units", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    x = torch.randn(2, 8)
    compute: dict[str, list[float]] = {name: [] for name in MODES}
    step: dict[str, list[float]] = {name: [] for name in MODES}
    models = {name: build(Stack(args.units), mesh) for name, build in MODES.items()}
    optimizers = {name: torch.optim.AdamW(model.parameters(), lr=1e-9, foreach=True) for name, model in models.items()}
    for turn in range(args.rounds + 5):
        for name, model in models.items():
            began = time.thread_time()
            model(x).sum().backward()
            computed = time.thread_time()
            optimizers[name].step()
            stepped = time.thread_time()
            optimizers[name].zero_grad()
            if turn >= 5:
                compute[name].append((computed - began) / args.units * 1e6)
                step[name].append((stepped - computed) / args.units / 6 * 1e6)
    above = {
        name: [cost - plain for cost, plain in zip(compute[name], compute["plain"], strict=True)] for name in MODES
    }
    rows = [
        {
            "": name,
            "forward + backward, us per unit": f"{statistics.median(compute[name]):.0f}",
            "above plain": f"{statistics.median(above[name]):.0f}",
            "above plain / fsdp2": shown(ratios_of(above[name], above["fsdp2"])),
            "step, us per parameter": f"{statistics.median(step[name]):.1f}",
        }
        for name in MODES
    ]
    print(table(rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
