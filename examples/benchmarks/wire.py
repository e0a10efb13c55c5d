"""What a small GPT learns when parameters and gradients travel in fewer bits.

    torchrun --nproc-per-node 4 examples/benchmarks/wire.py --seeds 0 1 2        # half an hour
    torchrun --nproc-per-node 4 examples/benchmarks/wire.py --ways int8 --curves curves.json
    python examples/benchmarks/wire.py --curves curves.json --draw losses.svg    # of what was written: needs matplotlib

All ways of a seed begin with the same weights and see the same batches, on as many ranks as there are; they compute in
float32. Losses: the mean of the last 50 steps over all ranks, and how far it is off that of `whole`, where nothing is coded.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from narrow import texts
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zero_fn as zf

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from pretrain import GPT

SEQ, BATCH, LAST = 64, 4, 50
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "int8": {"gather": zf.wire.int8(), "reduce": zf.wire.int8()},
    "int8, int4": {"gather": zf.wire.int8(), "reduce": zf.wire.int4()},
    "int8, int4 rotated": {"gather": zf.wire.int8(), "reduce": zf.wire.int4(rotate=True)},
    "differences, int4": {"gather": zf.wire.delta4(), "reduce": zf.wire.int4()},
    "differences, int4 rotated": {"gather": zf.wire.delta4(), "reduce": zf.wire.int4(rotate=True)},
    "int4, int4": {"gather": zf.wire.int4(), "reduce": zf.wire.int4()},
    "float8": {"gather": zf.wire.float8(), "reduce": zf.wire.float8(dtype=torch.float8_e5m2)},
}


def learnt(way: str, steps: int, seed: int, text: Tensor) -> list[float]:
    """The loss of each step, the mean over ranks."""
    torch.manual_seed(seed)
    model: nn.Module = GPT(4, 128, 4, SEQ)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = zf.precision(zf.shard_grads(model, mesh["dp"]), compute=torch.float32, **WAYS[way])
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    draws, losses = torch.Generator().manual_seed(1000 * seed + dist.get_rank()), []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1, (step + 1) / 40) * (0.1 + 0.9 * (1 - step / steps))
        starts = torch.randint(len(text) - SEQ, (BATCH,), generator=draws)
        tokens = text[starts[:, None] + torch.arange(SEQ + 1)]
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    means = torch.stack(losses)
    dist.all_reduce(means)
    found: list[float] = (means / dist.get_world_size()).tolist()
    return found


def draw(curves: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Draws the loss of each way and seed, and how far it is off that of `whole`; each point is the mean of 20 steps."""
    import matplotlib
    from matplotlib import pyplot

    matplotlib.use("Agg")
    matplotlib.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "wire"}
    )  # text as text, the same file each time
    figure, (losses, gaps) = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for number, (way, seeds) in enumerate(curves.items()):
        for first, (seed, steps) in enumerate(seeds.items()):
            ends = range(20, len(steps) + 1, 20)
            means, base = (
                [statistics.mean(each[end - 20 : end]) for end in ends] for each in (steps, curves["whole"][seed])
            )
            look: dict[str, Any] = {"color": f"C{number}", "linewidth": 0.8, "label": None if first else way}
            losses.plot(ends, means, **look)
            gaps.plot(ends, [100 * (mean / whole - 1) for mean, whole in zip(means, base, strict=True)], **look)
    losses.set(xlabel="step", ylabel="loss", ylim=(1.9, 3.2))
    gaps.set(xlabel="step", ylabel="off `whole` of the same seed, %")
    losses.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500, help="(default: 500)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of weights and batches (default: 0)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="which ways learn")
    parser.add_argument("--curves", type=Path, help="write the losses of all steps into this file")
    parser.add_argument("--draw", type=Path, help="only draw the file of --curves, into this SVG")
    given = parser.parse_args()
    if given.draw is not None:
        draw(json.loads(given.curves.read_text()), given.draw)
        return
    dist.init_process_group("gloo")
    text, _ = texts()
    curves: dict[str, dict[int, list[float]]] = {}
    for seed in given.seeds:
        for way in dict.fromkeys(["whole", *given.ways]):
            losses = learnt(way, given.steps, seed, text)
            curves.setdefault(way, {})[seed] = losses
            last, base = (statistics.mean(each[-LAST:]) for each in (losses, curves["whole"][seed]))
            if dist.get_rank() == 0:
                print(
                    f"seed {seed}  {way:26} last {LAST}: {last:.4f}  off by {100 * (last / base - 1):+.2f} %",
                    flush=True,
                )
                if given.curves is not None:
                    given.curves.write_text(json.dumps(curves))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
