"""By intent, `test_fully_shard_init.py` of FSDP2. Said elsewhere:

    test_meta_device_1d_init                  acceptance/test_edits.py::test_g35_a_model_from_meta_is_exact
    test_meta_device_2d_init
        composition/test_tensor_parallel.py::test_a_placed_model_from_meta_has_the_values_of_one_process
    test_invalid_meta_device_init             distributed/test_verbs.py::test_materialize_names_what_nobody_wrote
    test_rank0_broadcast_meta_device_init     acceptance/test_state_dict.py::test_g30_assign_takes_whole_tensors_too
    two values of a tie
        acceptance/test_state_dict.py::test_g30_two_values_for_a_tied_parameter_are_not_assigned
    replicas of other seeds                   acceptance/test_models.py::test_g38_what_ranks_draw_from_meta_must_be_the_same
    replicas that were edited
        acceptance/test_models.py::test_g38_replicas_that_differ_at_the_first_forward_raise_on_every_rank
    test_raise_scalar_parameter
        acceptance/test_awkward_parameters.py::test_g10_scalars_are_trained_and_keep_their_shape
    test_raise_noncontiguous_parameter
        acceptance/test_awkward_parameters.py::test_g13_channels_last_and_transposed_modules
    test_mixed_dtypes_no_grad_param           acceptance/test_awkward_parameters.py::test_g14_a_unit_may_mix_all_dtypes
    test_shard_dtensor_parameters             composition/test_tensor_parallel.py::test_parameters_rest_on_the_full_mesh
    test_move_states_to_device_dtensor_invalid
        acceptance/test_models.py::test_g41_parameters_of_another_mesh_raise_at_construction
    test_reset_sharded_param_in_lazy_init
        acceptance/test_edits.py::test_g34_a_replaced_parameter_raises_at_the_next_forward
    test_2d_process_group_init                composition/test_two_axes.py::test_hybrid_shards_inside_and_replicates_outside
    test_managed_modules_duplicate            acceptance/test_sharing.py::test_g06_what_runs_several_times_is_summed_once

What is managed, roots and names of states are FSDP2's own matter.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import zero_fn as zf
from tests.fsdp2.models import DIM, Mlp, Stacked, run_all, stack, train
from tests.support.ranks import Ranks, axis
from tests.support.worlds import World, noise


def _meshes() -> None:
    """An axis may have no name, or stand on a group that is there."""
    x, outputs = noise(2, DIM, seed=0), []
    group = dist.new_group([0, 1])
    for mesh in (axis(), init_device_mesh("cpu", (2,)), DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))):
        torch.manual_seed(0)
        model = zf.zero3(stack(), mesh)
        model(x).square().mean().backward()
        outputs.append([model(x), *(p.grad.full_tensor() for p in model.parameters())])  # type: ignore[union-attr]
    for other in outputs[1:]:
        assert all(torch.equal(one, two) for one, two in zip(outputs[0], other, strict=True))
    two = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    with pytest.raises(zf.MeshError):
        zf.zero3(stack(), two)


def _placements() -> None:
    model = zf.shard_params(Stacked(), axis(), where=lambda name, p: not name.startswith("head"))
    rows = {name: (p.placements, p.to_local().shape[0]) for name, p in model.named_parameters() if p.ndim}  # type: ignore[operator]
    assert rows["layers.0.enter.weight"] == ((Shard(0),), 4 if dist.get_rank() == 0 else 3)
    assert rows["head.weight"] == ((Replicate(),), 3)
    weight = model.layers[0].enter.weight  # type: ignore[index, union-attr]
    assert isinstance(weight, DTensor)
    assert weight.shape == (7, DIM)
    assert weight.device_mesh == axis()


def _emptied() -> None:
    """FSDP2's own way to initialise what was cut on meta: on the CPU each rank would draw the same rows."""
    with torch.device("meta"):
        plain = Mlp()
    for transform in (zf.zero1, zf.zero3):
        model: Mlp = transform(plain, axis())
        model.to_empty(device="cpu")
        with pytest.raises(zf.ShardedAccessError, match=r"zf\.materialize\(model, device\) from meta"):
            model.enter.reset_parameters()


def _broadcast() -> None:
    """Only the first replica was loaded; raw collectives into local tensors give the others its values."""
    torch.manual_seed(0)
    model = zf.replicate(Stacked(), axis())
    with torch.no_grad():
        model.scale.fill_(7.0 if dist.get_rank() == 0 else 0.0)  # type: ignore[union-attr, operator]
        for parameter in model.parameters():
            dist.broadcast(parameter.to_local(), src=0)  # type: ignore[operator]
    model(noise(2, DIM, seed=0)).sum().backward()


class Shared(nn.Module):
    """Two attentions that share the module of their projection, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        projection = nn.Linear(DIM, DIM)
        self.first, self.second = nn.Sequential(projection, Mlp()), nn.Sequential(projection, Mlp())
        table = torch.ones(DIM)
        self.first.register_buffer("table", table)
        self.second.register_buffer("table", table)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x * self.first.table) * self.second.table)
        return y


def a_module_and_a_buffer_are_held_twice(world: World) -> None:
    model = world.build(Shared)
    assert model.first[0] is model.second[0]
    assert model.first.table is model.second.table
    train(world, model)


def _rest() -> list[str]:
    _meshes()
    _placements()
    _broadcast()
    return run_all((a_module_and_a_buffer_are_held_twice,))


def test_axes_and_placements_are_those_asked_for(ranks: Ranks) -> None:
    assert ranks(2).run(_rest) == [[], []]


def test_shards_are_not_initialised_by_reset_parameters(ranks: Ranks) -> None:
    ranks(2).run(_emptied)
