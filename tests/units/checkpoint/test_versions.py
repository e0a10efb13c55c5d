"""Checkpoints of every version of the format are read: `version_1/` was written by the first, on two ranks of ZeRO-3.

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


def _write(folder):
    zf.save(folder, *_run(is_sharded=True), extra=EXTRA)


def _read(is_sharded):
    model, optimizer = _run(is_sharded)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    optimizer.param_groups[0]["lr"] = 1.0
    optimizer.state.clear()
    extra = zf.load(VERSION_1, model, optimizer)
    return everything(model, optimizer), extra


def test_a_checkpoint_of_the_first_version_is_read(ranks):
    expected = everything(*_run(is_sharded=False))
    found, extra = _read(is_sharded=False)
    assert differing(expected, found) == []
    assert extra["odd"] == EXTRA["odd"]
    assert torch.equal(extra["noise"], torch.arange(4))
    for found, _ in ranks(3).run(_read, is_sharded=True):
        assert differing(expected, found) == []


@pytest.mark.parametrize("file", ["manifest.json", "rank-00000.json", "rank-00001.json"])
def test_what_is_written_now_says_the_same(ranks, file, tmp_path):
    """A change of the format needs another version, and a fixture of it."""
    ranks(2).run(_write, str(tmp_path / "step-7"))

    def form(path):
        body = json.loads((path / file).read_text())["body"]
        for name in ("id", "saved_at_ns", "made_by", "names"):  # the last came later, and readers do without it
            body.pop(name, None)
        for group in body.get("groups", ()):
            group.pop("options")  # torch adds some
        for files in body.get("files", {}).values():
            for each in files:
                each.pop("xxh3")  # of a header that has the number of the save
        return body

    assert form(tmp_path / "step-7") == form(VERSION_1)


if __name__ == "__main__":
    with LocalRanks(2) as two:
        two.run(_write, (sys.argv[1],), timeout_s=60.0)
