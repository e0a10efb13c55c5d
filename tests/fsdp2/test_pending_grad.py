"""By intent, the tests of FSDP2 for gradients that are not reduced yet. Said elsewhere:

test_native_accumulation        acceptance/test_accumulation.py::test_g03_blocks_and_plain_backwards_add_up_without_zero_grad
clear inside a block            acceptance/test_accumulation.py::test_g03_zero_grad_drops_pending_gradients
synchronize_gradients           acceptance/test_accumulation.py::test_g01_accumulated_microbatches_are_reduced_once
each backward is reduced        acceptance/test_accumulation.py::test_g02_gradients_reduced_each_time_add_up
the all-reduce last (HSDP)      examples/test_docs.py::test_a_page_runs_on_ranks
grad_dtype=float32              distributed/test_masters.py::test_masters_are_made_where_it_is_asked
"""

from __future__ import annotations

import torch

import zero_fn as zf
from tests.fsdp2.models import DIM, Stacked, run_all
from tests.support.ranks import Ranks
from tests.support.worlds import World, noise


def pending_gradients_are_scaled_and_dropped(world: World) -> None:
    """In a block with `unshard=True`, `.grad` is the sum of this rank so far."""
    model = world.build(Stacked)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        with world.accumulate(model) if world.is_replica else zf.accumulate(model, unshard=True):
            for microbatch in range(3):
                model(noise(2, DIM, seed=3 * step + microbatch)).square().mean().backward()
                for number, parameter in enumerate(model.parameters()):
                    assert parameter.grad is not None
                    if number == 0 and microbatch == 1:
                        parameter.grad = None
                    else:
                        parameter.grad.mul_(0.5)
        world.reduce(model)
        world.note_model(model)
        optimizer.step()
        optimizer.zero_grad()


def test_pending_gradients_may_be_edited(ranks: Ranks) -> None:
    assert ranks(2).run(run_all, (pending_gradients_are_scaled_and_dropped,)) == [[], []]
