"""What transforms refuse: arguments without a meaning, modules that they cannot copy, values that do not fit."""

import io
import os
import threading
from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.two_tensor import TwoTensor

import zero_fn as zf
from tests.support.groups import pretended
from tests.support.messages import Headed, changed, refusals


class Streaming(Headed):
    def stream(self, x):
        yield x @ self.head.weight.T


class LeavesOut(nn.Linear):
    """Its bias."""

    def reset_parameters(self):
        nn.init.zeros_(self.weight)


class WithoutReset(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))


def _select_nothing(two):
    def is_huge(fqn, parameter):
        return parameter.numel() > 10**9

    zf.shard_params(nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))), two, where=is_huge)


def _transform_the_trunk_of_another(one):
    model = Headed()
    actor = zf.shard_params(model, one)
    return actor, zf.shard_params(nn.Sequential(model.head, nn.Linear(3, 1)), one)


def _accumulate_whole_leaves_in_a_format(one):
    model = zf.precision(zf.shard_params(nn.Linear(64, 2), one), gather=zf.wire.int8())
    zf.accumulate(model, unshard=True).__enter__()


def _change_a_shape_in_unsharded(model):
    with zf.unsharded(model.head, writeback=True):
        model.head.weight = nn.Parameter(torch.zeros(5, 4))


def _transform_for_cuda_of_one_queue():
    with mock.patch.dict(os.environ, CUDA_DEVICE_MAX_CONNECTIONS="1"), pretended(2, device_type="cuda") as mesh:
        zf.shard_params(nn.Linear(2, 2, device="meta"), mesh)


def _materialize(kind, mesh):
    with torch.device("meta"):
        model = nn.ModuleDict({"inner": kind()})
    zf.materialize(zf.shard_params(model, mesh), "cpu")


# -- loading -----------------------------------------------------------------------------------------------------------


def _load(model, **entries):
    model.load_state_dict({**model.state_dict(), **entries})


def _load_what_another_rank_wrote(model):
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state_dict = torch.load(file, weights_only=True)
    for entry in state_dict.values():
        entry.device_mesh._coordinate_on_dim = (1,)  # as if rank 1 had written it
    model.load_state_dict(state_dict)


def _load_from_another_mesh(model):
    other = init_device_mesh("cpu", (1, 1), mesh_dim_names=("pp", "dp"))
    bias = distribute_tensor(torch.zeros(3), other, [Replicate(), Replicate()])
    _load(model, **{"head.bias": bias})


def _assign_two_values_to_a_tie(two):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    entries = {**model.state_dict(), "1.weight": torch.full((4, 4), 7.0)}
    zf.shard_params(model, two).load_state_dict(entries, assign=True)


test_refusals = refusals(
    {
        "where_predicate_matches_nothing": _select_nothing,
        "persist_below_nothing": lambda two: zf.shard_params(Headed(), two, persist_below=-1),
        "buffers_of_no_policy": lambda two: zf.shard_params(Headed(), two, buffers="sync"),
        "checkpoints_of_nothing": lambda: zf.checkpoint_activations(nn.Linear(2, 2)),
        "method_is_missing": lambda: zf.register_forward_method(Headed(), "encode"),
        "method_is_a_generator": lambda: zf.register_forward_method(Streaming(), "stream"),
        "precision_with_wider_gradients": lambda: zf.precision(Headed().bfloat16(), grads=torch.float32),
        "precision_seed_without_random_numbers": lambda: zf.precision(Headed().bfloat16(), seed=3),
        "precision_gathers_in_a_dtype": lambda: zf.precision(Headed(), gather=torch.int8),
        "precision_reduces_differences": lambda: zf.precision(Headed(), reduce=zf.wire.delta4()),
        "formats_of_whole_leaves": _accumulate_whole_leaves_in_a_format,
        "unsharded_with_another_shape": _change_a_shape_in_unsharded,
        "module_cannot_be_copied": lambda two: zf.shard_params(
            changed(lambda model: setattr(model.layers[1], "guard", threading.Lock())), two
        ),
        "parameters_share_memory": lambda two: zf.shard_params(
            changed(lambda model: setattr(model.layers[1], "weight", nn.Parameter(model.layers[0].weight.detach().T))),
            two,
        ),
        "trunk_of_a_transformed_model": _transform_the_trunk_of_another,
        "module_is_wrapped_in_ddp": lambda model: DistributedDataParallel(model),
        "cuda_of_one_queue": _transform_for_cuda_of_one_queue,
        "materialize_beside_the_mesh": lambda one, meta: zf.materialize(zf.shard_params(Headed(), one), "cuda"),
        "meta_without_reset_parameters": lambda two: _materialize(WithoutReset, two),
        "meta_that_nobody_wrote": lambda one: _materialize(lambda: LeavesOut(4, 4), one),
        "entry_of_another_shape": lambda model: _load(model, **{"head.bias": torch.zeros(4)}),
        "entry_of_another_rank": _load_what_another_rank_wrote,
        "entry_on_another_mesh": _load_from_another_mesh,
        "entry_sharded_of_a_buffer": lambda one: _load(
            zf.shard_params(nn.BatchNorm1d(4), one), running_mean=distribute_tensor(torch.zeros(4), one, [Replicate()])
        ),
        "assigned_values_of_a_tie_differ": _assign_two_values_to_a_tie,
        "assigned_value_is_of_a_subclass": lambda two: zf.shard_params(nn.Linear(4, 4), two).load_state_dict(
            {"weight": TwoTensor(torch.zeros(4, 4), torch.ones(4, 4)), "bias": torch.zeros(4)}, assign=True
        ),
    }
)
