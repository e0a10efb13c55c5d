"""Law 6, on ranks of this process: whatever a program does, it gives what plain replicas give, to the bit."""

from __future__ import annotations

from typing import Literal

from hypothesis import given
from hypothesis import strategies as st

from property_tests.on_ranks import run_program
from property_tests.replicas import differences
from property_tests.rules import Fail, Program
from property_tests.strategies_of_programs import programs, schedules
from tests.profiles import examples
from tests.simulation import Simulated

MESHES: tuple[int | tuple[int, int], ...] = (1, 2, 2, 2, 3, 3, 4, (2, 2), 5, 8)

timings = st.sampled_from(["early", "late"])
transports = st.sampled_from(["exchange", "native"])


def check(
    simulated: Simulated,
    program: Program,
    n: int | tuple[int, int] = 2,
    schedule: tuple[int, ...] = (),
    timing: Literal["early", "late"] = "late",
    transport: Literal["exchange", "native"] = "exchange",
) -> None:
    """Runs a program and its replicas, and compares them after every rule."""
    seen = simulated(n, schedule=schedule, timing=timing, transport=transport).run(
        run_program, program, may_leave_messages=any(isinstance(rule, Fail) for rule in program.rules)
    )
    rows = [seen] if isinstance(n, int) else [seen[:2], seen[2:]]
    for row in rows:
        found = differences(program, row)
        assert not found, "\n".join(found)


@examples(dev=700, ci=15_000, deep=1_000_000)
@given(programs(), st.sampled_from(MESHES), schedules, timings, transports)
def test_any_program_gives_what_replicas_give(
    simulated: Simulated,
    program: Program,
    n: int | tuple[int, int],
    schedule: tuple[int, ...],
    timing: Literal["early", "late"],
    transport: Literal["exchange", "native"],
) -> None:
    check(simulated, program, n, schedule, timing, transport)
