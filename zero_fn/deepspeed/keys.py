"""The entries of a DeepSpeed config: for each its path, the values that it may have, its default, and its meaning here.

They are the rows of the table `keys.txt` beside this file, which is read into `KEYS`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import floor, inf
from pathlib import Path
from typing import Literal

__all__ = ["KEYS", "OTHER_NAMES", "EntryKind", "Key"]

Role = Literal["read", "hint", "refused"]
_MOST = sys.float_info.max
_ROLES: Mapping[str, Role] = {"=": "read", "~": "hint", "!": "refused"}


@dataclass(frozen=True, slots=True)
class EntryKind:
    """The values that an entry may have.

    Attributes:
        name: "flag", "text", "whole" or "number"; "off" for a section that has to be off, which is read as false; "any" for
            an entry that is checked elsewhere.
        least, most: Bounds of a number.
        choices: The texts that are allowed; empty: any text.
    """

    name: str
    least: float = 0
    most: float = inf
    choices: tuple[str, ...] = ()

    def taken(self, value: object) -> object | None:
        """The value in the type that the entry needs (`5e8` becomes a whole number); None if it is not allowed."""
        if self.name in ("whole", "number"):
            if isinstance(value, bool) or not isinstance(value, int | float):
                return None
            if not max(self.least, -_MOST) <= value <= min(self.most, _MOST):  # NaN is never within bounds
                return None
            return float(value) if self.name == "number" else int(value) if value == floor(value) else None
        if self.name == "text":
            is_one = isinstance(value, str) and value and (not self.choices or value in self.choices)
            return value if is_one else None
        if self.name == "off":
            entries = value.values() if isinstance(value, Mapping) else [value]
            is_off = all(entry is False for entry in entries) or (
                isinstance(value, Mapping) and value.get("enabled") is False
            )
            return False if is_off else None
        return value if self.name == "any" or isinstance(value, bool) else None

    def __str__(self) -> str:
        if self.name in ("whole", "number"):
            words = [{"whole": "a whole number", "number": "a number"}[self.name], f"from {self.least:g}"]
            return " ".join(words + [f"to {self.most:g}"] * (self.most < inf))
        choices = " or ".join(f'"{choice}"' for choice in self.choices)
        return choices or {"flag": "true or false", "text": "text"}.get(self.name, "nothing")


@dataclass(frozen=True, slots=True)
class Key:
    """One entry that is known.

    Attributes:
        path: The path of the entry, `zero_optimization.stage`.
        kind: The values that it may have.
        default: Its value in a config that does not have it.
        role: "read"; "hint": checked, but changes nothing; "refused": refused unless it has its default.
        became: For an entry that is read, its meaning here; for a hint, why it changes nothing; for the rest, what to write
            instead. A mapping gives it by the value of the entry, else for others.
        auto: The meaning of `"auto"`; empty if a value has to be filled in.
    """

    path: str
    kind: EntryKind
    default: object
    role: Role
    became: str | Mapping[str, str]
    auto: str


def _keys(table: str) -> Iterator[Key]:
    section = ""
    for line in table.splitlines():
        if line.startswith("["):
            section = f"{line[1:-1]}."
        elif line and not line.startswith("#"):
            name, kind, default, outcome = re.split(r"\s{2,}", line, maxsplit=3)
            role = _ROLES[outcome[0]]
            became, _, auto = outcome[2:].partition("; auto: ")
            yield Key(
                section + name,
                _kind(kind),
                None if default == "-" else json.loads(default),
                role,
                dict(choice.split(" -> ") for choice in became.split(", ")) if " -> " in became else became,
                became if role == "hint" else "as here" if role == "refused" and kind != "off" else auto,
            )


def _kind(text: str) -> EntryKind:
    name, _, bounds = text.partition(" ")
    least, _, most = bounds.partition("..")
    if "|" in name:
        return EntryKind("text", choices=tuple(name.split("|")))
    return EntryKind(name, float(least or 0), float(most or inf))


KEYS: Mapping[str, Key] = {key.path: key for key in _keys(Path(__file__).with_name("keys.txt").read_text("utf-8"))}
"""Every entry that is known, by its path. `optimizer.params.*` and `scheduler.params.*` stand for all options
that have no row."""

OTHER_NAMES: Mapping[str, str] = {
    "bfloat16": "bf16",
    **{path.replace(".stage3_", "."): path for path in KEYS if ".stage3_" in path and "fp16" not in path},
}
"""Second names that DeepSpeed has for entries and sections, with their names in `KEYS`."""
