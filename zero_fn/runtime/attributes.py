"""Attributes that users set on a parameter: `p.no_decay = True`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from zero_fn.tiers.tier_tensor import PLACE, TierTensor

__all__ = ["attributes_of"]

_OF_DTENSOR = ("_spec", "_local_tensor")


def attributes_of(parameter: Tensor) -> dict[str, Any]:
    """All attributes of a parameter but those that say where it rests."""
    place = {*_OF_DTENSOR, *(PLACE if isinstance(parameter, TierTensor) else ())}
    return {name: value for name, value in vars(parameter).items() if name not in place}
