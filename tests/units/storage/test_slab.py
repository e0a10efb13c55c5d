"""Host memory of exact size: what it takes, what it refuses, and what bounds it."""

import re
import resource
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.messages import refused
from tests.units.storage.disks import limited
from zero_fn.errors import TierError
from zero_fn.storage.host_memory import PAGE_NBYTES, Available, Slab, _cgroups
from zero_fn.storage.tier_storage import storage_on
from zero_fn.values.tiers import cpu, nvme

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what became of memory and files")


def resident_nbytes():
    match = re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


def is_mapped(address):
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)


def test_a_slab_is_whole_pages_and_no_more():
    slab = Slab(3 * PAGE_NBYTES + 1, cpu(), "states")
    assert slab.nbytes == slab.memory.numel() == 4 * PAGE_NBYTES
    assert slab.memory.data_ptr() % PAGE_NBYTES == 0
    assert not slab.memory.any()


def test_a_slab_takes_as_much_memory_as_it_says_and_gives_it_back():
    before = resident_nbytes()
    slab = Slab(64 << 20, cpu(), "states")
    slab.memory.fill_(1)
    assert abs(resident_nbytes() - before - slab.nbytes) < 8 << 20
    del slab
    assert resident_nbytes() - before < 8 << 20


def test_views_of_every_dtype_keep_the_memory_of_a_slab():
    slab = Slab(PAGE_NBYTES, cpu(), "states")
    views = [slab.memory[:64].view(dtype) for dtype in (torch.bfloat16, torch.float32, torch.complex64, torch.int8)]
    del slab
    views[1].fill_(1.5)
    assert torch.equal(views[2], torch.full((8,), 1.5 + 1.5j))


@pytest.mark.parametrize("name", ["tier_of_host_memory_is_too_small", "tier_on_disk_is_too_small"])
def test_the_limit_of_a_tier_is_for_all_that_was_reserved_there(tmp_path, name):
    """It was counted for each time anew: 16 KiB were taken of 8."""
    shelf = storage_on(nvme(tmp_path, limit="8KiB") if "disk" in name else cpu(limit="8KiB"), "states")
    assert shelf.reserve([1]) == [0]
    with refused(name):
        shelf.reserve([PAGE_NBYTES, 1])
    assert shelf.reserve([1]) == [PAGE_NBYTES]
    with pytest.raises(TierError):
        shelf.reserve([1])
    assert shelf.nbytes == 2 * PAGE_NBYTES


def test_a_slab_larger_than_the_machine_is_refused_before_it_is_made():
    with pytest.raises(TierError, match=r"memory of the machine|cgroup|address space"):
        Slab(1 << 50, cpu(), "states")


def test_a_slab_is_refused_when_the_memory_of_the_job_is_bounded(monkeypatch):
    monkeypatch.setattr("zero_fn.storage.host_memory.available", lambda: Available(PAGE_NBYTES, "cgroup /job"))
    with pytest.raises(TierError, match="cgroup /job"):
        Slab(2 * PAGE_NBYTES, cpu(), "states")


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_cgroup_on_the_way_to_the_root_bounds(tmp_path, version):
    process = tmp_path / "cgroup"
    process.write_text("0::/job/task\n" if version == 2 else "5:pids:/x\n4:cpu,memory:/job/task\n")
    root = tmp_path / "fs"
    names = ("memory.max", "memory.current", "inactive_file")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    for path, most, used in (("job", "1000", "400"), ("job/task", "max" if version == 2 else str(1 << 62), "10")):
        folder = root.joinpath("memory" if version == 1 else "", path)
        folder.mkdir(parents=True)
        (folder / names[0]).write_text(f"{most}\n")
        (folder / names[1]).write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 5\n{names[2]} 150\n")
    found = min(_cgroups(process, root), key=lambda bound: bound.nbytes)
    assert found.nbytes == 1000 - 400 + 150
    assert found.bound.endswith("job")


@pytest.mark.parametrize(("limit", "row"), [(resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")])
def test_a_slab_beyond_the_limits_of_the_process_is_refused(limit, row):
    match = re.search(rf"{row}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert match is not None
    with limited(limit, int(match[1]) * 1024 + (64 << 20)):
        with pytest.raises(TierError, match="of the process"):
            Slab(80 << 20, cpu(), "states")
        Slab(16 << 20, cpu(), "states")


def test_pinning_that_is_refused_is_said_once_and_leaves_no_error_for_the_next_kernel(monkeypatch):
    """No accelerator here: the runtime keeps the error of a call, and the next kernel of torch raises it."""
    pending = []

    def kernel(*_, device):
        if pending:
            raise RuntimeError(f"CUDA error: {pending.pop()}")

    runtime = SimpleNamespace(cudaHostRegister=lambda *_: pending.append("refused") or 1)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)  # cupy
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "zeros", kernel)
    with pytest.warns(RuntimeWarning, match="cudaHostRegister returned 1") as said:
        slab = Slab(PAGE_NBYTES, cpu(), "states")
    assert len(said) == 1
    assert not slab.is_pinned
    torch.zeros(1, device="cuda")
    assert not Slab(PAGE_NBYTES, cpu(pinned=False), "states").is_pinned


def test_memory_is_pinned_until_it_goes(monkeypatch):
    """No accelerator here: what is asked of a runtime, and that it is told before the memory goes."""
    calls = []

    def register(address, nbytes, flags):
        calls.append(("pinned", address, nbytes))
        return flags

    def unregister(address):
        calls.append(("let go", address, is_mapped(address)))
        return 0

    found = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)  # cupy
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    slab = Slab(2 * PAGE_NBYTES, cpu(), "states")
    address, memory = slab.memory.data_ptr(), slab.memory
    assert slab.is_pinned
    del slab
    assert calls == [("pinned", address, 2 * PAGE_NBYTES)]
    del memory
    assert calls[1:] == [("let go", address, True)]
    assert not is_mapped(address)
