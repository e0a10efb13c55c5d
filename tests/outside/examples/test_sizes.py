"""The tables of docs/guides/sizes.md are what examples/sizes.py prints: of each table some cells, to the character."""

import re
import runpy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import zero_fn as zf
from tests.outside.examples.programs import ROOT
from zero_fn.planning.configurations import pretended
from zero_fn.planning.models import model_of

PAGE = (ROOT / "docs" / "guides" / "sizes.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def program():
    return runpy.run_path(str(ROOT / "examples" / "sizes.py"))


def _table(header):
    """The rows of the table whose header begins so, by their first cell, and by their first two."""
    _, found, rest = PAGE.partition(f"\n| {header}")
    assert found, header
    rows = rest.partition("---|\n")[2].partition("\n\n")[0]
    cells = [row.split(" | ") for row in re.findall(r"^\| (.+) \|$", rows, re.MULTILINE)]
    return {key: row for row in cells for key in ((row[0],), (row[0], row[1]))}


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["bf16", "bf16, states in 8 bits", "fp32"])
def test_the_fastest_of_7b(program, kind):
    table = _table(f"{kind} | ")
    assert all(table[f"{model}, {ranks}",] for model in program["MODELS"] for ranks in (8, 64)), "a row is missing"
    for ranks in (8, 64):
        assert program["fastest"](kind, "7B", ranks) == table[f"7B, {ranks}",]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "model", "ranks", "device"),
    [
        ("bf16", "30B", 1024, "141 GB"),
        ("bf16, states in 8 bits", "70B", 64, "80 GB"),
        ("fp32", "175B", 64, "24 GB"),
        ("bf16", "8x22B", 64, "40 GB"),
    ],
)
def test_the_fastest_of_a_larger_one(program, kind, model, ranks, device):
    row = _table(f"{kind} | ")[f"{model}, {ranks:,}",]
    column = 1 + list(program["DEVICES"]).index(device)
    assert program["fastest"](kind, model, ranks, [device])[1] == row[column]


@pytest.mark.nightly
@pytest.mark.parametrize("model", ["7B", "70B"])
def test_bytes_that_are_sent(program, model):
    table = _table("64 ranks | ")
    for stage in program["STAGES"]:
        assert program["sent"](model, stage) == table[model, stage]


@pytest.mark.nightly
@pytest.mark.parametrize("model", ["7B", "70B"])
def test_bytes_at_rest(program, model):
    for kind in ("bf16", "fp32"):
        table = _table(f"{kind}, GB | ")
        for stage in program["STAGES"]:
            assert program["at_rest"](kind, model, stage) == table[model, stage]


@pytest.mark.nightly
def test_the_largest_model(program):
    table = _table("devices | DDP")
    assert program["largest"](8, ["DDP", "ZeRO-1"]) == table["8",][:3]


@pytest.mark.parametrize("stage", [zf.shard_grads, zf.shard_params])
def test_experts_on_an_axis_of_their_own(stage):
    """The rows of docs/guides/experts.md, placed as examples/mixtral_experts.py does."""
    model = model_of("8x22B", sequence=8, microbatch=1).module
    stacked = [name for name, _ in model.named_parameters() if ".experts." in name]
    with pretended(32):
        mesh = init_device_mesh("cuda", (4, 8), mesh_dim_names=("dp", "ep"))
        for name in stacked:
            module, _, own = name.rpartition(".")
            cut = distribute_tensor(model.get_parameter(name).detach(), mesh["ep"], [Shard(0)])
            setattr(model.get_submodule(module), own, torch.nn.Parameter(cut))
        model = stage(zf.precision(model), mesh["dp"], units=type(model.model.layers[0]))
        model = stage(model, mesh["ep"], where=lambda name, _: name not in stacked)
        plan = zf.plan(model, torch.optim.AdamW(model.parameters()))
    held, sent = plan.memory.total / 1e9, plan.sent_nbytes / 1e9
    row = f"| 8x22B, `zf.{stage.__name__}` | {held:.1f} | {plan.in_flight_nbytes / 1e9:.1f} | {sent:.1f} |"
    assert row in (ROOT / "docs" / "guides" / "experts.md").read_text(encoding="utf-8")
