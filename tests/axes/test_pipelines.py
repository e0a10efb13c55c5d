"""Pipelines of `torch.distributed.pipelining` over data-parallel stages, on 2 x 2 ranks.

Every schedule runs plain and transformed stages on the same microbatches; gradients of plain stages are averaged over the
data axis in the order of the ranks. What rests afterwards must be equal to the bit.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import ScheduleDualPipeV

import zero_fn as zf
from tests.axes.grids import Block, averaging, differing, grid, snapshot
from tests.support.on_ranks import on_ranks
from tests.support.programs import STAGES
from tests.support.seeds import seed_generator
from tests.support.versions import not_in_2_11
from tests.support.wholes import full
from zero_fn.runtime.registry import units_of

WIDTH = 6
MICROBATCHES = 4
SINGLE = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
SEVERAL = {
    "Interleaved1F1B": ScheduleInterleaved1F1B,
    "LoopedBFS": ScheduleLoopedBFS,
    "InterleavedZeroBubble": ScheduleInterleavedZeroBubble,
    "ZBVZeroBubble": ScheduleZBVZeroBubble,
    "DualPipeV": ScheduleDualPipeV,
}
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
IN_V_SHAPE = not_in_2_11("its schedules send from a rank to itself, which gloo cannot")
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # by parameter, as parts of a pipeline need it


def _chunks(schedule, mesh):
    """The plain stages of this rank, by their place in the pipeline."""
    seed_generator(0)
    number = 2 if schedule in SINGLE else 4
    everything = [nn.Sequential(Block(WIDTH), Block(WIDTH)) for _ in range(number)]
    place = mesh["pp"].get_local_rank()
    second = number - 1 - place if schedule in V_SHAPED else place + 2
    mine = [place] if schedule in SINGLE else [place, second]
    return {index: everything[index] for index in mine}


def _step(schedule, mesh, chunks, around, number):
    stages = [
        PipelineStage(module, index, 2 if schedule in SINGLE else 4, torch.device("cpu"), group=mesh.get_group("pp"))
        for index, module in chunks.items()
    ]
    made: Any
    if schedule in SINGLE:
        made = SINGLE[schedule](stages[0], MICROBATCHES, loss_fn=F.mse_loss)
    else:
        made = SEVERAL[schedule](stages, MICROBATCHES, loss_fn=F.mse_loss)
    generator = torch.Generator().manual_seed(10 * number + mesh["dp"].get_local_rank())
    x = torch.randn(2 * MICROBATCHES, WIDTH, generator=generator)
    y = torch.randn(2 * MICROBATCHES, WIDTH, generator=generator)
    losses = []
    has_first, has_last = 0 in chunks, max(chunks) == (1 if schedule in SINGLE else 3)
    with around():
        made.step(*((x,) if has_first else ()), **({"target": y, "losses": losses} if has_last else {}))
    return losses


def _named(chunks):
    return {f"{index}.{name}": p for index, module in chunks.items() for name, p in module.named_parameters()}


@pytest.mark.parametrize(
    ("schedule", "stage"),
    [
        *(pytest.param(name, "zero3", marks=IN_V_SHAPE if name in V_SHAPED else ()) for name in (*SINGLE, *SEVERAL)),
        ("1F1B", "zero1"),
        ("Interleaved1F1B", "zero2"),
        pytest.param("ZBVZeroBubble", "zero1", marks=IN_V_SHAPE),
    ],
)
@on_ranks(4)
def test_schedules_train_as_with_plain_stages(schedule, stage):
    mesh = grid("pp", "dp")
    plain = _chunks(schedule, mesh)
    chunks = {index: STAGES[stage](copy.deepcopy(m), mesh["dp"]) for index, m in plain.items()}
    expected, found = _named(plain), _named(chunks)
    optimizers = [torch.optim.AdamW([*named.values()], lr=0.01) for named in (expected, found)]
    units = sum(bool(unit.slots) for module in chunks.values() for unit in units_of(module))
    for number in range(2):
        losses = _step(schedule, mesh, plain, nullcontext, number)
        for module in plain.values():
            averaging(mesh["dp"])(module)
        with zf.traffic() as sent:
            ours = _step(schedule, mesh, chunks, lambda: zf.accumulate(*chunks.values(), unshard=True), number)
        assert len(losses) == len(ours)
        assert all(map(torch.equal, losses, ours))
        assert not number or (sent.calls["all-gather"], sent.calls["reduce-scatter"]) == (units, units)
        assert all(p.grad is not None for p in expected.values())
        assert differing(*({name: p.grad for name, p in named.items()} for named in (expected, found))) == []
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert differing(*({name: p.detach() for name, p in named.items()} for named in (expected, found))) == []


@on_ranks(4)
def test_the_norm_is_that_of_one_process_whatever_the_number_of_microbatches():
    mesh, generator = grid("pp", "dp"), torch.Generator().manual_seed(1)
    place = mesh["pp"].get_local_rank()
    x, y = torch.randn(2, 16, WIDTH, generator=generator)
    for stage, number in [(stage, number) for stage in ("zero1", "zero2", "zero3") for number in (1, 2, 8)]:
        seed_generator(0)
        parts = [nn.Sequential(Block(WIDTH), Block(WIDTH)) for _ in range(2)]
        whole = nn.Sequential(*parts)
        F.mse_loss(whole(x), y).backward()
        wanted = nn.utils.get_total_norm([p.grad for p in whole.parameters() if p.grad is not None])
        whole.zero_grad()
        part = STAGES[stage](parts[place], mesh["dp"])
        own = PipelineStage(part, place, 2, torch.device("cpu"), group=mesh.get_group("pp"))
        schedule = (ScheduleGPipe if number == 1 else Schedule1F1B)(own, number, loss_fn=F.mse_loss)
        given, target = (each.chunk(2)[mesh["dp"].get_local_rank()] for each in (x, y))
        with zf.accumulate(part, unshard=True):
            schedule.step(*(() if place else (given,)), **({"target": target} if place else {}))
        square = full(nn.utils.get_total_norm([p.grad for p in part.parameters() if p.grad is not None])) ** 2
        dist.all_reduce(square, group=mesh.get_group("pp"))
        torch.testing.assert_close(square.sqrt(), wanted)


@pytest.mark.parametrize("schedule", ["1F1B", pytest.param("ZBVZeroBubble", marks=IN_V_SHAPE)])
@on_ranks(4)
def test_stages_agree_to_the_bit_in_bfloat16(schedule):
    """Below float32 at rest, clipped, after two steps."""
    mesh, given = grid("pp", "dp"), []
    for stage in ("zero1", "zero2", "zero3"):
        chunks = {
            index: zf.precision(STAGES[stage](module, mesh["dp"]), compute=torch.bfloat16, output=torch.float32)
            for index, module in _chunks(schedule, mesh).items()
        }
        named = _named(chunks)
        optimizer = torch.optim.AdamW([*named.values()], lr=0.01)
        for number in range(2):
            _step(schedule, mesh, chunks, partial(zf.accumulate, *chunks.values(), unshard=True), number)
            assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in named.values())
            nn.utils.clip_grad_norm_(named.values(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        given.append({name: full(p) for name, p in named.items()})
    assert differing(given[0], given[1]) == differing(given[0], given[2]) == []


def _whole_step(schedule, mesh, chunks, optimizer, number):
    _step(schedule, mesh, chunks, partial(zf.accumulate, *chunks.values(), unshard=True), number)
    optimizer.step()
    optimizer.zero_grad()


@on_ranks(4)
def test_parts_saved_in_one_stage_go_on_in_another(folder):
    """Saved in stage 3 under one schedule, loaded in stage 1 under another."""
    mesh = grid("pp", "dp")
    given = []
    for schedule, stage in (("1F1B", "zero3"), ("GPipe", "zero1")):
        chunks = {index: STAGES[stage](module, mesh["dp"]) for index, module in _chunks(schedule, mesh).items()}
        (index,) = chunks
        whole = nn.ModuleDict({f"part{index}": chunks[index]})
        optimizer = torch.optim.AdamW(whole.parameters(), lr=0.01)
        _whole_step(schedule, mesh, chunks, optimizer, 10 * len(given))  # another, of what loads
        state = dict(zip(("model", "optimizer"), get_state_dict(whole, optimizer, options=FLAT), strict=True))
        if given:
            dcp.load(state, checkpoint_id=folder)
            states = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
            set_state_dict(whole, optimizer, **states, options=FLAT)
        else:
            dcp.save(state, checkpoint_id=folder)
        _whole_step(schedule, mesh, chunks, optimizer, 1)
        given.append(snapshot(whole))
    assert differing(*given) == []
