"""What the GitHub workflow runs is in the repository, on versions that the project supports."""

import os
import re
import tomllib

import pytest

from tests.outside.examples.programs import ROOT

yaml = pytest.importorskip("yaml")
WORKFLOW = (ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8")
ROWS = yaml.safe_load(WORKFLOW)["jobs"]["run"]["strategy"]["matrix"]["include"]


def test_rows_run_programs_of_the_repository_and_steps_use_all_of_a_row():
    """A step that named a value which no row has would run with an empty text."""
    named = set(re.findall(r"\$\{\{ matrix\.(\w+) \}\}", WORKFLOW))
    for row in ROWS:
        assert set(row) == named
        for command in row["run"].split("&&"):
            assert os.access(ROOT / command.split()[0], os.X_OK), command


def test_versions_are_those_that_the_project_supports():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest = re.search(r"torch>=([\d.]+)", " ".join(project["dependencies"]))
    assert f"torch=={oldest[1]}.0" in {row["torch"] for row in ROWS}, "the oldest torch is tested"
    assert any(row["torch"].startswith("torch>=") for row in ROWS), "the newest torch is tested"
    oldest = project["requires-python"].removeprefix(">=")
    assert oldest in {row["python"] for row in ROWS}, "the oldest Python is tested"
