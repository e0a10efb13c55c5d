"""`python -m zero_fn env`: what is installed, what the system allows,
what zero_fn will use, and what is missing.

One page for a report of a bug: names of the machine and its user are left out,
and so are paths and addresses.
"""

from __future__ import annotations

import argparse
import errno
import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zero_fn.inspect.table import table
from zero_fn.kernels import library
from zero_fn.kernels.compiler import cache_folder
from zero_fn.one_host.arena import Arena
from zero_fn.one_host.mailbox import are_mailboxes_available
from zero_fn.storage import Slab
from zero_fn.storage.host_memory import bounds
from zero_fn.storage.uring import Uring
from zero_fn.values.tiers import bytes_text, cpu

__all__ = ["environment", "main"]

_PACKAGES = (
    "torch", "numpy", "xxhash", "einops", "cloudpickle", "triton", "cupy-cuda12x", "cupy-cuda13x",
    "ziglang", "transformers", "accelerate", "lightning", "trl", "deepspeed", "bitsandbytes",
    "torchao", "safetensors",
)  # fmt: skip
_VARIABLES = re.compile(
    "(NCCL|TORCH_NCCL|GLOO|ZERO_FN|OMP|KMP|MKL|MALLOC|CUDA)_.*"
    "|PYTORCH_.*ALLOC_CONF|TORCH_(DISTRIBUTED_DEBUG|CPP_LOG_LEVEL)"
    "|(LOCAL_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|CC|XDG_CACHE_HOME|TMPDIR|LD_PRELOAD"
)
# A host, a path, an address.
_NAMES = re.compile(r".*(HOSTID|ADDR|COMM_ID)=|.*[/@\\]|.*\w\.[a-z]|.*\d\.\d+\.\d")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_NVIDIA = Path("/proc/driver/nvidia/version")
_SHM, _FABRIC = Path("/dev/shm"), Path("/sys/class/infiniband")
_TABLES = ("versions", "machine", "devices", "variables", "uses")
_IO_URING = {
    errno.EPERM: (
        "sysctl kernel.io_uring_disabled=0; in a container, "
        "a seccomp profile that allows io_uring_setup"
    ),
    errno.ENOMEM: "ulimit -l unlimited",
}

_Findings = Iterator[tuple[str, str, str]]
"""Of what is not as it should be: "missing" if training fails for it,
or "slower"; what it is; what to do."""


def main(arguments: Sequence[str]) -> int:
    """Prints the page. Returns 1 if something is missing that training needs, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m zero_fn env",
        description="What is installed, what the system allows, and what zero_fn will use: a "
        "page for a report of a bug, without names of machines and users. The exit status is 1 "
        "if something is missing that training needs.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with sizes in bytes")
    is_json, page = parser.parse_args(arguments).json, environment()
    text = json.dumps(page, indent=1)
    if not is_json:
        rows = {
            name: table([_row(*each) for each in page[name].items()] or [("none",)], right=())
            for name in _TABLES
        }
        lines = ["\n  ".join((name, *each)) for name, each in rows.items()]
        lines += [f"{kind}: {what}\n  fix: {fix}" for kind, what, fix in page["findings"]] or [
            "nothing is missing"
        ]
        text = "\n\n".join(lines)
    home, user = os.path.basename(os.path.expanduser("~")), os.environ.get("USER", "")
    names = {socket.gethostname().partition(".")[0], home, user}
    hidden = "|".join(re.escape(name) for name in names if len(name) > 2)
    print(re.sub(rf"\b({hidden})\b", "(name)", text) if hidden else text)
    return int(any(kind == "missing" for kind, _, _ in page["findings"]))


def _row(name: str, value: object) -> tuple[str, str]:
    if isinstance(value, Mapping):
        return name, ", ".join(" ".join(_row(*each)) for each in value.items())
    if not name.endswith("_nbytes"):
        return name, str(value)
    size = bytes_text(value) if isinstance(value, int) else "unlimited"
    return name.removesuffix("_nbytes"), size


def environment() -> dict[str, Any]:
    """The page, as JSON takes it.

    Compiles the kernels if nobody did; starts a process group of one rank, and ends it.
    """
    uses: dict[str, str] = {}
    devices: dict[str, dict[str, object]] = {}
    if torch.accelerator.is_available():
        kind = str(torch.accelerator.current_accelerator())
        for number in range(torch.accelerator.device_count()):
            found = torch.get_device_module(kind).get_device_properties(number)
            devices[f"{kind}:{number}"] = {"name": found.name, "memory_nbytes": found.total_memory}
    findings = [
        *_between_ranks(uses),
        *_with_devices(uses, devices),
        *_on_the_host(uses),
        *_limits(),
    ]
    variables = {
        name: value for name, value in sorted(os.environ.items()) if _VARIABLES.fullmatch(name)
    }
    return {
        "versions": dict(_versions()),
        "machine": dict(_machine()),
        "devices": devices,
        "variables": {
            n: "(set)" if _NAMES.match(f"{n}={value}") else value for n, value in variables.items()
        },
        "uses": uses,
        "findings": findings,
    }


def _versions() -> Iterator[tuple[str, str]]:
    yield "python", platform.python_version()
    yield "zero_fn", importlib.import_module("zero_fn").__version__
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            yield name, metadata.version(name)
    if _NVIDIA.exists() and (found := re.search(r"\d+\.\d+(\.\d+)?", _NVIDIA.read_text())):
        yield "driver of NVIDIA", found[0]


def _machine() -> Iterator[tuple[str, object]]:
    yield (
        "system",
        f"{platform.system()} {platform.release()} {platform.machine()}, "
        f"{' '.join(platform.libc_ver())}",
    )
    yield (
        "cores",
        f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}, "
        f"{torch.get_num_threads()} threads of torch",
    )
    yield "memory_nbytes", (whole := os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for each in sorted(bounds(), reverse=True):
        if each.nbytes < whole:
            yield f"free in {each.bound.partition(' /')[0]}_nbytes", each.nbytes
    yield f"{_SHM}_nbytes", shutil.disk_usage(_SHM).total if _SHM.is_dir() else 0
    yield "locked memory (ulimit -l)_nbytes", _limit("MEMLOCK")
    yield "open files (ulimit -n)", _limit("NOFILE")
    yield "huge pages", _huge_pages()


def _limit(name: str) -> int | None:
    most = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[0]
    return None if most == resource.RLIM_INFINITY else most


def _huge_pages() -> str:
    found = re.search(r"\[(\w+)\]", _HUGE_PAGES.read_text()) if _HUGE_PAGES.exists() else None
    return found[1] if found else "never"


def _between_ranks(uses: dict[str, str]) -> _Findings:
    names = [
        name
        for name in ("gloo", "nccl", "xccl", "ucc", "mpi")
        if getattr(dist, f"is_{name}_available")()
    ]
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if "nccl" in names else ""  # type: ignore[no-untyped-call]
    uses["backends of torch.distributed"] = (
        ", ".join(names).replace("nccl", f"nccl {nccl}") or "none"
    )
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        dist.destroy_process_group()
    except (RuntimeError, ValueError) as error:
        fix = (
            "GLOO_SOCKET_IFNAME=lo (`ip link` lists others), "
            "or the name of this machine in /etc/hosts"
        )
        yield "missing", f"gloo does not start: {str(error).splitlines()[0]}", fix
    uses["between ranks of this host"] = "shared memory"
    try:
        if not are_mailboxes_available():
            raise OSError("the system has no futexes or no pidfd_open")
        Arena().close_file()
    except (OSError, ValueError, OverflowError) as error:
        uses["between ranks of this host"] = f"gloo: {error}"
        yield (
            "slower",
            f"ranks of this host share no memory: {error}",
            "a newer Linux, or ulimit -f unlimited; -v, too",
        )


def _with_devices(uses: dict[str, str], devices: Mapping[str, object]) -> _Findings:
    if "cuda:1" in devices and not dist.is_nccl_available():
        yield (
            "missing",
            "this torch has no NCCL for its devices",
            "a torch for CUDA: pytorch.org/get-started",
        )
    if (
        not devices
        and _NVIDIA.exists()
        and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1")
    ):
        is_built = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
        built = "needs another driver" if is_built else "is built without CUDA"
        fix = "a torch for the CUDA of the driver (nvidia-smi says which): pytorch.org/get-started"
        yield "missing", f"torch {built}, and cannot use the NVIDIA device of this machine", fix
    uses["pinned memory"] = "none: no CUDA device"
    if torch.cuda.is_available():
        uses["pinned memory"] = f"by {'cupy' if importlib.util.find_spec('cupy') else 'torch'}"
        if not Slab(1 << 20, cpu(), "env").is_pinned:
            uses["pinned memory"] = "none: the driver refuses"
            yield (
                "slower",
                "host memory cannot be pinned: copies to devices take longer",
                "ulimit -l unlimited; dmesg",
            )


def _on_the_host(uses: dict[str, str]) -> _Findings:
    found, is_kept = library(), cache_folder() is not None
    uses["steps on the host"] = str(found) if found.functions else f"torch, {found}"
    if not found.functions:
        fix = "apt install gcc, or pip install ziglang; CC= names another compiler"
        yield "slower", f"{found}. torch does their work, with the same bits", fix
    elif not is_kept:
        yield (
            "slower",
            "each process compiles the kernels, for seconds",
            "XDG_CACHE_HOME=, a folder that is yours alone",
        )
    uses["disks"] = "io_uring"
    try:
        Uring()
    except OSError as error:
        uses["disks"] = f"threads: no io_uring ({error.strerror})"
        fix = _IO_URING.get(error.errno or 0, "Linux 5.4 or newer")
        yield "slower", f"no io_uring ({error.strerror}): threads wait for a busy interpreter", fix
    if _huge_pages() == "never":
        yield (
            "slower",
            "no huge pages: a disk may take twice as long",
            f"echo madvise > {_HUGE_PAGES}",
        )


def _limits() -> _Findings:
    locked, files = _limit("MEMLOCK"), _limit("NOFILE")
    if locked is not None and locked < 1 << 30 and _FABRIC.is_dir() and any(_FABRIC.iterdir()):
        yield (
            "missing",
            "NCCL has to lock memory for InfiniBand, and may lock little",
            "ulimit -l unlimited",
        )
    if files is not None and files < 1024:
        yield (
            "slower",
            f"a process may open {files} files only: many disks or ranks need more",
            "ulimit -n 4096",
        )
    if _SHM.is_dir() and shutil.disk_usage(_SHM).total < 1 << 30:
        yield (
            "slower",
            f"{_SHM} is small: NCCL and workers of a DataLoader may fail",
            "docker run --shm-size=8g",
        )
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        fix = "free space in /tmp, or TMPDIR=, a folder that can be written"
        yield "missing", "no folder takes temporary files: zf.launch cannot start ranks", fix
