"""preemption: one rank is told, all leave at the same step; what is late is ended; children are not concerned."""

import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import zero_fn as zf
from tests.support.messages import refused
from zero_fn.local.first_failure import RankDied


def test_all_ranks_learn_at_one_step_that_one_was_told():
    def seen():
        number = signal.SIGUSR2
        preemption, rank = zf.distributed.preemption(number), int(os.environ["RANK"])
        answers = []
        for step in range(5):
            if rank == 1 and step == 2:
                os.kill(os.getpid(), number)
                while not preemption.is_told:
                    time.sleep(0.001)
            answers.append(preemption.is_due())
        assert preemption.is_told is (rank == 1)
        return answers

    assert zf.launch(seen, 3, backend="gloo") == [[False, False, False, True, True]] * 3


def test_a_rank_that_is_stuck_ends_in_time_with_the_status_that_asks_for_another_start():
    def stuck():
        began, preemption = time.monotonic(), zf.distributed.preemption(within_s=0.3)
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Lock().acquire() and threading.Barrier(2).wait()
        raise AssertionError(f"it went on, {began} {preemption}")

    began = time.monotonic()
    with pytest.raises(RankDied) as caught:
        zf.launch(stuck, 1, backend="gloo")
    assert caught.value.facts["exit_code"] == 75
    assert time.monotonic() - began < 30


def test_leave_ends_with_the_status():
    with pytest.raises(RankDied) as caught:
        zf.launch(lambda: zf.distributed.preemption().leave(), 1, backend="gloo")
    assert caught.value.facts["exit_code"] == 75


def test_a_signal_to_a_child_ends_the_child_and_tells_nobody():
    def told():
        preemption = zf.distributed.preemption()
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=[60])
        child.start()
        child.terminate()
        child.join(10)
        time.sleep(0.2)  # in which a byte of the child would come
        return child.exitcode, preemption.is_told

    assert zf.launch(told, 1, backend="gloo") == [(-signal.SIGTERM, False)]


def test_after_close_a_signal_does_what_it_did_before():
    def heard():
        before = []
        signal.signal(signal.SIGTERM, lambda number, _: before.append(number))
        threads = threading.active_count()
        preemption = zf.distributed.preemption()
        preemption.close()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)  # in which a byte of the signal would come
        return preemption.is_told, before, threading.active_count() - threads

    assert zf.launch(heard, 1, backend="gloo") == [(False, [signal.SIGTERM], 0)]


def test_a_thread_hears_no_signals_and_no_time_is_none():
    def in_a_thread():
        threading.current_thread().name = "a thread"
        with refused("preemption_in_a_thread"):
            zf.distributed.preemption()
        return True

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(in_a_thread).result()
    with refused("preemption_in_no_time"):
        zf.distributed.preemption(within_s=0)
