"""DeepSpeed configs as people write them, and ways to spoil them."""

import copy
import json
from pathlib import Path

__all__ = ["BASES", "CONFIGS", "changed", "leaves", "lost_entries", "merged", "shifted"]

BASES = json.loads(Path(__file__).with_name("configs.json").read_text())
"""By the names that rows of `refused.toml` and `taken.toml` call them."""

CONFIGS = {name: BASES[name] for name in ("stage 3", "stage 2", "infinity")}
"""For two ranks. The first is of the documentation of transformers, filled in."""


def leaves(config, path=()):
    """Every entry that is no object, by its path."""
    for name, value in config.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*path, name))
        else:
            yield (*path, name), value


def lost_entries(config, outcomes):
    """Entries that were taken and forgotten."""
    return [path for path, _ in leaves(config) if not {".".join(path[: n + 1]) for n in range(len(path))} & {*outcomes}]


def merged(config, more):
    """A copy of a config with other entries over its own."""
    found = dict(config)
    for name, value in more.items():
        inside = found.get(name)
        is_section = isinstance(value, dict) and isinstance(inside, dict)
        found[name] = merged(inside, value) if is_section else copy.deepcopy(value)
    return found


def changed(config, path, value):
    """A copy with another value at a path, of which all but the last name are there."""
    found = copy.deepcopy(config)
    inside = found
    for name in path[:-1]:
        inside = inside[name]
    inside[path[-1]] = value
    return found


def shifted(config, path, name):
    """A copy in which the entry at a path has another name."""
    found = copy.deepcopy(config)
    inside = found
    for step in path[:-1]:
        inside = inside[step]
    inside[name] = inside.pop(path[-1])
    return found
