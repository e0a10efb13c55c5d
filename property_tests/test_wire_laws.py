"""Law: what travels in fewer bits is the same at every stage and mixture of stages, and what is gathered does not depend on
how many ranks there are.

The oracle is the same format over replicas, or nearly so, which keep whole parameters. Rows are around a block: ranks have
some of them, or none; some dims lie in another order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import zero_fn as zf
from property_tests.programs import Leaf, Node, Tree, batch, build
from property_tests.strategies import memory_orders, schedules
from tests.simulation import Simulated, axis
from tests.support.profiles import examples
from zero_fn.values.mesh import root_of
from zero_fn.values.wire import Wire

VERBS = ("replicate", "shard_optimizer", "shard_grads", "shard_params")


class Case(NamedTuple):
    tree: Tree
    compute: torch.dtype
    gather: Wire | None
    scatter: Wire | None
    steps: int


class World(NamedTuple):
    """A pair of ranks is a grid. Transforms, and the axis of each; formats are asked for before, or after them."""

    ranks: int | tuple[int, int]
    links: tuple[tuple[str, str], ...]
    asks_first: bool


_ROWS = st.sampled_from([(31,), (32,), (64,), (65,), (100,), (256,), (300,), (3, 64), (12, 9), (2, 40)])


@st.composite
def _cases(draw: st.DrawFn) -> Case:
    found = []
    for _ in range(draw(st.integers(1, 4))):
        shape = (draw(st.integers(0, 9)), *draw(_ROWS))
        order = draw(st.just(tuple(range(len(shape)))) | memory_orders(len(shape)))
        dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float64]))
        found.append(Leaf(shape, order, dtype, trained=draw(st.integers(0, 4)) > 0))
    tree = Tree(Node(tuple(found[:2]), (Node(tuple(found[2:])),)), ties=draw(st.sampled_from([(), ((0, 1),)])))
    codes, blocks = st.sampled_from(["int4", "int8"]), st.sampled_from([32, 48, 256])
    ints = st.builds(Wire, codes, blocks, is_symmetric=st.booleans(), rotates=st.booleans())
    wires = ints | st.builds(Wire, st.sampled_from(["float8_e4m3fn", "float8_e5m2"]), blocks)
    differences = st.builds(Wire, codes, blocks, is_difference=st.just(True))
    gather = draw(st.none() | wires | differences)
    compute = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    return Case(tree, compute, gather, draw(wires if gather is None else st.none() | wires), draw(st.integers(1, 3)))


@st.composite
def _worlds(draw: st.DrawFn) -> tuple[Case, World]:
    case = draw(_cases())
    ranks = draw(st.integers(1, 8) | st.sampled_from([(2, 2), (2, 3), (3, 2), (2, 4)]))
    axes = ["dp"] if isinstance(ranks, int) else ["dp", "outer"]
    differs = case.gather is not None and case.gather.is_difference
    links = [(draw(st.sampled_from(VERBS[: 3 if differs else 4])), name) for name in axes]
    if differs and len(links) == 2 and links[1][0] != "replicate" and draw(st.booleans()):
        links[0] = ("shard_params", "dp")  # the outer axis keeps the part inside
    return case, World(ranks, tuple(draw(st.permutations(links))), draw(st.booleans()))


def _placed(case: Case, world: World) -> nn.Module:
    formats: dict[str, Any] = {"compute": case.compute, "gather": case.gather}
    formats |= {} if case.scatter is None else {"reduce": case.scatter}
    model: nn.Module = build(case.tree)
    model = zf.precision(model, **formats) if world.asks_first else model
    for verb, name in world.links:
        mesh = axis() if isinstance(world.ranks, int) else root_of(axis())[name]
        model = getattr(zf, verb)(model, mesh)
    return model if world.asks_first else zf.precision(model, **formats)


def _trained(case: Case, world: World) -> list[Tensor]:
    """What forwards gave, and whole parameters after each step."""
    model: Any = _placed(case, world)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    seen: list[Tensor] = []
    for step in range(case.steps):
        output = model(batch(step, dist.get_rank()))
        output.float().sum().backward()
        seen.append(output.detach())
        with torch.no_grad():
            for parameter in trained:
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
        with zf.unsharded(model):
            seen += [parameter.detach().clone() for parameter in model.parameters()]
    return seen


def _first_seen(case: Case, world: World) -> Tensor:
    """What the first forward gives, of the same input on all ranks."""
    with torch.no_grad():
        found: Tensor = _placed(case, world)(batch(0))
    return found


@examples(dev=40, ci=600, deep=30_000)
@given(drawn=_worlds(), schedule=schedules, transport=st.sampled_from(["exchange", "native"]))
def test_every_mixture_computes_what_replicas_compute(
    simulated: Simulated, drawn: tuple[Case, World], schedule: tuple[int, ...], transport: Any
) -> None:
    case, world = drawn
    # Sums go over the axis first that shards most: replicas that shard one state at most go the same way.
    most = max(world.links, key=lambda link: (VERBS.index(link[0]), link[1] == "dp"))[1]
    verbs = {name: "shard_optimizer" if name == most == "outer" else "replicate" for _, name in world.links}
    whole = world._replace(links=tuple((verb, name) for name, verb in verbs.items()), asks_first=False)
    wanted = simulated(world.ranks, transport=transport).run(_trained, case, whole)
    found = simulated(world.ranks, schedule=schedule, transport=transport).run(_trained, case, world)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@examples(dev=20, ci=300, deep=10_000)
@given(drawn=_worlds())
def test_what_is_gathered_does_not_depend_on_the_number_of_ranks(
    simulated: Simulated, drawn: tuple[Case, World]
) -> None:
    case, world = drawn
    (wanted,) = simulated(1).run(_first_seen, case, World(1, (("replicate", "dp"),), asks_first=False))
    for found in simulated(world.ranks).run(_first_seen, case, world):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
