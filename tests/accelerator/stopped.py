"""Each collective of the transport between ranks on an accelerator, beside arithmetic; then the stages; then a rank that
stops.

`python -m tests.accelerator.collectives BACKEND FOLDER RANK SIZE` prints a line for each: its name, "right" or what is wrong,
and its milliseconds, where it waits for each collective those of the collectives. Other ranks print what is wrong only.
BACKEND is "nccl" or "gloo" on CUDA, or the compiled library of the device "pretend". After an exception there are no more:
the other rank waits.
"""

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from math import isqrt
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

import zero_fn as zf
from tests.accelerator import device
from tests.accelerator.programs import adamw, batches, net
from tests.support.collectives import gather, reduce
from zero_fn.transport.agree import Bits
from zero_fn.transport.links import line_over
from zero_fn.transport.native import Native
from zero_fn.transport.segment import Contribution, Segment
from zero_fn.values.mesh import mesh_axis

__all__ = ["CASES"]

NUMELS = (1, 3, 2, 64, 4097, 1 << 20, (1 << 20) + 1)
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
OTHERS = (torch.uint8, torch.bool, torch.int64, torch.complex64, torch.float8_e4m3fn)
DEADLINE_S = 2.0
Case = Callable[["Ranks"], None]
CASES = {}


def case(name, *arguments):
    def named(function):
        CASES[name] = lambda ranks: function(ranks, *arguments)
        return function

    return named


class Ranks:
    """What the cases are told: the mesh, its transport, and the time that collectives took."""

    def __init__(self, mesh):
        self.mesh, self.links = mesh, line_over([mesh_axis(mesh, verb="a test")])
        self.rank, self.size, self.seconds = self.links.rank, self.links.size, 0.0
        assert isinstance(self.links.raw, Native)
        self.transport = self.links.raw

    def done(self, begin, payload):
        """Begins a collective and waits for it, and for the device."""
        torch.accelerator.synchronize()
        started = time.monotonic()
        begin(payload).wait()
        torch.accelerator.synchronize()
        self.seconds += time.monotonic() - started


def numbers(rank, numel, dtype):
    """Whole numbers below 8, which every dtype holds, and whose sums are exact."""
    return ((torch.arange(numel) * 7 + numel + 5 * rank) % 8).to(dtype)


def require_same(found, expected, what):
    found = found.cpu().clone(memory_format=torch.contiguous_format)  # strides too, where there is one element
    if not torch.equal(found.view(torch.uint8), expected.contiguous().view(torch.uint8)):
        wrong = (found != expected).nonzero().flatten()[:4].tolist() if found.dtype in FLOATS else "?"
        raise AssertionError(f"{what}: wrong from element {wrong} of {expected.numel()}")


def gathered(ranks, dtypes, numels, *, apart):
    """All-gathers of several tensors at once, which lie at odd places; `apart`: pieces of even ones rest elsewhere."""
    segments = []
    expected = []
    for dtype in dtypes:
        memory = torch.zeros(sum(numel + ranks.size for numel in numels), dtype=dtype, device=device.NAME)
        start = 1
        for numel in numels:
            piece, whole = -(-numel // ranks.size), numbers(9, numel, dtype)
            own = whole[ranks.rank * piece : (ranks.rank + 1) * piece].to(device.NAME)
            rests_apart = apart and numel == piece * ranks.size
            segments.append(Segment(memory, numel, piece, start=start, source=own if rests_apart else None))
            if not rests_apart:
                segments[-1].piece(ranks.rank).copy_(own)
            expected.append(whole)
            start += piece * ranks.size + 1
    ranks.done(partial(gather, ranks.transport), segments)
    for segment, whole in zip(segments, expected, strict=True):
        found = segment.memory.as_strided((segment.numel,), (1,), segment.start)
        require_same(found, whole, f"{whole.dtype}[{segment.numel}]")


for _dtype in (*FLOATS, *OTHERS):
    case(f"all-gather, {_dtype}", (_dtype,), NUMELS)(partial(gathered, apart=False))
    case(f"all-gather of pieces that rest apart, {_dtype}", (_dtype,), NUMELS)(partial(gathered, apart=True))
case("all-gather of several dtypes", (*FLOATS, *OTHERS), NUMELS)(partial(gathered, apart=True))
case("all-gather of nothing", (torch.float32,), (0, 5))(partial(gathered, apart=False))


def reduced(ranks, kinds, numels, *, together):
    """Reductions of several tensors at once; `together`: their means lie back to back."""
    contributions = []
    expected = []
    for dtype, total in kinds:
        sizes = [-(-numel // ranks.size) for numel in numels]
        means = torch.zeros(sum(sizes), dtype=total, device=device.NAME)
        places = means.split(sizes) if together else [torch.zeros_like(place) for place in means.split(sizes)]
        for numel, piece, place in zip(numels, sizes, places, strict=True):
            addends = [numbers(rank, numel, dtype).to(total) for rank in range(ranks.size)]
            own = slice(ranks.rank * piece, (ranks.rank + 1) * piece)
            expected.append((sum(addends[1:], addends[0]) / ranks.size)[own])
            rows, side = numbers(ranks.rank, numel, dtype).to(device.NAME), isqrt(numel)
            if side > 1 and side * side == numel:  # a gradient often comes transposed
                rows, piece = rows.view(side, side).t().contiguous().t(), -(-side // ranks.size)
            contributions.append(Contribution(rows, piece, place[: len(expected[-1])], total))
    ranks.done(partial(reduce, ranks.transport), contributions)
    for contribution, mean in zip(contributions, expected, strict=True):
        require_same(contribution.out, mean, f"{mean.dtype}[{contribution.rows.numel()}]")


for _dtype in (*FLOATS, torch.complex64):
    for _together in (False, True):
        _name = f"reduce-scatter{' to one buffer' * _together}, {_dtype}"
        case(_name, ((_dtype, _dtype),), NUMELS)(partial(reduced, together=_together))
case("reduce-scatter of bfloat16 in float32", ((torch.bfloat16, torch.float32),), NUMELS)(
    partial(reduced, together=True)
)
case("reduce-scatter of several dtypes", tuple((dtype, dtype) for dtype in FLOATS), NUMELS)(
    partial(reduced, together=True)
)


@case("broadcast, as an all-gather of what rank 0 holds")
def of_first(ranks):
    for numel in NUMELS:
        whole = numbers(9, numel, torch.float32)
        memory = whole.to(device.NAME) if ranks.rank == 0 else torch.zeros(numel, device=device.NAME)
        ranks.done(partial(gather, ranks.transport), [Segment(memory, numel, numel)])
        require_same(memory, whole, numel)


@case("all-to-all of several dtypes, from every rank, from one and from none")
def to_others(ranks):
    others, here = [rank for rank in range(ranks.size) if rank != ranks.rank], torch.device(device.NAME)
    for senders in (range(ranks.size), (0,), ()):
        dtypes = [(*FLOATS, *OTHERS) if rank in senders else () for rank in range(ranks.size)]
        sends = [[] for _ in range(ranks.size)]
        places = [[] for _ in range(ranks.size)]
        for rank in others:
            own, theirs = dtypes[ranks.rank], dtypes[rank]
            sends[rank] = [numbers(ranks.rank, numel, dtype).to(here) for dtype in own for numel in NUMELS]
            places[rank] = [torch.zeros(numel, 2, dtype=d, device=here)[:, 1] for d in theirs for numel in NUMELS]
        ranks.done(partial(ranks.transport.all_to_all, places=places, device=here), sends)
        for rank in others:
            for place in places[rank]:
                require_same(place, numbers(rank, len(place), place.dtype), place.dtype)


@case("any")
def ored(ranks):
    for numel in NUMELS:
        bits = [numbers(rank, numel, torch.uint8) // 7 for rank in range(ranks.size)]
        own = bits[ranks.rank].to(device.NAME)
        ranks.done(ranks.transport.any, own)
        require_same(own, torch.stack(bits).amax(0), numel)


@case("exchange")
def exchanged(ranks):
    for numel in NUMELS:
        found = ranks.links.exchange(numbers(ranks.rank, numel, torch.uint8))
        require_same(found, torch.stack([numbers(rank, numel, torch.uint8) for rank in range(ranks.size)]), numel)


@case("many under way, their memory taken anew at once")
def many(ranks):
    numel, under_way = 1 << 18, []
    for number in range(8):
        rows = torch.full((numel,), float(number + ranks.rank), device=device.NAME)
        out = torch.empty(numel // ranks.size, device=device.NAME)
        reduction = reduce(ranks.transport, [Contribution(rows, len(out), out, torch.float32)])
        memory = torch.empty(numel, device=device.NAME)
        source = torch.full((numel // ranks.size,), float(number + ranks.rank), device=device.NAME)
        arrival = gather(ranks.transport, [Segment(memory, numel, len(source), source=source)])
        del rows, source
        under_way.append((number, reduction, out, arrival, memory))
    for number, reduction, out, arrival, memory in under_way:
        reduction.wait()
        arrival.wait()
        junk = torch.full((numel,), -1.0, device=device.NAME)
        require_same(out, torch.full((len(out),), number + (ranks.size - 1) / 2), f"sum {number}")
        expected = [torch.full((numel // ranks.size,), float(number + rank)) for rank in range(ranks.size)]
        require_same(memory, torch.cat(expected), f"gather {number}")
        del junk


@case("bits beside the computation")
def beside(ranks):
    busy = torch.ones(512, 512, device=device.NAME)
    for number in range(10):
        busy = (busy @ busy).clamp_(-1, 1)
        bits = [(number + rank) % 3 == 0 for rank in range(3)]
        own = [bit and rank % ranks.size == ranks.rank for rank, bit in enumerate(bits)]
        Bits(ranks.links, own, "nothing that is read")
        found = Bits(ranks.links, own, "a test").read()
        assert found == bits, (number, found, bits)


@case("dropped before their end")
def dropped(ranks):
    for number in range(4):
        rows = torch.full((1 << 16,), float(number), device=device.NAME)
        out = torch.empty(len(rows) // ranks.size, device=device.NAME)
        reduce(ranks.transport, [Contribution(rows, len(out), out, torch.float32)])
        ranks.transport.any(torch.ones(3, dtype=torch.uint8, device=device.NAME))
    exchanged(ranks)


def stages(ranks, *, lowers):
    """All stages give the bits of replicas: of two addends the sum does not depend on their order."""
    expected = []
    wrong = {}
    for stage in (zf.replicate, zf.zero1, zf.zero2, zf.zero3):
        model = stage(zf.precision(net()) if lowers else net(), ranks.mesh)
        optimizer = adamw(model)
        found = []
        for tokens in batches():
            own = tokens.chunk(ranks.size)[ranks.rank]
            loss = F.cross_entropy(model(own).float().flatten(0, 1), own.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach().cpu())
        for parameter in model.parameters():
            found.append((parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().cpu())
        expected = expected or found
        pairs = list(zip(found, expected, strict=True))
        if not all(torch.equal(one, other) for one, other in pairs):
            wrong[stage.__name__] = max(float((one - other).abs().max()) for one, other in pairs)
    assert not wrong, f"differ from replicas by {wrong}"


case("stages 0 to 3, float32")(partial(stages, lowers=False))
case("stages 0 to 3, bfloat16")(partial(stages, lowers=True))


def stop(mesh, folder):
    """One rank stops, in a process of its own; the other one waits for it. Ends the process."""
    ranks = Ranks(mesh)
    ranks.links.exchange(torch.ones(1, dtype=torch.uint8))
    started = time.monotonic()
    if ranks.rank:
        while not (folder / "judged").exists() and time.monotonic() < started + 40:
            time.sleep(0.1)
        os._exit(0)
    try:
        with zf.guard(deadline_s=DEADLINE_S):
            ranks.links.all_gather([Segment(torch.zeros(4, device=device.NAME), 4, 4 // ranks.size)], "a test").wait()
            torch.accelerator.synchronize()
    except zf.LostRankError:
        print(f"LostRankError after {time.monotonic() - started:.1f} s", flush=True)
        os._exit(0)
    os._exit(1)


def judged(process, folder, *, is_first):
    """What became of `stop`. On NCCL the device waits: the watchdog ends the process."""
    try:
        out, err = process.communicate("go\n", timeout=40)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        return f"wrong: hangs ({err[-600:]})"
    finally:
        (folder / "judged").touch()
    told = out.strip().rpartition("\n")[2]
    if not is_first or (process.returncode == 0 and "LostRankError" in told):
        return f"right, {told}" if is_first else "right"
    if process.returncode == -signal.SIGABRT and f"Timeout(ms)={1000 * DEADLINE_S:.0f}" in err:
        return "right, the watchdog ended the process"
    return f"wrong: exit code {process.returncode} ({err[-1200:]})"


def main(backend, folder, rank, size, *, stops):
    torch.set_num_threads(1)
    if backend.endswith(".so"):
        device.load(Path(backend))
    else:
        os.environ["ZERO_FN_TEST_BACKEND"] = backend
        device.use("cuda")
    if stops:
        sys.stdin.readline()
        stop(device.begin_group(f"{folder}/store of a stop", rank, size), folder)
    arguments = ["-m", __spec__.name if __spec__ else __name__, backend, str(folder), str(rank), str(size), "stop"]
    # In its log torch waits for a dump of what ranks did, which nobody reads.
    environment = {**os.environ, "TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100"}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    stopping = subprocess.Popen([sys.executable, *arguments], env=environment, text=True, **pipes)
    wrong = 0
    try:
        ranks = Ranks(device.begin_group(f"{folder}/store of collectives", rank, size))
        for name, run in CASES.items():
            ranks.seconds, started, said = 0.0, time.monotonic(), "right"
            try:
                run(ranks)
            except AssertionError as error:
                said, wrong = f"wrong: {error}", wrong + 1
            except Exception:
                print(f"{name}: wrong: {traceback.format_exc()[-1500:]}", flush=True)
                os._exit(1)
            if rank == 0 or said != "right":
                print(f"{name}: {said}, {1000 * (ranks.seconds or time.monotonic() - started):.1f} ms", flush=True)
        dist.destroy_process_group()
        started = time.monotonic()
        said = judged(stopping, folder, is_first=rank == 0)
        if rank == 0 or not said.startswith("right"):
            print(f"a rank that stops: {said}, {1000 * (time.monotonic() - started):.0f} ms", flush=True)
        return wrong + (not said.startswith("right"))
    finally:
        stopping.kill()


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:5]), stops=sys.argv[5:] == ["stop"])))
