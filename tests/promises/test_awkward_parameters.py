"""G10 to G14: parameters of every awkward shape, stride and dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from property_tests.programs import Leaf, Tree, build
from property_tests.strategies import memory_orders, shapes, trees
from tests.promises.models import batches, several
from tests.promises.oracle import Run, differences, noise
from tests.support.profiles import SIZES, UNEVEN
from tests.support.programs import STAGES
from tests.support.ranks import Ranks, axis
from tests.support.wholes import full, fulls, named_fulls


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


def used(parameter: Tensor) -> Tensor:
    """A number that depends on every element, each in its own way."""
    real = torch.view_as_real(parameter).sum(-1) if parameter.is_complex() else parameter
    weights = torch.arange(1, real.numel() + 1).view(real.shape)
    return (real.double() * weights).sin().sum()


def program(model: Any, run: Run, number: int) -> Tensor:
    output: Tensor = model(noise(4, seed=number, dtype=torch.float64))
    run.backward(output.square().mean())
    return output


def checked(models: list[list[Leaf]], optimizer: str = "sgd") -> list[str]:
    found = []
    for leaves in models:
        wrong = differences(lambda leaves=leaves: Odd(leaves), program, optimizer=optimizer)  # type: ignore[misc]
        found += [f"{leaves}: {line}" for line in wrong]
    return found


def leaf(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, trained: bool = True) -> Leaf:
    return Leaf(shape, tuple(range(len(shape))), dtype, trained)


def saved_and_loaded(models: list[list[Leaf]], folder: str) -> None:
    """State dicts keep shapes, dtypes and values, through a checkpoint too."""
    for leaves in models:
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
            for name, value in plain.state_dict().items():
                whole = wholes[name]
                assert (whole.shape, whole.dtype, whole.stride()) == (value.shape, value.dtype, value.stride()), name
                assert torch.equal(whole, value), name


@pytest.mark.parametrize(("n", "optimizer"), [(1, "adam"), (2, "adamw"), (3, "sgd")])
def test_g10_scalars_are_trained_and_keep_their_shape(ranks: Ranks, n: int, optimizer: str, tmp_path: object) -> None:
    models = [[leaf(())], [leaf(()), leaf((), torch.float64), leaf((1,)), leaf((5, 2))]]
    assert ranks(n).run(checked, models, optimizer) == [[]] * n
    ranks(n).run(saved_and_loaded, models, str(tmp_path))


@pytest.mark.parametrize(("n", "optimizer"), [(1, "sgd"), (2, "adam"), (3, "adamw")])
def test_g11_parameters_without_elements_stay(ranks: Ranks, n: int, optimizer: str) -> None:
    models = [[leaf((0,))], [leaf((0, 4)), leaf((3, 0, 2), torch.float64), leaf((4,)), leaf((0,), trained=False)]]
    assert ranks(n).run(checked, models, optimizer) == [[]] * n

    def names() -> list[bool]:
        plain = Odd(models[1])
        return [
            {k: v.shape for k, v in stage(plain, axis()).state_dict().items()}
            == {k: v.shape for k, v in plain.state_dict().items()}
            for stage in STAGES.values()
        ]

    assert ranks(n).run(names) == [[True] * 4] * n


uneven = st.lists(shapes(min_size=1, max_dims=3, max_size=17).map(leaf), min_size=1, max_size=4)


@pytest.mark.parametrize("n", UNEVEN)
@several
@given(models=batches(uneven), optimizer=st.sampled_from(["sgd", "adam", "adamw"]))
def test_g12_shapes_that_ranks_do_not_divide(ranks: Ranks, n: int, models: list[list[Leaf]], optimizer: str) -> None:
    assert ranks(n).run(checked, models, optimizer) == [[]] * n


@pytest.mark.parametrize("n", UNEVEN)
def test_g12_padding_is_in_no_norm_and_no_state(ranks: Ranks, n: int) -> None:
    def case() -> None:
        for stage in STAGES.values():
            torch.manual_seed(0)
            model: Any = stage(Odd([leaf((5, 3)), leaf((1, 7)), leaf((2,)), leaf((17,))]), axis())
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

    ranks(n).run(case)


@st.composite
def strided(draw: st.DrawFn) -> Leaf:
    shape = draw(shapes(min_size=1, max_dims=4, max_size=9).filter(lambda shape: len(shape) > 1))
    return Leaf(shape, draw(memory_orders(len(shape))))


@pytest.mark.parametrize("n", SIZES)
@several
@given(models=batches(st.lists(strided(), min_size=1, max_size=3)))
def test_g13_parameters_in_any_memory_order(ranks: Ranks, n: int, models: list[list[Leaf]]) -> None:
    assert ranks(n).run(checked, models) == [[]] * n


@pytest.mark.parametrize("n", SIZES)
def test_g13_channels_last_and_transposed_modules(ranks: Ranks, n: int) -> None:
    def build() -> nn.Module:
        turned = nn.Linear(6, 5)
        turned.weight = nn.Parameter(torch.randn(6, 5).t())
        body = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.ReLU(), nn.Conv2d(5, 6, 3, padding=1))
        return nn.Sequential(body.to(memory_format=torch.channels_last), nn.AdaptiveAvgPool2d(1), nn.Flatten(), turned)  # type: ignore[call-overload]

    def step(model: Any, run: Run, number: int) -> object:
        strides = []
        hook = model[0][0].register_forward_pre_hook(lambda module, _: strides.append(module.weight.stride()))
        run.backward(model(noise(2, 3, 4, 4, seed=number).to(memory_format=torch.channels_last)).square().mean())
        hook.remove()
        assert strides == [(27, 1, 9, 3)]
        return [tuple(parameter.stride()) for parameter in model.parameters()]

    assert ranks(n).run(differences, build, step) == [[]] * n


MIXED = [
    leaf((5, 3)),
    leaf((4,), torch.float64),
    leaf((3, 2), torch.bfloat16),
    leaf((7,), torch.float16),
    leaf((3,), torch.complex64),
    leaf((2, 3), torch.complex128),
    leaf((4,), torch.int64, trained=False),
    leaf((3, 3), torch.int32, trained=False),
    leaf((5,), torch.bool, trained=False),
    leaf((3, 4), torch.uint8, trained=False),
    leaf((6, 2), torch.float8_e4m3fn, trained=False),
]


@pytest.mark.parametrize(("n", "order"), [(1, "as listed"), (2, "reversed"), (3, "as listed")])
def test_g14_a_unit_may_mix_all_dtypes(ranks: Ranks, n: int, order: str) -> None:
    """The sums of 16-bit gradients are made in float32; with one rank or two, so are those of replicas, to the bit."""
    exact = [one for one in MIXED if n < 3 or one.dtype.itemsize != 2]
    leaves = exact if order == "as listed" else exact[::-1]
    assert ranks(n).run(checked, [leaves]) == [[]] * n


@pytest.mark.parametrize("n", SIZES)
@several
@given(drawn=batches(trees(dtypes=(torch.float32, torch.float64, torch.int64, torch.complex64, torch.bool))))
def test_g14_random_modules_of_awkward_parameters(ranks: Ranks, n: int, drawn: list[Tree]) -> None:
    def case() -> list[str]:
        def step(model: Any, run: Run, number: int) -> None:
            run.backward(model(noise(3, seed=number).requires_grad_()).sum())

        found = []
        for tree in drawn:
            found += [f"{tree}: {line}" for line in differences(lambda tree=tree: build(tree), step)]  # type: ignore[misc]
        return found

    assert ranks(n).run(case) == [[]] * n
