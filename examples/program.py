"""What the examples share: their command line, the device they compute on, their ranks, and a limit of memory."""

from __future__ import annotations

import argparse
import os
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zero_fn as zf

__all__ = ["device_option", "limit_memory", "mesh_of", "on_ranks", "option", "parse"]

T = TypeVar("T")
R = TypeVar("R")


def option(
    default: T, help: str, *, kind: Callable[[str], object] | None = None, choices: Sequence[object] | None = None
) -> T:
    """A field of a dataclass that is also an option of the command line: `layers: int = option(4, "blocks")` is `--layers`.

    Args:
        default: The value if the option is not given. False makes a switch; True makes one that `--no-...` switches off.
        help: The text that `--help` shows.
        kind: Makes a value of the word that was given; the type of `default` if None.
        choices: The values that are allowed; all if None.
    """
    value: T = field(default=default, metadata={"help": help, "type": kind or type(default), "choices": choices})
    return value


def device_option() -> str | None:
    """The option `--device`; `parse` puts the device in its place."""
    return option(None, "where to compute; by default cuda if every local rank has a GPU", choices=["cpu", "cuda"])


def parse(kind: type[T], about: str | None, arguments: Sequence[str] | None = None) -> T:
    """Reads the command line into a dataclass.

    Args:
        kind: A dataclass of `option` fields; it may have a field or a property `ranks`.
        about: The docstring of the program.
        arguments: The words after the name of the program; those of the command line if None.

    Returns:
        The options, `device` being "cpu" or "cuda". Under torchrun a field `ranks` is the number of its ranks.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for each in fields(kind):  # type: ignore[arg-type]
        about_each = dict(each.metadata)
        if isinstance(each.default, bool):
            about_each["action"] = argparse.BooleanOptionalAction
            del about_each["type"], about_each["choices"]
        elif each.default is None:
            about_each["type"] = about_each["type"] if about_each["type"] is not type(None) else str
        else:
            about_each["help"] += f" (default: {each.default})"
        parser.add_argument(f"--{each.name.replace('_', '-')}", default=each.default, **about_each)
    given: dict[str, Any] = vars(parser.parse_args(arguments))
    if "WORLD_SIZE" in os.environ and "ranks" in given:
        given["ranks"] = int(os.environ["WORLD_SIZE"])
    try:
        options = kind(**given)
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", getattr(options, "ranks", 1)))
        return replace(options, device=_device(given["device"], local_ranks))  # type: ignore[type-var]
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")


def _device(asked: str | None, local_ranks: int) -> str:
    """The device that was asked for; if none was, cuda where every local rank has a GPU of its own, else cpu."""
    gpus = torch.cuda.device_count()
    if asked == "cuda" and gpus < local_ranks:
        raise ValueError(f"--device cuda needs a GPU for each of {local_ranks} local ranks, and torch sees {gpus}")
    return asked or ("cuda" if gpus >= local_ranks else "cpu")


@contextmanager
def mesh_of(device: str, **sizes: int) -> Iterator[DeviceMesh]:
    """The mesh with these axes. Ranks of `zf.launch` have a process group already; those of torchrun make one here."""
    is_launched = dist.is_initialized()
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not is_launched:
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_ranks))
    try:
        yield init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    finally:
        if not is_launched:
            dist.destroy_process_group()


def on_ranks(ranks: int, fn: Callable[..., R], *args: object) -> R | None:
    """Runs `fn(*args)` on the ranks of torchrun, or else on new local ranks. Returns the result of rank 0, else None."""
    if "RANK" in os.environ:
        value = fn(*args)
        return value if os.environ["RANK"] == "0" else None
    values: list[R] = zf.launch(fn, ranks, *args, timeout_s=None)
    return values[0]


def limit_memory(device: str, nbytes: int) -> None:
    """Lets this process take at most `nbytes` more than it has: memory of the GPU, or private memory as Linux counts it."""
    if device == "cuda":
        total = torch.cuda.get_device_properties().total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + nbytes) / total))
        return
    if sys.platform != "linux":
        raise SystemExit("the limit of memory is that of Linux (RLIMIT_DATA)")
    rows = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    taken = int(rows["VmData"].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (taken + nbytes, resource.RLIM_INFINITY))
