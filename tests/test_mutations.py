"""The planted bugs fit the code as it is. `python -m tests.mutations` plants them and runs the tests."""

import json
from pathlib import Path

from tests.mutations.bugs import BUGS, planted
from tests.mutations.sample import EQUIVALENTS

PACKAGE = Path(__file__).resolve().parents[1] / "zero_fn"


def test_the_text_of_a_bug_stands_once_in_its_function():
    for bug in BUGS:
        path, text = planted(bug, PACKAGE)
        assert text != path.read_text(), bug.name
        assert PACKAGE.parent.joinpath(bug.likely.partition("::")[0]).exists(), bug.name


def test_mutants_that_change_nothing_stand_in_the_code_and_have_a_reason():
    for row in json.loads(EQUIVALENTS.read_text()):
        lines = (PACKAGE.parent / row["file"]).read_text().splitlines()
        assert {line[2:] for line in row["diff"] if line[0] == "-"} <= set(lines), row
        assert row["reason"]
