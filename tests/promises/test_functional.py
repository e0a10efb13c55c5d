"""G20 and G21: double backward, `torch.autograd.grad`, and the functions of `torch.func`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.functional import jacobian
from torch.distributed.tensor import DTensor
from torch.func import functional_call, grad, grad_and_value, stack_module_state, vmap

import zero_fn as zf
from tests.promises.models import Stack
from tests.promises.oracle import Run, differences, noise
from tests.support.profiles import SIZES
from tests.support.programs import STAGES
from tests.support.ranks import Ranks, axis
from tests.support.wholes import named_fulls


class Tied(Stack):
    """Its last linear has the weight of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.leave.weight = self.enter.weight


class Shared(Stack):
    """One layer runs twice."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](self.layers[0](self.enter(x)))
        return self.leave(x)


MODELS = [Stack, Tied, Shared]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("build", [Stack, Tied])
def test_g20_a_gradient_penalty_on_the_input_trains(ranks: Ranks, n: int, build: Callable[[], nn.Module]) -> None:
    def program(model: Any, run: Run, number: int) -> object:
        x = noise(4, 6, seed=number).requires_grad_()
        output = model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        run.backward(output.square().mean() + (slope.norm(dim=1) - 1).square().mean())
        return slope, x.grad

    assert ranks(n).run(differences, build, program) == [[]] * n


class Whole(nn.Module):
    """Shared and tied modules of small integers, so that no order of summation rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.last = nn.Linear(3, 3)
        self.last.weight = self.blocks[1].weight  # type: ignore[assignment]
        for number, parameter in enumerate(self.parameters()):
            generator = torch.Generator().manual_seed(number)
            parameter.data = torch.randint(-1, 2, parameter.shape, generator=generator).double()

    def forward(self, x: Tensor) -> Tensor:
        for i in (0, 1, 0):
            x = self.blocks[i](x).square()
        return self.last(x)


@pytest.mark.parametrize("n", SIZES)
def test_g20_modules_that_run_several_times_are_differentiated_twice(ranks: Ranks, n: int) -> None:
    def program(model: Any, run: Run, number: int) -> object:
        x = noise(2, 3, seed=number, dtype=torch.float64).sign().requires_grad_()
        output = model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        run.backward(output.sum() + slope.sum())
        return slope, x.grad

    assert ranks(n).run(differences, Whole, program, steps=1) == [[]] * n


@pytest.mark.parametrize("n", [1, 2])
def test_g20_a_penalty_on_the_gradient_of_parameters_trains(ranks: Ranks, n: int) -> None:
    """The gradient in the graph is the mean over ranks; with one batch on all ranks, that of each."""

    def program(model: Any, run: Run, number: int) -> object:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
        loss = model(x).square().mean()
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]
        run.backward(loss + sum(g.square().sum() for g in whole))
        return whole

    assert ranks(n).run(differences, Stack, program) == [[]] * n


@pytest.mark.parametrize("n", [1, 2])
def test_g21_autograd_grad_adds_up_modules_that_run_several_times(ranks: Ranks, n: int) -> None:
    def program(model: Any, run: Run, number: int) -> None:
        x = noise(2, 3, seed=number, dtype=torch.float64).sign()
        grads = torch.autograd.grad(model(x).sum(), list(model.parameters()))
        for parameter, value in zip(model.parameters(), grads, strict=True):
            parameter.grad = run.mean(value)

    assert ranks(n).run(differences, Whole, program, steps=1) == [[]] * n


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("build", [Stack, Tied])
def test_g21_autograd_grad_gives_resting_gradients(ranks: Ranks, n: int, build: Callable[[], nn.Module]) -> None:
    def program(model: Any, run: Run, number: int) -> object:
        loss = model(noise(4, 6, seed=number)).square().mean()
        grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        for parameter, value in zip(model.parameters(), grads, strict=True):
            if isinstance(parameter, DTensor) and value is not None:
                assert isinstance(value, DTensor)
                assert value.placements == parameter.placements
            parameter.grad = run.mean(value)
        some = torch.autograd.grad(model(noise(4, 6, seed=number)).sum(), list(model.layers[0].parameters()))
        return [run.mean(value) for value in some]

    assert ranks(n).run(differences, build, program) == [[]] * n


@pytest.mark.parametrize("n", SIZES)
def test_g21_backward_into_some_parameters(ranks: Ranks, n: int) -> None:
    def program(model: Any, run: Run, number: int) -> None:
        x = noise(4, 6, seed=number)
        run.backward(model(x).square().mean(), inputs=list(model.layers.parameters()))
        run.backward(model(x).square().mean(), inputs=[model.enter.weight])

    assert ranks(n).run(differences, Stack, program) == [[]] * n


def _values(model: Any, *, scale: float) -> dict[str, Tensor]:
    return {name: value * scale for name, value in named_fulls(dict(model.named_parameters())).items()}


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("build", MODELS)
def test_g21_functional_call_uses_the_tensors_it_is_given(ranks: Ranks, n: int, build: Callable[[], nn.Module]) -> None:
    """Whole tensors, all or some of them: gradients with respect to them are those of the rank, the rest trains on."""

    def program(model: Any, run: Run, number: int) -> object:
        x = noise(4, 6, seed=number)
        values = {name: value.requires_grad_() for name, value in _values(model, scale=0.5).items()}
        loss = functional_call(model, values, (x,)).square().mean()
        mine = torch.autograd.grad(loss, list(values.values()), allow_unused=True)
        some = {name: value for name, value in values.items() if name.startswith(("layers.0", "enter.weight"))}
        mixed = functional_call(model, some, (x,))
        run.backward(mixed.square().mean() + model(x).sum())
        return loss, mine, mixed, [value.grad for value in some.values()]

    assert ranks(n).run(differences, build, program) == [[]] * n


@pytest.mark.parametrize("n", SIZES)
def test_g21_functional_call_in_units_called_alone_and_in_accumulate(ranks: Ranks, n: int) -> None:
    def program(model: Any, run: Run, number: int) -> object:
        x = noise(4, 6, seed=number)
        with run.accumulate():
            run.backward(model(x).square().mean())
            layer = model.layers[1]
            with torch.no_grad():
                alone = functional_call(layer, _values(layer, scale=2.0), (x,))
                all_but = functional_call(model, _values(model, scale=2.0), (x,))
            run.backward(model(x + 1).square().mean())
        return alone, all_but, model(x)

    assert ranks(n).run(differences, Stack, program) == [[]] * n


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("build", MODELS)
def test_g21_torch_func_transforms_a_functional_call(ranks: Ranks, n: int, build: Callable[[], nn.Module]) -> None:
    def program(model: Any, run: Run, number: int) -> object:
        x = noise(4, 6, seed=number)
        values = _values(model, scale=0.5)

        def loss(values: dict[str, Tensor], x: Tensor) -> Tensor:
            return functional_call(model, values, (x,)).square().mean()

        run.backward(model(x).square().mean())
        some = {name: value for name, value in values.items() if name.startswith("layers.1")}
        return (
            grad(loss)(values, x),
            grad_and_value(loss)(some, x),
            vmap(grad(loss), in_dims=(None, 0))(values, x),  # of each sample
            grad(lambda values, x: sum(g.square().sum() for g in grad(loss)(values, x).values()))(values, x),
            model(x),
        )

    assert ranks(n).run(differences, build, program) == [[]] * n


@pytest.mark.parametrize("n", SIZES)
def test_g21_vmap_runs_an_ensemble_of_stacked_parameters(ranks: Ranks, n: int) -> None:
    def program(model: Any, run: Run, number: int) -> object:
        x = noise(4, 6, seed=number)
        torch.manual_seed(number)
        stacked, _ = stack_module_state([Stack() for _ in range(3)])
        outputs = vmap(lambda values: functional_call(model, values, (x,)))(stacked)
        run.backward(model(x).square().mean())
        return outputs

    assert ranks(n).run(differences, Stack, program) == [[]] * n


@pytest.mark.parametrize("n", SIZES)
def test_g21_an_inner_step_on_whole_parameters_is_differentiated(ranks: Ranks, n: int) -> None:
    """Fast weights of meta-learning: copies of the whole parameters, whose gradients are those of the rank."""

    def program(model: Any, run: Run, number: int) -> object:
        x, y = noise(4, 6, seed=number), noise(4, 6, seed=number + 10)
        values = {name: value.requires_grad_() for name, value in _values(model, scale=1.0).items()}
        inner = functional_call(model, values, (x,)).square().mean()
        steps = torch.autograd.grad(inner, list(values.values()), create_graph=True)
        fast = {name: p - 0.25 * g for (name, p), g in zip(values.items(), steps, strict=True)}
        outer = (functional_call(model, fast, (y,)) - x).square().mean()
        run.backward(model(x).square().mean())
        return outer, torch.autograd.grad(outer, list(values.values()))

    assert ranks(n).run(differences, Stack, program) == [[]] * n


def test_g21_a_swap_leaves_units_and_parameters_as_they_were(ranks: Ranks) -> None:
    def case() -> None:
        for stage in STAGES.values():
            torch.manual_seed(0)
            model: Any = stage(Stack(), axis())
            before = [id(parameter) for parameter in model.parameters()]
            x = noise(3, 6, seed=1)
            expected = model(x)
            values = _values(model, scale=2.0)
            with zf.traffic() as sent:
                functional_call(model, values, (x,))
            assert sent.nbytes == 0, "nothing is gathered in place of what was given"
            broken = {**values, "leave.weight": torch.randn(6, 5)}
            with pytest.raises(zf.PlacementError, match=r"leave\.weight"):
                functional_call(model, broken, (x,))
            for block in (zf.unsharded(model), zf.accumulate(model, unshard=True)):
                with block:
                    assert torch.equal(functional_call(model, values, (x,)), Stack_of(values)(x))
                    assert torch.equal(model(x), expected)
            assert torch.equal(model(x), expected)
            assert [id(parameter) for parameter in model.parameters()] == before

    def Stack_of(values: dict[str, Tensor]) -> Stack:
        plain = Stack()
        plain.load_state_dict(values)
        return plain

    ranks(2).run(case)


@pytest.mark.parametrize("stage", STAGES)
def test_g21_resting_tensors_are_refused(ranks: Ranks, stage: str) -> None:
    """Fast weights made of shards, inside torch.func and outside; whole parameters of a block are plain."""

    def case() -> None:
        model = STAGES[stage](Stack(), axis())
        x = noise(3, 6, seed=1)

        def loss(values: dict[str, Tensor]) -> Tensor:
            return functional_call(model, values, (x,)).sum()

        values = {name: parameter.detach() * 2 for name, parameter in model.named_parameters()}
        for call in (loss, grad(loss)):
            with pytest.raises(zf.StateError, match="given a resting tensor"):
                call(values)
        model(x).sum().backward()
        expected = grad(loss)(_values(model, scale=2.0))
        with zf.unsharded(model):
            found = grad(loss)({name: parameter.detach() * 2 for name, parameter in model.named_parameters()})
        assert all(torch.equal(found[name], value) for name, value in expected.items())

    ranks(2).run(case)


def test_g21_a_tie_takes_one_tensor(ranks: Ranks) -> None:
    def case() -> None:
        tied = zf.shard_params(Tied(), axis())
        whole = {name: torch.randn(6, 6) for name in ("enter.weight", "leave.weight")}
        with pytest.raises(zf.PlacementError, match="tied"):
            functional_call(tied, whole, (noise(3, 6, seed=1),), tie_weights=False)

    ranks(2).run(case)


@pytest.mark.parametrize("stage", STAGES)
def test_g21_vectorized_gradients_of_parameters_are_refused_and_those_of_inputs_are_exact(
    ranks: Ranks, stage: str
) -> None:
    def case() -> None:
        torch.manual_seed(0)
        reference = Stack()
        torch.manual_seed(0)
        model: Any = STAGES[stage](Stack(), axis())
        x = noise(3, 6, seed=1)
        parameters = list(model.parameters())
        with pytest.raises(zf.StateError, match="at once"):
            torch.autograd.grad(model(x)[0, :2], parameters, torch.eye(2), is_grads_batched=True)
        (first, *_) = torch.autograd.grad(model(x).square().mean(), parameters, create_graph=True)
        with pytest.raises(zf.StateError, match="at once"):
            torch.autograd.grad(first.sum().reshape(1), parameters, torch.ones(2, 1), is_grads_batched=True)
        found, expected = (jacobian(lambda x, m=m: m(x)[0, :2], x, vectorize=True) for m in (model, reference))
        assert torch.equal(found, expected)
        model(x).sum().backward()

    ranks(2).run(case)


class _Fused(torch.autograd.Function):
    """Puts the gradient of the weight where it belongs itself, as fused accumulations do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: nn.Linear) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, weight = ctx.saved_tensors
        ctx.layer.weight.grad = grad.T @ x
        return grad @ weight, None, None


class _FusedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Fused.apply(x, self.weight, self)  # type: ignore[no-untyped-call]
        return y + self.bias


@pytest.mark.parametrize("n", SIZES)
def test_a_gradient_that_a_function_assigns_in_backward_is_reduced(ranks: Ranks, n: int) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 5), nn.Sequential(_FusedLinear(5, 6), nn.Tanh()), _FusedLinear(6, 2))

    def program(model: nn.Module, run: Run, number: int) -> None:
        run.backward(model(noise(3, 6, seed=number)).square().mean())

    assert ranks(n).run(differences, build, program) == [[]] * n
