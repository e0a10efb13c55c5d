"""What the GitHub workflow runs is in the repository, on versions that the project supports."""

import os
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
yaml = pytest.importorskip("yaml")


def workflow():
    found = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8"))
    return found


ROWS = workflow()["jobs"]["run"]["strategy"]["matrix"]["include"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['run']}-{row['python']}")
def test_a_row_runs_programs_of_the_repository(row):
    assert all(os.access(ROOT / command.split()[0], os.X_OK) for command in row["run"].split("&&"))


def test_versions_are_those_that_the_project_supports():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest = re.search(r"torch>=([\d.]+)", " ".join(project["dependencies"]))
    assert oldest is not None
    assert f"torch=={oldest[1]}.0" in {row["torch"] for row in ROWS}, "the oldest torch is tested"
    assert any(row["torch"].startswith("torch>=") for row in ROWS), "the newest torch is tested"
    assert project["requires-python"].removeprefix(">=") in {row["python"] for row in ROWS}, (
        "the oldest Python is tested"
    )


def test_steps_use_the_row():
    """A step that named a value which no row has would run with an empty text."""
    text = (ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8")
    named = set(re.findall(r"\$\{\{ matrix\.(\w+) \}\}", text))
    assert named == set(ROWS[0])
    assert all(set(row) == named for row in ROWS)
