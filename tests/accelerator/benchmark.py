"""`examples/benchmarks/accelerator.py` on the device "pretend", small: `python -m tests.accelerator.benchmark LIBRARY FOLDER`
prints the last loss of each way, as JSON."""

from __future__ import annotations

import io
import json
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path

from tests.accelerator import device

__all__: list[str] = []

BENCHMARKS = Path(__file__).parents[2] / "examples" / "benchmarks"


def main(library: Path, folder: str) -> None:
    device.load(library)
    sys.path.insert(0, str(BENCHMARKS))
    benchmark = runpy.run_path(str(BENCHMARKS / "accelerator.py"))
    said = io.StringIO()
    with redirect_stdout(said):
        benchmark["main"](
            ["--path", folder, *["--gpt", "2x64x32", "--tokens", "64", "--rounds", "1", "--numel", "4096"]]
        )
    rows = said.getvalue().partition("way ")[2].splitlines()[1:]
    print(json.dumps({row.split("  ")[0]: row.split()[-2] for row in rows}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
