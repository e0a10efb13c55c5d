"""The planted bugs fit the code as it is. `python -m tests.mutations` plants them and runs the tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutations.bugs import BUGS, Bug

PACKAGE = Path(__file__).resolve().parents[1] / "zero_fn"


@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_the_text_of_a_bug_stands_once_in_its_file(bug: Bug) -> None:
    assert (PACKAGE / bug.file).read_text().count(bug.old) == 1
    assert bug.new != bug.old
    assert Path(__file__).resolve().parents[1].joinpath(bug.likely.partition("::")[0]).exists()


def test_bugs_have_names_of_their_own_and_are_many() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 36
