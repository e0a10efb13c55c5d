"""Texts that must not change unnoticed: golden schedules, messages of errors.

    SNAPSHOTS=write python -m pytest tests/units/values/test_schedule.py tests/errors

writes the files again from what the code says now; read the difference in git before you commit it.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["assert_matches", "is_writing"]


def is_writing() -> bool:
    """Whether this run writes snapshots in place of comparing with them."""
    return os.environ.get("SNAPSHOTS") == "write"


def assert_matches(path: Path, text: str) -> None:
    """Asserts that a file holds `text`; writes it instead when `SNAPSHOTS=write`."""
    text = text.rstrip("\n") + "\n"
    if is_writing():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return
    assert path.exists(), f"{path.name} does not exist: SNAPSHOTS=write python -m pytest {path.parents[1].name}"
    assert text == path.read_text(), f"{path.name} has changed; SNAPSHOTS=write accepts what the code says now"
