"""`examples/benchmarks/accelerator.py` on the device "pretend", small.

`python -m tests.accelerator.benchmark DEVICE PROGRAM ARGUMENTS` runs one program there; `DEVICE losses FOLDER` prints the
losses of all ways.
"""

import io
import json
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path

import torch
import torch.distributed as dist

from tests.accelerator import device as devices

__all__ = ["losses"]

BENCHMARKS = Path(__file__).parents[2] / "examples" / "benchmarks"


def losses(folder, device):
    """The losses of each way, one for each count of tokens; the larger one recomputes its blocks.

    Raises:
        AssertionError: A bound was not measured, or losses depend on where the state of a large model rests.
    """
    main, large, bounds = (
        runpy.run_path(str(BENCHMARKS / f"accelerator{name}.py")) for name in ("", "_largest", "_bounds")
    )
    steps = ["--path", folder, "--gpt", "2x64x32", "--rounds", "1", "--tokens", "64", "128", "--product", "64"]
    found = {}
    with redirect_stdout(io.StringIO()) as said:
        for row in main["main"]([*steps, "--recompute-from", "128"]):
            found[row["way"]] = f"{found.get(row['way'], '')} {row.get('loss @ step', row)}"
        rests = [rest for rest in large["RESTS"] if rest.states in (0, 0.5, 1)]
        shape = large["Shape"](2, 64, 32)
        rows = [large["trained"](shape, rest, device, 64) for rest in rests]
        (row,) = large["largest"](device, ["2x64x32"], 64, 60)
        bounds["main"](["--path", folder, "--numel", "4096"])
    assert len({each["loss"] for each in [*rows, row]}) == 1, rows
    assert "Error" not in said.getvalue(), said.getvalue()
    return found


def main(where, program, *arguments):
    devices.choose(where)
    sys.path.insert(0, str(BENCHMARKS))
    if program == "losses":
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        print(json.dumps(losses(*arguments, torch.device(devices.NAME, 0))))
    else:
        sys.argv[:] = [program, *arguments]
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
