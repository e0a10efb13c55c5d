"""Assignments: what has been asked of a module, joined."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zero_fn as zf
from tests.support.groups import pretended_grid
from tests.support.messages import Headed, refusals
from zero_fn.errors import LayoutError, UnitError
from zero_fn.values.assignment import Assignment
from zero_fn.values.home import Home, Stage
from zero_fn.values.mesh import mesh_axis


@pytest.fixture
def axes():
    with pretended_grid(4, 2) as mesh:
        yield mesh_axis(mesh["dp"], verb="test"), mesh_axis(mesh["tp"], verb="test")


def test_no_units_asked_for_are_not_the_same_as_the_empty_choice():
    assert Assignment(anchors=()).join(Assignment()).anchors == ()
    with pytest.raises(UnitError):
        Assignment(anchors=()).join(Assignment(anchors=("a",)))


def test_two_axes_are_joined_in_any_order(axes):
    outer, inner = axes
    one = Assignment(over=((inner, {"a": Home(Stage.PARAMS), "b": Home(Stage.GRADS)}),))
    other = Assignment(over=((outer, {"a": Home(Stage.OPTIMIZER), "c": Home(Stage.GRADS)}),))
    other = other.join(Assignment({"a": Home(compute=torch.bfloat16)}))
    joined = one.join(other)
    assert joined == other.join(one) == joined.join(one) == other.join(joined)
    assert joined.axes == (inner, outer)
    assert joined.stages("a") == (Stage.PARAMS, Stage.OPTIMIZER)
    assert joined.stages("c") == (Stage.NOTHING, Stage.GRADS)
    assert joined.home("a") == Home(Stage.PARAMS, compute=torch.bfloat16)
    assert joined.below("x").stages("x.a") == joined.stages("a")


def test_dtypes_join_whichever_axis_came_first(axes):
    outer, inner = (Assignment(over=((axis, {"a": Home()}),)) for axis in axes)
    cast = Assignment(homes={"a": Home(compute=torch.bfloat16)})
    assert outer.join(cast).join(inner) == inner.join(outer).join(cast) == cast.join(inner).join(outer)
    with pytest.raises(LayoutError):
        outer.join(cast).join(inner).join(Assignment(homes={"a": Home(compute=torch.float16)}))


def test_a_part_of_a_module_is_named_as_the_whole_sees_it():
    part = Assignment(homes={"weight": Home(Stage.GRADS)}, anchors=("", "layers.0"))
    whole = part.below("head")
    assert whole.homes == {"head.weight": Home(Stage.GRADS)}
    assert whole.anchors == ("head", "head.layers.0")
    assert part.below("") == part


def test_a_part_keeps_what_was_asked_of_itself():
    whole = Assignment(
        {"head.weight": Home(Stage.GRADS), "token.weight": Home()},
        anchors=("", "head", "head.layers.0"),
        outputs={"head": torch.float32, "token": torch.float32},
        methods=("head.encode", "token.encode"),
    )
    part = whole.of_part("head", {"token.weight": "tied"})
    assert part.homes == {"weight": Home(Stage.GRADS), "tied": Home()}
    assert part.anchors == ("", "layers.0")
    assert part.outputs == {"": torch.float32}
    assert part.methods == ("encode",)


def _over_axes_of_two_meshes(grid):
    other = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    zf.shard_grads(zf.shard_params(Headed(), grid["dp"]), other["dp"])


def _over_three_axes(grid):
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pod", "node", "rank"))
    zf.replicate(zf.shard_params(zf.replicate(Headed(), mesh["pod"]), mesh["rank"]), mesh["node"])


test_refusals = refusals(
    {
        "axes_share_ranks": lambda grid: zf.shard_grads(
            zf.shard_params(Headed(), grid["dp"]), grid["dp", "tp"]._flatten("all")
        ),
        "axes_are_of_two_meshes": _over_axes_of_two_meshes,
        "axes_are_three": _over_three_axes,
        "units_differ_between_transforms": lambda two: zf.shard_params(
            zf.shard_grads(Headed(), two, units="layers.*"), two, units=nn.Linear
        ),
        "precision_twice_with_other_dtypes": lambda: zf.precision(
            zf.precision(Headed(), compute=torch.bfloat16), compute=torch.float16
        ),
        "precision_twice_with_other_outputs": lambda: zf.precision(
            zf.precision(Headed(), output=torch.float32), output=torch.bfloat16
        ),
        "buffers_twice_with_other_policies": lambda two: zf.shard_grads(
            zf.shard_params(Headed(), two, buffers="local"), two, buffers="broadcast"
        ),
        "offload_to_two_tiers": lambda: zf.offload(zf.offload(Headed(), optim=zf.cpu()), optim=zf.nvme("/tmp")),
    }
)
