"""Ranks are killed, stopped and led astray for real: every rank that lives gets an error that names what was lost, in time.

How many cases run is decided by the profile of Hypothesis (`tests/conftest.py`); each takes fresh processes.
"""

import re
import runpy

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

import zero_fn as zf
from tests.support.faults import ASTRAY, Fault
from tests.support.messages import refusals
from tests.support.profiles import examples
from tests.support.programs import STAGES
from zero_fn.transport import waiting
from zero_fn.transport.waiting import deadline

DEADLINE_S = 1.0
NOTICED_S = 1.0
"""Beyond the deadline, in seconds of a machine that has time: see `tests/support/metronome.py`."""

stages = st.sampled_from(sorted(STAGES))


@st.composite
def victims(draw):
    """A number of ranks, and one of them."""
    n = draw(st.integers(2, 3))
    return n, draw(st.integers(0, n - 1))


def told(fresh_ranks, n, stage, fault, kind):
    """What ranks were told, in time, each by an error of this kind. If one was told late they are asked once more: a shared
    machine may stop for a moment, which does not happen twice at the same place, and a rank that notices late does."""
    said = fresh_ranks(n, stage, fault)
    if any(report is not None and report.late_s >= NOTICED_S for report in said.values()):
        said = fresh_ranks(n, stage, fault)
    reports = []
    for rank, report in said.items():
        assert report is not None, f"rank {rank} noticed nothing"
        assert report.error == kind, report.text
        assert report.late_s < NOTICED_S, report
        reports.append(report)
    return reports


LOST = {"kill": "closed the connection.", "exit": "closed the connection.", "stop": "did not answer within "}


@examples(dev=9, ci=100, deep=160)
@given(where=victims(), stage=stages, kind=st.sampled_from(sorted(LOST)), at=st.integers(0, 30))
@example(where=(3, 0), stage="zero3", kind="kill", at=0)
@example(where=(3, 2), stage="zero2", kind="stop", at=11)
def test_the_others_name_a_rank_that_ended_or_stopped_and_nobody_else(fresh_ranks, where, stage, kind, at):
    n, victim = where
    deadline_s = [DEADLINE_S] if kind == "stop" else []
    reports = told(fresh_ranks, n, stage, Fault(kind, victim, at, *deadline_s), "LostRankError")
    assert len(reports) == n - 1
    for report in reports:
        summary = report.text.splitlines()[0]
        assert summary.startswith(f"Rank {victim} of axis 'dp' ({n}) ") and LOST[kind] in summary, report.text
        assert kind != "stop" or report.after_s > DEADLINE_S * 0.9, report


@examples(dev=8, ci=60, deep=100)
@given(where=victims(), stage=stages, kind=st.sampled_from(ASTRAY), step=st.integers(0, 2))
@example(where=(2, 1), stage="zero3", kind="skips a backward", step=1)
@example(where=(3, 0), stage="zero1", kind="raises and goes on", step=1)
def test_every_rank_is_told_at_once_where_one_went_astray(fresh_ranks, where, stage, kind, step):
    assume((stage, kind) != ("replicate", "raises and goes on"))  # its forward sends nothing: nothing was missed
    n, victim = where
    reports = told(fresh_ranks, n, stage, Fault(kind, victim, step), "DisagreementError")
    assert len(reports) == n
    for report in reports:
        assert str(victim) in re.findall(r"\d+", report.text.splitlines()[0])[:2], report.text


@pytest.mark.parametrize("stage", ["replicate", "zero1", "zero3"])
def test_a_rank_that_left_out_a_step_of_the_optimizer_is_told(fresh_ranks, stage):
    """No rank trains on beside it: replicas would part without a word."""
    for rank, report in enumerate(told(fresh_ranks, 2, stage, Fault("skips a step", 1, 1), "DisagreementError")):
        assert re.findall(r"after (\d) steps of optimizers", report.text) == [str(2 - rank)], report.text
        assert "left out optimizer.step()" in report.text


def test_a_deadline_holds_from_now_on_or_inside_a_block():
    with zf.distributed.set_deadline(7):
        assert deadline() == 7
        zf.distributed.set_deadline(8)
        assert deadline() == 8
    assert deadline() == 300


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), 1e20, "soon", ""])
def test_a_deadline_that_is_no_time_is_refused(seconds, monkeypatch):
    with pytest.raises(zf.errors.LayoutError), zf.distributed.set_deadline(seconds):
        pass
    assert deadline() == 300
    monkeypatch.setenv("ZERO_FN_DEADLINE_S", str(seconds))
    with pytest.raises(zf.errors.LayoutError, match="ZERO_FN_DEADLINE_S must be positive"):
        runpy.run_path(waiting.__file__)
    monkeypatch.setenv("ZERO_FN_DEADLINE_S", "2.5")
    assert runpy.run_path(waiting.__file__)["deadline"]() == 2.5


test_refusals = refusals({"deadline_of_no_time": lambda: zf.distributed.set_deadline(0)})
