"""Whoever initialises a model, or adds noise to it, after a transform gets the numbers of the model without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import zero_fn as zf
from tests.composition.grids import Decoder, composed, grid
from tests.ranks import Ranks
from tests.wholes import full

COMPOSITIONS = ("zero1", "zero2", "zero3", "tp", "hybrid", "hpz")


@torch.no_grad()
def _filled(model: nn.Module) -> None:
    """Every kind of drawing that `nn.init` does."""
    for i, parameter in enumerate(model.parameters()):
        if parameter.ndim < 2:
            parameter.uniform_(-1, 1)
        elif i % 3 == 0:
            nn.init.trunc_normal_(parameter)
        elif i % 3 == 1:
            nn.init.kaiming_uniform_(parameter)
        else:
            nn.init.xavier_normal_(parameter)


@torch.no_grad()
def _with_noise(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter)).mul_(torch.rand_like(parameter))
        parameter.add_(torch.randint_like(parameter, 3)).add_(torch.randint_like(parameter, 5, 9))
        parameter.mul_(torch.empty_like(parameter).bernoulli_(0.5))
        parameter.add_(torch.bernoulli(parameter.abs().clamp(0, 1)))
        for fill in ("exponential_", "log_normal_", "cauchy_", "random_"):
            parameter.add_(getattr(torch.empty_like(parameter), fill)() % 7)
        parameter.add_(torch.empty_like(parameter).geometric_(0.5)).add_(torch.empty_like(parameter).random_(2, 5))


def _drawn(model: nn.Module, act: Callable[[nn.Module], None]) -> tuple[dict[str, Tensor], Tensor]:
    """Parameters afterwards, and what the generator gives next."""
    torch.manual_seed(3)
    act(model)
    return {name: full(p).detach().clone() for name, p in model.named_parameters()}, torch.rand(4)


def _differing(composition: str, act: Callable[[nn.Module], None]) -> list[str]:
    torch.manual_seed(0)
    expected, then = _drawn(Decoder(), act)
    model, _ = composed(composition)
    assert any(p.device_mesh.size() > 1 and p._local_tensor.numel() < p.numel() for p in _resting(model))
    found, next_ones = _drawn(model, act)
    wrong = [name for name, values in found.items() if not torch.equal(values, expected[name])]
    return wrong + ([] if torch.equal(then, next_ones) else ["the generator"])


def _resting(model: nn.Module) -> list[Any]:
    return [p for p in model.parameters() if isinstance(p, DTensor)]


@pytest.mark.parametrize("act", [_filled, _with_noise], ids=["init", "noise"])
@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_random_numbers_of_shards_are_those_of_whole_tensors(
    ranks: Ranks, composition: str, act: Callable[[nn.Module], None]
) -> None:
    """Shards were once drawn from the same state on every rank: rows of a weight repeated themselves."""
    assert ranks(4).run(_differing, composition, act) == [[]] * 4


def _initialised_as_under_fsdp() -> bool:
    """`to_empty`, then each module initialises itself: as models on `meta` are initialised after `fully_shard`."""

    def reset(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.LayerNorm | nn.Embedding):
            module.reset_parameters()

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(7, 12), nn.LayerNorm(12), nn.Linear(12, 5))
    plain = nn.Sequential(nn.Linear(7, 12), nn.LayerNorm(12), nn.Linear(12, 5))
    model = zf.zero3(model, grid("dp", "tp")["dp"]).to_empty(device="cpu")
    expected, _ = _drawn(plain, lambda m: m.apply(reset))  # type: ignore[arg-type, return-value]
    found, _ = _drawn(model, lambda m: m.apply(reset))  # type: ignore[arg-type, return-value]
    return all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_model_from_meta_initialises_itself_as_without_a_transform(ranks: Ranks) -> None:
    assert ranks(4).run(_initialised_as_under_fsdp) == [True] * 4


def _in_a_tier(path: str) -> bool:
    torch.manual_seed(0)
    expected, _ = _drawn(Decoder(), _filled)
    model = zf.offload(zf.zero3(Decoder(), grid("dp", "tp")["dp"]), params=zf.nvme(path))
    found, _ = _drawn(model, _filled)
    return all(torch.equal(found[name], expected[name]) for name in expected)


def test_what_rests_on_a_disk_is_initialised_alike(ranks: Ranks, tmp_path: Any) -> None:
    assert ranks(4).run(_in_a_tier, str(tmp_path)) == [True] * 4
