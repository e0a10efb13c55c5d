"""Files that are damaged for a while, and are whole again."""

from contextlib import contextmanager

__all__ = ["flip", "flipped", "instead"]


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


def flipped(paths, times, random):
    """Flips one bit of one of these files after another, and yields the file; a byte of any is as likely."""
    sizes = [path.stat().st_size for path in paths]
    for path in random.choices(paths, sizes, k=times):
        with instead(path, flip(path, random.randrange(path.stat().st_size), random.randrange(8))):
            yield path
