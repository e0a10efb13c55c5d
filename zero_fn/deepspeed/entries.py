"""One object of a DeepSpeed config while it is read: every entry is asked for by name, and what nobody asked for is an error.

Each entry that was read has an outcome, a few words on what became of it: nothing is accepted and forgotten. (DeepSpeed 0.19
accepts misspelt entries at the top level, text for numbers, and NaN.)
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard, TypeVar

from zero_fn.errors import ConfigError

__all__ = ["Entries", "Outcome", "shown"]

V = TypeVar("V")
Became = str | Callable[[V], str]
"""What became of an entry, in a few words; from its value, if that depends on it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one entry.

    Attributes:
        entry: Its path in the JSON, `zero_optimization.stage`.
        value: Its value, as JSON.
        became: What it is here, in a few words.
    """

    entry: str
    value: str
    became: str


class Entries:
    """One JSON object of the config.

    Attributes:
        path: Where it is in the JSON; empty for the whole.
        outcomes: Of all entries read so far, in all objects of this config.
    """

    def __init__(self, values: Mapping[str, object], path: str = "", outcomes: list[Outcome] | None = None) -> None:
        self._values, self.path = values, path
        self._known: set[str] = set()
        self.outcomes: list[Outcome] = [] if outcomes is None else outcomes

    def path_of(self, name: str) -> str:
        """The path of an entry in the JSON."""
        return f"{self.path}.{name}" if self.path else name

    def is_given(self, name: str) -> bool:
        """Whether an entry is there, and not null."""
        return self._values.get(name) is not None

    def has(self, name: str) -> bool:
        """Whether an entry says something: it is given, and not `"auto"`."""
        return self.is_given(name) and self._values[name] != "auto"

    # -- entries by kind ------------------------------------------------------------------------------------------

    def boolean(self, name: str, default: bool, *, became: Became[bool]) -> bool:
        """`true` or `false`."""
        value = self._take(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false", f'"{name}": true')
        return self._became(name, value, became)

    def number(
        self, name: str, default: float, *, became: Became[float], least: float = -math.inf, most: float = math.inf
    ) -> float:
        """A finite number within bounds."""
        value = self._take(name, default)
        if not _is_number(value) or not least <= value <= most:
            bounds = [f"from {least:g}"] * (least > -math.inf) + [f"to {most:g}"] * (most < math.inf)
            raise self.wrong(name, " ".join(("a number", *bounds)), f'"{name}": {default:g}')
        return self._became(name, float(value), became)

    def integer(self, name: str, default: int, *, became: Became[int], least: int = 0, most: float = math.inf) -> int:
        """A whole number within bounds, `5e8` too."""
        value = self._take(name, default)
        if not _is_number(value) or value != math.floor(value) or not least <= value <= most:
            wants = f"a whole number from {least}" + f" to {most:g}" * (most < math.inf)
            raise self.wrong(name, wants, f'"{name}": {max(least, default)}')
        return self._became(name, int(value), became)

    def text(self, name: str, default: str, *, became: Became[str], among: Sequence[str] = ()) -> str:
        """Text, one of a few if they are given."""
        value = self._take(name, default)
        if not isinstance(value, str) or value == "auto" or (among and value not in among):
            wants = " or ".join(f'"{choice}"' for choice in among) if among else "text"
            raise self.wrong(name, wants, f'"{name}": "{default}"')
        return self._became(name, value, became)

    def kind(self, *, became: Became[str], example: str) -> str:
        """The entry `type`, which must be there."""
        if not self.is_given("type"):
            raise self.wrong("type", "text", f'"type": "{example}"')
        return self.text("type", example, became=became)

    def section(self, name: str) -> Entries | None:
        """The object under a name; None if there is none. Its entries are asked for like these, and it is closed."""
        value = self._take(name, None)
        if value is None:
            return None
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise self.wrong(name, "an object", f'"{name}": {{...}}')
        return Entries(value, self.path_of(name), self.outcomes)

    def params(self) -> Entries:
        """The object under `params`, of which everything has a default: an empty one if there is none."""
        return self.section("params") or Entries({}, self.path_of("params"), self.outcomes)

    def rest(self, became: str) -> dict[str, object]:
        """Every entry that was not asked for yet."""
        names = [name for name in self._values if name not in self._known]
        return {name: self._became(name, self._take(name, None), became) for name in names}

    # -- entries that ask for nothing here ------------------------------------------------------------------------

    def hints(self, names: Mapping[str, type], became: str) -> None:
        """Entries that say how DeepSpeed should do what is done in another way here, and cannot change a result.

        Args:
            names: Of what type each must be: bool, float (a number from 0) or str. Null and `"auto"` will do for all.
            became: Their outcome.
        """
        wants = {bool: "true or false", float: "a number from 0", str: "text"}
        for name, kind in names.items():
            value = self._take(name, None)
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
            if self.has(name) and not (is_number if kind is float else isinstance(value, kind)):
                raise self.wrong(name, wants[kind], f"remove {self.path_of(name)}: it changes nothing here")
            self._became(name, value, became)

    def only(self, name: str, value: bool | float | str, *, fix: str, became: str = "as here") -> None:
        """An entry that may have one value only, which asks for nothing."""
        found = self._take(name, value)
        if self.has(name) and (found != value or isinstance(found, bool) is not isinstance(value, bool)):
            raise self._not_done(name, fix)
        self._became(name, found, became)

    def off(self, name: str, *, fix: str) -> None:
        """A section that may be there if it is empty, or switched off by `"enabled": false`."""
        value = self._take(name, None)
        is_off = isinstance(value, Mapping) and (not value or value.get("enabled") is False)
        if not (is_off or value is None or value is False):
            raise self._not_done(name, fix)
        self._became(name, value, "off, as here")

    # -- the end --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Raises if an entry was not asked for.

        Raises:
            ConfigError: Names the first, and what may have been meant.
        """
        for name in self._values:
            if name not in self._known:
                near = difflib.get_close_matches(name, self._known - set(self._values), n=1, cutoff=0.75)
                raise ConfigError(
                    "A DeepSpeed config has an entry that nothing reads.",
                    entry=self.path_of(name),
                    got=shown(self._values[name]),
                    fix=f"{near[0]}, or remove it" if near else "remove it",
                )

    def wrong(self, name: str, wants: str, fix: str) -> ConfigError:
        """The error for an entry whose value cannot be taken."""
        value = self._values.get(name)
        why = {"why": '"auto" is filled in by the Trainer of transformers'} if value == "auto" else {}
        got = shown(value) if name in self._values else "nothing"
        return ConfigError(
            "A DeepSpeed config has an entry that cannot be taken.",
            entry=self.path_of(name),
            got=got,
            wants=wants,
            **why,
            fix=fix,
        )

    def _not_done(self, name: str, fix: str) -> ConfigError:
        return ConfigError(
            "A DeepSpeed config asks for something that is not done here.",
            entry=self.path_of(name),
            got=shown(self._values.get(name)),
            fix=fix,
        )

    def _take(self, name: str, default: object) -> object:
        self._known.add(name)
        value = self._values.get(name, default)
        return default if value is None else value

    def _became(self, name: str, value: V, became: Became[V]) -> V:
        if name in self._values:
            words = became if isinstance(became, str) else became(value)
            self.outcomes.append(Outcome(self.path_of(name), shown(self._values[name]), words))
        return value


def shown(value: object) -> str:
    """A value as JSON, cut to 60 characters."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
