"""Optimizers of users are streamed at their word: what they keep in states is kept as in memory, the others are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import zero_fn as zf

States = dict[str, Any]


class Users(Optimizer):
    """SGD with momentum and a quirk; each below is one that somebody writes."""

    def __init__(self, params: Iterable[Tensor], **options: Any) -> None:
        super().__init__(params, {"lr": 0.1, **options})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        self.begin()
        for group in self.param_groups:
            self.begin_group(group)
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(self.update(p, self.state[p], group), alpha=-group["lr"])

    def begin(self) -> None: ...

    def begin_group(self, group: dict[str, Any]) -> None: ...

    def update(self, p: Tensor, state: States, group: dict[str, Any]) -> Tensor:
        assert p.grad is not None
        state["momentum"] = momentum = 0.5 * state.get("momentum", 0.0) + p.grad
        return momentum


class ExchangesStates(Users):
    def update(self, p: Tensor, state: States, group: dict[str, Any]) -> Tensor:
        if not state:
            state["one"], state["other"] = torch.zeros_like(p), torch.ones_like(p)
        state["one"], state["other"] = state["other"], state["one"]
        state["one"].add_(p.grad)
        return state["one"] + 0.5 * state["other"]


class HandsStatesOn(Users):
    def update(self, p: Tensor, state: States, group: dict[str, Any]) -> Tensor:
        assert p.grad is not None
        if not state:
            state["last"], state["before"], state["first"] = (torch.full_like(p, i) for i in range(3))
        state["first"], state["before"], state["last"] = state["before"], state["last"], p.grad.clone()
        return state["last"] + 0.5 * state["before"] + 0.1 * state["first"]


class CountsInATensorOfTheGroup(Users):
    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, count=torch.tensor(0.0))

    def begin_group(self, group: dict[str, Any]) -> None:
        group["count"] += 1

    def update(self, p: Tensor, state: States, group: dict[str, Any]) -> Tensor:
        return super().update(p, state, group) / group["count"]


class ListsInTheGroup(Users):
    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, history=[])

    def begin_group(self, group: dict[str, Any]) -> None:
        group["history"].append(group["lr"])

    def update(self, p: Tensor, state: States, group: dict[str, Any]) -> Tensor:
        return super().update(p, state, group) / len(group["history"])


class CountsInATensor(Users):
    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params)
        self.count = torch.tensor(0.0)

    def begin(self) -> None:
        self.count += 1

    def update(self, p: Tensor, state: States, group: dict[str, Any]) -> Tensor:
        return super().update(p, state, group) / self.count


class CountsInADict(Users):
    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params)
        self.counts = {"steps": 0}

    def begin(self) -> None:
        self.counts["steps"] += 1

    def update(self, p: Tensor, state: States, group: dict[str, Any]) -> Tensor:
        return super().update(p, state, group) / self.counts["steps"]


class CountsFromItsFirstStep(Users):
    def begin(self) -> None:
        self.count = getattr(self, "count", 0) + 1

    def update(self, p: Tensor, state: States, group: dict[str, Any]) -> Tensor:
        return super().update(p, state, group) / self.count


class DecaysMatrices(Users):
    def update(self, p: Tensor, state: States, group: dict[str, Any]) -> Tensor:
        update = super().update(p, state, group)
        return update + 0.1 * p if p.ndim > 1 else update


class ReadsAttributes(Users):
    def update(self, p: Any, state: States, group: dict[str, Any]) -> Tensor:
        return super().update(p, state, group) * p.scale


class KeepsMomentaInADict(Users):
    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params)
        self.momenta: dict[Tensor, Tensor] = {}

    def update(self, p: Tensor, state: States, group: dict[str, Any]) -> Tensor:
        return self.momenta.setdefault(p, torch.zeros_like(p)).mul_(0.9).add_(p.grad)


class KeepsMomentaInOrder(Users):
    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params)
        self.momenta: list[Tensor] = []

    def begin(self) -> None:
        self.at = 0

    def update(self, p: Tensor, state: States, group: dict[str, Any]) -> Tensor:
        if len(self.momenta) <= self.at:
            self.momenta.append(torch.zeros_like(p))
        self.at += 1
        return self.momenta[self.at - 1].mul_(0.9).add_(p.grad)


class KeepsMomentaOnParameters(Users):
    def update(self, p: Any, state: States, group: dict[str, Any]) -> Tensor:
        p.momentum = getattr(p, "momentum", torch.zeros_like(p)).mul(0.9).add(p.grad)
        found: Tensor = p.momentum
        return found


class SharesMemoryOfStates(Users):
    def update(self, p: Tensor, state: States, group: dict[str, Any]) -> Tensor:
        assert p.grad is not None
        if not state:
            state["momentum"] = torch.zeros_like(p)
            state["flat"] = state["momentum"].view(-1)
        state["flat"].mul_(0.9).add_(p.grad.reshape(-1))
        momentum: Tensor = state["momentum"]
        return momentum


KEPT: list[type[Users]] = [ExchangesStates, HandsStatesOn, DecaysMatrices, ReadsAttributes]
REFUSED: list[type[Users]] = [
    CountsInATensorOfTheGroup,
    ListsInTheGroup,
    CountsInATensor,
    CountsInADict,
    CountsFromItsFirstStep,
    KeepsMomentaInADict,
    KeepsMomentaInOrder,
    KeepsMomentaOnParameters,
    SharesMemoryOfStates,
]


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes: list[tuple[int, ...]] = [(40, 30), (40, 30), (20_000,), (), (130, 140)]
    found: list[Any] = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    for number, parameter in enumerate(found):
        parameter.scale = 1 + number
    return found


def steps(optimizer: Any, ours: list[nn.Parameter]) -> None:
    for number in range(4):
        generator = torch.Generator().manual_seed(number)
        for at, p in enumerate(ours):
            grad = torch.randn(p.shape, generator=generator)
            p.grad = grad if number != 2 or at else None
        optimizer.step()


@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("kind", KEPT)
def test_what_it_keeps_in_states_is_kept(tmp_path: Path, kind: type[Users], away: bool) -> None:
    """In several chunks; with parameters on the disk too, in one for each parcel."""
    plain = parameters()
    stock = kind(plain)
    held: Any = nn.ParameterList(parameters())
    if away:
        held = zf.offload(held, params=zf.nvme(tmp_path))
    inner = kind(held.parameters())
    optimizer = zf.streamed(inner, zf.nvme(tmp_path), buffer="1MiB" if away else "64KiB", elementwise=True)
    assert away or len(optimizer.states.chunks) > 1
    steps(stock, plain)
    steps(optimizer, list(held.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(held.parameters(), plain, strict=True))


class Derived(torch.optim.AdamW):
    """May do anything before or after the step that it is derived from."""


@pytest.mark.parametrize(
    ("kind", "word"), [*((kind, False) for kind in (*KEPT, Derived)), *((kind, True) for kind in REFUSED)]
)
def test_others_are_refused(tmp_path: Path, kind: type[Users], word: bool) -> None:
    """Those for which nobody gave a word, and those that are seen to break it. They go on as ever."""
    plain, ours = parameters(), parameters()
    stock, optimizer = kind(plain), kind(ours)
    fix = r"state\[p\]" if word else "elementwise=True"
    with pytest.raises(zf.PlacementError, match=rf"(?s)The states of {kind.__name__} cannot be streamed.*fix.*{fix}"):
        zf.streamed(optimizer, zf.nvme(tmp_path), elementwise=word)
    for number in range(2):
        for mine, theirs in zip(ours, plain, strict=True):
            mine.grad, theirs.grad = torch.full_like(mine, number), torch.full_like(mine, number)
        optimizer.step()
        stock.step()
    assert all(torch.equal(one, other) for one, other in zip(ours, plain, strict=True))


def test_an_option_that_looks_at_whole_tensors_is_refused_later_too(tmp_path: Path) -> None:
    optimizer = zf.streamed(ExchangesStates(parameters()), zf.nvme(tmp_path), elementwise=True)
    optimizer.param_groups[0]["cautious"] = True
    with pytest.raises(zf.PlacementError, match=r"(?s)The states of ExchangesStates cannot be streamed.*whole tensors"):
        optimizer.step()


def test_tensors_of_groups_stay_the_same(tmp_path: Path) -> None:
    rate = torch.tensor(0.1)
    optimizer = ExchangesStates(parameters())
    optimizer.param_groups[0]["lr"] = rate
    streamed = zf.streamed(optimizer, zf.nvme(tmp_path), buffer="64KiB", elementwise=True)
    steps(streamed, list(optimizer.param_groups[0]["params"]))
    assert streamed.param_groups[0]["lr"] is rate
    assert rate == 0.1
