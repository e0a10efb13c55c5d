"""`sweep()`: how fast a disk reads and writes, with blocks of several sizes,
so many at once, by io_uring and by threads.

What moves the bytes of `zf.nvme` is measured, in a file without a name: nothing is left, however
this ends. The best of many noisy measurements looks better than it is. So it is measured again, by
turns with the setting of `zf.nvme` and with fio.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from pathlib import Path

import torch

from zero_fn.inspect.table import table
from zero_fn.storage import Slab
from zero_fn.storage.files import SpillFile
from zero_fn.storage.host_memory import too_small
from zero_fn.storage.io import IoBackend, Request, Threads
from zero_fn.storage.tier_storage import BLOCK_NBYTES
from zero_fn.storage.uring import io_backend
from zero_fn.streamed.pieces import BUFFER_NBYTES
from zero_fn.values.tiers import bytes_text, cpu

__all__ = ["DiskSweep", "sweep"]

# Blocks under way at once, while a buffer of `zf.streamed` comes or goes.
_OURS = BUFFER_NBYTES // BLOCK_NBYTES
_BLOCKS, _DEPTHS, _THREADS = (128 << 10, 1 << 20, BLOCK_NBYTES), (1, 4, _OURS, 16), (1, 2, 4, 8)
_FILE_NBYTES, _PART = 1 << 30, 10  # bytes of the file, but at most one part in ten of the free room
# A setting that is measured twice differs by nearly a tenth. `_BUSY` is a share of a core.
_TURNS, _WORTH, _BUSY = 3, 1.1, 0.9
_NETWORK = ("nfs", "cifs", "smb", "fuse", "9p", "virtiofs", "lustre", "ceph", "beegfs")


@dataclass(frozen=True, slots=True)
class Setting:
    """Blocks of so many bytes, so many at once, by what they are moved,
    and how fast, in bytes per second."""

    engine: str
    block_nbytes: int
    at_once: int
    read: float = 0.0
    write: float = 0.0

    @property
    def pace(self) -> float:
        """The speed where as many bytes are read as written, as in a step."""
        return 2 / (1 / self.read + 1 / self.write)


@dataclass(frozen=True, slots=True)
class DiskSweep:
    """What was measured in a folder, in a file of `nbytes`.

    `tried`: all settings, the fastest first. `again`, medians by turns: the setting of `zf.nvme`,
    the fastest one, and fio if it is installed. `gain`: how many times as fast as the first the
    second is, in the least of three turns. `says`: in words.
    """

    path: str
    file_system: str
    nbytes: int
    tried: Sequence[Setting]
    again: Sequence[Setting]
    gain: float
    says: Sequence[str]

    def __str__(self) -> str:
        names = [""] * len(self.tried) + ["again: zf.nvme", "again: fastest", "again: fio"]
        rows = [
            (
                name,
                s.engine,
                f"{s.at_once} x {bytes_text(s.block_nbytes)}",
                f"{s.read / 1e9:.2f}",
                f"{s.write / 1e9:.2f}",
            )
            for name, s in zip(names, [*self.tried, *self.again], strict=False)
        ]
        lines = table([("GB/s", "moved by", "at once", "read", "written"), *rows], right=(3, 4))
        head = f"{self.path}: {self.file_system}, measured in a file of {bytes_text(self.nbytes)}"
        return "\n".join((head, *lines, *self.says))


class _DiskProbe:
    """A file whose bytes were written once, and memory to write from and read into."""

    def __init__(self, path: str, seconds: float, ranks: int) -> None:
        self.file = SpillFile(path, "links")
        room, needed = os.fstatvfs(self.file.fd), _PART * (1 + ranks) * BUFFER_NBYTES
        free = room.f_bavail * room.f_frsize
        if free < needed:
            raise too_small(
                f"Measurements in {path}",
                needed,
                free,
                "a tenth of the free room is used",
                of="disk",
            )
        self.file.reserve(min(_FILE_NBYTES, free // _PART // BLOCK_NBYTES * BLOCK_NBYTES))
        self.memory = Slab(
            max(_DEPTHS) * BLOCK_NBYTES, cpu(pinned=False), "buffers of links", forked=False
        ).memory
        self.memory.view(torch.int64).random_(generator=torch.Generator())  # some disks compress
        # What was only reserved is read as zeros, without the disk:
        # the file ends with the last block that was written.
        blocks, self.pace = self.moved(
            _ours(), seconds, is_write=True, most=self.file.nbytes // BLOCK_NBYTES
        )
        self.file.shrink(blocks * BLOCK_NBYTES)

    def measured(self, setting: Setting, seconds: float) -> Setting:
        """A setting with its speeds: reads, then writes, for so many seconds each."""
        read, write = (
            self.moved(setting, seconds, is_write=is_write)[1] for is_write in (False, True)
        )
        return replace(setting, read=read, write=write)

    def moved(
        self, setting: Setting, seconds: float, *, is_write: bool, most: float = inf
    ) -> tuple[int, float]:
        """Blocks and bytes per second: the next block is begun when
        the first of so many is done."""
        engine = _engine(setting.engine)
        block = setting.block_nbytes
        count = self.file.nbytes // setting.block_nbytes
        under_way: deque[Request] = deque()
        begun, start = 0, time.perf_counter()
        while (is_on := time.perf_counter() - start < seconds and begun < most) or under_way:
            if is_on:
                memory = self.memory[begun % setting.at_once * block :][:block]
                under_way.append(
                    Request(self.file, begun % count * block, memory, is_write=is_write)
                )
                engine.submit([under_way[-1]])
                begun += 1
            if len(under_way) == setting.at_once or not is_on:
                engine.wait([request := under_way.popleft()])
                if request.failure is not None:
                    raise request.failure
        return begun, begun * block / (time.perf_counter() - start)

    def by_fio(self, setting: Setting, seconds: float) -> Setting:
        """fio with this setting, in the same file.

        Raises what `subprocess` and `json` do if it fails.
        """
        name = "io_uring" if setting.engine == "io_uring" else "libaio"
        command = [
            "fio",
            "--name=links",
            f"--filename=/proc/{os.getpid()}/fd/{self.file.fd}",
            f"--size={self.file.nbytes}",
        ]
        command += [
            f"--bs={setting.block_nbytes}",
            f"--iodepth={setting.at_once}",
            f"--ioengine={name}",
            "--time_based",
        ]
        command += [
            f"--direct={self.file.is_direct:d}",
            f"--runtime={seconds * 1000:.0f}ms",
            "--output-format=json",
        ]
        speeds = []
        for way in ("read", "write"):
            done = subprocess.run(
                [*command, f"--rw={way}"], capture_output=True, text=True, check=True, timeout=60
            )
            speeds.append(float(json.loads(done.stdout)["jobs"][0][way]["bw_bytes"]))
        return replace(setting, engine=f"fio, {name}", read=speeds[0], write=speeds[1])


def _ours() -> Setting:
    return Setting(str(io_backend()), BLOCK_NBYTES, _OURS)


@cache
def _engine(name: str) -> IoBackend:
    return io_backend() if name == str(io_backend()) else Threads(int(name.partition(" ")[0]))


def sweep(path: str, seconds: float, ranks: int = 1) -> DiskSweep:
    """Measures the disk behind a folder for about so many seconds;
    for twice as many if it moves less than 100 MB/s.

    Takes 128 MiB of host memory, and of the disk 1 GiB or a tenth of what is free there.
    Communicates nothing.

    Raises:
        TierError: There is too little memory, or too little room for this,
            and for 64 MiB of each of `ranks` later.
        StorageError: No file can be made there, or the disk fails.
    """
    end = time.perf_counter() + seconds
    probe, ours = _DiskProbe(path, seconds / 8, ranks), _ours()
    settings = [
        replace(ours, block_nbytes=block, at_once=depth) for block in _BLOCKS for depth in _DEPTHS
    ]
    settings += [replace(ours, engine=f"{count} threads") for count in _THREADS]
    slot = seconds / 5 / len(settings)
    # A slow disk would take long for what is under way when the time of a setting is up.
    tried = [
        s
        for s in dict.fromkeys(settings)
        if s == ours or s.block_nbytes * s.at_once < slot * probe.pace
    ]
    tried = sorted((probe.measured(each, slot) for each in tried), key=lambda each: -each.pace)
    fio = "" if shutil.which("fio") else "fio is not installed: nothing to compare with"
    turns: list[list[Setting]] = []
    busy: list[float] = []
    while len(turns) < _TURNS and (not turns or time.perf_counter() < end):
        begun = time.process_time(), time.perf_counter()
        turns.append([probe.measured(ours, 2 * slot)])
        busy.append((time.process_time() - begun[0]) / (time.perf_counter() - begun[1]))
        turns[-1].append(probe.measured(tried[0], 2 * slot))
        if not fio:
            try:
                turns[-1].append(probe.by_fio(ours, 2 * slot))
            except (OSError, subprocess.SubprocessError, ValueError, LookupError) as error:
                fio = f"fio failed: {error}"
    again = [
        replace(
            each[0],
            read=statistics.median(s.read for s in each),
            write=statistics.median(s.write for s in each),
        )
        for each in zip(*turns, strict=False)
    ]
    if not fio:
        fio = (
            f"of fio's speed: {again[0].read / again[2].read:.2f} read, "
            f"{again[0].write / again[2].write:.2f} written"
        )
    here = Path(path).resolve()
    mounts = map(str.split, Path("/proc/self/mountinfo").read_text().splitlines())
    system = max(
        (len(m[4]), n, m[m.index("-") + 1])
        for n, m in enumerate(mounts)
        if here.is_relative_to(m[4])
    )[2]
    gain = min(turn[1].pace / turn[0].pace for turn in turns) if len(turns) == _TURNS else 1.0
    says = [fio, _limit(system, probe.file, statistics.median(busy)), _advice(path, tried[0], gain)]
    return DiskSweep(path, system, probe.file.nbytes, tried, again, gain, says)


def _limit(system: str, file: SpillFile, busy: float) -> str:
    if system in ("tmpfs", "ramfs"):
        return f"limit: memory. {system} is no disk; choose a folder on one"
    if system.startswith(_NETWORK):
        return (
            f"limit: the network, or who is at its other end ({system}); "
            "choose a folder on a local disk"
        )
    if not file.is_direct:
        return (
            f"limit: the page cache. {system} takes no direct I/O (O_DIRECT); "
            "choose a folder on ext4 or xfs"
        )
    if busy > _BUSY:
        return f"limit: cores. This alone keeps {busy:.1f} of {len(os.sched_getaffinity(0))} busy"
    return (
        "limit: the disk, or a bound that the machine sets it; several are faster: "
        "zf.nvme('/disk0', '/disk1')"
    )


def _advice(path: str, best: Setting, gain: float) -> str:
    tier = f"zf.nvme({path!r})"
    if gain < _WORTH:
        return f"best: {tier}, nothing else to set: no setting was faster by a tenth in every turn"
    how = (
        f"{best.at_once} x {bytes_text(best.block_nbytes)} by {best.engine}: "
        f"{gain:.2f} times as fast or more"
    )
    if (best.engine, best.block_nbytes) == (str(io_backend()), BLOCK_NBYTES):
        return (
            f"best: {tier} and zf.streamed(optimizer, buffer={best.at_once * BLOCK_NBYTES}): {how}"
        )
    return f"best: {tier}. {how}, but no option sets it: please report this page"
