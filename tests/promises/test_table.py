"""The table of `tests/README.md` names every test of the matrix, and only tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

FOLDER = Path(__file__).parent
TABLE = FOLDER.parent / "README.md"


def rows() -> dict[str, str]:
    """The cell of tests of each row, by the number of the row."""
    lines = [line for line in TABLE.read_text().splitlines() if re.match(r"\| G\d+ \|", line)]
    return {line.split(" | ")[0].strip("| "): line.rsplit(" | ", 1)[1] for line in lines}


def named(cell: str) -> set[tuple[str, str]]:
    """File and name of each test of a cell. A file stands for the names after it, too."""
    found, file = set(), ""
    for text in re.findall(r"`([^`]+)`", cell):
        *path, name = text.split("::")
        file = path[0] if path else file
        found.add((file, name))
    return found


def defined() -> set[tuple[str, str]]:
    """File and name of every test of a row."""
    return {
        (path.name, node.name)
        for path in FOLDER.glob("test_*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and re.match(r"test_g\d\d_", node.name)
    }


def test_every_test_of_the_matrix_is_in_its_row_of_the_table() -> None:
    assert {(f"G{int(name[6:8])}", file, name) for file, name in defined()} == {
        (row, file, name) for row, cell in rows().items() for file, name in named(cell) if name.startswith("test_g")
    }


def test_the_rows_of_the_table_are_in_order_without_gaps() -> None:
    assert list(rows()) == [f"G{number}" for number in range(1, 49)]
