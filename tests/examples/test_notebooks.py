"""The lessons run from the first cell to the last, and what is committed with them is what a reader should see."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

_ROOT = Path(__file__).parents[2]
_NOTEBOOKS = sorted((_ROOT / "notebooks").glob("*.ipynb"))
_SCREEN_LINES = 60

notebooks = pytest.mark.parametrize("path", _NOTEBOOKS, ids=lambda path: path.stem)


def test_there_are_notebooks() -> None:
    assert _NOTEBOOKS


@notebooks
def test_notebook_runs_without_errors(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(_ROOT))
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, timeout=240, kernel_name="python3", resources=resources).execute()


@notebooks
def test_notebook_is_committed_with_its_outputs(path: Path) -> None:
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), "execute it top to bottom"
    assert any(cell.outputs for cell in cells)
    for cell in cells:
        for output in cell.outputs:
            assert output.output_type != "error"
            assert output.get("name") != "stderr", output.get("text")
            text = output.get("text") or output.get("data", {}).get("text/plain", "")
            assert len(text.splitlines()) <= _SCREEN_LINES, "an output is longer than a screen"
