"""`examples/benchmarks/accelerator.py` on the device "pretend", small."""

from __future__ import annotations

import io
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path

__all__ = ["losses"]

BENCHMARKS = Path(__file__).parents[2] / "examples" / "benchmarks"
_SMALL = ["--gpt", "2x64x32", "--rounds", "2", "--numel", "4096", "--product", "64"]


def losses(folder: str) -> dict[str, str]:
    """The last loss of each way and count of tokens, or what failed. The larger count recomputes its blocks."""
    sys.path.insert(0, str(BENCHMARKS))
    main = runpy.run_path(str(BENCHMARKS / "accelerator.py"))["main"]
    with redirect_stdout(io.StringIO()):
        rows = main(["--path", folder, *_SMALL, "--tokens", "64", "128", "--recompute-from", "128"])
        main(["--path", folder, *_SMALL, "--bounds"])
        (large,) = main(["--largest", "--shapes", "2x64x32", "--tokens", "64"])
    found = {f"{row['way']}, {row['tokens']}": row.get("loss @ step", row.get("failed")) for row in rows}
    return found | {"largest": large["parameters"]}
