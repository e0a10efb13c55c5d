"""Strategies: shapes, memory orders, traces, homes, module trees, chains of transforms; models of real layers, training
programs, schedules of ranks, faults."""

from dataclasses import replace

import torch
from hypothesis import strategies as st

import zero_fn as zf
from property_tests.programs import KINDS, OUTPUTS, Leaf, Link, Model, Node, Part, Tree, World
from property_tests.rules import (
    Accumulate,
    Backward,
    Copy,
    Edit,
    Evaluate,
    Fail,
    Freeze,
    Load,
    Optimizer,
    Program,
    Step,
    Transform,
    ZeroGrad,
)
from tests.simulation import Fault
from zero_fn.values.home import Home, ReshardAfter, Stage
from zero_fn.values.schedule import Enter, Exit, Use

FLOATS = (torch.float32, torch.float64, torch.bfloat16)
DTYPES = (*FLOATS, torch.complex64, torch.int64, torch.bool)


def shapes(*, min_size=0, max_dims=4, max_size=17):
    """Shapes of parameters: scalars and, with `min_size=0`, empty tensors among them."""
    return st.lists(st.integers(min_size, max_size), max_size=max_dims).map(tuple)


def memory_orders(dims):
    """Dims of a tensor from the outermost in memory to the innermost."""
    return st.permutations(range(dims)).map(tuple)


@st.composite
def traces(draw, *, max_units=5, max_uses=8):
    """Brackets of a forward pass: nested and repeated units, one after the other, as modules call modules."""
    trace = []
    counts = {}
    open_uses = []
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


def homes(*, compatible=False):
    """Homes; `compatible` ones never ask for two dtypes."""
    dtypes = (None, torch.bfloat16) if compatible else (None, torch.bfloat16, torch.float16)
    sums = (None, torch.float32) if compatible else (None, torch.float32, torch.float64)
    return st.builds(
        Home,
        st.sampled_from(Stage),
        compute=st.sampled_from(dtypes),
        reduce=st.sampled_from(sums),
        grads=st.sampled_from(dtypes),
        reshard_after=st.sampled_from(ReshardAfter),
    )


@st.composite
def leaves(draw, *, shape=None, dtypes=DTYPES, frozen=True):
    """Parameters of every awkward kind, or of these shapes, in any order of dims."""
    found = draw(shapes(max_dims=3, max_size=9) if shape is None else shape)
    trained = draw(st.booleans()) or draw(st.booleans()) if frozen else True
    return Leaf(found, draw(memory_orders(len(found))), draw(st.sampled_from(dtypes)), trained)


@st.composite
def small_trees(draw, shape, dtypes=(torch.float32,)):
    """Up to four parameters of these shapes, the first of which is trained: two of the root, two of a child."""
    first, *others = draw(st.lists(leaves(shape=shape, dtypes=dtypes), min_size=1, max_size=4))
    return Tree(Node((replace(first, trained=True), *others[:1]), (Node(tuple(others[1:])),)))


@st.composite
def trees(draw, *, dtypes=DTYPES, frozen=True, ties=True):
    """Modules: a root with a parameter, nested containers, ties anywhere.

    Not with `st.builds`: Hypothesis takes exponential time to print nested calls of it.
    """
    leaf = leaves(dtypes=dtypes, frozen=frozen)
    budget = draw(st.integers(0, 6))

    def node(depth):
        nonlocal budget
        own = tuple(draw(leaf) for _ in range(draw(st.integers(0 if depth else 1, 3))))
        width = min(draw(st.integers(0, 3)), budget) if depth < 3 else 0
        budget -= width
        return Node(own, tuple(node(depth + 1) for _ in range(width)), draw(st.booleans()))

    root = node(0)
    pairs = draw(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=2)) if ties else []
    return Tree(root, tuple(pairs))


STAGES = ("replicate", "shard_optimizer", "shard_grads", "shard_params")
_UNITS = (None, "*", zf.by_size(nbytes=1), zf.by_size(nbytes=200))


@st.composite
def links(
    draw,
    *,
    units=None,
    where=("p0", "*", ("p0", "*p1")),
    donates=False,
):
    """One sharding transform with options; `where` selects some parameters of the model."""
    verb = draw(st.sampled_from(STAGES))
    options = {}
    if units is not None and draw(st.booleans()):
        options["units"] = units
    if draw(st.booleans()):
        options["where"] = draw(st.sampled_from(where))
    if verb != "replicate" and draw(st.booleans()):
        options["persist_below"] = draw(st.sampled_from([0, 40, 10**6]))
    if verb == "shard_params" and draw(st.booleans()):
        options["reshard_after"] = draw(st.sampled_from(["forward", "backward"]))
    if donates and draw(st.sampled_from([False, False, True])):
        options["donate"] = True
    return Link(verb, options)


@st.composite
def chains(draw, *, min_size=1, max_size=3, precise=False):
    """Chains of transforms in any order, all with the same choice of units if any; `precise` adds `precision`."""
    units = draw(st.sampled_from(_UNITS))
    chain = draw(st.lists(links(units=units), min_size=min_size, max_size=max_size))
    if precise and draw(st.booleans()):
        at = draw(st.integers(0, len(chain)))
        chain.insert(at, Link("precision", draw(st.sampled_from([{}, {"where": "p0"}, {"output": torch.float64}]))))
    return tuple(chain)


SIZES = st.integers(1, 8) | st.sampled_from([(2, 2), (2, 3), (3, 2), (2, 4)])
"""Ranks of a world."""


@st.composite
def worlds(draw, *, sizes=SIZES, chain=None, states=("params", "grads", "optim")):
    """Any ranks, transforms over their axes, and tiers of some of these states."""
    ranks = draw(sizes)
    axes = st.sampled_from(["dp"] if isinstance(ranks, int) else ["dp", "outer"])
    found = tuple((link, draw(axes)) for link in draw(chains() if chain is None else chain))
    away = [state for state in states if draw(st.integers(0, 3)) == 0]
    return World(ranks, found, {state: draw(st.sampled_from(["cpu", "nvme"])) for state in away})


def without_units(chain):
    """The chain for a module whose units are chosen already."""
    return tuple(Link(link.verb, {k: v for k, v in link.options.items() if k != "units"}) for link in chain)


# -- models of real layers, and programs --------------------------------------------------------------------------------

schedules = st.lists(st.integers(0, 7), max_size=12).map(tuple)
"""Which rank is next; see `tests/simulation/turns.py`."""

_WHERE = ("head.*", "*", "parts.0.*", ("*weight*", "head.bias"))


@st.composite
def parts(draw, depth=2):
    """One layer, or a nest of up to three."""
    kind = draw(st.sampled_from([*KINDS, "nest"] if depth else list(KINDS)))
    children = tuple(draw(st.lists(parts(depth - 1), min_size=1, max_size=3))) if kind == "nest" else ()
    wrap = draw(st.sampled_from(["", "", "", "checkpoint", "reentrant"]))
    return Part(kind, draw(st.integers(1, 7)), draw(st.sampled_from([False, False, False, True])), wrap, children)


_leaves = st.builds(Part, st.sampled_from(["routed", "linear", "mlp"]), st.integers(2, 3), st.booleans())
_below = st.builds(
    lambda children, is_frozen: Part("nest", 2, is_frozen, "checkpoint", tuple(children)),
    st.lists(_leaves, min_size=1, max_size=3),
    st.booleans(),
)
_around = st.builds(
    lambda children, wrap: Part("nest", 2, True, wrap, tuple(children)),
    st.lists(_leaves | _below, min_size=1, max_size=3),
    st.sampled_from(["", "checkpoint"]),
)


@st.composite
def adapted(draw):
    """A trained layer before frozen ones, some below a checkpoint of several, of which ranks skip parts."""
    first = Part(draw(st.sampled_from(["mlp", "linear"])), draw(st.integers(2, 3)))
    return (first, *draw(st.lists(_around | _leaves, min_size=1, max_size=2)))


@st.composite
def models(draw):
    """Models of one to four parts.

    No ties beside skipped experts below reentrant checkpoints: the one combination that is refused at run time, see
    `test_experts_that_are_tied_to_another_unit_below_a_reentrant_checkpoint_raise_on_every_rank`.
    """
    some = st.lists(parts(), min_size=1, max_size=4).map(tuple)
    chosen = draw(st.one_of(*[some] * 7, adapted()))
    ties = ()
    kinds = Model(1, chosen).kinds()
    if not {"routed", "reentrant"} <= kinds:
        ties = tuple(draw(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 7)), max_size=2)))
    twice = draw(st.sampled_from([-1, -1, -1, 0, 1]))
    width, output = draw(st.integers(1, 6)), draw(st.sampled_from(OUTPUTS))
    return Model(width, chosen, ties, output, draw(st.booleans()), twice, draw(st.booleans()))


@st.composite
def chains_for(draw, model, *, max_size=3):
    """Chains of transforms that fit a model, with every option.

    Where experts are skipped, the unit is the layer that routes: a unit that a rank does not enter is one it does not gather.
    Where a layer reads the parameters of another without calling it, both are in one unit; else that is a typed error.
    """
    choices = [None, "parts.?"]
    if "nest" in model.kinds():
        choices += ["*inside.?", ("parts.?", "*inside.?")]
    if not model.kinds() & {"routed", "attention", "normed", "weighted", "odd"}:
        choices += ["*", zf.by_size(nbytes=1), zf.by_size(nbytes=100)]
    units = draw(st.sampled_from(choices))
    one = links(units=units, where=_WHERE, donates=True)
    first, *others = draw(st.lists(one, min_size=1, max_size=max_size))
    return (Link(first.verb, first.options if units is None else {"units": units, **first.options}), *others)


def backwards(*, several=True):
    """Forwards and backwards of every kind."""
    return st.builds(
        Backward,
        forwards=st.sampled_from([1, 1, 1, 2, 3] if several else [1]),
        together=st.booleans(),
        output=st.sampled_from([-1, -1, 0, 1]),
        retain=st.sampled_from([False, False, False, True]),
        unused=st.sampled_from([False, False, False, True]),
    )


def steps():
    """Optimizer steps, clipped or not."""
    norms = [0.5, 1.0, 2.0, 3.0, float("inf")]
    clips = st.sampled_from([None, None, 0.1, 1.0])
    return st.builds(Step, clip=clips, norm=st.sampled_from(norms), keeps=st.sampled_from([False, False, True]))


def rules(model):
    """One rule that fits a model."""
    chain = chains_for(model, max_size=2)
    accumulate = st.builds(
        Accumulate,
        st.lists(backwards(), min_size=1, max_size=3).map(tuple),
        evaluates=st.booleans(),
        fails_at=st.sampled_from([-1, -1, -1, 0, 1]),
        unshard=st.booleans(),
    )
    step = steps()
    fail = st.builds(Fail, st.sampled_from(["forward", "backward", "recomputation"]), st.integers(0, 3), st.booleans())
    return st.one_of(
        backwards(),
        backwards(),
        step,
        step,
        accumulate,
        st.builds(Evaluate, st.sampled_from(["no_grad", "inference_mode", "eval"])),
        st.builds(ZeroGrad, st.booleans()),
        st.builds(Freeze, st.integers(0, 3), st.booleans()),
        st.builds(Edit, st.integers(0, 20), st.booleans(), st.booleans()),
        st.builds(Load, chain),
        st.builds(Transform, chain.map(without_units)),
        st.just(Copy()) if "weighted" not in model.kinds() else step,
        fail,
    )


@st.composite
def programs(draw, *, max_rules=6):
    """Whole programs."""
    model = draw(models())
    optimizer = draw(st.builds(Optimizer, st.sampled_from(["sgd", "adam", "adamw"]), st.booleans(), st.booleans()))
    chain = draw(chains_for(model))
    drawn = draw(st.lists(rules(model), min_size=2, max_size=max_rules))
    return Program(model, chain, tuple(drawn), optimizer)


def faults(n, *, kinds=("delay", "drop", "kill"), last=120):
    """One fault of one of `n` ranks, at one of its first events."""
    return st.builds(
        Fault,
        st.sampled_from(kinds),
        st.integers(0, n - 1),
        st.integers(0, last),
        st.integers(1, 50),
    )
