"""`zf.from_environment()`: which rank this process is, from what its launcher has set.

torch's own variables win (torchrun, Accelerate, Ray Train, Kubeflow, a user), then those of MPI, of
Slurm, of an indexed Kubernetes Job. A process with none of them is the only rank.
"""

from __future__ import annotations

import os
import re
import socket
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from zero_fn.errors import LayoutError, StateError
from zero_fn.local import rank as inside
from zero_fn.local.gloo import loopback
from zero_fn.local.rendezvous import meet

__all__ = ["StartedRank", "from_environment"]

_TORCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PORTS = range(20_000, 30_000)  # below those that systems give out by themselves


@dataclass(frozen=True, slots=True)
class StartedRank:
    """A rank, as its launcher has started it; `zf.from_environment()` finds it.

    Attributes:
        launcher: Who set the variables: "torchrun", "Open MPI", "MPICH", "Slurm", "Kubernetes",
            "zf.launch", "environment" (torch's variables by anybody else) or "nobody".
        rank, ranks: Of this process, and of the program.
        local_rank, local_ranks: The same of this host.
        address, port: Where rank 0 listens.
        device: The device of this rank: an accelerator, if there is one for each
            rank of the host, else the CPU.
    """

    launcher: str
    rank: int
    ranks: int
    local_rank: int
    local_ranks: int
    address: str
    port: int
    device: torch.device

    def start(self, timeout_s: float = 300.0) -> StartedRank:
        """Starts the default process group, unless there is one, and returns this rank.

        The group has gloo for CPU tensors and the backend of the device for others. Sets the device
        of this process, and torch's variables (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`,
        `LOCAL_WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`), which other libraries read. Groups of
        gloo use the loopback interface if all ranks are on this host and `GLOO_SOCKET_IFNAME` is
        not set.

        Communicates: the rendezvous, over TCP.

        Args:
            timeout_s: Seconds until all ranks must have come.

        Raises:
            LostRankError: Ranks have not come in time, and are named; or rank 0 cannot be reached.
        """
        if self.device.type != "cpu":
            torch.accelerator.set_device_index(self.device)
        if dist.is_initialized():
            return self
        numbers = (
            self.rank,
            self.ranks,
            self.address,
            self.port,
            self.local_rank,
            self.local_ranks,
        )
        os.environ.update(
            zip((*_TORCH, "LOCAL_RANK", "LOCAL_WORLD_SIZE"), map(str, numbers), strict=True)
        )
        if self.local_ranks == self.ranks and (name := loopback()):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        store = meet(self.address, self.port, self.rank, self.ranks, self.launcher, timeout_s)
        device = self.device.type
        backend = (
            "gloo"
            if device == "cpu"
            else f"cpu:gloo,{device}:{dist.get_default_backend_for_device(device)}"
        )
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.ranks)
        return self


def from_environment(environ: Mapping[str, str] | None = None) -> StartedRank:
    """Which rank this process is, how many there are, where they meet, and the device of this one.

        here = zf.from_environment().start()
        mesh = init_device_mesh(here.device.type, (here.ranks,), mesh_dim_names=("dp",))

    So one program runs, unchanged, under torchrun, `srun` of Slurm, `mpirun`, Ray Train, Kubernetes
    and Kubeflow, Accelerate, in `zf.launch`, and alone. Communicates nothing; `start` does.

    Args:
        environ: The variables; None for those of this process.

    Raises:
        StateError: Some variables of a launcher are set and others, which it says, are not;
            or they contradict each other.
        LayoutError: The host has accelerators, but not one for each of its ranks.
    """
    found = os.environ if environ is None else environ
    if environ is None and dist.is_available() and dist.is_initialized():
        return _of_group(found)
    for name, is_set, read in _LAUNCHERS:
        if is_set(found):
            return _checked(read(_Variables(found, name)))
    return _checked(_alone(_Variables(found, "nobody")))


class _Variables:
    """Variables of one launcher, whose names an error gives."""

    def __init__(self, found: Mapping[str, str], launcher: str) -> None:
        self.found = found
        self.launcher = launcher

    def require(self, *names: str, fix: str) -> None:
        """Raises a `StateError` unless all of these are set."""
        if missing := [name for name in names if not self.found.get(name)]:
            raise StateError(
                "Some of the variables that say which rank this is are missing.",
                launcher=self.launcher,
                missing=", ".join(missing),
                found=", ".join(
                    f"{name}={self.found[name]}" for name in names if self.found.get(name)
                )
                or "none",
                fix=fix,
            )

    def number(self, *names: str, default: int | None = None) -> int:
        """The number in the first of these that is set."""
        name = next((name for name in names if self.found.get(name)), None)
        if name is None and default is not None:
            return default
        self.require(
            *names if name is None else (name,),
            fix="start the program by its launcher, on every rank",
        )
        text = self.found[name or names[0]]
        if not text.isdecimal():
            fix = f"a whole number from 0 on: {name}=0"
            raise StateError(
                f"{name} is not a number.", got=repr(text), launcher=self.launcher, fix=fix
            )
        return int(text)

    def rank(
        self,
        rank: int,
        ranks: int,
        local: tuple[int, int],
        address: str = "127.0.0.1",
        job: str = "",
    ) -> StartedRank:
        """The rank.

        `MASTER_ADDR` and `MASTER_PORT` win; without the latter,
        the port follows from the name of the job.
        """
        port = _PORTS[zlib.crc32(job.encode()) % len(_PORTS)] if job else 29_500
        if ranks == 1 and not self.found.get("MASTER_PORT"):
            port = _free_port()
        address = self.found.get("MASTER_ADDR") or address
        port = self.number("MASTER_PORT", default=port)
        return StartedRank(self.launcher, rank, ranks, *local, address, port, _device(*local))


def _torch(of: _Variables) -> StartedRank:
    if "TORCHELASTIC_RUN_ID" in of.found:
        of.launcher = "torchrun"
    rank, ranks = of.number("RANK"), of.number("WORLD_SIZE")
    if ranks > 1:
        fix = (
            "MASTER_ADDR=HOST_OF_RANK_0 MASTER_PORT=29500, on every rank; "
            "torchrun sets them by itself"
        )
        of.require("MASTER_ADDR", "MASTER_PORT", fix=fix)
    # Who starts one process on each host, as Kubeflow's PyTorchJob, says nothing of the local rank.
    local = of.number("LOCAL_RANK", default=0), of.number("LOCAL_WORLD_SIZE", default=1)
    return of.rank(rank, ranks, (local[0], max(local[1], local[0] + 1)))


def _open_mpi(of: _Variables) -> StartedRank:
    numbers = [
        of.number(f"OMPI_COMM_WORLD_{name}")
        for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    ]
    return _mpi(of, numbers, "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")


def _mpich(of: _Variables) -> StartedRank:
    numbers = [
        of.number(name) for name in ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    ]
    return _mpi(of, numbers, "PMI_KVS", "HYDRA_LAUNCHER_JOBID")


def _mpi(of: _Variables, numbers: list[int], *jobs: str) -> StartedRank:
    rank, ranks, local_rank, local_ranks = numbers
    if local_ranks < ranks:  # MPI tells nobody on which host rank 0 is
        fix = (
            "mpirun -x MASTER_ADDR=HOST_OF_RANK_0 -x MASTER_PORT=29500 ... "
            "(mpiexec of MPICH: -genv MASTER_ADDR ...)"
        )
        of.require("MASTER_ADDR", fix=fix)
    job = next((of.found[name] for name in jobs if of.found.get(name)), "")
    return of.rank(rank, ranks, (local_rank, local_ranks), job=job)


def _slurm(of: _Variables) -> StartedRank:
    if not of.found.get("SLURM_STEP_ID"):
        if of.number("SLURM_NTASKS", default=1) > 1:
            raise StateError(
                "This is the batch script of a Slurm job, and not one of its tasks.",
                tasks=of.found["SLURM_NTASKS"],
                why="it would wait for ranks that nobody starts",
                fix="srun python train.py, in the batch script",
            )
        of.launcher = "nobody"
        return _alone(of)
    rank = of.number("SLURM_PROCID")
    ranks = of.number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    of.require(
        "SLURM_LOCALID",
        "SLURM_NODEID",
        "SLURM_STEP_TASKS_PER_NODE",
        "SLURM_JOB_ID",
        fix="start it by srun",
    )
    each = _repeated(of.found["SLURM_STEP_TASKS_PER_NODE"])
    local_ranks = each[min(of.number("SLURM_NODEID"), len(each) - 1)]
    nodes = of.found.get("SLURM_STEP_NODELIST") or of.found.get("SLURM_JOB_NODELIST", "")
    address = (
        "127.0.0.1" if local_ranks == ranks else of.found.get("MASTER_ADDR") or _first_host(nodes)
    )
    restart = of.found.get("SLURM_RESTART_COUNT", "0")
    job = f"{of.found['SLURM_JOB_ID']}.{of.found['SLURM_STEP_ID']}.{restart}"
    return of.rank(rank, ranks, (of.number("SLURM_LOCALID"), local_ranks), address=address, job=job)


def _kubernetes(of: _Variables) -> StartedRank:
    fix = (
        "give them to the pods of the Job: WORLD_SIZE is its completions, "
        "MASTER_ADDR the name of pod 0 in its service"
    )
    of.require("WORLD_SIZE", "MASTER_ADDR", fix=fix)
    rank, ranks = of.number("JOB_COMPLETION_INDEX"), of.number("WORLD_SIZE")
    return of.rank(rank, ranks, (0, 1))


def _alone(of: _Variables) -> StartedRank:
    return of.rank(0, 1, (0, 1))


def _has(*names: str) -> Callable[[Mapping[str, str]], bool]:
    return lambda found: all(found.get(name) for name in names)


_Launcher = tuple[str, Callable[[Mapping[str, str]], bool], Callable[[_Variables], StartedRank]]
_LAUNCHERS: tuple[_Launcher, ...] = (
    ("environment", lambda found: "RANK" in found, _torch),
    ("Open MPI", _has("OMPI_COMM_WORLD_RANK"), _open_mpi),
    # srun sets PMI_RANK, too; what follows it here is Hydra's alone.
    ("MPICH", _has("PMI_RANK", "MPI_LOCALRANKID"), _mpich),
    ("Slurm", _has("SLURM_PROCID"), _slurm),
    ("Kubernetes", _has("JOB_COMPLETION_INDEX"), _kubernetes),
)
"""By launcher: how its variables are known, and read.

Inside a batch script of Slurm, mpirun's are those that count.
"""


def _of_group(found: Mapping[str, str]) -> StartedRank:
    """This rank in the process group that there is."""
    of = _Variables(found, "zf.launch" if inside.place is not None else "environment")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    local_rank = of.number("LOCAL_RANK", default=rank)
    local_ranks = of.number("LOCAL_WORLD_SIZE", default=ranks)
    here = of.rank(rank, ranks, (local_rank, local_ranks))
    kind, backends = here.device.type, str(dist.get_backend())
    if kind != "cpu" and str(dist.get_default_backend_for_device(kind)) not in backends:
        return replace(here, device=torch.device("cpu"))  # ranks of a group of gloo alone
    return here


def _checked(here: StartedRank) -> StartedRank:
    if (
        here.rank < here.ranks
        and here.local_rank < here.local_ranks <= here.ranks
        and here.port < 1 << 16
    ):
        return here
    raise StateError(
        "The variables of the launcher contradict each other.",
        launcher=here.launcher,
        rank=f"{here.rank} of {here.ranks}",
        local_rank=f"{here.local_rank} of {here.local_ranks}",
        port=here.port,
        fix="unset those of an earlier run: RANK, WORLD_SIZE, LOCAL_RANK, "
        "LOCAL_WORLD_SIZE, MASTER_PORT",
    )


def _device(local_rank: int, local_ranks: int) -> torch.device:
    """The device of a rank. If the launcher shows each rank one device only, it is that one."""
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    kind, devices = torch.accelerator.current_accelerator(), torch.accelerator.device_count()
    assert kind is not None, "there is one"
    if devices == 1 or local_rank < devices:
        return torch.device(kind.type, 0 if devices == 1 else local_rank)
    raise LayoutError(
        "This host has more ranks than devices.",
        ranks=local_ranks,
        devices=f"{devices} ({kind.type})",
        fix="start as many ranks on each host as it has devices; CUDA_VISIBLE_DEVICES= for the CPU",
    )


def _repeated(counts: str) -> list[int]:
    """Tasks of each node, of Slurm's "2(x3),1"."""
    pairs = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", each) for each in counts.split(",")]
    if None in pairs:
        raise StateError(
            "Slurm's tasks of nodes are not understood.",
            got=counts,
            fix="start it by srun; '2(x3),1'",
        )
    return [int(pair[1]) for pair in pairs if pair for _ in range(int(pair[2] or 1))]


def _first_host(nodes: str) -> str:
    """The first name of a list of Slurm: `a07` of "a[07-12,15],b3"."""
    first = re.match(r"(?:[^\[,]|\[[^\]]*\])+", nodes)
    if first is None:
        fix = "start it by srun; or MASTER_ADDR=HOST_OF_RANK_0"
        raise StateError("Slurm has not said which nodes run this.", got=repr(nodes), fix=fix)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0])


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
