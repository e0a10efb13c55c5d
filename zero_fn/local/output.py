"""What rank 0 prints, shown here as it comes."""

from __future__ import annotations

import codecs
import os
from typing import IO, TextIO

__all__ = ["Forward"]


class Forward:
    """A pipe whose text is written to a Python stream as it comes."""

    def __init__(self, stream: TextIO) -> None:
        reader, writer = os.pipe()
        self.reader = reader
        self.writer: IO[bytes] = os.fdopen(writer, "wb")
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def show(self) -> bool:
        """Writes what has come; False at the end."""
        chunk = os.read(self.reader, 1 << 16)
        self._stream.write(self._decoder.decode(chunk, final=not chunk))
        self._stream.flush()
        return bool(chunk)

    def close(self) -> None:
        os.close(self.reader)
