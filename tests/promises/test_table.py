"""The table of `tests/README.md` names files that exist, for each row of the matrix."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROWS = [line for line in (TESTS / "README.md").read_text().splitlines() if re.match(r"\| [GN]\d+ \|", line)]


def test_the_rows_of_the_table_are_in_order_and_name_files_that_exist():
    assert [row.split(" | ")[0] for row in ROWS if row[2] == "G"] == [f"| G{number}" for number in range(1, 49)]
    for row in ROWS:
        named = re.findall(r"`([^`]+)`", row.rsplit(" | ", 1)[1])
        assert named, row
        assert all((TESTS / name).exists() for name in named), row
