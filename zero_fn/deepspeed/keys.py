"""The entries of a DeepSpeed config: for each its path, the values that it may have,
its default, and its meaning here.

They are the rows of the table `keys.toml` beside this file, which is read into `KEYS`.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import floor, inf
from pathlib import Path
from typing import Any, Literal

__all__ = ["KEYS", "OTHER_NAMES", "EntryKind", "Key"]

Role = Literal["read", "hint", "refused"]
_MOST = sys.float_info.max
_ROLES: Mapping[str, Role] = {"becomes": "read", "unneeded": "hint", "write": "refused"}


@dataclass(frozen=True, slots=True)
class EntryKind:
    """The values that an entry may have."""

    # Flag, text, whole or number; off: a section that has to be off,
    # read as false; any: checked elsewhere.
    name: str
    least: float = 0
    most: float = inf
    choices: tuple[str, ...] = ()  # empty: any text

    def taken(self, value: object) -> object | None:
        """The value in the type that the entry needs (`5e8` becomes a whole number);
        None if it is not allowed."""
        if self.name in ("whole", "number"):
            if isinstance(value, bool) or not isinstance(value, int | float):
                return None
            # NaN is never within bounds.
            if not max(self.least, -_MOST) <= value <= min(self.most, _MOST):
                return None
            if self.name == "number":
                return float(value)
            return int(value) if value == floor(value) else None
        if self.name == "text":
            is_text = isinstance(value, str) and value
            return value if is_text and (not self.choices or value in self.choices) else None
        if self.name == "off":
            return False if _is_off(value) else None
        return value if self.name == "any" or isinstance(value, bool) else None

    def __str__(self) -> str:
        if self.name in ("whole", "number"):
            noun = "a whole number" if self.name == "whole" else "a number"
            return f"{noun} from {self.least:g}" + (f" to {self.most:g}" if self.most < inf else "")
        choices = " or ".join(f'"{choice}"' for choice in self.choices)
        return choices or {"flag": "true or false", "text": "text"}.get(self.name, "nothing")


def _is_off(section: object) -> bool:
    """Whether a section is off: it says so, or all sections inside do,
    or it is empty but for false."""
    if not isinstance(section, Mapping) or section.get("enabled") is False:
        return section is False or isinstance(section, Mapping)
    switches = list(_switches(section)) or section.values()
    return all(each is False for each in switches)


def _switches(section: Mapping[str, object]) -> Iterator[object]:
    for name, value in section.items():
        if name == "enabled":
            yield value
        elif isinstance(value, Mapping):
            yield from _switches(value)


@dataclass(frozen=True, slots=True)
class Key:
    """One entry that is known."""

    path: str  # in the config, `zero_optimization.stage`
    kind: EntryKind
    default: object  # its value in a config that does not have it
    role: Role  # hint: checked, but changes nothing; refused: unless it has its default
    # Its meaning, why it changes nothing, or what to write instead; may go by its value.
    became: str | Mapping[str, str]
    auto: str  # the meaning of "auto"; empty if a value has to be filled in


def _keys(section: Mapping[str, Any], start: str = "") -> Iterator[Key]:
    for name, row in section.items():
        if "holds" not in row:
            yield from _keys(row, f"{start}{name}.")
            continue
        kind = _kind(row["holds"])
        ((word, role),) = [(word, role) for word, role in _ROLES.items() if word in row]
        auto = {
            "read": row.get("auto", ""),
            "hint": row[word],
            "refused": "" if kind.name == "off" else "as here",
        }
        yield Key(start + name, kind, row.get("default"), role, row[word], auto[role])


def _kind(text: str) -> EntryKind:
    name, _, bounds = text.partition(" ")
    least, _, most = bounds.partition("..")
    if "|" in name:
        return EntryKind("text", choices=tuple(name.split("|")))
    return EntryKind(name, float(least or 0), float(most or inf))


KEYS: Mapping[str, Key] = {
    key.path: key
    for key in _keys(tomllib.loads(Path(__file__).with_name("keys.toml").read_text("utf-8")))
}
"""Every entry that is known, by its path.

`optimizer.params.*` and `scheduler.params.*` stand for all options that have no row.
"""

OTHER_NAMES: Mapping[str, str] = {
    "bfloat16": "bf16",
    **{
        path.replace(".stage3_", "."): path
        for path in KEYS
        if ".stage3_" in path and "fp16" not in path
    },
}
"""Second names that DeepSpeed has for entries and sections, with their names in `KEYS`."""
