"""What the strategies draw: modules, chains of transforms and worlds as values.

They print, travel to ranks, and build the same everywhere.

Tree      parameters of any shapes in nested modules
Model     real layers in a row, each a map from `rows width` to `rows width`; ties between them, and what the root returns
Chain     transforms with options
World     ranks, transforms over their axes, tiers
"""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import zero_fn as zf
from tests.simulation import axis
from tests.support.seeds import seed_generator
from zero_fn.values.mesh import root_of


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

    def turned(self):
        """The same parameters, in the opposite order of dims in memory."""
        leaves = tuple(replace(leaf, order=leaf.order[::-1]) for leaf in self.leaves)
        return replace(self, leaves=leaves, children=tuple(child.turned() for child in self.children))


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
        x = self.add_own(x)
        for child in self.blocks():
            x = torch.tanh(child(x))
        offset = self.offset
        return x + offset

    def add_own(self, x):
        """Adds its own parameters."""
        for name, _ in self.named_parameters(recurse=False, remove_duplicate=False):
            x = x + _scalar(getattr(self, name)) * torch.tanh(x)
        return x

    def blocks(self):
        """Its children."""
        yield from (child for name, child in self.named_children() if name != "children_")
        yield from getattr(self, "children_", ())


def _scalar(parameter):
    """Sums in the order of indices, not of memory: see `test_stages_agree_to_the_bit_when_strides_change`."""
    real = parameter.abs() if parameter.is_complex() else parameter
    return real.float().sin().reshape(-1).sum()


def build(tree, seed=0, root=Block):
    """The module of a tree, the same wherever it is built; `root` is its class."""
    torch.manual_seed(seed)  # not `seed_generator`: LocalTensorMode seeds the ranks it simulates where torch is called
    model = root(tree.root)
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


@dataclass(frozen=True)
class World:
    """How many ranks there are, and how a model rests on them."""

    ranks: int | tuple[int, int] = 1  # a pair is a grid with the axes "outer" and "dp"
    links: tuple[tuple[Link, str], ...] = ()  # transforms, and the axis of each
    tiers: dict[str, str] = field(default_factory=dict)  # "cpu" or "nvme", by the state that is away

    def placed(self, model, folder=""):
        """The model as it rests on the simulated rank that calls."""
        for link, name in self.links:
            model = link(model, root_of(axis())[name])
        tiers = {state: zf.cpu() if tier == "cpu" else zf.nvme(folder) for state, tier in self.tiers.items()}
        return zf.offload(model, **tiers) if tiers else model


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


# -- models of real layers ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """One layer. `size` is an inner width, a number of experts, of rows of a table: whatever its kind has."""

    kind: str
    size: int = 3
    frozen: bool = False
    wrap: str = ""
    children: tuple[Part, ...] = ()

    def kinds(self):
        """The kinds and wraps of this and all below."""
        return {self.kind, self.wrap}.union(*(child.kinds() for child in self.children))


@dataclass(frozen=True)
class Model:
    """A tree of parts."""

    width: int  # of what flows between parts
    parts: tuple[Part, ...]
    ties: tuple[tuple[int, int], ...] = ()  # pairs of places of parameters, tied where shapes and dtypes agree
    output: str = "tensor"  # one of `OUTPUTS`
    listed: bool = False  # whether a plain Python list holds the parts beside the `ModuleList`
    twice: int = -1  # a part that runs a second time at the end
    double: bool = False  # whether everything is float64

    def kinds(self):
        """The kinds of all parts."""
        return set().union(*(part.kinds() for part in self.parts))


@dataclass
class Record:
    """A structured output."""

    value: Tensor
    note: str


Pair = namedtuple("Pair", "first second")  # as users write them


class Opaque:
    """An output that no pytree looks into."""

    def __init__(self, *values):
        self.values = values


def _layer(make, run):
    """A class of layers: its modules, of a width and a size, and its forward."""

    class Layer(nn.Module):
        def __init__(self, width, size):
            super().__init__()
            for name, module in make(width, size).items():
                self.add_module(name, module)

        def forward(self, x):
            return run(self, x)

    return Layer


_Mlp = _layer(
    lambda width, size: {"up": nn.Linear(width, size), "down": nn.Linear(size, width)},
    lambda self, x: x + self.down(F.gelu(self.up(x))),
)


def _looked_up(self, x):
    rows = (x.detach().sum(1).abs() * 97).long() % self.table.num_embeddings
    return x + self.table(rows)


def _attended(self, x):
    rows = x.unsqueeze(0)
    return x + self.attention(rows, rows, rows, need_weights=False)[0].squeeze(0)


class _Routed(nn.Module):
    """One expert, chosen by the rank's own rows; the others get no gradient on this rank."""

    def __init__(self, width, size):
        super().__init__()
        self.count = min(size, 4)
        for number in range(self.count):
            self.add_module(f"expert{number}", nn.Linear(width, width))

    def forward(self, x):
        chosen = int(x.detach().sum().abs() * 97) % self.count
        return x + torch.tanh(getattr(self, f"expert{chosen}")(x))


class _Mixed(nn.Module):
    """Every expert runs, on those rows that chose it: often on none."""

    def __init__(self, width, size):
        super().__init__()
        self.router = nn.Linear(width, min(size, 4))
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(min(size, 4)))

    def forward(self, x):
        weights = torch.softmax(self.router(x), 1)
        chosen = weights.argmax(1)
        total = x
        for number, expert in enumerate(self.experts):
            mask = chosen == number
            total = total.index_put((mask,), expert(x[mask]) * weights[mask, number, None], accumulate=True)
        return total


def _parametrized(width, size):
    # Of one element, the gradient below spectral_norm is the rounding of a sum that is zero.
    norms = nn.utils.parametrizations
    return {"linear": (norms.weight_norm if size % 2 or width == 1 else norms.spectral_norm)(nn.Linear(width, width))}


_Weighted = _layer(
    lambda width, size: {"linear": nn.utils.weight_norm(nn.Linear(width, width))}, lambda self, x: self.linear(x)
)


def _weighted(width, size):
    """The older `weight_norm`, by a hook, of a layer inside a unit, or of one that may be a unit.

    Torch itself cannot copy such a module once it ran.
    """
    return _Weighted(width, size) if size % 2 else nn.utils.weight_norm(nn.Linear(width, width))


class _Odd(nn.Module):
    """Parameters of every awkward kind."""

    def __init__(self, width, size):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.25))
        self.single = nn.Parameter(torch.randn(1))
        self.empty = nn.Parameter(torch.empty(0, size))
        self.turned = nn.Parameter(torch.randn(width, size).t())
        self.precise = nn.Parameter(torch.randn(size, dtype=torch.float64))
        self.coarse = nn.Parameter(torch.randn(size, 2).bfloat16())
        self.steps = nn.Parameter(torch.arange(size), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(size))
        self.pair = nn.ParameterList([torch.randn(width), torch.randn(width, 1)])

    def forward(self, x):
        inner = torch.tanh(F.linear(x, self.turned))
        extra = self.precise.sin().sum().to(x.dtype) + self.coarse.to(x.dtype).cos().sum() + self.steps.sum()
        spread = x @ self.pair[1]
        return x * self.scale + self.single * inner.sum(1, keepdim=True) + extra * self.pair[0] + spread


class _Dropped(_Mlp):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.3, self.training)


class _OpaqueInside(_Mlp):
    """Its layer returns an object that no pytree looks into."""

    def forward(self, x):
        return Opaque(super().forward(x))


class _Nest(nn.Module):
    """Parts in a `Sequential`, after a parameter of its own."""

    def __init__(self, width, part):
        super().__init__()
        self.gate = nn.Parameter(torch.randn(width))
        self.inside = nn.Sequential(*(_part(width, child) for child in part.children))

    def forward(self, x):
        return x + self.gate * self.inside(x)


KINDS = {
    "linear": _layer(
        lambda width, size: {"linear": nn.Linear(width, width, bias=bool(size % 2))},
        lambda self, x: torch.tanh(self.linear(x)),
    ),
    "mlp": _Mlp,
    "conv": _layer(
        lambda width, size: {"spread": nn.Conv1d(1, size, 3, padding=1), "gather": nn.Conv1d(size, 1, 1)},
        lambda self, x: x + self.gather(torch.tanh(self.spread(x.unsqueeze(1)))).squeeze(1),
    ),
    "embedding": _layer(lambda width, size: {"table": nn.Embedding(size, width)}, _looked_up),
    "norm": _layer(
        lambda width, size: {
            "norm": nn.LayerNorm(width) if size % 2 else nn.BatchNorm1d(width, track_running_stats=False)
        },
        lambda self, x: self.norm(x),
    ),
    "attention": _layer(
        lambda width, size: {"attention": nn.MultiheadAttention(width, 1, batch_first=True)}, _attended
    ),
    "recurrent": _layer(
        lambda width, size: {"rnn": nn.LSTM(width, width, batch_first=True)},
        lambda self, x: self.rnn(x.unsqueeze(0))[0].squeeze(0),
    ),
    "routed": _Routed,
    "mixed": _Mixed,
    "normed": _layer(_parametrized, lambda self, x: self.linear(x)),
    "weighted": _weighted,
    "odd": _Odd,
    "dropped": _Dropped,
    "opaquely": _layer(
        lambda width, size: {"inner": _OpaqueInside(width, size)}, lambda self, x: self.inner(x).values[0]
    ),
}


class _Checkpointed(nn.Module):
    def __init__(self, inner, *, reentrant):
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def _part(width, part):
    module = _Nest(width, part) if part.kind == "nest" else KINDS[part.kind](width, part.size)
    if part.frozen:
        module.requires_grad_(False)
    return _Checkpointed(module, reentrant=part.wrap == "reentrant") if part.wrap else module


OUTPUTS = ("tensor", "dict", "record", "pair", "opaque")


class Root(nn.Module):
    """The parts in a row; two outputs, in one of several wrappings."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.parts = nn.ModuleList(_part(model.width, part) for part in model.parts)
        if model.listed:
            self.plain = list(self.parts)
        self.head = nn.Linear(model.width, 2)

    def forward(self, x):
        for part in self.plain if self.model.listed else self.parts:
            x = part(x)
        if self.model.twice >= 0:
            x = self.parts[self.model.twice % len(self.parts)](torch.tanh(x))
        y = self.head(x)
        match self.model.output:
            case "dict":
                return {"first": y, "others": [x, "note"]}
            case "record":
                return Record(y, "note")
            case "pair":
                return Pair(y, x)
            case "opaque":
                return Opaque(y, x)
        return y


def outputs_of(returned):
    """The tensors in what a root returned."""
    if isinstance(returned, Opaque):
        return list(returned.values)
    if isinstance(returned, Record):
        return [returned.value]
    return [leaf for leaf in tree_leaves(returned) if isinstance(leaf, Tensor)]


def build_model(model, seed=0):
    """The module of a value, the same wherever it is built. Uses the default generator and leaves it as it was."""
    with torch.random.fork_rng(devices=[]):
        seed_generator(seed)
        root = Root(model)
    if model.double:
        root = root.double()
    places = [
        (module, name)
        for module in root.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and not isinstance(module, nn.LSTM)
    ]
    for one, other in model.ties:
        module, name = places[one % len(places)]
        source = module._parameters[name]
        alike = [
            place
            for place in places
            if (parameter := place[0]._parameters[place[1]]) is not None
            and source is not None
            and parameter is not source
            and (parameter.shape, parameter.dtype, parameter.stride()) == (source.shape, source.dtype, source.stride())
        ]
        if alike:
            module, name = alike[other % len(alike)]
            module._parameters[name] = source
    return root


def inputs(model, seed, rank):
    """What one rank sees in one forward: as many rows on every rank."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    dtype = torch.float64 if model.double else torch.float32
    return torch.randn(3, model.width, generator=generator, dtype=dtype)
