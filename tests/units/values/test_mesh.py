"""Meshes: where submeshes lie in the mesh they were cut from, by torch's private ways."""

from __future__ import annotations

from torch.distributed.device_mesh import init_device_mesh

from tests.support.groups import pretended_grid
from zero_fn.values.mesh import dims_in, joined_mesh, root_of


def test_submeshes_know_their_root_and_can_be_joined_again() -> None:
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
