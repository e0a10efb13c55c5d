"""Meshes: where submeshes lie in the mesh they were cut from, by torch's private ways."""

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zero_fn as zf
from tests.support.groups import pretended_grid
from tests.support.messages import Headed, refusals
from zero_fn.values.mesh import dims_in, joined_mesh, mesh_axis, root_of


def test_submeshes_know_their_root_and_can_be_joined_again():
    with pretended_grid(4, 2) as grid:
        assert root_of(grid["dp"]) is grid
        assert root_of(grid) is grid
        assert joined_mesh([grid["dp"], grid["tp"]]) is grid
        cube = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
        assert joined_mesh([cube["a"], cube["c"]]) == cube["a", "c"]
        flat = cube["a", "b"]._flatten("ab")
        assert joined_mesh([flat, cube["c"]]).mesh_dim_names == ("ab", "c")
        assert dims_in(cube, flat) == {0, 1}
        assert dims_in(cube, cube["c"]) == {2}
        assert root_of(flat) is cube


@pytest.mark.parametrize("named", [None, "gloo", "cpu:gloo"])
def test_a_group_that_was_started_without_a_backend_has_one_for_each_device(named):
    """As `init_device_mesh` starts it where there is none: torch calls its backend undefined, and ranks shared no memory."""
    dist.init_process_group(named, store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert mesh_axis(init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)), verb="a test").backend == "gloo"
    finally:
        dist.destroy_process_group()


test_refusals = refusals(
    {
        "mesh_is_no_mesh": lambda: zf.shard_params(Headed(), "dp"),
        "mesh_is_on_meta": lambda two: zf.shard_params(Headed(), DeviceMesh("meta", [0, 1], mesh_dim_names=("dp",))),
        "mesh_without_this_rank": lambda four: zf.shard_optimizer(
            Headed(), DeviceMesh("cpu", [1, 2], mesh_dim_names=("dp",))
        ),
    }
)
