"""What it costs to plan for models and machines that are not here: transform, plan and schedule, by model size and ranks.

    python examples/benchmarks/scale.py
    python examples/benchmarks/scale.py --models 70b --ranks 1024

Models are made on meta with layers like those of Llama; ranks are those of a fake process group of which this process is
one, so nothing is communicated. Reported are seconds of CPU time of the thread, which other programs on the machine disturb
least, and the time per unit, which should not depend on how many there are.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from measured import resident_nbytes, table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import zero_fn as zf
from zero_fn.runtime.passes import Script
from zero_fn.values.schedule import Enter, Exit, Use, forward_schedule, prefetch

VOCABULARY = 128_256


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder."""

    layers: int
    dim: int
    hidden: int
    kv_dim: int


MODELS = {
    "1b": Shape(16, 2048, 8192, 512),
    "8b": Shape(32, 4096, 14336, 1024),
    "70b": Shape(80, 8192, 28672, 1024),
    "100b": Shape(118, 8192, 28672, 1024),
}


class Layer(nn.Module):
    """The parameters of a decoder layer. It is never run."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.RMSNorm(shape.dim), nn.RMSNorm(shape.dim)
        self.q = nn.Linear(shape.dim, shape.dim, bias=False)
        self.k = nn.Linear(shape.dim, shape.kv_dim, bias=False)
        self.v = nn.Linear(shape.dim, shape.kv_dim, bias=False)
        self.o = nn.Linear(shape.dim, shape.dim, bias=False)
        self.gate = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.up = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.dim, bias=False)


class Decoder(nn.Module):
    """A decoder on meta."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, shape.dim)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.dim)
        self.head = nn.Linear(shape.dim, VOCABULARY, bias=False)


def measure(name: str, ranks: int) -> dict[str, object]:
    """One row: a model, transformed for so many ranks."""
    shape = MODELS[name]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
        with torch.device("meta"):
            model = Decoder(shape)
        began = time.thread_time()
        sharded = zf.shard_params(model, mesh["dp"], units=Layer)
        transformed = time.thread_time()
        plan = zf.plan(sharded)
        planned = time.thread_time()
        units = shape.layers + 1
        trace = [bracket(Use(i)) for i in range(1, units) for bracket in (Enter, Exit)]
        trace = [Enter(Use(0)), *trace, Exit(Use(0))]
        prefetch(forward_schedule(tuple(trace), keeps_last=True), depth=1)
        Script(trace, frozenset(range(units)), ahead=partial(prefetch, depth=1))
        scheduled = time.thread_time()
    finally:
        dist.destroy_process_group()
    numel = sum(parameter.numel() for parameter in model.parameters())
    total = scheduled - began
    return {
        "model": name,
        "G parameters": f"{numel / 1e9:.1f}",
        "ranks": ranks,
        "units": units,
        "transform s": f"{transformed - began:.2f}",
        "plan s": f"{planned - transformed:.2f}",
        "schedule ms": f"{(scheduled - planned) * 1e3:.1f}",
        "total s": f"{total:.2f}",
        "ms per unit": f"{total / units * 1e3:.2f}",
        "held GB per rank": f"{plan.memory.total / 1e9:.2f}",
        "resident MB": f"{resident_nbytes() / 1e6:.0f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 1024, 16384])
    args = parser.parse_args()
    measure("1b", 2)  # the first use of everything
    print(table([measure(name, ranks) for name in args.models for ranks in args.ranks]))


if __name__ == "__main__":
    main()
