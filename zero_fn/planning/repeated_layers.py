"""Layers of a model that repeat, so that what is true of a few of
them tells what is true of all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from torch import nn

from zero_fn.values.units import repeated_blocks

__all__ = ["Stack", "cut_to", "of_all_layers", "stacks_of"]

_FEW = 3

Stack = tuple[str, int, int]
"""The name of a `ModuleList`, and of layers in it that are equal the number of the first,
and how many they are."""


def stacks_of(module: nn.Module) -> list[Stack]:
    """The runs of at least two layers with parameters of equal names,
    shapes and dtypes, and of equal classes."""
    found: list[Stack] = []
    for parent, _ in groupby(repeated_blocks(module), lambda name: name.rpartition(".")[0]):
        blocks = module.get_submodule(parent)
        if not isinstance(blocks, nn.ModuleList):
            continue
        first = 0
        for _, run in groupby(blocks, _likeness):
            count = len(list(run))
            found += [(parent, first, count)] if count > 1 else []
            first += count
    return found


def _likeness(block: nn.Module) -> object:
    return type(block), [
        (n, p.shape, p.dtype, p.requires_grad) for n, p in block.named_parameters()
    ]


def cut_to(module: nn.Module, depths: Sequence[tuple[Stack, int]]) -> None:
    """Leaves so many layers of each run of a module, in place: the first of them."""
    # From the last to the first: numbers of layers before do not change.
    for (name, first, count), depth in sorted(depths, key=lambda each: each[0][1], reverse=True):
        blocks = module.get_submodule(name)
        assert isinstance(blocks, nn.ModuleList)
        del blocks[first + depth : first + count]


def of_all_layers(
    numbers: Callable[[Sequence[tuple[Stack, int]]], Mapping[str, float]], stacks: Sequence[Stack]
) -> dict[str, float]:
    """What `numbers` would give for all layers, from a few of them: right for numbers to which each
    layer of a stack adds the same, once there are three.

    `numbers` is given how many layers each stack has.
    """
    few = [(stack, min(stack[2], _FEW)) for stack in stacks]
    base = numbers(few)
    found = dict(base)
    for number, (stack, depth) in enumerate(few):
        if depth < stack[2]:
            more = numbers([*few[:number], (stack, depth + 1), *few[number + 1 :]])
            for name in found:
                found[name] += (stack[2] - depth) * (more[name] - base[name])
    return found
