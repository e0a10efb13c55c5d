"""A mixture of experts on a mesh of data x expert ranks: dense parameters are sharded over both axes, experts over one.

    python examples/moe.py                                    2 x 2 local ranks, stage 3, dropless
    python examples/moe.py --stage 2 --capacity 1.25          tokens beyond 1.25 of an even share are dropped

    mesh["dp"]   every rank has another batch
    mesh["ep"]   every rank has another batch, and other experts: tokens travel to theirs and back

Before any transform, experts are made DTensors that are cut over ep (`Shard(0)`). Then a transform over dp shards them like
everything else, and a transform over ep leaves them out. An expert gets tokens, and so gradients, from all ranks of ep;
zero_fn divides the sum by the number of these ranks, because the loss is a mean over all ranks.

At the end one process trains with all experts on the same batches, and the losses are set side by side.

Source: top-k routing, Shazeer 2017; capacity and the auxiliary loss, Switch Transformers, Fedus et al. 2021.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from program import device_option, mesh_of, on_ranks, option, parse
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import zero_fn as zf

STAGES: dict[int, Any] = {0: zf.replicate, 1: zf.shard_optimizer, 2: zf.shard_grads, 3: zf.shard_params}
BALANCE, MAX_NORM = 0.01, 1.0
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Options:
    """The command line."""

    stage: int = option(3, "ZeRO stage", choices=sorted(STAGES))
    capacity: float | None = option(
        None, "most tokens of an expert, as a multiple of an even share; without it no token is dropped", kind=float
    )
    steps: int = option(10, "optimizer steps")
    dp: int = option(2, "data-parallel ranks: so many copies of all experts")
    ep: int = option(2, "expert-parallel ranks: the experts of a layer are divided among them")
    experts: int = option(4, "experts in each layer")
    top: int = option(2, "experts for each token")
    dim: int = option(16, "width")
    hidden: int = option(32, "width within an expert")
    vocab: int = option(32, "symbols")
    tokens: int = option(24, "tokens of each rank in a step")
    device: str | None = device_option()

    def __post_init__(self) -> None:
        if self.experts % self.ep:
            raise ValueError(f"--experts {self.experts} cannot be shared equally by --ep {self.ep} ranks")

    @property
    def ranks(self) -> int:
        """Ranks of both axes."""
        return self.dp * self.ep


@dataclass(frozen=True)
class Ranks:
    """The ranks of the expert axis. By default one rank, which has all experts and needs no mesh."""

    group: Any = None
    size: int = 1

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return self  # a transform copies the module, but there is one process group


class Experts(nn.Module):
    """The feed-forward layers of some experts, as two tensors: "expert dim hidden" and "expert hidden dim"."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        experts, dim, hidden = options.experts, options.dim, options.hidden
        self.up = nn.Parameter(torch.randn(experts, dim, hidden) * dim**-0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, dim) * hidden**-0.5)

    def forward(self, tokens: Tensor, counts: list[int]) -> Tensor:
        """Tokens "token dim" in the order of the experts that this rank has, `counts` of them for each."""
        up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.up, self.down))
        parts = torch.split(tokens, counts)
        return torch.cat([F.gelu(part @ one) @ other for part, one, other in zip(parts, up, down, strict=True)])


class MoE(nn.Module):
    """Sends each token to its best experts, on whichever rank they are, and adds up their answers with weights.

    Attributes:
        balance: How evenly the last forward used the experts: 1 if each had the same share of the tokens, else more.
    """

    def __init__(self, options: Options, ranks: Ranks) -> None:
        super().__init__()
        self.ranks, self.capacity, self.top = ranks, options.capacity, options.top
        self.router = nn.Linear(options.dim, options.experts, bias=False)
        self.experts = Experts(options)
        self.balance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        chances = self.router(x).softmax(-1)  # "token expert"
        number = chances.shape[1]
        weights, chosen = chances.topk(self.top, dim=-1)
        share = F.one_hot(chosen, number).to(x.dtype).mean((0, 1))
        self.balance = number * (share * chances.mean(0)).sum()
        token = torch.arange(len(x), device=x.device).repeat_interleave(self.top)
        expert, weight = chosen.flatten(), weights.flatten()
        if self.capacity is not None:
            room = int(self.capacity * len(x) * self.top / number)
            place = (F.one_hot(expert, number).cumsum(0) - 1).gather(1, expert[:, None])[:, 0]
            kept = place < room
            token, expert, weight = token[kept], expert[kept], weight[kept]
        order = expert.argsort(stable=True)
        token, expert, weight = token[order], expert[order], weight[order]
        answers = self._everywhere(x[token], torch.bincount(expert, minlength=number))
        return torch.zeros_like(x).index_add(0, token, answers * weight[:, None])

    def _everywhere(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """The answers of the experts to tokens that come in the order of the experts, `counts` for each."""
        if self.ranks.size == 1:
            alone: Tensor = self.experts(tokens, counts.tolist())
            return alone
        asked = counts.view(self.ranks.size, -1)  # "rank expert": what this rank asks of each
        asking = torch.empty_like(asked)  # "rank expert": what each rank asks of the experts here
        dist.all_to_all_single(asking, asked, group=self.ranks.group)
        sent, received = asked.sum(1).tolist(), asking.sum(1).tolist()
        arrived: Tensor = _Exchanged.apply(tokens, sent, received, self.ranks.group)  # type: ignore[no-untyped-call]
        here = torch.arange(asking.shape[1], device=tokens.device).repeat(
            len(asking)
        )  # the expert of each run of tokens
        by_expert = here.repeat_interleave(asking.flatten())
        order = by_expert.argsort(stable=True)
        answers = self.experts(arrived[order], asking.sum(0).tolist())
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        returned: Tensor = _Exchanged.apply(answers[back], received, sent, self.ranks.group)  # type: ignore[no-untyped-call]
        return returned


class _Exchanged(torch.autograd.Function):
    """Sends rows to other ranks and receives rows from them. The backward sends the gradients back."""

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

    def __init__(self, options: Options, ranks: Ranks) -> None:
        super().__init__()
        self.norm, self.dense = nn.LayerNorm(options.dim), nn.Linear(options.dim, options.dim)
        self.moe = MoE(options, ranks)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.dense(x))
        y: Tensor = x + self.moe(self.norm(x))
        return y


class Model(nn.Module):
    """Guesses a token from the one before."""

    def __init__(self, options: Options, ranks: Ranks) -> None:
        super().__init__()
        self.embed = nn.Embedding(options.vocab, options.dim)
        self.first, self.second = Layer(options, ranks), Layer(options, ranks)
        self.head = nn.Linear(options.dim, options.vocab)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss, and a penalty for experts that are used unevenly."""
        x = self.second(self.first(self.embed(tokens)))
        balance = self.first.moe.balance + self.second.moe.balance
        return F.cross_entropy(self.head(x), targets) + BALANCE * balance


def build(options: Options, mesh: DeviceMesh, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Places the experts on ep. Then a transform shards everything over dp, and another all but the experts over ep."""
    torch.manual_seed(0)
    model: nn.Module = Model(options, Ranks(mesh.get_group("ep"), options.ep)).to(options.device, dtype)
    for module in model.modules():
        if isinstance(module, Experts):
            for name, parameter in list(module.named_parameters()):
                setattr(module, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh["ep"], [Shard(0)])))
    shard = STAGES[options.stage]
    model = shard(model, mesh["dp"], units=Layer)
    dense = {} if options.stage == 0 else {"where": lambda name, _: ".experts." not in name}
    model = shard(model, mesh["ep"], **dense)
    return model


def batch(options: Options, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Tokens of one rank, and the token that follows each: a permutation to be learnt."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(0, options.vocab, (options.tokens,), generator=generator).to(options.device)
    return tokens, (7 * tokens + 3) % options.vocab


def train(options: Options, dtype: torch.dtype = torch.float32) -> list[tuple[float, float]]:
    """What every rank runs. Returns, for each step, the mean loss over all ranks and the norm of the gradients."""
    with mesh_of(options.device or "cpu", dp=options.dp, ep=options.ep) as mesh:
        model = build(options, mesh, dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        seen = []
        for step in range(options.steps):
            loss = model(*batch(options, step, dist.get_rank()))
            torch.autograd.backward(loss)
            norm: Any = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)  # over dense parameters and experts
            optimizer.step()
            optimizer.zero_grad()
            total = loss.detach().clone()
            dist.all_reduce(total)
            seen.append((total.item() / options.ranks, norm.full_tensor().item()))
    return seen


def train_alone(options: Options, dtype: torch.dtype = torch.float32) -> list[tuple[float, float]]:
    """The same training in one process that has every expert, on the batches of all ranks."""
    torch.manual_seed(0)
    model = Model(options, Ranks()).to(options.device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen = []
    for step in range(options.steps):
        loss = torch.stack([model(*batch(options, step, rank)) for rank in range(options.ranks)]).mean()
        torch.autograd.backward(loss)
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        seen.append((loss.item(), norm.item()))
    return seen


def main() -> int:
    """Trains both ways and prints losses and norms; 1 if they differ."""
    options = parse(Options, __doc__)
    seen = on_ranks(options.ranks, train, options)
    if seen is None:
        return 0
    alone = train_alone(options)
    what = f"{options.experts} experts, the best {options.top} of them for each token"
    print(f"dp {options.dp} x ep {options.ep}, ZeRO-{options.stage}, {what}")
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
