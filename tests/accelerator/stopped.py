"""A rank that waits on an accelerator for another one, which stops, is told of it.

`python -m tests.accelerator.stopped DEVICE FOLDER RANK SIZE` says what became of it. DEVICE is "cuda" (ZERO_FN_TEST_BACKEND
names the backend), or the compiled library of the device "pretend".
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

import zero_fn as zf
from tests.accelerator import device
from zero_fn.transport.links import line_over
from zero_fn.transport.segment import Segment
from zero_fn.values.mesh import mesh_axis

__all__ = ["main"]

DEADLINE_S = 2.0


def stop(where, folder, rank, size):
    """Rank 1 stops, and rank 0 waits for it."""
    torch.set_num_threads(1)
    device.choose(where)
    links = line_over([mesh_axis(device.begin_group(f"{folder}/store of a stop", rank, size), verb="a test")])
    links.exchange(torch.ones(1, dtype=torch.uint8))
    started = time.monotonic()
    if rank:
        while not (folder / "judged").exists() and time.monotonic() < started + 40:
            time.sleep(0.1)  # it is there, and does nothing, until the other one has been judged
        os._exit(0)
    try:
        with zf.distributed.set_deadline(DEADLINE_S):
            links.all_gather([Segment(torch.zeros(4, device=device.NAME), 4, 4 // size)], "a test").wait()
            torch.accelerator.synchronize()
    except zf.errors.LostRankError:
        print(f"LostRankError after {time.monotonic() - started:.1f} s", flush=True)
        os._exit(0)
    os._exit(1)


def main(where, folder, rank, size):
    """Judges `stop`, which ends its process. On NCCL the device waits: the watchdog ends the process."""
    # In its log torch waits for a dump of what ranks did, which nobody reads.
    environment = {**os.environ, "TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100"}
    command = [sys.executable, "-m", "tests.accelerator.stopped", where, folder, str(rank), str(size), "stop"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, env=environment, text=True, **pipes)
    try:
        out, err = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        err = f"hangs: {err}"
    (Path(folder) / "judged").touch()
    is_told = process.returncode == 0 and (rank or "LostRankError" in out)
    is_ended = process.returncode == -signal.SIGABRT and f"Timeout(ms)={1000 * DEADLINE_S:.0f}" in err
    said = f"right, {out.strip() or is_ended}" if is_told or is_ended else f"wrong: {process.returncode}, {err[-1200:]}"
    print(f"a rank that stops: {said}", flush=True)
    return 0 if is_told or is_ended else 1


if __name__ == "__main__":
    if sys.argv[5:]:
        stop(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:5]))
    sys.exit(main(*sys.argv[1:3], *map(int, sys.argv[3:5])))
