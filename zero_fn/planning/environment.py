"""`python -m zero_fn env`: what torch says of its environment, what zero_fn will use,
and what is missing.

One page for a report of a bug: names of the machine and its user are left out.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import importlib.util
import json
import os
import re
import socket
import tempfile
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.collect_env import get_pretty_env_info

from zero_fn.inspect.table import table
from zero_fn.kernels import library
from zero_fn.kernels.compiler import cache_folder
from zero_fn.one_host.arena import Arena
from zero_fn.one_host.mailbox import are_mailboxes_available
from zero_fn.storage import Slab
from zero_fn.storage.uring import Uring
from zero_fn.values.tiers import cpu

__all__ = ["environment", "main"]

_PACKAGES = ("xxhash", "cupy-cuda12x", "transformers", "accelerate", "trl", "deepspeed")
"""Which collect_env leaves out."""

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
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
        description="What torch.utils.collect_env says, what zero_fn will use, and what is "
        "missing: a page for a report of a bug, without names of machines and users. The exit "
        "status is 1 if something is missing that training needs.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    is_json, page = parser.parse_args(arguments).json, environment()
    if is_json:
        text = json.dumps(page, indent=1)
    else:
        found = [f"{kind}: {what}\n  fix: {fix}" for kind, what, fix in page["findings"]]
        uses = "\n  ".join(["zero_fn uses", *table(list(page["uses"].items()), right=())])
        text = "\n\n".join([page["torch"], uses, *(found or ["nothing is missing"])])
    home, user = os.path.basename(os.path.expanduser("~")), os.environ.get("USER", "")
    names = {socket.gethostname().partition(".")[0], home, user}
    hidden = "|".join(re.escape(name) for name in names if len(name) > 2)
    print(re.sub(rf"\b({hidden})\b", "(name)", text) if hidden else text)
    return int(any(kind == "missing" for kind, _, _ in page["findings"]))


def environment() -> dict[str, Any]:
    """The page, as JSON takes it.

    Compiles the kernels if nobody did; starts a process group of one rank, and ends it.
    """
    installed = {each.name: each.version for each in metadata.distributions()}
    uses = {"zero_fn": str(importlib.import_module("zero_fn").__version__)}
    uses |= {name: installed[name] for name in _PACKAGES if name in installed}
    findings = [*_between_ranks(uses), *_on_the_host(uses)]
    said = str(get_pretty_env_info())  # type: ignore[no-untyped-call]
    return {"torch": said, "uses": uses, "findings": findings}


def _between_ranks(uses: dict[str, str]) -> _Findings:
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
        fix = "a newer Linux, or ulimit -f unlimited; -v, too"
        yield "slower", f"ranks of this host share no memory: {error}", fix
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        fix = "free space in /tmp, or TMPDIR=, a folder that can be written"
        yield "missing", "no folder takes temporary files: zf.launch cannot start ranks", fix


def _on_the_host(uses: dict[str, str]) -> _Findings:
    uses["threads of torch"] = str(torch.get_num_threads())
    uses["pinned memory"] = "none: no CUDA device"
    if torch.cuda.is_available():
        uses["pinned memory"] = f"by {'cupy' if importlib.util.find_spec('cupy') else 'torch'}"
        if not Slab(1 << 20, cpu(), "env").is_pinned:
            uses["pinned memory"] = "none: the driver refuses"
            what = "host memory cannot be pinned: copies to devices take longer"
            yield "slower", what, "ulimit -l unlimited; dmesg"
    found = library()
    uses["steps on the host"] = str(found) if found.functions else f"torch, {found}"
    if not found.functions:
        fix = "apt install gcc, or pip install ziglang; CC= names another compiler"
        yield "slower", f"{found}. torch does their work, with the same bits", fix
    elif cache_folder() is None:
        fix = "XDG_CACHE_HOME=, a folder that is yours alone"
        yield "slower", "each process compiles the kernels, for seconds", fix
    uses["disks"] = "io_uring"
    try:
        Uring()
    except OSError as error:
        uses["disks"] = f"threads: no io_uring ({error.strerror})"
        fix = _IO_URING.get(error.errno or 0, "Linux 5.4 or newer")
        yield "slower", f"no io_uring ({error.strerror}): threads wait for a busy interpreter", fix
    if not _HUGE_PAGES.exists() or "[never]" in _HUGE_PAGES.read_text():
        fix = f"echo madvise > {_HUGE_PAGES}"
        yield "slower", "no huge pages: a disk may take twice as long", fix
