"""`zf.profile`: the parts of a step add up to it, a fault is named, bytes are those of the plan, nobody looks on later."""

import json
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import zero_fn as zf
from tests.support.groups import alone
from tests.support.messages import refused
from tests.support.on_ranks import on_ranks
from tests.support.programs import STAGES
from tests.support.ranks import axis
from zero_fn.profiling import host_clocks
from zero_fn.profiling.clock import Collective, Mark
from zero_fn.profiling.collectives import carried_of, overlap_of, wait_for_last
from zero_fn.profiling.operations import peak_of
from zero_fn.profiling.record import RankRecord
from zero_fn.profiling.spans import Span, spans_of, steps_of
from zero_fn.storage import Transfer
from zero_fn.transport.rank0_messages import meeting_group
from zero_fn.values import watching
from zero_fn.values.watching import Moment

SLEEP_S = 0.02


class Block(nn.Module):
    """Two layers, which may sleep before them."""

    def __init__(self, dim=64):
        super().__init__()
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.sleep_s = 0.0
        self.checkpoints = False

    def forward(self, x):
        time.sleep(self.sleep_s)  # as a unit that is slow
        if self.checkpoints:
            return x + checkpoint(self._inner, x, use_reentrant=False)
        return x + self._inner(x)

    def _inner(self, x):
        return self.down(self.up(x).relu())


def built(stage="zero3", **offloaded):
    model = STAGES[stage](nn.Sequential(*(Block() for _ in range(5))), axis(), units=Block)
    if offloaded:
        model = zf.offload(model, **offloaded)
    optimizer = AdamW(model.parameters(), fused=True)
    return model, zf.streamed(optimizer) if offloaded else optimizer


def step(model, optimizer):
    model(torch.randn(16, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def profiled(model, optimizer, steps=10, **options):
    for _ in range(2):
        step(model, optimizer)
    with zf.profile(model, optimizer, **options) as profile:
        for _ in range(steps):
            step(model, optimizer)
    return profile


@on_ranks(2)
def test_the_parts_of_a_step_add_up_to_what_a_clock_shows():
    model, optimizer = built()
    loader = iter(DataLoader(TensorDataset(torch.randn(320, 64)), batch_size=8))
    step(model, optimizer)
    with zf.profile(model, optimizer) as profile:
        opened = time.perf_counter()
        for _ in range(10):
            model(next(loader)[0]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        took = time.perf_counter() - opened
    own = [each for each in profile.steps if each.rank == dist.get_rank()]
    assert [each.number for each in own] == [*range(10)]
    for each in own:
        assert sum(each.parts.values()) == pytest.approx(each.seconds, rel=1e-6)
        assert all(each.parts[part] > 0 for part in ("compute", "communication", "data", "optimizer", "other"))
    assert profile.memory.keys() == {"at rest", "forward", "backward", "optimizer"}
    assert all(row["process"] > 2**20 for row in profile.memory.values())
    assert sum(each.seconds for each in own) == pytest.approx(took, rel=0.02, abs=0.01)


@pytest.mark.parametrize("phase", ["forward", "backward"])
@on_ranks(2)
def test_units_that_are_slow_on_one_rank_are_named(phase):
    """Rank 0 is the slower one of a whole step, yet both make the other wait."""
    model, optimizer = built()
    if dist.get_rank() == 0:
        model[1].sleep_s = 2 * SLEEP_S
    elif phase == "forward":
        model[3].sleep_s = SLEEP_S
    else:
        model[3].down.register_full_backward_pre_hook(lambda *_: time.sleep(SLEEP_S))  # slow, too
    profile = profiled(model, optimizer)
    found = {(each.rank, each.part, each.unit, each.phase): each for each in profile.slow}
    slower, other = found[0, "idle", "1", "forward"], found[1, "idle", "3", phase]
    assert profile.slowest is slower
    for each, slept_s in ((slower, 2 * SLEEP_S), (other, SLEEP_S)):
        assert each.seconds > 0.3 * slept_s  # the other rank may be held up, too
        assert each.waited_s > 0.5 * slept_s
        assert str(each) in str(profile)
    assert max(profile.collectives, key=lambda each: each.waited_s).last_rank == 0
    idle = {row.unit: row.idle for row in profile.units if row.phase == phase}
    assert idle["3"][1] > 0.9 * SLEEP_S > idle["3"][0]


@on_ranks(2)
def test_a_slow_disk_is_named(folder):
    """The parameters of rank 1 come late from its disk."""
    model, optimizer = built(params=zf.nvme(folder), optim=zf.nvme(folder))
    wait = Transfer.wait

    def late(transfer):
        if transfer._requests:
            inner = transfer._backend

            class Late:
                def wait(self, requests):
                    time.sleep(0.002)  # a slow disk
                    inner.wait(requests)

            transfer._backend = Late()
        wait(transfer)

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(Transfer, "wait", late)
        profile = profiled(model, optimizer, steps=6)
    assert (profile.slowest.rank, profile.slowest.part) == (1, "copies")
    assert profile.numbers["moved"]["from nvme"] > 0
    assert profile.numbers["moved"]["to nvme"] > 0
    assert profile.numbers["moved"] == profile.numbers["planned"]["moved"]
    assert profile.numbers["held"] == profile.numbers["planned"]["held"]
    assert f"held nvme('{folder}')" in str(profile)


@pytest.mark.parametrize(("stage", "gathers"), [("replicate", []), ("zero1", [1]), ("zero3", [2])])
@on_ranks(2)
def test_bytes_are_those_of_the_plan(stage, gathers):
    model, optimizer = built(stage)
    profile = profiled(model, optimizer, steps=3)
    assert profile.numbers["sent"] == profile.numbers["planned"]["sent"] == zf.plan(model, optimizer).sent_by_axis
    assert sum(each.nbytes for each in profile.collectives if not each.name.startswith("agreement")) == pytest.approx(
        zf.plan(model, optimizer).sent_nbytes
    )
    found = [each for each in profile.collectives if each.name == "all-gather of parameters of unit 1"]
    assert [each.count for each in found] == gathers
    assert all(each.bus_bandwidth * 2 == each.algorithm_bandwidth > 0 for each in found)
    assert profile.numbers["exposed"]["dp"] == pytest.approx(sum(each.exposed_s for each in profile.collectives))
    assert profile.numbers["carried"]["dp"] > 0
    assert profile.numbers["held"] == profile.numbers["planned"]["held"]


@on_ranks(2)
def test_operations_and_tokens_are_counted():
    model, optimizer = built()
    profile = profiled(model, optimizer, steps=4, flops=True, tokens=16, peak=1e12)
    forward = 2 * 16 * 2 * 64 * 256 * len(model)
    numbers = profile.numbers
    assert numbers["steps"] == 3  # the first one counts, and is slower for it
    # The gradient of the input of the first layer is not needed.
    assert numbers["flops"] == numbers["model_flops"] == 3 * forward - 2 * 16 * 64 * 256
    assert numbers["utilisation"] == pytest.approx(numbers["flops"] / numbers["seconds"] / 1e12)
    assert numbers["tokens_per_second"] == pytest.approx(2 * 16 / numbers["seconds"])
    for block in model:
        block.checkpoints = True
    again = profiled(model, optimizer, steps=2, flops=True, peak=1e12).numbers
    assert again["flops"] == 3.5 * forward - 2 * 16 * 64 * 256  # the second layer need not be computed again
    assert again["model_flops"] == 3 * forward


@on_ranks(2)
def test_the_files_say_what_the_profile_says(folder):
    model, optimizer = built()
    profile = profiled(model, optimizer, steps=3, out=f"{folder}/out")
    dist.barrier()
    out = Path(folder, "out")
    data = json.loads((out / "profile.json").read_text())
    assert data["numbers"] == profile.numbers and len(data["steps"]) == 6
    assert (out / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in out.iterdir()) == ["profile.json", "timeline.png", "trace.json"]
    events = json.loads((out / "trace.json").read_text())["traceEvents"]
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(tracks.values()) >= {"steps", "computation", "axis dp"}
    slices, names = {}, {event["name"] for event in events}
    for event in events:
        if event["ph"] == "X":
            slices.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert slices.keys() == tracks.keys() and {pid for pid, _ in slices} == {0, 1}
    for ranges in slices.values():  # Perfetto drops slices that overlap in one track
        assert all(end <= begin + 1e-3 for (_, end), (begin, _) in pairwise(sorted(ranges)))
    assert {"forward of 3", "backward of 3", "reduce-scatter of gradients of unit 3", "optimizer"} <= names
    assert "all-gather of parameters of unit 4" in names


@on_ranks(2)
def test_clocks_of_two_hosts_are_set_right():
    """Rank 1 has a clock of its own, 5 s ahead."""
    shift = 5_000_000_000
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_clocks, "perf_counter_ns", lambda: time.perf_counter_ns() + dist.get_rank() * shift)
        offsets = host_clocks.clock_offsets(meeting_group())
    if dist.get_rank():
        assert offsets == []
    else:
        assert offsets[0] == 0 and abs(offsets[1] - shift) < 100_000_000


@on_ranks(2)
def test_a_profile_that_saw_no_step_raises_on_all_ranks():
    model, optimizer = built()
    with pytest.raises(zf.errors.StateError), zf.profile(model) as profile:
        if dist.get_rank() == 0:
            profile.step()
    with refused("profile_of_no_step"), zf.profile(model):
        pass
    with zf.profile(model) as profile:  # without the optimizer steps are told
        for _ in range(2):
            step(model, optimizer)
            profile.step()
    assert len(profile.steps) == 4


@on_ranks(2)
def test_two_that_look_on_have_their_own_steps_and_close_in_any_order():
    """Clocks that were closed in the order of opening left the DataLoader patched, and marks were collected for ever."""
    model, optimizer = built()
    loader = DataLoader(TensorDataset(torch.randn(64, 64)), batch_size=8)
    metrics = zf.metrics(model, optimizer, every=2)
    profile = zf.profile(model, optimizer).__enter__()
    found = {}
    for _ in zip(range(2), loader, strict=False):
        step(model, optimizer)
        found = metrics.step()
    metrics.close()
    profile.__exit__(None)
    metrics.close()  # may be called again
    assert len(found["zero_fn_step_seconds"]) == len(found["zero_fn_data_seconds"]) == 2
    assert len(profile.steps) == 2 * dist.get_world_size()
    assert all(each.parts["data"] > 0 for each in profile.steps)
    assert watching.watchers == ()
    seen = len(metrics._tally.reader.marks)
    for _ in loader:
        pass
    step(model, optimizer)
    assert len(metrics._tally.reader.marks) == seen, "a reader that is closed hears nothing"
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA A10", 125e12),
    ],
)
def test_a_device_is_known_by_its_name(name, peak, monkeypatch):
    """The H100 of PCIe counted as that of SXM."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    assert peak_of("cuda", torch.bfloat16) == peak


@on_ranks(2)
def test_nobody_looks_on_after_a_block_that_raised():
    model, optimizer = built()
    step(model, optimizer)
    with pytest.raises(ZeroDivisionError), zf.profile(model, optimizer, flops=True):
        step(model, optimizer)
        raise ZeroDivisionError
    assert watching.watchers == ()
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    with pytest.raises(zf.errors.StateError):
        zf.profile(nn.Linear(2, 2))


def test_one_rank_alone_is_profiled():
    with alone() as mesh:
        model = zf.shard_params(Block(), mesh)
        profile = profiled(model, AdamW(model.parameters()), steps=2)
    assert profile.slowest is None and profile.overlap == [None]
    assert profile.numbers["ranks"] == 1 and profile.numbers["sent"] == {}


def test_two_collectives_at_once_share_a_link():
    """Of 10 ms with a collective under way 6 have two; rank 1 began the last at 14 ms."""
    records = []
    for rank in range(2):
        begins = {"dp #1": 2 - rank, "dp #2": 4 + rank, "dp #3": 13 + rank}
        ends = {"dp #1": 10, "dp #2": 11, "dp #3": 15}
        ways = [Collective("", "all-gather", g, "dp", 2, 1000, b * 10**6, ends[g] * 10**6) for g, b in begins.items()]
        spans = [Span(each.begin_ns, each.end_ns, "communication", "", "", each) for each in ways]
        records.append(RankRecord(rank, [spans], {}))
    assert carried_of(records, wait_for_last(records)) == {"dp": pytest.approx(3000 / 0.010)}


def test_overlap_counts_each_moment_once_and_only_inside_the_steps():
    """Collectives at 0 to 8 ms and 4 to 10 ms of steps that begin at 2 ms; computation at 6 to 9 ms."""
    ways = [Collective("", "all-gather", "", "dp", 2, 8, begin, end) for begin, end in ((0, 8), (4, 10), (9, 0))]
    waits = [Span(2, 3, "communication", "", "", each) for each in ways]
    spans = [*waits, Span(6, 9, "compute", "forward", "", None), Span(9, 12, "other", "", "", None)]
    assert overlap_of(RankRecord(0, [spans], {})) == 3 / 8
    assert overlap_of(RankRecord(0, [spans[-2:]], {})) is None


# -- spans ---------------------------------------------------------------------------------------------------------------


def marks(*rows):
    """One millisecond apart, of which the process has run half."""
    one = Collective("gather", "all-gather", "g", "dp", 2, 8, 0)
    waits = (Moment.ISSUED, Moment.WAIT, Moment.WAITED)
    return [
        Mark(1_000_000 * at, 500_000 * at, moment, what, one if moment in waits else None, 1_000_000 * at)
        for at, (moment, what) in enumerate(rows)
    ]


def test_time_belongs_to_the_innermost():
    """What an exception left open, as "a.b" here, ends with what is around it."""
    rows = [
        (Moment.STEPPED, ""), (Moment.ENTER, ""), (Moment.ENTER, "a"), (Moment.ENTER, "a.b"), (Moment.WAIT, ""),
        (Moment.WAITED, ""), (Moment.LEAVE, "a"), (Moment.LEAVE, ""), (Moment.BACKWARD, ""), (Moment.NEED, "a"),
        (Moment.NEED, ""), (Moment.ENTER, "a"), (Moment.LEAVE, "a"), (Moment.ARRIVED, "a"), (Moment.BACKWARD_END, ""),
        (Moment.COPY, "nvme"), (Moment.COPIED, ""), (Moment.OPTIMIZER, ""), (Moment.STEPPED, ""),
    ]  # fmt: skip
    spans = [*spans_of(marks(*rows), on_device=False)]
    found = [(span.part, span.phase, span.unit) for span in spans]
    assert found == [
        ("other", "", ""), ("compute", "forward", "root"), ("compute", "forward", "a"), ("compute", "forward", "a.b"),
        ("communication", "forward", "a.b"), ("compute", "forward", "a.b"), ("compute", "forward", "root"),
        ("other", "", ""), ("compute", "backward", "root"),
        *[("compute", "backward", "a")] * 4, ("compute", "backward", "root"),
        ("other", "", ""), ("copies", "", ""), ("other", "", ""), ("optimizer", "optimizer", ""),
    ]  # fmt: skip
    assert {span.idle_ns for span in spans} == {0, 500_000}
    assert all(span.collective for span in spans if span.part == "communication")
    assert steps_of(marks(*rows)) == [(0, 18)]


def test_a_device_that_keeps_up_with_the_host_is_idle():
    late = [
        mark._replace(device_ns=mark.at_ns + at * 40_000) for at, mark in enumerate(marks(*[(Moment.BACKWARD, "")] * 4))
    ]
    idle = [span.idle_ns / span.ns for span in spans_of(late, on_device=True)]
    assert idle == [1.0, 0.0, 0.0]
