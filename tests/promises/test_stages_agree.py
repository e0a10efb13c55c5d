"""Every stage trains to the same bits, and to those of DDP on two ranks. On more, gradients are the means in the order of the
ranks, to the bit (the laws), and so within the rounding of any other order. Options never change the numbers: the laws."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zero_fn as zf
from tests.axes.grids import differing
from tests.support.models import Language, Odd, Stack
from tests.support.on_ranks import on_ranks
from tests.support.programs import STAGES, train, train_ddp
from tests.support.ranks import axis
from tests.support.worlds import noise


class Again(Language):
    """Each block runs three times in a forward."""

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in (*self.blocks, *self.blocks, *self.blocks):
            x = block(x)
        return self.head(self.norm(x))


CASES = {
    "four ranks": (4, Odd, {"optimizer": "adamw_foreach"}),
    "microbatches": (3, Odd, {"optimizer": "adamw_foreach", "microbatches": 3}),
    "adagrad, clipped": (3, Odd, {"optimizer": "adagrad", "clip": 0.1}),
    "fused": (3, Language, {"optimizer": "adamw_fused"}),
    "bfloat16": (3, Language, {"transform": zf.precision}),
    "bfloat16, microbatches, blocks used again": (2, Again, {"transform": zf.precision, "microbatches": 2}),
}


def _stages(build, options):
    # A norm of shards is rounded in another order than that of whole gradients, and so are the last elements of a fused step.
    is_in_order = "clip" not in options and options.get("optimizer") != "adamw_fused"
    first, *others = [*STAGES] if is_in_order else ["zero1", "zero2", "zero3"]
    expected = train(build, first, **options)
    return [differing(expected, train(build, name, **options)) for name in others]


@pytest.mark.parametrize("case", CASES)
def test_stages_train_to_the_same_bits(ranks, case):
    n, build, options = CASES[case]
    for found in ranks(n).run(_stages, build, options):
        assert not any(found)


@pytest.mark.parametrize("microbatches", [1, 3])
@on_ranks(2)
def test_stages_equal_ddp_to_the_bit_on_two_ranks(microbatches):
    expected = train_ddp(Odd, microbatches=microbatches)
    for stage in STAGES:
        assert differing(expected, train(Odd, stage, microbatches=microbatches)) == []


def _gradients_over(mesh):
    torch.manual_seed(0)
    model = zf.shard_params(Stack(), mesh)
    model(noise(2, 6, seed=0)).square().mean().backward()
    return [parameter.grad.full_tensor() for parameter in model.parameters()]


@on_ranks(3)
def test_an_axis_may_have_no_name_and_some_of_the_ranks():
    """An axis without a name; an axis of ranks 0 and 2, on a group that is there, while rank 1 does something else."""
    assert all(map(torch.equal, _gradients_over(axis()), _gradients_over(init_device_mesh("cpu", (3,)))))
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        return
    found = _gradients_over(DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",)))
    torch.manual_seed(0)
    plain = Stack()
    plain(noise(2, 6, seed=0)).square().mean().backward()
    for parameter, grad in zip(plain.parameters(), found, strict=True):
        dist.all_reduce(parameter.grad, group=group)
        assert torch.equal(parameter.grad / 2, grad)
