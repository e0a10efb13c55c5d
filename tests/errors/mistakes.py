"""Mistakes, each of which raises one error whose text is in `snapshots/`.

A public function with parameters out of `PLACES`, or a row of `ROWS`, is a case, and its name is the name of the snapshot.
"""

import contextlib
import copy
import ctypes
import dataclasses
import errno
import fcntl
import importlib
import inspect
import io
import json
import os
import pickle
import resource
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize, prune
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import zero_fn as zf
from tests.support.eviction import evicted
from tests.support.groups import alone, pretended, pretended_grid
from tests.support.subclasses import WIDTH, Short
from tests.units.storage.disks import answers
from zero_fn.checkpoint.converting import convert
from zero_fn.checkpoint.format import files
from zero_fn.checkpoint.format.catalog import Catalog
from zero_fn.checkpoint.format.folders import Draft
from zero_fn.checkpoint.mirrored import MARK
from zero_fn.checkpoint.others.find import opened
from zero_fn.checkpoint.rank_meeting import Agreement, RankMeeting
from zero_fn.deepspeed import save_checkpoint
from zero_fn.deepspeed import step as step_as_engine
from zero_fn.deepspeed.cutting import cut_by_its_plan, other_axes, split
from zero_fn.deepspeed.entries import config_of
from zero_fn.deepspeed.launch_command import options_of, this_host, torchrun_lines
from zero_fn.deepspeed.loss_scale import Scaler
from zero_fn.deepspeed.more_optimizers import groups_of_muon
from zero_fn.deepspeed.optimizers import finished
from zero_fn.deepspeed.placement import placed_by, require_placed
from zero_fn.deepspeed.settings import Cuts, settings_of
from zero_fn.errors import StateError, StorageError
from zero_fn.local.shared_folder import SharedFolder, host_name
from zero_fn.looking import configurations, plan_command
from zero_fn.looking.models import model_of
from zero_fn.monitor import Csv, Prometheus, sink_of
from zero_fn.storage import DiskStorage, Slab
from zero_fn.storage.io import Threads
from zero_fn.storage.stored_files import StoredFile
from zero_fn.transport.flag import Flag
from zero_fn.transport.line import Work
from zero_fn.values.chained_optimizer import as_one
from zero_fn.values.mesh import mesh_axis
from zero_fn.values.tiers import IN_MEMORY


class Opaque(Tensor):
    """Like quantized weights that keep what they were quantised with as an attribute."""


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _changed(change):
    model = Model()
    change(model)
    return model


def _batch():
    return torch.ones(2, 4)


@contextlib.contextmanager
def _a_folder():
    """One whose name messages do not show."""
    with tempfile.TemporaryDirectory(prefix="zero_fn_") as folder:
        yield Path(folder)


@contextlib.contextmanager
def _a_sharded_model():
    with alone() as mesh:
        yield zf.shard_params(Model(), mesh)


@contextlib.contextmanager
def _a_checkpoint():
    with _a_folder() as folder:
        zf.save(folder / "step-1", nn.Linear(2, 2), extra={"noise": 1})
        yield folder / "step-1"


@contextlib.contextmanager
def _a_tiered_model():
    yield zf.offload(Model(), params=zf.nvme("/tmp"))


# What a case asks for by the name of a parameter.
PLACES = {
    "one": alone,
    "two": partial(pretended, 2),
    "four": partial(pretended, 4),
    "gpus": partial(pretended, 4, device_type="cuda"),
    "meta": partial(torch.device, "meta"),
    "grid": partial(pretended_grid, 4, 2),
    "model": _a_sharded_model,
    "tiered": _a_tiered_model,
    "folder": _a_folder,
    "saved": _a_checkpoint,
}


# -- the mesh --------------------------------------------------------------------------------------------------------


SPEEDS = zf.LinkSpeeds(1e10, 1e9, 1e9, {"dp": 1e9}, None, None)


def _planned(axis, *tier, **speeds):
    return zf.autoplan(Model(), axis, "1GiB", links=dataclasses.replace(SPEEDS, **speeds), tier=tier or None)


def axes_are_of_two_meshes(grid):
    other = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    return zf.shard_grads(zf.shard_params(Model(), grid["dp"]), other["dp"])


def axes_are_three(grid):
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pod", "node", "rank"))
    model = zf.shard_params(zf.replicate(Model(), mesh["pod"]), mesh["rank"])
    return zf.replicate(model, mesh["node"])


def _placed(mesh, placement):
    model = Model()
    model.head.weight = nn.Parameter(DTensor.from_local(model.head.weight.detach(), mesh, [placement], run_check=False))
    return model


def where_predicate_matches_nothing(two):
    def is_huge(fqn, parameter):
        return parameter.numel() > 10**9

    return zf.shard_params(nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))), two, where=is_huge)


# -- modules ---------------------------------------------------------------------------------------------------------


def _linear(weight, *, is_trained=True):
    model = nn.Linear(*weight.shape)
    model.weight = nn.Parameter(weight, requires_grad=is_trained)
    return model


def _two():
    return TwoTensor(torch.zeros(4, 4), torch.ones(4, 4))


def assigned_values_of_a_tie_differ(two):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    sharded = zf.shard_params(model, two)
    return sharded.load_state_dict({**model.state_dict(), "1.weight": torch.full((4, 4), 7.0)}, assign=True)


class Streaming(Model):
    def stream(self, x):
        yield x @ self.head.weight.T


# -- the wrong moment ------------------------------------------------------------------------------------------------


def _entered(*contexts):
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)


def _donated(mesh):
    model = Model()
    zf.shard_params(model, mesh, donate=True)
    return model


def transform_inside_accumulate(one):
    model = zf.shard_grads(Model(), one)
    with zf.accumulate(model):
        return zf.shard_params(model, one)


def transform_inside_unsharded(one):
    model = zf.shard_grads(Model(), one)
    with zf.unsharded(model.head):
        return zf.shard_params(model, one)


def gradient_of_a_whole_parameter(model):
    with zf.unsharded(model):
        return model.head.weight.sum().backward()


def trunk_of_a_transformed_model(one):
    model = Model()
    actor = zf.shard_params(model, one)
    return actor, zf.shard_params(nn.Sequential(model.head, nn.Linear(3, 1)), one)


def closure_over_a_parameter(one):
    model = Model()
    weight = model.head.weight
    model.activation = lambda x: x @ weight
    return zf.shard_params(model, one)


def entry_of_another_rank(model):
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state_dict = torch.load(file, weights_only=True)
    for entry in state_dict.values():
        entry.device_mesh._coordinate_on_dim = (1,)  # as if rank 1 had written it
    return model.load_state_dict(state_dict)


class _Clipping(torch.optim.SGD):
    def step(self, closure=None):
        nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1.0)
        return super().step(closure)


class _Sharing(torch.optim.SGD):
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.state[p]["momentum"] = torch.zeros_like(p)
            self.state[p]["flat"] = self.state[p]["momentum"].view(-1)


def part_of_a_unit_is_taken_out(one):
    model = zf.shard_params(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), one, units=[])
    model(_batch())
    del model[0]
    return model(_batch())


def unsharded_with_another_shape(model):
    with zf.unsharded(model.head, writeback=True):
        model.head.weight = nn.Parameter(torch.zeros(5, 4))
    return None


def step_inside_accumulate(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with zf.accumulate(model):
        model(_batch()).sum().backward()
        return optimizer.step()


def gradient_read_inside_accumulate(model):
    with zf.accumulate(model):
        model(_batch()).sum().backward()
        return nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def gradient_of_the_rank_is_asked_for(model):
    with zf.accumulate(model):
        model(_batch()).sum().backward()
        return model.head.weight.grad.full_tensor()


def torch_func_of_resting_parameters(model):
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return torch.func.grad(lambda values: torch.func.functional_call(model, values, (_batch(),)).sum())(values)


def functional_call_unties(one):
    model = Model()
    model.layers[1].weight = model.layers[0].weight
    values = {f"layers.{i}.weight": torch.zeros(4, 4) for i in range(2)}
    model = zf.shard_params(model, one)
    with zf.unsharded(model):
        return torch.func.functional_call(model, values, (_batch(),), tie_weights=False)


def step_between_forward_and_backward(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, second = model(_batch()).sum(), model(_batch()).sum()
    first.backward()
    optimizer.step()
    return second.backward()


def meta_without_reset_parameters(two):
    with torch.device("meta"):
        model = nn.Module()
        model.inner = nn.Module()
        model.inner.scale = nn.Parameter(torch.ones(4))
        return zf.materialize(zf.shard_params(model, two), "cpu")


class LeavesOut(nn.Linear):
    def reset_parameters(self):
        nn.init.zeros_(self.weight)


def part_of_a_model_that_stays_on_meta(two):
    with torch.device("meta"):
        model = zf.shard_params(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3)), two)
    model[1].to_empty(device="cpu")
    return model(_batch())


def meta_that_nobody_wrote(one):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), LeavesOut(4, 4))
    return zf.materialize(zf.shard_params(model, one), "cpu")


# -- stale objects ---------------------------------------------------------------------------------------------------


def step_of_the_optimizer_before(one):
    plain = Model()
    optimizer = torch.optim.AdamW(plain.parameters())
    model = zf.shard_params(plain, one)
    model(_batch()).sum().backward()
    return optimizer.step()


def step_of_a_tie_that_a_transform_has_cut(one):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    model[1] = zf.shard_params(model[1], one)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    return optimizer.step()


# -- at rest ---------------------------------------------------------------------------------------------------------


def data_of_a_parameter_in_a_tier_was_assigned(one, folder):
    model = zf.offload(zf.shard_params(Model(), one), params=zf.nvme(folder))
    model.head.weight.data = model.head.weight.data * 2
    return model


class _Inverse(nn.Module):
    def forward(self, weight):
        return weight * 2

    def right_inverse(self, weight):
        return weight / 2


def parametrization_with_an_inverse_in_a_forward(model):
    model.layers[0].register_forward_pre_hook(
        lambda module, args: parametrize.register_parametrization(module, "weight", _Inverse()) and None
    )
    return model(_batch())


class Clamped(Model):
    """Changes a weight in its forward."""

    def forward(self, x):
        self.head.weight.detach().clamp_(-0.01, 0.01)
        return super().forward(x)


class Peeking(Model):
    """Reads a weight of the first layer outside the forward of its unit."""

    def __init__(self, *, gathers):
        super().__init__()
        self.gathers = gathers

    def forward(self, x):
        weight = next(self.layers[0].parameters())
        return super().forward(x @ (weight.full_tensor() if self.gathers else weight).T)


class SparseInFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.ones(6, 4))

    def forward(self, tokens):
        return nn.functional.embedding(tokens, self.table, sparse=True)


def step_over_whole_tensors(two):
    model = zf.shard_params(Model(), two)
    return torch.optim.Adafactor(model.parameters()).step()


def step_of_bitsandbytes(two):
    kind = type("AdamW8bit", (torch.optim.AdamW,), {"__module__": "bitsandbytes.optim.adamw"})
    model = zf.replicate(Model(), two)
    return kind(model.parameters()).step()


def _by_owner(one):
    return zf.by_owner(torch.optim.SGD(zf.shard_params(Model(), one).parameters()))


def step_by_owners_after_one_that_failed(one):
    optimizer = _by_owner(one)
    parameter = optimizer.param_groups[0]["params"][0]
    parameter.grad, optimizer.param_groups[0]["lr"] = torch.ones_like(parameter), None
    with contextlib.suppress(TypeError):
        optimizer.step()
    return optimizer.step()


def step_by_owners_of_sparse_gradients(one):
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    return zf.by_owner(torch.optim.SGD(table.parameters())).step()


def clip_over_a_plain_model_too(one):
    models = zf.shard_params(Model(), one), Model()
    for model in models:
        model(_batch()).sum().backward()
    return nn.utils.clip_grad_norm_([parameter for model in models for parameter in model.parameters()], 1.0)


def step_after_a_cast(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(_batch()).sum().backward()
    optimizer.step()
    model.double()
    return optimizer.step()


# -- loading ---------------------------------------------------------------------------------------------------------


def entry_on_another_mesh(model):
    other = init_device_mesh("cpu", (1, 1), mesh_dim_names=("pp", "dp"))
    bias = distribute_tensor(torch.zeros(3), other, [Replicate(), Replicate()])
    return model.load_state_dict({**model.state_dict(), "head.bias": bias})


def entry_sharded_of_a_buffer(one):
    model = zf.shard_params(nn.BatchNorm1d(4), one)
    mean = distribute_tensor(torch.zeros(4), one, [Replicate()])
    return model.load_state_dict({**model.state_dict(), "running_mean": mean})


# -- tiers -----------------------------------------------------------------------------------------------------------


def _stepped():
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 64)).sum().backward()
    return model, optimizer


def _streamed_and_damaged(change):
    """An optimizer whose second step meets requests with other answers."""
    optimizer = zf.streamed(_stepped()[1], zf.nvme("."), buffer="16KiB")
    optimizer.step()
    for store in optimizer.states.stores.values():
        store.forget()  # the second step reads what the first one wrote
    with pytest.MonkeyPatch.context() as patch:
        answers(patch, change)
        optimizer.step()
    return optimizer


def disk_gives_other_bytes():
    def flips(request, result):
        byte = ctypes.c_uint8.from_address(request.address)
        byte.value = byte.value ^ 8
        return result

    return _streamed_and_damaged(flips)


def disk_lost_a_write():
    disk = DiskStorage(zf.nvme("."), "states", Threads())
    memory = Slab(4096, zf.cpu(), "a test").memory
    disk.reserve([4096])
    disk.write(0, memory).wait()
    disk.write(0, memory.fill_(1)).wait()
    os.pwrite(disk.files[0].fd, (ctypes.c_char * 4096).from_address(memory.zero_().data_ptr()), 0)
    return disk.read(0, memory).wait()


@contextlib.contextmanager
def _refused(call, code, *, limit=None, to=0):
    """A call of the system that fails, under a limit of the process."""
    with mock.patch(call, side_effect=OSError(code, os.strerror(code))), contextlib.ExitStack() as stack:
        if limit is not None:
            before = resource.getrlimit(limit)
            stack.callback(resource.setrlimit, limit, before)
            resource.setrlimit(limit, (min(before[0] % 2**64, to), before[1]))
        yield


def disk_takes_no_more_open_files():
    with _refused("zero_fn.storage.files.opened", errno.EMFILE, limit=resource.RLIMIT_NOFILE, to=1024):
        return zf.streamed(_stepped()[1], zf.nvme("/"))


def disk_takes_no_file_so_large():
    with _refused("os.posix_fallocate", errno.EFBIG, limit=resource.RLIMIT_FSIZE, to=16 << 10):
        return zf.streamed(_stepped()[1], zf.nvme("."))


def disk_cannot_reserve():
    with _refused("os.posix_fallocate", errno.EIO):
        return zf.streamed(_stepped()[1], zf.nvme("."))


def step_that_failed_on_another_rank():
    class Peer:
        pads = False

        def any(self, bits, mark):
            bits[1] = 1
            return Work()

    with alone() as mesh, pytest.MonkeyPatch.context() as patch:
        axis = dataclasses.replace(mesh_axis(mesh, verb="test"), size=2)
        patch.setattr("zero_fn.runtime.everywhere._meshes", lambda _: [mesh])
        patch.setattr("zero_fn.transport.agree.mesh_axis", lambda *_, **__: axis)
        patch.setattr("zero_fn.transport.links.open_transport", lambda _: Peer())
        return zf.streamed(_stepped()[1], zf.cpu())


def step_of_what_has_states_in_8_bits():
    optimizer = torch.optim.SGD(Model().parameters())
    zf.states8bit(optimizer)
    return optimizer.step()


def streamed_gradient_is_sparse():
    model, inner = _stepped()
    model.bias.grad = torch.ones(64).to_sparse()
    return zf.streamed(inner, zf.cpu()).step()


def streamed_gradient_rests_elsewhere(one):
    model = zf.shard_params(nn.Linear(4, 4), one)
    optimizer = zf.streamed(torch.optim.AdamW(model.parameters()), zf.cpu())
    other = init_device_mesh("cpu", (1,), mesh_dim_names=("other",))
    model.weight.grad = distribute_tensor(torch.ones(4, 4), other, [Shard(0)])
    return optimizer.step()


def streamed_state_of_another_shape():
    saved = zf.streamed(torch.optim.Adagrad(nn.Linear(4, 3).parameters()), zf.cpu()).state_dict()
    saved["state"][0]["sum"] = torch.zeros(2, 4)
    optimizer = zf.streamed(torch.optim.Adagrad(nn.Linear(4, 3).parameters()), zf.cpu())
    return optimizer.load_state_dict(saved)


def streamed_after_a_failed_step():
    optimizer = zf.streamed(_stepped()[1], zf.nvme("."), buffer="16KiB")
    optimizer.step()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(StorageError):
        answers(patch, lambda request, result: -errno.EIO if request.is_write else result)
        optimizer.step()
    return optimizer.step()


def streamed_parameter_was_cast():
    model, inner = _stepped()
    optimizer = zf.streamed(inner, zf.nvme("."))
    model.double()
    return optimizer.step()


def streamed_matrix_is_cut():
    matrix = nn.Parameter(torch.ones(64, 128)[:, ::2])
    return zf.streamed(torch.optim.AdamW([matrix]), zf.nvme("."), buffer="8KiB")


def _evicted():
    model = nn.Linear(4, 4)
    zf.evict(model, to=zf.cpu())
    return model


def evicted_inside_unsharded(model):
    with zf.unsharded(model):
        return zf.evict(model, to=zf.cpu())


def forward_while_weights_are_handed_over(model):
    with zf.weights(model):
        return model(_batch())


def weights_that_change_in_the_loop(model):
    with zf.weights(model) as items, torch.no_grad():
        next(model.parameters()).add_(1)
        return list(items)


def parameter_in_two_optimizers(model):
    first, *others = model.parameters()
    return zf.check(model, (torch.optim.SGD([first], lr=0.1), torch.optim.AdamW([first, *others])))


def group_for_several_optimizers(model):
    first, *others = model.parameters()
    both = as_one((torch.optim.SGD([first], lr=0.1), torch.optim.AdamW(others)))
    return both.add_param_group({"params": []})


def changes_since_other_weights(model):
    items = zf.weights(nn.Linear(4, 3), keep=True)
    list(items)
    return zf.weights(model, since=items.version)


def changes_whose_dtype_is_given(model):
    items = zf.weights(model, keep=True)
    list(items)
    return zf.weights(model, since=items.version, dtype=torch.bfloat16)


def step_of_what_was_streamed():
    optimizer = torch.optim.AdamW(nn.Linear(4, 4).parameters())
    zf.streamed(optimizer, zf.cpu())
    return optimizer.step()


def evicted_states_share_memory():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model.weight] = {"momentum": torch.zeros(4, 4), "other": torch.zeros(4, 4)}
    optimizer.state[model.weight]["other"] = optimizer.state[model.weight]["momentum"]
    return evicted(model, optimizer)


# -- offload ---------------------------------------------------------------------------------------------------------


def memory_of_a_tensor_in_a_tier_is_replaced(tiered):
    with torch.no_grad():
        next(tiered.parameters()).set_(torch.zeros(3, 4))


def _in_files(folder, dtype=torch.float32):
    """A model that is read where the folder has it."""
    save_file({name: value.to(dtype) for name, value in Model().state_dict().items()}, folder / "model.safetensors")
    with torch.device("meta"):
        model = zf.offload(Model().requires_grad_(False), params=zf.nvme("."))
    zf.load_pretrained(model, folder, copy=False)
    return model


def parameter_in_a_file_is_changed(folder):
    with torch.no_grad():
        next(_in_files(folder).parameters()).zero_()


def values_in_a_tier_are_read_in_a_fork(tiered):
    with mock.patch("os.getpid", return_value=-1):
        next(tiered.parameters()).sum()


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x + self.bias


def gradient_of_a_plain_loss_in_shards(two):
    model = zf.shard_params(Shifted(), two)
    model(torch.ones(2, 4)).sum().backward(model.bias.detach().sum())


def planned_with_two_optimizers(two):
    model = zf.zero1(Model(), two)
    return zf.plan(model, torch.optim.AdamW(model.parameters()), optimizer_nbytes_per_element=4)


# -- tiles -----------------------------------------------------------------------------------------------------------


def _tiled(prepare, where="head.*"):
    return zf.tile(_changed(prepare), where=where, parts=2)


def tiled_output_is_cut():
    model = zf.tile(Model(), where="layers.0.*", parts=2)
    model.layers[0].tiles[1].register_forward_hook(lambda module, args, output: output[..., :1])
    return model(_batch())


def untiled_of_shards(two):
    model = zf.shard_params(zf.tile(Model(), where="head.*", parts=2), two)
    return zf.untiled(model, model.state_dict())


class Unknown(torch.optim.AdamW):
    pass


def _rounded():
    model = zf.precision(Model().bfloat16(), round="stochastic")
    model(_batch()).float().sum().backward()
    return model, torch.optim.AdamW(model.parameters(), fused=False)


def step_that_would_round_by_itself():
    _model, optimizer = _rounded()
    optimizer.step()


def states_that_were_rounded_before_they_are_streamed():
    model, stock = _rounded()
    optimizer = zf.streamed(stock)
    optimizer.step()
    other = torch.optim.AdamW(model.parameters(), fused=False)
    other.load_state_dict(optimizer.state_dict())
    zf.streamed(other)


def step_of_another_class_with_narrow_gradients():
    model = zf.precision(Model(), grads=torch.bfloat16)
    optimizer = Unknown(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def formats_of_whole_leaves(one):
    model = zf.precision(zf.shard_params(nn.Linear(64, 2), one), gather=zf.int8())
    with zf.accumulate(model, unshard=True):
        pass


def differences_that_nobody_holds(one):
    model = zf.precision(zf.shard_params(nn.Linear(64, 2), one), gather=zf.delta4())
    return model(torch.ones(2, 64))


def forward_goes_on_after_an_interrupt(one):
    class Catching(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.bias = nn.Linear(2, 2), nn.Parameter(torch.zeros(2))

        def forward(self, x):
            with contextlib.suppress(KeyboardInterrupt):
                self.block(x)
            return self.block(x)

    model = zf.shard_params(Catching(), one, units=nn.Linear)
    with mock.patch.object(model.block, "forward", side_effect=KeyboardInterrupt):
        model(torch.ones(1, 2))


def forward_in_two_threads():
    found = []

    def other():
        try:
            model(torch.ones(1, 2))
        except StateError as error:
            found.append(error)

    def meanwhile(*_):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    with alone() as mesh:
        model = zf.shard_params(nn.Linear(2, 2), mesh)
        handle = model.register_forward_pre_hook(meanwhile)
        model(torch.ones(1, 2))
        handle.remove()
        other()  # one after the other, any thread may call it
    (error,) = found
    raise error


_stepping = importlib.import_module("zero_fn.streamed.stepping")  # the package has a function of this name


def step_that_waits_is_interrupted(folder):
    with pytest.MonkeyPatch.context() as patch:
        disk = zf.nvme(folder)
        model = zf.offload(nn.Linear(2, 2), params=disk, grads=disk, optim=disk)
        optimizer = zf.streamed(torch.optim.AdamW(model.parameters()), finish="forward")
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        patch.setattr(_stepping, "steps_in_one_pass", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(2))
        optimizer.step()


# -- configs of DeepSpeed ----------------------------------------------------------------------------------------------


def _from_config(*, auto=None, **entries):
    with alone() as mesh:
        zf.from_deepspeed(nn.Linear(2, 2), {"train_batch_size": 2, **entries}, mesh["dp"], auto=auto)


def _cut(mesh, **entries):
    """A config over a mesh of which no rank says anything."""
    axes = other_axes(mesh, None, nn.Linear(2, 2))
    others = {kind: axis.size() for kind, axis in axes.items()}
    settings = settings_of({"train_micro_batch_size_per_gpu": 1, **entries}, mesh.size(), others=others)
    whole, _, tensor = split(mesh, settings.cuts, axes)
    model = nn.Linear(2, 2)
    placed_by(settings, whole, model if tensor is None else cut_by_its_plan(model, tensor))


def _from_file(text):
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("ds_config.json").write_text(text)
        config_of("ds_config.json")


def config_says_otherwise_than_what_is_placed(one):
    model = zf.zero1(nn.Linear(2, 2), one["dp"])
    config = {"train_batch_size": 2, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    zf.from_deepspeed(model, config, one["dp"], optimizer=lambda model: torch.optim.SGD(model.parameters()))


def config_has_another_mesh_than_what_is_placed():
    with pretended_grid(2, 2) as mesh:
        require_placed(settings_of({"train_batch_size": 2}, 2), mesh["tp"], zf.zero1(nn.Linear(2, 2), mesh["dp"]))


def config_beside_an_optimizer_of_before(one):
    model = nn.Linear(2, 2)
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    zf.from_deepspeed(model, {"train_batch_size": 2}, one["dp"], optimizer=made)


def config_of_second_shards_on_one_axis(four):
    _cut(four, zero_optimization={"stage": 3, "zero_hpz_partition_size": 3})


def config_cuts_a_model_without_a_plan(grid):
    _cut(grid["dp"], tensor_parallel={"autotp_size": 2})


def config_cuts_one_parameter_in_two_ways(grid):
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    model.tp_plan = {"0": "colwise", "1": "rowwise"}
    cut_by_its_plan(model, grid["tp"])


def config_divides_two_axes(grid):
    split(grid, Cuts(sequence=2), {})


def config_of_experts_that_are_not_placed(grid):
    _cut(grid, moe_expert_parallel_size=2)


def config_of_wholes_that_are_not_there(one):
    _cut(one["dp"], zero_optimization={"stage": 3, "leaf_module": {"classes": ["MixtralSparseMoeBlock"]}})


def config_saves_in_the_middle_of_a_step(one):
    config = {"train_batch_size": 2, "gradient_accumulation_steps": 2, "optimizer": {"type": "SGD"}}
    setup = zf.from_deepspeed(nn.Linear(2, 2), config, one["dp"])
    step_as_engine(setup)
    save_checkpoint(setup, "nowhere")


def scale_of_the_loss_is_at_its_least():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    scaler = Scaler("cpu", first=1.0, window=1000, hysteresis=1, is_refilled=False, least=1.0)
    (scaler.scale(optimizer.param_groups[0]["params"][0].sum()) * torch.inf).backward()
    scaler.step(optimizer)
    scaler.update()


# -- checkpoints -----------------------------------------------------------------------------------------------------


def _forged(path, change):
    """Changes JSON of a checkpoint, with a digest that is right."""
    body = json.loads(path.read_text())["body"]
    change(body)
    path.write_bytes(files._signed(json.dumps(body)))


def cuda_of_one_queue():
    with mock.patch.dict(os.environ, CUDA_DEVICE_MAX_CONNECTIONS="1"), pretended(2, device_type="cuda") as mesh:
        return zf.zero3(nn.Linear(2, 2, device="meta"), mesh)


def checkpoint_is_damaged(saved):
    file = saved / "model" / "00000-0.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    return zf.load(saved, nn.Linear(2, 2))


def checkpoint_of_two_tensors_of_one_name(saved):
    def add(body):
        file = body["files"]["model"][0]
        other = {**file["tensors"]["bias"], "shape": [3], "sizes": [3], "offset": 0}
        body["files"]["model"].append({**file, "nbytes": file["begin"] + 12, "tensors": {"bias": other}})

    _forged(saved / "rank-00000.json", add)
    return zf.load(saved, nn.Linear(2, 2))


def pretrained_of_two_stages(folder):
    with mock.patch.object(RankMeeting, "agree", return_value=Agreement("", 0, 1, False)):
        return zf.save_pretrained(nn.Linear(2, 2), folder)


def _with(**attributes):
    model = nn.Linear(2, 2)
    vars(model).update(attributes)
    return model


def checkpoint_of_two_values_for_a_tie(folder):
    apart, tied = (nn.ModuleDict({"a": nn.Linear(2, 2, False), "b": nn.Linear(2, 2, False)}) for _ in range(2))
    tied["b"].weight = tied["a"].weight
    zf.save(folder / "step-1", apart)
    return zf.load(folder, tied)


def _deepspeed_folder(change, *, also=None):
    """Loads files as DeepSpeed names them, with what a test changes in those of the optimizer."""
    said = {
        "module": {"w": torch.ones(2)}, "buffer_names": [], "param_shapes": [], "shared_params": {}, "optimizer_state_dict": {
            "partition_count": 1, "single_partition_of_fp32_groups": [],
            "base_optimizer_state": {"state": {}, "param_groups": []},
        },
    }  # fmt: skip
    change(said["optimizer_state_dict"])
    with _a_folder() as folder:
        for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt", also):
            if name is not None:
                torch.save(said, folder / name)
        model = nn.Linear(2, 2)
        return zf.load(folder, model, torch.optim.SGD(model.parameters()))


def deepspeed_without_correction_of_bias():
    def change(said):
        said["base_optimizer_state"]["param_groups"].append({"lr": 0.1, "bias_correction": False, "params": []})

    return _deepspeed_folder(change)


def checkpoint_of_torch_with_extensions(folder):
    model = nn.Linear(2, 2)
    dcp.save(model.state_dict(), checkpoint_id=folder / "a", no_dist=True)
    metadata = pickle.loads((folder / "a" / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.transform_descriptors = ["stream.zstd"]
    (folder / "a" / ".metadata").write_bytes(pickle.dumps(metadata))
    return zf.load(folder / "a", model)


def conversion_of_what_ranks_have_saved_apart(saved):
    source = opened(saved, lambda name: name)
    with mock.patch.object(Catalog, "differs_by_rank", return_value=True):
        return convert(source, saved.parent / "b", "dcp", dtype=None, only=("model", "extra"), tell=print)


def checkpoint_is_being_saved(folder):
    (folder / ".step-1.saving").mkdir()
    lock = os.open(folder / ".step-1.saving", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        return zf.save(folder / "step-1", nn.Linear(2, 2))
    finally:
        os.close(lock)


def checkpoint_of_a_state_of_its_own(folder):
    class Counting(nn.Linear):
        def get_extra_state(self):
            return 1

    return zf.save(folder / "step-1", Counting(2, 2))


def checkpoint_of_a_state_in_parts(two, folder):
    model = zf.shard_params(nn.Linear(4, 4), two)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model.weight] = {"rows": torch.zeros(3)}
    return zf.save(folder / "step-1", model, optimizer)


def checkpoint_of_a_late_state(one, folder):
    model = zf.shard_params(nn.Linear(4, 4), one)
    optimizer = zf.streamed(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), zf.cpu())
    model(_batch()).sum().backward()
    optimizer.step()
    optimizer.states.chunks[0].cuts[0].resident["late"] = torch.zeros(4, 4)
    return zf.save(folder / "step-1", model, optimizer)


def checkpoint_of_states_in_another_order(one, folder):
    model = zf.shard_params(nn.Sequential(nn.Conv2d(64, 64, 3)).to(memory_format=torch.channels_last), one)
    optimizer = zf.streamed(torch.optim.Adam(model.parameters()), zf.cpu(), buffer="64KiB")
    model(torch.ones(1, 64, 3, 3)).sum().backward()
    optimizer.step()
    return zf.save(folder / "step-1", model, optimizer)


def checkpoint_of_ranks_that_differ(two, folder):
    def other(_group, message, _seconds):
        rows = message.repeat(2, 1)
        rows[1, 1:17] ^= 1
        return rows

    with mock.patch("zero_fn.checkpoint.rank_meeting.gather", other):
        return zf.save(folder / "step-1", nn.Linear(2, 2))


def checkpoint_failed_on_another_rank():
    with pretended(3), _a_folder() as folder:

        def other(_group, message, _seconds):
            rows = message.repeat(3, 1)
            text = b"1\nStorageError\nWriting head.weight failed.\n  path : runs/a\n  why  : ENOSPC: No space left on device"
            for rank, said in ((1, text), (2, b"2\nStorageError\nnot told: rank 1 is the first that failed")):
                rows[rank, 0] = 1
                rows[rank, 1 : 1 + len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
            return rows

        with mock.patch("zero_fn.checkpoint.rank_meeting.gather", other):
            return zf.save(folder / "step-1", nn.Linear(2, 2))


def checkpoint_lost_a_rank(two, folder):
    with mock.patch.object(dist.ProcessGroup, "recv", side_effect=RuntimeError("Connection closed by peer")):
        return zf.save(folder / "step-1", nn.Linear(2, 2))


def checkpoint_in_a_folder_of_each_host(folder):
    with mock.patch.object(Draft, "make", lambda self: self.path.mkdir() or "made elsewhere"):
        return zf.save(folder / "step-1", nn.Linear(2, 2))


def checkpoint_of_another_host(saved):
    with mock.patch("zero_fn.checkpoint.loading.saved_as", side_effect=["0", "1"]):
        return zf.load(saved, nn.Linear(2, 2))


def average_is_shown_in_a_step():
    model = nn.Linear(2, 2)
    with zf.ema(model).shown():
        torch.optim.SGD(model.parameters()).step()


def average_of_a_model_that_was_transformed(one):
    model = nn.Linear(2, 2)
    average = zf.ema(model)
    sharded = zf.shard_params(model, one)
    average.update()
    del sharded


def _adam():
    return torch.optim.AdamW(nn.Linear(2, 2).parameters())


def profile_of_no_step():
    with alone() as mesh, zf.profile(zf.zero3(nn.Linear(2, 2), mesh)):
        pass


def sink_without_its_library():
    with mock.patch.dict(sys.modules, {"wandb": None}):
        return sink_of("wandb")


def sink_at_a_port_in_use():
    with mock.patch("prometheus_client.start_http_server", side_effect=OSError(98, "Address already in use")):
        return sink_of("prometheus:9400")


def sink_in_the_file_of_another(folder):
    (folder / "run.csv").write_text("name,age\n")
    return sink_of(f"csv:{folder}/run.csv")


def average_of_a_parameter_that_was_frozen():
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    average = zf.ema(model)
    model.requires_grad_(True)
    average.update()


def _planned_config(**entries):
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(sys.modules, transformers=None):
        Path(folder, "config.json").write_text(json.dumps(entries))
        return model_of(folder, 4096, 1)


SRUN = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
    "SLURM_NTASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}  # fmt: skip
MPI_NAMES = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")


def _started_on_two_devices():
    counts = {"is_available": lambda: True, "device_count": lambda: 2}
    with mock.patch.multiple(torch.accelerator, current_accelerator=lambda: torch.device("cuda"), **counts):
        address = {"MASTER_ADDR": "a", "MASTER_PORT": "1"}
        zf.from_environment({"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4", **address})


def _started_alone():
    with mock.patch.dict(os.environ):
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
        zf.from_environment({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", **address}).start(timeout_s=1)


def _lost_by_a_flag():
    flag = Flag()
    flag._work = mock.Mock(
        wait=mock.Mock(side_effect=RuntimeError("Connection closed by peer [10.0.0.2]:41312\nat line"))
    )
    flag.is_raised(False)


def _mirror_of_another():
    path = SharedFolder.path_of("mistake")
    path.symlink_to("/tmp")
    try:
        SharedFolder("mistake")
    finally:
        path.unlink()


def _mirror_named_wrongly(folder):
    (folder / MARK).write_text("../../etc")
    zf.resume(folder, nn.Linear(2, 2))


def _mirror_without_room(folder):
    mirror = zf.mirror(folder, nn.Linear(64, 64))
    try:
        with mock.patch("os.statvfs", return_value=mock.Mock(f_bavail=2, f_frsize=4096)):
            mirror.update()
    finally:
        mirror.close()


def _mirror_that_is_closed(folder):
    mirror = zf.mirror(folder, nn.Linear(2, 2))
    mirror.close()
    mirror.update()


def _mirror_of_two_models(folder):
    mirror = zf.mirror(folder, nn.Linear(2, 2))
    try:
        zf.mirror(folder, nn.Linear(2, 2))
    finally:
        mirror.close()


def _mirror_without_shared_memory():
    with mock.patch("zero_fn.local.shared_folder.ROOT", Path("/missing")):
        host_name()


def _in_a_thread(act):
    raised = []

    def run():
        try:
            act()
        except zf.ZeroError as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="a thread")
    thread.start()
    thread.join()
    raise raised[0]


ROWS = {
    # the mesh
    "planned_axis_was_not_measured": lambda four: _planned(four, sent={}),
    "planned_disk_was_not_measured": lambda four: _planned(four, zf.nvme("/scratch"), disk_read=None),
    "planned_accelerator_was_not_measured": lambda gpus: _planned(gpus, zf.cpu(), to_device=1e9),
    "planned_links_are_no_file": lambda: zf.LinkSpeeds.read("links.json"),
    "planned_model_is_unknown": lambda: model_of("lama-7b", 4096, 1),
    "planned_function_raises": lambda: model_of("json:loads", 4096, 1),
    "planned_function_makes_no_module": lambda: model_of("collections:Counter", 4096, 1),
    "planned_config_has_no_type": lambda: _planned_config(vocab_size=32000),
    "planned_config_without_transformers": lambda: _planned_config(model_type="llama"),
    "planned_nodes_are_not_full": lambda: plan_command.planned(["70B", "--ranks", "12"]),
    "planned_count_is_none": lambda: plan_command.planned(["70B", "--sequence", "0"]),
    "launch_option_of_ssh": lambda: options_of(["--ssh_port", "22", "train.py"]),
    "launch_option_of_autotuning": lambda: options_of(["--autotuning", "tune", "train.py"]),
    "launch_hostfile_is_wrong": lambda: torchrun_lines(
        options_of(["train.py"]), "# two\nworker-0 slots=8\nworker-1", 8
    ),
    "launch_device_is_not_there": lambda: torchrun_lines(options_of(["-i", "localhost:2", "train.py"]), None, 2),
    "launch_devices_are_chosen_twice": lambda: torchrun_lines(
        options_of(["--num_gpus", "2", "--exclude", "localhost:1", "train.py"]), None, 4
    ),
    "launch_on_other_hosts": lambda: this_host(
        options_of(["train.py"]), {"worker-0": ["torchrun", "--node-rank", "0"], "worker-1": ["torchrun"]}
    ),
    "planned_ranks_beside_a_group": lambda one: configurations.pretended(2).__enter__(),
    "planned_host_is_the_device": lambda four: _planned(four, zf.cpu(), zf.nvme("/scratch")),
    "planned_disks_are_two": lambda four: _planned(four, zf.nvme("/disk0"), zf.nvme("/disk1")),
    "mesh_without_this_rank": lambda four: zf.shard_optimizer(
        Model(), DeviceMesh("cpu", [1, 2], mesh_dim_names=("dp",))
    ),
    "mesh_is_on_meta": lambda two: zf.shard_params(Model(), DeviceMesh("meta", [0, 1], mesh_dim_names=("dp",))),
    "mesh_is_not_that_of_tensor_parallelism": lambda grid: zf.shard_params(
        _placed(grid["tp"], Shard(0)), init_device_mesh("cpu", (8,), mesh_dim_names=("dp",))
    ),
    "materialize_beside_the_mesh": lambda one, meta: zf.materialize(zf.shard_params(Model(), one), "cuda"),
    "mesh_is_no_mesh": lambda: zf.shard_params(Model(), "dp"),
    "mesh_has_two_axes": lambda grid: zf.shard_grads(Model(), grid),
    "mesh_has_two_axes_without_names": lambda four: zf.replicate(Model(), init_device_mesh("cpu", (2, 2))),
    "planned_module_is_transformed": lambda four: zf.autoplan(zf.zero2(Model(), four), four, "1GiB", links=SPEEDS),
    "nothing_fits_the_budget": lambda four: zf.autoplan(Model(), four, 100, links=SPEEDS),
    "axes_share_ranks": lambda grid: zf.shard_grads(
        zf.shard_params(Model(), grid["dp"]), grid["dp", "tp"]._flatten("all")
    ),
    "hybrid_over_an_axis_that_is_missing": lambda grid: zf.hybrid(Model(), grid, shard="tp"),
    "axis_is_that_of_tensor_parallelism": lambda grid: zf.shard_params(_placed(grid["tp"], Replicate()), grid["tp"]),
    # units
    "units_class_matches_nothing": lambda two: zf.shard_params(Model(), two, units=nn.TransformerEncoderLayer),
    "units_pattern_matches_nothing": lambda two: zf.shard_params(Model(), two, units=("layers.*", "blocks.*")),
    "units_are_no_rule": lambda two: zf.shard_params(Model(), two, units=(3,)),
    "units_of_no_size": lambda: zf.by_size(nbytes=0),
    "units_differ_between_transforms": lambda two: zf.shard_params(
        zf.shard_grads(Model(), two, units="layers.*"), two, units=nn.Linear
    ),
    # options
    "where_pattern_matches_nothing": lambda two: zf.shard_params(Model(), two, where="blocks.*"),
    "persist_below_nothing": lambda two: zf.shard_params(Model(), two, persist_below=-1),
    "reshard_after_no_moment": lambda two: zf.shard_params(Model(), two, reshard_after="step"),
    "precision_of_integers": lambda: zf.precision(Model(), compute=torch.int8),
    "precision_output_is_no_dtype": lambda: zf.precision(Model(), output="float32"),
    "precision_with_wider_gradients": lambda: zf.precision(Model().bfloat16(), grads=torch.float32),
    "precision_rounds_in_no_way": lambda: zf.precision(Model().bfloat16(), round="nearest"),
    "precision_rounds_float32": lambda: zf.precision(Model(), round="stochastic"),
    "precision_seed_without_random_numbers": lambda: zf.precision(Model().bfloat16(), seed=3),
    "precision_seed_of_kahan": lambda: zf.precision(Model().bfloat16(), round="kahan", seed=3),
    "format_of_small_blocks": lambda: zf.int8(block=8),
    "format_of_other_floats": lambda: zf.float8(dtype=torch.float16),
    "format_that_is_none": lambda: zf.Wire("float8_e5m2", is_symmetric=False),
    "precision_gathers_in_a_dtype": lambda: zf.precision(Model(), gather=torch.int8),
    "precision_reduces_differences": lambda: zf.precision(Model(), reduce=zf.delta4()),
    "precision_twice_with_other_formats": lambda: zf.precision(
        zf.precision(Model(), gather=zf.int8()), gather=zf.int8(block=64)
    ),
    "precision_twice_with_other_roundings": lambda: zf.precision(
        zf.precision(Model().bfloat16(), round="stochastic", seed=1), round="stochastic"
    ),
    "precision_twice_with_other_dtypes": lambda: zf.precision(
        zf.precision(Model(), compute=torch.bfloat16), compute=torch.float16
    ),
    "precision_twice_with_other_sums": lambda: zf.precision(
        zf.precision(Model(), reduce=torch.float32), reduce=torch.bfloat16
    ),
    "precision_twice_with_other_outputs": lambda: zf.precision(
        zf.precision(Model(), output=torch.float32), output=torch.bfloat16
    ),
    # modules
    "module_was_donated": lambda two: _donated(two)(_batch()),
    "module_was_donated_and_is_transformed_again": lambda two: zf.shard_params(_donated(two), two),
    "parameter_is_of_a_subclass": lambda two: zf.shard_params(nn.Sequential(nn.Linear(4, 4), _linear(_two())), two),
    "subclass_is_trained": lambda: zf.flatten_subclasses(_linear(_two())),
    "subclass_says_not_what_it_is_made_of": lambda: zf.flatten_subclasses(
        _linear(torch.zeros(2, 2).as_subclass(Opaque), is_trained=False)
    ),
    "product_of_another_shape": lambda two: zf.shard_params(
        zf.flatten_subclasses(_linear(Short(torch.zeros(WIDTH, WIDTH)))), two
    )(torch.ones(1, WIDTH)),
    "parameter_is_lazy": lambda two: zf.shard_params(nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4)), two),
    "module_is_scripted": lambda two: zf.shard_params(
        nn.Sequential(nn.Linear(4, 4), torch.jit.trace(nn.Linear(4, 4), torch.zeros(1, 4))), two
    ),
    "embedding_is_sparse": lambda two: zf.shard_params(
        nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4)), two
    ),
    "flattened_after_a_transform": lambda two: zf.flatten_subclasses(zf.shard_params(Model(), two)),
    "method_is_missing": lambda: zf.gather_in(Model(), "encode"),
    "method_is_a_generator": lambda: zf.gather_in(Streaming(), "stream"),
    "parameter_is_sharded_over_the_axis_already": lambda two: zf.shard_params(_placed(two, Shard(0)), two),
    "parameter_is_partial": lambda grid: zf.shard_params(_placed(grid["tp"], Partial()), grid["dp"]),
    # the wrong moment
    "check_of_a_plain_module": lambda: zf.check(Model(), torch.optim.SGD(Model().parameters(), lr=0.1)),
    "accumulate_of_a_plain_module": lambda: _entered(zf.accumulate(Model())),
    "unsharded_of_a_plain_module": lambda: _entered(zf.unsharded(Model())),
    "unsharded_inside_unsharded": lambda model: _entered(zf.unsharded(model), zf.unsharded(model.layers[0])),
    "unshard_inside_accumulate": lambda model: _entered(zf.accumulate(model), zf.accumulate(model, unshard=True)),
    "guard_of_no_time": lambda: _entered(zf.guard(deadline_s=0)),
    "guard_that_compares": lambda: _entered(zf.guard(compare=True)),
    "describe_of_a_plain_module": lambda: zf.describe(Model()),
    "plan_of_a_plain_module": lambda: zf.plan(Model()),
    "refresh_of_a_plain_module": lambda: zf.refresh(Model()),
    "sequence_without_optimizers": lambda model: zf.check(model, []),
    "checkpoint_of_shards_as_extra": lambda folder, model: zf.save(
        folder / "step-1", model, extra={"adamw": [next(model.parameters())]}
    ),
    "weights_without_a_version": lambda model: zf.weights(model).version,
    "weights_of_unknown_names": lambda model: zf.weights(model, names="vllm"),
    "weights_of_one_name": lambda model: zf.weights(model, names={r".*": "weight"}),
    "weights_without_a_place": lambda model: zf.apply_weights(nn.Linear(4, 3), zf.weights(model)),
    "weights_of_another_shape": lambda: zf.apply_weights(nn.Linear(4, 4), zf.weights(nn.Linear(4, 3))),
    "materialize_of_a_plain_module": lambda: zf.materialize(Model(), "cpu"),
    "streamed_optimizer_that_clips": lambda: zf.streamed(_Clipping(Model().parameters(), lr=0.1), zf.cpu()),
    "streamed_states_share_memory": lambda: zf.streamed(
        _Sharing(Model().parameters(), lr=0.1), zf.cpu(), elementwise=True
    ),
    "checkpoints_of_nothing": lambda: zf.checkpoint_activations(nn.Linear(2, 2)),
    "buffers_of_no_policy": lambda two: zf.shard_params(Model(), two, buffers="sync"),
    "buffers_twice_with_other_policies": lambda two: zf.shard_grads(
        zf.shard_params(Model(), two, buffers="local"), two, buffers="broadcast"
    ),
    "forward_is_traced": lambda one: torch.jit.trace(zf.shard_params(Model(), one), _batch()),
    "forward_is_exported": lambda one: torch.export.export(zf.shard_params(Model(), one), (_batch(),)),
    "forward_is_pickled": lambda two: pickle.dumps(zf.shard_params(Model(), two).forward),
    # stale objects
    "check_optimizer_of_another_module": lambda model: zf.check(model, torch.optim.AdamW(Model().parameters())),
    "check_optimizer_that_lacks_parameters": lambda model: zf.check(
        model, torch.optim.AdamW(model.layers.parameters())
    ),
    # at rest
    "parameter_is_pruned_after_the_transform": lambda one: prune.l1_unstructured(
        zf.shard_params(Model(), one).head, "weight", 0.5
    ),
    "resting_parameters_are_shared": lambda one: zf.shard_params(Model(), one).share_memory(),
    "module_is_wrapped_in_ddp": lambda one: DistributedDataParallel(zf.shard_params(zf.shard_grads(Model(), one), one)),
    "forward_changes_a_weight": lambda one: zf.shard_params(Clamped(), one)(_batch()),
    "weight_is_asked_for_its_storage": lambda two: zf.shard_params(Model(), two).head.weight.storage(),
    "weight_is_made_whole_in_a_forward": lambda one: zf.shard_params(Peeking(gathers=True), one)(_batch()),
    "gradient_is_sparse": lambda one: zf.shard_params(SparseInFunction(), one)(torch.tensor([1, 2])).sum().backward(),
    # loading
    "entry_of_another_shape": lambda model: model.load_state_dict({**model.state_dict(), "head.bias": torch.zeros(4)}),
    # once something was changed
    "module_cannot_be_copied": lambda two: zf.shard_params(
        _changed(lambda model: setattr(model.layers[1], "guard", threading.Lock())), two
    ),
    "closure_over_a_module": lambda one: zf.shard_params(
        _changed(lambda model: model.head.register_forward_hook(lambda module, args, output: output + model.head.bias)),
        one,
    ),
    "parameters_share_memory": lambda one: zf.shard_params(
        _changed(lambda model: setattr(model.layers[1], "weight", nn.Parameter(model.layers[0].weight.detach().T))), one
    ),
    "buffer_in_the_memory_of_a_parameter": lambda one: zf.shard_params(
        _changed(lambda model: model.register_buffer("first_row", model.layers[0].weight.detach()[0])), one
    ),
    "assigned_value_is_of_a_subclass": lambda two: zf.shard_params(nn.Sequential(nn.Linear(4, 4)), two).load_state_dict(
        {"0.weight": _two(), "0.bias": torch.zeros(4)}, assign=True
    ),
    "unit_in_a_selective_checkpoint": lambda model: checkpoint(
        model,
        _batch(),
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default]),
    ),
    "gradients_are_vectorized": lambda model: torch.autograd.grad(
        model(_batch()).flatten()[:2], list(model.parameters()), torch.eye(2), is_grads_batched=True
    ),
    "parameter_was_replaced": lambda model: (
        setattr(model.head, "weight", nn.Parameter(torch.zeros(3, 4))),
        model(_batch()),
    ),
    "parameter_was_replaced_by_nothing": lambda model: (model.head.register_parameter("bias", None), zf.refresh(model)),
    "data_of_a_parameter_was_assigned": lambda model: setattr(
        model.head.weight, "data", model.head.weight.data.double()
    ),
    "parameter_is_late": lambda model: (setattr(model.layers[0], "adapter", nn.Linear(4, 2)), model(_batch())),
    "step_in_a_hook_of_a_node": lambda model: (
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1}),
        model(_batch()).sum().backward(),
    ),
    "evicted_unit_runs": lambda model: (evicted(model), zf.describe(model)),
    "restored_twice": lambda: [evicted.restore() for evicted in 2 * [zf.evict(nn.Linear(4, 4), to=zf.cpu())]],
    "pretrained_of_another_kind": lambda folder: (
        torch.save({}, folder / "pytorch_model.bin"),
        zf.load_pretrained(nn.Linear(2, 2), folder),
    ),
    "pretrained_is_there_already": lambda folder: [zf.save_pretrained(nn.Linear(2, 2), folder) for _ in range(2)],
    "checkpoint_is_of_a_later_version": lambda saved: (
        _forged(saved / "manifest.json", lambda body: body.update(version=99)),
        zf.load(saved, nn.Linear(2, 2)),
    ),
    "checkpoints_of_two_kinds": lambda saved: (
        torch.save({}, saved.parent / "mp_rank_00_model_states.pt"),
        zf.load(saved.parent, nn.Linear(2, 2)),
    ),
    "row_of_a_resting_parameter_is_written": lambda two: (
        zf.shard_params(nn.Linear(4, 4), two).weight.detach()[1:3].zero_()
    ),
    "check_optimizer_of_the_module_before": lambda two: zf.check(
        zf.shard_params(before := Model(), two), torch.optim.AdamW(before.parameters())
    ),
    # launchers
    "started_without_an_address": lambda: zf.from_environment({"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1"}),
    "started_without_a_size": lambda: zf.from_environment({"RANK": "1"}),
    "started_as_no_number": lambda: zf.from_environment({"RANK": "first", "WORLD_SIZE": "2"}),
    "started_as_a_rank_too_many": lambda: zf.from_environment(
        {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    ),
    "started_in_a_batch_script": lambda: zf.from_environment(
        {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}
    ),
    "started_by_slurm_without_nodes": lambda: zf.from_environment(SRUN),
    "started_by_slurm_in_other_words": lambda: zf.from_environment(SRUN | {"SLURM_STEP_TASKS_PER_NODE": "many"}),
    "started_by_mpi_on_two_hosts": lambda: zf.from_environment(
        {f"OMPI_COMM_WORLD_{name}": count for name, count in zip(MPI_NAMES, "0201", strict=True)}
    ),
    "started_as_a_pod_alone": lambda: zf.from_environment({"JOB_COMPLETION_INDEX": "0"}),
    "started_with_more_ranks_than_devices": _started_on_two_devices,
    "started_where_nobody_listens": _started_alone,
    "mirror_that_is_closed": _mirror_that_is_closed,
    "mirror_every_no_step": lambda: zf.mirror("runs", nn.Linear(2, 2), every=0),
    "mirror_of_another_user": _mirror_of_another,
    "mirror_named_wrongly": _mirror_named_wrongly,
    "mirror_of_two_models": _mirror_of_two_models,
    "mirror_without_room": _mirror_without_room,
    "mirror_without_shared_memory": _mirror_without_shared_memory,
    "preemption_in_a_thread": lambda: _in_a_thread(zf.preemption),
    "preemption_lost_a_rank": _lost_by_a_flag,
    "preemption_in_no_time": lambda: zf.preemption(within_s=0),
    # launch
    "launch_no_rank": lambda: zf.launch(print, 0),
    "launch_no_thread": lambda: zf.launch(print, 2, threads=0),
    "launch_no_time": lambda: zf.launch(print, 2, timeout_s=0),
    "launch_again_less_than_never": lambda: zf.launch(print, 2, restarts=-1),
    "launch_says_which_rank_is_which": lambda: zf.launch(print, 2, env={"RANK": "0"}),
    # tiers
    "evicted_model_runs": lambda: _evicted()(_batch()),
    "evicted_twice": lambda: zf.evict(_evicted(), to=zf.cpu()),
    "tier_of_no_size": lambda: zf.nvme(".", limit="much"),
    "tier_of_host_memory_is_too_small": lambda: zf.streamed(_stepped()[1], zf.cpu(limit="16KiB")),
    "tier_on_disk_is_too_small": lambda: zf.streamed(_stepped()[1], zf.nvme(".", limit="16KiB")),
    "tier_buffer_is_too_small": lambda: zf.streamed(_stepped()[1], zf.nvme("."), buffer="4KiB"),
    "disk_has_no_such_path": lambda: zf.streamed(_stepped()[1], zf.nvme("/missing")),
    "disk_fails": lambda: _streamed_and_damaged(lambda _, result: -errno.EIO),
    "disk_stops_short": lambda: _streamed_and_damaged(lambda _, result: 0),
    "streamed_and_copied": lambda: copy.deepcopy(zf.streamed(_stepped()[1], zf.nvme("."))),
    "streamed_lbfgs": lambda: zf.streamed(torch.optim.LBFGS(nn.Linear(2, 2).parameters()), zf.cpu()),
    "evicted_to_a_disk": lambda: zf.evict(nn.Linear(4, 4), to=zf.nvme(".")),
    # offload
    "step_that_is_not_streamed": lambda tiered: torch.optim.SGD(tiered.parameters()).step(),
    "streamed_in_too_small_a_buffer": lambda tiered: zf.streamed(
        torch.optim.AdamW(tiered.parameters()), zf.cpu(), buffer=64
    ),
    "view_of_a_tensor_in_a_tier": lambda tiered: next(tiered.parameters()).data.view(torch.int32),
    "memory_of_a_tensor_in_a_tier_is_shared": lambda tiered: torch.from_dlpack(next(tiered.parameters()).detach()),
    "plain_data_was_assigned_a_resting_tensor": lambda two: setattr(
        nn.Parameter(torch.empty(4, 4)), "data", zf.shard_params(nn.Linear(4, 4), two).weight.data
    ),
    "offload_without_a_tier": lambda: zf.offload(Model()),
    "offload_of_no_resident_part": lambda: zf.offload(Model(), optim=zf.nvme("/tmp"), resident=0.5),
    "parameters_cannot_be_read_in_place": lambda folder: _in_files(folder, torch.bfloat16),
    "file_in_place_is_gone": lambda: StoredFile("/missing/model.safetensors"),
    "offload_of_no_fraction": lambda: zf.offload(Model(), optim=zf.nvme("/tmp"), fraction=0.0),
    "offload_to_two_tiers": lambda: zf.offload(zf.offload(Model(), optim=zf.cpu()), optim=zf.nvme("/tmp")),
    "resting_parameter_is_drawn": lambda two: nn.init.orthogonal_(zf.shard_params(nn.Linear(6, 4), two).weight),
    "resting_parameter_is_read_at_positions": lambda two: zf.shard_params(nn.Linear(4, 4), two).weight[[1, 3]],
    "states8bit_without_a_form": lambda: zf.states8bit(torch.optim.Rprop(nn.Linear(64, 64).parameters())),
    "states8bit_after_streamed": lambda: zf.states8bit(
        zf.streamed(torch.optim.AdamW(Model().parameters(), fused=True), zf.cpu())
    ),
    "streamed_without_a_tier": lambda: zf.streamed(torch.optim.AdamW(Model().parameters())),
    "streamed_of_no_fraction": lambda: zf.streamed(torch.optim.AdamW(Model().parameters()), zf.cpu(), fraction=2.0),
    "streamed_optimizer_of_whole_matrices": lambda: zf.streamed(
        torch.optim.Muon(nn.Linear(4, 4, bias=False).parameters()), zf.cpu(), elementwise=True
    ),
    "owners_of_parameters_that_have_some": lambda one: zf.by_owner(_by_owner(one)),
    "owners_of_parameters_that_are_coupled": lambda: zf.by_owner(torch.optim.LBFGS(Model().parameters())),
    "owners_of_a_partial_value": lambda two: zf.by_owner(torch.optim.SGD(_placed(two, Partial()).parameters())),
    "muon_of_a_parameter_without_a_name": lambda: groups_of_muon([nn.Parameter(torch.empty(2, 2))], [Model()]),
    "owners_of_a_part_of_the_states": lambda one: finished(
        _by_owner(one), dataclasses.replace(IN_MEMORY, fraction=0.5)
    ),
    "owners_are_copied": lambda one: copy.deepcopy(_by_owner(one)),
    "owners_are_streamed_in_pieces": lambda one: zf.streamed(_by_owner(one), zf.cpu(), buffer="1MiB"),
    "tier_of_one_path_twice": lambda: zf.nvme("/disk0", "/disk1", "/disk0"),
    # tiles
    "tiled_weight_is_tied": lambda: _tiled(
        lambda model: setattr(model.layers[1], "weight", model.layers[0].weight), "layers.0.weight"
    ),
    "tiled_weight_is_on_a_mesh": lambda two: zf.tile(_placed(two, Replicate()), where="head.weight", parts=2),
    "tiled_parameter_has_hooks": lambda: _tiled(lambda model: model.head.weight.register_hook(lambda grad: grad)),
    "tiled_state_dict_has_hooks": lambda: _tiled(
        lambda model: model.head.register_load_state_dict_post_hook(lambda *_: None)
    ),
    "tiled_forward_is_its_own": lambda: _tiled(lambda model: setattr(model.head, "forward", abs)),
    "untiled_of_some_parts": lambda: zf.untiled(
        zf.tile(Model(), where="head.*", parts=2), {"head.tiles.1.weight": torch.zeros(1, 4)}
    ),
    "tiled_after_a_transform": lambda four: zf.tile(zf.shard_params(Model(), four), where="head.*", parts=2),
    "tiled_in_too_many_parts": lambda: zf.tile(Model(), where="head.*", parts=4),
    "tiled_norm": lambda: zf.tile(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), where="*", parts=2),
    "tiled_embedding_has_a_norm": lambda: zf.tile(nn.Embedding(8, 4, max_norm=1.0), where="weight", parts=2),
    "streamed_optimizer_cannot_wait": lambda folder: zf.streamed(
        Unknown(nn.Linear(2, 2).parameters()), zf.nvme(folder), finish="forward"
    ),
    "streamed_until_no_moment": lambda: zf.streamed(
        torch.optim.AdamW(nn.Linear(2, 2).parameters()), zf.cpu(), finish="backward"
    ),
    # configs of DeepSpeed
    "config_has_no_auto_where_one_is_filled_in": lambda: _from_config(
        gradient_clipping=0.5, auto={"gradient_clipping": 1.0}
    ),
    "config_of_no_kind": lambda: config_of(7),
    "config_is_nowhere": lambda: config_of("nowhere/ds_config.json"),
    "config_has_a_comment": lambda: _from_file('{"bf16": {"enabled": true}} // on'),
    "config_is_a_list": lambda: _from_file("[1, 2]"),
    "config_says_something_twice": lambda: _from_file('{"bf16": {"enabled": true, "enabled": false}}'),
    "config_has_no_number": lambda: _from_file('{"gradient_clipping": NaN}'),
    "config_is_misspelt": lambda: _from_config(gradient_cliping=1.0),
    "config_has_text_for_a_number": lambda: _from_config(gradient_clipping="1.0"),
    "config_waits_for_the_trainer": lambda: _from_config(optimizer={"type": "AdamW", "params": {"lr": "auto"}}),
    "config_is_wrong_in_many_ways": lambda: _from_config(
        gradient_cliping=1.0,
        gradient_clipping="1.0",
        zero_optimization={"stage": 3, "mics_shard_size": 8, "prefetch_bucket_size": "many"},
        optimizer={"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        train_micro_batch_size_per_gpu=4,
    ),
    "config_has_a_name_twice": lambda: _from_config(
        zero_optimization={"max_live_parameters": 1e9, "stage3_max_live_parameters": 1e9}
    ),
    "config_wants_errors_of_codes_sent_later": lambda: _from_config(
        zero_optimization={"stage": 3, "zero_quantized_gradients": True, "zeropp_loco_param": {"err_beta": 0.8}}
    ),
    "config_tunes_itself": lambda: _from_config(autotuning={"enabled": True}),
    "config_has_an_entry_in_another_place": lambda: _from_config(offload_optimizer={"device": "cpu"}),
    "config_asks_for_stages_without_their_axis": lambda: _from_config(pipeline_parallel={"pp_size": 2}),
    "config_of_contradicting_batches": lambda: _from_config(
        train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=2
    ),
    "config_of_two_dtypes": lambda: _from_config(bf16={"enabled": True}, fp16={"enabled": True}),
    "config_offloads_replicas": lambda: _from_config(
        zero_optimization={"stage": 0, "offload_optimizer": {"device": "cpu"}}
    ),
    "config_of_a_negative_rate": lambda: _from_config(optimizer={"type": "AdamW", "params": {"lr": -0.1}}),
    "config_without_an_optimizer": lambda: _from_config(),
    "config_sends_what_is_not_computed": lambda: _from_config(
        communication_data_type="bf16", optimizer={"type": "AdamW"}
    ),
    # checkpoints
    "checkpoint_does_not_fit": lambda saved: zf.load(saved.parent, nn.Linear(3, 2, bias=False, dtype=torch.bfloat16)),
    "checkpoint_is_there_already": lambda saved: zf.save(saved, nn.Linear(2, 2)),
    "checkpoint_of_a_partial_value": lambda two, folder: zf.save(folder / "step-1", _placed(two, Partial())),
    "pretrained_is_quantised": lambda folder: zf.save_pretrained(_with(is_quantized=True), folder),
    "pretrained_with_adapters": lambda folder: zf.save_pretrained(_with(peft_config={}), folder),
    "checkpoint_is_nowhere": lambda folder: zf.load(folder, nn.Linear(2, 2)),
    "pretrained_onto_meta": lambda: zf.load_pretrained(nn.Linear(2, 2, device="meta"), "folder"),
    "deepspeed_with_elastic_states": lambda: _deepspeed_folder(lambda said: said.update(base_optimizer_state=[])),
    "deepspeed_with_tensor_parallelism": lambda: _deepspeed_folder(lambda _: None, also="mp_rank_01_model_states.pt"),
    "deepspeed_with_other_objects": lambda: _deepspeed_folder(lambda said: said.update(clip_grad=nn.Linear(1, 1))),
    "checkpoint_without_a_name": lambda folder: zf.save(folder / ".step-1", nn.Linear(2, 2)),
    "checkpoint_of_no_place": lambda folder: zf.load(folder / "runs"),
    "checkpoint_keeps_none": lambda folder: zf.save(folder / "step-1", keep=0),
    "checkpoint_of_what_has_no_form": lambda folder: zf.save(folder / "step-1", extra={"state": [{"noise": print}]}),
    "checkpoint_of_an_odd_dtype": lambda folder: zf.save(
        folder / "step-1", extra={"z": torch.zeros(2, dtype=torch.complex128)}
    ),
    "checkpoint_of_meta": lambda folder: zf.save(folder / "step-1", nn.Linear(2, 2, device="meta")),
    "checkpoint_of_another_optimizer": lambda folder: zf.save(
        folder / "step-1", nn.Linear(2, 2), torch.optim.SGD(nn.Linear(2, 2).parameters())
    ),
    "checkpoint_loads_nothing": lambda: zf.load("runs", only="weights"),
    "checkpoint_of_an_average_alone": lambda folder: zf.save(
        folder / "step-1", extra={"average": zf.ema(nn.Linear(2, 2))}
    ),
    # sinks
    "sink_of_another_word": lambda: sink_of("visdom:8097"),
    "sink_in_no_folder": lambda: Csv("/dev/null/run.csv"),
    "sink_of_a_name_that_is_none": lambda folder: Csv(folder / "run.csv").log(1, {"eval/loss": 1.0}),
    "sink_of_two_ways": lambda: Prometheus(9400, textfile="run.prom"),
    "sink_that_node_exporter_does_not_read": lambda: Prometheus(textfile="run.txt"),
    # metrics and profiles
    "metrics_of_no_step": lambda: zf.metrics(nn.Linear(2, 2), _adam(), every=0),
    "spikes_are_answered_by_no_word": lambda: zf.metrics(nn.Linear(2, 2), _adam(), on_spike="stop"),
    "spikes_load_from_nowhere": lambda: zf.metrics(nn.Linear(2, 2), _adam(), on_spike="load"),
    # averages
    "average_of_no_decay": lambda: zf.ema(nn.Linear(2, 2), 1.5),
    "average_of_what_is_frozen": lambda: zf.ema(nn.Linear(2, 2).requires_grad_(False)),
    "average_of_meta": lambda: zf.ema(nn.Linear(2, 2, device="meta")),
}

# The functions that make mistakes; helpers are private.
CASES = ROWS | {
    name: value
    for name, value in globals().copy().items()
    if getattr(value, "__module__", None) == __name__ and inspect.isfunction(value) and not name.startswith("_")
}
