"""Parameters of every awkward shape, stride and dtype. Random trees of them are in the laws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from property_tests.programs import Leaf
from tests.support.on_ranks import on_ranks
from tests.support.programs import STAGES
from tests.support.ranks import Ranks, axis
from tests.support.wholes import full, fulls, named_fulls
from tests.support.worlds import Run, differences, noise, trained


class Part(nn.Module):
    def __init__(self, leaves: Sequence[Leaf]) -> None:
        super().__init__()
        for i, leaf in enumerate(leaves):
            trained = leaf.trained and (leaf.dtype.is_floating_point or leaf.dtype.is_complex)
            trained = trained and leaf.dtype.itemsize > 1
            self.register_parameter(f"p{i}", nn.Parameter(leaf.values(), requires_grad=trained))

    def forward(self, x: Tensor) -> Tensor:
        for name, _ in list(self.named_parameters()):
            x = x + torch.tanh(x) * used(getattr(self, name))
        return x


class Odd(nn.Module):
    """Parameters of any kind, all of which reach the loss, in two units and the root."""

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part(leaves) for _ in range(2))
        self.own = nn.Parameter(leaves[0].values(), requires_grad=leaves[0].trained)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x * (1 + used(self.own))


def used(parameter: Tensor) -> Tensor:
    """A number that depends on every element, each in its own way."""
    real = torch.view_as_real(parameter).sum(-1) if parameter.is_complex() else parameter
    weights = torch.arange(1, real.numel() + 1).view(real.shape)
    return (real.double() * weights).sin().sum()


def leaf(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, trained: bool = True, order: str = "") -> Leaf:
    """A parameter whose dims lie in memory in this order."""
    return Leaf(shape, tuple(map(int, order)) if order else tuple(range(len(shape))), dtype, trained)


MIXED = [
    leaf((5, 3)),
    leaf((4,), torch.float64),
    leaf((3,), torch.complex64),
    leaf((2, 3), torch.complex128),
    leaf((4,), torch.int64, trained=False),
    leaf((3, 3), torch.int32, trained=False),
    leaf((5,), torch.bool, trained=False),
    leaf((3, 4), torch.uint8, trained=False),
    leaf((6, 2), torch.float8_e4m3fn, trained=False),
]

CASES: dict[str, tuple[int, list[Leaf]]] = {
    "a scalar": (2, [leaf(())]),
    "scalars and others": (3, [leaf(()), leaf((), torch.float64), leaf((1,)), leaf((5, 2))]),
    "scalars, one rank": (1, [leaf(()), leaf((), torch.float64), leaf((1,)), leaf((5, 2))]),
    "without elements": (2, [leaf((0,))]),
    "without elements, and others": (
        3,
        [leaf((0, 4)), leaf((3, 0, 2), torch.float64), leaf((4,)), leaf((0,), trained=False)],
    ),
    "uneven": (3, [leaf((5, 3)), leaf((1, 7)), leaf((2,)), leaf((17,))]),
    "fewer rows than ranks": (4, [leaf((1, 1)), leaf((2, 3, 5)), leaf((3, 1))]),
    "in any memory order": (
        2,
        [leaf((4, 3), order="10"), leaf((2, 3, 5), order="201"), leaf((3, 2, 4, 2), order="0231")],
    ),
    "in any memory order, uneven": (3, [leaf((5, 1, 4), order="120"), leaf((7, 2), order="10")]),
    # The sums of 16-bit gradients are made in float32; with one rank or two, so are those of replicas, to the bit.
    "all dtypes": (2, [*MIXED, leaf((3, 2), torch.bfloat16), leaf((7,), torch.float16)]),
    "all dtypes, reversed": (3, MIXED[::-1]),
}


@pytest.mark.parametrize("case", CASES)
def test_parameters_of_any_kind_are_trained_as_in_replicas(ranks: Ranks, case: str) -> None:
    n, leaves = CASES[case]

    def program(model: Any, run: Run, number: int) -> Tensor:
        output: Tensor = model(noise(4, seed=number, dtype=torch.float64))
        run.backward(output.square().mean())
        return output

    optimizer = "sgd" if "dtypes" in case else "adamw"
    assert ranks(n).run(differences, trained(lambda: Odd(leaves), program, optimizer=optimizer)) == [[]] * n


def _saved_and_loaded(leaves: list[Leaf], folder: str) -> None:
    """State dicts keep names, shapes, dtypes, strides and values, through a checkpoint too."""
    for stage in STAGES.values():
        torch.manual_seed(0)
        plain = Odd(leaves)
        model: Any = stage(plain, axis())
        dcp.save(model.state_dict(), checkpoint_id=folder)
        torch.manual_seed(1)
        other = stage(Odd(leaves), axis())
        state = other.state_dict()
        dcp.load(state, checkpoint_id=folder)
        other.load_state_dict(state)
        wholes = named_fulls(other.state_dict())
        assert wholes.keys() == plain.state_dict().keys()
        for name, value in plain.state_dict().items():
            whole = wholes[name]
            assert (whole.shape, whole.dtype, whole.stride()) == (value.shape, value.dtype, value.stride()), name
            assert torch.equal(whole, value), name


@pytest.mark.parametrize("case", ["scalars and others", "without elements, and others"])
def test_state_dicts_keep_what_a_parameter_is(ranks: Ranks, case: str, tmp_path: object) -> None:
    ranks(2).run(_saved_and_loaded, CASES[case][1], str(tmp_path))


@on_ranks(3)
def test_padding_is_in_no_norm_and_no_state() -> None:
    for stage in STAGES.values():
        torch.manual_seed(0)
        model: Any = stage(Odd(CASES["uneven"][1]), axis())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for number in range(2):
            model(noise(4, seed=number, dtype=torch.float64)).square().mean().backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
            squares = [grad.double().square().sum() for grad in fulls(p.grad for p in model.parameters())]
            ratio = abs(full(norm).double() / torch.stack(squares).sum().sqrt() - 1)
            assert ratio <= 64 * 2.0**-24
            optimizer.step()
            optimizer.zero_grad()
        for parameter, state in optimizer.state.items():
            for name in ("exp_avg", "exp_avg_sq"):
                assert full(state[name]).shape == parameter.shape
                assert state[name].to_local().numel() == parameter.to_local().numel()


def test_channels_last_and_transposed_modules(ranks: Ranks) -> None:
    def build() -> nn.Module:
        turned = nn.Linear(6, 5)
        turned.weight = nn.Parameter(torch.randn(6, 5).t())
        body = nn.Sequential(
            nn.Conv2d(3, 5, 3, padding=1), nn.GroupNorm(1, 5), nn.ReLU(), nn.ConvTranspose2d(5, 6, 3, padding=1)
        )
        return nn.Sequential(body.to(memory_format=torch.channels_last), nn.AdaptiveAvgPool2d(1), nn.Flatten(), turned)  # type: ignore[call-overload]

    def step(model: Any, run: Run, number: int) -> object:
        strides = []
        hook = model[0][0].register_forward_pre_hook(lambda module, _: strides.append(module.weight.stride()))
        run.backward(model(noise(2, 3, 4, 4, seed=number).to(memory_format=torch.channels_last)).square().mean())
        hook.remove()
        assert strides == [(27, 1, 9, 3)]
        return [tuple(parameter.stride()) for parameter in model.parameters()]

    assert ranks(2).run(differences, trained(build, step)) == [[]] * 2
