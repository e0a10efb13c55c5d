"""`.ci/test --all` fails if a test was skipped for want of a package."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def _run(folder, *options):
    """Runs the tests of a folder, which has no other plugins, with this one."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.skips", "-c", "/dev/null", f"--rootdir={folder}"]
    environ = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run([*command, *options, folder], env=environ, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("options", [(), ("-p", "xdist", "-n", "2")], ids=["alone", "in several processes"])
def test_a_skip_for_want_of_something_else_than_the_machine_lacks_fails_the_run(tmp_path, options):
    (tmp_path / "test_file.py").write_text("import pytest\npytest.importorskip('no_such')")
    (tmp_path / "test_one.py").write_text("import pytest\ndef test_a(): pytest.skip('no compiler')")
    lacks = "def test_a(): pytest.skip('no GPU')\n@pytest.mark.xfail\ndef test_b(): assert 0"
    (tmp_path / "test_lacks.py").write_text(f"import pytest\n{lacks}")
    done = _run(tmp_path, *options)
    assert done.returncode == 1, done
    assert done.stdout.count("FAILED, as it was skipped: ") == 2, done
    (tmp_path / "test_file.py").unlink()
    (tmp_path / "test_one.py").unlink()
    assert _run(tmp_path).returncode == 0
