"""Meshes of two axes on four ranks, a model that tensor parallelism can place, and what training it gives."""

import functools
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import zero_fn as zf
from tests.support.programs import STAGES
from tests.support.reference import mean_in_rank_order
from tests.support.seeds import seed_generator
from tests.support.wholes import full

__all__ = [
    "Decoder",
    "adam",
    "averaging",
    "batch",
    "cast_by_hand",
    "composed",
    "differing",
    "grid",
    "kept",
    "loss_of",
    "parallelized",
    "snapshot",
    "step",
    "styles",
    "unlike",
]


@functools.cache
def grid(outer, inner):
    """The mesh of 2 x 2 ranks with these names. To be called on the ranks."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=(outer, inner))


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim + 2)  # half of it is odd
        self.down = nn.Linear(2 * dim + 2, dim)

    def forward(self, x):
        y = x + self.down(F.gelu(self.up(self.norm(x))))
        return y


class Decoder(nn.Module):
    """A language model in small, with parameters that no style places: `mix` and `scale`."""

    def __init__(self, vocabulary=26, dim=6, blocks=2):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.mix = nn.Linear(dim, dim)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.blocks = nn.ModuleList(Block(dim) for _ in range(blocks))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary)

    def forward(self, tokens):
        x = self.mix(self.embedding(tokens)) * self.scale
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits


def styles(kind):
    """Column and row; or with sequence-parallel norms, a vocabulary-parallel embedding and loss too."""
    blocks = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    if kind == "columns":
        return blocks
    return {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "blocks.0": PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True
        ),
        "blocks.*.norm": SequenceParallel(),
        "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }


def parallelized(mesh, kind="columns", dtype=torch.float32):
    """A seeded model, tensor parallel over `mesh`."""
    seed_generator(0)
    return parallelize_module(Decoder().to(dtype), mesh, styles(kind))


def batch(seed, rank):
    """Tokens and targets of one data-parallel rank and microbatch."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    tokens = torch.randint(0, 26, (3, 5), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model, seed, rank):
    tokens, targets = batch(seed, rank)
    logits = model(tokens)
    return F.cross_entropy(
        logits.flatten(0, 1).float() if logits.dtype == torch.bfloat16 else logits.flatten(0, 1), targets.flatten()
    )


def step(
    model,
    optimizer,
    number,
    rank,
    *,
    microbatches=1,
    clip=None,
    average=None,
):
    """One step; returns gradients and parameters: of replicas, which give `average`, whole, else as they rest."""
    copied = kept if average is None else full
    with zf.accumulate(model) if microbatches > 1 and average is None else nullcontext(), loss_parallel():
        for microbatch in range(microbatches):
            (loss_of(model, number * microbatches + microbatch, rank) / microbatches).backward()
    if average is not None:
        average(model)
    found = {f"gradient of {name}": copied(p.grad) for name, p in model.named_parameters()}
    if clip is not None:
        found["norm"] = full(nn.utils.clip_grad_norm_(model.parameters(), clip))
    optimizer.step()
    optimizer.zero_grad()
    return {**found, **{name: copied(parameter) for name, parameter in model.named_parameters()}}


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def unlike(case, model, expected, rank, **options):
    """Where steps of a model give other bits than those of replicas, as lines of text."""
    optimizer, lines = adam(model), []
    for number, state in enumerate(expected):
        found = step(model, optimizer, number, rank, **options)
        lines += [f"{case}, step {number}: {name}" for name in differing(state, {name: found[name] for name in state})]
    return lines


def cast_by_hand(build, average, rank):
    """Whole parameters after each of two steps of replicas that compute on a copy in bfloat16."""
    master = build()
    optimizer, expected = adam(master), []
    for number in range(2):
        compute = build()
        with torch.no_grad():
            for mine, theirs in zip(compute.parameters(), master.parameters(), strict=True):
                mine.copy_(theirs)
        loss_of(compute.bfloat16(), number, rank).backward()
        for mine, theirs in zip(compute.parameters(), master.parameters(), strict=True):
            grad = mine.grad
            if isinstance(grad, DTensor) and isinstance(mine, DTensor):
                grad = grad.redistribute(placements=mine.placements)
            theirs.grad = grad.float() if grad is not None else None
        average(master)
        optimizer.step()
        expected.append(snapshot(master))
    return expected


def kept(tensor):
    """A copy of a tensor as it rests."""
    return None if tensor is None else tensor.detach().clone()


def snapshot(model):
    """Whole parameters by name."""
    return {name: full(parameter) for name, parameter in model.named_parameters()}


def averaging(*axes):
    """What replicas over axes do: the mean over each in turn, added in the order of the ranks."""

    def average(model):
        for parameter in model.parameters():
            if parameter.grad is None:
                continue
            local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            for axis in axes:
                rows = [torch.empty_like(local) for _ in range(axis.size())]
                dist.all_gather(rows, local.contiguous(), group=axis.get_group())
                local.copy_(mean_in_rank_order(rows, local.dtype))

    return average


def differing(one, other):
    """Names under which whole tensors differ by a bit from others, or, on this rank, from the parts of resting ones."""
    assert one.keys() == other.keys()
    return [name for name, value in one.items() if not _is_equal(value, other[name])]


def _is_equal(whole, value):
    if whole is None or value is None:
        return whole is value
    if isinstance(value, DTensor):
        everywhere = DTensor.from_local(
            whole, value.device_mesh, [Replicate()] * value.device_mesh.ndim, run_check=False
        )
        whole = everywhere.redistribute(placements=value.placements).to_local()
        value = value.to_local()
    return torch.equal(whole, value)


def composed(composition):
    """A decoder of seed 0 on four ranks, below transforms over one or two axes, and which batch this rank has."""
    seed_generator(0)
    if composition in ("hybrid", "hpz"):
        mesh = grid("outer", "inner")
        if composition == "hybrid":
            return zf.hybrid(Decoder(), mesh), dist.get_rank()
        return zf.shard_grads(zf.shard_params(Decoder(), mesh["inner"]), mesh["outer"]), dist.get_rank()
    mesh = grid("dp", "tp")
    if composition == "tp":
        return zf.shard_params(parallelized(mesh["tp"]), mesh["dp"]), mesh["dp"].get_local_rank()
    model = STAGES[composition](Decoder(), mesh["dp"])
    return model, mesh["dp"].get_local_rank()
