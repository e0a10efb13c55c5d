"""The text of errors: what a user reads, word by word, in `tests/errors/snapshots`.

    with refused("step_inside_accumulate"):     # in the test of the promise
        optimizer.step()

    test_refusals = refusals(REFUSALS)          # or a table of them in that file: name -> what is done wrong

A function of the table takes what it needs by the names of its parameters, out of `PLACES`.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_fn as zf
from tests.support.groups import alone, pretended, pretended_grid
from tests.support.snapshot import assert_matches
from zero_fn.errors import ZeroError

__all__ = ["PLACES", "SNAPSHOTS", "Headed", "a_batch", "assert_says", "changed", "refusals", "refused"]

SNAPSHOTS = Path(__file__).parents[1] / "errors" / "snapshots"


def assert_says(name: str, error: ZeroError) -> None:
    """Asserts that an error has a summary and a fix, and is the snapshot of this name."""
    text = str(error)
    assert text.splitlines()[0] == error.summary
    assert re.search(r"^  fix +: \S", text, re.MULTILINE) and error.fix
    assert_matches(SNAPSHOTS / f"{name}.txt", f"{type(error).__name__}: {_normalized(text)}")


def _normalized(text: str) -> str:
    """A message without what differs from one machine or one edit of a test to the next."""
    text = re.sub(r"(\w+\.py):\d+", r"\1:LINE", text)
    text = re.sub(r"checksum [0-9a-f]{16}", "checksum DIGEST", text)
    text = re.sub(r"sum of bits -?\d+", "sum of bits N", text)
    text = re.sub(rf"{re.escape(tempfile.gettempdir())}/zero_fn_\w+", "FOLDER", text)
    text = re.sub(
        rf"{re.escape(tempfile.gettempdir())}/pytest-of-[^/]+/[^/]+/(?:popen-gw\d+/)?[^/\s'\"]+", "FOLDER", text
    )
    return re.sub(r"0x[0-9a-f]+", "0xADDRESS", text)


@contextlib.contextmanager
def refused(name: str, kind: type[ZeroError] = ZeroError) -> Iterator[pytest.ExceptionInfo[ZeroError]]:
    """Asserts that a block raises the error of this snapshot. On ranks, each that raises compares its own."""
    with pytest.raises(kind) as caught:
        yield caught
    traceback.clear_frames(caught.tb)  # torch 2.11 closes the context of a checkpoint when its frame is dropped
    assert_says(name, caught.value)


def refusals(rows: Mapping[str, Callable[..., object]]) -> Callable[[str], None]:
    """A test of a table: by the name of its snapshot, what raises the error."""

    @pytest.mark.parametrize("name", rows)
    def test(name: str) -> None:
        mistake = rows[name]
        with contextlib.ExitStack() as stack, refused(name):
            mistake(*(stack.enter_context(PLACES[place]()) for place in inspect.signature(mistake).parameters))

    return test


# -- places, and a model -----------------------------------------------------------------------------------------------


class Headed(nn.Module):
    """Two layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def changed(change: Callable[[Any], object]) -> Headed:
    """The model after a change."""
    model = Headed()
    change(model)
    return model


def a_batch() -> Tensor:
    """What `Headed` takes."""
    return torch.ones(2, 4)


@contextlib.contextmanager
def _a_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="zero_fn_") as folder:
        yield Path(folder)


@contextlib.contextmanager
def _a_sharded_model() -> Iterator[Headed]:
    with alone() as mesh:
        yield zf.shard_params(Headed(), mesh)


@contextlib.contextmanager
def _a_checkpoint() -> Iterator[Path]:
    with _a_folder() as folder:
        zf.save(folder / "step-1", nn.Linear(2, 2), extra={"noise": 1})
        yield folder / "step-1"


@contextlib.contextmanager
def _a_tiered_model() -> Iterator[nn.Module]:
    yield zf.offload(Headed(), params=zf.nvme("/tmp"))


PLACES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "one": alone,
    "two": partial(pretended, 2),
    "four": partial(pretended, 4),
    "gpus": partial(pretended, 4, device_type="cuda"),
    "meta": partial(torch.device, "meta"),
    "grid": partial(pretended_grid, 4, 2),
    "model": _a_sharded_model,
    "folder": _a_folder,
    "saved": _a_checkpoint,
    "tiered": _a_tiered_model,
}
"""What a mistake may ask for: a mesh of so many ranks, a sharded model, a folder, a checkpoint, a model on a disk."""
