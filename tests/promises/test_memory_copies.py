"""Copies in shared memory: complete or not used, seen by nobody else, and gone when nobody needs them.

What is in them, at every stage, tier and dtype: `test_resume.py`. Between hosts: `tests/outside/launchers/test_two_hosts.py`.
Of a run whose ranks are killed at random: `examples/benchmarks/kills.py`.
"""

import contextlib
import itertools
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import zero_fn as zf
from tests.support.messages import refusals, refused
from tests.support.on_ranks import on_ranks
from tests.support.programs import STAGES
from tests.support.ranks import Ranks, axis
from tests.support.worlds import WIDTH, Tower, noise
from zero_fn.checkpoint.agreement import RankMeeting
from zero_fn.checkpoint.rank_files import RankFiles
from zero_fn.checkpoint.saving import wait_for_saving
from zero_fn.checkpoint.shared_memory import MARK, memory_copies
from zero_fn.integrations.trainer_checkpoints import save_states
from zero_fn.local import folder_keeper, shared_folder
from zero_fn.local.shared_folder import SharedFolder

OWN = os.urandom(4).hex()
"""Begins the words of folders that tests make: others may be running."""


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path):
    yield
    for mark in tmp_path.rglob(MARK):
        shutil.rmtree(
            SharedFolder.path_of(mark.read_text().split()[0]), ignore_errors=True
        )  # its keeper sees it, and ends


def made(seed):
    torch.manual_seed(seed)
    model = zf.shard_params(Tower(), axis())
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def trained(model, optimizer, step):
    """The same batch on every rank."""
    model(noise(4, WIDTH, seed=step)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def sums(model):
    with zf.unsharded(model):
        return [parameter.detach().double().sum().item() for parameter in model.parameters()]


def _copied(folder, steps, every=1):
    """Trains, with a copy of each step; what the model was after each, and where the copies are."""
    (model, optimizer), found = made(0), {}
    copying = memory_copies(folder, model, optimizer, every=every)
    for step in range(1, steps + 1):
        trained(model, optimizer, step)
        copying.update(extra={"step": step})
        found[step] = sums(model)
    wait_for_saving()
    return found, str(copying.path)


def _resumed(folder):
    model, optimizer = made(7)
    said = zf.resume(folder, model, optimizer)
    return None if said is None else (said["step"], sums(model))


def copies(path):
    return sorted(each for each in Path(path).iterdir() if each.is_dir())


# -- which state is resumed --------------------------------------------------------------------------------------------


def test_a_folder_that_holds_something_else_is_not_nothing(tmp_path):
    """A run that begins anew beside it would not be what is meant."""
    model = nn.Linear(2, 2)
    assert zf.resume(tmp_path / "never made", model) is None
    assert not (tmp_path / "never made").exists()
    zf.save(tmp_path / "step-1", model)
    (tmp_path / ".step-2.saving").mkdir()
    assert zf.resume(tmp_path, nn.Linear(2, 2)) == {}
    (tmp_path / "step-1" / "rank-00000.json").unlink()
    with pytest.raises(zf.ZeroError, match="rank-00000"):
        zf.resume(tmp_path, model)
    shutil.rmtree(tmp_path / "step-1")
    assert zf.resume(tmp_path, model) is None
    dcp.save({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, checkpoint_id=tmp_path / "of_torch")
    zf.resume(tmp_path / "of_torch", model)
    assert torch.equal(model.weight, torch.ones(2, 2))


@pytest.mark.parametrize(("before", "after"), [(2, 2), (4, 2), (2, 4), (2, 1), (1, 3)])
def test_a_copy_is_resumed_on_any_number_of_ranks(ranks, tmp_path, before, after):
    found, path = ranks(before).run(_copied, str(tmp_path), 3)[0]
    assert len(copies(path)) == 1, "one copy stays"
    assert ranks(after).run(_resumed, str(tmp_path)) == [(3, found[3])] * after


def test_the_newest_of_memory_and_disk_is_resumed(ranks, tmp_path):
    def run(folder):
        model, optimizer = made(0)
        copying = memory_copies(folder, model, optimizer, every=1)
        expected, got = [], []
        for step, how in enumerate(["memory", "disk", "memory", "both", "disk"], 1):
            trained(model, optimizer, step)
            if how != "disk":
                copying.update(extra={"step": step})
            if how != "memory":
                zf.save(f"{folder}/step-{step}", model, optimizer, extra={"step": step})
            expected.append((step, sums(model)))
            got.append(_resumed(folder))
        return expected, got

    for expected, got in ranks(2).run(run, str(tmp_path)):
        assert got == expected


def test_a_folder_that_was_copied_is_another_run(ranks, tmp_path):
    """It must not go on from the memory of the first one, which has gone on."""

    def saved(folder):
        model, optimizer = made(0)
        zf.save(f"{folder}/step-0", model, optimizer, extra={"step": 0})
        return sums(model)

    (expected,) = ranks(1).run(saved, str(tmp_path / "a"))
    ((_, path),) = ranks(1).run(_copied, str(tmp_path / "a"), 3)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert ranks(1).run(_resumed, str(tmp_path / "b")) == [(0, expected)]
    ((_, other),) = ranks(1).run(_copied, str(tmp_path / "b"), 1)
    assert other != path
    assert ranks(1).run(_resumed, str(tmp_path / "a"))[0][0] == 3
    (tmp_path / "a").rename(tmp_path / "c")
    assert ranks(1).run(_resumed, str(tmp_path / "c"))[0][0] == 3


# -- complete, or not used -------------------------------------------------------------------------------------------


def _torn(kind, copy):
    part, tensors = copy / "rank-00001.json", next(copy.glob("model/00001-*"))
    if kind == "a part is missing":
        part.unlink()
    elif kind == "a part is torn":
        part.write_bytes(part.read_bytes()[:-9])
    elif kind == "a file is missing":
        tensors.unlink()
    elif kind == "a file is torn":
        os.truncate(tensors, tensors.stat().st_size - 4)
    else:
        with tensors.open("r+b") as file:
            file.seek(-4, os.SEEK_END)
            byte = file.read(1)
            file.seek(-4, os.SEEK_END)
            file.write(bytes([byte[0] ^ 1]))


TORN = ["a part is missing", "a part is torn", "a file is missing", "a file is torn", "a bit is wrong"]


@pytest.mark.parametrize("kind", TORN)
@on_ranks(2)
def test_a_copy_that_is_not_complete_is_not_used(kind, folder):
    """What was saved before it is; and nothing begins anew in silence: a damaged copy alone is an error on every rank."""
    model, optimizer = made(0)
    trained(model, optimizer, 1)
    zf.save(f"{folder}/step-1", model, optimizer, extra={"step": 1})
    is_first = not dist.get_rank()
    for is_saved in (True, False):
        found, path = _copied(folder, 3)
        dist.barrier()
        if is_first:
            _torn(kind, *copies(path))
            is_saved or shutil.rmtree(f"{folder}/step-1")
        dist.barrier()
        if is_saved:
            with pytest.warns(RuntimeWarning) if is_first and kind != "a part is missing" else contextlib.nullcontext():
                assert _resumed(folder) == (1, found[1])
        elif kind == "a part is missing":
            assert _resumed(folder) is None, "it was never complete"
        else:
            with pytest.raises((zf.errors.CheckpointError, zf.errors.StorageError)):
                _resumed(folder)


def test_ranks_that_are_killed_at_any_moment_leave_a_whole_copy(ranks, tmp_path):
    """All at once, while they make one copy after another: the last that was begun, or the one before it."""

    def endless(folder, seconds):
        model, optimizer = made(0)
        said = zf.resume(folder, model, optimizer)
        copying, first = memory_copies(folder, model, optimizer, every=1), said["step"] if said else 0
        for step in itertools.count(first + 1):
            trained(model, optimizer, step)
            copying.update(extra={"step": step})
            if step == first + 3:
                threading.Timer(seconds, os.kill, [os.getpid(), signal.SIGKILL]).start()
            Path(f"{folder}/done-{dist.get_rank()}").write_text(str(step))  # the copy is complete

    folder, found = tmp_path / "runs", dict[int, list[float]]()
    for number in range(6):
        fresh = Ranks()
        try:
            with pytest.raises(zf.errors.StateError, match="SIGKILL"):
                fresh(2).run(endless, str(folder), 0.01 + 0.03 * number)
        finally:
            fresh.close()
        written = [int(path.read_text() or 0) for path in folder.glob("done-*")]
        step, values = ranks(2).run(_resumed, str(folder))[0]
        assert step >= max([0, *found, *written])
        found[step] = values
    assert len(found) > 3
    undisturbed, _ = ranks(2).run(_copied, str(tmp_path / "alone"), max(found), 10**9)[0]
    assert found == {step: undisturbed[step] for step in found}


def test_a_rank_that_loses_another_while_they_agree_leaves_the_copy(ranks, tmp_path):
    """The other may have heard that all have written, and have removed the copy before."""

    def run(folder):
        model, optimizer = made(0)
        copying = memory_copies(folder, model, optimizer, every=1)
        trained(model, optimizer, 1)
        real, calls = RankMeeting.agree, []

        def agree(self, *args, **options):
            found = real(self, *args, **options)
            calls.append(found)
            if len(calls) == 2 and dist.get_rank():  # begin, end
                raise zf.errors.LostRankError("Rank 0 has ended.", fix="start all again")
            return found

        lost = pytest.raises(zf.errors.LostRankError) if dist.get_rank() else contextlib.nullcontext()
        with mock.patch.object(RankMeeting, "agree", agree), lost:
            copying.update(extra={"step": 1})
        dist.barrier()
        return _resumed(folder), sums(model)

    for found, expected in ranks(2).run(run, str(tmp_path)):
        assert found == (1, expected)


def test_a_full_memory_is_an_error_on_every_rank_and_the_last_copy_stays(ranks, tmp_path):
    def run(folder):
        found, path = _copied(folder, 2)
        model, optimizer = made(0)
        copying = memory_copies(folder, model, optimizer, every=1)
        real = os.pwrite
        fails = OSError(28, "No space left on device")
        full = mock.patch("os.pwrite", side_effect=fails if dist.get_rank() else real)
        with full, pytest.raises(zf.errors.StorageError, match=r"No space left|failed on rank 1"):
            copying.update(extra={"step": 9})
        dist.barrier()
        assert len(copies(path)) == 1, "what is not complete takes room"
        assert _resumed(folder) == (2, found[2])
        return path

    (path, _) = ranks(2).run(run, str(tmp_path))
    assert len(copies(path)) == 1


# -- how often ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 3])
@on_ranks(2)
def test_a_copy_every_so_many_steps_has_the_bytes_that_were_planned(every, folder):
    for stage, place in STAGES.items():
        model = place(nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)), axis())
        optimizer = torch.optim.Adam(model.parameters())
        planned = zf.plan(model, optimizer, memory_copies=True)
        assert "memory copies" in str(planned) and "memory copies" not in str(zf.plan(model, optimizer))
        assert zf.plan(model, memory_copies=True).memory_copies_nbytes == planned.memory_copies_nbytes
        model(torch.randn(2, 256)).sum().backward()
        optimizer.step()
        copying = memory_copies(f"{folder}/{stage}", model, optimizer, every=every)
        assert [copying.update() for _ in range(5)] == [number % every == 0 for number in range(5)]
        assert planned.memory_copies_nbytes == pytest.approx(copying.nbytes, rel=0.01), stage
        copying.close()


# -- one writer of a folder ----------------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_second_set_of_copies_of_a_folder_is_refused_on_every_rank_until_the_first_is_gone(folder):
    """The copies of two models would be taken for copies of one."""
    model, other = made(0)[0], made(1)[0]
    first = [memory_copies(folder, model, every=1)]
    for _ in range(2):
        with pytest.raises(zf.errors.StateError):
            memory_copies(folder, other, every=1)
        if dist.get_rank() == 1:
            first.clear()  # gone on one rank only: it hears that it is there on another
    dist.barrier()
    first.clear()
    for each in (other, model):
        copying = memory_copies(folder, each, every=1)
        copying.update(extra={"step": 1})
        copying.close()


def test_a_run_beside_it_in_the_same_folder_is_refused_and_one_after_it_is_not(tmp_path):
    copies = f"zf.checkpoint.memory_copies({str(tmp_path)!r}, nn.Linear(2, 2), every=1)"
    code = f"import zero_fn as zf; from torch import nn; m = {copies}; "
    other = started(code + "import os; os.fork() or os.setsid(); print(1, flush=True); import time; time.sleep(60)")
    other.stdout.readline()
    with refused("memory_copies_of_two_models"):
        memory_copies(tmp_path, nn.Linear(2, 2), every=1)
    other.kill()  # the child that it has forked goes on
    other.wait()
    memory_copies(tmp_path, nn.Linear(2, 2), every=1).close()


def _of_another_user():
    path = SharedFolder.path_of("mistake")
    path.symlink_to("/tmp")
    try:
        SharedFolder("mistake")
    finally:
        path.unlink()


test_refusals = refusals({"memory_copies_of_another_user": _of_another_user})


@pytest.mark.parametrize("then", ["memory_copies", "save_states", "profile"])
def test_whatever_ranks_do_beside_a_save_in_the_background_it_is_complete(ranks, tmp_path, then):
    """Both send messages that differ in their order only."""

    def run(folder):
        model, optimizer = made(0)
        real = RankFiles.write_rest

        def late(files):
            time.sleep(0.5 * dist.get_rank())  # so that ranks do the rest in another order
            real(files)

        profile = zf.profile(model, optimizer) if then == "profile" else contextlib.nullcontext()
        with mock.patch.object(RankFiles, "write_rest", late):
            with profile:
                trained(model, optimizer, 1)
                zf.save(f"{folder}/step-1", model, optimizer, background=True)
            if then == "memory_copies":
                memory_copies(folder, model, optimizer, every=1).close()
            elif then == "save_states":
                save_states(Path(folder) / "states", [model], [])
            wait_for_saving()
        return sorted(each.path.name for each in zf.checkpoints(folder))

    assert ranks(2).run(run, str(tmp_path)) == [["step-1"]] * 2


# -- whose it is -------------------------------------------------------------------------------------------------------


def _as_another_user(act):
    """What came of it."""
    ours, theirs = os.pipe()
    if not (pid := os.fork()):
        try:
            os.setresuid(65534, 65534, 65534)
            act()
            os.write(theirs, b"done")
        except BaseException as error:
            os.write(theirs, type(error).__name__.encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(theirs)
    with os.fdopen(ours) as file:
        return file.read()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may act as another user")
def test_another_user_can_neither_read_it_nor_make_it():
    folder = SharedFolder(OWN + "a0")
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    (folder.path / "secret").write_text("of the first user")
    assert _as_another_user(lambda: print((folder.path / "secret").read_text())) == "PermissionError"
    folder.close()
    assert _as_another_user(lambda: SharedFolder.path_of(OWN + "a1").mkdir(0o777)) == "done"
    with pytest.raises(zf.errors.StateError):
        SharedFolder(OWN + "a1")
    SharedFolder.path_of(OWN + "a1").rmdir()
    open_to_all = SharedFolder(OWN + "a3")
    open_to_all.path.chmod(0o755)
    with pytest.raises(zf.errors.StateError):
        SharedFolder(OWN + "a3")
    open_to_all.close()


# -- until when it is there --------------------------------------------------------------------------------------------

USES = "from zero_fn.local.shared_folder import SharedFolder; import time; f = SharedFolder('{}'); "


def started(code, under=""):
    """A process that uses a folder; with `under`, a launcher is between."""
    command = [sys.executable, "-c", code]
    if under:
        command = ["bash", "-c", f'"$0" "$@" & echo $!; {under}', *command]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def until(is_so, seconds=10.0):
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.02)


def keepers(word):
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes()
        except OSError:
            continue
        if b"folder_keeper.py" in text and word.encode() in text:
            found.append(int(path.parent.name))
    return found


def test_it_outlives_its_processes_and_not_their_launcher():
    path = SharedFolder.path_of(OWN + "b0")
    launcher = started(USES.format(OWN + "b0") + "time.sleep(60)", under="sleep 60")
    child = int(launcher.stdout.readline())
    until(lambda: len(keepers(OWN + "b0")) == 1)
    os.kill(child, signal.SIGKILL)
    time.sleep(1.2)  # its keeper looks twice a second
    assert path.exists(), "the next processes of the launcher need it"
    launcher.kill()
    launcher.wait()
    until(lambda: not path.exists() and not keepers(OWN + "b0"))


def test_it_is_gone_once_all_have_closed_it():
    first, second = SharedFolder(OWN + "b1"), SharedFolder(OWN + "b1")
    first.close()
    time.sleep(1.2)  # as long
    assert second.path.exists()
    second.close()
    until(lambda: not second.path.exists() and not keepers(OWN + "b1"))


def test_it_is_gone_if_nobody_has_used_it_for_long():
    """Though the launcher lives, as a shell does."""
    with mock.patch.object(shared_folder, "_start_keeper"):
        folder = SharedFolder(OWN + "b2")
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds
        if now[0] == 2.5:
            folder.leave()

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    with mock.patch.multiple(folder_keeper, IDLE_S=2.0, time=clock), mock.patch("signal.signal"):
        folder_keeper.keep(str(folder.path))
    assert now == [4.5], "it was seen in use at 2.0"
    assert not folder.path.exists()


def test_the_next_start_removes_what_a_killed_keeper_has_left():
    process = started(USES.format(OWN + "b3") + "time.sleep(60)")
    found = []
    until(lambda: found.extend(keepers(OWN + "b3")) or found)
    os.kill(found[0], signal.SIGKILL)
    SharedFolder(OWN + "b4").close()
    assert SharedFolder.path_of(OWN + "b3").exists(), "a process uses it"
    process.kill()
    process.wait()
    time.sleep(0.6)  # for whoever might remove it
    assert SharedFolder.path_of(OWN + "b3").exists(), "nobody has come yet"
    SharedFolder(OWN + "b4").close()
    assert not SharedFolder.path_of(OWN + "b3").exists()


@pytest.mark.parametrize("is_keeper", [True, False])
def test_a_process_that_comes_while_it_is_removed_keeps_what_it_makes(is_keeper):
    """Each start removes what others have left: ranks that start together would remove one another's."""
    word, came, real = OWN + "b6", list[SharedFolder](), shutil.rmtree

    def removed(*args, **options):
        with mock.patch("shutil.rmtree", real):  # the one that comes removes folders, too
            came.extend([SharedFolder(word)] if not came else [])
        real(*args, **options)

    with mock.patch.object(shared_folder, "_start_keeper"):
        SharedFolder(word).leave()
        with mock.patch("shutil.rmtree", removed):
            assert folder_keeper.remove(str(SharedFolder.path_of(word)), is_keeper=is_keeper)
        assert (came[0].path / "users").exists()
        came[0].close()
        assert folder_keeper.remove(str(came[0].path), is_keeper=is_keeper)
    assert not [*shared_folder.ROOT.glob(f"*{word}*")]


def test_processes_that_come_while_it_is_removed_get_a_whole_one():
    """Of threads that make, use and close it one has it alone, or all have the same one."""
    failures = []

    def use():
        try:
            for _ in range(40):
                folder = SharedFolder(OWN + "b5")
                (folder.path / "users").stat()
                folder.close()
                folder_keeper.remove(str(folder.path), is_keeper=True)
        except BaseException as error:
            failures.append(error)

    with mock.patch.object(shared_folder, "_start_keeper"):
        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []
