"""Every stage trains as DDP does, on real gloo ranks; the stages agree with one another to the bit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zero_fn as zf
from tests.support.models import Language, Odd
from tests.support.programs import STAGES, gradients, gradients_of_ddp, loss_of, train, train_ddp
from tests.support.ranks import Ranks, axis


def _differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def _stages_against_the_first(
    microbatches: int, optimizer: str, clip: float | None, names: list[str]
) -> list[list[str]]:
    runs = [train(Odd, name, microbatches=microbatches, optimizer=optimizer, clip=clip) for name in names]
    return [_differing(runs[0], run) for run in runs[1:]]


@pytest.mark.parametrize(("n", "microbatches"), [(2, 1), (3, 3), (4, 1)])
def test_stages_train_to_the_same_bits(ranks: Ranks, n: int, microbatches: int) -> None:
    names = ["zero1", "zero2", "zero3", "replicate"]
    for rank in ranks(n).run(_stages_against_the_first, microbatches, "adamw_foreach", None, names):
        assert rank == [[], [], []]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adagrad"])
def test_stages_agree_under_every_optimizer_and_clipping(ranks: Ranks, optimizer: str) -> None:
    for rank in ranks(3).run(_stages_against_the_first, 1, optimizer, 0.1, ["zero1", "zero2", "zero3"]):
        assert rank == [[], []]


def _language_stages(optimizer: str) -> list[list[str]]:
    runs = [train(Language, name, optimizer=optimizer) for name in ("zero1", "zero2", "zero3")]
    return [_differing(runs[0], run) for run in runs[1:]]


def test_stages_agree_under_a_fused_optimizer(ranks: Ranks) -> None:
    for rank in ranks(3).run(_language_stages, "adamw_fused"):
        assert rank == [[], []]


def _stages_against_ddp(microbatches: int) -> list[list[str]]:
    reference = train_ddp(Odd, microbatches=microbatches)
    return [_differing(reference, train(Odd, stage, microbatches=microbatches)) for stage in STAGES]


@pytest.mark.parametrize("microbatches", [1, 3])
def test_stages_equal_ddp_to_the_bit_on_two_ranks(ranks: Ranks, microbatches: int) -> None:
    for rank in ranks(2).run(_stages_against_ddp, microbatches):
        assert rank == [[], [], [], []]


def _gradient_errors(stage: str, seed: int) -> tuple[list[str], list[str]]:
    """Elementwise |g - g_DDP| against 2 gamma_(n+1) mean |g_r|, gamma_k = k u / (1 - k u): SEMANTICS N3."""
    reference = gradients_of_ddp(Odd, seed)
    torch.manual_seed(0)
    local = Odd()
    loss_of(local, seed).backward()
    torch.manual_seed(0)
    model = STAGES[stage](Odd(), axis())
    loss_of(model, seed).backward()
    n = dist.get_world_size()
    outside, missing = [], []
    for name, grad in gradients(model).items():
        expected = reference[name]
        if grad is None or expected is None:
            if (grad is None) != (expected is None):
                missing.append(name)
            continue
        plain = dict(local.named_parameters())[name]
        size = torch.zeros_like(expected) if plain.grad is None else plain.grad
        size = size.abs().to(torch.float64)
        dist.all_reduce(size)
        unit = torch.finfo(grad.dtype).eps / 2
        gamma = (n + 1) * unit / (1 - (n + 1) * unit)
        # A complex product rounds each part; its error is bounded by twice that of a real one.
        bound = (4 if grad.is_complex() else 2) * gamma * size / n
        if ((grad - expected).abs().to(torch.float64) > bound).any():
            outside.append(name)
    return outside, missing


@pytest.mark.parametrize(("n", "stage"), [(3, "replicate"), (3, "zero1"), (3, "zero3"), (4, "zero2"), (4, "zero3")])
def test_gradients_stay_within_the_rounding_of_ddp(ranks: Ranks, n: int, stage: str) -> None:
    for outside, missing in ranks(n).run(_gradient_errors, stage, 7):
        assert outside == []
        assert missing == []


def _variants() -> list[list[str]]:
    plain = train(Odd, "zero3")
    runs = [
        train(Odd, "zero3", options={"persist_below": 200}),
        train(Odd, "zero3", options={"reshard_after": "backward"}),
        train(Odd, "zero3", options={"units": "blocks.1"}),
        train(Odd, "zero3", options={"units": zf.by_size(nbytes=500)}),
        train(Odd, "zero3", options={"where": "blocks.*"}),
        train(Odd, "zero3", options={"donate": True}),
        train(Odd, "zero1", transform=lambda model: zf.shard_params(model, axis(), where="*.up.*")),
        train(Odd, "zero3", transform=lambda model: zf.shard_grads(model, axis())),
    ]
    return [_differing(plain, run) for run in runs]


def test_options_never_change_the_numbers(ranks: Ranks) -> None:
    for rank in ranks(3).run(_variants):
        assert rank == [[]] * 8


def _mixed(microbatches: int) -> list[list[str]]:
    runs = [
        train(Language, stage, microbatches=microbatches, transform=lambda model: zf.precision(model))
        for stage in ("zero1", "zero2", "zero3", "replicate")
    ]
    return [_differing(runs[0], run) for run in runs[1:]]


@pytest.mark.parametrize(("n", "microbatches"), [(2, 2), (3, 1)])
def test_mixed_precision_gives_the_same_bits_in_every_stage(ranks: Ranks, n: int, microbatches: int) -> None:
    for rank in ranks(n).run(_mixed, microbatches):
        assert rank == [[], [], []]


def _mixed_by_hand() -> list[str]:
    """bf16 compute with fp32 masters, written out: the same casts, the same order of summation."""
    torch.manual_seed(0)
    masters = {name: parameter.detach().clone() for name, parameter in Language().named_parameters()}
    torch.manual_seed(0)
    model = zf.precision(zf.zero3(Language(), axis()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    computed = Language().to(torch.bfloat16)
    for step in range(4):
        for name, parameter in computed.named_parameters():
            parameter.data.copy_(masters[name])
        computed.zero_grad()
        loss_of(computed, step).backward()
        for name, parameter in computed.named_parameters():
            assert parameter.grad is not None
            parts = [torch.empty_like(parameter.grad) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, parameter.grad)
            total = parts[0].float()
            for part in parts[1:]:
                total += part
            masters[name].sub_(total.div_(len(parts)), alpha=0.1)
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return _differing(masters, {name: p.full_tensor().detach() for name, p in model.named_parameters()})  # type: ignore[attr-defined]


def test_mixed_precision_equals_the_same_casts_by_hand(ranks: Ranks) -> None:
    for rank in ranks(3).run(_mixed_by_hand):
        assert rank == []
