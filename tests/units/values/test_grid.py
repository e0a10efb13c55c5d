"""Grids: where parameters rest on a mesh of data and model axes."""

from itertools import product
from math import prod

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

import zero_fn as zf
from tests.support.groups import pretended_grid
from tests.support.messages import changed, refusals
from zero_fn.values.grid import Grid, _reads_alike, grid_of, local_part
from zero_fn.values.home import Stage
from zero_fn.values.layout import TOLERATED_PADDING_NUMEL
from zero_fn.values.mesh import mesh_axis

NOTHING, OPTIMIZER, GRADS, PARAMS = Stage


@pytest.fixture
def mesh():
    with pretended_grid(4, 4):
        yield init_device_mesh("cpu", (2, 2, 2, 2), mesh_dim_names=("outer", "inner", "cp", "tp"))


def _placed(mesh, shape, *placements):
    meta = TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), torch.float32)
    return DTensorSpec(mesh, placements, tensor_meta=meta)


def _over(mesh, *names, **models):
    return grid_of([mesh_axis(mesh[name], verb="test") for name in names], models, lambda _: (PARAMS,) * len(names))


def _placements(grid, shape, stages, model=None):
    local = local_part(torch.empty(shape, device="meta"), model)
    return grid.placements(model, grid.cut(tuple(local.shape), local.contiguous().stride(), model, stages))


def test_one_axis_is_its_own_mesh(mesh):
    assert _over(mesh, "inner").mesh is not None
    assert _over(mesh, "inner").mesh == mesh["inner"]
    assert Grid().spec(None, None, (3,), (1,), torch.float32) is None


def test_the_full_mesh_has_the_order_of_its_root(mesh):
    column = _placed(mesh["tp"], (8, 6), Shard(0))
    grid = _over(mesh, "inner", "outer", column=column)
    assert grid.mesh == mesh["outer", "inner", "tp"]
    assert grid.dims == (1, 0, "tp")
    flat = mesh["outer", "inner"]._flatten("dp")
    grid = grid_of([mesh_axis(flat, verb="test")], {"column": column}, lambda _: (PARAMS,))
    assert grid.mesh is not None
    assert grid.mesh.mesh_dim_names == ("dp", "tp")


def test_parameters_lie_whole_on_model_axes_of_others(mesh):
    column, context = _placed(mesh["tp"], (8, 6), Shard(0)), _placed(mesh["cp"], (8, 6), Replicate())
    both = _placed(mesh["cp", "tp"], (8, 6), Shard(1), Shard(0))
    grid = _over(mesh, "inner", column=column, context=context, both=both)
    assert grid.dims == (0, "cp", "tp")
    assert _placements(grid, (8, 6), (PARAMS,)) == (Shard(0), Replicate(), Replicate())
    strided = _StridedShard(0, split_factor=2)
    assert _placements(grid, (8, 6), (PARAMS,), column) == (strided, Replicate(), Shard(0))
    assert _placements(grid, (8, 6), (PARAMS,), context) == (Shard(0), Replicate(), Replicate())
    assert _placements(grid, (8, 6), (PARAMS,), both) == (strided, Shard(1), Shard(0))


def test_two_model_axes_may_cut_one_dim(mesh):
    both = _placed(mesh["cp", "tp"], (8, 6), Shard(0), Shard(0))
    grid = _over(mesh, "inner", "outer", both=both)
    expected = (_StridedShard(0, split_factor=8), _StridedShard(0, split_factor=4), Shard(0), Shard(0))
    assert _placements(grid, (16, 6), (PARAMS, OPTIMIZER), both) == expected


def test_the_axis_that_shards_more_cuts_first(mesh):
    grid = _over(mesh, "inner", "outer")
    assert _placements(grid, (8, 6), (PARAMS, GRADS)) == (_StridedShard(0, split_factor=2), Shard(0))
    assert _placements(grid, (8, 6), (GRADS, PARAMS)) == (Shard(0), Shard(0))
    assert _placements(grid, (8, 6), (PARAMS, NOTHING)) == (Replicate(), Shard(0))
    assert _placements(grid, (8, 6), (NOTHING, PARAMS)) == (Shard(0), Replicate())
    assert _placements(grid, (), (PARAMS, PARAMS)) == (Replicate(), Replicate())
    assert grid.order((OPTIMIZER, OPTIMIZER)) == (0, 1)
    assert grid.order((OPTIMIZER, GRADS)) == (1, 0)


def test_rows_that_no_placement_describes_are_cut_less_or_along_another_dim(mesh):
    column = _placed(mesh["tp"], (10, 6), Shard(0))
    grid = _over(mesh, "inner", "outer", column=column)
    strided = _StridedShard(0, split_factor=2)
    assert _placements(grid, (10, 6), (PARAMS, PARAMS), column) == (Replicate(), strided, Shard(0))
    wide = 3 * TOLERATED_PADDING_NUMEL // 10
    large = _placed(mesh["tp"], (10, wide), Shard(0))
    expected = (_StridedShard(1, split_factor=2), Shard(1), Shard(0))
    assert _placements(grid, (10, wide), (PARAMS, PARAMS), large) == expected


def _left_to_right(rows, sizes, factors, at):
    held = torch.arange(rows)
    for size, factor, rank in zip(sizes, factors, at, strict=True):
        placement = Shard(0) if factor == 1 else _StridedShard(0, split_factor=factor)
        held = placement._split_tensor(held, size, with_padding=False)[0][rank]
    return held.tolist()


def _one_after_the_other(rows, sizes, order, at):
    held = torch.arange(rows)
    for dim in order:
        held = Shard(0)._split_tensor(held, sizes[dim], with_padding=False)[0][at[dim]]
    return held.tolist()


@pytest.mark.parametrize("sizes", [(2, 2), (4, 2), (2, 4), (3, 2), (2, 2, 2)])
def test_dtensor_reads_rows_where_they_were_put_or_the_check_says_so(sizes):
    """Against DTensor's own cuts, for all small numbers of rows: a wrong yes would be a wrong `full_tensor()`."""
    for order in (tuple(reversed(range(len(sizes)))), tuple(range(len(sizes)))):
        factors = tuple(
            prod(sizes[k] for k in range(dim + 1, len(sizes)) if order.index(k) < order.index(dim))
            for dim in range(len(sizes))
        )
        for rows in range(1, 33):
            same = all(
                _left_to_right(rows, sizes, factors, at) == _one_after_the_other(rows, sizes, order, at)
                for at in product(*map(range, sizes))
            )
            assert _reads_alike(rows, tuple(enumerate(factors)), order, sizes) == same


def _with_a_head_on(mesh, placement):
    def place(model):
        model.head.weight = nn.Parameter(DTensor.from_local(torch.zeros(3, 4), mesh, [placement], run_check=False))

    return changed(place)


test_refusals = refusals(
    {
        "axis_is_that_of_tensor_parallelism": lambda grid: zf.shard_params(
            _with_a_head_on(grid["tp"], Replicate()), grid["tp"]
        ),
        "parameter_is_sharded_over_the_axis_already": lambda two: zf.shard_params(_with_a_head_on(two, Shard(0)), two),
        "parameter_is_partial": lambda grid: zf.shard_params(_with_a_head_on(grid["tp"], Partial()), grid["dp"]),
    }
)
