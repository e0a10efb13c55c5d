"""What a unit does with gradients that autograd gives it: they are added up, and never written."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import zero_fn as zf
from tests.groups import alone
from zero_fn.runtime.entry import units_of
from zero_fn.runtime.side_stream import Arriving


def test_a_gradient_that_two_parameters_share_is_not_summed_in_place() -> None:
    """`a + b` has one gradient, which autograd gives to both."""
    with alone() as axis:
        model = zf.shard_params(nn.LayerNorm(3), axis)
        (unit,) = units_of(model)
        shared = torch.ones(3)
        unit.gradients.add([shared, shared], exact=True)  # a sum of the unit's own, as where it has several uses
        unit.gradients.take()
        for _ in range(2):
            unit.gradients.add([shared, shared], exact=False)
        assert torch.equal(shared, torch.ones(3))
        assert [grad.tolist() for grad in unit.gradients.local if grad is not None] == [[2.0] * 3] * 2


class _Copies:
    """A side stream of the host that counts bytes."""

    nbytes = 0

    def copy_all(self, to: Sequence[Tensor], sources: Sequence[Tensor]) -> _Copies:
        for place, source in zip(to, sources, strict=True):
            place.copy_(source)
            self.nbytes += source.nbytes
        return self

    def synchronize(self) -> None:
        pass


@pytest.mark.parametrize(("computed", "nbytes"), [(torch.bfloat16, 8 * 2 + 1), (torch.float32, 8 * 4)])
def test_a_gradient_computed_in_half_precision_leaves_the_device_in_half_of_its_bytes(
    monkeypatch: pytest.MonkeyPatch, computed: torch.dtype, nbytes: int
) -> None:
    copies = _Copies()
    monkeypatch.setattr("zero_fn.runtime.side_stream.side_stream", lambda device: copies)
    place, values = torch.zeros(8), torch.arange(8.0)
    Arriving([place], [values], computed).finish()
    assert torch.equal(place, values)
    assert copies.nbytes == nbytes
