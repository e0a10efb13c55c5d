"""What is said once: a UserWarning with what to write instead, at the line of the user."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import zero_fn as zf
from tests.groups import alone

SLOW = "is stepped on the host without fused=True"
ROUNDED = "without float32 masters"


@pytest.fixture(autouse=True)
def _nothing_was_said(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("zero_fn.errors._said", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def trained(model: nn.Module, optimizer: Optimizer) -> None:
    for _ in range(2):
        model(torch.ones(2, 4, dtype=next(model.parameters()).dtype)).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_a_streamed_adam_that_is_not_fused_says_so_once(kind: Any) -> None:
    with alone() as mesh:
        model = zf.zero3(nn.Linear(4, 4), mesh)
        with pytest.warns(UserWarning, match=f"{kind.__name__} {SLOW}") as said:
            optimizer = zf.streamed(kind(model.parameters()), zf.cpu())
        assert len(said) == 1
        assert said[0].filename == __file__
        assert "..., fused=True)" in str(said[0].message)
        trained(model, optimizer)
        zf.streamed(kind(model.parameters()), zf.cpu())


@pytest.mark.parametrize("fused", [True, False])
def test_a_streamed_adam_that_says_whether_it_is_fused_is_not_warned_about(fused: bool) -> None:
    with alone() as mesh:
        model = zf.zero3(nn.Linear(4, 4), mesh)
        trained(model, zf.streamed(AdamW(model.parameters(), fused=fused), zf.cpu()))
        trained(model, zf.streamed(SGD(model.parameters(), lr=0.1), zf.cpu()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_adam_over_parameters_that_rest_in_few_bits_says_so_at_its_first_step(dtype: torch.dtype) -> None:
    with alone() as mesh:
        model = zf.zero3(nn.Linear(4, 4).to(dtype), mesh)
        with pytest.warns(UserWarning, match=f"AdamW trains parameters that rest in .*{ROUNDED}") as said:
            trained(model, AdamW(model.parameters()))
        assert len(said) == 1
        assert "weight" in str(said[0].message)
        assert "zf.precision" in str(said[0].message)


def test_a_streamed_adam_over_parameters_that_rest_in_few_bits_says_so() -> None:
    with alone() as mesh:
        model = zf.zero3(nn.Linear(4, 4).bfloat16(), mesh)
        with pytest.warns(UserWarning, match=ROUNDED):
            zf.streamed(AdamW(model.parameters(), fused=True), zf.cpu())


def test_masters_in_float32_and_what_is_frozen_are_not_warned_about() -> None:
    with alone() as mesh:
        model = zf.precision(zf.zero3(nn.Linear(4, 4), mesh))
        trained(model, AdamW(model.parameters()))
        frozen = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        frozen[0].bfloat16().requires_grad_(False)
        frozen = zf.zero3(frozen, mesh)
        AdamW(frozen.parameters()).step()
        rounded = zf.zero3(nn.Linear(4, 4).bfloat16(), mesh)
        trained(rounded, SGD(rounded.parameters(), lr=0.1))


def test_the_warning_about_few_bits_is_silenced_as_it_says() -> None:
    with alone() as mesh:
        model = zf.zero3(nn.Linear(4, 4).bfloat16(), mesh)
        warnings.filterwarnings("ignore", ".*without float32 masters")
        trained(model, AdamW(model.parameters()))
