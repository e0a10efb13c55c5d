"""A leg: one move of the parameters of a group on their way from rest to whole.

A unit keeps its parameters at rest and computes with whole ones. Between the two lie a few buffers,
and a leg goes from one to the next: on this rank (a copy, a cast, a read from a tier, coding and
decoding), or along one axis (an all-gather).

    ZeRO-3                          rest ==dp==> whole
    ZeRO-3, compute in bfloat16     rest -> whole ==dp==> whole
    ZeRO-3 over two axes            rest -> whole ==outer==> whole ==inner==> whole
    hpZ                             rest ==outer==> inner, kept;  inner -> whole ==inner==> whole
    hpZ, gather=int8                rest -> inner ==outer==> inner, kept;
                                    inner ==inner==> codes -> whole
    parameters on a disk            tier -> whole ==dp==> whole

Arrows with one line are on this rank. Which legs there are says all of placement, precision,
tier and format: the runtime runs them (moves.py), `plan` adds them up, and
`describe(legs=True)` prints them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from zero_fn.values.wire import Wire

__all__ = ["Leg", "Spot", "form_text"]


class Spot(Enum):
    """Where the parameters of a group may be on this rank."""

    TIER = "tier"  # at rest, in another tier than the memory of the device
    REST = "rest"  # at rest, in memory of the device
    INNER = "inner"  # this rank's part on the first axis, gathered over the others and kept
    CODES = "codes"  # in a wire format, while a gather is under way
    WHOLE = "whole"  # as a forward reads them
    LOCAL = "local"  # gradients: what autograd gave on this rank
    SUM = "sum"  # summed over the first axis
    GRADIENT = "gradient"  # at rest


@dataclass(frozen=True, slots=True)
class Leg:
    """One move from a spot to another.

    A leg along an axis may stay at its spot: the other ranks' parts come to it.
    """

    source: Spot
    target: Spot
    hop: int | None  # the hop of the path along which ranks gather (path.py); None: on this rank
    form: torch.dtype | Wire  # in which the parameters are at the target
    is_kept: bool = False  # what it brings stays until the next step


def form_text(form: torch.dtype | Wire) -> str:
    """A dtype or a format, as text."""
    return str(form).removeprefix("torch.")
