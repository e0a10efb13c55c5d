"""`python -m zero_fn checkpoint`: from any format into any other, to the bit, with errors that are told."""

import subprocess
import sys
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import zero_fn as zf
from tests.support.messages import refused
from tests.units.checkpoint.damage import flip
from tests.units.checkpoint.made_by_deepspeed import HERE, adamw, built
from tests.units.checkpoint.worlds import differing, everything
from zero_fn.__main__ import main
from zero_fn.checkpoint.conversion import convert
from zero_fn.checkpoint.format.own_folder import OwnFolder
from zero_fn.checkpoint.others.find import opened


def _loaded(folder):
    model = built()
    optimizer = adamw(model)
    extra = zf.load(folder, model, optimizer)
    return model, optimizer, extra


def _same(one, other):
    (*held, extra), (*its, others) = _loaded(one), _loaded(other)
    is_same = {n: v for n, v in extra.items() if v is not None} == {n: v for n, v in others.items() if v is not None}
    return is_same and differing(everything(*held), everything(*its)) == []


@pytest.mark.parametrize("kind", ["zero2", "zero3"])
def test_formats_follow_each_other_to_the_bit(kind, tmp_path):
    source = HERE / kind
    for number, to in enumerate(["zero_fn", "zero_fn"]):
        target = tmp_path / f"{number}"
        assert main(["checkpoint", "convert", str(source), str(target), "--to", to]) == 0
        assert _same(HERE / kind, target)
        assert main(["checkpoint", "verify", str(target)]) == 0
        source = target
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_safetensors_have_the_model_alone(tmp_path):
    command = ["checkpoint", "convert", str(HERE / "zero3"), str(tmp_path / "hf"), "--to", "hf", "--dtype", "bf16"]
    assert main(command) == 0
    found = load_file(tmp_path / "hf" / "model.safetensors")
    model = _loaded(HERE / "zero3")[0]
    expected = {name: value for name, value in model.state_dict().items() if name != "last.weight"}  # tied
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name].bfloat16()) for name, value in found.items())


def test_only_some_kinds_are_kept(tmp_path):
    command = ["checkpoint", "convert", str(HERE / "zero1"), str(tmp_path / "a"), "--to", "zero_fn", "--only", "model"]
    assert main(command) == 0
    model = built()
    assert zf.load(tmp_path / "a", model) == {}
    with pytest.raises(zf.errors.CheckpointError, match="no states"):
        _loaded(tmp_path / "a")


def test_tensors_in_extra_are_converted_to_the_bit(tmp_path):
    weights = torch.arange(6.0).view(2, 3).t()
    zf.save(tmp_path / "step-1", built(), extra={"weights": weights})
    target = tmp_path / "step-2"
    assert main(["checkpoint", "convert", str(tmp_path / "step-1"), str(target), "--to", "zero_fn"]) == 0
    assert torch.equal(zf.load(target, built())["weights"], weights)


def test_an_average_is_converted_to_the_bit(tmp_path):
    model, other = built(), built()
    average = zf.ema(model, 0.5)
    with torch.no_grad():
        torch._foreach_add_(list(model.parameters()), 1.0)
    average.update()
    zf.save(tmp_path / "step-1", model, extra={"average": average})
    assert main(["checkpoint", "convert", str(tmp_path / "step-1"), str(tmp_path / "step-2"), "--to", "zero_fn"]) == 0
    loaded = zf.ema(other, 0.5)
    zf.load(tmp_path / "step-2", other, extra={"average": loaded})
    for name, value in average.tensors.items():
        assert torch.equal(loaded.tensors[name], value)


def test_commands_list_and_tell_errors(tmp_path, capsys):
    zf.save(tmp_path / "step-1", nn.Linear(3, 3))
    assert main(["checkpoint", "ls", str(tmp_path)]) == 0
    assert "step-1" in capsys.readouterr().out
    file = next((tmp_path / "step-1" / "model").iterdir())
    file.write_bytes(flip(file))
    assert main(["checkpoint", "verify", str(tmp_path)]) == 1
    assert "CheckpointError" in capsys.readouterr().err
    assert main(["checkpoint", "convert", str(tmp_path), str(tmp_path / "b"), "--to", "zero_fn"]) == 1
    assert not (tmp_path / "b").exists()
    assert main(["checkpoint", "ls", str(tmp_path / "nothing")]) == 1
    for unfinished in ([], ["checkpoint"], ["checkpoint", "burn"]):
        with pytest.raises(SystemExit, match="2"):
            main(unfinished)


def test_a_process_of_its_own_needs_no_group(tmp_path):
    command = [sys.executable, "-m", "zero_fn", "checkpoint", "ls", str(HERE / "zero1")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, "global_step2" in done.stdout) == (0, True), done.stderr


def test_values_that_ranks_have_saved_apart_are_not_converted(tmp_path):
    zf.save(tmp_path / "step-1", nn.Linear(2, 2), extra={"noise": 1})
    source = opened(tmp_path / "step-1", str)
    with (
        patch.object(OwnFolder, "differs_by_rank", return_value=True),
        refused("conversion_of_what_ranks_have_saved_apart"),
    ):
        convert(source, tmp_path / "b", "zero_fn", dtype=None, only=("model", "extra"), tell=print)
