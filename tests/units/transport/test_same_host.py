"""What transports of one process group share when its ranks share memory: one sequence of operations, one arena."""

import contextlib
import gc
import inspect
import linecache
import os

import pytest
import torch
import torch.distributed as dist

from tests.promises.test_interrupts import _ROOT, _moments, _Tracer
from tests.support.ranks import axis
from zero_fn.one_host.group_memory import Shared, _map_all, shared_by
from zero_fn.one_host.mailbox import Mailbox
from zero_fn.one_host.same_host import SameHost, _Message
from zero_fn.transport import links
from zero_fn.transport.direct_exchange import Exchange
from zero_fn.transport.segment import Segment
from zero_fn.transport.waiting import OutOfStep, PeerLost
from zero_fn.values.mesh import mesh_axis


def exchanged(at_rest):
    """The number of each rank, from that rank."""
    rows = torch.zeros(dist.get_world_size(), 1, dtype=torch.uint8)
    rows[dist.get_rank()] = dist.get_rank()
    at_rest.exchange(rows).wait()
    return rows.tolist()


def open_transport():
    chosen = links.open_transport(mesh_axis(axis(), verb="test"))
    assert type(chosen) is SameHost
    return chosen


def shared_now():
    own = mesh_axis(axis(), verb="test")
    shared = shared_by(own.group, own.rank, own.size, Exchange(own.group, own.rank, own.size))
    assert shared is not None, "these ranks should share memory"
    return shared


def live_blocks():
    shared = shared_now()
    shared._free_read()
    return sum(map(len, shared._blocks))


def arenas_open():
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            count += "memfd:zero_fn" in os.readlink(f"/proc/self/fd/{fd}")
    return count


def test_a_rank_at_the_collective_of_another_model_is_found_before_a_byte_is_used(ranks):
    def at_different_models():
        own = dist.get_rank()
        models = [open_transport(), open_transport()]
        whole = torch.full((4,), float(own))
        with pytest.raises(OutOfStep):
            models[own].all_gather(models[own].gather_plan([Segment(whole, 4, 2)]), 11 + own).wait()
        return whole.tolist(), exchanged(open_transport())

    assert ranks(2).run(at_different_models) == [([float(own)] * 4, [[0], [1]]) for own in range(2)]


def test_collectives_that_nobody_waits_for_leave_no_block(ranks):
    """Nor do those that are interrupted between two lines, as they find what was read or tell that they have read."""

    def dropped():
        at_rest, text = (
            open_transport(),
            "".join(map(inspect.getsource, told)).replace("return header, number, start", ""),
        )
        plan = at_rest.gather_plan([Segment(torch.zeros(4), 4, 2)])
        exchanged(at_rest)
        before = live_blocks()
        for _ in range(3):
            at_rest.all_gather(plan)
        exchanged(at_rest)
        moments = _moments(lambda: at_rest.all_gather(plan).wait())
        moments = [moment for moment in moments if linecache.getline(_ROOT + moment[0][0], moment[0][1]) in text]
        for moment in moments:
            with contextlib.suppress(KeyboardInterrupt):
                _Tracer(moment).run(lambda: at_rest.all_gather(plan).wait())
            exchanged(at_rest)
        exchanged(at_rest)
        return live_blocks() - before if len(moments) > 10 else 10

    told = Mailbox.acknowledge, _Message.close, Shared._free_read, Shared.write
    assert max(ranks(2).run(dropped)) <= 1  # the last exchange: the peer may not have read it yet


def test_no_file_stays_open_but_those_of_mappings(ranks):
    """Python keeps a descriptor for each mapping: one for each rank."""

    def open_files():
        exchanged(open_transport())
        return arenas_open()

    assert ranks(2).run(open_files) == [2, 2]


def test_ranks_that_do_not_come_together_leave_no_file_open():
    class Lost:
        def exchange(self, rows):
            raise PeerLost(1, is_late=True, text="a test")

    gc.collect()
    before = arenas_open()
    for _ in range(3):
        with pytest.raises(PeerLost):
            _map_all(0, 2, Lost())
    gc.collect()
    assert arenas_open() == before
