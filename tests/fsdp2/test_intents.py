"""What the files here name in place of a test is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


@pytest.mark.parametrize("path", sorted(FOLDER.glob("test_*.py")), ids=lambda path: path.stem)
def test_what_is_said_elsewhere_is_said(path: Path) -> None:
    named = re.findall(r"(\S+\.py)::(test_\w+)", ast.get_docstring(ast.parse(path.read_text())) or "")
    assert named or path.name == Path(__file__).name
    for file, name in named:
        assert f"def {name}(" in (FOLDER.parent / file).read_text(), f"{file} has no {name}"
