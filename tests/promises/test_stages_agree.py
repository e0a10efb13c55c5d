"""Every stage trains to the same bits, and to those of DDP on two ranks. On more, gradients are the means in the order of the
ranks, to the bit (the laws), and so within the rounding of any other order."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zero_fn as zf
from tests.support.models import Language, Odd, Stack
from tests.support.programs import STAGES, train, train_ddp
from tests.support.ranks import axis
from tests.support.worlds import noise


def _differing(runs):
    """Names of what differs between the first run and each other one."""
    first, *others = runs
    assert all(first.keys() == other.keys() for other in others)
    return [[name for name in first if not torch.equal(first[name], other[name])] for other in others]


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
    names = [*STAGES] if is_in_order else ["zero1", "zero2", "zero3"]
    return _differing([train(build, name, **options) for name in names])


@pytest.mark.parametrize("case", CASES)
def test_stages_train_to_the_same_bits(ranks, case):
    n, build, options = CASES[case]
    for differing in ranks(n).run(_stages, build, options):
        assert not any(differing)


def _stages_against_ddp(microbatches):
    runs = [train(Odd, stage, microbatches=microbatches) for stage in STAGES]
    return _differing([train_ddp(Odd, microbatches=microbatches), *runs])


@pytest.mark.parametrize("microbatches", [1, 3])
def test_stages_equal_ddp_to_the_bit_on_two_ranks(ranks, microbatches):
    assert ranks(2).run(_stages_against_ddp, microbatches) == [[[]] * 4] * 2


def _built_in_parts():
    """Each block is transformed as it is built, the rest around them later."""
    model = Language()
    for number, block in enumerate(model.blocks):
        model.blocks[number] = zf.shard_params(block, axis())
    return model


def _variants():
    return _differing(
        [
            train(Odd, "zero3"),
            train(Odd, "zero3", options={"persist_below": 200}),
            train(Odd, "zero3", options={"reshard_after": "backward"}),
            train(Odd, "zero3", options={"units": "blocks.1"}),
            train(Odd, "zero3", options={"units": zf.by_size(nbytes=500)}),
            train(Odd, "zero3", options={"where": "blocks.*"}),
            train(Odd, "zero3", options={"donate": True}),
            train(Odd, "zero1", transform=lambda model: zf.shard_params(model, axis(), where="*.up.*")),
            train(Odd, "zero3", transform=lambda model: zf.shard_grads(model, axis())),
        ]
    ) + _differing([train(Language, "zero3"), train(_built_in_parts, "zero1")])


def test_options_never_change_the_numbers(ranks):
    assert ranks(3).run(_variants) == [[[]] * 9] * 3


def _gradients_over(mesh):
    torch.manual_seed(0)
    model = zf.zero3(Stack(), mesh)
    model(noise(2, 6, seed=0)).square().mean().backward()
    return [parameter.grad.full_tensor() for parameter in model.parameters()]


def _over_other_axes():
    """An axis without a name; an axis of ranks 0 and 2, on a group that is there, while rank 1 does something else."""
    is_same = all(map(torch.equal, _gradients_over(axis()), _gradients_over(init_device_mesh("cpu", (3,)))))
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        return is_same
    found = _gradients_over(DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",)))
    torch.manual_seed(0)
    plain = Stack()
    plain(noise(2, 6, seed=0)).square().mean().backward()
    for parameter, grad in zip(plain.parameters(), found, strict=True):
        dist.all_reduce(parameter.grad, group=group)
        is_same &= torch.equal(parameter.grad / 2, grad)
    return is_same


def test_an_axis_may_have_no_name_and_some_of_the_ranks(ranks):
    assert ranks(3).run(_over_other_axes) == [True] * 3
