"""The device "pretend" of `device.cpp`, compiled and made known to torch. For a process of its own: it cannot be undone."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
import types
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

__all__ = ["NAME", "compiled", "compiler", "join", "load", "moved", "used", "waiting"]

NAME = "pretend"
_SOURCE = Path(__file__).with_name("device.cpp")
_TORCH = Path(torch.__file__).parent
_loaded: list[ctypes.CDLL] = []


def compiler() -> str | None:
    """A compiler of C++, if the machine has one."""
    return shutil.which(os.environ.get("CXX", "c++"))


def compiled(folder: Path) -> Path:
    """The device as a library, compiled into a folder unless it is there."""
    command = [
        compiler() or "c++",
        "-std=c++20",
        "-O0",
        "-fPIC",
        "-shared",
        "-DUSE_C10D_GLOO",
        f"-I{_TORCH / 'include'}",
        str(_SOURCE),
    ]
    libraries = [f"-L{_TORCH / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{_TORCH / 'lib'}"]
    key = hashlib.sha256("\0".join([_SOURCE.read_text(), torch.__version__, *command]).encode()).hexdigest()[:32]
    path = folder / f"pretend-{key}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as own:
            made = Path(own) / path.name
            done = subprocess.run([*command, *libraries, "-o", str(made)], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr[-4000:]
            made.replace(path)
    return path


def load(path: Path) -> None:
    """Makes the device known to this process."""
    torch.utils.rename_privateuse1_backend(NAME)
    torch.ops.load_library(path)
    library = ctypes.CDLL(str(path))
    library.pretend_begin()
    _loaded.append(library)
    module = types.ModuleType(f"torch.{NAME}")
    vars(module).update(
        is_available=lambda: True,
        set_device=lambda _device: None,
        is_initialized=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        device=lambda _device: nullcontext(),
        _is_in_bad_fork=lambda: False,
        _lazy_init=lambda: None,
        manual_seed_all=lambda _seed: None,
        get_rng_state=lambda device=None: torch.get_rng_state(),
        set_rng_state=lambda state, device=None: torch.set_rng_state(state),
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
    )
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


def join(group: dist.ProcessGroup) -> None:
    """Gives a process group on gloo collectives for the device."""
    _loaded[0].pretend_join(group.group_name.encode())


def waiting() -> int:
    """Copies on side streams that nothing has waited for yet."""
    count: int = _loaded[0].pretend_waiting()
    return count


def moved() -> tuple[int, int]:
    """Bytes copied to the device and from it since the last call."""
    found = (ctypes.c_int64 * 2)()
    _loaded[0].pretend_moved(found)
    return found[0], found[1]


def used() -> tuple[int, int]:
    """Bytes of its memory that are in use, and the most since the last call."""
    found = (ctypes.c_int64 * 2)()
    _loaded[0].pretend_used(found)
    return found[0], found[1]
