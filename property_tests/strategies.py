"""Strategies: shapes, memory orders, traces, homes, module trees, chains of transforms."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import strategies as st

import zero_fn as zf
from property_tests.programs import Chain, Leaf, Link, Node, Tree
from zero_fn.values.home import Home, ReshardAfter, Sharded
from zero_fn.values.schedule import Enter, Exit, Trace, Use

__all__ = ["axis_sizes", "chains", "homes", "leaves", "links", "memory_orders", "shapes", "traces", "trees"]

FLOATS = (torch.float32, torch.float64, torch.bfloat16)
DTYPES = (*FLOATS, torch.complex64, torch.int64, torch.bool)


def axis_sizes(max_size: int = 8) -> st.SearchStrategy[int]:
    """Numbers of ranks."""
    return st.integers(1, max_size)


def shapes(*, min_size: int = 0, max_dims: int = 4, max_size: int = 17) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of parameters: scalars and, with `min_size=0`, empty tensors among them."""
    return st.lists(st.integers(min_size, max_size), max_size=max_dims).map(tuple)


def memory_orders(dims: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Dims of a tensor from the outermost in memory to the innermost."""
    return st.permutations(range(dims)).map(tuple)


@st.composite
def traces(draw: st.DrawFn, *, max_units: int = 5, max_uses: int = 8) -> Trace:
    """Brackets of a forward pass: nested and repeated units, one after the other, as modules call modules."""
    trace: list[Enter | Exit] = []
    counts: dict[int, int] = {}
    open_uses: list[Use] = []
    budget = draw(st.integers(1, max_uses))
    while budget or open_uses:
        free = [unit for unit in range(max_units) if all(use.unit != unit for use in open_uses)]
        if open_uses and (not budget or not free or draw(st.booleans())):
            trace.append(Exit(open_uses.pop()))
            continue
        unit = draw(st.sampled_from(free))
        use = Use(unit, counts.get(unit, 0))
        counts[unit] = use.number + 1
        open_uses.append(use)
        trace.append(Enter(use))
        budget -= 1
    return tuple(trace)


def homes(*, compatible: bool = False) -> st.SearchStrategy[Home]:
    """Homes; `compatible` ones never ask for two dtypes."""
    dtypes = (None, torch.bfloat16) if compatible else (None, torch.bfloat16, torch.float16)
    sums = (None, torch.float32) if compatible else (None, torch.float32, torch.float64)
    return st.builds(
        Home,
        st.sampled_from(Sharded),
        compute=st.sampled_from(dtypes),
        reduce=st.sampled_from(sums),
        grads=st.sampled_from(dtypes),
        reshard_after=st.sampled_from(ReshardAfter),
    )


@st.composite
def leaves(draw: st.DrawFn, *, dtypes: Sequence[torch.dtype] = DTYPES, max_size: int = 9, frozen: bool = True) -> Leaf:
    """Parameters of every awkward kind."""
    shape = draw(shapes(max_dims=3, max_size=max_size))
    trained = draw(st.booleans()) or draw(st.booleans()) if frozen else True
    return Leaf(shape, draw(memory_orders(len(shape))), draw(st.sampled_from(dtypes)), trained)


@st.composite
def trees(draw: st.DrawFn, *, dtypes: Sequence[torch.dtype] = DTYPES, frozen: bool = True, ties: bool = True) -> Tree:
    """Modules: a root with a parameter, nested containers, ties anywhere.

    Not with `st.builds`: Hypothesis takes exponential time to print nested calls of it.
    """
    leaf = leaves(dtypes=dtypes, frozen=frozen)
    budget = draw(st.integers(0, 6))

    def node(depth: int) -> Node:
        nonlocal budget
        own = tuple(draw(leaf) for _ in range(draw(st.integers(0 if depth else 1, 3))))
        width = min(draw(st.integers(0, 3)), budget) if depth < 3 else 0
        budget -= width
        return Node(own, tuple(node(depth + 1) for _ in range(width)), draw(st.booleans()))

    root = node(0)
    pairs = draw(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=2)) if ties else []
    return Tree(root, tuple(pairs))


_STAGES = ("replicate", "shard_optimizer", "shard_grads", "shard_params")
_UNITS = (None, "*", "children_.*", zf.by_size(nbytes=1), zf.by_size(nbytes=200))


@st.composite
def links(draw: st.DrawFn, *, units: object = None, selective: bool = True) -> Link:
    """One sharding transform with options. `where` selects the first parameter of the root, or all."""
    verb = draw(st.sampled_from(_STAGES))
    options: dict[str, object] = {}
    if units is not None and draw(st.booleans()):
        options["units"] = units
    if selective and draw(st.booleans()):
        options["where"] = draw(st.sampled_from(["p0", "*", ("p0", "*p1")]))
    if selective and verb != "replicate" and draw(st.booleans()):
        options["persist_below"] = draw(st.sampled_from([0, 40, 10**6]))
    if verb == "shard_params" and draw(st.booleans()):
        options["reshard_after"] = draw(st.sampled_from(["forward", "backward"]))
    return Link(verb, options)


@st.composite
def chains(
    draw: st.DrawFn, *, min_size: int = 1, max_size: int = 3, selective: bool = True, precise: bool = False
) -> Chain:
    """Chains of transforms in any order, all with the same choice of units if any; `precise` adds `precision`."""
    units = draw(st.sampled_from(_UNITS[:2] + _UNITS[3:]))
    one = links(units=units, selective=selective)
    chain = draw(st.lists(one, min_size=min_size, max_size=max_size))
    if precise and draw(st.booleans()):
        at = draw(st.integers(0, len(chain)))
        chain.insert(at, Link("precision", draw(st.sampled_from([{}, {"where": "p0"}, {"output": torch.float64}]))))
    return tuple(chain)
