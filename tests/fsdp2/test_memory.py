"""By intent, `test_fully_shard_memory.py`, `_compile.py` and `_extensions.py` of FSDP2. Said elsewhere:

test_fully_shard_training_memory
    distributed/test_peak_memory.py::test_a_zero3_step_needs_four_units_above_rest_whatever_the_depth
test_fully_shard_del_memory        distributed/test_verbs.py::test_a_deleted_model_frees_its_memory_without_the_collector
resharded after forward            distributed/test_verbs.py::test_nothing_stays_gathered_at_rest
compiled models                    acceptance/test_compile.py::test_g44_transforms_and_compilation_commute
all-gather extensions              runtime/test_extended.py::test_they_train_as_under_fsdp2
float8                             runtime/test_extended.py::test_float8_training_of_torchao_is_that_under_fsdp2
subclasses without extensions      acceptance/test_models.py::test_g46_parameters_of_tensor_subclasses_are_refused_by_name
"""

from __future__ import annotations

import torch
from torch import nn

import zero_fn as zf
from tests.support.ranks import Ranks, axis


def _held() -> list[int]:
    """Bytes of parameters, gradients and states in each part of a step."""
    model = zf.zero3(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), axis())
    optimizer = torch.optim.Adam(model.parameters())
    found = []
    for _ in range(2):
        found.append(zf.held(model, optimizer).total)
        loss = model(torch.ones(2, 64)).sum()
        loss.backward()
        found.append(zf.held(model, optimizer).total)
        optimizer.step()
        found.append(zf.held(model, optimizer).total)
        optimizer.zero_grad()
    return [sum(p.numel() for p in model.parameters()), *found]


def test_a_step_holds_what_zero_says(ranks: Ranks) -> None:
    rows = ranks(2).run(_held)
    numel = rows[0][0]
    both = [sum(column) for column in zip(*(row[1:] for row in rows), strict=True)]
    expected = [numel * 4 * times for times in (1, 2, 4, 3, 4, 4)]
    assert all(wanted <= found <= 1.1 * wanted for found, wanted in zip(both, expected, strict=True)), (both, expected)
