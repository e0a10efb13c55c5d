"""The largest GPTs that one accelerator and its host train: which, and where their state rests, is found by arithmetic.

A model is built on `meta`, and materialized unit by unit where it will rest. Parameters, gradients, and parts of the states
are on the device or on the host, in the way that takes the least of the host. Blocks are recomputed.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from accelerator_ways import HOST_KEPT_FREE, Shape, Trained, device_nbytes, forget, host_nbytes, stepped
from contestants import GPT, RATE
from measured import forget_peak, resident_nbytes, table
from torch import nn

import zero_fn as zf

SHAPES = ["32x4096x1024", "48x4096x1024", "38x2560x1024"]  # 6.5, 9.7 and 3 billion
_STEPS = 3
_BUFFERS_NBYTES = 1 << 30
_BUILT_S, _STEP_S = 0.2, 0.6  # for a GB on the host, for a billion parameters with 16 K tokens: until one was measured


class Rest(NamedTuple):
    """Where the state rests.

    Attributes:
        params, grads: Whether they are on the host.
        states: The part of the states that is on the host.
    """

    params: bool
    grads: bool
    states: float

    @property
    def host(self) -> float:
        """Bytes of a parameter on the host: float32 and its bfloat16 copy, gradient, states."""
        return 6 * self.params + 4 * self.grads + 8 * self.states

    @property
    def device(self) -> float:
        """Bytes of a parameter on the device."""
        return 18 - self.host

    def __str__(self) -> str:
        away = [name for name, is_away in (("parameters", self.params), ("gradients", self.grads)) if is_away]
        away += [f"{100 * self.states:.0f} % of the states"] if self.states else []
        return f"{', '.join(away) or 'nothing'} on the host"


RESTS = [
    Rest(params, grads, states / 40)
    for params in (False, True)
    for grads in (False, True)
    for states in range(40, 19, -1)
]
RESTS.append(Rest(False, False, 0.0))


def fitting(shape: Shape, tokens: int, device: float, host: float) -> Rest | None:
    """Where the state of a GPT rests in so many bytes of device and host, with the least on the host; None if it cannot.
    States are divided only where they have to be."""
    beside = shape.activations_nbytes(tokens, recomputes=True) + shape.in_use_nbytes
    fit = [
        rest
        for rest in RESTS
        if rest.device * shape.numel + beside <= device
        and rest.host * shape.numel + _BUFFERS_NBYTES * bool(rest.host) <= host
    ]
    return min(fit, key=lambda rest: (rest.states not in (0, 1), rest.host), default=None)


def built(shape: Shape, rest: Rest, device: torch.device) -> Trained:
    """A GPT that is drawn where it rests."""
    with torch.device("meta"):
        model: nn.Module = zf.precision(GPT(*shape))
    host = zf.cpu()
    where: dict[str, Any] = {
        name: host for name, is_away in zip(("params", "grads", "optim"), rest, strict=True) if is_away
    }
    if where:
        fraction = rest.states or 1.0
        model = zf.offload(model, **where, fraction=fraction, donate=True)
    torch.manual_seed(0)
    model = zf.materialize(model, device)
    is_fused = bool(rest.states) or device.type == "cuda"
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=RATE, fused=is_fused)
    if where:
        optimizer = zf.streamed(optimizer)
    return stepped(model, optimizer, is_ours=True)


def trained(shape: Shape, rest: Rest, device: torch.device, tokens: int) -> dict[str, str]:
    """A row: some steps of a model."""
    forget_peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    started = time.monotonic()
    training = built(shape, rest, device)
    torch.accelerator.synchronize()
    built_s = time.monotonic() - started
    print(f"  built in {built_s:.1f} s", flush=True)
    training.model.recomputes = True
    generator = torch.Generator().manual_seed(1)
    form = max(tokens // shape.sequence, 1), shape.sequence + 1
    batch = torch.randint(256, form, generator=generator).to(device)
    times, losses = [], []
    for _ in range(_STEPS):
        start = time.perf_counter()
        losses.append(training.step(batch).item())
        torch.accelerator.synchronize()
        times.append(time.perf_counter() - start)
        print(f"  step {times[-1]:.2f} s, loss {losses[-1]:.4f}", flush=True)
    assert training.plan is not None
    plan = training.plan()
    count = batch[:, 1:].numel()
    activations = shape.activations_nbytes(count, recomputes=True)
    peak = f"{torch.cuda.max_memory_allocated() / 1e9:.1f}" if device.type == "cuda" else ""
    return {
        "parameters": f"{shape.numel / 1e9:.2f} B, {rest}",
        "built s": f"{built_s:.1f}",
        "s/step": f"{times[-1]:.2f}",
        "tokens/s": f"{count / times[-1]:,.0f}",
        "to GB": f"{plan.link.to_device / 1e9:.1f}",
        "from GB": f"{plan.link.from_device / 1e9:.1f}",
        "host GB": f"{resident_nbytes(peak=True) / 1e9:.1f}",
        "plan": f"{plan.host_nbytes / 1e9:.1f}",
        "device GB": peak,
        "plan ": f"{(plan.peak_nbytes + activations) / 1e9:.1f}",
        "loss": f"{losses[-1]:.6f}",
    }


def largest(device: torch.device, shapes: Sequence[str], tokens: int, seconds: float) -> list[dict[str, str]]:
    """Prints and returns a row for each shape that fits and for which there is time."""
    end, pace = time.monotonic() + seconds, {"built s": _BUILT_S, "s/step": _STEP_S}
    print(f"{torch.get_num_threads()} threads of the host, {tokens:,} tokens a step, {_STEPS} steps", flush=True)
    rows: list[dict[str, str]] = []
    failed: list[str] = []
    for text in shapes:
        try:
            rows += list(_row(text, device, tokens, end, pace, failed))
        except Exception as error:
            print("".join(traceback.format_exception(error))[-1500:], flush=True)
            failed.append(" ".join([f"{text}: {type(error).__name__}:", *str(error).splitlines()[:2]])[:300])
        held = forget(device)
        if held:
            print(f"{text}: {held}", flush=True)
    print("\n".join(["", *([table(rows)] if rows else []), *failed]), flush=True)
    return rows


def _row(
    text: str, device: torch.device, tokens: int, end: float, pace: dict[str, float], failed: list[str]
) -> Iterator[dict[str, str]]:
    """One row if there is room and time; how fast it went is kept for the next one. Else `failed` is told."""
    shape, there = Shape.named(text), (device_nbytes(device), host_nbytes())
    rest = fitting(shape, tokens, *there)
    said = f"{text}, {shape.numel / 1e9:.2f} B parameters"
    kept = f"{HOST_KEPT_FREE >> 30} GiB kept free"
    room = f"{there[0] / 1e9:.1f} GB of the device, {there[1] / 1e9:.1f} GB of the host ({kept})"
    if rest is None:
        failed.append(f"{said}: fits nowhere in {room}; all on the host is {18 * shape.numel / 1e9:.1f} GB")
        return
    taken = [each * shape.numel / 1e9 for each in (rest.device, rest.host)]
    print(f"{said}: {rest}; {taken[0]:.1f} and {taken[1]:.1f} GB at rest, of {room}", flush=True)
    needed = pace["built s"] * taken[1] + _STEPS * pace["s/step"] * shape.numel / 1e9
    left = end - time.monotonic()
    if needed > left:
        failed.append(f"{said}: {rest}; takes about {needed:.0f} s, {left:.0f} s are left")
        return
    row = trained(shape, rest, device, tokens)
    pace["s/step"] = float(row["s/step"]) / (shape.numel / 1e9)
    if rest.host:
        pace["built s"] = float(row["built s"]) / taken[1]
    yield row
