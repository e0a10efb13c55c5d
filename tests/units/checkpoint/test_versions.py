"""Checkpoints of every version of the format are read, written on two ranks of ZeRO-3: `version_1/` by the first release,
`version_0_2/` by zero_fn 0.2, with an average of the model.

python -m tests.units.checkpoint.test_versions FOLDER      # how it was written; a later version gets a folder of its own
"""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import zero_fn as zf
from tests.support.ranks import axis
from tests.units.checkpoint.worlds import differing, everything
from zero_fn.local.launcher import LocalRanks

VERSION_1 = Path(__file__).parent / "version_1" / "step-7"
VERSION_0_2 = Path(__file__).parent / "version_0_2" / "step-7"
EXTRA = {"step": 7, "noise": torch.arange(4), "odd": {1: (2.5, float("inf"))}}


def _run(is_sharded):
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2).bfloat16())
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) + 100 * number)
        model[1].running_mean.copy_(torch.arange(5.0) / 8)
    model = zf.shard_params(model, axis()) if is_sharded else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25, betas=(0.5, 0.75))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _write(folder, has_average=True):
    model, optimizer = _run(is_sharded=True)
    averages = {"average": zf.ema(model)} if has_average else {}
    zf.save(folder, model, optimizer, extra=EXTRA | averages)


def _read(is_sharded, checkpoint):
    model, optimizer = _run(is_sharded)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    optimizer.param_groups[0]["lr"] = 1.0
    optimizer.state.clear()
    average = zf.ema(model)
    extra = zf.load(checkpoint, model, optimizer, extra={"average": average} if checkpoint == VERSION_0_2 else None)
    shown = {}
    if checkpoint == VERSION_0_2:
        with average.shown():
            shown = everything(model, optimizer)
    return everything(model, optimizer), shown, extra


@pytest.mark.parametrize("checkpoint", [VERSION_1, VERSION_0_2], ids=["1", "0.2"])
def test_a_checkpoint_of_an_earlier_version_is_read(ranks, checkpoint):
    expected = everything(*_run(is_sharded=False))
    for found, average, extra in [_read(False, checkpoint), *ranks(3).run(_read, True, checkpoint)]:
        assert differing(expected, found) == []
        assert checkpoint == VERSION_1 or differing(expected, average) == [], "it averaged one model"
        assert extra["odd"] == EXTRA["odd"]
        assert torch.equal(extra["noise"], torch.arange(4))


@pytest.mark.parametrize("file", ["manifest.json", "rank-00000.json", "rank-00001.json"])
@pytest.mark.parametrize("checkpoint", [VERSION_1, VERSION_0_2], ids=["1", "0.2"])
def test_what_is_written_now_says_the_same(ranks, checkpoint, file, tmp_path):
    """A change of the format needs another version, and a fixture of it."""
    ranks(2).run(_write, str(tmp_path / "step-7"), checkpoint == VERSION_0_2)

    def form(path):
        body = json.loads((path / file).read_text())["body"]
        names = () if checkpoint == VERSION_0_2 else ("names",)  # it came later, and readers do without it
        for name in ("id", "saved_at_ns", "made_by", *names):
            body.pop(name, None)
        for group in body.get("groups", ()):
            group.pop("options")  # torch adds some
        for files in body.get("files", {}).values():
            for each in files:
                each.pop("xxh3")  # of a header that has the number of the save
        return body

    assert form(tmp_path / "step-7") == form(checkpoint)


if __name__ == "__main__":
    with LocalRanks(2) as two:
        two.run(_write, (sys.argv[1],), timeout_s=60.0)
