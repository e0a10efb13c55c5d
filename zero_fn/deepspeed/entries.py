"""The entries of a DeepSpeed config, read against the table of `keys`: their values,
their outcomes, and all errors.

Every entry of the config has an outcome or is refused. Of an entry that is taken and changes
nothing, the outcome says so. (DeepSpeed 0.19 accepts misspelt entries at the top level, text for
numbers, and NaN.)
"""

from __future__ import annotations

import base64
import difflib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_fn.deepspeed.keys import KEYS, OTHER_NAMES, Key
from zero_fn.errors import ConfigError
from zero_fn.inspect.table import table

__all__ = [
    "Config",
    "Entries",
    "RefusedEntry",
    "TakenEntry",
    "config_of",
    "filled",
    "leaves_of",
    "outcomes_text",
    "said_by",
    "shown",
]

Config = str | os.PathLike[str] | Mapping[str, object]
_SECTIONS = {path[:at] for path in KEYS for at, letter in enumerate(path) if letter == "."}


def config_of(config: Config) -> Mapping[str, object]:
    """The config as an object of JSON: of a path, of text,
    of text in base64 as Hugging Face takes it, or the object itself.

    Raises:
        ConfigError: There is no such file, it is not a JSON object, or it has an entry twice.
    """
    if isinstance(config, Mapping):
        return _renamed(config)
    if not isinstance(config, str | os.PathLike):
        raise ConfigError(
            f"A DeepSpeed config is a path, JSON or a dict, not {type(config).__name__}.",
            got=repr(config)[:60],
            fix='zf.from_deepspeed(model, "ds_config.json", mesh["dp"])',
        )
    try:
        found = json.loads(_text_of(config), object_pairs_hook=_once, parse_constant=_finite)
        if not isinstance(found, Mapping):
            raise ValueError(f"it is not an object, but {found!r}")
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            "A DeepSpeed config cannot be read.",
            config=str(config)[:200],
            error=f"{type(error).__name__}: {error}"[:200],
            fix="the path of a file of JSON (no comments, no comma before a closing bracket, "
            "no NaN), or the dict itself",
        ) from error
    return _renamed(found)


def _renamed(config: Mapping[str, object]) -> Mapping[str, object]:
    """The config with the section `bfloat16` under its other name, which arguments have."""
    if "bf16" in config:
        return config
    return {"bf16" if name == "bfloat16" else name: value for name, value in config.items()}


def _text_of(config: str | os.PathLike[str]) -> str:
    if isinstance(config, str) and not os.path.exists(config):
        if config.lstrip().startswith("{"):
            return config
        with suppress(ValueError):  # a path is no base64, or not that of an object
            if (found := base64.urlsafe_b64decode(config).decode()).lstrip().startswith("{"):
                return found
    return Path(config).read_text(encoding="utf-8")


def _once(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twice:
        raise ValueError(f"{twice[0]!r} is there twice, of which JSON would take the last")
    return dict(pairs)


def _finite(name: str) -> float:
    raise ValueError(f"{name} is not finite")


def filled(config: Mapping[str, object], auto: Mapping[str, object]) -> dict[str, object]:
    """A copy of a config, with the values of `auto`, by their paths,
    for entries that are `"auto"`, null or missing.

    Raises:
        ConfigError: An entry has another value already.
    """
    found = {
        name: filled(value, {}) if isinstance(value, Mapping) else value
        for name, value in config.items()
    }
    others = []
    for path, value in auto.items():
        *sections, name = str(path).split(".")
        inside: Any = found
        for section in sections:
            inside = inside.setdefault(section, {}) if isinstance(inside, dict) else None
        said = inside.get(name) if isinstance(inside, dict) else inside
        if isinstance(inside, dict) and said in (None, "auto", value):
            inside[name] = value
        else:
            others.append(f"{path} = {shown(said)}, and auto= has {shown(value)}")
    if others:
        raise ConfigError(
            "auto= contradicts a DeepSpeed config.",
            **{str(number): line for number, line in enumerate(others, 1)},
            fix='one of the two; auto= is for what is "auto" in the config, or not there',
        )
    return found


def leaves_of(config: Mapping[str, object], path: str = "") -> Iterator[tuple[str, object]]:
    """The path and the value of each entry, sections excepted, sorted by name."""
    for name, value in sorted(config.items(), key=lambda item: str(item[0])):
        if isinstance(value, Mapping) and value:
            yield from leaves_of(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


@dataclass(frozen=True, slots=True)
class TakenEntry:
    """The outcome of one entry."""

    entry: str  # its path in the JSON, `zero_optimization.stage`
    value: str  # as JSON
    became: str  # what it became here, in a few words


def outcomes_text(outcomes: Iterable[TakenEntry]) -> str:
    """A table of outcomes, as a setup prints it."""
    rows = [(outcome.entry, outcome.value, outcome.became) for outcome in outcomes]
    return "\n".join(table([("entry", "value", "here"), *rows], right=()))


class RefusedEntry(Exception):
    """An entry that is needed was refused. `Entries.close` raises the error for the user."""


class Entries:
    """The entries of a config, by their paths in `KEYS`."""

    def __init__(self, config: Mapping[str, object]) -> None:
        # Outcomes of all entries that were not refused, in the order of the config.
        self.outcomes: list[TakenEntry] = []
        self.autos: list[str] = []  # "auto", and in need of a value
        self._problems: list[dict[str, str]] = []
        self._found: dict[str, tuple[str, object]] = {}  # the name and the value in the config
        self._taken: dict[str, object] = {}  # values that were checked, of entries that have one
        self._refused: set[str] = set()
        # Entries in a wrong place: where each is, where it belongs, its value.
        self._misplaced: list[tuple[str, str, object]] = []
        self._read(config, "", "")
        for misplaced in self._misplaced:
            self._take_misplaced(*misplaced)

    def __getitem__(self, path: str) -> Any:
        """The value of an entry, or its default.

        Raises:
            RefusedEntry: The entry was refused.
        """
        return self._taken[path] if self.is_given(path) else KEYS[path].default

    def is_given(self, path: str) -> bool:
        """Whether the config has an entry or a section, with a value
        other than null and `"auto"`."""
        if path in self._refused:
            raise RefusedEntry(path)
        return path in self._taken

    def is_auto(self, path: str) -> bool:
        return path in self._found and self._found[path][1] == "auto"

    def given_under(self, section: str) -> dict[str, object]:
        """The values of all given entries of a section, by their names."""
        start = f"{section}."
        return {
            path.removeprefix(start): value
            for path, value in self._taken.items()
            if path.startswith(start)
        }

    def words(self, path: str) -> tuple[str, ...]:
        """The value of an entry that is a list of text.

        Raises:
            RefusedEntry: It is none.
        """
        found = self[path] or []
        if not isinstance(found, list) or not all(isinstance(each, str) and each for each in found):
            raise self.refused(path, "a list of text", f'"{path.rpartition(".")[2]}": ["..."]')
        return tuple(found)

    def refused(self, path: str, wants: str, fix: str) -> RefusedEntry:
        """Refuses an entry.

        `close` raises the error; the result is for a caller that cannot go on without the entry.
        """
        self._refused.add(path)
        entry, value = self._found.get(path, (path, None))
        self._note(entry, shown(value) if path in self._found else "nothing", wants, fix)
        return RefusedEntry(path)

    def refuse_if(self, path: str, *rules: tuple[object, str, str]) -> None:
        """Refuses an entry if one of some rules is true: each with what is wanted, and a fix."""
        for is_wrong, wants, fix in rules:
            if is_wrong:
                self.refused(path, wants, fix)
                break

    def _note(self, entry: str, got: str, wants: str, fix: str) -> None:
        problem = {"entry": entry, "got": got, "wants": wants, "fix": fix}
        if problem not in self._problems:
            self._problems.append(problem)

    def close(self) -> None:
        """Raises one error for all refused entries, if there are any.

        Raises:
            ConfigError: Entries were refused, or are `"auto"` and need a value.
        """
        if self.autos:
            first = f'{{"{self.autos[0]}": ...' + ", ..." * (len(self.autos) > 1) + "}"
            self._note(
                ", ".join(self.autos),
                '"auto"',
                'a value: only a Trainer fills in "auto"',
                "write the value into the config, or beside it auto="
                f"{first} (from_deepspeed, placed)",
            )
        found = self._problems
        if len(found) == 1:
            raise ConfigError(
                "A DeepSpeed config has an entry that cannot be followed.", **found[0]
            )
        if found:
            lines = ("{entry} = {got}, wants {wants}; {fix}".format(**each) for each in found)
            raise ConfigError(
                f"A DeepSpeed config has {len(found)} entries that cannot be followed.",
                **{str(number): line for number, line in enumerate(lines, 1)},
                fix="what each line ends with",
            )

    # -- reading -----------------------------------------------------------------------------------

    def _read(self, section: Mapping[str, object], written: str, path: str) -> None:
        """Reads all entries of a section, whose name is `written` in the
        config and `path` in `KEYS`."""
        for name, value in section.items():
            entry, known = f"{written}{name}", OTHER_NAMES.get(f"{path}{name}", f"{path}{name}")
            key = KEYS.get(known, KEYS.get(f"{path}*"))
            is_name = isinstance(name, str) and "." not in name
            if known in self._found:
                self.refused(
                    known, f"one of {self._found[known][0]} and {entry}", "remove one of the two"
                )
                continue
            self._found[known] = (entry, value)
            if is_name and key is not None:
                self._take(key, known, entry, value)
            elif is_name and name.startswith("_"):
                self.outcomes.append(TakenEntry(entry, shown(value), "a comment"))
            elif is_name and known not in _SECTIONS and (home := _home_of(name, path)) is not None:
                self._misplaced.append((known, home, value))
            elif not is_name or known not in _SECTIONS:
                self.refused(known, "the name of an entry", _meant(str(name), section, path))
            elif isinstance(value, Mapping):
                self._taken[known] = value
                self._read(value, f"{entry}.", f"{known}.")
            elif value is not None:
                self.refused(known, "an object", f'"{name}": {{...}}')

    def _take_misplaced(self, found: str, path: str, value: object) -> None:
        """An entry or a section in the wrong place, which DeepSpeed refuses or drops.

        It is taken if it changes nothing.
        """
        home = f"in {path.rpartition('.')[0]}" if "." in path else "at the top level"
        leaves = leaves_of(value, f"{path}.") if isinstance(value, Mapping) else [(path, value)]
        if all(self._changes_nothing(*leaf) for leaf in leaves):
            entry = self._found[found][0]
            self.outcomes.append(
                TakenEntry(entry, shown(value), f"belongs {home}, where it would change nothing")
            )
        else:
            self.refused(found, f"its place, {home}", f"write it {home}")

    def _changes_nothing(self, path: str, value: object) -> bool:
        key = KEYS.get(path)
        taken = None if key is None or path in self._refused else key.kind.taken(value)
        return key is not None and taken is not None and (key.role == "hint" or taken == self[path])

    def _take(self, key: Key, path: str, entry: str, value: object) -> None:
        words, taken = key.became, None if value in (None, "auto") else key.kind.taken(value)
        if value == key.default == "":
            taken = value  # text that DeepSpeed has empty where nothing is said
        if value == "auto":
            words = key.auto
            if not words:
                self._refused.add(path)
                self.autos.append(entry)
                return
        elif key.role == "refused":
            if value is not None and (taken is None or taken != key.default):
                default = "off" if key.kind.name == "off" else shown(key.default)
                self.refused(path, f"{default}, the only value that zero_fn supports", str(words))
                return
            words = "off, as here" if key.kind.name == "off" else "as here"
        elif value is not None and taken is None:
            self.refused(path, str(key.kind), _corrected(key, entry, value))
            return
        if taken is not None:
            self._taken[path] = taken
        said = shown(self._taken.get(path, key.default)).strip('"')  # true, and not True
        by_value = words if isinstance(words, str) else words.get(said, words.get("else", ""))
        self.outcomes.append(TakenEntry(entry, shown(value), by_value))


def shown(value: object) -> str:
    """A value as JSON, cut to 60 characters."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _home_of(name: str, path: str) -> str | None:
    """The path where an entry or a section that is unknown here belongs,
    if there is one such place."""
    if path in ("optimizer.", "scheduler."):
        return f"{path}params.{name}"
    homes = [known for known in (*KEYS, *_SECTIONS) if known.rpartition(".")[2] == name]
    return homes[0] if len(homes) == 1 else None


def _meant(name: str, section: Mapping[str, object], path: str) -> str:
    """The fix for an unknown entry: the known one with the most similar name, or to remove it."""
    known = {other.removeprefix(path).partition(".")[0] for other in KEYS if other.startswith(path)}
    near = difflib.get_close_matches(name, sorted(known - set(section)), n=1, cutoff=0.75)
    return f"{near[0]}, or remove it" if near else "remove it"


def said_by(value: object) -> Any:
    """What a text says in JSON, `"0.1"` is 0.1 and `"True"` true; any other value as it is."""
    with suppress(ValueError, RecursionError):
        return json.loads(value.lower()) if isinstance(value, str) else value
    return value


def _corrected(key: Key, entry: str, value: object) -> str:
    """A fix that says what a wrong value was meant to say, if that can be seen:
    it never means something else."""
    if key.role == "hint":
        return f"remove {entry}: it changes nothing here"
    meant = said_by(value)
    if isinstance(value, str):
        near = difflib.get_close_matches(value, key.kind.choices, n=2)
        meant = near[0] if len(near) == 1 else meant
    elif isinstance(value, int) and key.kind.name == "flag" and value in (0, 1):
        meant = bool(value)
    name = entry.rpartition(".")[2]
    if key.kind.taken(meant) is not None:
        return f'"{name}": {shown(meant)}'
    return f"{key.kind}, or remove it"
