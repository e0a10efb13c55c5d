"""Laws 2, 3, 5 and 6 over two axes of a mesh: transforms commute, repeat and train as replicas, whatever the module, whatever
order ranks run in, and whatever their backwards pass through.

Simulated ranks compare their collectives, and find messages that nobody received.
"""

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import zero_fn as zf
from property_tests.programs import Block, Leaf, Link, Node, Tree, World, batch, build
from property_tests.strategies import chains, schedules, trees, worlds
from tests.support.profiles import examples
from zero_fn.runtime.registry import units_of
from zero_fn.runtime.slot import slot_of
from zero_fn.values.dtensors import local_of


class Branches(Block):
    """Its children run beside one another, and each has an output of its own."""

    def forward(self, x):
        x = self.add_own(x)
        outputs = [torch.tanh(child(x)) for child in self.blocks()]
        return [*outputs, x * self.always]


def branches(tree):
    """The module of a tree, and a parameter that is tied to none."""
    model = build(tree, root=Branches)
    model.always = nn.Parameter(torch.full((3,), 0.5))
    return model


def backward(model, seed, skipped):
    """Of the outputs that this rank does not skip. The last one is never skipped: a backward passes through the model."""
    *others, last = model(batch(seed, dist.get_rank()))
    total = last.sum()
    for number, output in enumerate(others):
        if number not in skipped:
            total = total + output.sum()
    total.backward()


def trained(model, skips):
    """Two steps with accumulated microbatches. Parameters, and gradients of the last step."""
    rank = dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        optimizer.zero_grad()
        backward(model, step, skips[rank])
        with zf.accumulate(model):
            for microbatch in range(2):
                backward(model, 10 + microbatch, skips[(rank + microbatch) % 4])
        grads = [parameter.grad for parameter in model.parameters()]
        optimizer.step()
    return [*model.parameters(), *grads]


def at_rest(tensors):
    """Where tensors rest, and what this rank has of each."""
    return [None if t is None else (getattr(t, "placements", None), local_of(t).detach().tolist()) for t in tensors]


def parts(model, whole):
    """What this rank has of whole tensors that belong to the parameters of a model, one list after the other."""
    paths = [slot_of(parameter).path for parameter in model.parameters()]
    return [
        None if t is None else path.owned(local_of(t)).detach().tolist()
        for path, t in zip(paths * (len(whole) // len(paths)), whole, strict=True)
    ]


def values(tensors):
    return [None if one is None else one[1] for one in at_rest(tensors)]


def broken_laws(tree, links, shuffled, skips):
    """The laws that a program breaks on this rank. The second transforms are the first in another order."""

    def over(links):
        return World((2, 2), links).placed(branches(tree))

    model, other, plain = over(links), over(shuffled), branches(tree)
    found = []
    if at_rest(model.parameters()) != at_rest(other.parameters()):
        found.append("commutation")
    if at_rest(model.parameters()) != at_rest(over((*links, links[0])).parameters()):
        found.append("idempotence")
    if values(model.parameters()) != parts(model, list(plain.parameters())):
        found.append("conservation")
    one = trained(model, skips)
    if at_rest(one) != at_rest(trained(other, skips)):
        found.append("commutation of training")
    slots = [slot for unit in units_of(model) for slot in unit.slots]
    # Where the outer axis shards more, gradients are summed over it first.
    if all(slot.path.hops[0].axis.name == "dp" for slot in slots if len(slot.path.hops) > 1):
        replicas = over(tuple((Link("replicate"), name) for name in sorted({name for _, name in links})))
        if values(one) != parts(model, trained(replicas, skips)):
            found.append("equivalence")
    return found


@st.composite
def programs(draw):
    tree = draw(trees(dtypes=(torch.float32, torch.float64, torch.int64, torch.complex64)))
    links = draw(worlds(sizes=st.just((2, 2)), chain=chains(min_size=2, max_size=4))).links
    skips = draw(st.lists(st.sets(st.integers(0, 2), max_size=2), min_size=4, max_size=4))
    return tree, links, tuple(draw(st.permutations(links))), skips


@examples(dev=10, ci=150, deep=3_000)
@given(programs(), schedules, st.sampled_from(["early", "late"]), st.sampled_from(["exchange", "native"]))
def test_transforms_over_axes_commute_and_train_as_replicas(simulated, program, schedule, timing, transport):
    case = simulated((2, 2), schedule=schedule, timing=timing, transport=transport)
    assert case.run(broken_laws, *program) == [[]] * 4


TREE = Tree(Node((Leaf((4, 3), (0, 1)), Leaf((5,), (0,)))))


def test_the_laws_are_seen_to_break(simulated):
    """Other axes are not another order: the check says so."""
    one = ((Link("shard_params"), "dp"), (Link("replicate"), "outer"))
    other = ((Link("shard_params"), "outer"), (Link("replicate"), "dp"))
    found = simulated((2, 2)).run(broken_laws, TREE, one, other, [()] * 4)
    assert found[0] == ["commutation", "commutation of training"]
