"""Work on the host takes a rank's share of the cores where a launcher has left it one thread, and no user has."""

import os
import subprocess
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import zero_fn as zf
from tests.units.kernels.drawn import needs_kernels
from tests.units.kernels.drawn import threads as chosen
from zero_fn.errors import _said
from zero_fn.kernels import adam, library, threads
from zero_fn.kernels.adam import AdamPiece, AdamRates, in_c, rounding
from zero_fn.kernels.threads import more_threads, share, threads_for
from zero_fn.tiers.tier_tensor import _norm

TORCHRUN = {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "run", "LOCAL_WORLD_SIZE": "8"}


@pytest.fixture(autouse=True)
def asked_anew():
    share.cache_clear()
    yield
    share.cache_clear()


@contextmanager
def launcher(environ):
    """A process that began with this environment."""
    ends = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", "input(1)"], env=environ, **ends)
    assert process.stdout is not None
    try:
        process.stdout.read(1)  # before it has begun its environment cannot be read
        yield process.pid
    finally:
        process.communicate(b"\n")


@pytest.fixture
def torchrun(monkeypatch):
    """This process is one of eight ranks of torchrun on 64 cores."""
    with launcher({"PATH": os.environ["PATH"]}) as pid:
        monkeypatch.setattr(os, "getppid", lambda: pid)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
        monkeypatch.setattr(threads, "_LIMIT", Path("/no/such"))
        for name, value in TORCHRUN.items():
            monkeypatch.setenv(name, value)
        yield


def shared(monkeypatch, own, launchers):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(launchers if pid else own)))
    share.cache_clear()
    return share()


@pytest.mark.usefixtures("torchrun")
def test_a_rank_of_torchrun_has_its_share_of_the_cores(monkeypatch, tmp_path):
    """Of those that torchrun may use, at most those that the rank is bound to, and at least one."""
    assert shared(monkeypatch, own=64, launchers=64) == 8
    assert shared(monkeypatch, own=32, launchers=64) == 8  # bound to one of two NUMA nodes, with three others
    assert shared(monkeypatch, own=8, launchers=64) == 8  # bound to cores of its own
    assert shared(monkeypatch, own=4, launchers=64) == 4
    assert shared(monkeypatch, own=4, launchers=4) == 1  # more ranks than cores
    monkeypatch.setattr(threads, "_LIMIT", tmp_path / "cpu.max")
    for limit, expected in (("1600000 100000\n", 2), ("50000 100000\n", 1), ("max 100000\n", 8)):
        (tmp_path / "cpu.max").write_text(limit)
        assert shared(monkeypatch, own=64, launchers=64) == expected


@pytest.mark.usefixtures("torchrun")
@pytest.mark.parametrize(
    "changed", [{"OMP_NUM_THREADS": "2"}, {"OMP_NUM_THREADS": None}, {"TORCHELASTIC_RUN_ID": None}], ids=str
)
def test_without_the_default_of_torchrun_threads_are_those_of_torch(changed, monkeypatch):
    assert share() == 8
    for name, value in changed.items():
        monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    share.cache_clear()
    assert share() == 1


@pytest.mark.usefixtures("torchrun")
def test_a_number_that_the_user_has_chosen_is_kept(monkeypatch):
    assert (threads_for(1 << 24), threads_for(1 << 18), threads_for(1 << 16)) == (8, 2, 1)
    with chosen(3):
        assert (threads_for(1 << 24), threads_for(1 << 16)) == (3, 1)
        with more_threads(1 << 24):
            assert torch.get_num_threads() == 3
    with launcher({"OMP_NUM_THREADS": "1"}) as pid:  # OMP_NUM_THREADS=1 torchrun ...
        monkeypatch.setattr(os, "getppid", lambda: pid)
        share.cache_clear()
        assert threads_for(1 << 24) == 1
    monkeypatch.setattr(os, "getppid", lambda: 1 << 30)  # nobody says
    share.cache_clear()
    assert share() == 1


@pytest.mark.nightly
def test_torchrun_sets_one_thread_as_is_assumed(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(
        "import os\n"
        "from zero_fn.kernels.threads import share\n"
        "os.sched_getaffinity = lambda pid: set(range(16))\n"
        "print(f'<{share()} of {os.cpu_count()}>', flush=True)\n"
    )
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environ["PYTHONPATH"] = str(Path(zf.__file__).parents[1])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    found = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout.count("<8 of ") == 2, found.stderr


@pytest.mark.usefixtures("torchrun")
@needs_kernels
def test_a_step_by_its_share_has_the_bits_of_one_thread(monkeypatch):
    rates = AdamRates(1e-2, 0.9, 0.999, 1e-8, 0.1, is_decoupled=True, amsgrad=False, maximize=False)
    how = rounding(rates)
    assert how is not None
    generator = torch.Generator().manual_seed(0)
    begin = torch.rand(4, (1 << 20) + 13, generator=generator)
    taken = []
    monkeypatch.setattr(adam, "threads_for", lambda numel: taken.append(threads_for(numel)) or taken[-1])

    def stepped(count):
        rows = begin.clone()
        in_c([AdamPiece(rows[0], rows[1], rows[2], rows[3], None, 1)], rates, how, count)
        return rows

    assert torch.equal(stepped(None), stepped(1))
    assert taken == [8]


@pytest.mark.usefixtures("torchrun")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_and_scaling_by_more_threads_have_the_bits_of_one(dtype):
    values = torch.randn((1 << 21) + 77, generator=torch.Generator().manual_seed(0)).to(dtype)
    factor, norm = torch.tensor(0.3141), torch.ops.aten.linalg_vector_norm.default
    named = {"dtype": torch.float32} if dtype != torch.float32 else {}
    one = _norm(norm, values, 2, **named), values * factor
    with more_threads(values.numel()):
        assert torch.get_num_threads() == 8
        several = _norm(norm, values, 2, **named), values * factor
    assert torch.get_num_threads() == 1
    assert all(map(torch.equal, one, several))


@pytest.mark.usefixtures("torchrun")
def test_a_large_step_of_torch_by_one_thread_says_what_to_write(monkeypatch):
    monkeypatch.setattr(sys.modules["zero_fn.streamed.fused_adam"], "_LARGE_NBYTES", 8192)

    def said(kind, numel, **options):
        _said.clear()
        parameter = torch.nn.Parameter(torch.zeros(numel))
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            zf.streamed(kind([parameter], lr=0.1, **options), zf.cpu())
        return [str(each.message) for each in found if "one thread" in str(each.message)]

    (message,) = said(torch.optim.SGD, 4000, momentum=0.9)
    assert "a rank could have 8" in message and "OMP_NUM_THREADS=8 torchrun" in message
    assert said(torch.optim.SGD, 100, momentum=0.9) == []
    assert bool(said(torch.optim.AdamW, 4000, fused=True)) == (library().functions is None)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert said(torch.optim.SGD, 4000, momentum=0.9) == []
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    share.cache_clear()
    assert said(torch.optim.SGD, 4000, momentum=0.9) == []
