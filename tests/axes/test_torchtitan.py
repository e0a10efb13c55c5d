"""A Llama in the style of torchtitan, with a model file of its own, trains as under FSDP2 where one line takes its place.

The words are this project's; the shape is torchtitan's: `layers` is a `ModuleDict`, tables of rotations are a complex buffer
that is passed along, parts of a pipeline are made by setting what they lack to None, a plan of sequence-parallel styles.
"""

import difflib
import inspect
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import zero_fn as zf

VOCAB, DIM, HEADS, LENGTH, LAYERS = 32, 16, 4, 8, 4
PAGE = Path(__file__).parents[2] / "docs" / "coming-from" / "fsdp2-options.md"


# -- the model file -------------------------------------------------------------------------------------------------


def rotations(head_dim, length):
    """Complex numbers by which pairs of channels turn: "length head_dim/2"."""
    rates = 10000.0 ** (-torch.arange(0, head_dim, 2)[: head_dim // 2] / head_dim)
    angles = torch.outer(torch.arange(length), rates)
    return torch.polar(torch.ones_like(angles), angles)


def turned(x, freqs_cis):
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * freqs_cis[: x.shape[1], None]).flatten(3).type_as(x)


class TransformerBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))
        self.w1, self.w2 = nn.Linear(DIM, 2 * DIM, bias=False), nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x, freqs_cis):
        return self.feed_forward(x + self.attention(self.attention_norm(x), freqs_cis))

    def attention(self, x, freqs_cis):
        # -1 heads: tensor parallelism leaves some of them
        q, k, v = (w(x).unflatten(-1, (-1, DIM // HEADS)) for w in (self.wq, self.wk, self.wv))
        q, k = turned(q, freqs_cis), turned(k, freqs_cis)
        heads = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        out = self.wo(heads.transpose(1, 2).flatten(2))
        return out

    def feed_forward(self, x):
        out = x + self.w2(F.silu(self.w1(self.ffn_norm(x))))
        return out


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, DIM)
        self.register_buffer("freqs_cis", rotations(DIM // HEADS, LENGTH), persistent=False)
        self.layers = nn.ModuleDict({str(number): TransformerBlock() for number in range(LAYERS)})
        self.norm = nn.RMSNorm(DIM)
        self.output = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens):
        h = self.tok_embeddings(tokens) if self.tok_embeddings is not None else tokens
        for layer in self.layers.values():
            h = layer(h, self.freqs_cis)
        h = self.norm(h) if self.norm is not None else h
        return self.output(h) if self.output is not None else h


# -- the file that parallelizes it ------------------------------------------------------------------------------------


def apply_tp(model, tp):
    plan = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for number in model.layers:
        plan |= {f"layers.{number}.{name}": SequenceParallel() for name in ("attention_norm", "ffn_norm")}
        plan |= {
            f"layers.{number}.{name}": ColwiseParallel(input_layouts=Shard(1)) for name in ("wq", "wk", "wv", "w1")
        }
        plan |= {f"layers.{number}.{name}": RowwiseParallel(output_layouts=Shard(1)) for name in ("wo", "w2")}
    parallelize_module(model, tp, plan)


class Before:
    """With FSDP2."""

    @staticmethod
    def parallelize(model, mesh):
        if "tp" in mesh.mesh_dim_names:
            apply_tp(model, mesh["tp"])
        for block in model.layers.values():
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        return model

    @staticmethod
    def train_step(model, schedule, x, y, losses):
        schedule.step(*x, target=y, losses=losses)


class After:
    """With zero_fn."""

    @staticmethod
    def parallelize(model, mesh):
        if "tp" in mesh.mesh_dim_names:
            apply_tp(model, mesh["tp"])
        return zf.shard_params(model, mesh["dp"])

    @staticmethod
    def train_step(model, schedule, x, y, losses):
        with zf.accumulate(model, unshard=True):
            schedule.step(*x, target=y, losses=losses)


# -- training -------------------------------------------------------------------------------------------------------


def batch_of(step, dp_rank):
    """Tokens and the tokens after them, the same for all ranks with one share of the data."""
    tokens = torch.randint(VOCAB, (4, LENGTH + 1), generator=torch.Generator().manual_seed(10 * step + dp_rank))
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _dp_tp(which):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = which.parallelize(Llama(), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(5):
        x, y = batch_of(step, mesh.get_local_rank("dp"))
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=True)
        optimizer.step()
        losses += [loss.item(), norm.full_tensor().item() if isinstance(norm, DTensor) else norm.item()]
    return losses


def _pp_dp(which):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    torch.manual_seed(0)
    part, index = Llama(), mesh.get_local_rank("pp")
    for number in range(LAYERS):
        if number // (LAYERS // 2) != index:
            del part.layers[str(number)]
    if index == 0:
        part.norm = part.output = None
    else:
        part.tok_embeddings = None
    model = which.parallelize(part, mesh)
    stage = PipelineStage(model, index, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(stage, 4, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step in range(5):
        x, y = batch_of(step, mesh.get_local_rank("dp"))
        losses = []
        optimizer.zero_grad()
        which.train_step(model, schedule, (x,) if index == 0 else (), y if index else None, losses)
        optimizer.step()
        found += [loss.item() for loss in losses]
    return found


@pytest.mark.parametrize("program", [_dp_tp, _pp_dp])
def test_losses_are_those_under_fsdp2(ranks, program):
    before, after = ranks(4).run(program, Before), ranks(4).run(program, After)
    assert max(len(losses) for losses in after) >= 10
    for under_fsdp2, ours in zip(before, after, strict=True):
        assert ours == pytest.approx(under_fsdp2, rel=1e-5)
        assert ours[-4:] != pytest.approx(ours[:4], rel=1e-3) or not ours, "nothing was trained"


def test_the_page_shows_what_changes():
    before, after = (inspect.getsource(which).splitlines()[2:] for which in (Before, After))
    lines = list(difflib.unified_diff(before, after, n=1, lineterm=""))[2:]
    changed = [line for line in lines if line.startswith(("+", "-"))]
    (shown,) = re.findall(r"```diff\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert [line for line in shown.splitlines() if line.startswith(("+", "-"))] == [
        line[0] + line[5:] for line in changed
    ]
