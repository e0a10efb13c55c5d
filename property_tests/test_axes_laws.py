"""Laws 2, 3, 5 and 6 over two axes of a mesh: transforms commute, repeat and train as replicas, whatever the module, whatever
order ranks run in, and whatever their backwards pass through.

Simulated ranks compare their collectives, and find messages that nobody received.
"""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor

import zero_fn as zf
from property_tests.programs import Leaf, Link, Node, Tree, batch, build
from property_tests.strategies import chains, trees
from tests.axes.grids import differing, grid
from tests.simulation import axis as simulated_axis
from tests.support.profiles import examples
from tests.support.programs import STAGES
from tests.support.ranks import axis
from tests.support.seeds import seed_generator
from zero_fn.resting import local_of
from zero_fn.runtime.door import units_of
from zero_fn.runtime.slot import slot_of
from zero_fn.values.mesh import root_of

Links = tuple[tuple[Link, str], ...]
"""Transforms and the axis of each."""


def over(links, tree):
    """The module of a tree after transforms over axes of the mesh outer x inner."""
    mesh = grid("outer", "inner")
    module = build(tree)
    for link, name in links:
        module = link(module, mesh[name])
    return module


def trained(model):
    """Every gradient of the last of two steps, and every parameter after them, as they rest."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(2):
        optimizer.zero_grad()
        model(batch(number, axis().get_local_rank())).sum().backward()
        grads = [parameter.grad for parameter in model.parameters()]
        optimizer.step()
    return [*grads, *(parameter.detach() for parameter in model.parameters())]


def rests_alike(one, other):
    """Whether this rank holds the same parts with the same bits."""
    return [placements_of(tensor) for tensor in one] == [placements_of(tensor) for tensor in other] and all(
        a is b or (a is not None and b is not None and torch.equal(local_of(a), local_of(b)))
        for a, b in zip(one, other, strict=True)
    )


def placements_of(tensor):
    return tensor.placements if isinstance(tensor, DTensor) else None


def are_parts(wholes, found):
    """Whether this rank holds its parts of these tensors, which every rank has whole."""
    names = [str(number) for number in range(len(wholes))]
    known = {name: None if whole is None else local_of(whole) for name, whole in zip(names, wholes, strict=True)}
    return not differing(known, dict(zip(names, found, strict=True)))


def broken_laws(programs):
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
def programs(draw):
    tree = draw(trees(dtypes=(torch.float32, torch.float64, torch.int64, torch.complex64)))
    links = tuple((link, draw(st.sampled_from(["inner", "outer"]))) for link in draw(chains(min_size=2, max_size=4)))
    return tree, links, tuple(draw(st.permutations(links)))


@examples(dev=3, ci=10, deep=200)
@given(st.lists(programs(), min_size=3, max_size=4))
def test_transforms_over_axes_commute_and_train_as_replicas(ranks, drawn):
    assert ranks(4).run(broken_laws, drawn) == [[]] * 4


TREE = Tree(Node((Leaf((4, 3), (0, 1)), Leaf((5,), (0,)))))


def test_the_laws_are_seen_to_break(ranks):
    """Other axes are not another order: the check says so."""
    one = ((Link("shard_params"), "inner"), (Link("replicate"), "outer"))
    other = ((Link("shard_params"), "outer"), (Link("replicate"), "inner"))
    assert ranks(4).run(broken_laws, [(TREE, one, other)])[0] == ["0: commutation", "0: commutation of training"]


# -- out of step on none of them ----------------------------------------------------------------------------------------

SKIPS = st.lists(st.sets(st.integers(0, 2), max_size=2), min_size=4, max_size=4)
"""For each rank, the blocks that its loss leaves out."""


class Branches(nn.Module):
    """Three blocks after a first layer, each with an output of its own."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 5) for _ in range(3))

    def forward(self, x):
        x = torch.tanh(self.first(x))
        return [torch.tanh(block(x)) for block in self.blocks]


def trained_in(inner, outer, skips):
    """A model after two steps, with accumulated microbatches, and the last gradients, as they rest."""
    mesh = root_of(simulated_axis())
    rank = 2 * mesh["outer"].get_local_rank() + mesh["dp"].get_local_rank()
    seed_generator(0)
    model = STAGES[outer](STAGES[inner](Branches(), mesh["dp"]), mesh["outer"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grads = []
    for number in range(2):
        optimizer.zero_grad()
        _backward(model, number, rank, skips[rank])
        with zf.accumulate(model):
            for microbatch in range(2):
                _backward(model, 10 + microbatch, rank, skips[(rank + microbatch) % 4])
        grads = [parameter.grad for parameter in model.parameters()]
        optimizer.step()
    return model, grads


def unlike_replicas(inner, outer, skips):
    """Parameters that are not this rank's part of those of replicas, to the bit. DTensor's own cuts are cached by process."""
    model, grads = trained_in(inner, outer, skips)
    replicas, their_grads = trained_in("replicate", "replicate", skips)
    found = []
    pairs = zip(model.named_parameters(), replicas.parameters(), grads, their_grads, strict=True)
    for (name, one), other, mine, theirs in pairs:
        slot = slot_of(one)
        assert slot is not None
        if not torch.equal(local_of(one), slot.path.owned(local_of(other))):
            found.append(name)
        if mine is None or theirs is None:
            found += [f"whether {name} has a gradient"] * (mine is not theirs)
        elif not torch.equal(local_of(mine), slot.path.owned(local_of(theirs))):
            found.append(f"gradient of {name}")
    return found


def _backward(model, seed, rank, skipped):
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(100 * seed + rank))
    outputs = model(x)
    torch.stack([output.sum() for number, output in enumerate(outputs) if number not in skipped]).sum().backward()


@examples(dev=6, ci=40, deep=1000)
@given(
    st.sampled_from(list(STAGES)),
    st.sampled_from(list(STAGES)),
    SKIPS,
    st.lists(st.integers(0, 3), max_size=60),
    st.sampled_from(["early", "late"]),
    st.sampled_from(["exchange", "native"]),
)
def test_ranks_of_two_axes_stay_in_step(
    simulated,
    inner,
    outer,
    skips,
    schedule,
    timing,
    transport,
):
    case = simulated((2, 2), schedule=schedule, timing=timing, transport=transport)
    found = case.run(unlike_replicas, inner, outer, skips)
    if list(STAGES).index(inner) >= list(STAGES).index(outer):  # else sums go over the outer axis first
        assert found == [[]] * 4
