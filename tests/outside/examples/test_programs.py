"""What every example has: sizes and a device as options, and a message for a device that is not there."""

from __future__ import annotations

import ast
import importlib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[3] / "examples"
HELPERS = {"gpt", "program"}
COPIED = {"finetune_hf"}  # files that people copy: a folder gives the sizes, a library the options
PROGRAMS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in HELPERS | COPIED)
WITHOUT_GPUS = pytest.mark.skipif(torch.cuda.device_count() > 0, reason="there is a GPU")


def module(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module(name)


def test_helpers_are_few() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == HELPERS | COPIED | set(PROGRAMS)
    assert len(PROGRAMS) > 5


@pytest.mark.parametrize("name", sorted(COPIED))
def test_a_file_to_copy_is_short_and_needs_no_file_beside_it(name: str) -> None:
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    imported = {node.module for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)}
    assert not imported & (HELPERS | set(PROGRAMS))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_has_options_for_sizes_and_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    named = {field.name for field in fields(module(name, monkeypatch).Options)}
    assert {"device", "dim"} <= named
    assert len(named) > 7


@WITHOUT_GPUS
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_device_that_is_not_there_is_refused_before_any_rank_starts(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = module("program", monkeypatch)
    with pytest.raises(SystemExit) as stopped:
        program.parse(module(name, monkeypatch).Options, None, ["--device", "cuda"])
    assert stopped.value.code == 2
    assert "needs a GPU for each of" in capsys.readouterr().err


@WITHOUT_GPUS
def test_the_device_is_the_cpu_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert module("program", monkeypatch).parse(module("moe", monkeypatch).Options, None, []).device == "cpu"


def test_the_device_is_cuda_where_every_local_rank_has_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    program, moe = module("program", monkeypatch), module("moe", monkeypatch)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert program.parse(moe.Options, None, []).device == "cuda"
    assert program.parse(moe.Options, None, ["--dp", "3"]).device == "cpu"


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("moe", ["--experts", "5"], "--experts 5 cannot be shared equally"),
        ("train_3d", ["--layers", "3"], "--layers 3 are not a multiple of the 2 parts"),
        ("train_3d", ["--heads", "3"], "--heads 3 must be a multiple of --tp 2"),
        ("hybrid", ["--heads", "5"], "heads=5 does not divide dim=64"),
        ("train_gpt", ["--batch", "5"], "--batch 5 sequences cannot be shared equally by 2 ranks"),
        ("train_gpt", ["--resume"], "--resume needs the folder to resume from"),
        ("train_gpt", ["--lr", "0"], "--lr must be above 0"),
    ],
)
def test_sizes_that_cannot_be_are_refused(
    name: str, arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        module("program", monkeypatch).parse(module(name, monkeypatch).Options, None, arguments)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", [*PROGRAMS, "gpt"])
def test_no_line_names_the_cpu_but_as_the_default(name: str) -> None:
    """Where a program says "cpu" it would compute there although another device was asked for."""
    tree = ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
    either = {id(value) for node in ast.walk(tree) if isinstance(node, ast.BoolOp) for value in node.values}
    named = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Constant) and node.value == "cpu"]
    default = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value == "cpu" and id(node) in either
    ]
    assert named == default
