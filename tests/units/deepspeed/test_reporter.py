"""What a config prints and logs: lines, breakdowns, monitors, a profile of one step, and bytes sent."""

import csv
import io
import os
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import zero_fn as zf
from tests.support.messages import refused
from tests.support.on_ranks import on_ranks
from tests.support.ranks import axis
from tests.units.deepspeed.programs import (
    MICROBATCHES,
    built,
    furthest,
    loss_of,
    step_of,
    trained,
    values,
    zero,
)
from tests.units.deepspeed.test_cuts import Planned
from zero_fn.deepspeed import reporter
from zero_fn.monitor import Csv, sink_of
from zero_fn.profiling.clock import _clock


def rows_of(file):
    return list(csv.DictReader(file.read_text().splitlines()))


def printed(setup, steps=4):
    with redirect_stdout(io.StringIO()) as text:
        for step in range(steps):
            step_of(setup, step)
    return text.getvalue()


@on_ranks(2)
def test_rank_0_prints_a_line_every_so_many_steps():
    setup = zf.from_deepspeed(built(), {**zero(2), "steps_per_print": 2, "gradient_clipping": 1.0}, axis())
    lines = printed(setup).splitlines()
    if dist.get_rank():
        assert lines == []
        return
    assert len(lines) == 2
    line = "step 4: 0 skipped, learning rate 0.02, loss [\\d.]+, gradient norm [\\d.]+, [\\d.]+ samples/s"
    assert re.fullmatch(line, lines[1]), lines[1]


@on_ranks(2)
def test_lines_count_on_from_what_was_loaded_and_name_skipped_steps():
    config = {**zero(2), "steps_per_print": 1, "fp16": {"enabled": True, "initial_scale_power": 40, "hysteresis": 1}}
    setup = zf.from_deepspeed(built(), config, axis())
    setup.load_state_dict({**setup.state_dict(), "steps": 10, "skipped_steps": 3})
    lines = printed(setup, 1).splitlines()
    assert setup.skipped_steps == 4
    if not dist.get_rank():
        assert re.match(r"step 11: 4 skipped, .* loss scale [\d.e+]+, [\d.]+ samples/s$", lines[0]), lines[0]
    assert setup.reporter is not None
    setup.reporter.close()


@on_ranks(2)
def test_breakdowns_are_in_the_lines():
    more = {
        "wall_clock_breakdown": True,
        "memory_breakdown": True,
        "comms_logger": {"enabled": True},
        "steps_per_print": 3,
    }
    setup = zf.from_deepspeed(built(), {**zero(3), **more}, axis())
    text = printed(setup)
    assert setup.reporter is not None and setup.reporter.sent is not None
    assert setup.reporter.sent.nbytes > 0
    if not dist.get_rank():
        assert text.count("\n") == 1
        assert re.search(r"loss [\d.]+, .*forward [\d.]+ ms, backward [\d.]+ ms, optimizer step [\d.]+ ms", text), text
        assert re.search(r"memory_bytes/\w+ \d{3,}", text)
        assert "all-gather" in text
    setup.reporter.close()


@on_ranks(2)
def test_monitors_have_the_numbers_of_each_step(folder):
    more = {"csv_monitor": {"enabled": True, "output_path": f"{folder}/a", "job_name": "job"}}
    setup = zf.from_deepspeed(built(), {**zero(1), **more}, axis())
    trained(setup)
    assert setup.reporter is not None
    setup.reporter.close()
    losses = torch.stack([loss_of(built(), 0, number) for number in range(MICROBATCHES)]).mean().detach()
    dist.all_reduce(losses)
    if not dist.get_rank():
        rows = rows_of(Path(folder, "a", "job.csv"))
        assert [row["step"] for row in rows] == ["1", "2", "3", "4"]
        assert float(rows[0]["zero_fn/loss"]) == pytest.approx(float(losses) / 2, rel=1e-5)
        assert float(rows[3]["zero_fn/learning_rate/0"]) == pytest.approx(0.02)


@on_ranks(2)
def test_options_of_a_monitor_are_those_of_its_library(folder):
    made = []

    def comet(project, **options):
        made.append((project, options))
        return Csv(f"{folder}/comet.csv")

    section = {"enabled": True, "project": "p", "workspace": "w", "online": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reporter, "Comet", comet)
        setup = zf.from_deepspeed(built(), {**zero(1), "comet": section}, axis())
    printed(setup)
    if not dist.get_rank():
        assert made == [("p", {"workspace": "w", "online": False})]
        assert [row["step"] for row in rows_of(Path(folder, "comet.csv"))] == ["1", "2", "3", "4"]


def test_a_sink_without_its_library_says_what_installs_it():
    with mock.patch.dict(sys.modules, {"wandb": None}), refused("sink_without_its_library"):
        sink_of("wandb")


def _unopened(*_, **__):
    raise OSError("No space left on device")


@pytest.mark.parametrize("name", ["tp", "pp"])
@on_ranks(4)
def test_a_monitor_that_cannot_be_opened_is_told_on_every_rank(name):
    """Also on ranks that share no axis of data with the first."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", name))
    sizes = {"tensor_parallel": {"autotp_size": 2}} if name == "tp" else {"pipeline_parallel": {"pp_size": 2}}
    pipeline = grid["pp"] if name == "pp" else None
    config = {**zero(1), **sizes, "wandb": {"enabled": True, "project": "x"}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reporter, "WandB", _unopened)
        with pytest.raises((OSError, zf.ZeroError), match=r"No space left|failed on rank"):
            zf.from_deepspeed(Planned(), config, grid["dp"], pipeline=pipeline)
    mine = {**zero(1), **sizes, "gradient_clipping": 1.0 + (dist.get_rank() == 3)}
    with pytest.raises(zf.errors.DisagreementError, match="DeepSpeed configs"):
        zf.from_deepspeed(Planned(), mine, grid["dp"], pipeline=pipeline)


@on_ranks(2)
def test_steps_are_profiled_with_their_operations(folder):
    section = {"enabled": True, "profile_step": 0, "output_file": f"{folder}/new/profile.log"}
    setup = zf.from_deepspeed(built(), {**zero(3), "flops_profiler": section}, axis())
    before = values(setup.model)
    assert printed(setup, 3) == ""
    assert furthest(values(setup.model), before) > 0
    dist.barrier()
    assert "FLOP" in Path(section["output_file"]).read_text()
    assert os.listdir(f"{folder}/new") == ["profile.log"]


@on_ranks(2)
def test_a_profile_that_has_not_ended_is_given_up_when_reports_are_closed():
    section, before = {"enabled": True, "profile_step": 1}, _clock.readers
    setup = zf.from_deepspeed(built(), {**zero(3), "flops_profiler": section}, axis())
    assert setup.reporter is not None
    printed(setup, 2)
    with pytest.warns(UserWarning, match="flops_profiler has shown nothing: the run ended after step 2"):
        setup.reporter.close()
    assert _clock.readers == before
    setup.reporter.close()
