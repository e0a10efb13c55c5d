"""The simulator where it could make other tests lie: what it runs, and that it finds what it must find."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tests.conftest as suite
import zero_fn as zf
from tests.simulation import Desync, Fault, axis
from zero_fn.transport.direct_exchange import CONTROL, GATHER, REDUCE


def group():
    return axis().get_group()


def trained():
    """Two steps of a model on this rank."""
    model = zf.shard_params(nn.Sequential(*(nn.Linear(5, 5) for _ in range(3))), axis())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        model(torch.ones(2, 5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


# -- what runs ----------------------------------------------------------------------------------------------------------


def test_the_schedule_decides_who_is_next_and_the_same_one_again(simulated):
    def order_of(*schedule):
        order = []

        def noting():
            for _ in range(3):
                order.append(dist.get_rank())
                group().send([torch.ones(1)], (dist.get_rank() + 1) % 3, 1).wait()
            for _ in range(3):
                group().recv([torch.empty(1)], (dist.get_rank() - 1) % 3, 1).wait()

        simulated(3, schedule=schedule).run(noting)
        return tuple(order)

    assert order_of() == (0, 0, 0, 1, 1, 1, 2, 2, 2)
    assert order_of(1)[:4] == (1, 2, 0, 1)
    assert order_of(2, 1, 1, 0, 2) == order_of(2, 1, 1, 0, 2)
    assert len({order_of(a, b, c) for a in range(3) for b in range(3) for c in range(3)}) > 15


# -- what it must find --------------------------------------------------------------------------------------------------


def test_a_deadlock_is_found_at_once_and_described(simulated):
    def both_wait():
        group().recv([torch.empty(3)], 1 - dist.get_rank(), 5).wait()

    with pytest.raises(RuntimeError, match="Timed out waiting") as caught:
        simulated(2).run(both_wait)
    assert "rank 1 waits for 3 float32 from rank 0 in group '0'" in "".join(caught.value.__notes__)


def test_ranks_that_call_different_collectives_are_found_though_their_numbers_are_right(simulated):
    def differing():
        transport = zf.transport.links.open_transport(zf.values.mesh.mesh_axis(axis(), verb="test"))
        transport.any(torch.zeros(1, dtype=torch.uint8)).wait()
        if dist.get_rank() == 1:
            transport.all_gather(transport.gather_plan([]))

    with pytest.raises(Desync, match=r"collective 1: rank 0 None, rank 1 \('all_gather', 0\)"):
        simulated(2).run(differing)


def test_a_message_that_nobody_received_is_found(simulated):
    def leaving_one():
        if dist.get_rank() == 0:
            group().send([torch.ones(2)], 1, 3).wait()

    with pytest.raises(Desync, match="1 from rank 0 to rank 1, tag 3"):
        simulated(2).run(leaving_one)


@pytest.mark.parametrize("mistake", ["write before the send is over", "read before the receive is over"])
def test_late_messages_show_a_missing_wait(simulated, mistake):
    def hasty():
        value, received = torch.ones(1), torch.zeros(1)
        rank = dist.get_rank()
        send = group().send([value], 1 - rank, 3)
        if mistake == "write before the send is over":
            value.fill_(5.0)
        receive = group().recv([received], 1 - rank, 3)
        early = received.item()
        receive.wait()
        send.wait()
        return early if mistake == "read before the receive is over" else received.item()

    assert 1.0 in simulated(2, timing="early", schedule=(1,)).run(hasty)
    assert 1.0 not in simulated(2, timing="late", schedule=(1,)).run(hasty)


# -- faults -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 7, 20])
def test_a_killed_rank_stops_there_and_the_others_are_told(simulated, at):
    report = simulated(3, faults=[Fault("kill", 1, at)]).report(trained)
    first, killed, last = report.outcomes
    assert killed.was_killed
    assert report.counts[1] == at + 1
    for told in (first, last):
        assert isinstance(told.error, zf.errors.LostRankError), report


@pytest.mark.parametrize("tag", [GATHER, REDUCE, CONTROL])
def test_a_lost_message_is_missed_and_never_mistaken_for_the_next(simulated, tag):
    report = simulated(3, faults=[Fault("drop", 2, 4, tag=tag)]).report(trained)
    assert len(report.happened) == 1
    assert any("did not answer within" in str(outcome.error) for outcome in report.outcomes)


def test_a_message_of_nan_reaches_its_receiver(simulated):
    def told():
        total = torch.ones(2)
        dist.all_reduce(total)
        return total.tolist()

    one, other = simulated(2, faults=[Fault("nan", 0, 0)]).run(told)
    assert one == [2.0, 2.0]
    assert all(value != value for value in other)


def test_a_test_that_passes_without_a_case_on_its_ranks_fails(simulated):
    config = SimpleNamespace(stash={suite.TIERS_OPEN: {"simulated": simulated}})
    item = SimpleNamespace(
        funcargs={"simulated": simulated}, config=config, _fixtureinfo=SimpleNamespace(argnames=("simulated",))
    )
    for is_used in (True, False):
        around = suite.RanksAreUsed().pytest_runtest_call(item)
        next(around)
        if is_used:
            simulated(2).run(dist.get_rank)
        with nullcontext() if is_used else pytest.raises(AssertionError, match="nothing ran on simulated"):
            next(around, None)
