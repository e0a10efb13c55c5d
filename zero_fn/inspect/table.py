"""Rows of text in columns."""

from __future__ import annotations

from collections.abc import Collection, Sequence

__all__ = ["table"]


def table(rows: Sequence[Sequence[str]], *, right: Collection[int]) -> list[str]:
    """One line a row, columns two spaces apart, without spaces at the end.

    Rows are of equal length; columns with the numbers in `right` are aligned to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
