"""`profile`: where the time, the bytes and the memory of some steps went, on each rank.

Each rank notes what happens (`clock.py`), which gives spans (`spans.py`). At the end rank 0 hears
from all, compares them (`findings.py`), tells all ranks what it has found, and writes the files.
"""

from __future__ import annotations

import json
import pickle
import zlib
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from torch.optim import Optimizer

from zero_fn.errors import StateError, warn_once
from zero_fn.inspect.memory import MemoryUse, memory
from zero_fn.inspect.planned_bytes import Plan, plan
from zero_fn.profiling.clock import Reader
from zero_fn.profiling.findings import Findings
from zero_fn.profiling.host_clocks import clock_offsets
from zero_fn.profiling.operations import Operations, peak_of
from zero_fn.profiling.record import RankRecord, record_of
from zero_fn.profiling.text import text_of
from zero_fn.profiling.timeline import draw
from zero_fn.profiling.trace import events_of
from zero_fn.runtime.registry import runs_of, units_of
from zero_fn.transport.rank0_messages import all_of, meeting_group
from zero_fn.transport.traffic import PAYLOAD
from zero_fn.values.chained_optimizer import Optimizers, as_one
from zero_fn.values.tiers import is_disk
from zero_fn.values.watching import Moment

__all__ = ["Profile", "profile"]


class Profile(Findings):
    """Some steps of training, as `profile` has seen them.

    Printable; the same on every rank. Empty until the block has ended.

    Attributes:
        steps: Each step of each rank: seconds, and the parts that they consist of.
            See `zero_fn.profiling.spans`.
        units: Computation of each unit, forward and backward: seconds by rank.
        collectives: What ranks sent one another: count, bytes, seconds,
            bandwidth, and who was waited for.
        slow: Which ranks take longer than the others beside collectives, and where, by a fiftieth
            of a step at least; the longest first, which is `slowest`.
        overlap: For each rank the part of its communication that runs beside computation;
            None without communication.
        memory: Bytes by phase ("at rest", "forward", "backward", "optimizer") and by what:
            "process" (resident memory of the host, the largest of all ranks), "device" (what its
            allocator has in use where the phase begins or ends, the larger). Of a device there is
            also "peak": that of its allocator since the process began or the program reset it,
            which is never reset here. `planned` beside them is of training state.
        numbers: What is one number: see `docs/guides/profile.md`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        *,
        out: str | None,
        tokens: int | None,
        flops: bool,
        peak: float | None,
    ) -> None:
        super().__init__()
        self._model = model
        self._optimizer = optimizer
        self._out = out
        self._tokens = tokens
        self._peak = peak
        self._counts = flops
        self._operations = Operations()
        self._held = MemoryUse(0, 0, 0)
        self._measured = 0
        runs_of(model, verb="profile")  # or it raises

    def __enter__(self) -> Self:
        self._offsets = clock_offsets(meeting_group())
        if self._counts:
            self._operations.open()
        self._reader = Reader(
            self._model, self._optimizer, before=self._measure, after=self._operations.close
        )
        return self

    def step(self) -> None:
        """Ends a step, in loops whose steps no optimizer ends that was given to `profile`."""
        self._measure()
        self._operations.close()
        self._reader.note(Moment.STEPPED)

    def _measure(self) -> None:
        """Bytes held before a step of the optimizer: of the second,
        which has states, or else of the first."""
        if self._measured < 2:
            self._held = memory(self._model, self._optimizer)
            self._measured += 1

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._reader.close()
        self._operations.close()
        if kind is not None:
            return  # ranks that raise would not meet
        mine = self._record()
        said = _told(mine)
        found, records = None, list[RankRecord]()
        for row, offset_ns in zip(said, self._offsets, strict=False):  # of rank 0 alone
            record: RankRecord = pickle.loads(zlib.decompress(row))
            record.shift(offset_ns)
            records.append(record)
        if records and all(record.steps for record in records):
            found = vars(Findings(records))
        found = pickle.loads(zlib.decompress(_told(found)[0]))
        if found is None:
            raise StateError(
                "A profile has seen no step.",
                steps_of_this_rank=len(mine.steps),
                fix="step the optimizer that is given to profile inside the block, "
                "on every rank; without one call "
                "profile.step() after each step"
                + ("; flops=True counts in the first" if self._counts else ""),
            )
        vars(self).update(found)
        if self._out is not None and records:
            _write(self, records, Path(self._out))

    def __str__(self) -> str:
        return text_of(self)

    def __getstate__(self) -> dict[str, Any]:  # a rank may return it, without the model
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def _record(self) -> RankRecord:
        """What this rank tells rank 0."""
        record = record_of(
            self._reader.resolve(self._reader.take()),
            on_device=self._reader.on_device,
            first=int(self._counts),
        )
        more, count = record.more, len(record.steps)
        if not count:
            return record
        sent = Counter[str]()
        for each in record.collectives:
            sent[each.axis] += each.nbytes if each.kind in PAYLOAD else 0
        more |= {
            "sent": {axis: nbytes / count for axis, nbytes in sent.items() if nbytes},
            "held": {"in memory": self._held.total, **self._held.tiers},
            "planned": self._planned(more["backwards"], are_accumulated=more["accumulated"]),
            "tokens": self._tokens,
        }
        if self._operations.total:
            more["operations"] = (
                self._operations.total,
                self._operations.of_model,
                self._peak or peak_of(self._reader.device_type, self._dtype),
            )
        return record

    @property
    def _dtype(self) -> torch.dtype:
        """The one in which most elements compute."""
        groups = (group for unit in units_of(self._model) for group in unit.memory.groups)
        largest = max(groups, key=lambda each: sum(slot.path.numel for slot in each.slots))
        return largest.kind.compute_dtype

    def _planned(self, backwards: float, *, are_accumulated: bool) -> dict[str, Any] | None:
        """What `plan` says of such a step; None where it cannot."""
        if backwards == 1 or (are_accumulated and backwards == int(backwards) and backwards):
            with suppress(StateError):
                planned = plan(self._model, self._optimizer, backwards=int(backwards))
                memory = planned.memory.total + planned.padding.total
                return {
                    "sent": {axis: n for axis, n in planned.sent_by_axis.items() if n},
                    "held": {"in memory": memory, **planned.memory.tiers},
                    "moved": _moved(planned),
                    "peak": planned.peak_nbytes,
                }
        return None


def profile(
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    out: str | None = None,
    tokens: int | None = None,
    flops: bool = False,
    peak: float | None = None,
) -> Profile:
    """Shows where the time of the steps in a block goes, by part, rank,
    unit and collective; and their bytes and memory.

        with zf.profile(model, optimizer, out="profile") as profile:  # some steps, on every rank
            for _ in range(10):
                train_step()
        print(profile)

    A step ends with `optimizer.step()`. It consists of computation, communication (what runs beside
    computation is not in it), waiting for slower ranks, waits for tiers, idle time, data loading,
    the optimizer and the rest, which add up to it. On the CPU these are times of the host; on an
    accelerator those of the stream that computes, by events.

    Communicates, at the beginning and at the end, over all ranks of the process group, which must
    all call it: some KB for each step and rank to rank 0 and from there to all, and the result.
    Nothing in between. Without a block that is open it costs nothing.

    Collectives of others (tensor parallelism, a norm, your own)
    count as the part in which they are called.

    Args:
        model: A transformed module, or one that holds some (the stages of a pipeline).
        optimizer: The optimizer whose steps end a step, stock, `zf.streamed` or `zf.by_owner`; or a
            sequence of them: a step ends once each has stepped.
        out: A folder that rank 0 writes into: `trace.json` (Perfetto, chrome://tracing: tracks for
            each rank, its collectives and its tiers), `timeline.png` (needs matplotlib),
            `profile.json`.
        tokens: Tokens of a step on one rank, for tokens/s.
        flops: Counts operations in the first step of the block, by torch's counter.
            It is slower for that, and not timed.
        peak: Operations a second that the device can do, for the utilisation. Left out: what its
            vendor says (A100, H100, H200, B200 in 16 bits), else what a product of matrices
            reaches, which is measured.

    Returns:
        A `Profile`, which is the context manager.

    Raises:
        StateError: The model was not transformed; or, at the end,
            on every rank: some rank has made no step.
        LostRankError: A rank has ended, or does not come to the end of the block.
    """
    return Profile(
        model,
        None if optimizer is None else as_one(optimizer),
        out=out,
        tokens=tokens,
        flops=flops,
        peak=peak,
    )


def _moved(planned: Plan) -> dict[str, float]:
    """Bytes of a step by direction and tier, as they are counted."""
    there, back = planned.link
    disks = [moved for tier, moved in planned.moved.items() if is_disk(tier)]
    found = {
        "from nvme": sum(each.read for each in disks),
        "to nvme": sum(each.written for each in disks),
        "from host": there,
        "to host": back,
    }
    return {name: nbytes for name, nbytes in found.items() if nbytes}


def _told(value: Any) -> list[bytes]:
    """The values of all ranks, packed. A collective of all ranks; waits."""
    packed = zlib.compress(pickle.dumps(value), 1)
    group = meeting_group()  # asked for each time: a save in the background may have begun
    return [packed] if group is None else all_of(group, packed)


def _write(profile: Findings, records: Sequence[RankRecord], folder: Path) -> None:
    """Writes `profile.json`, `trace.json` and `timeline.png` into a folder,
    which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    data = {name: getattr(profile, name) for name in ("overlap", "memory", "numbers")}
    for name in ("steps", "units", "collectives", "slow"):
        data[name] = [asdict(row) for row in getattr(profile, name)]
    (folder / "profile.json").write_text(json.dumps(data))
    trace = {"traceEvents": [*events_of(records)], "displayTimeUnit": "ms"}
    (folder / "trace.json").write_text(json.dumps(trace))
    if find_spec("matplotlib") is not None:
        draw(records, str(folder / "timeline.png"))
    else:
        warn_once(
            "A profile has no timeline.png.",
            why="matplotlib is not installed",
            fix="pip install matplotlib",
        )
