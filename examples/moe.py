"""A mixture of experts on a mesh of data x expert ranks: dense parameters are sharded over both axes, experts over one.

    python examples/moe.py                                    2 x 2 local ranks, stage 3, dropless
    python examples/moe.py --stage 2 --capacity 1.25          tokens beyond 1.25 of an even share are dropped

    mesh["dp"]   every rank has another batch
    mesh["ep"]   every rank has another batch, and other experts: tokens travel to theirs and back

Experts rest as DTensors, `Shard(0)` on ep, before any transform. So a transform over dp shards them like everything else, and
a transform over ep leaves them out: they lie there already. Their gradients have been added up on the way back from the
ranks that sent tokens; zero_fn divides them by their number, for the loss is a mean over all ranks.

At the end one process trains with all experts on the same batches, and the losses are set side by side.

Source: top-k routing, Shazeer 2017; capacity and the auxiliary loss, Switch Transformers, Fedus et al. 2021.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from mesh_of_ranks import mesh_of, on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import zero_fn as zf

STAGES: dict[int, Any] = {0: zf.replicate, 1: zf.shard_optimizer, 2: zf.shard_grads, 3: zf.shard_params}
DP, EP = 2, 2
VOCAB, DIM, HIDDEN, EXPERTS, TOP, TOKENS = 32, 16, 32, 4, 2, 24
BALANCE, MAX_NORM = 0.01, 1.0
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Ranks:
    """Along the axis of experts; one rank that has all of them without a mesh."""

    group: Any = None
    size: int = 1

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return self  # a transform copies the module, but there is one process group


class Experts(nn.Module):
    """The feed-forward layers of some experts, as two tensors: "expert dim hidden" and "expert hidden dim"."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, DIM, HIDDEN) * DIM**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, DIM) * HIDDEN**-0.5)

    def forward(self, tokens: Tensor, counts: list[int]) -> Tensor:
        """Tokens "token dim" in the order of the experts that this rank has, `counts` of them for each."""
        up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.up, self.down))
        parts = torch.split(tokens, counts)
        return torch.cat([F.gelu(part @ one) @ other for part, one, other in zip(parts, up, down, strict=True)])


class MoE(nn.Module):
    """Sends each token to its best experts, wherever they are, and adds up what comes back, weighted.

    Attributes:
        balance: Of the last forward: 1 if every expert had the same share of the tokens, more otherwise.
    """

    def __init__(self, ranks: Ranks, capacity: float | None) -> None:
        super().__init__()
        self.ranks, self.capacity = ranks, capacity
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = Experts()
        self.balance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        chances = self.router(x).softmax(-1)  # "token expert"
        weights, chosen = chances.topk(TOP, dim=-1)
        share = F.one_hot(chosen, EXPERTS).to(x.dtype).mean((0, 1))
        self.balance = EXPERTS * (share * chances.mean(0)).sum()
        token = torch.arange(len(x)).repeat_interleave(TOP)
        expert, weight = chosen.flatten(), weights.flatten()
        if self.capacity is not None:
            room = int(self.capacity * len(x) * TOP / EXPERTS)
            place = (F.one_hot(expert, EXPERTS).cumsum(0) - 1).gather(1, expert[:, None])[:, 0]
            kept = place < room
            token, expert, weight = token[kept], expert[kept], weight[kept]
        order = expert.argsort(stable=True)
        token, expert, weight = token[order], expert[order], weight[order]
        answers = self._everywhere(x[token], torch.bincount(expert, minlength=EXPERTS))
        return torch.zeros_like(x).index_add(0, token, answers * weight[:, None])

    def _everywhere(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """The answers of the experts to tokens that come in the order of the experts, `counts` for each."""
        if self.ranks.size == 1:
            alone: Tensor = self.experts(tokens, counts.tolist())
            return alone
        asked = counts.view(self.ranks.size, -1)  # "rank expert": what this rank asks of each
        asking = torch.empty_like(asked)  # and what each rank asks of the experts here
        dist.all_to_all_single(asking, asked, group=self.ranks.group)
        sent, received = asked.sum(1).tolist(), asking.sum(1).tolist()
        arrived: Tensor = _Exchanged.apply(tokens, sent, received, self.ranks.group)  # type: ignore[no-untyped-call]
        here = torch.arange(asking.shape[1]).repeat(len(asking))  # of the rows that arrived, rank by rank
        by_expert = here.repeat_interleave(asking.flatten())
        order = by_expert.argsort(stable=True)
        answers = self.experts(arrived[order], asking.sum(0).tolist())
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        returned: Tensor = _Exchanged.apply(answers[back], received, sent, self.ranks.group)  # type: ignore[no-untyped-call]
        return returned


class _Exchanged(torch.autograd.Function):
    """Rows for other ranks for rows of other ranks; gradients go the way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange(grad, ctx.received, ctx.sent, ctx.group), None, None, None


def _exchange(rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    result = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
    return result


class Layer(nn.Module):
    """A dense layer, then experts."""

    def __init__(self, ranks: Ranks, capacity: float | None) -> None:
        super().__init__()
        self.norm, self.dense = nn.LayerNorm(DIM), nn.Linear(DIM, DIM)
        self.moe = MoE(ranks, capacity)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.dense(x))
        y: Tensor = x + self.moe(self.norm(x))
        return y


class Model(nn.Module):
    """Guesses a token from the one before."""

    def __init__(self, ranks: Ranks, capacity: float | None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.first, self.second = Layer(ranks, capacity), Layer(ranks, capacity)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss, with what is added for the balance of experts."""
        x = self.second(self.first(self.embed(tokens)))
        balance = self.first.moe.balance + self.second.moe.balance
        return F.cross_entropy(self.head(x), targets) + BALANCE * balance


def build(stage: int, mesh: DeviceMesh, capacity: float | None, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Experts are placed on ep; then dp shards everything, and ep what is not an expert."""
    torch.manual_seed(0)
    model: nn.Module = Model(Ranks(mesh.get_group("ep"), EP), capacity).to(dtype)
    for module in model.modules():
        if isinstance(module, Experts):
            for name, parameter in list(module.named_parameters()):
                setattr(module, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh["ep"], [Shard(0)])))
    shard = STAGES[stage]
    model = shard(model, mesh["dp"], units=Layer)
    dense = {} if stage == 0 else {"where": lambda name, _: ".experts." not in name}
    model = shard(model, mesh["ep"], **dense)
    return model


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Tokens of one rank, and the token that follows each: a permutation to be learnt."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    return tokens, (7 * tokens + 3) % VOCAB


def train(
    steps: int, stage: int, capacity: float | None, dtype: torch.dtype = torch.float32
) -> list[tuple[float, float]]:
    """What every rank runs: loss, mean over all ranks, and norm of the gradients of each step."""
    with mesh_of(dp=DP, ep=EP) as mesh:
        model = build(stage, mesh, capacity, dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        seen = []
        for step in range(steps):
            loss = model(*batch(step, dist.get_rank()))
            torch.autograd.backward(loss)
            norm: Any = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)  # over dense parameters and experts
            optimizer.step()
            optimizer.zero_grad()
            total = loss.detach().clone()
            dist.all_reduce(total)
            seen.append((total.item() / (DP * EP), norm.full_tensor().item()))
    return seen


def train_alone(steps: int, capacity: float | None, dtype: torch.dtype = torch.float32) -> list[tuple[float, float]]:
    """The same training in one process that has every expert, on the batches of all ranks."""
    torch.manual_seed(0)
    model = Model(Ranks(), capacity).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen = []
    for step in range(steps):
        loss = torch.stack([model(*batch(step, rank)) for rank in range(DP * EP)]).mean()
        torch.autograd.backward(loss)
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        seen.append((loss.item(), norm.item()))
    return seen


def main() -> int:
    """Trains both ways and prints losses and norms; 1 if they differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, choices=sorted(STAGES), default=3)
    parser.add_argument("--capacity", type=float, help="of an even share of the tokens; left out: none is dropped")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    seen = on_ranks({"dp": DP, "ep": EP}, train, options.steps, options.stage, options.capacity)
    if seen is None:
        return 0
    alone = train_alone(options.steps, options.capacity)
    print(f"dp {DP} x ep {EP}, ZeRO-{options.stage}, {EXPERTS} experts, the best {TOP} of them for each token")
    print(f"{'step':>5} {'loss':>9} {'one process':>12} {'norm':>9} {'one process':>12}")
    for step, (one, other) in enumerate(zip(seen, alone, strict=True)):
        print(f"{step:5} {one[0]:9.5f} {other[0]:12.5f} {one[1]:9.5f} {other[1]:12.5f}")
    difference = max(
        abs(a - b) for one, other in zip(seen, alone, strict=True) for a, b in zip(one, other, strict=True)
    )
    print(f"largest difference {difference:.1e}, allowed {TOLERANCE:.0e}")
    return int(difference > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
