"""Which elements of which parameters share a buffer when their states pass through buffers
of one size: pure arithmetic.

    parameters   |-- a: 9 --|-- b: 3 --|---------- c: 40 ----------|- d: 2 -|
    pieces       |-- a -----|-- b -----|-- c[0:16] --|-- c[16:32] --|-- c[32:40] --|- d -|
    chunks       |          0          |      1      |      2       |          3         |

A parameter whose states fit a buffer is one piece. A larger one is cut at multiples of
`GRAIN_NUMEL` elements. Then the elements after the last whole vector are those of the uncut
parameter: fused optimizers of torch round them differently.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from zero_fn.errors import TierError
from zero_fn.values.tiers import bytes_text

__all__ = ["GRAIN_NUMEL", "Piece", "chunks_of"]

GRAIN_NUMEL = 1024


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements of one parameter that are stepped together."""

    parameter: int  # its number
    start: int
    stop: int
    is_whole: bool  # whether the piece is the whole parameter

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


def chunks_of(
    numels: Sequence[int],
    places: Sequence[Hashable],
    nbytes_of: Callable[[int, int], int],
    buffer_nbytes: int,
) -> list[tuple[Piece, ...]]:
    """Cuts parameters into pieces, and packs the pieces, in order,
    into chunks that each fit a buffer.

    Args:
        numels: Elements of each parameter.
        places: The place of each parameter. Parameters of different places are in different chunks.
        nbytes_of: Given the number of a parameter and a number of elements:
            bytes of the states of so many of its elements.
        buffer_nbytes: Most bytes of the states of a chunk.

    Returns:
        The pieces of each chunk. Every element is in exactly one piece.

    Raises:
        TierError: The states of `GRAIN_NUMEL` elements of a larger parameter do not fit a buffer.
    """
    chunks: list[tuple[Piece, ...]] = []
    chunk: list[Piece] = []
    left, place = buffer_nbytes, None
    for number, numel in enumerate(numels):
        for piece, nbytes in _pieces(number, numel, nbytes_of, buffer_nbytes):
            if chunk and (nbytes > left or places[number] != place):
                chunks.append(tuple(chunk))
                chunk, left = [], buffer_nbytes
            chunk.append(piece)
            left, place = left - nbytes, places[number]
    return [*chunks, tuple(chunk)] if chunk else chunks


def _pieces(
    number: int, numel: int, nbytes_of: Callable[[int, int], int], buffer_nbytes: int
) -> list[tuple[Piece, int]]:
    whole_nbytes = nbytes_of(number, numel)
    if whole_nbytes <= buffer_nbytes:
        return [(Piece(number, 0, numel, True), whole_nbytes)]
    most = numel // GRAIN_NUMEL
    while most and nbytes_of(number, most * GRAIN_NUMEL) > buffer_nbytes:
        tried = most * GRAIN_NUMEL
        most = min(most - 1, tried * buffer_nbytes // nbytes_of(number, tried) // GRAIN_NUMEL)
    if not most:
        least = nbytes_of(number, min(numel, GRAIN_NUMEL))
        raise TierError(
            f"A buffer of {bytes_text(buffer_nbytes)} is too small for the states of "
            f"{min(numel, GRAIN_NUMEL)} elements.",
            needs=bytes_text(least),
            fix=f"buffer={least} or more; 64 MiB is a good size",
        )
    step = most * GRAIN_NUMEL
    cuts = [(start, min(start + step, numel)) for start in range(0, numel, step)]
    return [
        (Piece(number, start, stop, False), nbytes_of(number, stop - start)) for start, stop in cuts
    ]
