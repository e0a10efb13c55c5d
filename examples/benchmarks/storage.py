"""Disk: what zero_fn reads and writes per second, against fio on the same file system, idle and beside a busy
interpreter.

    python examples/benchmarks/storage.py --path /local_nvme --size 2GiB --fio fio --peer /python/with/deepspeed

Rounds of every way are interleaved, so that a loaded machine slows all alike; the table gives the best and the median.
Ways:

    uring      io_uring, memory in huge pages, blocks of 8 MiB, checksums taken and compared
    unchecked  the same without checksums
    threads    os.preadv and os.pwritev in four threads, with checksums
    fio        io_uring, direct, blocks of 8 MiB, 8 under way, registered buffers, memory in huge pages (glibc's tunable)
    ds-aio     the handle of DeepSpeed's NVMe offload, with `--aio` block bytes, blocks under way, threads; with --peer

"busy" is a thread that runs Python without pause in the same process; fio and DeepSpeed, other processes, have it beside
them, too.
Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory

import torch

from zero_fn.storage import DiskStorage, Slab, Transfer
from zero_fn.storage.io import IoBackend, Request, Threads
from zero_fn.storage.tier_storage import BLOCK_NBYTES
from zero_fn.storage.uring import Uring
from zero_fn.values.tiers import cpu, nbytes_of_text, nvme

BUFFER_NBYTES = 64 << 20
BUFFERS = 4

Way = Callable[[bool], None]
"""Moves all bytes once; true is to write them."""


def through_spill(carrier: IoBackend, path: str, size: int) -> Way:
    """As `streamed` does it: four buffers in turn."""
    slab = Slab(BUFFERS * BUFFER_NBYTES, cpu(), "buffers", forked=False)
    slab.memory.random_(0, 256)
    disk = DiskStorage(nvme(path), "the benchmark", carrier)
    disk.reserve([size])
    views = list(torch.split(slab.memory, BUFFER_NBYTES))

    def move(is_write: bool) -> None:
        under_way: list[Transfer] = []
        for number, offset in enumerate(range(0, size, BUFFER_NBYTES)):
            if number >= BUFFERS:
                under_way.pop(0).wait()
            under_way.append((disk.write if is_write else disk.read)(offset, views[number % BUFFERS]))
        for transfer in under_way:
            transfer.wait()

    return move


def unchecked(path: str, size: int) -> Way:
    carrier = Uring()
    slab = Slab(BUFFERS * BUFFER_NBYTES, cpu(), "buffers", forked=False)
    slab.memory.random_(0, 256)
    disk = DiskStorage(nvme(path), "the benchmark", carrier)
    disk.reserve([size])
    room = BUFFERS * BUFFER_NBYTES

    def move(is_write: bool) -> None:
        under_way: list[Request] = []
        for offset in range(0, size, BLOCK_NBYTES):
            if len(under_way) == room // BLOCK_NBYTES:
                carrier.wait([under_way.pop(0)])
            block = slab.memory[offset % room : offset % room + BLOCK_NBYTES]
            under_way.append(Request(disk.files[0], offset, block, is_write=is_write))
            carrier.submit(under_way[-1:])
        carrier.wait(under_way)
        assert all(request.failure is None for request in under_way)

    return move


def fio(program: str, path: str, size: int) -> Callable[[bool], float]:
    """Seconds that fio says it took."""

    def move(is_write: bool) -> float:
        command = [program, "--name=zero_fn", f"--filename={path}/fio", f"--size={size}", "--bs=8m", "--iodepth=8"]
        command += ["--ioengine=io_uring", "--direct=1", "--fixedbufs=1", "--mem=malloc", "--output-format=json"]
        command += [f"--rw={'write' if is_write else 'read'}", "--overwrite=1", "--iomem_align=2m"]
        environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
        done = subprocess.run(command, check=True, capture_output=True, env=environment, text=True)
        job = json.loads(done.stdout)["jobs"][0]["write" if is_write else "read"]
        return float(job["runtime"]) / 1000

    return move


@contextmanager
def aio(python: str, path: str, size: int, options: list[int]) -> Iterator[Callable[[bool], float]]:
    """Seconds that DeepSpeed's handle took, in a process that waits for its turn."""
    program = str(Path(__file__).with_name("deepspeed_aio.py"))
    command = [python, program, f"{path}/aio", size, BUFFERS * BUFFER_NBYTES, *options]
    child = subprocess.Popen(list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None and child.stdout is not None
    asked, answers = child.stdin, child.stdout
    if answers.readline().strip() != "ready":
        sys.exit("DeepSpeed's aio did not start, see above")

    def move(is_write: bool) -> float:
        print("write" if is_write else "read", file=asked, flush=True)
        return float(answers.readline())

    try:
        yield move
    finally:
        asked.close()
        child.wait()


@contextmanager
def interpreter(*, busy: bool) -> Iterator[None]:
    """With a thread that runs Python without pause."""
    ends = threading.Event()

    def run() -> None:
        count = 0
        while not ends.is_set():
            count = sum(range(1000)) + count % 7

    thread = threading.Thread(target=run, daemon=True)
    if busy:
        thread.start()
    try:
        yield
    finally:
        ends.set()
        if busy:
            thread.join()


def seconds(way: Callable[[bool], float | None], is_write: bool) -> float:
    start = time.perf_counter()
    told = way(is_write)
    return told if told is not None else time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--path", default=".", help="a folder of the disk to measure")
    parser.add_argument("--size", default="1GiB", help="bytes to move each time")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--fio", default="fio", help="the program, if it is installed")
    parser.add_argument("--peer", help="an interpreter that has deepspeed")
    parser.add_argument("--aio", type=int, nargs=3, default=[8 << 20, 8, 4], help="of its handle, see above")
    options = parser.parse_args()
    size = max(nbytes_of_text(options.size, "--size") // BUFFER_NBYTES, 1) * BUFFER_NBYTES

    with TemporaryDirectory(dir=options.path) as path, ExitStack() as stack:
        ways: dict[str, Callable[[bool], float | None]] = {
            "uring": through_spill(Uring(), path, size),
            "unchecked": unchecked(path, size),
            "threads": through_spill(Threads(), path, size),
        }
        if which(options.fio) is not None:
            ways["fio"] = fio(options.fio, path, size)
        if options.peer is not None:
            ways["ds-aio"] = stack.enter_context(aio(options.peer, path, size, options.aio))
        times: dict[tuple[str, bool, bool], list[float]] = {}
        for round_ in range(options.rounds + 1):
            for busy in (False, True):
                for is_write in (True, False):
                    for name, way in ways.items():
                        with interpreter(busy=busy):
                            took = seconds(way, is_write)
                        if round_:  # the first makes the files
                            times.setdefault((name, busy, is_write), []).append(took)
    load = Path("/proc/loadavg").read_text().split()[0]
    print(f"{size / 1e9:.2f} GB each time, {options.rounds} rounds, load average {load}; GB/s, best (median)")
    print(f"{'way':<12}{'read':>16}{'written':>16}{'read, busy':>16}{'written, busy':>16}")
    for name in ways:
        cells = []
        for busy in (False, True):
            for is_write in (False, True):
                took_s = times[name, busy, is_write]
                cells.append(f"{size / min(took_s) / 1e9:.2f} ({size / statistics.median(took_s) / 1e9:.2f})")
        print(f"{name:<12}" + "".join(f"{cell:>16}" for cell in cells))


if __name__ == "__main__":
    main()
