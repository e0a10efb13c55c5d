"""A save that is killed or fails has not begun: the checkpoint before is loaded, and nothing else passes for one."""

import errno
import os
import shutil
import signal
import time
import warnings
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero_fn as zf
from tests.support.messages import refused
from tests.support.on_ranks import on_ranks
from tests.support.ranks import axis, sent_by_value
from tests.units.storage.disks import small_disk
from zero_fn.checkpoint.huggingface.write import export
from zero_fn.local import first_failure
from zero_fn.local.first_failure import RankDied
from zero_fn.local.launcher import LocalRanks

CALLS = ("open", "pwrite", "fsync", "rename", "replace", "unlink", "rmdir", "mkdir", "close")
"""What a save asks of the system."""


@contextmanager
def before_each_call(act):
    """Inside, `act(number, name)` runs before every call of the system. Yields the names of the calls so far."""
    seen = []
    real = {name: getattr(os, name) for name in CALLS}

    def counted(name):
        def call(*args, **kwargs):
            seen.append(name)
            act(len(seen), name)
            return real[name](*args, **kwargs)

        return call

    for name in CALLS:
        setattr(os, name, counted(name))
    try:
        yield seen
    finally:
        for name in CALLS:
            setattr(os, name, real[name])


def run_of(step):
    """A model and its optimizer whose values say which step they are of."""
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(step)
            optimizer.state[parameter] = {
                "step": torch.tensor(float(step)),
                "exp_avg": torch.full_like(parameter, step),
            }
    return model, optimizer


def loaded_step(folder):
    """The step that is loaded, if all values are of it."""
    model, optimizer = run_of(0)
    step = zf.load(folder, model, optimizer)["step"]
    values = [*model.parameters(), *(value for states in optimizer.state.values() for value in states.values())]
    assert all(bool((value == step).all()) for value in values)
    return int(step)


def saved(folder, step, how="sync", **options):
    model, optimizer = run_of(step)
    background = how == "async"
    zf.save(folder / f"step-{step}", model, optimizer, extra={"step": step}, background=background, **options).wait()


def left_by_a_kill(folder, kept, act):
    """Acts on a folder. Copies of it as it was before each call of the system: what a kill at that point leaves.

    What has no name yet goes with a process that is killed, and so do its locks; neither is in a copy.
    """
    made = []
    is_copying = False

    def copy(_number, _name):
        nonlocal is_copying
        if not is_copying:  # which calls the system, too
            is_copying = True
            shutil.copytree(folder, kept / str(len(made)))
            made.append(kept / str(len(made)))
            is_copying = False

    with before_each_call(copy):
        act()
    return made


def killed_at(point, act):
    """Acts in a child that is killed before that call of the system; whether it was."""
    child = os.fork()
    if child == 0:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with before_each_call(lambda number, _: os.kill(os.getpid(), signal.SIGKILL) if number == point else None):
                act()
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("how", ["sync", "async"])
def test_a_save_that_is_killed_at_any_point_has_not_begun(how, tmp_path):
    folder = tmp_path / "runs"
    saved(folder, 1)
    saved(folder, 2)
    steps = []
    for number, left in enumerate(left_by_a_kill(folder, tmp_path / "kept", lambda: saved(folder, 3, how, keep=2))):
        steps.append(loaded_step(left))
        complete = [found.step for found in zf.checkpoints(left) if found.is_complete]
        assert complete == ([1, 2] if steps[-1] == 2 else [1, 2, 3] if (left / "step-1").exists() else [2, 3])
        if number % 4 == 0:
            saved(left, 4)
            assert not [path.name for path in left.iterdir() if path.name.startswith(".")], "the next save tidies up"
    assert len(steps) > 50
    assert steps == sorted(steps)
    assert set(steps) == {2, 3}


def test_a_process_that_is_killed_leaves_what_the_next_save_takes_over(tmp_path):
    """The other tests copy what is there at a point; here a process is killed at some."""
    saved(tmp_path, 1)
    for point in (1, 10, 30, 50):
        assert killed_at(point, lambda: saved(tmp_path, 2))
        assert loaded_step(tmp_path) == 1
    saved(tmp_path, 2)
    assert loaded_step(tmp_path) == 2
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("how", ["sync", "async"])
def test_all_is_on_the_disk_before_the_rename_and_the_rename_after_it(how, tmp_path):
    """A file system may keep a rename and lose what was written before it, where nobody asked for the bytes."""
    folder = tmp_path / "runs"
    saved(folder, 1)
    log = []
    real_sync, real_write, real_rename = os.fsync, os.pwrite, os.rename

    def path_of(fd):
        return Path(os.readlink(f"/proc/self/fd/{fd}"))

    def sync(fd):
        real_sync(fd)
        log.append(("fsync", path_of(fd)))

    def write(fd, *rest):
        log.append(("write", path_of(fd)))
        return real_write(fd, *rest)

    def rename(source, target):
        log.extend(("there", path) for path in (Path(source), *Path(source).rglob("*")))
        real_rename(source, target)
        log.append(("rename", Path(target)))

    with patch.object(os, "fsync", sync), patch.object(os, "pwrite", write), patch.object(os, "rename", rename):
        saved(folder, 2, how)
    at = log.index(("rename", folder / "step-2"))
    there = {path for event, path in log[:at] if event == "there"}
    last = {path: number for number, (event, path) in enumerate(log[:at]) if event != "there"}
    assert len(there) == 1 + 3 + 2 + 2, "a folder, three in it, two files of tensors, and two of JSON"
    for path in there:
        assert log[last[path]][0] == "fsync", path
        assert path.parent not in there or last[path.parent] > last[path], "a name is on the disk with its folder"
    assert ("fsync", folder) in log[at:]


SINGLE, SHARDS = "1GB", 40


@pytest.mark.parametrize(
    ("before", "after"),
    [(None, SHARDS), (SINGLE, SINGLE), (SINGLE, SHARDS), (SHARDS, SINGLE), (SHARDS, SHARDS)],
)
def test_weights_that_are_replaced_are_always_one_model(before, after, tmp_path):
    """Of a save that is killed at any point the one before is left, or the new one, or nothing where there was nothing."""

    def model(value):
        made = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
        for parameter in made.parameters():
            nn.init.constant_(parameter, value)
        return made

    def found(folder):
        read = model(0)
        try:
            zf.load_pretrained(read, folder)
        except (zf.errors.CheckpointError, zf.errors.StorageError):
            return None
        (value,) = torch.cat([p.reshape(-1) for p in read.parameters()]).unique().tolist()
        return float(value)

    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "trainer_state.json").write_text("{}")
    if before is not None:
        zf.save_pretrained(model(1), folder, max_shard=before)
    replaced = left_by_a_kill(
        folder, tmp_path / "kept", lambda: export(model(2), folder, max_shard=after, replaces=before is not None)
    )
    assert {found(left) for left in replaced} == {None if before is None else 1, 2}
    assert found(folder) == 2
    for number, left in ((3, replaced[len(replaced) // 2]), (4, folder)):
        export(model(number), left, max_shard=after, replaces=True)
        assert found(left) == number
    count = 1 if after == SINGLE else 6
    assert len(list(folder.glob("*safetensors*"))) == count + (count > 1), "nothing of before is left"
    assert (folder / "trainer_state.json").exists()


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path):
    with small_disk(tmp_path / "disk", "size=256k") as disk:
        saved(disk, 1)
        model = nn.Linear(300, 300)
        with pytest.raises(zf.errors.StorageError, match="ENOSPC"):
            zf.save(disk / "step-2", model)
        assert loaded_step(disk) == 1
        assert [path.name for path in disk.iterdir()] == ["step-1"]


@pytest.mark.parametrize("at", [4, 18])
def test_a_path_that_vanishes_is_a_typed_error(at, tmp_path):
    """Somebody removes the folder that is being written."""
    saved(tmp_path, 1)

    def vanish(number, _):
        if number == at:
            shutil.rmtree(tmp_path / ".step-2.saving")

    with before_each_call(vanish), pytest.raises(zf.errors.StorageError, match="ENOENT"):
        saved(tmp_path, 2)
    assert loaded_step(tmp_path) == 1


def test_what_another_process_is_saving_is_left_alone(tmp_path):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with before_each_call(lambda _, name: (os.write(write, b"x"), signal.pause()) if name == "fsync" else None):
            saved(tmp_path, 1)
        os._exit(0)
    try:
        assert os.read(read, 1) == b"x"
        with refused("checkpoint_is_being_saved"):
            saved(tmp_path, 1)
        saved(tmp_path, 2)
        assert (tmp_path / ".step-1.saving").exists()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(read)
        os.close(write)
    saved(tmp_path, 3)
    assert not (tmp_path / ".step-1.saving").exists()


def test_a_checkpoint_is_never_overwritten(tmp_path):
    saved(tmp_path, 1)
    with refused("checkpoint_is_there_already"):
        saved(tmp_path, 1)
    assert loaded_step(tmp_path) == 1


@on_ranks(3)
def test_a_write_in_the_background_that_fails_on_one_rank_is_told_on_all(folder):
    """By `wait`, by the next save and by a load."""
    model, path, fails = zf.shard_params(nn.Linear(4, 4), axis()), Path(folder), dist.get_rank() == 1
    zf.save(path / "step-1", model)
    full = {"side_effect": OSError(errno.ENOSPC, "full")} if fails else {"wraps": os.fsync}
    for number in range(3):
        told = (
            pytest.raises(zf.errors.StorageError, match="ENOSPC")
            if fails
            else refused("checkpoint_failed_on_another_rank")
        )
        with patch.object(os, "fsync", **full):
            saving = zf.save(path / "step-2", model, background=True)
            asked = saving.wait, lambda: zf.save(path / "step-3", model), lambda: zf.load(path, model)
            with told:
                asked[number]()
    zf.save(path / "step-4", model)
    assert [found.step for found in zf.checkpoints(path)] == [1, 4], "nothing else is left"


def _survived(program, folder, *arguments):
    """Runs it on three ranks, of which one dies."""
    with (
        LocalRanks(3) as ranks,
        patch.object(first_failure, "GRACE_S", 45.0),
        sent_by_value(program),
        pytest.raises(RankDied),
    ):
        ranks.run(program, (folder, *arguments), timeout_s=90.0)


def _ended_before(folder, victim):
    """A rank ends before the first save; the others write what they are told, and when."""
    if dist.get_rank() == victim:
        os._exit(3)
    begin = time.monotonic()
    with zf.distributed.set_deadline(60), pytest.raises(zf.errors.LostRankError):
        zf.save(folder / "step-1", nn.Linear(2, 2))
    (folder / f"rank{dist.get_rank()}").write_text(str(time.monotonic() - begin))


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_ended_before_the_first_save_is_told_before_the_deadline(victim, tmp_path):
    """The first save makes a process group, which waits for all ranks as long as it may."""
    _survived(_ended_before, tmp_path, victim)
    assert all(float((tmp_path / f"rank{rank}").read_text()) < 30 for rank in {0, 1, 2} - {victim})


def _killed(folder, at, how):
    """The second rank is killed while it saves; the others write what they are told."""
    model = zf.shard_params(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), axis())
    zf.save(folder / "step-1", model)

    def kill(number, _):
        if number == at and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    said = "nothing"
    try:
        with before_each_call(kill):
            zf.save(folder / "step-2", model, background=how == "async").wait()
    except zf.errors.LostRankError:
        said = "LostRankError"
    (folder / f"rank{dist.get_rank()}").write_text(said)


@pytest.mark.parametrize(("at", "how"), [(1, "sync"), (4, "async"), (9, "sync")])
def test_a_rank_that_is_killed_in_a_save_is_a_typed_error_on_the_others(at, how, tmp_path):
    _survived(_killed, tmp_path, at, how)
    assert [(tmp_path / f"rank{rank}").read_text() for rank in (0, 2)] == ["LostRankError"] * 2
    assert [found.step for found in zf.checkpoints(tmp_path) if found.is_complete] == [1]
    zf.load(tmp_path, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
