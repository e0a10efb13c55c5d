"""What the device did in one step, from a trace of torch's profiler: the time it computed and copied, and where it waited.

A gap is a time in which the device does nothing. Beside it stand the events of the host that ran then, those first that took
most of it. The trace is for a browser (chrome://tracing, ui.perfetto.dev).
"""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

_STEP, _PARTS = "a step", ("forward", "backward", "clip", "update")
_GAPS, _NAMES = 5, 4
_MOST_NBYTES = 14 << 20  # of a trace that is kept
_ON_DEVICE = ("kernel", "gpu_memset", "gpu_memcpy")
_ON_HOST = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")

Event = Mapping[str, Any]
Span = tuple[float, float]
"""Begin and end, in microseconds."""


def profiled(step: Callable[[], object], folder: Path, name: str) -> Iterator[str]:
    """Lines about one step. Its trace goes to the folder, if it is not too large."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile, torch.profiler.record_function(_STEP):
        step()
        torch.accelerator.synchronize()
    with tempfile.TemporaryDirectory() as own:
        path = Path(own) / "trace.json"
        profile.export_chrome_trace(str(path))
        text = path.read_bytes()
    packed = gzip.compress(text, 5)
    if len(packed) <= _MOST_NBYTES:
        (folder / f"trace-{name.replace(', ', '-').replace(' ', '-')}.json.gz").write_bytes(packed)
    else:
        yield f"the trace takes {len(packed) / 1e6:.0f} MB, and was dropped"
    yield from lines([event for event in json.loads(text)["traceEvents"] if "dur" in event])


def lines(events: Sequence[Event]) -> Iterator[str]:
    """The shares of the step, and its longest gaps."""
    begin, end = next(
        _span(event) for event in events if event.get("name") == _STEP and event.get("cat") == "user_annotation"
    )
    on_device = [event for event in events if event.get("cat") in _ON_DEVICE]
    if not on_device:
        yield "the profiler saw nothing on the device"
        return
    copies = [event for event in on_device if _is_copy(event)]
    computing = total(union(_span(event) for event in on_device if not _is_copy(event)))
    copying, busy = total(union(map(_span, copies))), union(map(_span, on_device))
    times = {
        "computes": computing,
        "copies": copying,
        "both": computing + copying - total(busy),
        "neither": end - begin - total(busy),
    }
    shares = (f"{name} {us / 1e3:.1f} ms ({100 * us / (end - begin):.0f} %)" for name, us in times.items())
    yield f"{(end - begin) / 1e3:.1f} ms; {', '.join(shares)}"
    on_host = [event for event in events if event.get("cat") in _ON_HOST and event["name"] != _STEP]
    parts = [event for event in on_host if event["name"] in _PARTS and event.get("cat") == "user_annotation"]
    yield "host: " + ", ".join(f"{event['name']} {float(event['dur']) / 1e3:.1f} ms" for event in parts)
    for first, last in sorted(gaps(busy, begin, end), key=lambda gap: gap[0] - gap[1])[:_GAPS]:
        names: dict[str, float] = {}
        for event in on_host:
            started, ended = _span(event)
            if started < last and ended > first:
                names[event["name"]] = names.get(event["name"], 0.0) + min(ended, last) - max(started, first)
        longest = sorted(names.items(), key=lambda item: -item[1])[:_NAMES]
        said = ", ".join(f"{name} {us / 1e3:.1f}" for name, us in longest)
        yield f"  nothing for {(last - first) / 1e3:.2f} ms from {(first - begin) / 1e3:.1f} ms on: {said}"


def _is_copy(event: Event) -> bool:
    """Whether it crosses the link. Copies within the device count as computing."""
    return event.get("cat") == "gpu_memcpy" and "DtoD" not in event["name"]


def _span(event: Event) -> Span:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def union(spans: Iterable[Span]) -> list[Span]:
    """Spans that do not touch, of the same times."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def total(spans: Iterable[Span]) -> float:
    """The length of spans that do not touch."""
    return sum(end - begin for begin, end in spans)


def gaps(busy: Sequence[Span], begin: float, end: float) -> list[Span]:
    """What lies between spans that do not touch."""
    edges = [begin, *(edge for span in busy for edge in span), end]
    return [(first, last) for first, last in zip(edges[::2], edges[1::2], strict=True) if last > first]
