"""What the links, the host and the device allow: the bounds that training steps are measured against.

    python examples/benchmarks/accelerator_bounds.py --path /local_nvme --seconds 25

copies        pinned memory to the device, from it, and both at once; whole, in pieces, and beside a matrix product
registration  seconds that pinning takes for each GiB, of memory that was touched before or not
host          its memory, and AdamW by threads: torch's fused one, and that of `zf.streamed`
device        its memory, a matrix product in bfloat16, AdamW
small copy    of 4 KiB to the device, begun behind one of 1 GiB: in one piece, in pieces, with a kernel between them
disk          what `zf.distributed.measure_links` says
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import zero_fn as zf
from zero_fn.storage.host_memory import map_memory

_MIB = 1 << 20


def seconds(run: Callable[[], object], rounds: int = 5) -> float:
    """The median of some runs, the device waited for; the first two do not count."""
    times = []
    for _ in range(rounds + 2):
        torch.accelerator.synchronize()
        start = time.perf_counter()
        run()
        torch.accelerator.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def product_flops(device: torch.device, width: int) -> float:
    """Multiplications and additions that a square matrix product in bfloat16 does in a second."""
    one, other, out = (_matrix(device, width) for _ in range(3))
    return 2 * width**3 / seconds(lambda: torch.mm(one, other, out=out))


def _matrix(device: torch.device, width: int) -> Tensor:
    """Of random values: a product of equal ones takes less power, and is faster."""
    return torch.randn(width, width, device=device).bfloat16()


def bounds(device: torch.device, path: str | None, numel: int, most_seconds: float) -> Iterator[str]:
    """Lines, until there is no time for another question. `numel` is that of an AdamW; copies take 20 bytes of each."""
    end = time.monotonic() + most_seconds
    nbytes = min(20 * numel, 1 << 30) // 4096 * 4096
    questions: list[tuple[str, Callable[[], Iterator[str]]]] = [
        ("copies", lambda: _copies(device, nbytes)),
        ("AdamW and memory of the host", lambda: _host(numel)),
        ("the device", lambda: _on_device(device, numel)),
    ]
    if device.type == "cuda":
        questions += [
            ("a small copy", lambda: _behind(device, nbytes)),
            ("registration", lambda: _registration(nbytes, 8)),
        ]
    if path is not None:
        questions.append(
            ("the disk", lambda: iter(str(zf.distributed.measure_links(path=path, nbytes=4 * numel)).splitlines()))
        )
    for name, ask in questions:
        started = time.monotonic()
        try:
            for line in ask():
                yield line
                if time.monotonic() > end:
                    yield f"no time is left for more of {name}"
                    return
        except Exception as error:
            yield f"{name}: {type(error).__name__}: {' '.join(str(error).splitlines()[:2])}"
        yield f"({name}: {time.monotonic() - started:.1f} s)"


def _copies(device: torch.device, nbytes: int) -> Iterator[str]:
    is_pinned = device.type == "cuda"
    one, two = (torch.ones(nbytes, dtype=torch.uint8, pin_memory=is_pinned) for _ in range(2))
    here, there = torch.ones(2, nbytes, dtype=torch.uint8, device=device)
    to, back = torch.Stream(device), torch.Stream(device)
    width = 8192 if is_pinned else 64
    matrix, product = (_matrix(device, width) for _ in range(2))

    def copied(piece: int, *, to_it: bool, from_it: bool, products: int) -> float:
        def run() -> None:
            for _ in range(products):
                torch.mm(matrix, matrix, out=product)
            for is_asked, stream, target, source in ((to_it, to, here, one), (from_it, back, two, there)):
                with stream:
                    for begin in range(0, nbytes if is_asked else 0, piece):
                        target[begin : begin + piece].copy_(source[begin : begin + piece], non_blocking=True)
            to.synchronize()
            back.synchronize()

        times = []
        for _ in range(5):
            torch.accelerator.synchronize()
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        return nbytes * (to_it + from_it) / statistics.median(times[1:]) / 1e9

    # Products that run for as long as the copies do.
    product_s = seconds(lambda: torch.mm(matrix, matrix, out=product))
    products = max(1, int(2 * nbytes / 50e9 / product_s)) if is_pinned else 1
    for piece in sorted({min(size * _MIB, nbytes) for size in (4, 32, 256)}):
        for beside, count in (("", 0), (", beside a matrix product", products)):
            speeds = [
                copied(piece, to_it=to_it, from_it=from_it, products=count)
                for to_it, from_it in ((True, False), (False, True), (True, True))
            ]
            said = "to {:.1f}, from {:.1f}, both at once {:.1f} GB/s".format(*speeds)
            yield f"pinned, pieces of {piece / _MIB:g} MiB{beside}: {said}"
    if is_pinned:
        alone = seconds(lambda: [torch.mm(matrix, matrix, out=product) for _ in range(products)])

        def both() -> None:
            with to:
                here.copy_(one, non_blocking=True)
            with back:
                two.copy_(there, non_blocking=True)
            for _ in range(products):
                torch.mm(matrix, matrix, out=product)

        yield f"matrix products take {seconds(both) / alone:.3f} of their time with copies both ways beside them"


def _host(numel: int) -> Iterator[str]:
    before = torch.get_num_threads()
    one, two = (torch.ones(numel) for _ in range(2))
    cores = os.cpu_count() or 1
    try:
        for threads in sorted({1, 2, 4, 8, 16} & set(range(1, cores + 1))):
            torch.set_num_threads(threads)
            rounds = 3 if threads > 2 else 1
            copied = 8 * numel / seconds(lambda: two.copy_(one), rounds) / 1e9
            said = [f"copies {copied:.1f} GB/s read and written"]
            for name, is_ours in (("torch's AdamW", False), ("that of zf.streamed", True)):
                parameter = nn.Parameter(torch.ones(numel))
                parameter.grad = torch.ones_like(parameter)
                optimizer: Any = torch.optim.AdamW([parameter], fused=True)
                if is_ours:
                    optimizer = zf.streamed(optimizer, zf.cpu(pinned=False))
                step_s = seconds(optimizer.step, rounds)
                said.append(
                    f"{name} {1e12 * step_s / numel:.0f} ms for a billion, {28 * numel / step_s / 1e9:.0f} GB/s"
                )
            yield f"host, {threads:2} threads: {'; '.join(said)}"
    finally:
        torch.set_num_threads(before)


def _on_device(device: torch.device, numel: int) -> Iterator[str]:
    one, two = torch.ones(2, numel, device=device)
    yield f"device: copies {8 * numel / seconds(lambda: two.copy_(one)) / 1e9:.0f} GB/s read and written"
    width = 8192 if device.type == "cuda" else 64
    yield f"device: matrix product of {width} in bfloat16 {product_flops(device, width) / 1e12:.1f} TFLOP/s"
    parameter = nn.Parameter(torch.ones(numel, device=device))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=device.type == "cuda")
    yield f"device: AdamW {1e12 * seconds(optimizer.step) / numel:.1f} ms for a billion"


def _behind(device: torch.device, nbytes: int) -> Iterator[str]:
    """How long a small copy takes that is begun behind a large one."""
    large, small = (torch.ones(size, dtype=torch.uint8, pin_memory=True) for size in (nbytes, 4096))
    place, small_place = (torch.empty(size, dtype=torch.uint8, device=device) for size in (nbytes, 4096))
    counter = torch.zeros(1, device=device)
    stream, own = torch.Stream(device), torch.Stream(device)

    def after(piece: int | None, *, has_kernel: bool) -> float:
        times = []
        for _ in range(5):
            torch.accelerator.synchronize()
            if piece is not None:
                with stream:
                    for begin in range(0, nbytes, piece):
                        place[begin : begin + piece].copy_(large[begin : begin + piece], non_blocking=True)
                        if has_kernel:
                            counter.add_(1)
            start = time.perf_counter()
            with own:
                small_place.copy_(small, non_blocking=True)
            own.synchronize()
            times.append(time.perf_counter() - start)
            torch.accelerator.synchronize()
        return 1e3 * statistics.median(times)

    said = [f"alone {after(None, has_kernel=False):.3f} ms"]
    for name, piece, has_kernel in (
        ("one piece", nbytes, False),
        ("pieces of 32 MiB", 32 * _MIB, False),
        ("such pieces with a kernel between", 32 * _MIB, True),
    ):
        said.append(f"{name} {after(piece, has_kernel=has_kernel):.3f} ms")
    yield f"4 KiB to the device behind {nbytes / _MIB:.0f} MiB: {', '.join(said)}"


def _registration(least_nbytes: int, times: int) -> Iterator[str]:
    """Seconds for each GiB."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    for nbytes in (least_nbytes, times * least_nbytes):
        said = []
        for is_touched in (True, False):
            mapped = map_memory(nbytes, "a registration")
            memory: Tensor = torch.frombuffer(mapped, dtype=torch.uint8)
            address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
            start = time.perf_counter()
            if is_touched:
                memory.fill_(0)
            touched = time.perf_counter()
            code = int(runtime.cudaHostRegister(address, nbytes, 0))
            done = time.perf_counter()
            if code:
                raise RuntimeError(f"cudaHostRegister returned {code}")
            runtime.cudaHostUnregister(address)
            gone = time.perf_counter()
            each = nbytes / (1 << 30)
            touching = f"touched in {(touched - start) / each:.3f}, then " if is_touched else "untouched "
            said.append(f"{touching}registered in {(done - touched) / each:.3f}, dropped in {(gone - done) / each:.3f}")
            del memory, mapped
        yield f"{nbytes / (1 << 30):.1f} GiB, seconds for each GiB: {'; '.join(said)}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--path", help="a folder of a disk, to measure it, too")
    parser.add_argument("--seconds", type=float, default=25, help="after them no other question is asked")
    parser.add_argument("--numel", type=int, default=1 << 26, help="elements of an AdamW")
    options = parser.parse_args(arguments)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None:
        raise SystemExit("there is no accelerator")
    for line in bounds(device, options.path, options.numel, options.seconds):
        print(line, flush=True)


if __name__ == "__main__":
    main()
