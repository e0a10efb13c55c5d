"""The table of entries has all that DeepSpeed 0.19.8 reads, with its defaults.

`keys_of_deepspeed.json` was printed by `keys_of_deepspeed.py`; tests/outside compares it with an installed DeepSpeed.
"""

import json
from pathlib import Path

from zero_fn.deepspeed.keys import KEYS, OTHER_NAMES

GOLDEN = json.loads(Path(__file__).with_name("keys_of_deepspeed.json").read_text())

OTHER_DEFAULTS = {
    "zero_optimization.stage3_param_persistence_threshold": "small parameters cost nothing in a unit",
    "checkpoint.writer.type": "there is one",
    "checkpoint.writer.io_buffer_size": "there is none",
    "checkpoint.writer.io_multiplier": "there is none",
    "comms_logger.prof_ops": "an empty list",
    "tensor_parallel.dtype": "bf16 and fp16 say it",
}
"""Entries whose default is not DeepSpeed's, and why."""


def known(path):
    """Whether an entry has a row, is inside a section that has one, or is a section with rows."""
    inside = [path.rsplit(".", n)[0] for n in range(path.count(".") + 1)]
    return (
        path in OTHER_NAMES or any(each in KEYS for each in inside) or any(key.startswith(f"{path}.") for key in KEYS)
    )


def test_each_entry_that_deepspeed_reads_has_a_row():
    assert len(GOLDEN) >= 240
    assert [path for path in GOLDEN if not known(path)] == []


def test_defaults_are_those_of_deepspeed_but_for_those_that_say_why():
    rows = {path: KEYS[path] for path, default in GOLDEN.items() if path in KEYS and default is not None}
    others = {path for path, key in rows.items() if key.kind.name != "off" and key.default != GOLDEN[path]}
    assert others == OTHER_DEFAULTS.keys()
