"""launch: values in order, errors of their own type, and nobody left behind."""

import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.support.messages import refusals
from zero_fn.errors import LayoutError, LostRankError, StateError
from zero_fn.launch import launch
from zero_fn.local.first_failure import RankDied, RankHung
from zero_fn.local.launcher import LocalRanks
from zero_fn.local.pickling import SendError, dumps

ROOT = Path(__file__).parents[3]


class Broken(ValueError):
    """An exception that only this file knows."""


def train(lr): ...


def test_values_come_in_the_order_of_ranks_and_closures_work():
    offset = torch.tensor(10.0)

    def total(scale, *, power):
        x = scale * (dist.get_rank() + 1) ** power + offset
        dist.all_reduce(x)
        return dist.get_rank(), x.item()

    assert launch(total, 2, 2.0, kwargs={"power": 2}) == [(0, 30.0), (1, 30.0)]


def test_a_rank_knows_its_place_and_its_environment(monkeypatch):
    monkeypatch.setenv("INHERITED", "here")
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "INHERITED", "ADDED", "OMP_NUM_THREADS")

    def environment():
        return [os.environ.get(name) for name in names], torch.get_num_threads(), os.getcwd(), dist.get_backend()

    first, second = launch(environment, 2, backend="gloo", threads=2, env={"ADDED": "there"})
    assert first == (["0", "0", "2", "2", "here", "there", "2"], 2, os.getcwd(), "gloo")
    assert second[0][:2] == ["1", "1"]


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
@pytest.mark.parametrize("interfaces", ["", pytest.param("lo", marks=pytest.mark.nightly)])
def test_a_group_of_gloo_has_one_thread_for_its_collectives_and_shares_one_that_polls(monkeypatch, interfaces):
    """torch gives it two, which may free the same memory, and one that polls. [Note: two threads and one name]"""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interfaces)

    def run():
        mine = dist.new_group([0, 1], timeout=timedelta(seconds=7))
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        groups = [dist.group.WORLD, mine, mesh["dp"].get_group()]
        for group in groups:
            dist.all_reduce(torch.ones(1), group=group)  # its thread is there, and has its name
        return (
            _threads("pt_gloo_runloop"),
            _threads("gloo_tcp_loop"),
            mine._get_backend(torch.device("cpu")).options._timeout,
        )

    assert launch(run, 2) == 2 * [(3, 1, timedelta(seconds=7))]


def _threads(name):
    return [file.read_text() for file in Path("/proc/self/task").glob("*/comm")].count(f"{name}\n")


def test_what_rank_0_prints_appears_as_it_comes(capsys):
    def chatter():
        print(f"\rstep ü of rank {dist.get_rank()}", end="")
        print("a warning", file=sys.stderr)

    launch(chatter, 2)
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("\rstep ü of rank 0", "a warning\n")


def test_ranks_that_cannot_join_say_why():
    with pytest.raises(RuntimeError, match="nowhere"):
        launch(dist.get_rank, 2, env={"GLOO_SOCKET_IFNAME": "nowhere"})


def test_a_timeout_says_where_ranks_were_and_leaves_none(tmp_path):
    def hang():
        (tmp_path / f"{dist.get_rank()}").write_text(str(os.getpid()))
        dist.barrier()
        while dist.get_rank() == 1:
            time.sleep(0.1)

    with pytest.raises(RankHung, match=r"1 of 2 ranks did not return within 1\.5 s") as caught:
        launch(hang, 2, timeout_s=1.5)
    assert caught.value.facts["late"] == "rank 1"
    assert re.search(r'test_launch.py", line \d+ in hang', "\n".join(caught.value.__notes__))
    assert not any(is_running(int((tmp_path / f"{rank}").read_text())) for rank in range(2))


def test_threads_of_a_rank_finish_their_work(tmp_path):
    def save_later():
        path = tmp_path / f"{dist.get_rank()}"
        threading.Timer(0.3, path.write_text, ["saved"]).start()

    launch(save_later, 2)
    assert [(tmp_path / f"{rank}").read_text() for rank in range(2)] == ["saved", "saved"]


def test_a_rank_may_have_processes_of_its_own():
    def load():
        batches = torch.utils.data.DataLoader(list(range(4)), batch_size=2, num_workers=1)
        return [int(batch.sum()) for batch in batches], multiprocessing.get_start_method()

    assert launch(load, 1) == [([1, 5], multiprocessing.get_start_method())]


def test_launch_on_a_rank_or_under_torchrun_is_refused(monkeypatch):
    with pytest.raises(StateError, match="launch was called on a rank"):
        launch(lambda: launch(dist.get_rank, 2), 1)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with pytest.raises(StateError, match="torchrun"):
        launch(dist.get_rank, 2)


def test_results_that_cannot_be_sent_are_refused_with_advice_and_exceptions_quoted():
    def mesh():
        return dist.device_mesh.init_device_mesh("cpu", (1,))

    with pytest.raises(SendError, match="belongs to its ranks"):
        launch(mesh, 1)
    with pytest.raises(SendError, match="What a rank returned cannot be sent"):
        launch(threading.Lock, 1)

    def fail():
        raise Broken(threading.Lock())

    with pytest.raises(SendError, match="What a rank raised cannot be sent") as caught:
        launch(fail, 1)
    assert str(caught.value.facts["raised"]).startswith("Broken: <unlocked _thread.lock")
    assert "raise Broken(threading.Lock())" in str(caught.value.__cause__)


def test_a_function_of_a_script_may_use_operations_by_name():
    """cloudpickle sends `torch.ops` along where a function says `torch` and `ops`."""
    script = {"torch": torch, "__name__": "__main__"}
    exec("def ones(): return torch.ops.aten.ones.default([2]).sum().item()", script)
    assert pickle.loads(dumps(script["ones"]))() == 2


def test_a_function_of_a_script_may_use_compiled_classes():
    """They say that they are of `builtins`, and cloudpickle sends them by value, which no rank can build."""
    safetensors = pytest.importorskip("safetensors")
    script = {"safe_open": safetensors.safe_open, "__name__": "__main__"}
    exec("def opener(): return safe_open", script)
    assert pickle.loads(dumps(script["opener"]))() is safetensors.safe_open
    for cls in (int, type(None), type(lambda: None)):
        assert pickle.loads(dumps(cls)) is cls
    with pytest.raises(SendError, match="the class 'callable_iterator' is compiled, and no module has it"):
        dumps(type(iter(int, 1)))


def test_functions_that_are_sent_know_their_file():
    """cloudpickle 3.1.3 sends code as `<dynamic-code>`: tracebacks of ranks would show no lines, and stacks no files."""

    def outer():
        return lambda: None

    sent = pickle.loads(dumps(outer))
    for code in (sent.__code__, sent().__code__):
        assert code.co_filename == __file__
    assert sent.__code__.co_firstlineno == outer.__code__.co_firstlineno


def end(how):
    """Ends this rank: by a signal, an exception or a status; not at all if it is empty."""
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "lose":
        raise LostRankError("Rank 0 does not answer.", fix="look there")
    if how == "raise":
        raise Broken("no luck")
    if how:
        sys.exit(int(how))


def end_in_starts(folder, ends):
    """In the n-th start rank 1 ends as `ends` says."""
    rank, start = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    (folder / f"{start}.{rank}").write_text(str(os.getpid()))
    if rank == 1:
        end(ends.get(start, ""))
    dist.barrier()
    return start


def test_ranks_that_are_lost_are_started_again_and_leave_nothing(tmp_path, capsys, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    assert launch(end_in_starts, 2, tmp_path, {0: "kill", 1: "lose", 2: "3"}, backend="gloo", restarts=3) == [3, 3]
    assert capsys.readouterr().err.splitlines() == [
        "zero_fn: Rank 1 of 2 was killed by SIGKILL before it returned. Restart 1 of 3.",
        "zero_fn: Rank 0 does not answer. Restart 2 of 3.",
        "zero_fn: Rank 1 of 2 exited with code 3 before it returned. Restart 3 of 3.",
    ]
    pids = {int(path.read_text()) for path in tmp_path.glob("?.?")}
    assert len(pids) == 8
    assert not any(map(is_running, pids))
    assert os.listdir(temporary) == []


@pytest.mark.parametrize(
    ("how", "kind", "starts"),
    [
        ("kill", RankDied, 3),
        ("raise", Broken, 1),
        pytest.param("75", RankDied, 1, marks=pytest.mark.nightly),
        pytest.param("0", RankDied, 1, marks=pytest.mark.nightly),
    ],
)
def test_only_what_another_start_may_heal_starts_ranks_again_and_not_for_ever(tmp_path, how, kind, starts):
    def run():
        if dist.get_rank() == 1:
            (tmp_path / os.environ["TORCHELASTIC_RESTART_COUNT"]).touch()
            end(how)
        dist.barrier()

    with pytest.raises(kind, match=r"no luck|Rank 1 of 2"):
        launch(run, 2, backend="gloo", restarts=2)
    assert sorted(os.listdir(tmp_path)) == ["0", "1", "2"][:starts]


def test_a_rank_that_is_killed_while_it_starts_is_one_that_was_lost(monkeypatch):
    pids = []
    start = LocalRanks._start

    def start_and_kill(ranks):
        start(ranks)
        pids.extend(peer.pid for peer in ranks._peers)
        if len(pids) == 2:
            os.kill(pids[1], signal.SIGKILL)

    monkeypatch.setattr(LocalRanks, "_start", start_and_kill)
    assert launch(dist.get_rank, 2, backend="gloo", restarts=1) == [0, 1]
    assert len(pids) == 4
    assert not any(map(is_running, pids[:2]))


@pytest.mark.nightly
def test_the_time_is_for_all_starts_together():
    def run():
        time.sleep(1.5)
        end("kill" if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else "")

    with pytest.raises(RankHung, match="did not return within 2 s"):
        launch(run, 1, backend="gloo", timeout_s=2, restarts=1)


WRONG = [
    (TypeError, "a function, not what it returned", (None, 2), {}),
    (TypeError, "whole number of ranks", (train, 2.0), {}),
    (TypeError, "missing a required argument: 'lr'", (train, 2), {}),
    (SendError, "The function or an argument cannot be sent", (train, 2, threading.Lock()), {}),
    (LayoutError, "needs a GPU for each rank", (train, 4096, 1.0), {"backend": "nccl"}),
]


@pytest.mark.parametrize(("kind", "message", "arguments", "options"), WRONG)
def test_bad_arguments_are_refused_before_anything_starts(kind, message, arguments, options):
    with pytest.raises(kind, match=message):
        launch(*arguments, **options)


test_refusals = refusals(
    {
        "launch_no_rank": lambda: launch(print, 0),
        "launch_no_thread": lambda: launch(print, 2, threads=0),
        "launch_no_time": lambda: launch(print, 2, timeout_s=0),
        "launch_again_less_than_never": lambda: launch(print, 2, restarts=-1),
        "launch_says_which_rank_is_which": lambda: launch(print, 2, env={"RANK": "0"}),
    }
)


SCRIPT = """
import os, signal, sys, time
print("script executed", flush=True)
from zero_fn.launch import launch

class Result:                                   # of __main__, as in a notebook
    def __init__(self, value): self.value = value

def rank():
    import torch.distributed as dist
    print("rank 0 here")
    return Result(dist.get_rank())

values = launch(rank, 2)
print([type(value) is Result for value in values], [value.value for value in values], flush=True)

def wait():
    print("pid", os.getpid())
    time.sleep(60)

launch(wait, 2)
"""


@pytest.mark.nightly
def test_a_script_is_executed_once_and_its_ranks_die_with_it(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    # Both at once, because a start costs seconds: one will be interrupted, one killed.
    scripts = {number: start(script) for number in (signal.SIGINT, signal.SIGKILL)}
    for number, process in scripts.items():
        with process:
            assert process.stdout is not None
            lines = [process.stdout.readline().strip() for _ in range(4)]
            assert lines[:3] == ["script executed", "rank 0 here", "[True, True] [0, 1]"]
            pid = int(lines[3].removeprefix("pid "))
            assert is_running(pid)
            process.send_signal(number)
            process.wait(10)
        assert is_gone_within(10, pid), f"rank 0 survived {number.name} of its script"


def start(script):
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    # Background jobs of a shell ignore SIGINT, and so would what they start.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    command = [sys.executable, str(script)]
    return subprocess.Popen(command, stdout=pipe, stderr=null, text=True, env=environ, preexec_fn=heed)


def is_gone_within(seconds, pid):
    end_s = time.monotonic() + seconds
    while is_running(pid) and time.monotonic() < end_s:
        time.sleep(0.05)
    return not is_running(pid)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the second: gone while it was read
        return False
