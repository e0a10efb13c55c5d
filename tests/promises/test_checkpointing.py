"""G22: activation checkpointing, around units and inside them, and what can go wrong in a recomputation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as checkpoint_by_hooks  # type: ignore[attr-defined]
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import zero_fn as zf
from tests.promises.models import Layer, Stack
from tests.promises.oracle import Run, differences, noise
from tests.support.profiles import SIZES
from tests.support.programs import STAGES
from tests.support.ranks import Ranks, axis
from tests.support.seeds import seed_generator


class Around(Stack):
    """Each layer, a unit, is a checkpoint."""

    reentrant = False

    def run(self, layer: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(layer, x, use_reentrant=self.reentrant)


class AroundReentrant(Around):
    reentrant = True


class InnerLayer(Layer):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.first, x, use_reentrant=self.reentrant)
        return x + checkpoint(self.second, torch.tanh(hidden), use_reentrant=self.reentrant)


class InnerReentrantLayer(InnerLayer):
    reentrant = True


class Inside(Stack):
    """Checkpoints inside units."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(InnerLayer(6, 9) for _ in range(3))


class InsideReentrant(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(InnerReentrantLayer(6, 9) for _ in range(3))


class Both(Inside):
    """A checkpoint in a checkpoint."""

    def run(self, layer: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(layer, x, use_reentrant=False)


class OneOverAll(Stack):
    """One checkpoint over several units."""

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint_sequential(self.layers, 2, self.enter(x), use_reentrant=False)
        return self.leave(x)


class Dropout(Around):
    def run(self, layer: nn.Module, x: Tensor) -> Tensor:
        return super().run(layer, nn.functional.dropout(x, 0.5))


def _save_products(_context: object, operation: object, *_args: object, **_kwargs: object) -> CheckpointPolicy:
    is_product = operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def _selected(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    contexts = partial(create_selective_checkpoint_contexts, _save_products)
    return checkpoint(function, x, use_reentrant=False, context_fn=contexts)  # type: ignore[no-any-return]


class SelectiveLayer(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return _selected(self.second, torch.tanh(_selected(super().forward, x)))


class SelectiveInside(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SelectiveLayer(6, 6) for _ in range(3))


class SelectiveAround(Stack):
    def run(self, layer: nn.Module, x: Tensor) -> Tensor:
        return _selected(layer, x)


# A reentrant checkpoint does not stop early.
MODELS = [
    (Around, True),
    (Around, False),
    (AroundReentrant, True),
    (Inside, True),
    (InsideReentrant, True),
    (Both, True),
    (OneOverAll, True),
    (OneOverAll, False),
    (Dropout, False),
    (SelectiveInside, True),
]


def backward(model: Any, run: Run, seed: int) -> None:
    seed_generator(seed)
    run.backward(model(noise(3, 6, seed=seed).requires_grad_()).square().mean())


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(("build", "early_stop"), MODELS)
def test_g22_a_recomputed_model_trains(ranks: Ranks, n: int, build: Callable[[], nn.Module], early_stop: bool) -> None:
    def program(model: Any, run: Run, number: int) -> None:
        with set_checkpoint_early_stop(early_stop):
            backward(model, run, number)
            with run.accumulate():
                backward(model, run, number + 10)
                backward(model, run, number + 20)

    assert ranks(n).run(differences, build, program) == [[]] * n


@pytest.mark.parametrize("stage", STAGES)
def test_g22_selective_checkpoints_around_units_are_refused(ranks: Ranks, stage: str) -> None:
    """Where parameters are whole, nothing is gathered in them, and they work."""

    def case() -> None:
        model, x = STAGES[stage](SelectiveAround(), axis()), noise(3, 6, seed=0).requires_grad_()
        with pytest.raises(zf.StateError, match="inside a selective checkpoint"):
            model(x)
        with zf.accumulate(model, unshard=True):
            model(x).sum().backward()
        assert x.grad is not None

    ranks(2).run(case)


PLACES = {
    "units": ["layers.0", "layers.1", "layers.2"],
    "inside units": ["layers.0.first", "layers.0.second", "layers.2.first"],
    "the whole": [""],
    "all at once": ["", "layers.0", "layers.1", "layers.1.second"],
}


def by_hooks(places: str, model: Any) -> Any:
    """Puts torch's composable checkpoints at modules of a model: two hooks at each."""
    for name in PLACES[places]:
        checkpoint_by_hooks(model.get_submodule(name))
    return model


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("is_first", [True, False], ids=["before the transform", "after it"])
@pytest.mark.parametrize("places", PLACES)
def test_g22_composable_checkpoints_train(ranks: Ranks, n: int, places: str, is_first: bool) -> None:
    def build() -> nn.Module:
        model = (Both if places == "all at once" else Stack)()
        return by_hooks(places, model) if is_first else model

    def program(model: Any, run: Run, number: int) -> None:
        backward(model, run, number)
        with run.accumulate():
            backward(model, run, number + 10)
            backward(model, run, number + 20)

    def found() -> list[str]:
        transform = (lambda model: model) if is_first else partial(by_hooks, places)
        kept = {"reshard_after": "backward"}
        return differences(build, program, transform=transform) + differences(
            build, program, transform=transform, stages=["zero3"], options=kept
        )

    assert ranks(n).run(found) == [[]] * n


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(
    ("build", "where"),
    [(Around, 0), (Around, 2), (AroundReentrant, 2), (Inside, 2), (InsideReentrant, 0), (OneOverAll, 0)],
)
def test_g22_an_exception_in_a_recomputation_leaves_nothing_behind(
    ranks: Ranks, n: int, build: Callable[[], nn.Module], where: int
) -> None:
    def program(model: Any, run: Run, number: int) -> object:
        calls = []

        def fail(module: nn.Module, args: object) -> None:
            calls.append(module)
            if len(calls) == 2:
                raise ZeroDivisionError

        hook = model.layers[where].second.register_forward_pre_hook(fail)
        with pytest.raises(ZeroDivisionError):
            backward(model, run, number)
        hook.remove()
        run.zero_grad(set_to_none=True)
        backward(model, run, number)
        return len(calls)

    assert ranks(n).run(differences, build, program) == [[]] * n


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("build", [Around, AroundReentrant])
def test_g22_hooks_of_modules_are_called_in_both_forwards(ranks: Ranks, n: int, build: Callable[[], nn.Module]) -> None:
    def program(model: Any, run: Run, number: int) -> object:
        counts: list[str] = []
        handles = []
        for name in ("layers.0", "layers.1.first", "layers.2.second"):
            module = model.get_submodule(name)
            handles.append(module.register_forward_pre_hook(lambda *_, name=name: counts.append(f"before {name}")))
            handles.append(module.register_forward_hook(lambda *_, name=name: counts.append(f"after {name}")))
        backward(model, run, number)
        for handle in handles:
            handle.remove()
        names = sorted(set(counts))
        return [counts.count(name) for name in names]

    assert ranks(n).run(differences, build, program) == [[]] * n
