"""Pretrains a small GPT from scratch with ZeRO, saves checkpoints, and goes on from the last one.

    torchrun --nproc-per-node 2 pretrain.py --save runs/a                          on CPUs, or a GPU for each rank
    torchrun --nproc-per-node 4 pretrain.py --save runs/a --steps 400 --stage 1    goes on, at other ranks and stage
    torchrun --max-restarts 9 ... pretrain.py --save runs/a --elastic 10           a lost rank costs the last few steps

All but the calls of zf is plain PyTorch. Batches follow from the step, and ranks divide them: losses are those of one run.
"""

import argparse
import os
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_fn as zf


@dataclass
class Options:
    stage: int = 3  # of ZeRO: what is sharded, from nothing (0) to everything (3)
    precision: str = "fp32"  # or bf16: compute in bfloat16, parameters at rest in float32
    recompute: int = 0  # 1: of a block its input is kept alone; its forward runs again
    layers: int = 4
    dim: int = 128
    heads: int = 4
    seq: int = 128  # tokens of a sequence
    batch: int = 16  # sequences of a step, over all ranks
    steps: int = 200
    lr: float = 3e-3
    text: str = argparse.__file__  # a file to learn, which is mapped into memory
    vocab: int = 256  # above 256 the file has two bytes for each token, as numpy's uint16
    save: str = ""  # a folder for checkpoints, from which a run also goes on
    save_every: int = 50
    elastic: int = 0  # copies in memory, too, every so many steps
    leave_within: float = 0.0  # seconds after SIGTERM, in which a run saves and ends with status 75; 0: it ends at once
    log_to: str = ""  # where metrics go while it runs: "tensorboard:runs prometheus:9400"


class Block(nn.Module):
    """Causal attention, then a feed-forward layer; "row time dim" in and out."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Tokens "row time" to logits of the next one, "row time vocab"."""

    def __init__(self, layers: int, dim: int, heads: int, seq: int, vocab: int = 256) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(vocab, dim), nn.Embedding(seq, dim)
        self.blocks = nn.Sequential(*(Block(dim, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x)))


def main() -> None:
    parser = argparse.ArgumentParser()
    for field in fields(Options):
        parser.add_argument("--" + field.name.replace("_", "-"), type=type(field.default), default=field.default)
    options = Options(**vars(parser.parse_args()))
    here = zf.from_environment().start()  # under torchrun, Slurm, mpirun, Ray, Kubernetes, or alone
    mesh = dist.init_device_mesh(here.device.type, (here.ranks,), mesh_dim_names=("dp",))
    torch.manual_seed(0)  # every rank builds the same model
    model: nn.Module = GPT(options.layers, options.dim, options.heads, options.seq, options.vocab)
    model = zf.precision(model) if options.precision == "bf16" else model
    model = zf.checkpoint_activations(model, units=Block) if options.recompute else model
    stage = [zf.replicate, zf.shard_optimizer, zf.shard_grads, zf.shard_params][options.stage]
    model = stage(model, mesh["dp"])  # the lesson
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 10, (10 / (step + 1)) ** 0.5))
    kind = torch.uint8 if options.vocab <= 256 else torch.uint16
    size = os.path.getsize(options.text) // kind.itemsize
    text = torch.from_file(options.text, size=size, dtype=kind)
    said = zf.resume(options.save, model, optimizer, extra={"warmup": warmup}) if options.save else None
    losses: list[float] = said["losses"] if said else []  # of the newest state: in memory or on the disk
    extra = {"warmup": warmup, "losses": losses}
    copies = None
    if options.elastic:
        copies = zf.checkpoint.memory_copies(options.save, model, optimizer, every=options.elastic)
    preemption = zf.distributed.preemption(within_s=options.leave_within) if options.leave_within else None
    metrics = zf.metrics(model, optimizer, sinks=options.log_to.split(), step=len(losses))
    for step in range(len(losses), options.steps):
        draws = torch.Generator().manual_seed(step)  # every rank draws the same batch, and takes some of its rows
        starts = torch.randint(len(text) - options.seq, (options.batch, 1), generator=draws)[here.rank :: here.ranks]
        tokens = text[starts + torch.arange(options.seq + 1)].to(here.device, torch.long)
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        metrics.step(loss, tokens=tokens.numel(), grad_norm=norm)
        optimizer.zero_grad()
        warmup.step()
        dist.all_reduce(mean := loss.detach() / here.ranks)
        losses.append(mean.item())
        if here.rank == 0 and (step % 10 == 0 or step == options.steps - 1):
            print(f"step {step}: loss {losses[-1]:.3f}", flush=True)
        if copies is not None:
            copies.update(extra=extra)
        is_leaving = preemption is not None and preemption.is_due()  # the same on every rank
        if options.save and (is_leaving or (step + 1) % options.save_every == 0):
            zf.save(f"{options.save}/step-{step + 1:06d}", model, optimizer, extra=extra, keep=3)
        if is_leaving:
            preemption.leave()
    metrics.close()
    if copies is not None:
        copies.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
