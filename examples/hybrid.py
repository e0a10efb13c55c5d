"""Two data axes: what each composition holds and sends, and that the losses are the same.

    python examples/hybrid.py                                2 x 2 local ranks
    torchrun --nproc-per-node 8 examples/hybrid.py --outer 2 --inner 4

On a cluster `outer` runs over nodes and `inner` over the accelerators of a node, where links are fast. Sharding over `inner`
only, and reducing hierarchically, sends 1/n of the gradients over the slow links, and no parameters.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from gpt import GPT, Block, Config, next_byte_loss
from program import device_option, mesh_of, on_ranks, option, parse
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import zero_fn as zf

TOLERANCE = 1e-5  # a mean over one axis of means over the other is rounded in another way than one mean


@dataclass(frozen=True)
class Options:
    """The command line."""

    outer: int = option(2, "ranks of the outer axis")
    inner: int = option(2, "ranks of the inner axis")
    layers: int = option(3, "blocks")
    dim: int = option(64, "width")
    heads: int = option(4, "attention heads")
    seq: int = option(32, "length of a sequence, bytes")
    steps: int = option(3, "optimizer steps of each composition")
    device: str | None = device_option()

    def __post_init__(self) -> None:
        _ = self.config  # raises if the shape is impossible

    @property
    def ranks(self) -> int:
        """Ranks of both axes."""
        return self.outer * self.inner

    @property
    def config(self) -> Config:
        """The shape of the model."""
        return Config(layers=self.layers, dim=self.dim, heads=self.heads, seq=self.seq)


Compose = Callable[[nn.Module, DeviceMesh], nn.Module]
COMPOSITIONS: dict[str, Compose] = {
    "replicate on both (DDP)": lambda m, mesh: zf.replicate(zf.replicate(m, mesh["inner"], units=Block), mesh["outer"]),
    "HSDP: zf.hybrid": lambda m, mesh: zf.hybrid(m, mesh, shard="inner", replicate="outer", units=Block),
    "hpZ: grads outside, params inside": lambda m, mesh: zf.shard_grads(
        zf.shard_params(m, mesh["inner"], units=Block), mesh["outer"]
    ),
    "ZeRO-1 outside, ZeRO-3 inside": lambda m, mesh: zf.shard_optimizer(
        zf.shard_params(m, mesh["inner"], units=Block), mesh["outer"]
    ),
    "ZeRO-3 on both": lambda m, mesh: zf.shard_params(zf.shard_params(m, mesh["inner"], units=Block), mesh["outer"]),
}

Row = tuple[str, int, dict[str, int], dict[str, int], list[float]]


def compare(options: Options) -> list[Row]:
    """What every rank runs. Returns, for each composition: bytes held, bytes sent, bytes that should be sent, mean losses."""
    device = options.device or "cpu"
    with mesh_of(device, outer=options.outer, inner=options.inner) as mesh:
        rows: list[Row] = []
        for name, compose in COMPOSITIONS.items():
            torch.manual_seed(0)
            model = compose(GPT(options.config).to(device), mesh)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            losses = []
            for step in range(options.steps):
                text = torch.randint(0, 256, (2, options.seq + 1), generator=_seeded(step, dist.get_rank()))
                with zf.traffic() as sent:
                    loss = next_byte_loss(model, text.to(device))
                    torch.autograd.backward(loss)
                held = zf.held(model, optimizer)
                optimizer.step()
                optimizer.zero_grad()
                total = loss.detach().clone()
                dist.all_reduce(total)
                losses.append(total.item() / mesh.size())
            nbytes = held.parameters + held.gradients + held.optimizer
            rows.append((name, nbytes, dict(sent.by_axis), dict(zf.plan(model).sent_by_axis), losses))
    return rows


def _seeded(step: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * step + rank)


def main() -> int:
    """Prints the table; 1 if losses differ, or bytes from the plan."""
    options = parse(Options, __doc__)
    rows = on_ranks(options.ranks, compare, options)
    if rows is None:
        return 0
    print(f"{'composition':<36}{'held':>12}{'sent inside':>13}{'sent outside':>14}{'last loss':>11}")
    for name, nbytes, sent, _, losses in rows:
        print(f"{name:<36}{nbytes:>12,}{sent['inner']:>13,}{sent['outer']:>14,}{losses[-1]:>11.6f}")
    first = rows[0][4]
    difference = max(abs(a - b) for *_, losses in rows for a, b in zip(first, losses, strict=True))
    as_planned = all(sent == planned for _, _, sent, planned, _ in rows)
    print(f"bytes as planned: {as_planned}; largest difference of a loss {difference:.1e}, allowed {TOLERANCE:.0e}")
    return int(difference > TOLERANCE or not as_planned)


if __name__ == "__main__":
    sys.exit(main())
