"""The lessons run from the first cell to the last, and what is committed with them is what a reader should see."""

import os
from pathlib import Path

import nbformat
import pytest
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

from tests.support.profiles import PROFILE

_ROOT = Path(__file__).parents[3]
_NOTEBOOKS = sorted((_ROOT / "notebooks").glob("*.ipynb"))
_SCREEN_LINES = 60
_FEWER = {
    "1-three-placements": [("STEPS, ROWS = 30, 64", "STEPS, ROWS = 4, 64")],
    "4-which-stage-fits": [("    1024: (30.1, 15.1, 0.12),\n", ""), ("MANY = [8, 64, 1024]", "MANY = [64]")],
    "7-fine-tuning": [
        ("[:1_000_000]", "[:100_000]"),
        ('FOLDER / "base", 100)', 'FOLDER / "base", 20)'),
        ("STEPS, SAVED_AT = 40, 20", "STEPS, SAVED_AT = 10, 5"),
    ],
}
"""Of long lessons, by name: numbers of steps or cases, and those of every day. Readers, and the other profiles, take all."""

_IMPORTED = "transformers.models.llama.modeling_llama", "peft", "torch.distributed.pipelining"
"""What ranks of lessons import. The fork server of the lessons' kernel imports it once; that of users does not."""


@pytest.fixture(scope="module")
def client():
    """One kernel for all lessons: torch is imported once, and once for all ranks."""
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(_ROOT / "notebooks"), env=os.environ | {"PYTHONPATH": str(_ROOT)})
    made = NotebookClient(nbformat.v4.new_notebook(), km=manager, timeout=240)
    yield made
    if made.kc is not None:
        made.kc.stop_channels()
    manager.shutdown_kernel(now=True)
    manager.cleanup_resources()


@pytest.mark.nightly
@pytest.mark.parametrize("path", _NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_without_errors(path, client):
    client.nb = nbformat.read(path, as_version=4)
    for many, few in _FEWER.get(path.stem, []) if PROFILE == "dev" else []:
        (cell,) = [cell for cell in client.nb.cells if many in cell.source and cell.cell_type == "code"]
        cell.source = cell.source.replace(many, few)
    prepare = f"%reset -f\nimport zero_fn.local.launcher as local\nlocal._PRELOADED += {[*_IMPORTED]}\ndel local"
    client.nb.cells.insert(0, nbformat.v4.new_code_cell(prepare))  # forgets what other lessons have defined
    client.execute()


@pytest.mark.parametrize("path", _NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_committed_with_its_outputs(path):
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), "execute it top to bottom"
    assert any(cell.outputs for cell in cells)
    for cell in cells:
        for output in cell.outputs:
            assert output.output_type != "error" and output.get("name") != "stderr", output.get("text")
            text = output.get("text") or output.get("data", {}).get("text/plain", "")
            assert len(text.splitlines()) <= _SCREEN_LINES, "an output is longer than a screen"
