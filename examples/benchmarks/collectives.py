"""Each collective of zero_fn against torch's and against a copy of the same bytes, interleaved.

    python examples/benchmarks/collectives.py --mb 64 --ranks 2 4

One tensor of the given size on each rank. In each round every candidate runs once, in rotating order:

    memcpy            every rank copies as many bytes as it receives, at once: the limit for ranks of one host
    torch             `all_gather_into_tensor`, `reduce_scatter_tensor`, `all_reduce` of the process group
    zero_fn           the transport that a transform uses on this backend, in place
    zero_fn sockets   the same exchange where memory cannot be shared (gloo only)

Ratios are medians over rounds of the time in the same round, with 95 % bootstrap intervals.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from measured import ratios_of, shown, table
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import zero_fn as zf
from zero_fn.transport.exchange import Exchange
from zero_fn.transport.line import Transport
from zero_fn.transport.links import open_transport
from zero_fn.transport.segment import Contribution, Segment
from zero_fn.values.mesh import mesh_axis

Run = Callable[[], object]


def candidates(numel: int, dtype: torch.dtype, device: torch.device) -> dict[str, dict[str, Run]]:
    """By operation, what does it; all work on the same memory."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (size,), mesh_dim_names=("dp",))
    piece_numel = numel // size
    whole = torch.ones(piece_numel * size, dtype=dtype, device=device)
    piece = torch.ones(piece_numel, dtype=dtype, device=device)
    received = torch.empty(piece_numel * (size - 1), dtype=dtype, device=device)
    gather, scatter = _method("all_gather"), _method("reduce_scatter")

    def with_transport(moves: Transport) -> dict[str, Run]:
        gathers = moves.gather_plan([Segment(whole, whole.numel(), piece_numel)])
        reduces = moves.reduce_plan([Contribution(whole, piece_numel, piece, dtype)], [piece])

        def both() -> None:
            moves.reduce_scatter(reduces, [whole], [piece]).wait()
            moves.all_gather(gathers).wait()

        return {
            "all-gather": lambda: moves.all_gather(gathers).wait(),
            "reduce-scatter": lambda: moves.reduce_scatter(reduces, [whole], [piece]).wait(),
            "all-reduce": both,
        }

    copy: Run = lambda: received.copy_(whole[: received.numel()])  # noqa: E731
    by_name: dict[str, dict[str, Run]] = {
        "memcpy": {"all-gather": copy, "reduce-scatter": copy, "all-reduce": lambda: (copy(), copy())},
        "torch": {
            "all-gather": lambda: gather(whole, piece),
            "reduce-scatter": lambda: scatter(piece, whole),
            "all-reduce": lambda: dist.all_reduce(whole),
        },
        "zero_fn": with_transport(open_transport(mesh_axis(mesh["dp"], verb="collectives"))),
    }
    if dist.get_backend() == "gloo":
        by_name["zero_fn sockets"] = with_transport(Exchange(mesh.get_group(), rank, size))
    operations = ("all-gather", "reduce-scatter", "all-reduce")
    return {operation: {name: runs[operation] for name, runs in by_name.items()} for operation in operations}


def _method(name: str) -> Callable[[Tensor, Tensor], object]:
    """A collective of torch on whole tensors; 2.13 renamed them."""
    old = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}[name]
    found: Callable[[Tensor, Tensor], object] = getattr(dist, f"{name}_single", None) or getattr(dist, old)
    return found


def measure(mb: float, dtype: torch.dtype, rounds: int, device_type: str) -> dict[str, dict[str, list[float]]]:
    """Seconds of each round on this rank, by operation and candidate."""
    torch.set_num_threads(1)
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device("cuda", dist.get_rank())
        torch.cuda.set_device(device)
    times: dict[str, dict[str, list[float]]] = {}
    for operation, runs in candidates(int(mb * 2**20) // dtype.itemsize, dtype, device).items():
        times[operation] = {name: [] for name in runs}
        names = list(runs)
        for number in range(rounds + 2):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                dist.barrier()
                began = time.perf_counter()
                runs[name]()
                if device_type == "cuda":
                    torch.cuda.synchronize()
                dist.barrier()
                if number >= 2:
                    times[operation][name].append(time.perf_counter() - began)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=float, nargs="+", default=[64.0], help="MiB of the whole tensor")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for mb in args.mb:
        for ranks in args.ranks:
            dtype = getattr(torch, args.dtype)
            times = zf.launch(measure, ranks, mb, dtype, args.rounds, device, timeout_s=None)[0]
            print(f"\n{mb:g} MiB {args.dtype}, {ranks} ranks, {device}")
            rows = [
                {
                    "": operation,
                    "by": name,
                    "ms": f"{statistics.median(seconds) * 1e3:.2f}",
                    "/ torch": shown(ratios_of(seconds, found["torch"])),
                    "/ memcpy": shown(ratios_of(seconds, found["memcpy"])),
                }
                for operation, found in times.items()
                for name, seconds in found.items()
            ]
            print(table(rows), flush=True)


if __name__ == "__main__":
    main()
