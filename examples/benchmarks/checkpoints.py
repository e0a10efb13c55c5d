"""Saving and loading beside torch.distributed.checkpoint, in one run: seconds, the time a step is held up, and peak memory.

    python examples/benchmarks/checkpoints.py [RANKS] [MILLIONS OF PARAMETERS] [FOLDER]

ZeRO-3 with AdamW. Peak memory is that of the slowest rank beside what rests, and includes the page cache of no one. The
last rows are a forward and backward alone, and while `save(background=True)` writes, without the time that the rank
was ready and had no core: as on an otherwise idle one.
"""

from __future__ import annotations

import ctypes
import importlib
import re
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

import zero_fn as zf

dcp: Any = importlib.import_module("torch.distributed.checkpoint")  # which does not export all that it documents

ROUNDS = 3
WIDTH = 1024


def peak_nbytes() -> int:
    """The peak of resident memory since it was last forgotten."""
    match = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


def seconds_in_queue() -> float:
    """For how long this thread has been ready to run and had no core."""
    return int(Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text().split()[1]) / 1e9


def measured(act: Callable[[], object]) -> tuple[float, int]:
    """Seconds of the slowest rank, and by how many bytes its memory grew at most."""
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    before, begin = peak_nbytes(), time.perf_counter()
    act()
    found = torch.tensor([time.perf_counter() - begin, float(peak_nbytes() - before)], dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found[0]), int(found[1])


def on_all_ranks(is_so: bool) -> bool:
    """Whether it is so on all ranks: one that makes a step more than the others waits for them."""
    dist.all_reduce(found := torch.tensor(int(is_so)), op=dist.ReduceOp.MIN)
    return bool(found)


def run(folder: str, millions: int) -> None:
    """One rank."""
    ctypes.CDLL(None).mallopt(-3, 64 * 1024)  # M_MMAP_THRESHOLD: what is freed goes back to the system
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    count = max(millions * 10**6 // WIDTH**2, 1)
    model: Any = zf.shard_params(
        nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count))), mesh["dp"]
    )
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    rows: dict[str, list[tuple[float, int]]] = {}

    def note(name: str, act: Callable[[], object]) -> None:
        rows.setdefault(name, []).append(measured(act))

    def state() -> dict[str, Any]:
        found, states = get_state_dict(model, optimizer)
        return {"model": found, "optimizer": states}

    def dcp_load(path: str) -> None:
        found = state()
        dcp.load(found, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])

    def dcp_async_save() -> Any:
        return dcp.async_save(state(), checkpoint_id=f"{folder}/dcp-async", process_group=own)

    def copy_all() -> list[torch.Tensor]:
        states = [value for each in optimizer.state.values() for value in each.values()]
        return [getattr(t, "_local_tensor", t).clone() for t in (*model.parameters(), *states)]

    def steps(least: int, is_over: Callable[[], bool]) -> list[float]:
        """Seconds of steps without an update, less those in which this thread waited for a core."""
        found: list[float] = []
        while len(found) < least or not is_over():
            begin = time.perf_counter() - seconds_in_queue()
            model(inputs).sum().backward()
            found.append(time.perf_counter() - seconds_in_queue() - begin)
            for parameter in model.parameters():
                parameter.grad = None
        return found

    begun: list[Any] = []
    own = (
        dist.new_group()
    )  # DCP's thread: on the group of the barriers here its messages and theirs were mixed up, and all waited
    inputs = torch.ones(8, WIDTH)
    alone: list[float] = []
    beside: list[float] = []
    for _ in range(ROUNDS):
        note("a copy of all", copy_all)
        note("dcp.save", lambda: dcp.save(state(), checkpoint_id=f"{folder}/dcp"))
        note("zf.save", lambda: zf.save(f"{folder}/zf", model, optimizer))
        note("dcp.load", lambda: dcp_load(f"{folder}/dcp"))
        note("zf.load", lambda: zf.load(f"{folder}/zf", model, optimizer))
        note('zf.load, "once"', lambda: zf.load(f"{folder}/zf", model, optimizer, verify="once"))
        note("dcp.async_save", lambda: begun.append(dcp_async_save()))
        begun.pop().result()
        note(
            "zf.save, background",
            lambda: begun.append(zf.save(f"{folder}/zf-async", model, optimizer, background=True)),
        )
        beside += steps(0, lambda: on_all_ranks(begun[0].is_done()))
        begun.pop().wait()
        alone += steps(max(len(beside), 3), lambda: True)
        dist.barrier()
        if dist.get_rank() == 0:
            for path in Path(folder).iterdir():
                shutil.rmtree(path)
    if dist.get_rank() == 0:
        for name, found in rows.items():
            seconds, nbytes = min(s for s, _ in found), max(b for _, b in found)
            print(f"{name:<18} {seconds:7.3f} s {nbytes / 2**20:8.0f} MiB")
        print(f"{'a step':<18} {statistics.median(alone):7.4f} s")
        print(f"{'while it is saved':<18} {statistics.median(beside):7.4f} s")


if __name__ == "__main__":
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    size = int(sys.argv[2]) if len(sys.argv) > 2 else 100
    with tempfile.TemporaryDirectory(dir=sys.argv[3] if len(sys.argv) > 3 else None) as made:
        zf.launch(run, ranks, made, size)
