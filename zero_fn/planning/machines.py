"""Presets of accelerators and what lies between them, for predictions without a machine.

Speeds are those of data sheets, one way; `ATTAINED` of each is what real copies and collectives
get, by rule of thumb. No prediction was compared with a measurement on an accelerator.

A collective over n ranks on m nodes is the ring that NCCL makes:
its bytes pass the slowest link, and its latency is

    8.4 us + (n - m) * (3.4 us by NVLink, 5.7 us by PCIe) + (m - 1) * 14 us

or, where each node has one rank of the axis, the less of that and NCCL's PAT:
8 us + log2(m) * 4 us + m * 2.8 us.

Source: NCCL, src/graph/tuning.cc: base and hardware latencies of the protocol Simple.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import log2

from zero_fn.planning.links import LinkSpeeds

__all__ = ["DEVICES", "Device", "Machine", "device_named"]

ATTAINED = 0.8


@dataclass(frozen=True, slots=True)
class Device:
    """An accelerator.

    Bytes, floating-point operations of dense matrices per second, and bytes per second one way.
    """

    memory: int
    flops16: float
    flops32: float
    device_memory: float
    to_peers: float | None  # by NVLink; None: by PCIe
    to_host: float


_PCIE4, _PCIE5 = 32e9, 64e9

DEVICES = {
    "a10": Device(24 * 10**9, 125e12, 31.2e12, 600e9, None, _PCIE4),
    "rtx4090": Device(24 * 10**9, 165e12, 82.6e12, 1008e9, None, _PCIE4),
    "l40s": Device(48 * 10**9, 362e12, 91.6e12, 864e9, None, _PCIE4),
    "a100-40": Device(40 * 10**9, 312e12, 19.5e12, 1555e9, 300e9, _PCIE4),
    "a100": Device(80 * 10**9, 312e12, 19.5e12, 2039e9, 300e9, _PCIE4),
    "h100": Device(80 * 10**9, 989e12, 67e12, 3350e9, 450e9, _PCIE5),
    "h100-pcie": Device(80 * 10**9, 756e12, 51e12, 2000e9, None, _PCIE5),
    "h100-nvl": Device(94 * 10**9, 835e12, 60e12, 3938e9, 300e9, _PCIE5),
    "h200": Device(141 * 10**9, 989e12, 67e12, 4800e9, 450e9, _PCIE5),
    "h200-nvl": Device(141 * 10**9, 835e12, 60e12, 4800e9, 450e9, _PCIE5),
    "b200": Device(180 * 10**9, 2250e12, 75e12, 8000e9, 900e9, _PCIE5),
    "gb200": Device(186 * 10**9, 2500e12, 80e12, 8000e9, 900e9, 450e9),
}
"""By the names that `python -m zero_fn plan --device` takes."""


def device_named(name: str) -> Device | None:
    """The device that a driver calls so; None for a part of one (MIG), and for unknown ones."""
    words = set(re.findall("[a-z0-9]+", name.lower()))
    known = [each for each in DEVICES if words.issuperset(each.split("-"))]
    return DEVICES[max(known, key=len)] if known and "mig" not in words else None


@dataclass(frozen=True, slots=True)
class Machine:
    """Nodes of equal devices."""

    device: Device
    per_node: int = 8  # devices
    network: float = 8 * 50e9  # bytes per second one way, of all cards of a node together
    host_memory: float = 400e9  # speed in bytes per second, shared by the ranks of a node
    disk_read: float = 7e9  # of all disks of a node together
    disk_write: float = 5e9
    measured: LinkSpeeds | None = None  # takes the place of what was measured, for each rank

    def links(self, *axes: tuple[str, int, int]) -> LinkSpeeds:
        """Speeds of a rank.

        `axes`: of each the name, the ranks on it, and how far apart neighbours on it are.
        """
        device, sent, latency = self.device, dict[str, float](), dict[str, float]()
        for name, size, apart in axes:
            sent[name], latency[name] = self._along(size, apart)
        shared = min(self.per_node, max((size * apart for _, size, apart in axes), default=1))
        speeds = {
            "memory": self.host_memory / shared,
            "disk_read": self.disk_read / shared,
            "disk_write": self.disk_write / shared,
            "to_device": device.to_host,
            "from_device": device.to_host,
            "device_memory": device.device_memory,
        }
        for name, speed in speeds.items():
            speeds[name] = getattr(self.measured, name, None) or ATTAINED * speed
        return LinkSpeeds(sent=sent, latency=latency, **speeds)

    def _along(self, size: int, apart: int) -> tuple[float, float]:
        """Of an axis the bytes per second that a rank sends along it,
        and the seconds of a collective without bytes."""
        together = min(size, max(self.per_node // apart, 1))  # its ranks on one node
        nodes, found = -(-size // together), self.measured
        near = ATTAINED * (self.device.to_peers or self.device.to_host)
        hop_s = 3.4e-6 if self.device.to_peers else 5.7e-6
        if found and found.sent:  # in a node
            near = next(iter(found.sent.values()))
        if nodes == 1:
            return near, 8.4e-6 + (size - 1) * hop_s
        ring_s = 8.4e-6 + (size - nodes) * hop_s + (nodes - 1) * 14e-6
        if together == 1:
            ring_s = min(ring_s, 8e-6 + log2(nodes) * 4e-6 + nodes * 2.8e-6)
        return min(near, ATTAINED * self.network * together / self.per_node), ring_s
