"""`examples/benchmarks/accelerator.py` on the device "pretend", small."""

from __future__ import annotations

import io
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path

__all__ = ["losses"]

BENCHMARKS = Path(__file__).parents[2] / "examples" / "benchmarks"


def losses(folder: str) -> dict[str, str]:
    """The last loss of each way."""
    sys.path.insert(0, str(BENCHMARKS))
    benchmark = runpy.run_path(str(BENCHMARKS / "accelerator.py"))
    said = io.StringIO()
    with redirect_stdout(said):
        benchmark["main"](
            ["--path", folder, *["--gpt", "2x64x32", "--tokens", "64", "--rounds", "1", "--numel", "4096"]]
        )
    rows = said.getvalue().partition("way ")[2].splitlines()[1:]
    return {row.split("  ")[0]: row.split()[-2] for row in rows}
