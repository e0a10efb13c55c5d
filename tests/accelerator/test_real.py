"""The report of the first minutes on a real accelerator is written whatever its parts do."""

import json

import pytest

from tests.accelerator import device, real
from tests.accelerator.real import PARTS, ROOT, Part


def test_a_part_that_fails_or_hangs_ends_by_itself_and_the_others_are_reported(tmp_path, monkeypatch):
    hangs = "import subprocess, time; subprocess.Popen(['sleep', '60']); print('begun', flush=True); time.sleep(60)"
    parts = {
        "hangs": Part(1.5, [["-c", hangs], ["-c", "print('ended')"]]),
        "fails": Part(5, [["-c", "raise ValueError('told')"]]),
        "is right": Part(5, [["-c", "import sys; open(sys.argv[1] + '/trace.json', 'w'); print('right')", "FOLDER"]]),
    }
    monkeypatch.setattr(real, "PARTS", parts)
    real.main(["--minutes", "0.3", "--out", str(tmp_path / "out")])
    found = json.loads((tmp_path / "out" / "report.json").read_text())["parts"]
    assert [part["ended"] for part in found.values()] == ["its time was up", "with exit codes 1", "well"]
    assert "begun" in found["hangs"]["said"]
    assert "ValueError: told" in (tmp_path / "out" / "report.md").read_text()
    assert (tmp_path / "out" / "trace.json").exists()


def test_every_part_names_a_program_that_is_there():
    for part in PARTS.values():
        for command in part.commands:
            path = f"{command[1].replace('.', '/')}" if command[0] == "-m" else command[0].removesuffix(".py")
            assert (ROOT / f"{path}.py").exists() or (ROOT / path / "__main__.py").exists()


@pytest.mark.nightly
@pytest.mark.timeout(1100)
@pytest.mark.skipif(device.compiler() is None, reason="the device is compiled, and there is no compiler of C++")
def test_all_parts_run_on_a_device_that_pretends(tmp_path):
    found = real.main(["--device", "pretend", "--minutes", "30", "--out", str(tmp_path)])["parts"]
    lack = {name for name, part in PARTS.items() if "NCCL" in part.environment.values()}
    assert {name: part["ended"] for name, part in found.items()} == {
        name: "it did not begin: --nccl names no library" if name in lack else "well" for name in PARTS
    }
    assert not [line for part in found.values() for line in part["said"].splitlines() if ": wrong: " in line]
