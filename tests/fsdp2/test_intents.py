"""What the files here, and the later rows of the acceptance matrix, name is there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


@pytest.mark.parametrize("path", sorted(FOLDER.glob("test_*.py")), ids=lambda path: path.stem)
def test_what_is_said_elsewhere_is_said(path: Path) -> None:
    named = re.findall(r"(\S+\.py)::(test_\w+)", ast.get_docstring(ast.parse(path.read_text())) or "")
    assert named or path.name == Path(__file__).name
    _require(named)


def _require(named: list[tuple[str, str]]) -> None:
    """Files may move; names say what is promised."""
    missing = [f"{file}::{name}" for file, name in named if name not in _known()]
    assert not missing, f"no test has this name any more: {missing}"


@cache
def _known() -> set[str]:
    return {
        name for path in FOLDER.parent.rglob("*.py") for name in re.findall(r"^def (\w+)\(", path.read_text(), re.M)
    }


def test_rows_that_came_later_name_tests() -> None:
    rows = [row for row in (FOLDER.parent / "README.md").read_text().splitlines() if re.match(r"\| N\d+ \|", row)]
    named = [re.findall(r"`(\w+/\w+\.py)::(\w+)`", row) for row in rows if int(row[3:].split()[0]) > 7]
    assert len(named) > 10
    assert all(named)
    _require([each for row in named for each in row])
