"""The simulator itself: it is only worth something if it can fail, and if what it finds can be found again."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import tests.conftest as suite
import zero_fn as zf
from tests.simulation import Desync, Fault, Simulated, axis
from tests.support.groups import alone
from zero_fn.transport.exchange import CONTROL, GATHER, REDUCE


def group() -> dist.ProcessGroup:
    return axis().get_group()


def passed_round(steps: int = 1) -> list[float]:
    """Each rank sends to the next and receives from the one before, which adds one."""
    rank, n = dist.get_rank(), dist.get_world_size()
    seen = []
    value = torch.tensor([float(rank)])
    for _ in range(steps):
        received = torch.empty(1)
        receive = group().recv([received], (rank - 1) % n, 7)
        send = group().send([value], (rank + 1) % n, 7)
        receive.wait()
        send.wait()
        value = received + 1
        seen.append(value.item())
    return seen


def trained(steps: int = 2, verb: str = "shard_params") -> list[Tensor]:
    torch.manual_seed(0)
    model = getattr(zf, verb)(nn.Sequential(*(nn.Linear(5, 5) for _ in range(3))), axis())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        x = torch.randn(2, 5, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().full_tensor() for parameter in model.parameters()]


def is_same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


# -- what runs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 8])
@pytest.mark.parametrize("timing", ["early", "late"])
@pytest.mark.parametrize("schedule", [(), (1, 0, 2), (5,)])
def test_messages_arrive_where_they_were_sent(simulated: Simulated, n: int, timing: str, schedule: tuple[int]) -> None:
    by_rank = simulated(n, timing=timing, schedule=schedule).run(passed_round, 3)  # type: ignore[arg-type]
    assert by_rank == [[(rank - step - 1) % n + step + 1 for step in range(3)] for rank in range(n)]


# Their names before 2.13, and since.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_collectives_of_the_group_do_what_their_names_say(simulated: Simulated, n: int) -> None:
    def reduced(values: list[float], op: Any = dist.ReduceOp.SUM) -> list[float]:
        total = torch.tensor(values)
        dist.all_reduce(total, op=op)
        return total.tolist()

    def all_of_them() -> None:
        rank = dist.get_rank()
        assert reduced([float(rank)] * 3) == [n * (n - 1) / 2] * 3
        assert reduced([rank, -rank], dist.ReduceOp.MAX) == [n - 1, 0]
        assert reduced([float(rank)], dist.ReduceOp.AVG) == [(n - 1) / 2]
        gathered, listed = torch.empty(2 * n), [torch.empty(1) for _ in range(n)]
        _all_gather(gathered, torch.tensor([rank, 0.5]))
        assert gathered.tolist() == [value for r in range(n) for value in (r, 0.5)]
        dist.all_gather(listed, torch.tensor([float(rank)]))
        assert listed == list(range(n))
        piece = torch.empty(2)
        _reduce_scatter(piece, torch.arange(2.0 * n) + rank)
        assert piece.tolist() == [n * (2 * rank + i) + n * (n - 1) / 2 for i in range(2)]
        mine, sizes = torch.empty(n * rank), [rank] * n  # from each rank as many as this rank's number
        dist.all_to_all_single(mine, torch.full((n * (n - 1) // 2,), 1.0 + rank), sizes, list(range(n)))
        assert mine.tolist() == [1.0 + r for r in range(n) for _ in range(rank)]
        told, handed = torch.tensor([float(rank)]), torch.empty(1)
        dist.broadcast(told, src=n - 1)
        dist.scatter(handed, [torch.tensor([float(r)]) for r in range(n)] if rank == 0 else None, src=0)
        assert (told.item(), handed.item()) == (n - 1, rank)
        dist.barrier()

    simulated(n, schedule=(1, 2)).run(all_of_them)


def test_a_grid_has_an_axis_of_its_own_in_every_row(simulated: Simulated) -> None:
    def rows() -> tuple[int, float]:
        total = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(total, group=group())
        return axis().get_local_rank(), total.item()

    assert simulated((2, 2), schedule=(1, 3)).run(rows) == [(0, 1.0), (1, 1.0), (0, 5.0), (1, 5.0)]


def test_groups_of_the_main_thread_are_left_alone(simulated: Simulated) -> None:
    with alone() as mesh:
        before = dist.get_world_size(), dist.get_backend()
        assert len(simulated(3).run(dist.get_world_size)) == 3
        assert (dist.get_world_size(), dist.get_backend()) == before
        model = zf.shard_params(nn.Linear(3, 3), mesh)
        model(torch.ones(1, 3)).sum().backward()
        assert simulated(2).run(dist.get_backend) == ["simulated"] * 2
        assert init_device_mesh("cpu", (1,)).size() == 1
    assert not dist.is_initialized()


def test_the_generator_of_the_main_thread_is_left_alone_and_ranks_have_their_own(simulated: Simulated) -> None:
    def drawn() -> list[float]:
        torch.manual_seed(dist.get_rank())
        values = []
        for _ in range(3):
            values.append(torch.rand(()).item())
            dist.barrier()
        return values

    torch.manual_seed(7)
    expected = torch.rand(2)
    torch.manual_seed(7)
    first = torch.rand(1)
    assert simulated(2, schedule=(1,)).run(drawn) == simulated(2).run(drawn)
    assert torch.equal(torch.cat([first, torch.rand(1)]), expected)


# -- whose turn it is -------------------------------------------------------------------------------------------------


def order_of(simulated: Simulated, schedule: tuple[int, ...]) -> list[int]:
    """Which rank ran after each send."""
    order: list[int] = []

    def noting() -> None:
        for _ in range(3):
            order.append(dist.get_rank())
            send = group().send([torch.ones(1)], (dist.get_rank() + 1) % 3, 1)
            send.wait()
        for _ in range(3):
            group().recv([torch.empty(1)], (dist.get_rank() - 1) % 3, 1).wait()

    simulated(3, schedule=schedule).run(noting)
    return order


def test_the_schedule_decides_who_is_next(simulated: Simulated) -> None:
    assert order_of(simulated, ()) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert order_of(simulated, (1,))[:4] == [1, 2, 0, 1]
    orders = {tuple(order_of(simulated, (a, b, c))) for a in range(3) for b in range(3) for c in range(3)}
    assert len(orders) > 15


def test_an_interleaving_is_reproducible(simulated: Simulated) -> None:
    for schedule in ((), (1, 0), (2, 1, 1, 0, 2)):
        assert order_of(simulated, schedule) == order_of(simulated, schedule)
        one, two = (simulated(3, schedule=schedule).report(trained) for _ in range(2))
        assert (one.events, one.counts, one.trace) == (two.events, two.counts, two.trace)


def test_one_rank_runs_at_a_time(simulated: Simulated) -> None:
    running, most = 0, 0

    def counting() -> None:
        nonlocal running, most
        for _ in range(20):
            running += 1
            most = max(most, running)
            sum(range(1000))
            running -= 1
            dist.barrier()

    simulated(4, schedule=(1, 2, 3)).run(counting)
    assert most == 1


def test_threads_are_kept_between_cases(simulated: Simulated) -> None:
    simulated(2).run(trained)
    simulated(2, faults=[Fault("kill", 0, 5)]).report(trained)
    before = threading.active_count()
    for _ in range(3):
        simulated(2).run(trained)
        simulated(2, faults=[Fault("kill", 0, 5)]).report(trained)
    assert threading.active_count() == before


# -- what it must find --------------------------------------------------------------------------------------------------


def test_a_deadlock_is_found_at_once_and_described(simulated: Simulated) -> None:
    def both_wait() -> None:
        group().recv([torch.empty(3)], 1 - dist.get_rank(), 5).wait()

    report = simulated(2).report(both_wait)
    assert report.deadlock == [
        "rank 0 waits for 3 float32 from rank 1 in group '0'",
        "rank 1 waits for 3 float32 from rank 0 in group '0'",
    ]
    for outcome in report.outcomes:
        assert isinstance(outcome.error, RuntimeError)
        assert "Timed out waiting" in str(outcome.error)
    assert "receive from rank 1 3 float32 tag 0x5" in str(report)
    with pytest.raises(RuntimeError, match="Timed out waiting") as caught:
        simulated(2).run(both_wait)
    assert "rank 1 waits for" in "".join(caught.value.__notes__)


def test_a_rank_that_leaves_early_is_missed(simulated: Simulated) -> None:
    def one_leaves() -> None:
        if dist.get_rank() == 1:
            raise ZeroDivisionError
        dist.barrier()

    report = simulated(3, schedule=(1,)).report(one_leaves)
    assert isinstance(report.outcomes[1].error, ZeroDivisionError)
    assert "Connection closed by peer [rank 1]" in str(report.outcomes[0].error)
    assert report.deadlock is None


def test_ranks_that_call_different_collectives_are_found_though_their_numbers_are_right(simulated: Simulated) -> None:
    def differing() -> None:
        rank = dist.get_rank()
        if rank == 0:
            group().send([torch.ones(2)], 1, 3).wait()
        else:
            group().recv([torch.ones(2)], 0, 3).wait()
        transport = zf.transport.links.open_transport(zf.values.mesh.mesh_axis(axis(), verb="test"))
        transport.any(torch.zeros(1, dtype=torch.uint8)).wait()
        if rank == 1:
            transport.all_gather(transport.gather_plan([]))

    with pytest.raises(Desync, match=r"collective 1: rank 0 None, rank 1 \('all_gather', 0\)"):
        simulated(2).run(differing)


def test_a_message_that_nobody_received_is_found(simulated: Simulated) -> None:
    def leaving_one() -> None:
        if dist.get_rank() == 0:
            group().send([torch.ones(2)], 1, 3).wait()

    with pytest.raises(Desync, match="1 from rank 0 to rank 1, tag 3"):
        simulated(2).run(leaving_one)


def test_a_message_of_another_size_is_found(simulated: Simulated) -> None:
    def mismatched() -> None:
        if dist.get_rank() == 0:
            group().send([torch.ones(2)], 1, 3).wait()
        else:
            group().recv([torch.ones(3)], 0, 3).wait()

    with pytest.raises(RuntimeError, match="expected 3 float32 from rank 0, got 2 float32"):
        simulated(2).run(mismatched)


@pytest.mark.parametrize("mistake", ["write before the send is over", "read before the receive is over"])
def test_late_messages_show_a_missing_wait(simulated: Simulated, mistake: str) -> None:
    def hasty() -> float:
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
@pytest.mark.parametrize("n", [2, 3])
def test_a_killed_rank_stops_there_and_the_others_are_told(simulated: Simulated, n: int, at: int) -> None:
    report = simulated(n, faults=[Fault("kill", 1, at)]).report(trained)
    assert report.outcomes[1].was_killed
    assert report.counts[1] == at + 1
    for rank, outcome in enumerate(report.outcomes):
        if rank != 1:
            assert isinstance(outcome.error, zf.LostRankError)
            assert "closed the connection" in str(outcome.error)


def test_a_killed_rank_stays_silent_in_its_finally(simulated: Simulated) -> None:
    def stubborn() -> None:
        try:
            dist.barrier()
        finally:
            dist.barrier()

    report = simulated(2, faults=[Fault("kill", 0, 0)]).report(stubborn)
    assert report.outcomes[0].was_killed
    assert report.counts[0] == 1


@pytest.mark.parametrize("tag", [GATHER, REDUCE, CONTROL])
def test_a_lost_message_is_missed_and_never_mistaken_for_the_next(simulated: Simulated, tag: int) -> None:
    report = simulated(3, faults=[Fault("drop", 2, 4, tag=tag)]).report(trained)
    assert len(report.happened) == 1
    assert any("did not answer within" in str(outcome.error) for outcome in report.outcomes)
    assert report.deadlock is not None


def test_a_message_of_nan_reaches_its_receiver(simulated: Simulated) -> None:
    def told() -> list[float]:
        total = torch.ones(2)
        dist.all_reduce(total)
        return total.tolist()

    one, other = simulated(2, faults=[Fault("nan", 0, 0)]).run(told)
    assert one == [2.0, 2.0]
    assert all(value != value for value in other)


# -- the tier -----------------------------------------------------------------------------------------------------------


def test_a_test_that_passes_without_a_case_on_its_ranks_fails(simulated: Simulated) -> None:
    item: Any = SimpleNamespace(funcargs={"simulated": simulated}, config=SimpleNamespace(stash=pytest.Stash()))
    item._fixtureinfo = SimpleNamespace(argnames=("simulated",))
    item.config.stash[suite.TIERS_OPEN] = {"simulated": simulated}

    for is_used in (True, False):
        around = suite.RanksAreUsed().pytest_runtest_call(item)
        next(around)
        if is_used:
            simulated(2).run(dist.get_rank)
        with nullcontext() if is_used else pytest.raises(AssertionError, match="nothing ran on simulated"):
            next(around, None)
