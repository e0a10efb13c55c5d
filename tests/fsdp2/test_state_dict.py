"""By intent, `test_fully_shard_state_dict.py`, `test_fsdp_dsd.py` and `test_hf_storage.py` of torch. Said elsewhere:

test_dp_state_dict_save_load              acceptance/test_state_dict.py::test_g30_whole_tensors_are_sharded_on_load
dp_tp, hsdp_tp save_load                  composition/test_checkpoints.py::test_a_checkpoint_loads_on_other_meshes
test_2d_state_dict_correctness            composition/test_tensor_parallel.py::test_editing_and_loading_take_whole_parameters
test_dp_state_dict_cpu_offload            distributed/test_verbs.py::test_to_empty_and_load_state_dict_start_a_meta_model
save, load and go on                      distributed/test_verbs.py::test_a_checkpoint_continues_exactly_in_any_stage
on another number of ranks                distributed/test_verbs.py::test_a_checkpoint_loads_on_another_number_of_ranks
a rank is killed in a save
    checkpoint/test_atomic.py::test_a_rank_that_is_killed_in_a_save_is_a_typed_error_on_the_others
folders of FSDP2 and DCP                  checkpoint/test_of_dcp.py::test_training_goes_on_where_fsdp2_has_stopped
safetensors, whole                        checkpoint/test_pretrained.py::test_every_way_to_rest_is_written_whole
test_compiled_model_with_buffers          acceptance/test_compile.py::test_g44_a_compiled_model_trains_as_replicas
"""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import zero_fn as zf
from tests.fsdp2.models import DIM, Stacked
from tests.support.ranks import Ranks, axis
from tests.support.wholes import named_fulls
from tests.support.worlds import noise

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def _step(model: Any, optimizer: Any, number: int) -> None:
    optimizer.zero_grad()
    model(noise(2, DIM, seed=number)).square().mean().backward()
    optimizer.step()


def _same(one: Any, other: Any) -> bool:
    ours, theirs = (named_fulls(dict(model.named_parameters())) for model in (one, other))
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


def _whole() -> None:
    """The state of rank 0, whole and on the host, given to another stage, and to plain modules."""
    for stage in (zf.replicate, zf.zero2):
        torch.manual_seed(0)
        first: Any = zf.zero3(Stacked(), axis())
        optimizer = torch.optim.AdamW(first.parameters(), lr=0.1)
        for number in range(2):
            _step(first, optimizer, number)
        values = get_model_state_dict(first, options=WHOLE)
        states = copy.deepcopy(get_optimizer_state_dict(first, optimizer, options=WHOLE))  # numbers of steps alias
        assert bool(values) == (dist.get_rank() == 0)
        values = {name: value.clone() for name, value in values.items()}
        torch.manual_seed(1)
        second: Any = stage(Stacked(), axis())
        other = torch.optim.AdamW(second.parameters(), lr=0.1)
        set_model_state_dict(second, dict(values), options=FROM_RANK_0)  # which it changes
        set_optimizer_state_dict(second, other, states, options=FROM_RANK_0)
        assert _same(first, second)
        for model, chosen in ((first, optimizer), (second, other)):
            _step(model, chosen, 5)
        assert _same(first, second)
        if dist.get_rank() == 0:
            plain = Stacked()
            plain.load_state_dict(values)


def _kept(path: str) -> None:
    """What is saved in the background is the state at the call; a state dict that was taken once goes with the model."""
    torch.manual_seed(0)
    model: Any = zf.zero3(Stacked(), axis())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    taken = model.state_dict()
    _step(model, optimizer, 0)
    before = named_fulls(dict(model.named_parameters()))
    saving: Any = dcp.async_save({"model": model.state_dict()}, checkpoint_id=path, process_group=dist.new_group())
    for number in range(1, 3):
        _step(model, optimizer, number)
    now = named_fulls(dict(model.named_parameters()))
    assert all(torch.equal(value.full_tensor(), now[name]) for name, value in taken.items())
    saving.result()
    other: Any = zf.zero1(Stacked(), axis())
    values = {"model": other.state_dict()}
    dcp.load(values, checkpoint_id=path)
    other.load_state_dict(values["model"])
    loaded = named_fulls(dict(other.named_parameters()))
    assert all(torch.equal(loaded[name], before[name]) for name in before)


def test_states_go_to_other_stages_whole(ranks: Ranks) -> None:
    ranks(2).run(_whole)


def test_states_saved_in_the_background_are_those_of_the_call(ranks: Ranks) -> None:
    with tempfile.TemporaryDirectory() as path:
        ranks(2).run(_kept, path)
