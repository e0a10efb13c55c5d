"""The device that programs of this folder run on: "pretend" of `device.cpp`, compiled and made known to torch, or a real one.

For a process of its own: what `load` does cannot be undone.
"""

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

import zero_fn as zf
from zero_fn.local.gloo import give_groups_one_thread
from zero_fn.transport.rank0_messages import meeting_group
from zero_fn.values.mesh import mesh_axis

__all__ = [
    "NAME",
    "UNMEASURED",
    "Unmeasured",
    "begin_group",
    "choose",
    "compiled",
    "compiler",
    "host",
    "limited",
    "load",
    "moved",
    "outcome",
    "same",
    "streams",
    "use",
    "used",
    "waiting",
    "waits",
]

NAME = "pretend"  # of the device that programs run on
SLACK_NBYTES = 64  # what its allocator may add to a model
_SOURCE = Path(__file__).with_name("device.cpp")
_TORCH = Path(torch.__file__).parent
_loaded = []


def compiler():
    """A compiler of C++, if the machine has one."""
    return shutil.which(os.environ.get("CXX", "c++"))


def compiled():
    """The device as a library, in the caches of this user: compiled unless it is there."""
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
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zero_fn-tests"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"pretend-{key}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process of tests may be at it
        if path.exists():
            return path
        with tempfile.TemporaryDirectory(dir=folder) as own:
            made = Path(own) / path.name
            done = subprocess.run([*command, *libraries, "-o", str(made)], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr[-4000:]
            made.replace(path)
    return path


def use(name):
    """Lets programs run on a real accelerator. Its sums have another order than those of the host, so numbers are compared
    within rounding; operations are asked to be deterministic, so that nothing else makes them differ."""
    global NAME, SLACK_NBYTES
    NAME, SLACK_NBYTES = name, 1 << 20
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)


def host():
    """The host as a tier. CuPy pins memory for CUDA, and for no other device."""
    return zf.cpu(pinned=_is_real())


def load(path):
    """Makes the device "pretend" known to this process."""
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


def choose(where):
    """`load` of a compiled library, or `use` of the name of a real device."""
    if where.endswith(".so"):
        load(Path(where))
    else:
        use(where)


def begin_group(store, rank, size):
    """Begins a process group whose collectives the device has, and checks that its mesh has them. On "pretend" there are none
    on the host, as over NCCL alone.

    On a real device: NCCL alone, gloo where ranks share it, or what `ZERO_FN_TEST_BACKEND` says. Two ranks on one device need
    NCCL 2.30, which may be loaded in place of torch's own by LD_PRELOAD.
    """
    backend = (os.environ.get("ZERO_FN_TEST_BACKEND") if _is_real() else None) or (
        "nccl" if size == 1 and _is_real() else "gloo"
    )
    timeout, asked = None, backend
    if _is_real():
        torch.get_device_module(NAME).set_device(0)
        timeout, asked = timedelta(seconds=60), backend if backend == "nccl" else f"cpu:{backend},{NAME}:{backend}"
    if backend == "nccl" and size > 1:
        nccl = dist.ProcessGroupNCCL
        found = tuple(nccl.get_runtime_nccl_version())
        if found < (2, 30):
            raise SystemExit(f"NCCL {found} refuses two ranks on one device, and 2.30 does not: give it by LD_PRELOAD")
        os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    if backend == "gloo":
        give_groups_one_thread()
        if _is_real():
            _gather_tensors_one_by_one(NAME)
    dist.init_process_group(asked, store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timeout)
    if not _is_real():
        meeting_group()  # over gloo, which it would make beside NCCL
        _loaded[0].pretend_join(dist.group.WORLD.group_name.encode())
    mesh = DeviceMesh.from_group(dist.group.WORLD, NAME, mesh_dim_names=("dp",))
    assert mesh_axis(mesh, verb="a test").backend == backend, "the mesh made a group of its own"
    return mesh


def _gather_tensors_one_by_one(device_type):
    """DTensor gathers by gloo's grouped all-gather, which takes memory of a device for that of the host and ends the process
    (pytorch issue 152645, open in torch 2.11 to 2.15). The all-gather of one tensor is right there."""

    def gathered(tensor, size, group):
        whole = tensor.new_empty((size * tensor.shape[0], *tensor.shape[1:]))
        found = group if isinstance(group, dist.ProcessGroup) else c10d._resolve_process_group(group)
        (getattr(found, "all_gather_single", None) or found._allgather_base)(whole, tensor).wait()
        return whole

    _loaded.append(torch.library.Library("_c10d_functional", "IMPL"))
    _loaded[-1].impl("all_gather_into_tensor", gathered, device_type.upper())


def _is_real():
    return NAME != "pretend"


class Unmeasured(Exception):
    """A program asks for what a real device does not tell: bytes that were copied, or copies that nothing has waited for."""


UNMEASURED = "not measured on this device"


def outcome(name, run):
    """What became of a program: "right", not measured, what it lacks, or a traceback. Also printed with its seconds, for
    whoever stops the process midway."""
    started = time.monotonic()
    try:
        run()
        said = short = "right"
    except Unmeasured as error:
        said = short = str(error) or UNMEASURED
    except ModuleNotFoundError as error:
        said = short = f"lacks {error.name}"
    except Exception as error:
        said = traceback.format_exc()[-1500:]
        at = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(at.filename).name}:{at.lineno} {at.line}"
        short = f"wrong: {type(error).__name__}: {' '.join(str(error).split())[:300]} ({where[:160]})"
        print(said, file=sys.stderr)
    print(f"{name}: {short}, {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
    return said


def _require_pretended():
    if _is_real():
        raise Unmeasured


def _told(name, count):
    """Numbers that the device that pretends keeps."""
    found = (ctypes.c_int64 * count)()
    getattr(_loaded[0], f"pretend_{name}")(found)
    return tuple(found)


def waiting():
    """Copies on side streams that nothing has waited for yet."""
    _require_pretended()
    count = _loaded[0].pretend_waiting()
    return count


def waits():
    """How often, since the last call, the host had to wait until the device had done all that was issued."""
    _require_pretended()
    count = _loaded[0].pretend_waits()
    return count


def moved():
    """Bytes copied to the device and from it since the last call."""
    _require_pretended()
    return _told("moved", 2)


def streams():
    """Since the last call: how often what computes had to wait for side streams, copies on these, and events there."""
    _require_pretended()
    return _told("streams", 3)


def used():
    """Bytes of its memory that are in use, and the most since the last call."""
    if _is_real():
        now, most = torch.accelerator.memory_allocated(), torch.accelerator.max_memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        return now, most
    return _told("used", 2)


@contextmanager
def limited(room):
    """Inside, no more than this many bytes of its memory are given out beside those in use. A real device gives them out in
    blocks of 2 MiB and more."""
    if room is None:
        yield
    elif _is_real():
        torch.accelerator.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.accelerator.memory_reserved() + room) / total)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
    else:
        _loaded[0].pretend_limit(ctypes.c_int64(used()[0] + room))
        try:
            yield
        finally:
            _loaded[0].pretend_limit(ctypes.c_int64(1 << 37))


def same(found, expected):
    """Whether numbers, tensors, and lists of them are the same: to the bit on "pretend", else within rounding.

    Adam divides by the root of a mean of squares, so an element whose gradient is rounding and nothing else may go either
    way: one in a thousand may.
    """
    if isinstance(expected, Mapping):
        return found.keys() == expected.keys() and all(same(found[key], value) for key, value in expected.items())
    if isinstance(expected, Sequence) and not all(isinstance(each, int | float) for each in expected):
        return len(found) == len(expected) and all(map(same, found, expected))
    one, other = (torch.as_tensor(each).detach().cpu() for each in (found, expected))
    if not _is_real():
        return torch.equal(one, other)
    if one.shape != other.shape or not one.numel():
        return one.shape == other.shape
    return _share_of_close(one.double(), other.double()) >= 0.999


def _share_of_close(one, other):
    return torch.isclose(one, other, rtol=1e-2, atol=1e-3, equal_nan=True).double().mean().item()
