"""Law: the result of an optimizer never depends on the sharding. Each tensor is stepped whole, by its owner.

Trees of parameters of any shapes and strides, chains of transforms that leave some parameters plain, groups, batches of any
size and gradients of some parameters, on up to 8 simulated ranks, beside one process.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import zero_fn as zf
from property_tests.programs import Chain, Tree, apply, build
from property_tests.strategies import chains, schedules, trees
from tests.promises.test_by_owner import OPTIMIZERS
from tests.simulation import axis
from tests.support.profiles import examples


class Case(NamedTuple):
    tree: Tree
    chain: Chain
    name: str  # of the optimizer
    lr: tuple[float, float]  # of the parameters with even and with odd numbers
    batch: int
    steps: list[int]  # in each after the first, bits say which parameters have gradients


CASES = st.builds(
    Case,
    trees(dtypes=(torch.float32, torch.float32, torch.float64)),
    chains(),
    st.sampled_from(["Adafactor", "AdamW, foreach", "Lamb", "Muon with AdamW", "SGD", "SOAP"]),
    st.sampled_from([(0.1, 0.1), (0.1, 0.01)]),
    st.sampled_from([1, 300, 1 << 20]),
    st.lists(st.integers(0, 2**12 - 1), max_size=2),
)


def _stepped(case, mesh):
    """Whole parameters after all steps: of ranks, or of one process."""
    model = build(case.tree)
    model = model if mesh is None else apply(case.chain, model, mesh())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = OPTIMIZERS[case.name](trained)
    for group in [*optimizer.param_groups]:  # every second parameter in a group of its own
        odd = group["params"][1::2]
        if odd:
            del group["params"][1::2]
            optimizer.add_param_group({**group, "params": odd, "lr": case.lr[1]})
        group["lr"] = case.lr[0]
    optimizer = optimizer if mesh is None else zf.by_owner(optimizer, batch=case.batch)
    for step, present in enumerate([-1, *case.steps]):
        generator = torch.Generator().manual_seed(step)
        for number, parameter in enumerate(trained):
            grad = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype)
            grad.copy_(torch.randn(parameter.shape, generator=generator))
            parameter.grad = grad if present >> number % 12 & 1 else None
        optimizer.step()
    if mesh is None:
        return [parameter.detach() for parameter in model.parameters()]
    with zf.unsharded(model):
        return [parameter.detach().clone() for parameter in model.parameters()]


@examples(dev=40, ci=2_000, deep=100_000)
@given(case=CASES, n=st.integers(1, 8), schedule=schedules, transport=st.sampled_from(["exchange", "native"]))
def test_owners_step_as_one_process(simulated, case, n, schedule, transport):
    try:
        expected = _stepped(case, None)
    except (IndexError, RuntimeError, ValueError, ZeroDivisionError):  # some take no scalars, and some no empty tensors
        assume(False)
    for found in simulated(n, schedule=schedule, transport=transport).run(_stepped, case, axis):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
