"""Elementwise optimizers step on local tensors: the bits of a step on whole tensors, and nothing else to be seen."""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

import zero_fn as zf
from tests.support.groups import pretended
from tests.support.models import Odd
from tests.support.ranks import Ranks, axis
from tests.support.wholes import fulls

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam, amsgrad": lambda ps: torch.optim.Adam(ps, amsgrad=True),
    "adamw, foreach": lambda ps: torch.optim.AdamW(ps, foreach=True),
    "adagrad": torch.optim.Adagrad,
    "rmsprop, momentum": lambda ps: torch.optim.RMSprop(ps, momentum=0.9, centered=True),
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "asgd": torch.optim.ASGD,
    "rprop": torch.optim.Rprop,
    "sgd, momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
}


def stepped(name: str, stage: str | None) -> tuple[list[Tensor], set[str]]:
    """Whole parameters and states after three steps with seeded gradients, and the types of the states."""
    torch.manual_seed(0)
    model = getattr(zf, stage)(Odd(), axis()) if stage is not None else Odd()
    trained = [p for p in model.parameters() if p.requires_grad and not p.is_complex()]
    optimizer = OPTIMIZERS[name](trained)
    for step in range(3):
        for number, parameter in enumerate(trained):
            generator = torch.Generator().manual_seed(100 * step + number)
            grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            if isinstance(parameter, DTensor):
                grad = distribute_tensor(grad, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.grad = grad
        optimizer.step()
    states = [value for parameter in trained for value in optimizer.state[parameter].values() if torch.is_tensor(value)]
    tensors = [*(parameter.detach() for parameter in trained), *states]
    return fulls(tensors), {type(state).__name__ for state in states if state.dim()}


def differing(stage: str) -> list[str]:
    """The optimizers that give something else on shards than on whole plain tensors."""
    wrong = []
    for name in OPTIMIZERS:
        (on_shards, types), (on_wholes, _) = stepped(name, stage), stepped(name, None)
        if types != {"DTensor"} or len(on_shards) != len(on_wholes) or not all(map(torch.equal, on_shards, on_wholes)):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("stage", ["replicate", "shard_params"])
def test_a_step_on_shards_gives_the_bits_of_a_step_on_wholes(ranks: Ranks, stage: str) -> None:
    assert ranks(3).run(differing, stage) == [[]] * 3


def seen_by_adamw(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """The types of the parameters that the arithmetic of AdamW gets."""
    seen: list[type] = []
    module = sys.modules[torch.optim.Adam.__module__]
    arithmetic = module.adam

    def spy(params: list[Tensor], *args: Any, **kwargs: Any) -> None:
        seen.extend(map(type, params))
        arithmetic(params, *args, **kwargs)

    monkeypatch.setattr(module, "adam", spy)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    return seen


def test_the_arithmetic_sees_plain_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretended(2) as mesh:
        model = zf.shard_params(nn.Linear(4, 4), mesh)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        assert set(seen_by_adamw(model, monkeypatch)) <= {Tensor, nn.Parameter}


def test_a_gradient_that_is_cut_otherwise_goes_the_way_of_dtensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its local tensor would be taken for the gradient of the shard."""
    with pretended(2) as mesh:
        model = zf.replicate(nn.Linear(4, 4), mesh)
        model.weight.grad = zf.shard_params(nn.Linear(4, 4), mesh).weight.detach()
        assert set(seen_by_adamw(model, monkeypatch)) == {DTensor}


def test_copies_and_states_of_an_optimizer_know_nothing_of_it() -> None:
    with pretended(2) as mesh:
        model = zf.shard_params(nn.Linear(4, 4), mesh)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.step()
        assert "_init_group" not in copy.deepcopy(optimizer).__dict__
        assert all(isinstance(optimizer.state[p]["exp_avg"], DTensor) for p in model.parameters())
        gone = weakref.ref(optimizer)
        gc.disable()
        try:
            del optimizer
            assert gone() is None
        finally:
            gc.enable()


def test_sgd_keeps_its_momentum_under_the_resting_parameters_for_every_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch writes it under the tensors of the arithmetic, which are local ones."""
    seen: list[type] = []
    module = sys.modules[torch.optim.SGD.__module__]
    arithmetic = module.sgd

    def spy(params: list[Tensor], *args: Any, **kwargs: Any) -> None:
        seen.extend(map(type, params))
        arithmetic(params, *args, **kwargs)

    monkeypatch.setattr(module, "sgd", spy)
    with pretended(2) as mesh:
        model = zf.shard_params(nn.Linear(4, 4), mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        keys: list[set[int]] = []
        optimizer.register_step_post_hook(lambda o, *_: keys.append(set(map(id, o.state))))
        buffers = []
        for _ in range(2):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            buffers.append([optimizer.state[p]["momentum_buffer"] for p in model.parameters()])
        assert keys == [set(map(id, model.parameters()))] * 2
        assert set(seen) <= {Tensor, nn.Parameter}
        assert all(isinstance(buffer, DTensor) for buffer in buffers[0])
        assert all(one is other for one, other in zip(*buffers, strict=True))  # the same objects, updated in place


def test_sgd_steps_again_after_a_step_that_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no memory")

    with pretended(2) as mesh:
        model = zf.shard_params(nn.Linear(4, 4), mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        with monkeypatch.context() as patch:
            patch.setattr(sys.modules[torch.optim.SGD.__module__], "sgd", fails)
            with pytest.raises(RuntimeError, match="no memory"):
                optimizer.step()
        model.bias.grad = None
        optimizer.step()
        assert set(map(id, optimizer.state)) >= {id(model.weight)}
        assert all(isinstance(key, DTensor) for key in optimizer.state)
