"""From a path, or from what a program has made itself, to the JSON of a DeepSpeed config."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from zero_fn.errors import ConfigError

__all__ = ["Config", "config_of", "filled", "leaves_of"]

Config = str | os.PathLike[str] | Mapping[str, object]


def config_of(config: Config) -> Mapping[str, object]:
    """The config as an object of JSON.

    Args:
        config: A path, or the object itself.

    Raises:
        ConfigError: No file is there, it is not JSON, or it says something twice.
    """
    if isinstance(config, Mapping):
        return config
    if not isinstance(config, str | os.PathLike):
        raise ConfigError(
            f"A DeepSpeed config is a path or a dict, not {type(config).__name__}.",
            got=repr(config)[:60],
            fix='zf.from_deepspeed(model, "ds_config.json", mesh["dp"])',
        )
    path = Path(config)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            "A DeepSpeed config cannot be read.",
            path=str(path)[:200],
            error=f"{type(error).__name__}: {error}"[:200],
            fix="a path of a JSON file, or the dict itself",
        ) from error
    try:
        found = json.loads(text, object_pairs_hook=_once, parse_constant=_constant)
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            "A DeepSpeed config is not JSON.",
            path=path,
            error=str(error)[:200],
            fix="JSON has no comments and no commas before closing brackets",
        ) from error
    if not isinstance(found, Mapping):
        raise ConfigError("A DeepSpeed config is not an object.", path=path, got=repr(found)[:60], fix='{"bf16": ...}')
    return found


def filled(config: Mapping[str, object], auto: Mapping[str, object]) -> Mapping[str, object]:
    """The config with other values where it says `"auto"`, by their paths.

    Raises:
        ConfigError: It does not say `"auto"` there.
    """
    waiting = [path for path, value in leaves_of(config) if value == "auto"]
    wrong = [path for path in auto if path not in waiting]
    if wrong:
        raise ConfigError(
            'auto= has a value for an entry that is not "auto".',
            entry=", ".join(map(str, wrong)),
            autos=", ".join(waiting) or "none",
            fix="write it into the config",
        )

    def fill(section: Mapping[str, object], path: str) -> dict[str, object]:
        return {
            name: fill(value, f"{path}{name}.") if isinstance(value, Mapping) else auto.get(f"{path}{name}", value)
            for name, value in section.items()
        }

    return fill(config, "")


def leaves_of(config: Mapping[str, object], path: str = "") -> Iterator[tuple[str, object]]:
    """The path and the value of each entry that is no section with entries, in the order of names."""
    for name, value in sorted(config.items(), key=lambda item: str(item[0])):
        if isinstance(value, Mapping) and value:
            yield from leaves_of(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def _once(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twice:
        raise ConfigError(
            "A DeepSpeed config says something twice.", entry=twice[0], fix="one of the two; JSON would take the last"
        )
    return dict(pairs)


def _constant(name: str) -> float:
    raise ConfigError("A DeepSpeed config has a number that is not finite.", got=name, fix="a finite number")
