"""The planted bugs fit the code as it is. `python -m tests.mutations` plants them and runs the tests."""

import json
from pathlib import Path

import pytest

from tests.mutations.bugs import BUGS, Bug, planted
from tests.mutations.sample import EQUIVALENTS

PACKAGE = Path(__file__).resolve().parents[1] / "zero_fn"


def test_the_text_of_a_bug_stands_once_in_its_function():
    for bug in BUGS:
        path, text = planted(bug, PACKAGE)
        assert text != path.read_text(), bug.name
        assert PACKAGE.parent.joinpath(bug.likely.partition("::")[0]).exists(), bug.name


@pytest.mark.parametrize(
    ("where", "old", "complaint"),
    [
        ("Unit.reshard", "no such text", "stands 0 times"),
        ("Unit.no_such_method", "self", "0 functions"),
        ("__init__", "self", "0 functions"),
    ],
)
def test_a_bug_without_its_place_is_told(where, old, complaint):
    with pytest.raises(ValueError, match=complaint):
        planted(Bug("a-bug", where, "nothing", old, ""), PACKAGE)


def test_bugs_have_names_of_their_own():
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 30


def test_mutants_that_change_nothing_stand_in_the_code_and_have_a_reason():
    for row in json.loads(EQUIVALENTS.read_text()):
        lines = (PACKAGE.parent / row["file"]).read_text().splitlines()
        assert {line[2:] for line in row["diff"] if line[0] == "-"} <= set(lines), row
        assert row["reason"]
