"""Owners on meshes of two axes: tensors that both axes cut, or one, or none, stepped as those of one process, to the bit.

Whole gradients are assigned, so that no order of summation matters.
"""

from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor, distribute_tensor

import zero_fn as zf
from tests.axes.grids import Block, Decoder, composed, grid, parallelized
from tests.axes.test_experts import _example
from tests.promises.test_by_owner import OPTIMIZERS
from tests.support.on_ranks import on_ranks
from tests.support.profiles import by_night
from tests.support.programs import STAGES
from tests.support.seeds import seed_generator
from tests.support.wholes import full


def _seeded(model):
    seed_generator(0)
    return model()


def _placed(composition):
    """The same values in one process, and over the ranks."""
    kind, _, stage = composition.partition(", ")
    if kind == "experts":
        options = _example().Options(stage=int(stage))
        return _example().build(_example().Options(stage=int(stage))), _example().build(options, grid("dp", "ep"))
    if kind == "pipeline":
        mesh = grid("pp", "dp")
        width = 4 + 3 * mesh["pp"].get_local_rank()  # stages have tensors of their own
        seed_generator(0)
        plain = Block(width)
        seed_generator(0)
        return plain, STAGES[stage](Block(width), mesh["dp"])
    if kind in ("columns", "sequence"):
        mesh, plain = grid("dp", "tp"), _seeded(Decoder)
        model = parallelized(mesh["tp"], kind)
        return plain, STAGES[stage](model, mesh["dp"]) if stage else model
    return _seeded(Decoder), composed(kind)[0]


COMPOSITIONS = (
    *(f"{kind}, {stage}" for kind in ("columns", "sequence") for stage in ("replicate", "zero1", "zero3")),
    *("columns", "hybrid", "hpz", "experts, 1", "experts, 3", "pipeline, zero3"),
)


DAILY = ("columns, zero3", "sequence, zero1", "hybrid", "hpz", "experts, 3", "pipeline, zero3")


@pytest.mark.parametrize("composition", by_night(COMPOSITIONS, DAILY))
@on_ranks(4)
def test_owners_on_two_axes_step_as_one_process(composition, folder):
    for name in ("Muon with AdamW", "SOAP"):
        plain, model = _placed(composition)
        pairs = list(zip(model.parameters(), plain.parameters(), strict=True))
        optimizer = zf.by_owner(OPTIMIZERS[name]([*model.parameters()]), batch="2KiB")
        if name == "SOAP" and composition == "columns, zero3":
            optimizer = zf.streamed(optimizer, zf.nvme(Path(folder)))
        stock = OPTIMIZERS[name]([*plain.parameters()])
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            for resting, whole in pairs:
                whole.grad = torch.randn(whole.shape, generator=generator)
                grad = whole.grad.clone()
                if composition == "columns" and isinstance(resting, DTensor):  # of no transform of zero_fn
                    grad = distribute_tensor(grad, resting.device_mesh, resting.placements)
                resting.grad = grad
            optimizer.step()
            stock.step()
        for (fqn, resting), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(full(resting), whole), (name, fqn)
