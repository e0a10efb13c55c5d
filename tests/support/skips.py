"""`-p tests.support.skips`: a skipped test fails the run, unless the machine lacks what no package brings."""

from __future__ import annotations

import pytest

MAY_BE_LACKING = (
    "no GPU",
    "there is a GPU",
    "no network namespace",
    "no io_uring here",  # where a container forbids it
    "cannot mount",  # without the rights of root
    "no mpi",  # examples/launch/install-debian.sh
    "no Slurm",
    "no promtool",  # of Debian's package prometheus
    "no prometheus",
)
"""How the reasons of skips begin that are allowed."""

_others: dict[str, str] = {}


def _note(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        if not reason.removeprefix("Skipped: ").startswith(MAY_BE_LACKING):
            _others[report.nodeid] = reason


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _note(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _note(report)


def pytest_sessionfinish(session: pytest.Session) -> None:
    # Of several processes the one that started them judges: it hears of all reports.
    if _others and not hasattr(session.config, "workerinput"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for test, reason in _others.items():
        terminalreporter.write_line(f"FAILED, as it was skipped: {test}: {reason}", red=True)
