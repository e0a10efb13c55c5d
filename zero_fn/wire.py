"""Formats in which parameters and gradients travel in 8 or 4 bits, for `zf.precision`."""

from zero_fn.values.wire import Wire, delta4, float8, int4, int8

__all__ = ["Wire", "delta4", "float8", "int4", "int8"]
