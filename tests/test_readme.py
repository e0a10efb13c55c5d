"""The quickstart of the README runs as it is printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parent.parent


def test_quickstart_runs(tmp_path: Path) -> None:
    _, _, rest = (_ROOT / "README.md").read_text(encoding="utf-8").partition("\n## Quickstart\n")
    found = re.search(r"^```python\n(.*?)^```$", rest, re.MULTILINE | re.DOTALL)
    assert found is not None
    script = tmp_path / "quickstart.py"
    script.write_text(found[1])
    command = [sys.executable, "-c", f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Held(") == 2, done.stdout
