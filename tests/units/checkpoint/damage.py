"""Files that are damaged for a while and are whole again, and JSON that somebody has signed."""

import json
from contextlib import contextmanager

from zero_fn.checkpoint.format import files

__all__ = ["flip", "forge", "instead", "signed"]


@contextmanager
def instead(path, raw):
    """Inside, the file has these bytes."""
    whole = path.read_bytes()
    path.write_bytes(raw)
    try:
        yield
    finally:
        path.write_bytes(whole)


def flip(path, at=-1, bit=0):
    """The bytes of a file, of which one bit is another."""
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1 << bit
    return bytes(raw)


def signed(body):
    """JSON of a checkpoint with a digest that is right, since whoever makes a file can sign it."""
    return files._signed(body if isinstance(body, str) else json.dumps(body))


def forge(path, change):
    """Changes what JSON of a checkpoint says."""
    body = json.loads(path.read_text())["body"]
    change(body)
    path.write_bytes(signed(body))
