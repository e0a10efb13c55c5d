"""Which rank a process is, from what its launcher has set: `started.toml` says what each sets."""

import tomllib
from pathlib import Path
from unittest import mock

import pytest
import torch

import zero_fn as zf
from tests.support.messages import refused
from zero_fn.local.shared_folder import host_name

STARTED = tomllib.loads(Path(__file__).with_name("started.toml").read_text())
TORCH, SLURM = STARTED["variables"]["torch"], STARTED["variables"]["slurm"]


def _environ(row):
    own = {name: value for name, value in row.items() if name.isupper()}
    for variables in reversed(row["of"]):
        own = STARTED["variables"][variables] | own
    return own


def _facts(here):
    return [here.launcher, here.rank, here.ranks, here.local_rank, here.local_ranks, here.address]


@pytest.mark.parametrize("case", STARTED["found"])
def test_a_rank_is_found_under_each_launcher(case):
    row = STARTED["found"][case]
    assert _facts(zf.from_environment(_environ(row))) == row["is"]


@pytest.mark.parametrize("name", STARTED["refused"])
def test_variables_that_lack_or_contradict_something_are_refused(name):
    with refused(name):
        zf.from_environment(_environ(STARTED["refused"][name]))


def test_ranks_of_a_job_meet_at_one_port_and_those_of_another_run_at_another():
    ports = {zf.from_environment({**SLURM, "SLURM_PROCID": str(rank)}).port for rank in range(6)}
    assert len(ports) == 1
    for other in ({"SLURM_JOB_ID": "18"}, {"SLURM_STEP_ID": "1"}, {"SLURM_RESTART_COUNT": "1"}):
        assert zf.from_environment({**SLURM, **other}).port not in ports
    assert zf.from_environment({**SLURM, "MASTER_PORT": "4242"}).port == 4242


@pytest.mark.parametrize(
    ("devices", "local_rank", "expected"), [(4, 3, "cuda:3"), (1, 3, "cuda:0"), (4, 0, "cuda:0"), (0, 3, "cpu")]
)
def test_the_device_is_that_of_the_local_rank_or_the_one_that_is_shown(devices, local_rank, expected):
    assert _on_devices(devices, local_rank).device == torch.device(expected)


def _on_devices(n, local_rank):
    counts = {"is_available": lambda: n > 0, "device_count": lambda: n}
    with mock.patch.multiple(torch.accelerator, current_accelerator=lambda: torch.device("cuda"), **counts):
        return zf.from_environment({**TORCH, "LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": "4"})


def test_what_a_host_has_not_is_said():
    with refused("started_with_more_ranks_than_devices"):
        _on_devices(2, 2)
    with (
        mock.patch("zero_fn.local.shared_folder.ROOT", Path("/missing")),
        refused("memory_copies_without_shared_memory"),
    ):
        host_name()


def test_a_rank_of_launch_is_found_and_start_keeps_its_group():
    def place():
        group = torch.distributed.group.WORLD
        here = zf.from_environment().start()
        assert torch.distributed.group.WORLD is group
        return _facts(here)[:5]

    assert zf.launch(place, 2, backend="gloo") == [["zf.launch", rank, 2, rank, 2] for rank in range(2)]
