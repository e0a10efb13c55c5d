"""Activation checkpointing, around units and inside them, and what can go wrong in a recomputation."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed._composable import checkpoint as checkpoint_by_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import zero_fn as zf
from tests.promises.tables import each_as_replicas
from tests.support.models import Layer, Stack
from tests.support.on_ranks import on_ranks
from tests.support.programs import STAGES
from tests.support.ranks import axis
from tests.support.seeds import seed_generator
from tests.support.worlds import as_replicas, differences, noise, trained


class Around(Stack):
    """Each layer, a unit, is a checkpoint."""

    def run(self, layer, x):
        return checkpoint(layer, x, use_reentrant=False)


class InnerLayer(Layer):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x):
        hidden = checkpoint(self.first, x, use_reentrant=self.reentrant)
        return x + checkpoint(self.second, torch.tanh(hidden), use_reentrant=self.reentrant)


class Inside(Stack):
    """Reentrant checkpoints inside units."""

    reentrant = True

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(InnerLayer(self.reentrant) for _ in range(3))


class InsideAndAround(Around, Inside):
    reentrant = False


class AdaptedLayer(Layer):
    """A frozen norm and base, and a trained linear beside them, inside a checkpoint."""

    def __init__(self):
        super().__init__()
        self.norm, self.trained = nn.LayerNorm(6), nn.Linear(6, 6)
        self.requires_grad_(False).trained.requires_grad_(True)

    def adapted(self, x):
        return super().forward(self.norm(x)) + self.trained(x)

    def forward(self, x):
        return checkpoint(self.adapted, x, use_reentrant=False)


class Adapted(Around):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(AdaptedLayer() for _ in range(3))


def _save_products(_context, operation, *_args, **_kwargs):
    is_product = operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def _selected(function, x):
    contexts = partial(create_selective_checkpoint_contexts, _save_products)
    return checkpoint(function, x, use_reentrant=False, context_fn=contexts)


class SelectiveLayer(Layer):
    def forward(self, x):
        return _selected(self.second, torch.tanh(_selected(super().forward, x)))


class SelectiveInside(Stack):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(SelectiveLayer(6, 6) for _ in range(3))


class SelectiveAround(Stack):
    def run(self, layer, x):
        return _selected(layer, x)


def backward(model, run, seed):
    seed_generator(seed)
    run.backward(model(noise(3, 6, seed=seed).requires_grad_()).square().mean())


def alone_and_accumulated(model, run, number):
    backward(model, run, number)
    with run.accumulate():
        backward(model, run, number + 10)
        backward(model, run, number + 20)


def to_the_end(model, run, number):
    with set_checkpoint_early_stop(False):
        alone_and_accumulated(model, run, number)


MODELS = {
    "around, to the end": (Around, to_the_end),
    "inside, reentrant": (Inside, alone_and_accumulated),
    "inside and around": (InsideAndAround, alone_and_accumulated),
    "inside and around, frozen beside adapters": (Adapted, alone_and_accumulated),
    "selective, inside": (SelectiveInside, alone_and_accumulated),
}

"""Around a unit and around several: the laws."""

test_a_recomputed_model_trains = each_as_replicas(MODELS)


@pytest.mark.parametrize("stage", ["zero1", "zero3"])
@on_ranks(2)
def test_selective_checkpoints_around_units_are_refused(stage):
    """Where parameters are whole, nothing is gathered in them, and they work."""
    model, x = STAGES[stage](SelectiveAround(), axis()), noise(3, 6, seed=0).requires_grad_()
    with pytest.raises(zf.errors.StateError, match="inside a selective checkpoint"):
        model(x)
    with zf.accumulate(model, unshard=True):
        model(x).sum().backward()
    assert x.grad is not None


PLACES = {
    "inside units": ["layers.0.first", "layers.0.second", "layers.2.first"],
    "all at once": ["", "layers.0", "layers.1", "layers.1.second"],
}


def by_hooks(places, model):
    """Puts torch's composable checkpoints at modules of a model: two hooks at each."""
    for name in PLACES[places]:
        checkpoint_by_hooks(model.get_submodule(name))
    return model


@pytest.mark.parametrize("is_first", [True, False], ids=["before the transform", "after it"])
@pytest.mark.parametrize("places", PLACES)
def test_composable_checkpoints_train(ranks, places, is_first):
    def build():
        model = InsideAndAround() if places == "all at once" else Stack()
        return by_hooks(places, model) if is_first else model

    def found():
        how = {"transform": (lambda model: model) if is_first else partial(by_hooks, places)}
        kept = trained(build, alone_and_accumulated, options={"reshard_after": "backward"}, **how)
        return differences(trained(build, alone_and_accumulated, **how)) + differences(kept, stages=["zero3"])

    assert ranks(2).run(found) == [[]] * 2


@pytest.mark.parametrize("build", [Around, Inside])
@pytest.mark.parametrize("kind", [ZeroDivisionError, KeyboardInterrupt])
@as_replicas(steps=2)
def test_an_exception_in_a_recomputation_leaves_nothing_behind(model, run, number, kind):
    """Nor an interrupt, after which torch calls no hook: the unit seemed to run on, and was not entered again."""
    calls = []

    def fail(module, args):
        calls.append(module)
        if len(calls) == 2:
            raise kind

    hook = model.layers[0].second.register_forward_pre_hook(fail)
    with pytest.raises(kind), run.accumulate() if number else nullcontext():
        backward(model, run, number)
    hook.remove()
    run.zero_grad(set_to_none=True)
    backward(model, run, number)
    return len(calls)
