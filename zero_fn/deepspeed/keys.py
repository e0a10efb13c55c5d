"""The entries of a DeepSpeed config: for each its path, what it may hold, its default, and what becomes of it here.

They stand in the table `keys.txt`, beside this file; `KEYS` is that table, read.
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
    """What an entry may hold.

    Attributes:
        name: flag, text, whole or number; "off" for a section that has to be off, which is taken as false; "any" for what is
            checked elsewhere.
        least, most: Bounds of a number.
        choices: The texts that it may be; empty for any.
    """

    name: str
    least: float = 0
    most: float = inf
    choices: tuple[str, ...] = ()

    def taken(self, value: object) -> object | None:
        """The value as what it is meant to be, `5e8` as a whole number; None if it cannot be taken."""
        if self.name in ("whole", "number"):
            if isinstance(value, bool) or not isinstance(value, int | float):
                return None
            if not max(self.least, -_MOST) <= value <= min(self.most, _MOST):  # NaN is in no bounds
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
        path: The path of the key, `zero_optimization.stage`.
        kind: What it may hold.
        default: What it holds where nothing is said.
        role: Whether it is read, is a hint that changes nothing, or is refused if it holds anything but its default.
        became: What it is here, or, for one that may be refused, what to write instead; by its value, if that matters.
        auto: What becomes of `"auto"`; empty where it has to be filled in.
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
"""Every entry that is known, by its path; under `optimizer.params.*` those that are not in the table."""

OTHER_NAMES: Mapping[str, str] = {
    "bfloat16": "bf16",
    **{path.replace(".stage3_", "."): path for path in KEYS if ".stage3_" in path and "fp16" not in path},
}
"""Other names that DeepSpeed has for entries and sections, with those in `KEYS`."""
