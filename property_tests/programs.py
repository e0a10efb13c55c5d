"""What the strategies draw: modules and chains of transforms as values.

They print, travel to ranks, and build the same everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

import zero_fn as zf

__all__ = ["OPTIMIZERS", "Chain", "Leaf", "Link", "Node", "Tree", "apply", "batch", "build"]


@dataclass(frozen=True)
class Leaf:
    """A parameter: its dims from the outermost in memory to the innermost are `order`."""

    shape: tuple[int, ...]
    order: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    trained: bool = True

    def values(self):
        """Random values with the strides asked for."""
        wide = torch.complex128 if self.dtype.is_complex else torch.float64
        stored = torch.randn([self.shape[dim] for dim in self.order], dtype=wide)
        if not (self.dtype.is_floating_point or self.dtype.is_complex):
            stored = stored * 3
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        return stored.to(self.dtype).permute(inverse)


@dataclass(frozen=True)
class Node:
    """A module: parameters `p0`, `p1`, ..., and children in a `ModuleList` or, alone, under names of their own."""

    leaves: tuple[Leaf, ...]
    children: tuple[Node, ...] = ()
    listed: bool = True


@dataclass(frozen=True)
class Tree:
    """A module and its ties: pairs of places, by their number in the order of registration."""

    root: Node
    ties: tuple[tuple[int, int], ...] = ()


class Block(nn.Module):
    """Multiplies and adds every parameter it has, then calls its children in turn, then itself adds the first again."""

    def __init__(self, node):
        super().__init__()
        for number, leaf in enumerate(node.leaves):
            trained = leaf.trained and (leaf.dtype.is_floating_point or leaf.dtype.is_complex)
            self.register_parameter(f"p{number}", nn.Parameter(leaf.values(), requires_grad=trained))
        self.register_buffer("offset", torch.tensor(0.25))
        children = [Block(child) for child in node.children]
        if node.listed:
            self.children_ = nn.ModuleList(children)
        else:
            for number, child in enumerate(children):
                self.add_module(f"c{number}", child)

    def forward(self, x):
        for name, _ in self.named_parameters(recurse=False, remove_duplicate=False):
            x = x + _scalar(getattr(self, name)) * torch.tanh(x)
        for child in self._blocks():
            x = torch.tanh(child(x))
        offset = self.offset
        return x + offset

    def _blocks(self):
        yield from (child for name, child in self.named_children() if name != "children_")
        yield from getattr(self, "children_", ())


def _scalar(parameter):
    """Sums in the order of indices, not of memory: see `test_stages_agree_to_the_bit_when_strides_change`."""
    real = parameter.abs() if parameter.is_complex() else parameter
    return real.float().sin().reshape(-1).sum()


def build(tree, seed=0):
    """The module of a tree, the same wherever it is built."""
    torch.manual_seed(seed)  # not `seed_generator`: LocalTensorMode seeds the ranks it simulates where torch is called
    model = Block(tree.root)
    places = [(module, name) for module in model.modules() for name in module._parameters]
    for one, other in tree.ties:
        module, name = places[one % len(places)]
        source = module._parameters[name]
        module, name = places[other % len(places)]
        module._parameters[name] = source
    return model


def batch(seed, rank=0):
    """The input of one rank in one step. It requires gradients, so that frozen modules have a backward too."""
    return torch.randn(3, generator=torch.Generator().manual_seed(100 * seed + rank)).requires_grad_()


@dataclass(frozen=True)
class Link:
    """One transform and its options."""

    verb: str
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, module, mesh):
        transform = getattr(zf, self.verb)
        if self.verb == "precision":
            return transform(module, **self.options)
        return transform(module, mesh, **self.options)


Chain = tuple[Link, ...]


def apply(chain, module, mesh):
    """The transforms of a chain, the first one first."""
    for link in chain:
        module = link(module, mesh)
    return module


OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "adamw, fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "adam": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "sgd without states": partial(torch.optim.SGD, lr=0.1),
    "adagrad": partial(torch.optim.Adagrad, lr=0.05),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "nadam": partial(torch.optim.NAdam, lr=0.01),
    "asgd": partial(torch.optim.ASGD, lr=0.01),
}
"""Of stock torch, each of which steps one element alone."""
