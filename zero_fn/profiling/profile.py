"""`profile`: where the time, the bytes and the memory of some steps went, on each rank.

Each rank notes what happens (`clock.py`), which gives spans (`spans.py`). At the end rank 0 hears
from all (`ranks.py`), compares them (`analysis.py`), tells all ranks what it has found, and writes
the files (`files.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from statistics import median
from typing import Any, Self

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from zero_fn.errors import StateError
from zero_fn.inspect.memory import MemoryUse
from zero_fn.inspect.planned_bytes import Plan, plan
from zero_fn.profiling.analysis import (
    Findings,
    carried_of,
    collectives_of,
    overlap_of,
    slow_of,
    steps_of_ranks,
    units_of_ranks,
    wait_for_last,
)
from zero_fn.profiling.clock import Reader, Taken
from zero_fn.profiling.files import write
from zero_fn.profiling.operations import Operations, peak_of
from zero_fn.profiling.ranks import Ranks
from zero_fn.profiling.record import RankRecord, record_of
from zero_fn.profiling.text import text_of
from zero_fn.runtime.registry import runs_of, units_of
from zero_fn.transport.traffic import PAYLOAD
from zero_fn.values.chained_optimizer import Optimizers, as_one
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
            allocator has in use at the end of the phase). Of a device there is also "peak": that of
            its allocator since the process began or the program reset it, which is never reset
            here. `planned` beside them is of training state.
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
        groups = [group for unit in units_of(model) for group in unit.memory.groups]
        if not groups:
            runs_of(model, verb="profile")  # raises
        self._device_type = next(
            (g.kind.device_type for g in groups if g.kind.device_type != "meta"), "cpu"
        )
        largest = max(groups, key=lambda group: sum(slot.path.numel for slot in group.slots))
        self._dtype = largest.kind.compute_dtype
        self._operations = Operations() if flops else None
        self._held = MemoryUse(0, 0, 0)
        self._measured = 0
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> Self:
        self._ranks = Ranks()
        if self._operations is not None:
            self._operations.open()
        if self._optimizer is not None:
            before = self._optimizer.register_step_pre_hook(lambda *_: self._measure())
            after = self._optimizer.register_step_post_hook(lambda *_: self._end_count())
            self._hooks = [before, after]
        self._reader = Reader(self._device_type, self._optimizer)
        return self

    def step(self) -> None:
        """Ends a step, in loops whose steps no optimizer ends that was given to `profile`."""
        self._measure()
        self._end_count()
        self._reader.note(Moment.STEPPED)

    def _end_count(self) -> None:
        if self._operations is not None:
            self._operations.close()

    def _measure(self) -> None:
        """Bytes held before a step of the optimizer: of the second,
        which has states, or else of the first."""
        if self._measured < 2:
            self._held = held(self._model, self._optimizer)
            self._measured += 1

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._reader.close()
        for hook in self._hooks:
            hook.remove()
        self._end_count()
        if kind is not None:
            return  # ranks that raise would not meet
        mine = self._record(self._reader.resolve(self._reader.take()))
        records: list[RankRecord] = self._ranks.collect(mine)
        for record, offset_ns in zip(records, self._ranks.offsets, strict=True):
            record.shift(offset_ns)
        found = _compared(records) if records and all(record.steps for record in records) else None
        found = self._ranks.tell(found)
        if found is None:
            raise StateError(
                "A profile has seen no step.",
                steps_of_this_rank=len(mine.steps),
                fix="step the optimizer that is given to profile inside the block, "
                "on every rank; without one call "
                "profile.step() after each step"
                + ("; flops=True counts in the first" if self._operations else ""),
            )
        vars(self).update(found)
        if self._out is not None and self._ranks.rank == 0:
            write(self, records, self._out)

    def __str__(self) -> str:
        return text_of(self)

    def __getstate__(self) -> dict[str, Any]:  # a rank may return it, without the model
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def _record(self, taken: Taken) -> RankRecord:
        """What this rank tells rank 0."""
        record = record_of(
            self._ranks.rank,
            taken,
            on_device=self._reader.on_device,
            first=1 if self._operations is not None else 0,
        )
        more, count = record.more, len(record.steps)
        if not count:
            return record
        sent = Counter[str]()
        planned = self._planned(more["backwards"], are_accumulated=more["accumulated"])
        for each in record.collectives:
            sent[each.axis] += each.nbytes if each.kind in PAYLOAD else 0
        more["sent"] = {axis: nbytes / count for axis, nbytes in sent.items() if nbytes}
        more["held"] = {"in memory": self._held.total, **self._held.tiers}
        more["planned"] = planned and {
            "sent": {axis: nbytes for axis, nbytes in planned.sent_by_axis.items() if nbytes},
            "held": {
                "in memory": planned.memory.total + planned.padding.total,
                **planned.memory.tiers,
            },
            "moved": _moved(planned),
            "peak": planned.peak_nbytes,
        }
        more["tokens"] = self._tokens
        if self._operations is not None and self._operations.total:
            peak = peak_of(self._device_type, self._dtype) if self._peak is None else self._peak
            more["operations"] = [self._operations.total, self._operations.of_model, peak]
        return record

    def _planned(self, backwards: float, *, are_accumulated: bool) -> Plan | None:
        """What `plan` says of such a step; None where it cannot."""
        if backwards == 1 or (are_accumulated and backwards == int(backwards) and backwards):
            with suppress(StateError):
                return plan(self._model, self._optimizer, backwards=int(backwards))
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
    all call it: some KB for each step and rank to rank 0, and the result to all. Nothing in
    between. Without a block that is open it costs nothing.

    Collectives of others (tensor parallelism, a norm, your own)
    count as the part in which they are called.

    Args:
        model: A transformed module, or one that holds some (the stages of a pipeline).
        optimizer: The optimizer whose steps end a step, stock, `zf.streamed` or `zf.by_owner`; or a
            sequence of them: a step ends once each has stepped.
        out: A folder that rank 0 writes into: `trace.json` (Perfetto, chrome://tracing: tracks for
            each rank, its collectives and its tiers), `timeline.png` (needs matplotlib),
            `profile.html` (one page, no network), `profile.json`.
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
    disks = [moved for tier, moved in planned.moved.items() if tier.startswith("nvme(")]
    found = {
        "from nvme": sum(each.read for each in disks),
        "to nvme": sum(each.written for each in disks),
    }
    there, back = planned.link
    return {
        name: nbytes
        for name, nbytes in (found | {"from host": there, "to host": back}).items()
        if nbytes
    }


def _compared(records: list[RankRecord]) -> dict[str, Any]:
    """What rank 0 finds in the records of all."""
    overlap = [overlap_of(record) for record in records]
    last = wait_for_last(records)
    steps, units = steps_of_ranks(records), units_of_ranks(records)
    collectives = collectives_of(records, last)
    more = [record.more for record in records]
    phases = dict.fromkeys(phase for row in more for phase in row["phases"])
    plans = [row["planned"] for row in more]
    seconds = median(step.seconds for step in steps)
    numbers: dict[str, Any] = {
        "ranks": len(records),
        "steps": len(records[0].steps),
        "seconds": seconds,
    }
    numbers |= {name: _most(row[name] for row in more) for name in ("sent", "moved", "held")}
    numbers |= {
        "carried": carried_of(records, last),
        "exposed": dict.fromkeys(numbers["sent"], 0.0),
    }
    for each in collectives:
        if each.axis in numbers["sent"]:
            numbers["exposed"][each.axis] += each.exposed_s
    numbers["planned"] = None
    if all(plans):
        numbers["planned"] = {
            name: _most(row[name] for row in plans) for name in ("sent", "moved", "held")
        }
        numbers["planned"]["peak"] = max(row["peak"] for row in plans)
    if all(row["tokens"] for row in more):
        numbers["tokens_per_second"] = sum(row["tokens"] for row in more) / seconds
    if all("operations" in row for row in more):
        total, of_model, peak = (
            sum(row["operations"][at] for row in more) / len(more) for at in range(3)
        )
        numbers |= {"flops": total, "model_flops": of_model, "peak_flops_per_second": peak}
        numbers |= {
            "utilisation": of_model / seconds / peak,
            "hardware_utilisation": total / seconds / peak,
        }
    return {
        "steps": steps,
        "units": units,
        "collectives": collectives,
        "slow": slow_of(records, steps, units, last),
        "overlap": overlap,
        "memory": {phase: _most(row["phases"].get(phase, {}) for row in more) for phase in phases},
        "numbers": numbers,
    }


def _most(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The largest of all ranks, by name."""
    found: dict[str, float] = {}
    for row in rows:
        for name, value in row.items():
            found[name] = max(found.get(name, 0.0), value)
    return found
