"""Names of dtypes, in files and in commands; and which values of one another has."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["DTYPES_IN_FILES", "INTEGERS", "NAMES_IN_FILES", "SHORT_NAMES", "keeps_every_bit"]

DTYPES_IN_FILES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "BOOL": torch.bool,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
}  # fmt: skip
"""The dtypes that safetensors has, by its names for them."""

NAMES_IN_FILES = {dtype: name for name, dtype in DTYPES_IN_FILES.items()}

SHORT_NAMES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""What people write in commands and in configs of DeepSpeed."""

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes: for the bits of an element."""


class _Values(NamedTuple):
    """Which numbers a dtype has: from the least to the greatest, the smallest of them,
    and all integers up to `exact`."""

    least: float
    greatest: float
    smallest: float
    exact: float

    @classmethod
    def of(cls, dtype: torch.dtype) -> _Values:
        """The real numbers of a dtype, or of the parts of a complex one.

        TypeError: it has no limits (quantized).
        """
        if dtype == torch.bool:
            return cls(0, 1, 1, 1)
        if dtype.is_floating_point or dtype.is_complex:
            limits = torch.finfo(dtype)
            return cls(limits.min, limits.max, limits.smallest_normal * limits.eps, 2 / limits.eps)
        whole = torch.iinfo(dtype)
        return cls(whole.min, whole.max, 1, whole.max)


def keeps_every_bit(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether every value of one dtype is a value of the other."""
    if source == target or (source.is_complex and not target.is_complex):
        return source == target
    try:
        one, other = _Values.of(source), _Values.of(target)
    except TypeError:
        return False
    is_in_range = other.least <= one.least and one.greatest <= other.greatest
    return is_in_range and other.smallest <= one.smallest and one.exact <= other.exact
