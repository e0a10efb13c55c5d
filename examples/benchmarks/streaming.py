"""Inference with weights that memory does not hold, one pass at a time: zero_fn beside what else reads them from a disk.

    python examples/benchmarks/streaming.py --path /local_nvme --rounds 7 --peer /path/to/a/python/with/deepspeed
    python examples/benchmarks/streaming.py --path /local_nvme --only zero_fn,mmap --limit 800MiB

The model is a Llama with random weights, 1.77 GB in bfloat16, which is saved once below `--path` and kept. Each way is a
process of its own. They take turns pass by pass, so that a loaded machine slows all alike; ratios are of passes of the same
round: their median with a 95 % bootstrap interval.

    memory      transformers, all weights in memory, no limit: the computation alone
    mmap        transformers, weights mapped from safetensors: the kernel reads them and drops them
    accelerate  `accelerate.disk_offload`, weights and buffers
    deepspeed   ZeRO-Inference: stage 3, offload_param to nvme. With `--peer` only: the interpreter of an environment with
                deepspeed (`pip install deepspeed ninja`; libaio-dev). It needs more memory: `--peer-limit`
    zero_fn     on meta, `zf.offload(model, params=zf.nvme(path))`, `zf.load_pretrained(model, folder)`
    in place    the same with `copy=False`: no second copy on the disk
    resident    ... and `resident=0.15`: that part stays in memory
    int8, int4  ... and `zf.precision(gather=zf.wire.int8())`: codes on the disk, decoded layer by layer

The limit is beside what imports take, and holds while the model is loaded, too. It counts the page cache where a memory
cgroup can be made (by root); elsewhere it is RLIMIT_DATA, which counts private memory. All files are dropped from the page
cache before each pass of all but `memory`; what `mmap` still maps stays with it. "s / disk" is against the time in which what
was read comes at 0.95 of the disk's speed, by direct reads in the same round.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import os
import re
import resource
import select
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from io import FileIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from accelerate import disk_offload, init_empty_weights
from measured import interval, shown, table
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import zero_fn as zf

SHAPES = ((1, 16), (8, 128))  # texts x tokens
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
FULL, SMALL = (2048, 5632, 16, 16, 8), (192, 512, 4, 3, 3)
NUMBERS = {"s": 3, "CPU s": 3, "system": 3, "peak MiB": 0, "private MiB": 0, "read MB": 0}  # with digits
COLUMNS = ("s", "s / memory", "CPU s", "CPU s / memory", "system", "peak MiB", "private MiB", "read MB", "s / disk")
V1 = ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.max_usage_in_bytes", "memory.swappiness")
V2 = ("/sys/fs/cgroup", "memory.max", "memory.peak", "memory.swap.max")  # where, limit, peak, no swap
BLOCK_NBYTES, IN_FLIGHT, MEBI, CPU = 8 << 20, 8, 1 << 20, torch.device("cpu")

Build = Callable[[Path, Path], nn.Module]  # from the folder of the model, and an empty one


def on_meta(folder: Path, *, buffers: bool = True) -> nn.Module:
    with init_empty_weights(include_buffers=buffers):
        model: nn.Module = LlamaForCausalLM._from_config(LlamaConfig.from_pretrained(folder), dtype=torch.bfloat16)
    return model


def mapped(folder: Path) -> nn.Module:
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    model = on_meta(folder, buffers=False)
    model.load_state_dict(tensors, assign=True)
    return model


def in_memory(folder: Path, own: Path) -> nn.Module:
    model = mapped(folder)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def deepspeed(folder: Path, own: Path) -> Any:
    import deepspeed as ds  # type: ignore[import-not-found,unused-ignore]
    from transformers.integrations import HfDeepSpeedConfig

    largest = max(parameter.numel() for parameter in on_meta(folder).parameters())
    to = {"device": "nvme", "nvme_path": str(own), "pin_memory": False, "buffer_size": largest, "buffer_count": 4}
    aio = {"block_size": BLOCK_NBYTES, "queue_depth": 8, "overlap_events": True, "intra_op_parallelism": 4}
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3, "offload_param": to}, "aio": aio}
    config |= {"train_micro_batch_size_per_gpu": 1}
    dist.init_process_group("gloo", init_method=f"file://{own}/meeting", rank=0, world_size=1)
    _known = HfDeepSpeedConfig(config)  # from it transformers knows that weights go to the disk as they are read
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return ds.initialize(model=model, config=config)[0].module


def zero_fn(load: Mapping[str, Any] | None = None, precision: Mapping[str, Any] | None = None, **offload: Any) -> Build:
    # With options of `zf.load_pretrained`, `zf.precision` and `zf.offload`.
    def build(folder: Path, own: Path) -> nn.Module:
        model = on_meta(folder).requires_grad_(False)
        model = zf.precision(model, **precision) if precision else model
        model = zf.offload(model, params=zf.nvme(str(own)), **offload)
        zf.load_pretrained(model, folder, **(load or {}))
        return model

    return build


WAYS: dict[str, Build] = {
    "memory": in_memory,
    "mmap": lambda folder, own: mapped(Path(shutil.copytree(folder, own / "copy"))),  # no other way finds it mapped
    "accelerate": lambda folder, own: disk_offload(mapped(folder), own / "weights", CPU, offload_buffers=True),
    "deepspeed": deepspeed,
    "zero_fn": zero_fn(),
    "in place": zero_fn({"copy": False}),
    "resident": zero_fn({"copy": False}, resident=0.15),
    "int8": zero_fn({"copy": False}, {"gather": zf.wire.int8()}),
    "int4": zero_fn({"copy": False}, {"gather": zf.wire.int4()}),
}
ROUNDED = {"int8", "int4"}  # ways with other logits than those of memory, as they hold rounded weights


def counted(file: str, key: str) -> int:
    """A number of a file of /proc that has one in each line, in bytes where it is in kB; 0 of a process that has ended."""
    text = Path(file).read_text() if Path(file).exists() else ""
    found = re.search(rf"^{key}:\s+(\d+)( kB)?$", text, re.MULTILINE)
    return int(found[1]) * (1024 if found[2] else 1) if found else 0


def take_turns(name: str, folder: Path, own: Path, limit: int) -> None:
    """A child: says what its imports take, builds when it may, and answers each line, a shape, by a pass."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed
    if name == "deepspeed":
        os.environ.update(DS_ACCELERATOR="cpu", LOCAL_SIZE="1", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
        from deepspeed.ops.op_builder import cpu  # type: ignore[import-not-found,unused-ignore]

        _compiled = [builder().load() for builder in (cpu.ShareMemCommBuilder, cpu.AsyncIOBuilder)]  # at first use
    sys.stdin.readline()
    print(counted("/proc/self/status", "RssAnon"), file=answers, flush=True)
    sys.stdin.readline()
    if limit:  # there is no cgroup
        resource.setrlimit(resource.RLIMIT_DATA, (counted("/proc/self/status", "VmData") + limit,) * 2)
    model: Any = WAYS[name](folder, own).eval()
    # Else torch copies a head that is frozen, once for each text: the strides of last positions are not those of a matrix.
    model.lm_head.register_forward_pre_hook(lambda _, inputs: (inputs[0].flatten(0, 1),))
    print("built", file=answers, flush=True)
    for line in sys.stdin:
        tokens = torch.randint(32000, json.loads(line), generator=torch.Generator().manual_seed(1))
        read, before = counted("/proc/self/io", "read_bytes"), resource.getrusage(resource.RUSAGE_SELF)
        start = time.perf_counter()
        with torch.inference_mode():
            logits = model(input_ids=tokens, use_cache=False, logits_to_keep=1).logits
        took_s, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
        system_s = after.ru_stime - before.ru_stime
        found: dict[str, Any] = {"s": took_s, "system": system_s, "CPU s": after.ru_utime - before.ru_utime + system_s}
        found["read MB"] = (counted("/proc/self/io", "read_bytes") - read) / 1e6
        torch.save(logits := logits.clone(), own / "logits.pt")
        found["digest"] = hashlib.sha256(logits.view(torch.uint8).numpy().data).hexdigest()
        print(json.dumps(found), file=answers, flush=True)


class Contestant:
    """A child, in a memory cgroup where one can be made. `ended` says how, once it has ended before its time."""

    def __init__(self, name: str, folder: Path, own: Path, limit: str, python: str) -> None:
        self.own, self.ended, self._private, self._imports = own, "", 0, 0
        self._limit = int(limit.removesuffix("MiB")) * MEBI
        self.version = 2 if Path("/sys/fs/cgroup/cgroup.controllers").exists() else 1
        below, *files = V2 if self.version == 2 else V1
        self._group = Path(below) / f"streaming-{os.getpid()}-{name}"
        self._max, self._peak, self._swap = (self._group / file for file in files)
        own.mkdir()
        with suppress(OSError):
            self._group.mkdir()
        self.version *= self._peak.exists()  # 0: there is none
        argv = [python, __file__, "--child", name, str(folder), str(own), str(0 if self.version else self._limit)]
        if self.version:  # it enters the group before it is Python
            argv = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self._group / "cgroup.procs"), *argv]
            self._counter = os.open(self._peak, os.O_RDWR)  # v2 counts anew for one descriptor only
        self._child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def load(self) -> None:
        """Begins to limit what it has imported, and builds the model."""
        self._imports = int(self._ask("import", "importing") or 0)
        if self.version and self._limit and not self.ended:
            if self._swap.exists():
                self._swap.write_text("0")
            self._max.write_text(str(self._imports + self._limit))
        self._ask("build", "loading")

    def take_turn(self, shape: Sequence[int], disk: float) -> list[dict[str, Any]]:
        """A pass, or none of a child that has ended. Memory is beside the imports."""
        self._private, _ = 0, self._peak_nbytes()  # both begin anew
        line = self._ask(json.dumps(shape), "{} x {}".format(*shape))
        found: dict[str, Any] = json.loads(line) if line else {}
        found |= {"private MiB": self._private - self._imports, "peak MiB": self._peak_nbytes() - self._imports}
        return [found | {"disk s": found["read MB"] / disk / 0.95}] if line else []

    def end(self) -> None:
        self._child.kill()
        self._child.wait()
        with suppress(OSError):
            self._group.rmdir()

    def _peak_nbytes(self) -> float:
        """The most since this was asked for last."""
        found = float(os.pread(self._counter, 32, 0)) if self.version else float("nan")
        with suppress(OSError):  # v2 before Linux 6.12 counts from the beginning
            os.pwrite(self._counter if self.version else -1, b"0", 0)
        return found

    def _ask(self, line: str, doing: str) -> str:
        """What it answers; meanwhile its private memory is looked at."""
        assert self._child.stdin is not None and self._child.stdout is not None
        with suppress(BrokenPipeError):  # it has ended
            os.write(self._child.stdin.fileno(), f"{line}\n".encode())
        answered: list[Any] = []
        while not answered:
            answered, *_ = select.select([self._child.stdout], [], [], 0.02)
            self._private = max(self._private, counted(f"/proc/{self._child.pid}/status", "RssAnon"))
        answer = self._child.stdout.readline()
        if not answer:
            how = "killed" if self._child.wait() == -9 else f"ended ({self._child.returncode})"
            self.ended = self.ended or f"{how}, {doing}"
        return answer


def drop(files: Iterable[Path]) -> None:
    """Drops files from the page cache."""
    for file in files:
        with file.open("rb") as opened:
            os.fdatasync(opened)
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def disk_mb_per_s(files: list[Path]) -> float:
    """The speed of direct reads in blocks, several at once."""
    opened = [FileIO(os.open(file, os.O_RDONLY | os.O_DIRECT)) for file in files]
    blocks = [(file.fileno(), at) for file in opened for at in range(0, os.fstat(file.fileno()).st_size, BLOCK_NBYTES)]
    memory = [mmap.mmap(-1, BLOCK_NBYTES) for _ in range(IN_FLIGHT)]

    def read(number: int) -> int:
        return sum(os.preadv(fd, [memory[number]], at) for fd, at in blocks[number::IN_FLIGHT])

    start = time.perf_counter()
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        return sum(pool.map(read, range(IN_FLIGHT))) / (time.perf_counter() - start) / 1e6


def report(shape: Sequence[int], passes: Mapping[str, list[dict[str, Any]]], by: Mapping[str, Contestant]) -> str:
    """A table of what was measured of one shape."""
    rows, title = [], "{} x {} tokens".format(*shape)
    for name, own in passes.items():
        row = dict.fromkeys((title, *COLUMNS), "") | {title: name, "logits": by[name].ended}
        rows.append(row)
        if not own:
            continue
        for key, digits in NUMBERS.items():
            scale = MEBI if "MiB" in key else 1
            row[key] = f"{(max if 'MiB' in key else statistics.median)(one[key] for one in own) / scale:.{digits}f}"
        for key in ("s", "CPU s"):
            pairs = zip(own, passes["memory"], strict=False)  # it may have ended before the last round
            row[f"{key} / memory"] = shown(interval([one[key] / base[key] for one, base in pairs]))
        if min(one["disk s"] for one in own):
            row["s / disk"] = shown(interval([one["s"] / one["disk s"] for one in own]))
        logits, base = (torch.load(by[way].own / "logits.pt").float() for way in (name, "memory"))
        far = (logits - base).abs().max().item()
        row["logits"] = row["logits"] or (f"off by {far:.2g} of {base.abs().max():.2g}" if far else "the same")
    return table(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--path", type=Path, required=True, help="a folder of the disk")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--limit", default="600MiB", help="of memory beside imports")
    parser.add_argument("--peer", help="the interpreter that has deepspeed")
    parser.add_argument("--peer-limit", default="1300MiB", help="that of deepspeed")
    parser.add_argument("--only", default=",".join(WAYS), help="these, and memory")
    parser.add_argument("--small", action="store_true", help="a model of 28 MB")
    options = parser.parse_args()
    asked = {"memory", *options.only.split(",")} - (set() if options.peer else {"deepspeed"})
    if asked - WAYS.keys():
        parser.error(f"--only has {', '.join(asked - WAYS.keys())}, and there are {', '.join(WAYS)}")
    ways, folder = [name for name in WAYS if name in asked], options.path / ("small" if options.small else "full")
    if not (folder / "config.json").exists():
        config = LlamaConfig(**dict(zip(SIZES, SMALL if options.small else FULL, strict=True)))
        torch.manual_seed(0)
        LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(folder, max_shard_size="500MB")
    files, by, wrong = sorted(folder.glob("*.safetensors")), dict[str, Contestant](), set[str]()
    with TemporaryDirectory(dir=options.path) as work, ExitStack() as ends:
        for name in ways:
            limit = {"memory": "0MiB", "deepspeed": options.peer_limit}.get(name, options.limit)
            python = options.peer if name == "deepspeed" else sys.executable
            by[name] = Contestant(name, folder, Path(work) / name, limit, python)
            ends.callback(by[name].end)
            by[name].load()
        cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        print(f"{cpu[1] if cpu else 'a CPU'}, {os.cpu_count()} cores, {torch.get_num_threads()} threads", end=", ")
        print(f"load {os.getloadavg()[0]:.1f}, torch {torch.__version__}, {options.rounds} rounds", end=", ")
        print(f"{sum(file.stat().st_size for file in files) / 1e9:.2f} GB of weights, limit {options.limit}", end=" ")
        how = ("RLIMIT_DATA, as no cgroup can be made", "a memory cgroup v1", "a memory cgroup v2")[
            by["memory"].version
        ]
        print(f"beside imports (deepspeed: {options.peer_limit}) by {how}")
        for shape in SHAPES:
            passes: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
            for round_ in range(options.rounds + 1):
                disk, turn = disk_mb_per_s(files), round_ % len(ways)
                for name in (*ways[turn:], *ways[:turn]):
                    if name != "memory":
                        drop(file for file in options.path.rglob("*") if file.is_file())
                    found = by[name].take_turn(shape, disk)
                    passes[name] += found if round_ else []  # the first warms up
            print(f"\n{report(shape, passes, by)}", flush=True)
            right = {one["digest"] for one in passes["memory"]}
            wrong |= {name for name in ways if name not in ROUNDED and {one["digest"] for one in passes[name]} - right}
    sys.exit(f"other logits than those of memory: {', '.join(sorted(wrong))}" if wrong else 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        take_turns(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]), int(sys.argv[5]))
    else:
        main()
