"""By intent, `test_composability/test_2d_composability.py` and `test_pp_composability.py` of torch. Said elsewhere:

test_train_parity_2d_mlp
    composition/test_tensor_parallel.py::test_every_stage_is_bitwise_the_replicas_of_a_tensor_parallel_model
test_train_parity_2d_transformer           composition/test_torchtitan.py::test_losses_are_those_under_fsdp2
checkpoint_resume                          composition/test_checkpoints.py::test_a_checkpoint_loads_on_other_meshes
test_tp_with_fsdp_offloading               composition/test_tiers.py::test_tiers_change_no_bit_on_two_axes
test_manual_with_data_parallel             composition/test_pipelines.py::test_schedules_train_as_with_plain_stages
three axes                                 examples/test_several_axes.py::test_three_axes_train_as_one_process_does
"""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zero_fn as zf
from tests.fsdp2.models import DIM, Mlp
from tests.support.ranks import Ranks


def _saved_by_each_rank() -> None:
    """`torch.save` of the state dict of each rank, over two axes, and back."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    models: list[Any] = []
    for _ in range(2):
        plain = nn.Sequential(Mlp(8), Mlp(8))
        for layer in plain:
            parallelize_module(layer, mesh["tp"], {"enter": ColwiseParallel(), "leave": RowwiseParallel()})
        models.append(zf.zero3(plain, mesh["dp"]))
    first, second = models
    x = torch.full((2, DIM), 1.0 + dist.get_rank() // 2)
    first(x).square().mean().backward()
    torch.optim.SGD(first.parameters(), lr=0.1).step()
    memory = io.BytesIO()
    torch.save(first.state_dict(), memory)
    memory.seek(0)
    second.load_state_dict(torch.load(memory, weights_only=False))
    assert torch.equal(second(x), first(x))


def test_state_dicts_of_ranks_are_saved_one_by_one(ranks: Ranks) -> None:
    ranks(4).run(_saved_by_each_rank)
