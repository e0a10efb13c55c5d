"""Laws of checkpoints over ranks: what was saved anywhere is loaded anywhere, a save that fails or is killed has not begun,
and whatever befalls a file is found before anything changes."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import zero_fn as zf
from property_tests.programs import Chain, Link, Tree, apply, build
from property_tests.strategies import FLOATS, chains, trees
from tests.simulation import Fault, Simulated, axis
from tests.support.profiles import examples
from tests.support.ranks import Ranks
from tests.support.ranks import axis as gloo_axis
from tests.units.checkpoint.test_atomic import before_each_call, killed_at
from tests.units.checkpoint.worlds import differing, everything

MODELS = trees(dtypes=(*FLOATS, torch.int64, torch.bool))
ONE = Link("shard_params")


@dataclass(frozen=True)
class World:
    """How many ranks there are, and how a model and its optimizer rest on them; a pair of ranks is a grid."""

    ranks: int | tuple[int, int]
    chain: Chain
    params: str | None
    states: str | None


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Any ranks, homes and tiers; a chain without links is a plain module on one rank."""
    chain = draw(st.just(()) | chains(precise=True))
    ranks = draw(st.sampled_from([1, 2, 3, 4, (2, 2)])) if chain else 1
    tiers = st.sampled_from([None, None, "cpu", "nvme"])
    is_sharded = any(link.verb == "shard_params" for link in chain)
    params = draw(tiers) if is_sharded else None
    streamed = tiers if params is None else tiers.filter(bool)  # what is away is stepped by a streamed optimizer
    return World(ranks, chain, params, draw(streamed) if chain else None)


def tier(name: str, folder: str) -> Any:
    return zf.nvme(folder) if name == "nvme" else zf.cpu()


def made(tree: Tree, world: World, mesh: DeviceMesh, folder: str, seed: int) -> tuple[nn.Module, Any]:
    """The model and its optimizer at rest in a world."""
    model: nn.Module = apply(world.chain, build(tree, seed), mesh)
    model.register_buffer("seen", torch.arange(3.0) + seed)
    if world.params is not None:
        model = zf.offload(model, params=tier(world.params, folder))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: Any = torch.optim.AdamW(trained, lr=0.1 + seed, amsgrad=True)
    return model, optimizer if world.states is None else zf.streamed(optimizer, tier(world.states, folder))


def stepped(model: nn.Module, optimizer: Any) -> None:
    """A step whose gradients are other for each element."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = parameter.detach() * 0.5
    optimizer.step()
    optimizer.zero_grad()


def saved(folder: str, tree: Tree, world: World, mesh: DeviceMesh) -> dict[str, Any]:
    """Saves a model that has been trained, and returns all that it has."""
    model, optimizer = made(tree, world, mesh, folder, seed=0)
    stepped(model, optimizer)
    zf.save(f"{folder}/runs/step-1", model, optimizer, extra={"step": 1})
    return everything(model, optimizer)


def loaded(folder: str, tree: Tree, world: World, mesh: DeviceMesh, expected: dict[str, Any]) -> list[str]:
    """Loads that into another model, and returns what differs."""
    model, optimizer = made(tree, world, mesh, folder, seed=1)
    stepped(model, optimizer)
    zf.load(f"{folder}/runs", model, optimizer, verify="once")
    return differing(expected, everything(model, optimizer))


def has_optimizer(tree: Tree) -> bool:
    return any(parameter.requires_grad for parameter in build(tree).parameters())


@examples(dev=15, ci=400, deep=20_000)
@given(MODELS, worlds(), worlds())
def test_what_was_saved_in_any_world_is_loaded_in_any_other(
    simulated: Simulated, tree: Tree, there: World, here: World
) -> None:
    assume(has_optimizer(tree))
    with tempfile.TemporaryDirectory() as folder:
        expected = simulated(there.ranks).run(lambda: saved(folder, tree, there, axis()))[0]
        for wrong in simulated(here.ranks).run(lambda: loaded(folder, tree, here, axis(), expected)):
            assert wrong == []


Case = tuple[Tree, World, World]


def _on_gloo(folder: str, cases: list[Case]) -> list[list[str]]:
    found = []
    for number, (tree, there, here) in enumerate(cases):
        inside = f"{folder}/{number}"
        if dist.get_rank() == 0:
            Path(inside).mkdir()
        dist.barrier()
        expected = saved(inside, tree, there, gloo_axis())
        found.append(loaded(inside, tree, here, gloo_axis(), expected))
    return found


@examples(dev=1, ci=10, deep=1_000)
@given(st.lists(st.tuples(MODELS, worlds(), worlds()), min_size=4, max_size=4))
def test_so_it_is_on_ranks_that_are_processes(ranks: Ranks, cases: list[Case]) -> None:
    cases = [case for case in cases if has_optimizer(case[0]) and case[1].chain and case[2].chain]
    with tempfile.TemporaryDirectory() as folder:
        assert ranks(2).run(_on_gloo, folder, cases) == [[[]] * len(cases)] * 2


# -- interrupted -------------------------------------------------------------------------------------------------------


def refused_at(point: int, rank: int, folder: str) -> Any:
    """The disk of a rank refuses its call number `point` of the second save."""
    seen = [0]
    marked = Path(folder) / "second"

    def act(_: int, name: str) -> None:
        if marked.exists() and dist.get_rank() == rank and name != "close":
            seen[0] += 1
            if seen[0] == point:
                raise OSError(5, f"refused {name}")

    return act


def interrupted(folder: str, tree: Tree) -> tuple[str, list[str]]:
    """The second save of a model that has changed: how it ended, and what differs once the newest is loaded."""
    model, optimizer = made(tree, World(2, (ONE,), None, None), axis(), folder, seed=0)
    states = []
    told = "saved"
    for number in (1, 2):
        stepped(model, optimizer)
        states.append(everything(model, optimizer))
        if number == 1:
            zf.save(f"{folder}/step-1", model, optimizer)
            continue
        (Path(folder) / "second").touch()
        try:
            zf.save(f"{folder}/step-2", model, optimizer)
        except (zf.StorageError, zf.LostRankError) as error:
            told = type(error).__name__
    return told, differing(states[-1], everything(model, optimizer))


@examples(dev=15, ci=250, deep=10_000)
@given(trees(dtypes=FLOATS), st.integers(2, 3), st.integers(1, 30), st.integers(0, 2))
def test_a_save_that_a_disk_refuses_has_not_begun(
    simulated: Simulated, tree: Tree, n: int, point: int, rank: int
) -> None:
    assume(has_optimizer(tree))
    with tempfile.TemporaryDirectory() as folder:
        with before_each_call(refused_at(point, rank % n, folder)):
            said = simulated(n).run(lambda: interrupted(folder, tree), may_leave_messages=True)
        assert len({told for told, _ in said}) == 1, "every rank is told, or none"
        assert all(wrong == [] for _, wrong in said), "a save changes nothing"
        expected = [2, 1] if said[0][0] == "saved" else [1]
        assert sorted((each.step or 0 for each in zf.checkpoints(folder)), reverse=True) == expected


@examples(dev=20, ci=200, deep=10_000)
@given(st.integers(2, 4), st.integers(0, 3), st.integers(1, 12))
def test_a_save_in_which_a_rank_is_killed_has_not_begun(simulated: Simulated, n: int, rank: int, at: int) -> None:
    """Or it was complete: the rank was killed after the last one had written."""

    def save(folder: str) -> None:
        model = zf.zero3(nn.Linear(8, 3), axis())
        zf.save(f"{folder}/step-1", model)
        zf.save(f"{folder}/step-2", model)

    with tempfile.TemporaryDirectory() as folder:
        report = simulated(n, faults=[Fault("kill", rank % n, at)]).report(lambda: save(folder))
        steps = [found.step for found in zf.checkpoints(folder) if found.is_complete]
        assert steps in ([], [1], [1, 2])
        for outcome in report.outcomes:
            told = (
                zf.LostRankError,
                zf.StorageError,
            )  # the second where the folder was gone before this rank heard why
            assert outcome.error is None or isinstance(outcome.error, told), str(report)
        with suppress(IndexError):
            zf.load(Path(folder) / f"step-{steps[-1]}", nn.Linear(8, 3))
        zf.save(f"{folder}/step-3", nn.Linear(8, 3))
        assert not [path.name for path in Path(folder).iterdir() if path.name.startswith(".")], "nothing is left over"


@examples(dev=15, ci=100, deep=5_000)
@given(trees(dtypes=FLOATS), st.integers(1, 80), st.booleans())
def test_a_save_that_is_killed_anywhere_has_not_begun(tree: Tree, point: int, is_async: bool) -> None:
    model = build(tree)
    with tempfile.TemporaryDirectory() as folder:
        zf.save(f"{folder}/step-1", model)
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        changed = build(tree, seed=1)
        was_killed = killed_at(point, lambda: zf.save(f"{folder}/step-2", changed, background=is_async).wait())
        read = build(tree, seed=2)
        zf.load(folder, read)
        is_new = (Path(folder) / "step-2").exists()
        assert is_new or was_killed
        expected = dict(changed.state_dict()) if is_new else expected
        assert differing(expected, dict(read.state_dict())) == []


# -- damaged -----------------------------------------------------------------------------------------------------------


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@st.composite
def damages(draw: st.DrawFn) -> Any:
    """Something that befalls the files of a checkpoint; says whether they are other than before."""
    kind = draw(st.sampled_from(["write", "cut", "append", "remove", "swap", "zero", "copy", "insert"]))
    which, other, at = draw(st.integers(0, 99)), draw(st.integers(0, 99)), draw(st.floats(0, 0.999))
    values = draw(st.binary(min_size=1, max_size=40))

    def act(folder: Path) -> bool:
        files = _files(folder)
        path, second = files[which % len(files)], files[other % len(files)]
        before = path.read_bytes()
        place = int(at * len(before))
        after: bytes | None
        match kind:
            case "write":
                after = (before[:place] + values + before[place + len(values) :])[: len(before)]
            case "cut":
                after = before[:place]
            case "append":
                after = before + values
            case "insert":
                after = before[:place] + values + before[place:]
            case "zero":
                after = bytes(len(before))
            case "remove":
                path.unlink()
                return True
            case _:
                after = second.read_bytes()
                if kind == "swap":
                    second.write_bytes(before)
        path.write_bytes(after)
        return after != before

    return act


@examples(dev=12, ci=1_000, deep=100_000)
@given(trees(dtypes=FLOATS), st.lists(damages(), min_size=20, max_size=20), st.integers(1, 3))
def test_whatever_befalls_a_file_is_found_before_anything_changes(
    simulated: Simulated, tree: Tree, several: list[Any], n: int
) -> None:
    assume(has_optimizer(tree))
    assume(all(parameter.numel() for parameter in build(tree).parameters()))  # a file without elements is never opened
    with tempfile.TemporaryDirectory() as made_folder:
        folder, plain = Path(made_folder), World(1, (), None, None)
        world = World(n, (ONE,) if n > 1 else (), None, None)
        simulated(n).run(lambda: saved(made_folder, tree, world, axis()))
        model, optimizer = made(tree, plain, None, made_folder, seed=1)  # type: ignore[arg-type]
        before = everything(model, optimizer)
        shutil.copytree(folder / "runs", folder / "whole")
        for act in several:
            if act(folder / "runs" / "step-1"):
                try:
                    zf.load(folder / "runs" / "step-1", model, optimizer)
                except (zf.CheckpointError, zf.StorageError):
                    pass
                else:
                    raise AssertionError("what was damaged was loaded")
            shutil.rmtree(folder / "runs")
            shutil.copytree(folder / "whole", folder / "runs")
        assert differing(before, everything(model, optimizer)) == []
        zf.load(folder / "runs", model, optimizer)
