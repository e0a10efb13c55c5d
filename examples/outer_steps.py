"""Islands that train apart and meet every few steps, over slow links (DiLoCo, arXiv:2311.08105).

    torchrun --nproc-per-node 4 outer_steps.py                2 islands of 2 ranks, which meet every 10 steps, in 4 bits
    torchrun --nproc-per-node 4 outer_steps.py --apart 0      gradients are averaged over both axes in each step instead

Within an island, axis `dp`, the model is ZeRO-3 with AdamW. Every `apart` steps comes an outer step: how far the parameters
have moved is averaged over the islands, and taken for a gradient by SGD with momentum. That is ZeRO-2 of a second module,
over the slow axis: its parameters are the shards of this rank, and its forward returns them.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zero_fn as zf


@dataclass
class Options:
    islands: int = 2
    apart: int = 10  # steps until islands meet; 0: they do not part
    layers: int = 2
    dim: int = 64
    heads: int = 4
    seq: int = 64  # bytes of a sequence
    rows: int = 8  # sequences of each rank in a step
    steps: int = 100
    lr: float = 3e-3
    outer_lr: float = 0.7
    text: str = argparse.__file__  # a file to learn


class GPT(nn.Module):
    """Bytes "row time" to logits of the next byte, "row time 256"."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        dim, wide = options.dim, 4 * options.dim
        self.embed, self.place = nn.Embedding(256, dim), nn.Embedding(options.seq, dim)
        block = nn.TransformerEncoderLayer(dim, options.heads, wide, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, options.layers, enable_nested_tensor=False)
        self.head = nn.Linear(dim, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        return cast(Tensor, self.head(self.blocks(x, mask, is_causal=True)))


class Shards(nn.Module):
    """The shards of a rank, as the last outer step left them."""

    def __init__(self, shards: list[Tensor]) -> None:
        super().__init__()
        self.shards = nn.ParameterList(shard.clone() for shard in shards)

    def forward(self) -> list[Tensor]:
        return [shard.clone() for shard in self.shards]


def main() -> None:
    parser = argparse.ArgumentParser()
    for field in fields(Options):
        parser.add_argument("--" + field.name.replace("_", "-"), type=type(field.default), default=field.default)
    options = Options(**vars(parser.parse_args()))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    mesh = init_device_mesh(device, (options.islands, ranks // options.islands), mesh_dim_names=("islands", "dp"))

    torch.manual_seed(0)  # every rank builds the same model
    model: nn.Module = zf.shard_params(GPT(options), mesh["dp"], units=nn.TransformerEncoderLayer)
    model = model if options.apart else zf.replicate(model, mesh["islands"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    shards = [parameter.detach().to_local() for parameter in model.parameters()]  # type: ignore[attr-defined]
    outer: nn.Module = zf.shard_grads(Shards(shards), mesh["islands"])
    outer = zf.precision(outer, compute=torch.float32, gather=zf.wire.delta4(), reduce=zf.wire.int4())
    outer_optimizer = torch.optim.SGD(outer.parameters(), lr=options.outer_lr, momentum=0.9, nesterov=True)
    began = outer()  # from which values all islands set out

    text = torch.frombuffer(bytearray(Path(options.text).read_bytes()), dtype=torch.uint8)
    draws = torch.Generator().manual_seed(rank)  # every rank of both axes has other rows
    with zf.traffic() as sent:
        for step in range(options.steps):
            starts = torch.randint(len(text) - options.seq, (options.rows, 1), generator=draws)
            tokens = text[starts + torch.arange(options.seq + 1)].to(device, torch.long)
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            torch.autograd.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if options.apart and (step + 1) % options.apart == 0:
                moved = [before.detach() - now for before, now in zip(began, shards, strict=True)]
                torch.autograd.backward(began, moved)  # their gradients: what moved, averaged over the islands
                outer_optimizer.step()
                outer_optimizer.zero_grad()
                began = outer()
                with torch.no_grad():
                    for shard, value in zip(shards, began, strict=True):
                        shard.copy_(value)
            mean = loss.detach() / ranks
            dist.all_reduce(mean)
            if rank == 0 and ((step + 1) % 10 == 0 or step == 0):
                print(f"step {step}: loss {mean.item():.3f}", flush=True)
    if rank == 0:
        print("bytes sent by a rank in a step:", {axis: n // options.steps for axis, n in sent.by_axis.items()})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
