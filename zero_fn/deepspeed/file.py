"""From a path, or from what a program has made itself, to the JSON of a DeepSpeed config."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from zero_fn.errors import ConfigError

__all__ = ["Config", "config_of", "rows_of"]

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


def rows_of(config: object, path: str = "") -> list[str]:
    """One line for each entry, in the order of names, for ranks to compare. Folders of disks may differ between ranks."""
    if isinstance(config, Mapping):
        names = sorted(map(str, config))
        values = {str(name): value for name, value in config.items()}
        inside = ((f"{path}.{name}" if path else name, values[name]) for name in names if name != "nvme_path")
        return [row for entry, value in inside for row in rows_of(value, entry)] or [f"{path} = {{}}"]
    return [f"{path} = {config!r}"]


def _once(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twice:
        raise ConfigError(
            "A DeepSpeed config says something twice.", entry=twice[0], fix="one of the two; JSON would take the last"
        )
    return dict(pairs)


def _constant(name: str) -> float:
    raise ConfigError("A DeepSpeed config has a number that is not finite.", got=name, fix="a finite number")
