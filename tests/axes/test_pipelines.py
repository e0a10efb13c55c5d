"""Pipelines of `torch.distributed.pipelining` over data-parallel stages, on 2 x 2 ranks.

Every schedule runs plain and transformed stages on the same microbatches; gradients of plain stages are averaged over the
data axis in the order of the ranks. What rests afterwards must be equal to the bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
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
from tests.axes.grids import averaging, grid
from tests.support.programs import STAGES
from tests.support.ranks import Ranks
from tests.support.seeds import seed_generator
from tests.support.versions import not_in_2_11
from zero_fn.runtime.entry import units_of

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


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return y


def _chunks(schedule: str, mesh: DeviceMesh) -> dict[int, nn.Module]:
    """The plain stages of this rank, by their place in the pipeline."""
    seed_generator(0)
    number = 2 if schedule in SINGLE else 4
    everything = [nn.Sequential(Block(), Block()) for _ in range(number)]
    place = mesh["pp"].get_local_rank()
    if schedule in SINGLE:
        mine = [place]
    elif schedule in V_SHAPED:
        mine = [place, number - 1 - place]
    else:
        mine = [place, place + 2]
    return {index: everything[index] for index in mine}


def _step(
    schedule: str, mesh: DeviceMesh, chunks: dict[int, nn.Module], around: Callable[[], Any], number: int
) -> list[Tensor]:
    stages = [
        PipelineStage(module, index, 2 if schedule in SINGLE else 4, torch.device("cpu"), group=mesh.get_group("pp"))
        for index, module in chunks.items()
    ]
    made: Any
    if schedule in SINGLE:
        made = SINGLE[schedule](stages[0], MICROBATCHES, loss_fn=F.mse_loss)
    else:
        made = SEVERAL[schedule](stages, MICROBATCHES, loss_fn=F.mse_loss)  # type: ignore[abstract]
    generator = torch.Generator().manual_seed(10 * number + mesh["dp"].get_local_rank())
    x = torch.randn(2 * MICROBATCHES, WIDTH, generator=generator)
    y = torch.randn(2 * MICROBATCHES, WIDTH, generator=generator)
    losses: list[Tensor] = []
    has_first, has_last = 0 in chunks, max(chunks) == (1 if schedule in SINGLE else 3)
    with around():
        made.step(*((x,) if has_first else ()), **({"target": y, "losses": losses} if has_last else {}))
    return losses


def _differences(schedule: str, stage: str) -> list[str]:
    mesh = grid("pp", "dp")
    plain = _chunks(schedule, mesh)
    chunks = {index: STAGES[stage](copy.deepcopy(m), mesh["dp"]) for index, m in plain.items()}
    found = []
    optimizers = [
        torch.optim.AdamW([p for m in modules.values() for p in m.parameters()], lr=0.01) for modules in (plain, chunks)
    ]
    for number in range(2):
        expected = _step(schedule, mesh, plain, nullcontext, number)
        for module in plain.values():
            averaging(mesh["dp"])(module)
        with zf.traffic() as sent:
            losses = _step(schedule, mesh, chunks, lambda: zf.accumulate(*chunks.values(), unshard=True), number)
        units = sum(bool(unit.slots) for module in chunks.values() for unit in units_of(module))
        if number and (sent.calls["all-gather"], sent.calls["reduce-scatter"]) != (units, units):
            found.append(f"{sent} for {units} units")
        if not all(map(torch.equal, expected, losses)):
            found.append(f"step {number}: losses differ")
        for index, module in chunks.items():
            for (name, one), other in zip(plain[index].named_parameters(), module.parameters(), strict=True):
                assert one.grad is not None
                grad = other.grad.full_tensor() if other.grad is not None else None  # type: ignore[attr-defined]
                if grad is None or not torch.equal(one.grad, grad):
                    found.append(f"step {number}: gradient of {index}.{name} differs")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for index, module in chunks.items():
            for (name, one), other in zip(plain[index].named_parameters(), module.parameters(), strict=True):
                if not torch.equal(one, other.full_tensor()):  # type: ignore[attr-defined]
                    found.append(f"step {number}: {index}.{name} differs")
    return found


@pytest.mark.parametrize(
    ("schedule", "stage"),
    [
        *(pytest.param(name, "zero3", marks=IN_V_SHAPE if name in V_SHAPED else ()) for name in (*SINGLE, *SEVERAL)),
        ("1F1B", "zero1"),
        ("Interleaved1F1B", "zero2"),
        pytest.param("ZBVZeroBubble", "zero1", marks=IN_V_SHAPE),
    ],
)
def test_schedules_train_as_with_plain_stages(ranks: Ranks, schedule: str, stage: str) -> None:
    assert ranks(4).run(_differences, schedule, stage) == [[]] * 4


def _in_bfloat16(schedule: str) -> list[str]:
    """Where stages differ that compute in bfloat16 below float32 at rest, clipped, after two steps."""
    mesh = grid("pp", "dp")
    given = []
    for stage in ("zero1", "zero2", "zero3"):
        chunks = {
            index: zf.precision(STAGES[stage](module, mesh["dp"]), compute=torch.bfloat16, output=torch.float32)
            for index, module in _chunks(schedule, mesh).items()
        }
        parameters = [p for module in chunks.values() for p in module.parameters()]
        optimizer = torch.optim.AdamW(parameters, lr=0.01)
        for number in range(2):
            _step(schedule, mesh, chunks, partial(zf.accumulate, *chunks.values(), unshard=True), number)
            assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in parameters)
            nn.utils.clip_grad_norm_(parameters, 0.1)
            optimizer.step()
            optimizer.zero_grad()
        given.append([p.full_tensor() for p in parameters])  # type: ignore[attr-defined]
    return [
        str(i)
        for other in given[1:]
        for i, pair in enumerate(zip(given[0], other, strict=True))
        if not torch.equal(*pair)
    ]


@pytest.mark.parametrize("schedule", ["1F1B", pytest.param("ZBVZeroBubble", marks=IN_V_SHAPE)])
def test_stages_agree_to_the_bit_in_bfloat16(ranks: Ranks, schedule: str) -> None:
    assert ranks(4).run(_in_bfloat16, schedule) == [[]] * 4


def _whole_step(
    schedule: str, mesh: DeviceMesh, chunks: dict[int, nn.Module], optimizer: torch.optim.Optimizer, number: int
) -> None:
    _step(schedule, mesh, chunks, partial(zf.accumulate, *chunks.values(), unshard=True), number)
    optimizer.step()
    optimizer.zero_grad()


def _reloaded(folder: str) -> list[str]:
    """What differs a step after parts were saved in stage 3 under one schedule and loaded in stage 1 under another."""
    mesh = grid("pp", "dp")
    given: list[dict[str, Tensor]] = []
    for schedule, stage in (("1F1B", "zero3"), ("GPipe", "zero1")):
        chunks = {index: STAGES[stage](module, mesh["dp"]) for index, module in _chunks(schedule, mesh).items()}
        (index,) = chunks
        whole = nn.ModuleDict({f"part{index}": chunks[index]})
        optimizer = torch.optim.AdamW(whole.parameters(), lr=0.01)

        if given:
            with torch.no_grad():
                for parameter in whole.parameters():
                    parameter.zero_()
        else:
            _whole_step(schedule, mesh, chunks, optimizer, 0)
        state = dict(zip(("model", "optimizer"), get_state_dict(whole, optimizer, options=FLAT), strict=True))
        if given:
            dcp.load(state, checkpoint_id=folder)
            model_state, states = state["model"], state["optimizer"]
            set_state_dict(whole, optimizer, model_state_dict=model_state, optim_state_dict=states, options=FLAT)
        else:
            dcp.save(state, checkpoint_id=folder)
        _whole_step(schedule, mesh, chunks, optimizer, 1)
        given.append({name: p.full_tensor() for name, p in whole.named_parameters()})  # type: ignore[attr-defined]
    return [name for name, values in given[0].items() if not torch.equal(values, given[1][name])]


def test_parts_saved_in_one_stage_go_on_in_another(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(4).run(_reloaded, str(tmp_path)) == [[]] * 4
