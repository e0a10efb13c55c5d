"""The text of every error: what a user reads, word by word, in `snapshots/*.txt`.

    SNAPSHOTS=write python -m pytest tests/errors      # writes them again; read the difference before you commit it

A case is a function that makes one mistake. Line numbers and addresses are replaced, so that moving a line changes nothing.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import ctypes
import dataclasses
import errno
import fcntl
import importlib
import io
import json
import os
import pickle
import re
import resource
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize, prune
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import zero_fn as zf
from tests.support.eviction import evicted
from tests.support.groups import alone, pretended, pretended_grid
from tests.support.ranks import Ranks, axis
from tests.support.snapshot import assert_matches, is_writing
from tests.support.subclasses import WIDTH, Short
from tests.units.storage.disks import answers
from zero_fn.checkpoint.converting import convert
from zero_fn.checkpoint.format import files
from zero_fn.checkpoint.format.catalog import Catalog
from zero_fn.checkpoint.others.opening import opened
from zero_fn.checkpoint.together import Agreed, Together
from zero_fn.deepspeed.entries import config_of
from zero_fn.deepspeed.loss_scale import Scaler
from zero_fn.deepspeed.settings import settings_of
from zero_fn.deepspeed.setup import _sharded, require_placed
from zero_fn.errors import (
    CheckpointError,
    ConfigError,
    DisagreementError,
    LayoutError,
    LostRankError,
    MeshError,
    PlacementError,
    ShardedAccessError,
    StaleError,
    StateError,
    StorageError,
    TierError,
    UnitError,
    ZeroError,
)
from zero_fn.storage import DiskStorage, Slab
from zero_fn.storage.io import Request, Threads
from zero_fn.transport.line import Work
from zero_fn.values.mesh import mesh_axis

SNAPSHOTS = Path(__file__).parent / "snapshots"
PACKAGE = Path(__file__).parents[2] / "zero_fn"


class Opaque(Tensor):
    """Like quantized weights that keep what they were quantised with as an attribute."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def batch() -> Tensor:
    return torch.ones(2, 4)


def normalized(text: str) -> str:
    """A message without what differs from one machine or one edit of a test to the next."""
    text = re.sub(r"(\w+\.py):\d+", r"\1:LINE", text)
    text = re.sub(r"checksum [0-9a-f]{16}", "checksum DIGEST", text)
    text = re.sub(rf"{re.escape(tempfile.gettempdir())}/zero_fn_\w+", "FOLDER", text)
    return re.sub(r"0x[0-9a-f]+", "0xADDRESS", text)


def assert_says(name: str, error: ZeroError) -> None:
    text = str(error)
    assert text.splitlines()[0] == error.summary
    assert text.splitlines()[-1].lstrip().startswith("fix") or "\n" in error.fix
    assert error.fix
    assert_matches(SNAPSHOTS / f"{name}.txt", f"{type(error).__name__}: {normalized(text)}")


# -- the mesh --------------------------------------------------------------------------------------------------------


def mesh_is_no_mesh() -> object:
    return zf.shard_params(Model(), "dp")  # type: ignore[arg-type]


def mesh_has_two_axes() -> object:
    with pretended_grid(4, 2) as mesh:
        return zf.shard_grads(Model(), mesh)


def mesh_has_two_axes_without_names() -> object:
    with pretended(4):
        return zf.replicate(Model(), init_device_mesh("cpu", (2, 2)))


SPEEDS = zf.LinkSpeeds(1e10, 1e9, 1e9, {"dp": 1e9}, None, None)


def planned_axis_was_not_measured() -> object:
    with pretended(4) as axis:
        return zf.autoplan(Model(), axis, "1GiB", links=dataclasses.replace(SPEEDS, sent={}))


def planned_disk_was_not_measured() -> object:
    with pretended(4) as axis:
        return zf.autoplan(
            Model(), axis, "1GiB", links=dataclasses.replace(SPEEDS, disk_read=None), tier=zf.nvme("/scratch")
        )


def planned_accelerator_was_not_measured() -> object:
    with pretended(4, device_type="cuda") as axis:
        return zf.autoplan(Model(), axis, "1GiB", links=dataclasses.replace(SPEEDS, to_device=1e9), tier=zf.cpu())


def planned_host_is_the_device() -> object:
    with pretended(4) as axis:
        return zf.autoplan(Model(), axis, "1GiB", links=SPEEDS, tier=(zf.cpu(), zf.nvme("/scratch")))


def planned_disks_are_two() -> object:
    with pretended(4) as axis:
        return zf.autoplan(Model(), axis, "1GiB", links=SPEEDS, tier=(zf.nvme("/disk0"), zf.nvme("/disk1")))


def planned_module_is_transformed() -> object:
    with pretended(4) as axis:
        return zf.autoplan(zf.zero2(Model(), axis), axis, "1GiB", links=SPEEDS)


def nothing_fits_the_budget() -> object:
    with pretended(4) as axis:
        return zf.autoplan(Model(), axis, 100, links=SPEEDS)


def mesh_without_this_rank() -> object:
    with pretended(3):
        return zf.shard_optimizer(Model(), DeviceMesh("cpu", [1, 2], mesh_dim_names=("dp",)))


def axes_share_ranks() -> object:
    with pretended_grid(4, 2) as mesh:
        return zf.shard_grads(zf.shard_params(Model(), mesh["dp"]), mesh["dp", "tp"]._flatten("all"))


def axes_are_of_two_meshes() -> object:
    with pretended_grid(4, 2) as mesh:
        other = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        return zf.shard_grads(zf.shard_params(Model(), mesh["dp"]), other["dp"])


def axes_are_three() -> object:
    with pretended_grid(4, 2):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pod", "node", "rank"))
        model = zf.shard_params(zf.replicate(Model(), mesh["pod"]), mesh["rank"])
        return zf.replicate(model, mesh["node"])


def hybrid_over_an_axis_that_is_missing() -> object:
    with pretended_grid(4, 2) as mesh:
        return zf.hybrid(Model(), mesh, shard="tp")


def axis_is_that_of_tensor_parallelism() -> object:
    with pretended_grid(4, 2) as mesh:
        return zf.shard_params(_placed(mesh["tp"], Replicate()), mesh["tp"])


def mesh_is_not_that_of_tensor_parallelism() -> object:
    with pretended_grid(4, 2) as mesh:
        model = _placed(mesh["tp"], Shard(0))
        return zf.shard_params(model, init_device_mesh("cpu", (8,), mesh_dim_names=("dp",)))


def _placed(mesh: DeviceMesh, placement: Placement) -> Model:
    model = Model()
    model.head.weight = nn.Parameter(DTensor.from_local(model.head.weight.detach(), mesh, [placement], run_check=False))
    return model


def mesh_is_on_meta() -> object:
    with pretended(2):
        mesh = DeviceMesh("meta", [0, 1], mesh_dim_names=("dp",))
        return zf.shard_params(Model(), mesh)


def materialize_beside_the_mesh() -> object:
    with alone() as mesh, torch.device("meta"):
        return zf.materialize(zf.shard_params(Model(), mesh), "cuda")


# -- units -----------------------------------------------------------------------------------------------------------


def units_class_matches_nothing() -> object:
    with pretended(2) as mesh:
        return zf.shard_params(Model(), mesh, units=nn.TransformerEncoderLayer)


def units_pattern_matches_nothing() -> object:
    with pretended(2) as mesh:
        return zf.shard_params(Model(), mesh, units=("layers.*", "blocks.*"))


def units_are_no_rule() -> object:
    with pretended(2) as mesh:
        return zf.shard_params(Model(), mesh, units=(3,))  # type: ignore[arg-type]


def units_of_no_size() -> object:
    return zf.by_size(nbytes=0)


def units_differ_between_transforms() -> object:
    with pretended(2) as mesh:
        return zf.shard_params(zf.shard_grads(Model(), mesh, units="layers.*"), mesh, units=nn.Linear)


# -- options ---------------------------------------------------------------------------------------------------------


def where_pattern_matches_nothing() -> object:
    with pretended(2) as mesh:
        return zf.shard_params(Model(), mesh, where="blocks.*")


def where_predicate_matches_nothing() -> object:
    def is_huge(fqn: str, parameter: nn.Parameter) -> bool:
        return parameter.numel() > 10**9

    with pretended(2) as mesh:
        return zf.shard_params(nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))), mesh, where=is_huge)


def persist_below_nothing() -> object:
    with pretended(2) as mesh:
        return zf.shard_params(Model(), mesh, persist_below=-1)


def reshard_after_no_moment() -> object:
    with pretended(2) as mesh:
        return zf.shard_params(Model(), mesh, reshard_after="step")  # type: ignore[arg-type]


def precision_of_integers() -> object:
    return zf.precision(Model(), compute=torch.int8)


def precision_output_is_no_dtype() -> object:
    return zf.precision(Model(), output="float32")  # type: ignore[arg-type]


def precision_with_wider_gradients() -> object:
    return zf.precision(Model().bfloat16(), grads=torch.float32)


def precision_twice_with_other_dtypes() -> object:
    return zf.precision(zf.precision(Model(), compute=torch.bfloat16), compute=torch.float16)


def precision_twice_with_other_sums() -> object:
    return zf.precision(zf.precision(Model(), reduce=torch.float32), reduce=torch.bfloat16)


def precision_twice_with_other_outputs() -> object:
    return zf.precision(zf.precision(Model(), output=torch.float32), output=torch.bfloat16)


# -- modules ---------------------------------------------------------------------------------------------------------


def parameter_is_lazy() -> object:
    with pretended(2) as mesh:
        return zf.shard_params(nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4)), mesh)


def module_is_scripted() -> object:
    with pretended(2) as mesh:
        return zf.shard_params(
            nn.Sequential(nn.Linear(4, 4), torch.jit.trace(nn.Linear(4, 4), torch.zeros(1, 4))), mesh
        )


def embedding_is_sparse() -> object:
    with pretended(2) as mesh:
        return zf.shard_params(nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4)), mesh)


def parameter_is_of_a_subclass() -> object:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    model[1].weight = nn.Parameter(TwoTensor(torch.zeros(4, 4), torch.ones(4, 4)))
    with pretended(2) as mesh:
        return zf.shard_params(model, mesh)


def subclass_is_trained() -> object:
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(TwoTensor(torch.zeros(4, 4), torch.ones(4, 4)))
    return zf.flatten_subclasses(model)


def product_of_another_shape() -> object:
    model = nn.Linear(WIDTH, WIDTH)
    model.weight = nn.Parameter(Short(model.weight.detach()))
    with pretended(2) as mesh:
        return zf.shard_params(zf.flatten_subclasses(model), mesh)(torch.ones(1, WIDTH))


def flattened_after_a_transform() -> object:
    with pretended(2) as mesh:
        return zf.flatten_subclasses(zf.shard_params(Model(), mesh))


def assigned_values_of_a_tie_differ() -> object:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    with pretended(2) as mesh:
        sharded = zf.shard_params(model, mesh)
        return sharded.load_state_dict({**model.state_dict(), "1.weight": torch.full((4, 4), 7.0)}, assign=True)


def assigned_value_is_of_a_subclass() -> object:
    model = nn.Sequential(nn.Linear(4, 4))
    with pretended(2) as mesh:
        sharded = zf.shard_params(model, mesh)
        weight = TwoTensor(torch.zeros(4, 4), torch.ones(4, 4))
        return sharded.load_state_dict({**model.state_dict(), "0.weight": weight}, assign=True)


def method_is_missing() -> object:
    return zf.gather_in(Model(), "encode")


class Streaming(Model):
    def stream(self, x: Tensor) -> Iterator[Tensor]:
        yield x @ self.head.weight.T


def method_is_a_generator() -> object:
    return zf.gather_in(Streaming(), "stream")


def module_cannot_be_copied() -> object:
    model = Model()
    model.layers[1].guard = threading.Lock()  # type: ignore[assignment]
    with pretended(2) as mesh:
        return zf.shard_params(model, mesh)


def module_was_donated() -> object:
    with pretended(2) as mesh:
        model = Model()
        zf.shard_params(model, mesh, donate=True)
        return model(batch())


def module_was_donated_and_is_transformed_again() -> object:
    with pretended(2) as mesh:
        model = Model()
        zf.shard_params(model, mesh, donate=True)
        return zf.shard_params(model, mesh)


def parameter_is_sharded_over_the_axis_already() -> object:
    with pretended(2) as mesh:
        return zf.shard_params(_placed(mesh, Shard(0)), mesh)


def parameter_is_partial() -> object:
    with pretended_grid(4, 2) as mesh:
        return zf.shard_params(_placed(mesh["tp"], Partial()), mesh["dp"])


# -- the wrong moment ------------------------------------------------------------------------------------------------


def describe_of_a_plain_module() -> object:
    return zf.describe(Model())


def check_of_a_plain_module() -> object:
    model = Model()
    return zf.check(model, torch.optim.SGD(model.parameters(), lr=0.1))


def plan_of_a_plain_module() -> object:
    return zf.plan(Model())


def refresh_of_a_plain_module() -> object:
    return zf.refresh(Model())


def materialize_of_a_plain_module() -> object:
    return zf.materialize(Model(), "cpu")


def accumulate_of_a_plain_module() -> object:
    with zf.accumulate(Model()):
        return None


def unsharded_of_a_plain_module() -> object:
    with zf.unsharded(Model()):
        return None


def transform_inside_accumulate() -> object:
    with alone() as mesh:
        model = zf.shard_grads(Model(), mesh)
        with zf.accumulate(model):
            return zf.shard_params(model, mesh)


def transform_inside_unsharded() -> object:
    with alone() as mesh:
        model = zf.shard_grads(Model(), mesh)
        with zf.unsharded(model.head):
            return zf.shard_params(model, mesh)


def unsharded_inside_unsharded() -> object:
    with alone() as mesh:
        model = zf.shard_params(Model(), mesh)
        with zf.unsharded(model), zf.unsharded(model.layers[0]):
            return None


def gradient_of_a_whole_parameter() -> object:
    with alone() as mesh:
        model = zf.shard_params(Model(), mesh)
        with zf.unsharded(model):
            return model.head.weight.sum().backward()


def trunk_of_a_transformed_model() -> object:
    with alone() as mesh:
        model = Model()
        actor = zf.shard_params(model, mesh)
        return actor, zf.shard_params(nn.Sequential(model.head, nn.Linear(3, 1)), mesh)


def closure_over_a_module() -> object:
    with alone() as mesh:
        model: Any = Model()
        model.head.register_forward_hook(lambda module, args, output: output + model.head.bias)
        return zf.shard_params(model, mesh)


def closure_over_a_parameter() -> object:
    model = Model()
    weight = model.head.weight
    model.activation = lambda x: x @ weight  # type: ignore[assignment]
    with alone() as mesh:
        return zf.shard_params(model, mesh)


def entry_of_another_rank() -> object:
    with alone() as mesh:
        model = zf.shard_params(Model(), mesh)
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        state_dict = torch.load(file, weights_only=True)
        for entry in state_dict.values():
            entry.device_mesh._coordinate_on_dim = (1,)  # as if rank 1 had written it
        return model.load_state_dict(state_dict)


class _Clipping(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1.0)
        return super().step(closure)


def streamed_optimizer_that_clips() -> object:
    return zf.streamed(_Clipping(Model().parameters(), lr=0.1), zf.cpu())


class _Sharing(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            self.state[p]["momentum"] = torch.zeros_like(p)
            self.state[p]["flat"] = self.state[p]["momentum"].view(-1)


def streamed_states_share_memory() -> object:
    return zf.streamed(_Sharing(Model().parameters(), lr=0.1), zf.cpu(), elementwise=True)


def parameters_share_memory() -> object:
    model = Model()
    model.layers[1].weight = nn.Parameter(model.layers[0].weight.detach().T)  # type: ignore[operator]
    with alone() as mesh:
        return zf.shard_params(model, mesh)


def buffer_in_the_memory_of_a_parameter() -> object:
    model = Model()
    model.register_buffer("first_row", model.layers[0].weight.detach()[0])  # type: ignore[operator]
    with alone() as mesh:
        return zf.shard_params(model, mesh)


def part_of_a_unit_is_taken_out() -> object:
    with alone() as mesh:
        model = zf.shard_params(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), mesh, units=[])
        model(batch())
        del model[0]
        return model(batch())


def unsharded_with_another_shape() -> object:
    with alone() as mesh:
        model = zf.shard_params(Model(), mesh)
        with zf.unsharded(model.head, writeback=True):
            model.head.weight = nn.Parameter(torch.zeros(5, 4))
        return None


def unshard_inside_accumulate() -> object:
    with alone() as mesh:
        model = zf.shard_params(Model(), mesh)
        with zf.accumulate(model), zf.accumulate(model, unshard=True):
            return None


def checkpoints_of_nothing() -> object:
    return zf.checkpoint_activations(nn.Linear(2, 2))


def step_inside_accumulate() -> object:
    with alone() as mesh:
        model = zf.shard_params(Model(), mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with zf.accumulate(model):
            model(batch()).sum().backward()
            return optimizer.step()


def gradient_read_inside_accumulate() -> object:
    with alone() as mesh:
        model = zf.shard_params(Model(), mesh)
        with zf.accumulate(model):
            model(batch()).sum().backward()
            return nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def gradient_of_the_rank_is_asked_for() -> object:
    with alone() as mesh:
        model = zf.shard_params(Model(), mesh)
        with zf.accumulate(model):
            model(batch()).sum().backward()
            return model.head.weight.grad.full_tensor()


def torch_func_of_resting_parameters() -> object:
    with alone() as mesh:
        model = zf.shard_params(Model(), mesh)
        values = {name: parameter.detach() for name, parameter in model.named_parameters()}
        return torch.func.grad(lambda values: torch.func.functional_call(model, values, (batch(),)).sum())(values)


def unit_in_a_selective_checkpoint() -> object:
    with alone() as mesh:
        model = zf.shard_params(Model(), mesh)
        contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
        return checkpoint(model, batch(), use_reentrant=False, context_fn=contexts)


def functional_call_unties() -> object:
    with alone() as mesh:
        model = Model()
        model.layers[1].weight = model.layers[0].weight
        values = {f"layers.{i}.weight": torch.zeros(4, 4) for i in range(2)}
        model = zf.shard_params(model, mesh)
        with zf.unsharded(model):
            return torch.func.functional_call(model, values, (batch(),), tie_weights=False)


def buffers_of_no_policy() -> object:
    with pretended(2) as mesh:
        return zf.shard_params(Model(), mesh, buffers="sync")  # type: ignore[arg-type]


def buffers_twice_with_other_policies() -> object:
    with pretended(2) as mesh:
        return zf.shard_grads(zf.shard_params(Model(), mesh, buffers="local"), mesh, buffers="broadcast")


def step_between_forward_and_backward() -> object:
    with alone() as mesh:
        model = zf.shard_params(Model(), mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        first, second = model(batch()).sum(), model(batch()).sum()
        first.backward()
        optimizer.step()
        return second.backward()


def gradients_are_vectorized() -> object:
    with alone() as mesh:
        model = zf.shard_params(Model(), mesh)
        outputs = model(batch()).flatten()[:2]
        return torch.autograd.grad(outputs, list(model.parameters()), torch.eye(2), is_grads_batched=True)


def meta_without_reset_parameters() -> object:
    with pretended(2) as mesh, torch.device("meta"):
        model = nn.Module()
        model.inner = nn.Module()
        model.inner.scale = nn.Parameter(torch.ones(4))
        return zf.materialize(zf.shard_params(model, mesh), "cpu")


class LeavesOut(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


def part_of_a_model_that_stays_on_meta() -> object:
    with pretended(2) as mesh:
        with torch.device("meta"):
            model: Any = zf.shard_params(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3)), mesh)
        model[1].to_empty(device="cpu")
        return model(batch())


def meta_that_nobody_wrote() -> object:
    with alone() as mesh:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 4), LeavesOut(4, 4))
        return zf.materialize(zf.shard_params(model, mesh), "cpu")


def forward_is_traced() -> object:
    with alone() as mesh:
        return torch.jit.trace(zf.shard_params(Model(), mesh), batch())  # type: ignore[no-untyped-call]


def forward_is_exported() -> object:
    with alone() as mesh:
        return torch.export.export(zf.shard_params(Model(), mesh), (batch(),))


def forward_is_pickled() -> object:
    with pretended(2) as mesh:
        return pickle.dumps(zf.shard_params(Model(), mesh).forward)


# -- stale objects ---------------------------------------------------------------------------------------------------


def check_optimizer_of_the_module_before() -> object:
    with pretended(2) as mesh:
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters())
        return zf.check(zf.shard_params(model, mesh), optimizer)


def check_optimizer_of_another_module() -> object:
    with pretended(2) as mesh:
        optimizer = torch.optim.AdamW(Model().parameters())
        return zf.check(zf.shard_params(Model(), mesh), optimizer)


def check_optimizer_that_lacks_parameters() -> object:
    with pretended(2) as mesh:
        model = zf.shard_params(Model(), mesh)
        return zf.check(model, torch.optim.AdamW(model.layers.parameters()))


def step_of_the_optimizer_before() -> object:
    with alone() as mesh:
        plain = Model()
        optimizer = torch.optim.AdamW(plain.parameters())
        model = zf.shard_params(plain, mesh)
        model(batch()).sum().backward()
        return optimizer.step()


def step_of_a_tie_that_a_transform_has_cut() -> object:
    with alone() as mesh:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
        model[1] = zf.shard_params(model[1], mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 4)).sum().backward()
        return optimizer.step()


# -- at rest ---------------------------------------------------------------------------------------------------------


def parameter_was_replaced() -> object:
    with alone() as mesh:
        model = zf.shard_params(Model(), mesh)
        model.head.weight = nn.Parameter(torch.zeros(3, 4))
        return model(batch())


def parameter_was_replaced_by_nothing() -> object:
    with alone() as mesh:
        model = zf.shard_params(Model(), mesh)
        model.head.register_parameter("bias", None)
        return zf.refresh(model)


def data_of_a_parameter_was_assigned() -> object:
    with alone() as mesh:
        model = zf.shard_params(Model(), mesh)
        model.head.weight.data = model.head.weight.data.double()
        return model


def data_of_a_parameter_in_a_tier_was_assigned() -> object:
    with alone() as mesh, tempfile.TemporaryDirectory() as folder:
        model = zf.offload(zf.shard_params(Model(), mesh), params=zf.nvme(folder))
        model.head.weight.data = model.head.weight.data * 2
        return model


class _Inverse(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight / 2


def parametrization_with_an_inverse_in_a_forward() -> object:
    with alone() as mesh:
        model = zf.shard_params(Model(), mesh)
        model.layers[0].register_forward_pre_hook(
            lambda module, args: parametrize.register_parametrization(module, "weight", _Inverse()) and None
        )
        return model(batch())


def parameter_is_pruned_after_the_transform() -> object:
    with alone() as mesh:
        return prune.l1_unstructured(zf.shard_params(Model(), mesh).head, "weight", 0.5)


def resting_parameters_are_shared() -> object:
    with alone() as mesh:
        return zf.shard_params(Model(), mesh).share_memory()


def module_is_wrapped_in_ddp() -> object:
    with alone() as mesh:
        return DistributedDataParallel(zf.shard_params(zf.shard_grads(Model(), mesh), mesh))


class Clamped(Model):
    """Changes a weight in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.head.weight.detach().clamp_(-0.01, 0.01)
        return super().forward(x)


def forward_changes_a_weight() -> object:
    with alone() as mesh:
        return zf.shard_params(Clamped(), mesh)(batch())


class Peeking(Model):
    """Reads a weight of the first layer outside the forward of its unit."""

    def __init__(self, *, gathers: bool) -> None:
        super().__init__()
        self.gathers = gathers

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.layers[0].weight
        return super().forward(x @ (weight.full_tensor() if self.gathers else weight).T)


def weight_is_asked_for_its_storage() -> object:
    with pretended(2) as mesh:
        return zf.shard_params(Model(), mesh).head.weight.storage()


def weight_is_made_whole_in_a_forward() -> object:
    with alone() as mesh:
        return zf.shard_params(Peeking(gathers=True), mesh)(batch())


def test_an_operation_that_torch_refuses_in_a_forward_has_a_note() -> None:
    with alone() as mesh, pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor") as caught:
        zf.shard_params(nn.Sequential(Peeking(gathers=False)), mesh)(batch())
    assert caught.value.__notes__ == [
        "A resting parameter was used outside the forward of its unit, where this rank holds only its shard.\n"
        "  inside : the forward of unit root\n"
        "  fix    : call the module that owns the weight, put both modules in one unit (units=), or read it inside "
        "`with zf.unsharded(module):`"
    ]


class CastingToParameters(nn.Module):
    """Casts its input to the dtype of its parameters, as `self.dtype` of transformers says it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.filter = nn.Linear(4, 4), nn.Conv1d(4, 4, 1)

    def forward(self, x: Tensor, *, filters: bool) -> Tensor:
        x = x.to(next(self.parameters()).dtype)
        output: Tensor = self.filter(x[..., None]) if filters else self.linear(x)
        return output


@pytest.mark.parametrize("filters", [False, True])
def test_two_dtypes_in_a_forward_have_a_note(filters: bool) -> None:
    """Where the forward computes in another dtype than the one at rest; else torch's words are all that can be said."""
    with alone() as mesh:
        for model, notes in (
            (zf.precision(zf.shard_params(CastingToParameters(), mesh), compute=torch.bfloat16), [_TWO_DTYPES]),
            (zf.shard_params(CastingToParameters().bfloat16(), mesh), []),
        ):
            model.linear.register_forward_pre_hook(lambda _, args: (args[0].float(),))  # a dtype too many for both
            model.filter.register_forward_pre_hook(lambda _, args: (args[0].float(),))
            with pytest.raises(RuntimeError) as caught:
                model(batch(), filters=filters)
            assert getattr(caught.value, "__notes__", []) == notes


_TWO_DTYPES = (
    "The forward computes in bfloat16 (zf.precision); parameters() gives what rests, in float32, here, too.\n"
    "  inside : the forward of unit root\n"
    "  fix    : cast to the dtype of a weight that is read under its name ('linear.weight'), as in "
    "x.to(self.linear.weight.dtype), and not to that of next(self.parameters())"
)


def parameter_is_late() -> None:
    with alone() as mesh:
        model = zf.shard_params(Model(), mesh)
        model.layers[0].adapter = nn.Linear(4, 2)
        model(batch())


class SparseInFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(6, 4))

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.embedding(tokens, self.table, sparse=True)


def gradient_is_sparse() -> object:
    with alone() as mesh:
        return zf.shard_params(SparseInFunction(), mesh)(torch.tensor([1, 2])).sum().backward()


def step_over_whole_tensors() -> object:
    with pretended(2) as mesh:
        model = zf.shard_params(Model(), mesh)
        return torch.optim.Adafactor(model.parameters()).step()


def step_of_bitsandbytes() -> object:
    kind = type("AdamW8bit", (torch.optim.AdamW,), {"__module__": "bitsandbytes.optim.adamw"})
    with pretended(2) as mesh:
        model = zf.replicate(Model(), mesh)
        return kind(model.parameters()).step()


def clip_over_a_plain_model_too() -> object:
    with alone() as mesh:
        models = zf.shard_params(Model(), mesh), Model()
        for model in models:
            model(batch()).sum().backward()
        return nn.utils.clip_grad_norm_([parameter for model in models for parameter in model.parameters()], 1.0)


def step_in_a_hook_of_a_node() -> object:
    with alone() as mesh:
        model = zf.shard_params(Model(), mesh)
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
        return model(batch()).sum().backward()


def step_after_a_cast() -> object:
    with alone() as mesh:
        model = zf.shard_params(Model(), mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(batch()).sum().backward()
        optimizer.step()
        model.double()
        return optimizer.step()


# -- loading ---------------------------------------------------------------------------------------------------------


def _loaded(**entries: Tensor) -> object:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    whole = {**model.state_dict(), **entries}
    with alone() as mesh:
        return zf.shard_params(model, mesh).load_state_dict(whole)


def entry_of_another_shape() -> object:
    return _loaded(**{"0.bias": torch.zeros(3)})


def entry_on_another_mesh() -> object:
    with alone() as mesh:
        model = zf.shard_params(Model(), mesh)
        other = init_device_mesh("cpu", (1, 1), mesh_dim_names=("pp", "dp"))
        bias = distribute_tensor(torch.zeros(3), other, [Replicate(), Replicate()])
        return model.load_state_dict({**model.state_dict(), "head.bias": bias})


def entry_sharded_of_a_buffer() -> object:
    with alone() as mesh:
        model = zf.shard_params(nn.BatchNorm1d(4), mesh)
        mean = distribute_tensor(torch.zeros(4), mesh, [Replicate()])
        return model.load_state_dict({**model.state_dict(), "running_mean": mean})


# -- launch ----------------------------------------------------------------------------------------------------------


def launch_no_rank() -> object:
    return zf.launch(print, 0)


def launch_no_thread() -> object:
    return zf.launch(print, 2, threads=0)


def launch_no_time() -> object:
    return zf.launch(print, 2, timeout_s=0)


def launch_says_which_rank_is_which() -> object:
    return zf.launch(print, 2, env={"RANK": "0"})


# -- tiers -----------------------------------------------------------------------------------------------------------


def stepped() -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 64)).sum().backward()
    return model, optimizer


def tier_of_no_size() -> object:
    return zf.nvme(".", limit="much")


def tier_of_host_memory_is_too_small() -> object:
    return zf.streamed(stepped()[1], zf.cpu(limit="16KiB"))


def tier_on_disk_is_too_small() -> object:
    return zf.streamed(stepped()[1], zf.nvme(".", limit="16KiB"))


def tier_buffer_is_too_small() -> object:
    return zf.streamed(stepped()[1], zf.nvme("."), buffer="4KiB")


def disk_has_no_such_path() -> object:
    return zf.streamed(stepped()[1], zf.nvme("/missing"))


def streamed_and_damaged(change: Callable[[Request, int], int]) -> zf.Streamed:
    """An optimizer whose second step meets requests with other answers."""
    optimizer = zf.streamed(stepped()[1], zf.nvme("."), buffer="16KiB")
    optimizer.step()
    for store in optimizer.states.stores.values():
        store.forget()  # the second step reads what the first one wrote
    with pytest.MonkeyPatch.context() as patch:
        answers(patch, change)
        optimizer.step()
    return optimizer


def disk_fails() -> object:
    return streamed_and_damaged(lambda _, result: -errno.EIO)


def disk_stops_short() -> object:
    return streamed_and_damaged(lambda _, result: 0)


def disk_gives_other_bytes() -> object:
    def flips(request: Request, result: int) -> int:
        byte = ctypes.c_uint8.from_address(request.address)
        byte.value = byte.value ^ 8
        return result

    return streamed_and_damaged(flips)


def disk_lost_a_write() -> object:
    disk = DiskStorage(zf.nvme("."), "states", Threads())
    memory = Slab(4096, zf.cpu(), "a test").memory
    disk.reserve([4096])
    disk.write(0, memory).wait()
    disk.write(0, memory.fill_(1)).wait()
    os.pwrite(disk.files[0].fd, (ctypes.c_char * 4096).from_address(memory.zero_().data_ptr()), 0)
    return disk.read(0, memory).wait()


def disk_takes_no_more_open_files() -> object:
    def fails(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zero_fn.storage.files._opened", fails)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(before[0], 1024), before[1]))
        try:
            return zf.streamed(stepped()[1], zf.nvme("/"))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)


def disk_takes_no_file_so_large() -> object:
    def fails(*_: object) -> None:
        raise OSError(errno.EFBIG, "File too large")

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "posix_fallocate", fails)
        resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 10, before[1]))
        try:
            return zf.streamed(stepped()[1], zf.nvme("."))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


def disk_cannot_reserve() -> object:
    def fails(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "posix_fallocate", fails)
        return zf.streamed(stepped()[1], zf.nvme("."))


def step_that_failed_on_another_rank() -> object:
    class Peer:
        pads = False

        def any(self, bits: Tensor, mark: int) -> Work:
            bits[1] = 1
            return Work()

    with alone() as mesh, pytest.MonkeyPatch.context() as patch:
        axis = dataclasses.replace(mesh_axis(mesh, verb="test"), size=2)
        patch.setattr("zero_fn.runtime.everywhere._meshes", lambda _: [mesh])
        patch.setattr("zero_fn.transport.agree.mesh_axis", lambda *_, **__: axis)
        patch.setattr("zero_fn.transport.links.open_transport", lambda _: Peer())
        return zf.streamed(stepped()[1], zf.cpu())


def streamed_gradient_is_sparse() -> object:
    model, inner = stepped()
    model.bias.grad = torch.ones(64).to_sparse()
    return zf.streamed(inner, zf.cpu()).step()


def streamed_gradient_rests_elsewhere() -> object:
    with alone() as mesh:
        model = zf.shard_params(nn.Linear(4, 4), mesh)
        optimizer = zf.streamed(torch.optim.AdamW(model.parameters()), zf.cpu())
        other = init_device_mesh("cpu", (1,), mesh_dim_names=("other",))
        model.weight.grad = distribute_tensor(torch.ones(4, 4), other, [Shard(0)])
        return optimizer.step()


def streamed_state_of_another_shape() -> object:
    saved = zf.streamed(torch.optim.Adagrad(nn.Linear(4, 3).parameters()), zf.cpu()).state_dict()
    saved["state"][0]["sum"] = torch.zeros(4)
    optimizer = zf.streamed(torch.optim.Adagrad(nn.Linear(4, 3).parameters()), zf.cpu())
    return optimizer.load_state_dict(saved)


def streamed_after_a_failed_step() -> object:
    optimizer = zf.streamed(stepped()[1], zf.nvme("."), buffer="16KiB")
    optimizer.step()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(StorageError):
        answers(patch, lambda request, result: -errno.EIO if request.is_write else result)
        optimizer.step()
    return optimizer.step()


def streamed_and_copied() -> object:
    return copy.deepcopy(zf.streamed(stepped()[1], zf.nvme(".")))


def streamed_parameter_was_cast() -> object:
    model, inner = stepped()
    optimizer = zf.streamed(inner, zf.nvme("."))
    model.double()
    return optimizer.step()


def streamed_lbfgs() -> object:
    return zf.streamed(torch.optim.LBFGS(nn.Linear(2, 2).parameters()), zf.cpu())


def streamed_matrix_is_cut() -> object:
    matrix = nn.Parameter(torch.ones(64, 128)[:, ::2])
    return zf.streamed(torch.optim.AdamW([matrix]), zf.nvme("."), buffer="8KiB")


def evicted_model_runs() -> object:
    model = nn.Linear(4, 4)
    zf.evict(model, to=zf.cpu())
    return model(batch())


def evicted_unit_runs() -> object:
    with alone() as mesh:
        model = zf.shard_params(Model(), mesh)
        evicted(model)
        return zf.describe(model)


def evicted_twice() -> object:
    model = nn.Linear(4, 4)
    zf.evict(model, to=zf.cpu())
    return zf.evict(model, to=zf.cpu())


def evicted_inside_unsharded() -> object:
    with alone() as mesh:
        model = zf.shard_params(Model(), mesh)
        with zf.unsharded(model):
            return zf.evict(model, to=zf.cpu())


def step_of_what_was_streamed() -> object:
    optimizer = torch.optim.AdamW(nn.Linear(4, 4).parameters())
    zf.streamed(optimizer, zf.cpu())
    return optimizer.step()  # type: ignore[func-returns-value]


def evicted_states_share_memory() -> object:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model.weight] = {"momentum": torch.zeros(4, 4), "other": torch.zeros(4, 4)}
    optimizer.state[model.weight]["other"] = optimizer.state[model.weight]["momentum"]
    return evicted(model, optimizer)


def evicted_to_a_disk() -> object:
    return zf.evict(nn.Linear(4, 4), to=zf.nvme("."))


def restored_twice() -> object:
    evicted = zf.evict(nn.Linear(4, 4), to=zf.cpu())
    evicted.restore()
    return evicted.restore()


# -- offload ---------------------------------------------------------------------------------------------------------


def offload_without_a_tier() -> None:
    zf.offload(Model())


def offload_of_no_fraction() -> None:
    zf.offload(Model(), optim=zf.nvme("/tmp"), fraction=0.0)


def offload_to_two_tiers() -> None:
    zf.offload(zf.offload(Model(), optim=zf.cpu()), optim=zf.nvme("/tmp"))


def step_that_is_not_streamed() -> None:
    model = zf.offload(Model(), params=zf.nvme("/tmp"))
    torch.optim.SGD(model.parameters()).step()


def view_of_a_tensor_in_a_tier() -> None:
    next(zf.offload(Model(), params=zf.nvme("/tmp")).parameters()).data.view(torch.int32)


def memory_of_a_tensor_in_a_tier_is_shared() -> None:
    torch.from_dlpack(next(zf.offload(Model(), params=zf.nvme("/tmp")).parameters()).detach())


def memory_of_a_tensor_in_a_tier_is_replaced() -> None:
    with torch.no_grad():
        next(zf.offload(Model(), params=zf.nvme("/tmp")).parameters()).set_(torch.zeros(3, 4))  # type: ignore[call-overload]


def values_in_a_tier_are_read_in_a_fork() -> None:
    model = zf.offload(Model(), params=zf.nvme("/tmp"))
    with mock.patch("os.getpid", return_value=-1):
        next(model.parameters()).sum()


def resting_parameter_is_drawn() -> None:
    with pretended(2) as mesh:
        nn.init.orthogonal_(zf.shard_params(nn.Linear(6, 4), mesh).weight)


def row_of_a_resting_parameter_is_written() -> None:
    with pretended(2) as mesh, torch.no_grad():
        zf.shard_params(nn.Linear(4, 4), mesh).weight[1:3].zero_()


def resting_parameter_is_read_at_positions() -> None:
    with pretended(2) as mesh:
        zf.shard_params(nn.Linear(4, 4), mesh).weight[[1, 3]]


def plain_data_was_assigned_a_resting_tensor() -> None:
    with pretended(2) as mesh:
        nn.Parameter(torch.empty(4, 4)).data = zf.shard_params(nn.Linear(4, 4), mesh).weight.data


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


def gradient_of_a_plain_loss_in_shards() -> None:
    with pretended(2) as mesh:
        model = zf.shard_params(Shifted(), mesh)
        model(torch.ones(2, 4)).sum().backward(model.bias.detach().sum())


def streamed_without_a_tier() -> None:
    zf.streamed(torch.optim.AdamW(Model().parameters()))


def streamed_of_no_fraction() -> None:
    zf.streamed(torch.optim.AdamW(Model().parameters()), zf.cpu(), fraction=2.0)


def streamed_in_too_small_a_buffer() -> None:
    model = zf.offload(Model(), params=zf.nvme("/tmp"))
    zf.streamed(torch.optim.AdamW(model.parameters()), zf.cpu(), buffer=64)


def streamed_optimizer_of_whole_matrices() -> None:
    zf.streamed(torch.optim.Muon(nn.Linear(4, 4, bias=False).parameters()), zf.cpu(), elementwise=True)


def planned_with_two_optimizers() -> object:
    with pretended(2) as axis:
        model = zf.zero1(Model(), axis)
        return zf.plan(model, torch.optim.AdamW(model.parameters()), optimizer_nbytes_per_element=4)


def tier_of_one_path_twice() -> object:
    return zf.nvme("/disk0", "/disk1", "/disk0")


# -- tiles -----------------------------------------------------------------------------------------------------------


def tiled_after_a_transform() -> object:
    with pretended(4) as axis:
        return zf.tile(zf.shard_params(Model(), axis), where="head.*", parts=2)


def tiled_in_too_many_parts() -> object:
    return zf.tile(Model(), where="head.*", parts=4)


def tiled_norm() -> object:
    return zf.tile(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), where="*", parts=2)


def tiled_weight_is_tied() -> object:
    model = Model()
    model.layers[1].weight = model.layers[0].weight
    return zf.tile(model, where="layers.0.weight", parts=2)


def tiled_weight_is_on_a_mesh() -> object:
    with pretended(2) as axis:
        model = Model()
        model.head.weight = nn.Parameter(distribute_tensor(model.head.weight.detach(), axis, [Replicate()]))
        return zf.tile(model, where="head.weight", parts=2)


def tiled_parameter_has_hooks() -> object:
    model = Model()
    model.head.weight.register_hook(lambda grad: grad)
    return zf.tile(model, where="head.*", parts=2)


def tiled_state_dict_has_hooks() -> object:
    model = Model()
    model.head.register_load_state_dict_post_hook(lambda *_: None)
    return zf.tile(model, where="head.*", parts=2)


def tiled_forward_is_its_own() -> object:
    model = Model()
    model.head.forward = abs  # type: ignore[assignment]
    return zf.tile(model, where="head.*", parts=2)


def tiled_embedding_has_a_norm() -> object:
    return zf.tile(nn.Embedding(8, 4, max_norm=1.0), where="weight", parts=2)


def tiled_output_is_cut() -> object:
    model = zf.tile(Model(), where="layers.0.*", parts=2)
    model.layers[0].tiles[1].register_forward_hook(lambda module, args, output: output[..., :1])  # type: ignore[index]
    return model(batch())


def untiled_of_shards() -> object:
    with pretended(2) as axis:
        model = zf.shard_params(zf.tile(Model(), where="head.*", parts=2), axis)
        return zf.untiled(model, model.state_dict())


def untiled_of_some_parts() -> object:
    model = zf.tile(Model(), where="head.*", parts=2)
    return zf.untiled(model, {"head.tiles.1.weight": torch.zeros(1, 4)})


class Unknown(torch.optim.AdamW):
    pass


def step_of_another_class_with_narrow_gradients() -> None:
    model = zf.precision(Model(), grads=torch.bfloat16)
    optimizer = Unknown(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def streamed_optimizer_cannot_wait() -> None:
    with tempfile.TemporaryDirectory() as folder:
        zf.streamed(Unknown(nn.Linear(2, 2).parameters()), zf.nvme(folder), finish="forward")


def forward_goes_on_after_an_interrupt() -> None:
    class Catching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.bias = nn.Linear(2, 2), nn.Parameter(torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            with contextlib.suppress(KeyboardInterrupt):
                self.block(x)
            return self.block(x)

    def interrupt(_: object) -> Tensor:
        raise KeyboardInterrupt

    with alone() as mesh:
        model = zf.shard_params(Catching(), mesh, units=nn.Linear)
        with mock.patch.object(model.block, "forward", interrupt):
            model(torch.ones(1, 2))


def forward_in_two_threads() -> None:
    found: list[StateError] = []

    def other() -> None:
        try:
            model(torch.ones(1, 2))
        except StateError as error:
            found.append(error)

    def meanwhile(*_: object) -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    with alone() as mesh:
        model = zf.shard_params(nn.Linear(2, 2), mesh)
        model.register_forward_pre_hook(meanwhile)
        model(torch.ones(1, 2))
    raise found[0]


def step_that_waits_is_interrupted() -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        disk = zf.nvme(folder)
        model = zf.offload(nn.Linear(2, 2), params=disk, grads=disk, optim=disk)
        optimizer = zf.streamed(torch.optim.AdamW(model.parameters()), finish="forward")
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        patch.setattr(importlib.import_module("zero_fn.streamed.stepping"), "steps_in_one_pass", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(2))
        optimizer.step()


def streamed_until_no_moment() -> None:
    zf.streamed(torch.optim.AdamW(nn.Linear(2, 2).parameters()), zf.cpu(), finish="backward")  # type: ignore[arg-type]


# -- configs of DeepSpeed ----------------------------------------------------------------------------------------------


def from_config(**entries: object) -> None:
    with alone() as mesh:
        zf.from_deepspeed(nn.Linear(2, 2), {"train_batch_size": 2, **entries}, mesh["dp"])


def from_file(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("ds_config.json").write_text(text)
        config_of("ds_config.json")


def config_of_no_kind() -> None:
    config_of(7)  # type: ignore[arg-type]


def config_is_nowhere() -> None:
    config_of("nowhere/ds_config.json")


def config_has_a_comment() -> None:
    from_file('{"bf16": {"enabled": true}} // on')


def config_is_a_list() -> None:
    from_file("[1, 2]")


def config_says_something_twice() -> None:
    from_file('{"bf16": {"enabled": true, "enabled": false}}')


def config_has_no_number() -> None:
    from_file('{"gradient_clipping": NaN}')


def config_is_misspelt() -> None:
    from_config(gradient_cliping=1.0)


def config_has_text_for_a_number() -> None:
    from_config(gradient_clipping="1.0")


def config_waits_for_the_trainer() -> None:
    from_config(optimizer={"type": "AdamW", "params": {"lr": "auto"}})


def config_has_no_auto_where_one_is_filled_in() -> None:
    with alone() as mesh:
        config = {"train_batch_size": 2, "gradient_clipping": 0.5}
        zf.from_deepspeed(nn.Linear(2, 2), config, mesh["dp"], auto={"gradient_clipping": 1.0})


def config_says_otherwise_than_what_is_placed() -> None:
    with alone() as mesh:
        model = zf.zero1(nn.Linear(2, 2), mesh["dp"])
        config = {"train_batch_size": 2, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
        zf.from_deepspeed(model, config, mesh["dp"], optimizer=lambda model: torch.optim.SGD(model.parameters()))


def config_has_another_mesh_than_what_is_placed() -> None:
    with pretended_grid(2, 2) as mesh:
        require_placed(settings_of({"train_batch_size": 2}, 2), mesh["tp"], zf.zero1(nn.Linear(2, 2), mesh["dp"]))


def config_is_wrong_in_many_ways() -> None:
    from_config(
        gradient_cliping=1.0,
        gradient_clipping="1.0",
        zero_optimization={"stage": 3, "zero_quantized_weights": True, "prefetch_bucket_size": "many"},
        optimizer={"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        train_micro_batch_size_per_gpu=4,
    )


def config_has_a_name_twice() -> None:
    from_config(zero_optimization={"max_live_parameters": 1e9, "stage3_max_live_parameters": 1e9})


def config_wants_quantized_messages() -> None:
    from_config(zero_optimization={"stage": 3, "zero_quantized_weights": True})


def config_wants_a_log() -> None:
    from_config(tensorboard={"enabled": True})


def config_of_contradicting_batches() -> None:
    from_config(train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=2)


def config_of_two_dtypes() -> None:
    from_config(bf16={"enabled": True}, fp16={"enabled": True})


def config_offloads_replicas() -> None:
    from_config(zero_optimization={"stage": 0, "offload_optimizer": {"device": "cpu"}})


def config_offloads_parameters_at_stage_2() -> None:
    from_config(zero_optimization={"stage": 2, "offload_param": {"device": "cpu"}})


def config_of_a_negative_rate() -> None:
    from_config(optimizer={"type": "AdamW", "params": {"lr": -0.1}})


def config_without_an_optimizer() -> None:
    from_config()


def config_beside_an_optimizer_of_before() -> None:
    with alone() as mesh:
        model = nn.Linear(2, 2)
        made: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        zf.from_deepspeed(model, {"train_batch_size": 2}, mesh["dp"], optimizer=made)


def config_sends_what_is_not_computed() -> None:
    from_config(communication_data_type="bf16", optimizer={"type": "AdamW"})


def config_of_second_shards_on_one_axis() -> None:
    config = {"train_batch_size": 1, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}
    with pretended(4) as mesh:
        _sharded(nn.Linear(2, 2), settings_of(config, 1).sharding, mesh, None, donate=False)


def scale_of_the_loss_is_at_its_least() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    scaler = Scaler("cpu", first=1.0, window=1000, hysteresis=1, is_refilled=False, least=1.0)
    (scaler.scale(optimizer.param_groups[0]["params"][0].sum()) * torch.inf).backward()
    scaler.step(optimizer)
    scaler.update()


# -- checkpoints -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def a_folder() -> Iterator[Path]:
    """One whose name messages do not show."""
    with tempfile.TemporaryDirectory(prefix="zero_fn_") as folder:
        yield Path(folder)


def saved_and_changed(act: Callable[[Path], object]) -> object:
    """Saves a small model, changes the checkpoint, and loads it."""
    with a_folder() as folder:
        zf.save(folder / "step-1", nn.Linear(2, 2), extra={"x": 1})
        act(folder / "step-1")
        return zf.load(folder / "step-1", nn.Linear(2, 2))


def forged(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes JSON of a checkpoint, with a digest that is right."""
    body = json.loads(path.read_text())["body"]
    change(body)
    path.write_bytes(files._signed(json.dumps(body)))


def cuda_of_one_queue() -> object:
    with mock.patch.dict(os.environ, CUDA_DEVICE_MAX_CONNECTIONS="1"), pretended(2, device_type="cuda") as mesh:
        return zf.zero3(nn.Linear(2, 2, device="meta"), mesh)


def guard_of_no_time() -> object:
    with zf.guard(deadline_s=0):
        return None


def guard_that_compares() -> object:
    with zf.guard(compare=True):  # type: ignore[arg-type]
        return None


def checkpoint_is_nowhere() -> object:
    with a_folder() as folder:
        return zf.load(folder, nn.Linear(2, 2))


def checkpoint_is_damaged() -> object:
    def flip(path: Path) -> None:
        whole = bytearray((path / "model" / "00000-0.safetensors").read_bytes())
        whole[-1] ^= 1
        (path / "model" / "00000-0.safetensors").write_bytes(bytes(whole))

    return saved_and_changed(flip)


def checkpoint_is_of_a_later_version() -> object:
    return saved_and_changed(lambda path: forged(path / "manifest.json", lambda body: body.update(version=99)))


def checkpoint_does_not_fit() -> object:
    with a_folder() as folder:
        zf.save(folder / "step-1", nn.Linear(2, 2))
        return zf.load(folder, nn.Linear(3, 2, bias=False, dtype=torch.bfloat16))


def pretrained_of_another_kind() -> object:
    with a_folder() as folder:
        torch.save({}, folder / "pytorch_model.bin")
        return zf.load_pretrained(nn.Linear(2, 2), folder)


def pretrained_is_there_already() -> object:
    with a_folder() as folder:
        zf.save_pretrained(nn.Linear(2, 2), folder)
        return zf.save_pretrained(nn.Linear(2, 2), folder)


def pretrained_is_quantised() -> object:
    model = nn.Linear(2, 2)
    model.__dict__["is_quantized"] = True
    with a_folder() as folder:
        return zf.save_pretrained(model, folder)


def subclass_says_not_what_it_is_made_of() -> object:
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(model.weight.detach().as_subclass(Opaque), requires_grad=False)
    return zf.flatten_subclasses(model)


def pretrained_with_adapters() -> object:
    model = nn.Linear(2, 2)
    model.__dict__["peft_config"] = {}
    with a_folder() as folder:
        return zf.save_pretrained(model, folder)


def pretrained_of_two_stages() -> object:
    said = Agreed("", 0, 1, False)
    with a_folder() as folder, mock.patch.object(Together, "agree", return_value=said):
        return zf.save_pretrained(nn.Linear(2, 2), folder)


def pretrained_onto_meta() -> object:
    return zf.load_pretrained(nn.Linear(2, 2, device="meta"), "folder")


def checkpoint_of_two_values_for_a_tie() -> object:
    apart, tied = (nn.ModuleDict({"a": nn.Linear(2, 2, False), "b": nn.Linear(2, 2, False)}) for _ in range(2))
    tied["b"].weight = tied["a"].weight
    with a_folder() as folder:
        zf.save(folder / "step-1", apart)
        return zf.load(folder, tied)


def deepspeed_folder(change: Callable[[dict[str, Any]], object], *, also: str | None = None) -> object:
    """Loads files as DeepSpeed names them, with what a test changes in those of the optimizer."""
    said: dict[str, Any] = {
        "module": {}, "buffer_names": [], "param_shapes": [], "shared_params": {}, "optimizer_state_dict": {
            "partition_count": 1, "single_partition_of_fp32_groups": [],
            "base_optimizer_state": {"state": {}, "param_groups": []},
        },
    }  # fmt: skip
    change(said["optimizer_state_dict"])
    with a_folder() as folder:
        for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt", also):
            if name is not None:
                torch.save(said, folder / name)
        model = nn.Linear(2, 2)
        return zf.load(folder, model, torch.optim.SGD(model.parameters()))


def deepspeed_without_correction_of_bias() -> object:
    def change(said: dict[str, Any]) -> None:
        said["base_optimizer_state"]["param_groups"].append({"lr": 0.1, "bias_correction": False, "params": []})

    return deepspeed_folder(change)


def deepspeed_with_elastic_states() -> object:
    return deepspeed_folder(lambda said: said.update(base_optimizer_state=[]))


def deepspeed_with_tensor_parallelism() -> object:
    return deepspeed_folder(lambda _: None, also="mp_rank_01_model_states.pt")


def deepspeed_with_other_objects() -> object:
    return deepspeed_folder(lambda said: said.update(clip_grad=nn.Linear(1, 1)))


def checkpoint_of_torch_with_extensions() -> object:
    model = nn.Linear(2, 2)
    with a_folder() as folder:
        dcp.save(model.state_dict(), checkpoint_id=folder / "a", no_dist=True)
        metadata = pickle.loads((folder / "a" / ".metadata").read_bytes())
        for info in metadata.storage_data.values():
            info.transform_descriptors = ["stream.zstd"]
        (folder / "a" / ".metadata").write_bytes(pickle.dumps(metadata))
        return zf.load(folder / "a", model)


def conversion_of_what_ranks_have_saved_apart() -> object:
    with a_folder() as folder:
        zf.save(folder / "step-1", nn.Linear(2, 2), extra={"noise": 1})
        source = opened(folder / "step-1", lambda name: name)
        with mock.patch.object(Catalog, "is_parted", return_value=True):
            return convert(source, folder / "b", "dcp", dtype=None, only=("model", "extra"), tell=print)


def checkpoints_of_two_kinds() -> object:
    with a_folder() as folder:
        zf.save(folder / "step-1", nn.Linear(2, 2))
        torch.save({}, folder / "mp_rank_00_model_states.pt")
        return zf.load(folder, nn.Linear(2, 2))


def checkpoint_of_two_tensors_of_one_name() -> object:
    def twice(path: Path) -> None:
        def add(body: dict[str, Any]) -> None:
            file = body["files"]["model"][0]
            other = {**file["tensors"]["bias"], "shape": [3], "sizes": [3], "offset": 0}
            body["files"]["model"].append({**file, "nbytes": file["begin"] + 12, "tensors": {"bias": other}})

        forged(path / "rank-00000.json", add)

    return saved_and_changed(twice)


def checkpoint_is_there_already() -> object:
    with a_folder() as folder:
        zf.save(folder / "step-1", nn.Linear(2, 2))
        return zf.save(folder / "step-1", nn.Linear(2, 2))


def checkpoint_is_being_saved() -> object:
    with a_folder() as folder:
        (folder / ".step-1.saving").mkdir()
        lock = os.open(folder / ".step-1.saving", os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            return zf.save(folder / "step-1", nn.Linear(2, 2))
        finally:
            os.close(lock)


def checkpoint_without_a_name() -> object:
    with a_folder() as folder:
        return zf.save(folder / ".step-1", nn.Linear(2, 2))


def checkpoint_of_no_place() -> object:
    with a_folder() as folder:
        return zf.load(folder / "runs")


def checkpoint_keeps_none() -> object:
    with a_folder() as folder:
        return zf.save(folder / "step-1", keep=0)


def checkpoint_of_what_has_no_form() -> object:
    with a_folder() as folder:
        return zf.save(folder / "step-1", extra={"state": [{"noise": print}]})


def checkpoint_of_an_odd_dtype() -> object:
    with a_folder() as folder:
        return zf.save(folder / "step-1", extra={"z": torch.zeros(2, dtype=torch.complex128)})


def checkpoint_of_meta() -> object:
    with a_folder() as folder:
        return zf.save(folder / "step-1", nn.Linear(2, 2, device="meta"))


def checkpoint_of_another_optimizer() -> object:
    with a_folder() as folder:
        return zf.save(folder / "step-1", nn.Linear(2, 2), torch.optim.SGD(nn.Linear(2, 2).parameters()))


def checkpoint_of_a_state_of_its_own() -> object:
    class Counting(nn.Linear):
        def get_extra_state(self) -> int:
            return 1

    with a_folder() as folder:
        return zf.save(folder / "step-1", Counting(2, 2))


def checkpoint_of_a_partial_value() -> object:
    with pretended(2) as mesh, a_folder() as folder:
        model = nn.Linear(2, 2)
        model.weight = nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh, [Partial()]))
        return zf.save(folder / "step-1", model)


def checkpoint_of_a_state_in_parts() -> object:
    with pretended(2) as mesh, a_folder() as folder:
        model = zf.shard_params(nn.Linear(4, 4), mesh)
        optimizer = torch.optim.SGD(model.parameters())
        optimizer.state[model.weight] = {"rows": torch.zeros(3)}
        return zf.save(folder / "step-1", model, optimizer)


def checkpoint_loads_nothing() -> object:
    return zf.load("runs", only="weights")


def checkpoint_of_a_late_state() -> object:
    with alone() as mesh, a_folder() as folder:
        model = zf.shard_params(nn.Linear(4, 4), mesh)
        optimizer = zf.streamed(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), zf.cpu())
        model(batch()).sum().backward()
        optimizer.step()
        optimizer.states.chunks[0].cuts[0].resident["late"] = torch.zeros(4, 4)
        return zf.save(folder / "step-1", model, optimizer)


def checkpoint_of_states_in_another_order() -> object:
    with alone() as mesh, a_folder() as folder:
        model = zf.shard_params(nn.Sequential(nn.Conv2d(64, 64, 3)).to(memory_format=torch.channels_last), mesh)  # type: ignore[call-overload]
        optimizer = zf.streamed(torch.optim.Adam(model.parameters()), zf.cpu(), buffer="64KiB")
        model(torch.ones(1, 64, 3, 3)).sum().backward()
        optimizer.step()
        return zf.save(folder / "step-1", model, optimizer)


def checkpoint_of_ranks_that_differ() -> object:
    with pretended(2), a_folder() as folder:

        def other(_group: object, message: Tensor, _seconds: float) -> Tensor:
            rows = message.repeat(2, 1)
            rows[1, 1:17] ^= 1
            return rows

        with mock.patch("zero_fn.checkpoint.together.gather", other):
            return zf.save(folder / "step-1", nn.Linear(2, 2))


def checkpoint_failed_on_another_rank() -> object:
    with pretended(3), a_folder() as folder:

        def other(_group: object, message: Tensor, _seconds: float) -> Tensor:
            rows = message.repeat(3, 1)
            text = b"1\nStorageError\nWriting head.weight failed.\n  path : runs/a\n  why  : ENOSPC: No space left on device"
            for rank, said in ((1, text), (2, b"2\nStorageError\nnot told: rank 1 is the first that failed")):
                rows[rank, 0] = 1
                rows[rank, 1 : 1 + len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
            return rows

        with mock.patch("zero_fn.checkpoint.together.gather", other):
            return zf.save(folder / "step-1", nn.Linear(2, 2))


def checkpoint_lost_a_rank() -> object:
    def refuse(*_: object, **__: object) -> object:
        raise RuntimeError("Connection closed by peer")

    with pretended(2), a_folder() as folder, mock.patch.object(dist.ProcessGroup, "recv", refuse):
        return zf.save(folder / "step-1", nn.Linear(2, 2))


CASES: dict[type[ZeroError], tuple[Callable[[], object], ...]] = {
    MeshError: (
        config_of_second_shards_on_one_axis, config_has_another_mesh_than_what_is_placed,
        mesh_is_no_mesh, mesh_has_two_axes, mesh_has_two_axes_without_names, mesh_without_this_rank,
        axes_share_ranks, axes_are_of_two_meshes, axes_are_three, mesh_is_on_meta, materialize_beside_the_mesh,
        hybrid_over_an_axis_that_is_missing, axis_is_that_of_tensor_parallelism, mesh_is_not_that_of_tensor_parallelism,
        planned_axis_was_not_measured,
    ),
    UnitError: (
        checkpoints_of_nothing,
        units_class_matches_nothing, units_pattern_matches_nothing, units_are_no_rule, units_of_no_size,
        units_differ_between_transforms, tiled_weight_is_tied,
    ),
    LayoutError: (
        guard_of_no_time, guard_that_compares, cuda_of_one_queue,
        closure_over_a_module,
        streamed_until_no_moment, checkpoint_loads_nothing, evicted_to_a_disk,
        offload_without_a_tier, offload_of_no_fraction, offload_to_two_tiers,
        where_pattern_matches_nothing, where_predicate_matches_nothing, persist_below_nothing,
        reshard_after_no_moment, precision_of_integers, precision_output_is_no_dtype, precision_with_wider_gradients,
        precision_twice_with_other_dtypes, precision_twice_with_other_sums, precision_twice_with_other_outputs,
        parameter_is_lazy, method_is_missing, method_is_a_generator, module_cannot_be_copied, module_is_scripted,
        launch_no_rank,
        launch_no_thread, launch_no_time, launch_says_which_rank_is_which, buffers_of_no_policy,
        buffers_twice_with_other_policies,
        tiled_in_too_many_parts, tiled_norm, tiled_parameter_has_hooks, tiled_state_dict_has_hooks,
        tiled_forward_is_its_own,
    ),
    PlacementError: (
        parameter_is_of_a_subclass, subclass_is_trained, subclass_says_not_what_it_is_made_of, product_of_another_shape,
        evicted_states_share_memory, streamed_optimizer_cannot_wait,
        parameters_share_memory, buffer_in_the_memory_of_a_parameter, part_of_a_unit_is_taken_out,
        trunk_of_a_transformed_model, closure_over_a_parameter, streamed_optimizer_that_clips,
        tiled_weight_is_on_a_mesh, tiled_embedding_has_a_norm, tiled_output_is_cut,
                streamed_optimizer_of_whole_matrices, streamed_states_share_memory,
        embedding_is_sparse, gradient_is_sparse, parameter_is_sharded_over_the_axis_already, parameter_is_partial,
        parameter_was_replaced, data_of_a_parameter_was_assigned,
        data_of_a_parameter_in_a_tier_was_assigned, parameter_is_pruned_after_the_transform,
                forward_changes_a_weight,
        parameter_was_replaced_by_nothing, parameter_is_late, clip_over_a_plain_model_too, step_over_whole_tensors,
        step_of_bitsandbytes, plain_data_was_assigned_a_resting_tensor,
        functional_call_unties, streamed_lbfgs, streamed_matrix_is_cut,
        streamed_gradient_is_sparse, streamed_gradient_rests_elsewhere,
    ),
    CheckpointError: (
        deepspeed_without_correction_of_bias, deepspeed_with_elastic_states, deepspeed_with_tensor_parallelism,
        deepspeed_with_other_objects, checkpoints_of_two_kinds, checkpoint_of_torch_with_extensions,
        conversion_of_what_ranks_have_saved_apart,
        assigned_values_of_a_tie_differ, assigned_value_is_of_a_subclass,
        untiled_of_shards, untiled_of_some_parts,
        streamed_state_of_another_shape,
        entry_of_another_rank,
        entry_of_another_shape, entry_on_another_mesh, entry_sharded_of_a_buffer,
        checkpoint_is_nowhere, checkpoint_is_damaged, checkpoint_is_of_a_later_version, checkpoint_does_not_fit,
        checkpoint_of_two_values_for_a_tie, pretrained_of_another_kind, pretrained_onto_meta,
        pretrained_is_there_already, pretrained_of_two_stages, pretrained_with_adapters, pretrained_is_quantised,
        checkpoint_of_two_tensors_of_one_name, checkpoint_is_there_already, checkpoint_is_being_saved,
        checkpoint_without_a_name, checkpoint_keeps_none, checkpoint_of_what_has_no_form, checkpoint_of_an_odd_dtype,
        checkpoint_of_meta, checkpoint_of_another_optimizer, checkpoint_of_a_state_of_its_own,
        checkpoint_of_a_partial_value, checkpoint_of_a_state_in_parts, checkpoint_of_a_late_state,
        checkpoint_of_states_in_another_order,
    ),
    ConfigError: (
        config_of_no_kind, config_is_nowhere, config_has_a_comment, config_is_a_list, config_says_something_twice,
        config_has_no_number, config_is_misspelt, config_has_text_for_a_number, config_waits_for_the_trainer,
        config_has_no_auto_where_one_is_filled_in, config_says_otherwise_than_what_is_placed,
        config_is_wrong_in_many_ways, config_has_a_name_twice,
        config_wants_quantized_messages, config_wants_a_log, config_of_contradicting_batches, config_of_two_dtypes,
        config_offloads_replicas, config_offloads_parameters_at_stage_2, config_of_a_negative_rate,
        config_without_an_optimizer, config_beside_an_optimizer_of_before, config_sends_what_is_not_computed,
    ),
    StateError: (
        parametrization_with_an_inverse_in_a_forward,
        scale_of_the_loss_is_at_its_least, step_that_waits_is_interrupted,
        forward_goes_on_after_an_interrupt, forward_in_two_threads,
        module_is_wrapped_in_ddp,
        flattened_after_a_transform, tiled_after_a_transform, planned_with_two_optimizers,
        step_that_is_not_streamed, view_of_a_tensor_in_a_tier, memory_of_a_tensor_in_a_tier_is_shared,
        memory_of_a_tensor_in_a_tier_is_replaced,
                module_was_donated, module_was_donated_and_is_transformed_again, describe_of_a_plain_module,
        check_of_a_plain_module, plan_of_a_plain_module, refresh_of_a_plain_module, materialize_of_a_plain_module,
        accumulate_of_a_plain_module, unsharded_of_a_plain_module, transform_inside_accumulate,
        transform_inside_unsharded, unsharded_inside_unsharded, unsharded_with_another_shape, step_inside_accumulate,
        gradient_of_a_whole_parameter,
        unshard_inside_accumulate,
        gradient_read_inside_accumulate, gradient_of_the_rank_is_asked_for, torch_func_of_resting_parameters,
        unit_in_a_selective_checkpoint,
        step_between_forward_and_backward, step_after_a_cast, step_in_a_hook_of_a_node, meta_without_reset_parameters,
        meta_that_nobody_wrote, part_of_a_model_that_stays_on_meta, forward_is_pickled,
        forward_is_traced, forward_is_exported, gradients_are_vectorized,
        step_of_what_was_streamed, step_of_another_class_with_narrow_gradients,
        streamed_after_a_failed_step, streamed_and_copied, streamed_parameter_was_cast, evicted_model_runs,
        evicted_unit_runs, evicted_twice, evicted_inside_unsharded, restored_twice, planned_module_is_transformed,
    ),
    TierError: (
        tier_of_one_path_twice, streamed_without_a_tier, streamed_of_no_fraction, streamed_in_too_small_a_buffer,
        tier_of_no_size, tier_of_host_memory_is_too_small, tier_on_disk_is_too_small, tier_buffer_is_too_small,
        disk_takes_no_file_so_large,
        planned_disk_was_not_measured, planned_accelerator_was_not_measured, planned_host_is_the_device,
        planned_disks_are_two, nothing_fits_the_budget,
    ),
    StorageError: (
        values_in_a_tier_are_read_in_a_fork,
        disk_has_no_such_path, disk_takes_no_more_open_files, disk_cannot_reserve, step_that_failed_on_another_rank,
        disk_fails, disk_stops_short, disk_gives_other_bytes, disk_lost_a_write,
        checkpoint_of_no_place, checkpoint_failed_on_another_rank,
    ),
    DisagreementError: (checkpoint_of_ranks_that_differ,),
    LostRankError: (checkpoint_lost_a_rank,),
    ShardedAccessError: (
        weight_is_asked_for_its_storage, weight_is_made_whole_in_a_forward, resting_parameters_are_shared,
        resting_parameter_is_drawn, row_of_a_resting_parameter_is_written, resting_parameter_is_read_at_positions,
        gradient_of_a_plain_loss_in_shards,
    ),
    StaleError: (
        check_optimizer_of_the_module_before, check_optimizer_of_another_module,
        check_optimizer_that_lacks_parameters, step_of_the_optimizer_before,
        step_of_a_tie_that_a_transform_has_cut,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "mistake"),
    [pytest.param(kind, mistake, id=mistake.__name__) for kind, mistakes in CASES.items() for mistake in mistakes],
)
def test_message_is_the_snapshot(kind: type[ZeroError], mistake: Callable[[], object]) -> None:
    with pytest.raises(kind) as caught:
        mistake()
    assert type(caught.value) is kind
    assert_says(mistake.__name__, caught.value)


def test_a_transformed_module_refuses_pickle_with_advice() -> None:
    with pretended(2) as mesh:
        model = zf.shard_params(Model(), mesh)
        with pytest.raises(StateError, match="cannot be pickled"):
            pickle.dumps(model)


# -- errors that need ranks ------------------------------------------------------------------------------------------


def layouts_differ() -> None:
    width = 4 + dist.get_rank()
    zf.shard_params(nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2)), axis())(torch.ones(1, 4))


def initial_values_differ() -> None:
    torch.manual_seed(dist.get_rank())
    zf.shard_params(nn.Linear(4, 4), axis())(torch.ones(1, 4))


def buffers_differ() -> None:
    model = nn.Linear(4, 4)
    model.register_buffer("table", torch.zeros(2 + dist.get_rank()))
    zf.shard_params(model, axis())(torch.ones(1, 4))


def edits_differ() -> None:
    model = zf.shard_params(nn.Linear(4, 4), axis())
    with zf.unsharded(model, writeback=True), torch.no_grad():
        model.bias.fill_(float(dist.get_rank()))


DISAGREEMENTS = (layouts_differ, initial_values_differ, buffers_differ, edits_differ)


@pytest.mark.parametrize("mistake", DISAGREEMENTS, ids=lambda m: m.__name__)
def test_disagreement_of_ranks_is_the_snapshot(ranks: Ranks, mistake: Callable[[], None]) -> None:
    def messages() -> DisagreementError:
        try:
            mistake()
        except DisagreementError as error:
            return error
        raise AssertionError("nothing was raised")

    first, second = ranks(2).run(messages)
    assert str(first) == str(second)
    text = re.sub(r"sum of bits -?\d+", "sum of bits N", str(first))
    assert_matches(SNAPSHOTS / f"{mistake.__name__}.txt", f"DisagreementError: {text}")


# -- the whole set ---------------------------------------------------------------------------------------------------


def summaries_in(source: str) -> list[str]:
    """The first argument of every error a source raises, as a regular expression."""
    kinds = {name for name in dir(zf) if name.endswith("Error")}
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in kinds and node.args:
            summary = node.args[0]
            if isinstance(summary, ast.Constant):
                found.append(re.escape(str(summary.value)))
            elif isinstance(summary, ast.JoinedStr):
                parts = (re.escape(str(p.value)) if isinstance(p, ast.Constant) else ".+" for p in summary.values)
                found.append("".join(parts))
    return found


# Needs torchrun, GPUs, dying ranks: tests/units/local/test_launch.py and tests/units/local/test_ranks.py have them.
ELSEWHERE = {"local", "launch.py", "line.py"}


def test_every_error_has_a_snapshot() -> None:
    known = [path.read_text().splitlines()[0].partition(": ")[2] for path in SNAPSHOTS.glob("*.txt")]
    for path in sorted(PACKAGE.rglob("*.py")):
        if not ELSEWHERE.isdisjoint(path.relative_to(PACKAGE).parts):
            continue
        for summary in summaries_in(path.read_text()):
            assert any(re.fullmatch(summary, line) for line in known), f"{path.name}: no snapshot of {summary!r}"


def test_every_snapshot_has_a_case() -> None:
    cases = {mistake.__name__ for mistakes in CASES.values() for mistake in mistakes}
    cases |= {mistake.__name__ for mistake in DISAGREEMENTS}
    assert {path.stem for path in SNAPSHOTS.glob("*.txt")} <= cases or is_writing()


# -- the base --------------------------------------------------------------------------------------------------------


def test_an_error_is_a_summary_aligned_facts_and_a_fix() -> None:
    error = LayoutError("It is wrong.", first=1, long_name="two", fix="do(this)")
    assert str(error) == "It is wrong.\n  first     : 1\n  long_name : two\n  fix       : do(this)"
    assert (error.summary, error.fix, error.facts) == ("It is wrong.", "do(this)", {"first": 1, "long_name": "two"})


@pytest.mark.parametrize("kind", [value for name, value in sorted(vars(zf).items()) if name.endswith("Error")])
def test_every_error_is_a_builtin_one_too(kind: type[ZeroError]) -> None:
    assert kind is ZeroError or issubclass(kind, ValueError | RuntimeError)


def test_an_error_crosses_processes_with_its_facts() -> None:
    error = StaleError("Old.", axis=torch.float32, fix="new")
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is StaleError
        assert str(twin) == str(error)
        assert twin.facts == {"axis": "torch.float32"}
