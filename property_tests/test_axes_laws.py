"""Laws 2, 3, 5 and 6 over two axes of a mesh: transforms commute, repeat and train as replicas, whatever the module."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from property_tests.programs import Leaf, Link, Node, Tree, batch, build
from property_tests.strategies import chains, trees
from tests.axes.grids import differing, grid
from tests.support.profiles import examples
from tests.support.ranks import Ranks, axis
from zero_fn.resting import local_of
from zero_fn.runtime.entry import units_of

Links = tuple[tuple[Link, str], ...]
"""Transforms and the axis of each."""


def over(links: Links, tree: Tree) -> nn.Module:
    """The module of a tree after transforms over axes of the mesh outer x inner."""
    mesh = grid("outer", "inner")
    module: nn.Module = build(tree)
    for link, name in links:
        module = link(module, mesh[name])
    return module


def trained(model: nn.Module) -> list[Tensor | None]:
    """Every gradient of the last of two steps, and every parameter after them, as they rest."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(2):
        optimizer.zero_grad()
        model(batch(number, axis().get_local_rank())).sum().backward()
        grads = [parameter.grad for parameter in model.parameters()]
        optimizer.step()
    return [*grads, *(parameter.detach() for parameter in model.parameters())]


def rests_alike(one: list[Tensor | None], other: list[Tensor | None]) -> bool:
    """Whether this rank holds the same parts with the same bits."""
    return [placements_of(tensor) for tensor in one] == [placements_of(tensor) for tensor in other] and all(
        a is b or (a is not None and b is not None and torch.equal(local_of(a), local_of(b)))
        for a, b in zip(one, other, strict=True)
    )


def placements_of(tensor: Tensor | None) -> object:
    return tensor.placements if isinstance(tensor, DTensor) else None


def are_parts(wholes: list[Tensor | None], found: list[Tensor | None]) -> bool:
    """Whether this rank holds its parts of these tensors, which every rank has whole."""
    names = [str(number) for number in range(len(wholes))]
    known = {name: None if whole is None else local_of(whole) for name, whole in zip(names, wholes, strict=True)}
    return not differing(known, dict(zip(names, found, strict=True)))


def broken_laws(programs: list[tuple[Tree, Links, Links]]) -> list[str]:
    """The laws that a program breaks, by number. The second chain of each is the first in another order."""
    found = []
    for number, (tree, links, shuffled) in enumerate(programs):
        model, other = over(links, tree), over(shuffled, tree)
        parameters = list(model.parameters())
        if not rests_alike([*parameters], [*other.parameters()]):
            found.append(f"{number}: commutation")
        if not rests_alike([*parameters], [*over((*links, links[0]), tree).parameters()]):
            found.append(f"{number}: idempotence")
        if not are_parts([*build(tree).parameters()], [*parameters]):
            found.append(f"{number}: conservation")
        one = trained(model)
        if not rests_alike(one, trained(other)):
            found.append(f"{number}: commutation of training")
        slots = [slot for unit in units_of(model) for slot in unit.slots]
        # Where the outer axis shards more, gradients are summed over it first.
        if all(slot.path.hops[0].axis.name == "inner" for slot in slots if len(slot.path.hops) > 1):
            replicas = over(tuple((Link("replicate"), name) for name in sorted({name for _, name in links})), tree)
            if not are_parts(trained(replicas), one):
                found.append(f"{number}: equivalence")
    return found


@st.composite
def programs(draw: st.DrawFn) -> tuple[Tree, Links, Links]:
    tree = draw(trees(dtypes=(torch.float32, torch.float64, torch.int64, torch.complex64)))
    links = tuple((link, draw(st.sampled_from(["inner", "outer"]))) for link in draw(chains(min_size=2, max_size=4)))
    return tree, links, tuple(draw(st.permutations(links)))


@examples(dev=3, ci=10, deep=200)
@given(st.lists(programs(), min_size=3, max_size=4))
def test_transforms_over_axes_commute_and_train_as_replicas(
    ranks: Ranks, drawn: list[tuple[Tree, Links, Links]]
) -> None:
    assert ranks(4).run(broken_laws, drawn) == [[]] * 4


TREE = Tree(Node((Leaf((4, 3), (0, 1)), Leaf((5,), (0,)))))


def test_the_laws_are_seen_to_break(ranks: Ranks) -> None:
    """Other axes are not another order: the check says so."""
    one = ((Link("shard_params"), "inner"), (Link("replicate"), "outer"))
    other = ((Link("shard_params"), "outer"), (Link("replicate"), "inner"))
    assert ranks(4).run(broken_laws, [(TREE, one, other)])[0] == ["0: commutation", "0: commutation of training"]
