"""Laws 1 to 5, 7 and 8: what every chain of transforms does to every module.

Structure is looked at as one of four pretended ranks; outputs on one real rank; all shards in `test_many_ranks_laws.py`.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import zero_fn as zf
from property_tests.programs import Link, apply, batch, build
from property_tests.strategies import STAGES, chains, trees, without_units
from tests.support.groups import alone, pretended
from zero_fn.errors import LayoutError, ZeroError

HELD = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def four():
    """The axis as rank 1 of 4 sees it, for all examples of a test."""
    with pretended(4, rank=1) as mesh:
        yield mesh


def places(module):
    """Every name of every parameter, and which of them are one."""
    numbers = {}
    named = module.named_parameters(remove_duplicate=False)
    return {name: numbers.setdefault(id(parameter), len(numbers)) for name, parameter in named}


def resting(module):
    """What rests under each name: placement, local shape and strides, dtype, values."""
    found = {}
    for name, parameter in module.named_parameters():
        local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
        where = parameter.placements if isinstance(parameter, DTensor) else None
        values = local.detach().clone()
        found[name] = (where, tuple(local.shape), local.dtype, parameter.requires_grad, repr(values.tolist()))
    return found


def assert_same(one, other):
    assert zf.describe(one) == zf.describe(other)
    assert resting(one) == resting(other)
    assert places(one) == places(other)


@HELD
@given(trees(), chains(precise=True))
def test_names_ties_types_and_placements_survive_any_chain(four, tree, chain):
    plain = build(tree)
    model = apply(chain, plain, four)
    assert places(model) == places(plain)
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    assert {name: tuple(value.shape) for name, value in model.state_dict().items()} == {
        name: tuple(value.shape) for name, value in plain.state_dict().items()
    }
    for (name, parameter), (_, before) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert isinstance(parameter, DTensor), name
        assert isinstance(parameter.placements[0], Shard | Replicate)
        assert parameter.requires_grad == before.requires_grad
        assert parameter.dtype == before.dtype
        assert parameter.is_leaf


@HELD
@given(trees(), chains(precise=True), st.data())
def test_chains_commute_and_a_transform_twice_is_the_transform_once(four, tree, chain, data):
    again = data.draw(st.permutations([*chain, data.draw(st.sampled_from(chain))]))
    assert_same(apply(again, build(tree), four), apply(chain, build(tree), four))


@HELD
@given(trees(), st.integers(0, 3), st.integers(0, 3), st.sampled_from([{}, {"where": "p0"}, {"units": "*"}]))
def test_a_stage_absorbs_the_stages_below_it(four, tree, one, other, options):
    low, high = Link(STAGES[min(one, other)], options), Link(STAGES[max(one, other)], options)
    for chain in ((low, high), (high, low)):
        assert_same(apply(chain, build(tree), four), high(build(tree), four))


MISTAKES = (
    Link("shard_params", {"where": "nothing"}),
    Link("shard_grads", {"units": "nothing"}),
    Link("shard_grads", {"units": nn.Conv2d}),
    Link("shard_params", {"persist_below": -1}),
    Link("shard_params", {"reshard_after": "never"}),
    Link("shard_params", {"units": nn.Bilinear, "donate": True}),
    Link("precision", {"compute": torch.int8}),
    Link("precision", {"where": "nothing"}),
)


@HELD
@given(trees(), chains(min_size=0, max_size=2), st.sampled_from(MISTAKES))
def test_a_transform_that_raises_changed_nothing(four, tree, chain, mistake):
    model = apply(chain, build(tree), four)
    before, parameters = snapshot(model), list(model.parameters())
    with pytest.raises(ZeroError):
        mistake(model, four)
    assert snapshot(model) == before
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))


@HELD
@given(trees(), chains(min_size=0, max_size=2), st.integers(0, 10))
def test_a_module_that_cannot_be_copied_is_unchanged_and_says_why(four, tree, chain, at):
    model = apply(chain, build(tree), four)
    modules = list(model.named_modules())
    name, module = modules[at % len(modules)]
    module.stream = iter_nothing()
    before = snapshot(model)
    with pytest.raises(LayoutError, match="cannot be copied") as caught:
        zf.shard_params(model, four, donate=True)
    assert caught.value.facts["attribute"] == f"{name}.stream".lstrip(".")
    assert snapshot(model) == before


def iter_nothing():
    """A generator, which cannot be copied."""
    yield None


def snapshot(module):
    """All that a transform might change in its argument."""
    keys = [(name, tuple(child.__dict__)) for name, child in module.named_modules()]
    described = zf.describe(module) if "forward" in module.__dict__ else None
    return keys, places(module), resting(module), described


# -- outputs, on one rank -----------------------------------------------------------------------------------------------


def outputs(module):
    return [module(batch(seed)).detach() for seed in range(2)]


def gradients(module):
    """Of the input, which a module without trained parameters has too, and of every parameter."""
    module.zero_grad()
    x = batch(0)
    module(x).sum().backward()
    grads = [x.grad, *(parameter.grad for parameter in module.parameters())]
    return [grad._local_tensor if isinstance(grad, DTensor) else grad for grad in grads]


def is_same(one, other):
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(one, other, strict=True))


@given(st.lists(st.tuples(trees(), chains(), chains()), min_size=3, max_size=3))
def test_outputs_are_unchanged_by_any_chain_and_the_argument_still_runs(programs):
    with alone() as mesh:
        for tree, chain, more in programs:
            plain = build(tree)
            expected, slopes, before = outputs(plain), gradients(plain), resting(plain)
            model = apply(chain, plain, mesh)
            assert is_same(outputs(model), expected)
            assert is_same(gradients(plain), slopes)
            assert resting(plain) == before
            described = zf.describe(model)
            further = apply(without_units(more), model, mesh)
            gradients(further)
            with torch.no_grad():
                for parameter in further.parameters():
                    parameter.zero_()
            assert zf.describe(model) == described
            assert is_same(outputs(model), expected)
            assert is_same(gradients(model), slopes)
            assert is_same(outputs(plain), expected)


# -- found here ---------------------------------------------------------------------------------------------------------


class Product(nn.Module):
    def __init__(self, names):
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.ones(2)))

    def forward(self, x):
        for name, _ in self.named_parameters():
            x = x * getattr(self, name)
        return x


def tied_products():
    """The anchor `0` holds a parameter of its own unit and one of the root, tied to `1.0`."""
    first, other = Product("wv"), Product("w")
    other.w = first.w
    return nn.Sequential(first, nn.Sequential(other))


@pytest.mark.parametrize("times", [1, 2, 3])
def test_an_anchor_may_hold_a_parameter_of_another_unit_when_transformed_again(times):
    """Its two entries stack; a second transform once left the older one of them in the copy."""
    with alone() as mesh:
        model = apply((Link("shard_params"),) * times, tied_products(), mesh)
        assert model(torch.full((2,), 3.0)).tolist() == [3.0, 3.0]


def test_unsharded_of_a_part_gathers_every_unit_that_owns_a_parameter_of_it():
    with alone() as mesh:
        model = zf.shard_params(tied_products(), mesh)
        part = model.get_submodule("0")
        with zf.unsharded(part):
            assert not any(isinstance(parameter, DTensor) for parameter in part.parameters())
