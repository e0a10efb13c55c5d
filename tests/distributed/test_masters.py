"""`precision(rest=)`: masters of weights that were loaded in 16 bits, as if the values had been widened before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_fn as zf
from tests.support.ranks import Ranks, axis

STAGES = {"zero1": zf.zero1, "zero2": zf.zero2, "zero3": zf.zero3}


class Tied(nn.Module):
    """A 16-bit embedding that is also the head, a buffer that stays as it is, a norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 6, dtype=torch.bfloat16)
        self.blocks = nn.ModuleList([nn.Linear(6, 6, dtype=torch.bfloat16) for _ in range(2)])
        self.norm = nn.LayerNorm(6, dtype=torch.bfloat16)
        self.head = nn.Linear(6, 11, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((6,), 0.5, dtype=torch.bfloat16))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + torch.relu(block(x))
        out: Tensor = self.head(self.norm(x) * self.scale.to(x.dtype))
        return out


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[list[float], list[Tensor]]:
    losses = []
    for seed in range(3):
        torch.manual_seed(10 * seed + dist.get_rank())
        tokens = torch.randint(0, 11, (4, 5))
        loss = nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    zf.check(model, optimizer)
    with zf.unsharded(model):
        return losses, [parameter.detach().clone() for parameter in model.parameters()]


def _widened_before() -> nn.Module:
    model = Tied()
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    return model


def _compare(stage: str, order: str, folder: str) -> None:
    def sharded(module: nn.Module) -> nn.Module:
        return STAGES[stage](module, axis())

    def masters(module: nn.Module) -> nn.Module:
        return zf.precision(module, rest=torch.float32)

    def away(module: nn.Module) -> nn.Module:
        return zf.offload(module, params=disk, optim=disk) if order == "away" else module

    disk = zf.nvme(folder)
    step: Callable[[torch.optim.Optimizer], torch.optim.Optimizer]
    step = zf.streamed if order == "away" else lambda optimizer: optimizer
    wanted_model = away(sharded(zf.precision(_widened_before())))
    loaded = Tied()
    model = sharded(masters(loaded)) if order == "before" else masters(away(sharded(loaded)))
    assert all(parameter.dtype == torch.bfloat16 for parameter in loaded.parameters()), "the input is unchanged"
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert model.scale.dtype == torch.bfloat16
    assert model.head.weight is model.embed.weight
    wanted = _trained(wanted_model, step(torch.optim.AdamW(wanted_model.parameters(), lr=1e-3, fused=True)))
    found = _trained(model, step(torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)))
    assert found[0] == wanted[0]
    assert all(torch.equal(one, other) for one, other in zip(found[1], wanted[1], strict=True))
    assert zf.held(model) == zf.held(wanted_model)


@pytest.mark.parametrize(
    ("stage", "order"),
    [("zero1", "before"), ("zero1", "away"), ("zero2", "after"), ("zero3", "before"), ("zero3", "away")],
)
def test_masters_are_those_of_weights_widened_before(ranks: Ranks, tmp_path: Path, stage: str, order: str) -> None:
    ranks(2).run(_compare, stage, order, str(tmp_path))


def _some() -> None:
    model = zf.precision(zf.zero3(Tied(), axis()), rest=torch.float32, where=lambda name, _: "norm" not in name)
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert {name for name, dtype in dtypes.items() if dtype == torch.bfloat16} == {"norm.weight", "norm.bias"}
    with pytest.raises(zf.LayoutError, match="floating point dtypes"):
        zf.precision(Tied(), rest=torch.int8)


def test_masters_are_made_where_it_is_asked(ranks: Ranks) -> None:
    ranks(2).run(_some)
