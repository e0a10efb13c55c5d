"""`.ci/test --all` fails if a test was skipped for want of a package."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def _run(folder, *options):
    """Runs the tests of a folder, which has no other plugins, with this one."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.support.skips",
        "-c",
        "/dev/null",
        f"--rootdir={folder}",
        *options,
    ]
    environ = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run([*command, folder], env=environ, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("options", [(), ("-p", "xdist", "-n", "2")], ids=["alone", "in several processes"])
@pytest.mark.parametrize(
    "body",
    ["import pytest\npytest.importorskip('no_such')", "import pytest\ndef test_a(): pytest.skip('no compiler')"],
    ids=["a file", "a test"],
)
def test_a_skip_for_want_of_something_else_fails_the_run(tmp_path, body, options):
    (tmp_path / "test_ours.py").write_text(f"{body}\ndef test_b(): pass\n")
    done = _run(tmp_path, *options)
    assert done.returncode == 1, done
    assert done.stdout.count("FAILED, as it was skipped: ") == 1, done


def test_what_the_machine_lacks_may_be_skipped_and_failures_may_be_expected(tmp_path):
    tests = ["def test_a(): pytest.skip('no GPU')", "@pytest.mark.xfail\ndef test_b(): assert 0", "def test_c(): pass"]
    (tmp_path / "test_ours.py").write_text("\n".join(["import pytest", *tests]))
    done = _run(tmp_path)
    assert done.returncode == 0, done
    assert "1 passed, 1 skipped, 1 xfailed" in done.stdout
