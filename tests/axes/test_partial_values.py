"""Numbers that are read from parameters and gradients in shards are those of the whole tensors, on every rank."""

import pytest
import torch

from tests.axes.grids import composed, loss_of
from tests.support.wholes import full

READ = {
    "sum": lambda t: t.sum().item(),
    "norm": lambda t: t.norm().item(),
    "1-norm": lambda t: float(torch.linalg.vector_norm(t, 1)),
    "max": lambda t: t.max().item(),
    "largest": lambda t: t.abs().max().item(),
    "mean": lambda t: t.mean().item(),
    "any": lambda t: bool((t > 0.2).any()),
    "all": lambda t: bool(torch.isfinite(t).all()),
    "count": lambda t: int(t.count_nonzero()),
}


def _read(composition):
    """What differs from the whole tensor, and all that was read."""
    model, row = composed(composition)
    loss_of(model, 0, row).backward()
    wrong, values = [], []
    one_of_each_shape = {parameter.shape: (name, parameter) for name, parameter in model.named_parameters()}
    for name, parameter in one_of_each_shape.values():
        for of, tensor in (("parameter", parameter.detach()), ("gradient", parameter.grad)):
            whole = full(tensor)
            rounding = 1e-6 * float(whole.abs().sum())  # of a sum whose terms cancel
            for reading, read in READ.items():
                values.append(read(tensor))
                if values[-1] != pytest.approx(read(whole), rel=1e-5, abs=rounding):
                    wrong.append(f"{reading} of the {of} of {name}: {values[-1]}, not {read(whole)}")
    return wrong, values


@pytest.mark.parametrize("composition", ["zero1", "zero3", "tp", "hybrid"])
def test_a_number_is_that_of_the_whole_tensor_on_every_rank(ranks, composition):
    """Each rank once read its own part, silently: `p.grad.norm().item()`, `if p.grad.isnan().any():`."""
    (wrong, values), *others = ranks(4).run(_read, composition)
    assert not wrong
    assert all(other == ([], values) for other in others)
