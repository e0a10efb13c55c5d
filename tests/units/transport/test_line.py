"""What a failed collective tells the user, from transports that fail on purpose."""

import warnings
import weakref
from collections import deque
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import zero_fn as zf
from tests.support.groups import pretended, pretended_grid
from tests.support.messages import refusals
from zero_fn.transport import direct_exchange
from zero_fn.transport.agree import Flag
from zero_fn.transport.direct_exchange import GatherPlan
from zero_fn.transport.line import MISMATCH, Line, Work
from zero_fn.transport.links import line_over, open_transport
from zero_fn.transport.segment import Segment
from zero_fn.transport.waiting import OutOfStep, PeerLost
from zero_fn.values.mesh import mesh_axis


class Failing:
    """A transport whose collectives fail with `failure`, if there is one."""

    pads = False

    def __init__(self, failure=None):
        self.failure = failure
        self.marks = []
        self.told = None
        self.has_given_up = False

    def gather_plan(self, segments):
        return GatherPlan(segments, 0, [])

    def begin(self, *what):
        self.marks.append(what[-1])
        return Work(finish=self._fail)

    all_gather = reduce_scatter = all_to_all = any = exchange = begin

    def give_up(self, failure=None):
        self.told = failure
        self.has_given_up = True

    def _fail(self):
        if self.failure is not None:
            raise self.failure


SEGMENT = Segment(torch.zeros(6), 6, 2)
LOST = PeerLost(1, is_late=False, text="Connection closed by peer")
LATE = PeerLost(1, is_late=True, text="Timed out")


def line_of(raw, axis):
    """What a module sends through, over this transport."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zero_fn.transport.links.open_transport", lambda _: raw)
        return line_over([axis])


def failed(failure, before=lambda _: None):
    """The error of an all-gather on rank 0 of 3."""
    with pretended(3) as mesh:
        axis = mesh_axis(mesh, verb="test")
        raw = Failing()
        transport = line_of(raw, axis)
        before(transport)
        pending = transport.all_gather([SEGMENT], "parameters of unit root")
        raw.failure = failure
        with pytest.raises(zf.ZeroError) as first:
            pending.wait()
        assert raw.told is failure  # so that the others blame the same
        with pytest.raises(zf.ZeroError) as second:
            transport.all_gather([SEGMENT], "parameters of unit root")
        assert second.value is first.value
        return first.value


@pytest.mark.parametrize(
    ("failure", "summary"),
    [
        (LOST, "Rank 1 of axis 'dp' (3) closed the connection."),
        (LATE, "Rank 1 of axis 'dp' (3) did not answer within 300 s."),
        (PeerLost(None, is_late=True, text=""), "A rank of axis 'dp' (3) did not answer within 300 s."),
    ],
    ids=["lost", "late", "of the backend"],
)
def test_a_lost_rank_is_named_and_where_this_one_waited(failure, summary):
    error = failed(failure)
    assert isinstance(error, zf.errors.LostRankError)
    assert error.summary == summary
    assert error.facts["here"] == "rank 0, waiting in #0 all-gather of parameters of unit root (6 elements)"


@pytest.mark.parametrize("known", [False, True], ids=["here", "by another module"])
def test_ranks_along_the_other_axis_are_told_of_a_failure(known, monkeypatch):
    """They would wait for this one, until their deadline. Gathers and reductions go axis by axis."""
    with pretended_grid(2, 2) as mesh:
        axes = [mesh_axis(mesh[name], verb="test") for name in ("tp", "dp")]
        raws = {axis: Failing() for axis in axes}
        monkeypatch.setattr("zero_fn.transport.links.open_transport", raws.get)
        line = line_over(axes).along(0)
        raws[axes[0]].failure = LOST
        if known:
            with pytest.raises(zf.errors.LostRankError):
                line_of(raws[axes[0]], axes[0]).all_gather([SEGMENT], "others").wait()
        assert not raws[axes[1]].has_given_up
        with pytest.raises(zf.errors.LostRankError):
            line.all_gather([SEGMENT], "parameters").wait()
        assert raws[axes[1]].has_given_up


@pytest.mark.parametrize(("peer", "seen_by"), [(2, 1), (1, 2)])
def test_the_two_ranks_that_parted_are_named_whoever_found_it(peer, seen_by):
    error = failed(OutOfStep(peer, seen_by=seen_by))
    assert isinstance(error, zf.errors.DisagreementError)
    assert error.summary == "Ranks 1 and 2 of axis 'dp' (3) are at different collectives."
    assert "layerdrop" in error.fix, "models that skip layers at random are a frequent cause"


def test_the_collective_that_failed_has_its_number():
    """Of the collectives on the group: ranks that waited in other numbers have parted before."""

    def many(transport):
        for _ in range(400):
            transport.any(torch.zeros(1, dtype=torch.uint8), "nothing").wait()

    assert "#400 all-gather of parameters of unit root (6 elements)" in str(failed(LOST, many))


def test_where_torch_compares_collectives_its_error_names_ours():
    """[TORCH_DISTRIBUTED_DEBUG=DETAIL]"""
    with pretended(2) as mesh:
        raw = Failing()
        transport = line_of(raw, mesh_axis(mesh, verb="test"))
        compared = RuntimeError(f"{MISMATCH} on ranks. Rank 1 is running ...")
        expected = "rank 0, waiting in #0 all-gather of parameters"
        with (
            patch.object(raw, "all_gather", side_effect=compared),
            pytest.raises(zf.errors.DisagreementError, match=expected) as error,
        ):
            transport.all_gather([SEGMENT], "parameters of unit a")
        assert "Rank 1 is running" in str(error.value)
        with pytest.raises(zf.errors.DisagreementError):
            transport.all_gather([SEGMENT], "parameters of unit b")


def test_marks_tell_operations_tensors_and_sizes_apart():
    with pretended(2) as mesh:
        raw = Failing()
        transport = line_of(raw, mesh_axis(mesh, verb="test"))
        bits = torch.zeros(6, dtype=torch.uint8)
        transport.all_gather([SEGMENT], "parameters of unit a")
        transport.all_gather([SEGMENT], "parameters of unit b")
        transport.all_gather([SEGMENT, SEGMENT], "parameters of unit a")
        transport.any(bits, "parameters of unit a")
        transport.any(bits, "parameters of unit a", check="after 1 steps")
        transport.any(bits, "parameters of unit a", check="after 2 steps")
        for numel, check in ((6, ""), (7, ""), (6, "two owners")):
            transport.all_to_all([[], []], [[], []], numel, "parameters of unit a", check=check)
        assert len(set(raw.marks)) == 9
        assert all(0 <= mark < 2**31 for mark in raw.marks)
        transport.all_gather([SEGMENT], "parameters of unit a")
        assert raw.marks[-1] == raw.marks[0]


def test_models_on_one_group_share_its_failure():
    with pretended(2) as mesh:
        axis = mesh_axis(mesh, verb="test")
        broken, other = Failing(LOST), Failing()
        first, second = line_of(broken, axis), line_of(other, axis)
        second.all_gather([SEGMENT], "parameters of unit a").wait()
        with pytest.raises(zf.errors.LostRankError) as error:
            first.exchange(torch.zeros(1, dtype=torch.uint8))
        assert "#1 exchange" in str(error.value)
        with pytest.raises(zf.errors.LostRankError):
            second.all_gather([SEGMENT], "parameters of unit a")


@pytest.mark.parametrize(
    ("text", "is_late"),
    [("Timed out waiting 1000ms for recv operation", True), ("Connection closed by peer [127.0.0.1]:80", False)],
)
def test_waiting_tells_late_from_lost(text, is_late):
    class Message:
        def wait(self, limit):
            raise RuntimeError(text)

    with pytest.raises(PeerLost) as error:
        Work([(Message(), 1)]).wait()
    assert error.value.is_late == is_late
    assert error.value.peer == 1


def _says_at_the_transform():
    with pretended(2, device_type="cuda") as mesh, zf.distributed.set_deadline(60):
        with pytest.warns(UserWarning, match="The deadline of guard does not act on this accelerator") as said:
            Line(Failing(), mesh_axis(mesh, verb="test"))
        assert said[0].filename == __file__
        assert "'dp' (2) of cuda, backend fake" in str(said[0].message)
        assert "timeout=timedelta" in str(said[0].message)


def _says_at_guard():
    with pretended(2, device_type="cuda") as mesh:
        transport = Line(Failing(), mesh_axis(mesh, verb="test"))
        with zf.distributed.set_deadline():
            pass
        with (
            pytest.warns(UserWarning, match="does not act on this accelerator") as said,
            zf.distributed.set_deadline(60),
        ):
            del transport
        assert len(said) == 1
        with zf.distributed.set_deadline(60):  # once
            pass


@pytest.mark.parametrize("says", [_says_at_the_transform, _says_at_guard])
def test_a_deadline_that_an_accelerator_does_not_keep_is_said_once(says, monkeypatch):
    """Its backend takes no timeout."""
    monkeypatch.setattr("zero_fn.errors._said", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with zf.distributed.set_deadline(60), pretended(2) as mesh:
            Line(Failing(), mesh_axis(mesh, verb="test"))  # the host waits here
        says()


def _timeouts():
    """Of a group of an accelerator, before, inside and after guards; the last two in one of an axis that comes later."""
    world = dist.group.WORLD
    backend = world._get_backend(torch.device("cpu"))
    found = []

    def note():
        found.append(backend.options._timeout.total_seconds())

    note()
    with zf.distributed.set_deadline(40):
        Line(Failing(), mesh_axis(DeviceMesh.from_group(world, "cuda"), verb="test"))
        note()
        with zf.distributed.set_deadline(7):
            note()
        with zf.distributed.set_deadline():
            note()
    note()
    with zf.distributed.set_deadline(9):
        note()
    note()
    return found


def test_a_deadline_is_the_timeout_of_an_accelerators_group(ranks):
    """On NCCL the device waits, and the watchdog of the group ends the process."""
    for own, *inside in ranks(2).run(_timeouts):
        assert inside == [40, 7, 40, own, 9, own]


def test_of_dropped_messages_few_bytes_are_kept(monkeypatch):
    """And none on a device: there the backend keeps them, until the device has used them."""
    kept = deque(maxlen=1024)
    monkeypatch.setattr(direct_exchange, "_dropped", kept)

    def drop(of, nbytes):
        memory = torch.zeros(3)
        of([(None, 1)], kept=(memory,), nbytes=nbytes)
        return weakref.ref(memory)

    assert drop(Work, 1 << 20)() is None
    assert not kept
    first = drop(direct_exchange._Messages, 1 << 20)
    assert first() is not None, "a message may still come"
    for _ in range(40):
        drop(direct_exchange._Messages, 1 << 20)
    assert first() is not None
    for _ in range(40):
        drop(direct_exchange._Messages, 1 << 28)
    assert first() is None
    assert len(kept) == 16


def _over_gloo(device_type):
    with warnings.catch_warnings(record=True) as said, patch("zero_fn.errors._said", set()):
        warnings.simplefilter("always")
        open_transport(mesh_axis(DeviceMesh.from_group(dist.group.WORLD, device_type), verb="test"))
    return [str(each.message).splitlines()[0] for each in said]


def test_gloo_on_cuda_is_said(ranks):
    """DTensor's all-gather ends the process there, without a word."""
    for device_type, expected in (("cpu", []), ("cuda", ["gloo moves what rests on CUDA."])):
        assert ranks(2).run(_over_gloo, device_type) == [expected, expected]


CLOSED = RuntimeError("Connection closed by peer [10.0.0.2]:41312\nat line")


def _lose_a_rank_that_asks():
    flag = Flag()
    flag._work = Mock(wait=Mock(side_effect=CLOSED))
    flag.is_raised(False)


def _lose_a_rank_that_saves(two, folder):
    with patch.object(dist.ProcessGroup, "recv", side_effect=CLOSED):
        zf.save(folder / "step-1", nn.Linear(2, 2))


test_refusals = refusals(
    {"preemption_lost_a_rank": _lose_a_rank_that_asks, "checkpoint_lost_a_rank": _lose_a_rank_that_saves}
)
