"""Headers arrive in order, once, whoever reads first; a peer that ended, left or is late is found; blocks wait for all."""

import gc
import os
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_fn.one_host.arena import Arena
from zero_fn.one_host.group_memory import Shared
from zero_fn.one_host.mailbox import Mailbox, are_mailboxes_available, box_nbytes
from zero_fn.transport.waiting import OutOfStep, PeerLost, set_deadline

pytestmark = pytest.mark.skipif(not are_mailboxes_available(), reason="mailboxes need futexes and pidfds of Linux")


def open_boxes(pid=None):
    """Boxes of ranks 0 and 1, both of this process; what rank 0 watches in place of rank 1 is `pid`."""
    arenas = [Arena(box_nbytes(2)) for _ in range(2)]
    for arena in arenas:
        arena.close_file()
    first, second = (arena.mapped for arena in arenas)
    return Mailbox(first, 0, second, 1, pid or os.getpid()), Mailbox(second, 1, first, 0, os.getpid())


@pytest.fixture
def boxes():
    return open_boxes()


@given(st.lists(st.booleans(), max_size=40), st.randoms(use_true_random=False))
def test_headers_are_taken_by_number_in_any_order(sends, order):
    """True sends a header; False takes one that was sent."""
    here, there = open_boxes()
    sent, waiting = 0, list[int]()
    for is_send in sends:
        if is_send:
            here.send(sent * 7, sent - 1)
            waiting.append(sent)
            sent += 1
        elif waiting:
            number = waiting.pop(order.randrange(len(waiting)))
            assert there.take(number) == (number * 7, number - 1)


def test_more_headers_than_the_ring_holds_wait_until_the_peer_takes_one(boxes):
    """Both ranks send first, and more than fits: each takes what has come while it waits, or both would wait for ever."""
    count = 3 * 256 + 5
    got = [[], []]

    def run(rank):
        for number in range(count):
            boxes[rank].send(number, rank)
        got[rank] = [boxes[rank].take(number) for number in range(count)]

    with set_deadline(20):
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert got == [[(number, 1 - rank) for number in range(count)] for rank in range(2)]


def test_a_header_that_is_late_wakes_the_waiter(boxes):
    here, there = boxes
    threading.Timer(0.2, here.send, (3, 4)).start()
    before = time.process_time()
    assert there.take(0) == (3, 4)
    assert time.process_time() - before < 0.1  # it slept


def test_a_dropped_message_is_skipped_whether_it_has_come_or_not(boxes):
    here, there = boxes
    here.send(0, 0)
    there.drop(0, 1, 0)
    there.drop(1, 1, 1)
    there.drop(1, 1, 1)  # an interrupt may have come as it was dropped
    assert here.read_by_peer(1) == 2  # before it was written
    here.send(1, 1)
    here.send(2, 2)
    assert there.take(2) == (2, 2)
    assert not there._arrived and not there._unwanted
    assert here.read_by_peer(1) == 2
    assert here.read_by_peer(0) == 0


def test_a_peer_that_is_late_is_told_from_one_that_left(boxes):
    here, there = boxes
    with set_deadline(0.1), pytest.raises(PeerLost) as late:
        there.take(0)
    here.send(5, 6)
    here.leave()
    assert there.take(0) == (5, 6)  # it was written before
    with pytest.raises(PeerLost) as left:
        there.take(1)
    assert (late.value.is_late, left.value.is_late) == (True, False)
    assert "given up" in str(left.value)


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (PeerLost(700, is_late=False, text=""), {"peer": 700, "is_late": False}),
        (PeerLost(0, is_late=True, text=""), {"peer": 0, "is_late": True}),
        # Who blames nobody is the one that is lost.
        (PeerLost(None, is_late=True, text=""), {"peer": 0, "is_late": False}),
        (OutOfStep(0, seen_by=1), {"peer": 0, "seen_by": 1}),
        (OutOfStep(90_000, seen_by=3), {"peer": 90_000, "seen_by": 3}),
        (OutOfStep(3, seen_by=90_000), {"peer": 3, "seen_by": 90_000}),
    ],
    ids=repr,
)
def test_whom_a_peer_blames_is_heard_and_the_first_word_stands(boxes, failure, expected):
    here, there = boxes
    here.leave(failure)
    here.leave()
    with pytest.raises(type(failure)) as heard:
        there.take(0)
    assert vars(heard.value) == expected


def test_what_a_peer_wrote_while_its_loss_was_found_is_read(boxes, monkeypatch):
    here, there = boxes

    def found(end_s):
        there.send(3, 4)
        return PeerLost(1, is_late=False, text="")

    monkeypatch.setattr(here, "_loss", found)
    assert here.take(0) == (3, 4)


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def test_a_peer_that_was_killed_is_found_at_once(sleeper):
    here, there = open_boxes(sleeper.pid)
    there.send(1, 2)
    threading.Timer(0.1, sleeper.kill).start()
    assert here.take(0) == (1, 2)
    begin = time.monotonic()
    with pytest.raises(PeerLost, match="ended") as lost:
        here.take(1)
    assert not lost.value.is_late
    assert time.monotonic() - begin < 5


def test_nobody_who_does_not_run_can_be_watched_and_closed_mailboxes_leave_no_descriptor(
    sleeper,
):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        open_boxes()
    assert len(os.listdir("/proc/self/fd")) == before
    sleeper.kill()
    sleeper.wait()
    with pytest.raises(ProcessLookupError):
        open_boxes(sleeper.pid)


def test_a_block_is_given_back_once_all_peers_have_read_it():
    arenas = [Arena(box_nbytes(3)) for _ in range(3)]
    own = {peer: Mailbox(arenas[0].mapped, 0, arenas[peer].mapped, peer, os.getpid()) for peer in (1, 2)}
    theirs = {peer: Mailbox(arenas[peer].mapped, peer, arenas[0].mapped, 0, os.getpid()) for peer in (1, 2)}
    shared = Shared(arenas[0], {peer: arenas[peer].mapped for peer in (1, 2)}, own)
    (_, _, first), (_, _, second) = shared.write(0, 100), shared.write(0, 100)
    assert first != second  # neither was read
    theirs[1].acknowledge(0, 1)
    theirs[1].acknowledge(0, 0)
    _, _, third = shared.write(1, 100)
    assert third not in (first, second)  # rank 2 may be reading them
    theirs[2].acknowledge(0, 0)
    assert shared.write(1, 100)[2] == first
    assert shared.write(1, 100)[2] != second
    for arena in arenas:
        arena.close_file()


def test_pages_of_an_arena_go_back_when_its_last_transport_is_gone():
    arena = Arena(box_nbytes(1))
    shared = Shared(arena, {}, {})
    first, second = threading.local(), threading.local()
    shared.used_by(first)
    shared.used_by(second)
    arena.mapped.memory[1_000_000:3_000_000] = 1
    del first
    assert os.fstat(arena.fd).st_blocks * 512 >= 2_000_000
    del second
    assert os.fstat(arena.fd).st_blocks * 512 < 100_000
    arena.close_file()


def test_the_end_of_a_forked_child_says_nothing_of_its_parent():
    """A worker of a data loader collected the model it had inherited, and the pages its parent wrote were gone."""

    def in_child(act):
        pid = os.fork()
        if not pid:
            act()
            gc.collect()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

    arenas = [Arena(box_nbytes(2)) for _ in range(2)]
    here = Mailbox(arenas[0].mapped, 0, arenas[1].mapped, 1, os.getpid())
    there = Mailbox(arenas[1].mapped, 1, arenas[0].mapped, 0, os.getpid())
    held = {"shared": Shared(arenas[0], {1: arenas[1].mapped}, {1: here}), "user": threading.local()}
    held["shared"].used_by(held["user"])
    arenas[0].mapped.memory[1_000_000:2_000_000] = 1
    in_child(lambda: held.pop("user"))
    in_child(held.clear)
    assert arenas[0].mapped.memory[1_000_000:2_000_000].all()
    with set_deadline(0.1), pytest.raises(PeerLost) as late:
        there.take(0)
    assert late.value.is_late
    held.clear()
    with pytest.raises(PeerLost, match="given up"):
        there.take(0)
    for arena in arenas:
        arena.close_file()
