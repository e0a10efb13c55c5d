"""One accelerator: training steps of a GPT with more and more on the host and on a disk, beside plain torch and FSDP2.

    python examples/benchmarks/accelerator.py --gpt 24x2048x1024 --tokens 8192 16384 65536 --seconds 150
    python examples/benchmarks/accelerator.py --traces FOLDER --seconds 60
    python examples/benchmarks/accelerator.py --largest --seconds 45

The ways are those of `accelerator_ways.py`. Each is built once, on the device, and steps all counts of tokens, whose norm of
gradients is clipped each time. Before it the arithmetic of its memory is printed; what does not fit is refused. Where
activations do not fit, every way recomputes its blocks in the backward. A way has its share of the seconds: two steps of each
count to warm up, then two at least are timed, and `--rounds` at most. What fails is a row with its error.

    %                of the multiplications of a matrix product in the same time; recomputed ones do not count
    / plain          time of a step, against the plain way with as many tokens
    to, from GB      planned to cross the link in a step, gradients as float32 though half of that may travel; for others than
                     zero_fn by arithmetic
    host GB          planned to be taken there
    device GB, plan  most memory of the device, measured and planned with activations
    loss @ step      the last one; those of ways with equal steps agree where the arithmetic does

With --traces FOLDER a step of "device" and of the ways that offload is profiled (`accelerator_traces.py`), with the middle
count of tokens; unless counts are named, there are no other ways, counts and rounds. With --largest the largest models are
trained that fit (`accelerator_largest.py`). The bounds of all this are measured by `accelerator_bounds.py`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import traceback
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from accelerator_bounds import product_flops
from accelerator_largest import SHAPES, largest
from accelerator_traces import profiled
from accelerator_ways import WAYS, Shape, Trained, built_on, device_nbytes, forget, host_nbytes
from measured import table
from torch import Tensor

_WARM = 2
_TIMED = ["plain", "device", "host", "host, forward", "host, 16 bits", "FSDP2, host", "states", "FSDP2", "plain, again"]
_TRACED = ["device", "host", "host, forward", "FSDP2, host", "states"]
_KEPT_FOR_LAST_S = 8.0
_AROUND_S = 15.0  # of the time that is asked for, to begin and to end a process


class Cell:
    """Some steps of one way with one count of tokens."""

    def __init__(self, trained: Trained, tokens: Tensor) -> None:
        self.trained, self.tokens = trained, tokens
        self.seconds: list[float] = []
        self.host_seconds: list[float] = []  # until the step had been issued
        self.loss = 0.0

    def run(self, rounds: int, until: float) -> None:
        """Warms up, and times steps until their number is enough or the time is up."""
        for turn in range(_WARM + rounds):
            if turn >= _WARM + min(2, rounds) and time.monotonic() > until:
                break
            torch.accelerator.synchronize()
            start = time.perf_counter()
            loss = self.trained.step(self.tokens)
            issued = time.perf_counter()
            torch.accelerator.synchronize()
            if turn >= _WARM:
                self.seconds.append(time.perf_counter() - start)
                self.host_seconds.append(issued - start)
        self.loss = loss.item()


class Steps:
    """All ways, one after another."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self._options, self._device, self._shape = options, device, Shape.named(options.gpt)
        self._end = time.monotonic() + options.seconds - _AROUND_S
        self._flops = product_flops(device, options.product)
        self._plain: dict[int, float] = {}
        self._counts = [max(count // self._shape.sequence, 1) * self._shape.sequence for count in options.tokens]
        generator = torch.Generator().manual_seed(1)
        forms = [(count // self._shape.sequence, self._shape.sequence + 1) for count in self._counts]
        self._tokens = [torch.randint(256, form, generator=generator).to(device) for form in forms]

    def rows(self) -> Iterator[dict[str, str]]:
        ways, numel, shape = self._options.ways, self._shape.numel, self._shape
        print(
            f"GPT {self._options.gpt}, {numel / 1e6:,.0f} M parameters, {torch.get_num_threads()} threads of the host"
        )
        print(f"{self._flops / 1e12:,.1f} TFLOP/s of a matrix product in bfloat16", flush=True)
        for count in self._counts:
            acts = [shape.activations_nbytes(count, recomputes=recomputes) / 1e9 for recomputes in (False, True)]
            how = ", so all ways recompute" if self._recomputes(count) else ""
            print(f"{count:,} tokens: activations {acts[0]:.1f} GB, recomputed {acts[1]:.1f} GB{how}", flush=True)
        for number, way in enumerate(ways):
            later = len(ways) - number - 1
            left = self._end - time.monotonic()
            kept = _KEPT_FOR_LAST_S if later and ways[-1] == "plain, again" else 0.0
            yield from self._of(way, time.monotonic() + (left - kept) / (later + 1 if not kept else later))

    def _recomputes(self, count: int) -> bool:
        """Where the way that takes the most of the device would not fit otherwise."""
        if self._options.recompute_from is not None:
            return count >= int(self._options.recompute_from)
        most = max(way.device for way in WAYS.values()) * self._shape.numel + self._shape.in_use_nbytes
        return most + self._shape.activations_nbytes(count, recomputes=False) > device_nbytes(self._device)

    def _of(self, way: str, until: float) -> Iterator[dict[str, str]]:
        started, names = time.monotonic(), ", ".join(f"{count:,}" for count in self._counts)
        if until <= started:
            yield self._failed(way, names, "no time was left")
            return
        refused = self._refused(way)
        if refused:
            yield self._failed(way, names, refused)
            return
        try:
            trained = WAYS[way].build(built_on(self._device, self._shape), self._options.path or "")
            torch.accelerator.synchronize()
        except Exception as error:
            yield self._failed(way, names, _said(error))
            trained = None
        if trained is not None:
            print(f"{way}: built in {time.monotonic() - started:.1f} s", flush=True)
            steps = 0
            for number, tokens in enumerate(self._tokens):
                now = time.monotonic()
                if number and now > until:
                    yield self._failed(way, f"{self._counts[number]:,}", "the time of this way was up")
                    continue
                cell = Cell(trained, tokens)
                try:
                    steps = yield from self._cell(way, cell, now + (until - now) / (len(self._tokens) - number), steps)
                except Exception as error:
                    yield self._failed(way, f"{self._counts[number]:,}", _said(error))
                    trained.model.zero_grad()
                    for parameter in trained.parameters:
                        parameter.grad = None
            del trained, cell
        held = forget(self._device)
        if held:
            print(f"{way}: {held}", flush=True)

    def _refused(self, way: str) -> str:
        """Why a way does not fit; empty if it does. Prints the arithmetic."""
        numel, shape, each = self._shape.numel, self._shape, WAYS[way]
        most = max(shape.activations_nbytes(count, recomputes=self._recomputes(count)) for count in self._counts)
        needed = each.device * numel + shape.in_use_nbytes + most, each.host * numel
        there = device_nbytes(self._device), host_nbytes()
        pairs = zip(("device", "host"), needed, there, strict=True)
        said = ", ".join(f"{name} {nbytes / 1e9:.1f} of {room / 1e9:.1f} GB" for name, nbytes, room in pairs)
        print(f"{way}: {said}, {each.device} and {each.host} bytes a parameter", flush=True)
        return f"does not fit: {said}" if needed[0] > there[0] or needed[1] > there[1] else ""

    def _cell(self, way: str, cell: Cell, until: float, before: int) -> Generator[dict[str, str], None, int]:
        """One row. Returns the steps of this model so far."""
        count, shape = cell.tokens[:, 1:].numel(), self._shape
        recomputes = cell.trained.model.recomputes = self._recomputes(count)
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        cell.run(self._options.rounds, until)
        steps = before + _WARM + len(cell.seconds)
        found = statistics.median(cell.seconds)
        if way.startswith("plain"):
            self._plain.setdefault(count, found)
        activations, each = shape.activations_nbytes(count, recomputes=recomputes), WAYS[way]
        link, host = [rate * shape.numel for rate in each.link], each.host * shape.numel
        planned = each.device * shape.numel + shape.in_use_nbytes
        if cell.trained.plan is not None:
            plan = cell.trained.plan()
            link, host, planned = list(plan.link), plan.host_nbytes, plan.peak_nbytes
        peak = torch.cuda.max_memory_allocated() if self._device.type == "cuda" else None
        yield {
            "way": way,
            "tokens": f"{count:,}" + (" (recomputed)" if recomputes else ""),
            "ms": f"{1e3 * found:,.1f}",
            "host ms": f"{1e3 * statistics.median(cell.host_seconds):,.1f}",
            "tokens/s": f"{count / found:,.0f}",
            "%": f"{100 * shape.flops(count) / found / self._flops:.1f}",
            "/ plain": f"{found / self._plain[count]:.3f}" if count in self._plain else "",
            "to GB": f"{link[0] / 1e9:.2f}",
            "from GB": f"{link[1] / 1e9:.2f}",
            "host GB": f"{host / 1e9:.1f}",
            "device GB": "" if peak is None else f"{peak / 1e9:.1f}",
            "plan": f"{(planned + activations) / 1e9:.1f}",
            "loss @ step": f"{cell.loss:.6f} @ {steps}",
        }
        if self._options.traces is not None and way in _TRACED and count == self._counts[len(self._counts) // 2]:
            for line in profiled(lambda: cell.trained.step(cell.tokens), Path(self._options.traces), way):
                print(f"{way}, {count:,} tokens: {line}", flush=True)
            steps += 1
        return steps

    @staticmethod
    def _failed(way: str, count: str, why: str) -> dict[str, str]:
        return {"way": way, "tokens": count, "failed": why}


def _said(error: Exception) -> str:
    """The first two lines of an error; the end of its traceback is printed."""
    print("".join(traceback.format_exception(error))[-1500:], flush=True)
    return " ".join([f"{type(error).__name__}:", *str(error).splitlines()[:2]])[:300]


def shown(rows: Sequence[dict[str, str]]) -> str:
    """All rows as one table, and below it what failed."""
    well = [row for row in rows if "failed" not in row]
    failed = [f"{row['way']}, {row['tokens']} tokens: {row['failed']}" for row in rows if "failed" in row]
    return "\n".join([*([table(well)] if well else []), *failed])


def steps(options: argparse.Namespace, device: torch.device) -> list[dict[str, str]]:
    """Prints a row for each way and count of tokens, and all of them in the end."""
    rows = []
    try:
        for row in Steps(options, device).rows():
            rows.append(row)
            named = (value if name in ("way", "failed") else f"{name} {value}" for name, value in row.items())
            print("  ".join(named), flush=True)
    finally:
        print(f"\n{shown(rows)}", flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> list[dict[str, str]]:
    """Returns the rows of the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--path", help='a folder of a disk, for the way "disk"')
    parser.add_argument("--gpt", default="24x2048x1024", help="layers x width x sequence")
    parser.add_argument("--tokens", type=int, nargs="+", help="of a step; None: 8, 16 and 64 K, or else 16 K")
    parser.add_argument(
        "--recompute-from", type=int, help="tokens from which blocks are recomputed; None: by arithmetic"
    )
    parser.add_argument("--rounds", type=int, help="timed steps of a cell, at most; None: 4, or else 1")
    parser.add_argument("--seconds", type=float, default=150, help="for everything")
    parser.add_argument("--traces", help="a folder: a step of some ways is profiled, and its trace written there")
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, help="None: all of this device, beside CUDA without disk, stages"
    )
    parser.add_argument("--threads", type=int, help="of the host; None: its cores, 16 at most, beside CUDA")
    parser.add_argument("--product", type=int, default=8192, help="width of the matrix product")
    parser.add_argument("--largest", action="store_true", help="the largest models that train, and nothing else")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="of the largest models")
    options = parser.parse_args(arguments)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None:
        raise SystemExit("there is no accelerator; examples/benchmarks/offload.py is for the CPU")
    if options.threads is not None or device.type == "cuda":
        torch.set_num_threads(options.threads or min(os.cpu_count() or 1, 16))
    is_short = options.largest or (options.traces is not None and options.tokens is None)
    if options.ways is None:
        cuda = _TRACED if is_short else _TIMED
        options.ways = cuda if device.type == "cuda" else [way for way in WAYS if not way.startswith("FSDP2")]
    options.tokens = options.tokens or ([16384] if is_short else [8192, 16384, 65536])
    options.rounds = options.rounds or (1 if is_short else 4)
    begun = dist.is_initialized()
    try:
        if options.largest:
            return largest(device, options.shapes, options.tokens[-1], options.seconds - _AROUND_S)
        return steps(options, device)
    finally:
        if dist.is_initialized() and not begun:
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
