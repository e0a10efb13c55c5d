"""What launchers set, as srun 22.05, Open MPI 4.1 and MPICH 4.0 set it here, and what is read from it."""

from unittest import mock

import pytest
import torch

import zero_fn as zf

TORCH = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "a7", "MASTER_PORT": "29400"}
SLURM = {
    "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_PROCID": "4", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_TASKS_PER_NODE": "3(x2)",
    "SLURM_STEP_NODELIST": "a[07-09,12]-ib,b3", "PMI_RANK": "4", "PMI_SIZE": "6",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "107741185",
}  # fmt: skip
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
POD = {"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "job-0.job"}
BATCH = {"SLURM_JOB_ID": "17", "SLURM_PROCID": "0"}

FOUND = {  # launcher, rank, ranks, local rank, local ranks, address
    "torchrun": (
        {**TORCH, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"},
        ("torchrun", 3, 8, 1, 2, "a7"),
    ),
    "a user": (TORCH, ("environment", 3, 8, 0, 1, "a7")),
    "a user without LOCAL_WORLD_SIZE": ({**TORCH, "LOCAL_RANK": "3"}, ("environment", 3, 8, 3, 4, "a7")),
    "srun": (SLURM, ("Slurm", 4, 6, 1, 3, "a07-ib")),
    "srun on one node": (
        {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "6", "SLURM_NODEID": "0"},
        ("Slurm", 4, 6, 1, 6, "127.0.0.1"),
    ),
    "torchrun by srun": ({**SLURM, **TORCH}, ("environment", 3, 8, 0, 1, "a7")),
    "a batch script of one task": ({**BATCH, "SLURM_NTASKS": "1"}, ("nobody", 0, 1, 0, 1, "127.0.0.1")),
    "mpirun": (OPEN_MPI, ("Open MPI", 1, 2, 1, 2, "127.0.0.1")),
    "mpirun in a batch script": ({**BATCH, "SLURM_NTASKS": "2", **OPEN_MPI}, ("Open MPI", 1, 2, 1, 2, "127.0.0.1")),
    "mpirun on two hosts": (
        {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "MASTER_ADDR": "a7"},
        ("Open MPI", 1, 2, 0, 1, "a7"),
    ),
    "mpiexec of MPICH": (MPICH, ("MPICH", 1, 2, 1, 2, "127.0.0.1")),
    "a pod": (POD, ("Kubernetes", 2, 4, 0, 1, "job-0.job")),
    "nobody": ({"HOME": "/"}, ("nobody", 0, 1, 0, 1, "127.0.0.1")),
}


def _facts(here):
    return here.launcher, here.rank, here.ranks, here.local_rank, here.local_ranks, here.address


@pytest.mark.parametrize("case", FOUND)
def test_a_rank_is_found_under_each_launcher(case):
    environ, facts = FOUND[case]
    assert _facts(zf.from_environment(environ)) == facts


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
    with _devices(devices):
        here = zf.from_environment({**TORCH, "LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": "4"})
    assert here.device == torch.device(expected)


def _devices(n):
    counts = {"is_available": lambda: n > 0, "device_count": lambda: n}
    return mock.patch.multiple(torch.accelerator, current_accelerator=lambda: torch.device("cuda"), **counts)


def test_a_rank_of_launch_is_found_and_start_keeps_its_group():
    def place():
        group = torch.distributed.group.WORLD
        here = zf.from_environment().start()
        assert torch.distributed.group.WORLD is group
        return _facts(here)[:5]

    assert zf.launch(place, 2, backend="gloo") == [("zf.launch", rank, 2, rank, 2) for rank in range(2)]
