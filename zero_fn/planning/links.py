"""`measure_links()`: how fast bytes move here, for `autoplan`."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zero_fn.errors import ConfigError
from zero_fn.storage import DiskStorage, Slab
from zero_fn.tiers.side_stream import side_stream
from zero_fn.transport.agree import done_over
from zero_fn.transport.links import line_over
from zero_fn.transport.segment import Contribution, Segment
from zero_fn.values.mesh import Axis, mesh_axis
from zero_fn.values.tiers import cpu, is_accelerator, nbytes_of_text, nvme

__all__ = ["LinkSpeeds", "measure_links", "of_all_ranks"]


@dataclass(frozen=True, slots=True)
class LinkSpeeds:
    """Speeds in bytes per second, those of the slowest rank while all ranks work at once.

    Returned by `measure_links`.

    Attributes:
        memory: Speed of host memory: bytes read and written by an operation in place,
            with all threads of the rank.
        disk_read, disk_write: Speeds of the disk behind `path`; None if no path was given.
        sent: Speed at which a rank sends in collectives, by the name of the axis.
        to_device, from_device: Speeds of copies between pinned host memory and the
            accelerator; None without one.
        device_memory: Speed of the accelerator's memory, measured as `memory` is;
            None without an accelerator.
        latency: Seconds that a collective takes beside those of its bytes,
            by the name of the axis; of others none.

    Measurements of an accelerator were tested on a pretended one only.
    """

    memory: float
    disk_read: float | None
    disk_write: float | None
    sent: Mapping[str, float]
    to_device: float | None
    from_device: float | None
    device_memory: float | None = None
    latency: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> LinkSpeeds:
        """The speeds that `python -m zero_fn links --out links.json` has written.

        Raises:
            ConfigError: The file cannot be read, or has no speeds.
        """
        try:
            return cls(**json.loads(Path(path).read_text())["links"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                f"{os.fspath(path)!r} is no file of measured links.",
                why=f"{type(error).__name__}: {error}",
                fix=f"python -m zero_fn links --out {os.fspath(path)}",
            ) from error

    def __str__(self) -> str:
        speeds = {
            "memory": self.memory,
            "disk, read": self.disk_read,
            "disk, written": self.disk_write,
            **{f"sent along {name!r}": speed for name, speed in self.sent.items()},
            "to the device": self.to_device,
            "from the device": self.from_device,
            "memory of the device": self.device_memory,
        }
        lines = [
            f"{name:<20} {speed / 1e9:8.2f} GB/s"
            for name, speed in speeds.items()
            if speed is not None
        ]
        for name, seconds in self.latency.items():
            lines.append(f"{f'latency along {name!r}':<20} {seconds * 1e6:8.2f} us")
        return "\n".join(lines)


Paths = str | Sequence[str]
"""A folder, or one on each of several disks."""


def measure_links(
    mesh: DeviceMesh | None = None,
    *,
    path: Paths | None = None,
    nbytes: int | str = "64MiB",
    rounds: int = 5,
) -> LinkSpeeds:
    """Measures the memory, a disk, the collectives of an axis and the accelerator's link,
    each as the library uses it.

    All ranks of the axis measure at the same time, as in training, so ranks that share a disk or a
    link share its speed. Speeds are medians, and depend on how busy the machine is now.

    Communicates, over `mesh`: `rounds + 1` all-gathers and reduce-scatters of `nbytes`, as many
    small ones, and some numbers.

    Args:
        mesh: One axis, `mesh["dp"]`, all ranks of which must call this; None for a process alone.
        path: A folder of the disk to measure, or folders of several disks that are used as one
            tier. `nbytes` are written to files without a name there, and read back.
        nbytes: Bytes to move each time, as a number or as text.
            Four times as many are taken in memory.
        rounds: How often each measurement is repeated, after a first that does not count.

    Returns:
        Speeds, the same on every rank.

    Raises:
        StorageError: Files cannot be written to the path on some rank; raised on all ranks.
        MeshError: `mesh` is not one axis.
    """
    size = max(nbytes_of_text(nbytes, "nbytes") // 4096, 1) * 4096
    axis = mesh_axis(mesh, verb="measure_links") if mesh is not None else None
    device = _accelerator(axis)
    _least(axis, [1.0])  # all begin together
    speeds = [_memory_speed(None, size, rounds), 0.0, 0.0, 0.0, 0.0, 0.0]
    if path is not None:
        axes = [] if axis is None or axis.size == 1 else [axis]
        disk = partial(_disk_speeds, path, size, rounds)
        speeds[1:3] = done_over(axes, disk, "Measuring a disk")
    if device is not None:
        speeds[3:] = _device_speeds(device, size, rounds)
    memory, *others = _least(axis, speeds)
    disk_read, disk_write, to_device, from_device, device_memory = (
        speed or None for speed in others
    )
    sent: dict[str, float] = {}
    latency: dict[str, float] = {}
    if axis is not None and axis.size > 1:
        piece = max(size // 4 // axis.size, 1)
        small_s, large_s = (_collective_s(axis, numel, rounds) for numel in (1, piece))
        speed, negative = _least(axis, [4 * piece * (axis.size - 1) / large_s, -small_s])
        sent[axis.name], latency[axis.name] = speed, -negative
    return LinkSpeeds(
        memory, disk_read, disk_write, sent, to_device, from_device, device_memory, latency
    )


def of_all_ranks(axis: Axis, numbers: Sequence[float], what: str) -> Tensor:
    """The numbers of all ranks of an axis, a row for each rank. Waits for all."""
    own = torch.tensor(numbers, dtype=torch.float64).view(torch.uint8).to(axis.device_type)
    rows = line_over([axis]).exchange(own, what)
    return rows.cpu().view(torch.float64).reshape(-1, len(numbers))


def _least(axis: Axis | None, numbers: list[float]) -> list[float]:
    """For each number the least over all ranks. Waits for all."""
    if axis is None:
        return numbers
    return [float(number) for number in of_all_ranks(axis, numbers, "speeds of links").amin(0)]


def _median_s(run: Callable[[], None], rounds: int) -> float:
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _memory_speed(device: torch.device | None, size: int, rounds: int) -> float:
    """The speed of a device's memory, or of the host's, over as many tensors as an optimizer has
    for a parameter: one alone might fit a cache."""
    values = torch.ones(4, size // 4, device=device)

    def in_place() -> None:
        for each in values:
            each.mul_(1.0)
        if device is not None:
            torch.accelerator.synchronize(device)

    return 2 * values.nbytes / _median_s(in_place, rounds)


def _disk_speeds(path: Paths, size: int, rounds: int) -> tuple[float, float]:
    slab = Slab(size, cpu(), "measure_links", forked=False)
    slab.memory.random_(0, 256, generator=torch.Generator())
    disk = DiskStorage(nvme(*((path,) if isinstance(path, str) else path)), "measure_links")
    (place,) = disk.reserve([slab.nbytes])
    written_s = _median_s(lambda: disk.write(place, slab.memory).wait(), rounds)
    read_s = _median_s(lambda: disk.read(place, slab.memory).wait(), rounds)
    return slab.nbytes / read_s, slab.nbytes / written_s


def _collective_s(axis: Axis, piece_numel: int, rounds: int) -> float:
    """Seconds of a collective, the mean of an all-gather and a reduce-scatter,
    in which each piece has so many elements."""
    links, numel = line_over([axis]), piece_numel * axis.size
    whole, out = torch.ones(2, numel, device=axis.device_type)
    segment = Segment(whole, numel, piece_numel)
    contribution = Contribution(whole, piece_numel, out.narrow(0, 0, piece_numel), torch.float32)
    reduction = links.reduce_plan([contribution], [out])

    def both() -> None:
        links.all_gather([segment], "measure_links").wait()
        links.reduce_scatter(reduction, [whole], [out], "measure_links").wait()
        if is_accelerator(axis.device_type):
            torch.accelerator.synchronize()

    return _median_s(both, rounds) / 2


def _accelerator(axis: Axis | None) -> torch.device | None:
    """The accelerator of the axis; without an axis, that of the process."""
    if axis is not None:
        if is_accelerator(axis.device_type):
            return torch.empty(0, device=axis.device_type).device
        return None
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def _device_speeds(device: torch.device, size: int, rounds: int) -> tuple[float, float, float]:
    """Speeds of pinned copies to the device and from it, and of its memory."""
    slab, stream = Slab(size, cpu(), "measure_links"), side_stream(device)
    host, there = slab.memory[:size].view(torch.float32), torch.ones(size // 4, device=device)
    to_device_s = _median_s(lambda: stream.copy(there, host).synchronize(), rounds)
    from_device_s = _median_s(lambda: stream.copy(host, there).synchronize(), rounds)
    return size / to_device_s, size / from_device_s, _memory_speed(device, size, rounds)
