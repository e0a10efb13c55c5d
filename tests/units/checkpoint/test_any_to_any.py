"""A checkpoint that any ranks have written is read by any others: parameters, buffers, moments, options, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import zero_fn as zf
from tests.support.ranks import Ranks
from tests.units.checkpoint.worlds import WORLDS, differing, everything, made, stepped


def _first(folder: str) -> dict[str, Any]:
    """A model that was trained, saved by one process."""
    model, optimizer = made("plain", folder, seed=0)
    for number in range(2):
        stepped(model, optimizer, number)
    zf.save(f"{folder}/plain/step-2", model, optimizer, extra={"step": 2})
    return everything(model, optimizer)


def _passed_on(world: str, folder: str, expected: dict[str, Any]) -> list[str]:
    """Loads that, and saves it as it rests in this world."""
    model, optimizer = made(world, folder, seed=7)
    step = zf.load(f"{folder}/plain", model, optimizer)["step"]
    zf.save(f"{folder}/{world}/step-{step}", model, optimizer, extra={"step": step})
    return differing(expected, everything(model, optimizer))


def _loaded(world: str, folder: str, expected: dict[str, Any], apart: int) -> list[str]:
    """Where what other worlds have saved differs from what was saved first, once it is loaded."""
    model, optimizer = made(world, folder, seed=8)
    wrong = []
    for source in sources(world, apart):
        stepped(model, optimizer, 3)
        zf.load(f"{folder}/{source}", model, optimizer)
        wrong += [f"{source}: {name}" for name in differing(expected, everything(model, optimizer))]
    return wrong


def sources(world: str, apart: int) -> list[str]:
    """What a world loads: of every other world, or of each so many, so that all are loaded by some."""
    return list(WORLDS)[list(WORLDS).index(world) % apart :: apart]


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """A folder with the same checkpoint as each world has saved it, and what is in it."""
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    (expected,) = ranks(1).run(_first, folder)
    for name, world in WORLDS.items():
        if name != "plain":
            assert ranks(world.ranks).run(_passed_on, name, folder, expected) == [[]] * world.ranks
    return folder, expected


@pytest.mark.parametrize("apart", [7, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("world", WORLDS)
def test_what_any_world_has_saved_is_loaded_to_the_bit(
    ranks: Ranks, world: str, apart: int, saved: tuple[str, dict[str, Any]]
) -> None:
    assert ranks(WORLDS[world].ranks).run(_loaded, world, *saved, apart) == [[]] * WORLDS[world].ranks


def test_replicas_share_the_writing(saved: tuple[str, dict[str, Any]]) -> None:
    sizes = [path.stat().st_size for path in (Path(saved[0]) / "replicate" / "step-2" / "model").iterdir()]
    assert len(sizes) == 2
    assert max(sizes) < 0.8 * sum(sizes)
