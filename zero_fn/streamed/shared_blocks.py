"""Blocks of a state that several ranks have parts of: which parameters have such,
and how large their values are.

[Note: tried first] The scale of a block is its largest value after the step. So the parameters that
have divided blocks are stepped twice: first copies of them, which says how large the new states
are; ranks take the largest of each block; and then they are stepped with all others. Their
gradients and values are read twice, what is beside them is not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zero_fn.kernels.codes import BLOCK_NUMEL
from zero_fn.runtime.holding import numbering_of
from zero_fn.runtime.slot import mesh_of
from zero_fn.streamed.state_codes import Divided, blocks_of, may_be_coded
from zero_fn.transport.agree import Bits, axes_of
from zero_fn.transport.line import Line
from zero_fn.transport.links import line_over
from zero_fn.values.numbering import Numbering

__all__ = ["agree_on_largest", "divided_among", "sent_along"]

_WHAT = "scales of states in 8 bits"


def divided_among(parameters: Sequence[Tensor]) -> dict[Tensor, Divided]:
    """The parameters whose blocks are divided on any rank. All ranks call it.

    Communicates a byte a parameter to each peer, along the axes of its mesh.
    """
    found: dict[Tensor, Divided] = {}
    for mesh, members in _by_mesh(filter(may_be_coded, parameters)).items():
        numberings = [numbering_of(parameter) for parameter in members]
        bits = [_is_divided(each) for each in numberings]
        for line in _lines(mesh):
            bits = Bits(line, bits, _WHAT).read()
        found |= {
            p: Divided(each) for p, each, bit in zip(members, numberings, bits, strict=True) if bit
        }
    return found


def _is_divided(numbering: Numbering) -> bool:
    """Whether this rank has a part of a block only, or has it in another order."""
    numel = numbering.box.numel
    if not numel or not numbering.is_in_order:
        return numel > 0
    begins, _ = numbering.runs(0, numel)
    # Where a run ends inside a block, a run of another rank begins there.
    return bool((begins % BLOCK_NUMEL).any())


def agree_on_largest(largest: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
    """Makes the largest values of the blocks of some parameters those of all ranks,
    and keeps them as what is coded by next.

    Communicates 8 (n-1)/n bytes for each block and state from each rank, along the axes of the
    mesh. Ranks with other states of these parameters than this one raise `DisagreementError`.
    """
    for mesh, members in _by_mesh(largest).items():
        rows = [row for parameter in members for row in largest[parameter].values()]
        if not rows:
            continue
        check = ";".join(",".join(largest[parameter]) for parameter in members)
        both, lines = torch.cat(rows), _lines(mesh)
        if lines:
            both = both.to(lines[0].device)
        for line in lines:
            _take_largest(line, both, check)
        both.masked_fill_(both.isinf(), torch.nan)
        for row, found in zip(rows, torch.split(both, [len(row) for row in rows]), strict=True):
            row.copy_(found)


def _take_largest(line: Line, values: Tensor, check: str) -> None:
    """Takes the largest of each number over ranks, in place:
    each rank does so for a part, and sends it to all."""
    others = [rank for rank in range(line.size) if rank != line.rank]
    parts = values.tensor_split(line.size)
    own = parts[line.rank]
    rooms = [torch.empty_like(own) for _ in others]
    sends = [[part] if rank in others else [] for rank, part in enumerate(parts)]
    arriving = iter(rooms)
    places = [[next(arriving)] if rank in others else [] for rank in range(line.size)]
    line.all_to_all(sends, places, values.numel(), _WHAT, check=check).wait()
    for room in rooms:
        torch.maximum(own, room, out=own)
    back = [[own] if rank in others else [] for rank in range(line.size)]
    line.all_to_all(back, sends, values.numel(), _WHAT).wait()


def sent_along(states: Mapping[Tensor, int]) -> Counter[str]:
    """Bytes that this rank sends in `agree_on_largest`, by the name of the axis,
    for parameters with so many states."""
    found = Counter[str]()
    for mesh, members in _by_mesh(states).items():
        numel = sum(states[parameter] * blocks_of(parameter.numel()) for parameter in members)
        for line in _lines(mesh):
            # Elements that `tensor_split` gives to this rank.
            own = numel // line.size + (line.rank < numel % line.size)
            found[line.axes[0].name] += 4 * (numel - own + own * (line.size - 1))
    return found


def _by_mesh(parameters: Iterable[Tensor]) -> dict[DeviceMesh | None, list[Tensor]]:
    found: dict[DeviceMesh | None, list[Tensor]] = {}
    for parameter in parameters:
        found.setdefault(mesh_of(parameter), []).append(parameter)
    return found


def _lines(mesh: DeviceMesh | None) -> list[Line]:
    if mesh is None:
        return []
    return [line_over([axis]) for axis in axes_of(mesh, range(mesh.ndim), _WHAT)]
