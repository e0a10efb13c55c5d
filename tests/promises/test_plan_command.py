"""`python -m zero_fn plan` says what a real run needs: bytes, operations, and the code, without ranks and without values."""

import dataclasses
import json
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import zero_fn as zf
from tests.support.ranks import axis
from zero_fn.__main__ import main
from zero_fn.planning.activations import activations_of, live_bytes
from zero_fn.planning.configurations import (
    _OVER_ONE,
    _OVER_TWO,
    UNKNOWN,
    Training,
    _apart,
    compute_of,
    configurations,
    pretended,
    shapes_of,
)
from zero_fn.planning.machines import DEVICES, Machine
from zero_fn.planning.models import PlannedModel, on_meta
from zero_fn.planning.plan_command import planned
from zero_fn.planning.repeated_layers import cut_to, stacks_of
from zero_fn.values.tiers import IN_MEMORY

MODEL = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, depth=6, dim=64, vocab=99):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.head = nn.Linear(dim, vocab)  # units run in the order of registration, as a plan takes them to

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def bare():
    return Net()


def small():
    return Net(), torch.zeros(4, 32, dtype=torch.long)


def looks():
    class Looks(Net):
        def forward(self, tokens):
            return super().forward(tokens) if tokens.sum() > 0 else None

    return Looks(), torch.zeros(4, 32, dtype=torch.long)
"""
NAMES = {"__name__": "of_a_user"}
exec(MODEL, NAMES)


def made(depth=6, dim=64, device="meta"):
    with torch.device(device):
        tokens = torch.zeros(4, 32, dtype=torch.long)
        return PlannedModel(NAMES["Net"](depth, dim), (tokens,), tokens.numel(), "", "")


def training(**options):
    return Training(Machine(DEVICES["h100"]), **options)


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A file with the model, in the current folder. Its name."""
    (tmp_path / "of_a_user.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "of_a_user", raising=False)
    return "of_a_user"


def said(capsys, *arguments):
    """The exit status of the command, and what it prints."""
    status = main(["plan", *arguments])
    return status, capsys.readouterr().out


def test_fake_tensors_need_what_real_ones_do():
    """Bytes of a forward and backward, counted with values and without; operations, beside torch's own counter."""
    real = made(device="cpu")
    found = live_bytes(real.module, real.inputs or ())
    planned_, (without, with_) = made(), compute_of(made(), training(computes_in=torch.float32))
    assert without == activations_of(planned_.module, planned_.inputs or (), torch.float32, (), recompute=False)
    assert dataclasses.asdict(without) == found
    with FlopCounterMode(display=False) as counted:
        real.module(*(real.inputs or ())).sum().backward()
    assert without.flops == counted.get_total_flops()
    block = 2 * 2 * 4 * 32 * 64 * 256  # operations of a forward of a block
    assert with_.flops == without.flops + 6 * block - 6 * block // 2, "the last product of a block is not run again"
    kept = 4 * 32 * 64 * 4  # bytes of the input of a block
    assert with_.nbytes < without.nbytes / 2 and with_.nbytes > 6 * kept


@pytest.mark.parametrize("recompute", [False, True])
def test_a_few_layers_tell_of_all(recompute):
    model = made(depth=9)
    (stack,) = stacks_of(model.module)
    assert stack == ("blocks", 0, 9)
    few = activations_of(model.module, model.inputs or (), torch.bfloat16, [stack], recompute=recompute)
    whole = made(depth=9)
    cut_to(whole.module, [(stack, 9)])
    shorter = [activations_of(made(d).module, whole.inputs or (), torch.bfloat16, [("blocks", 0, d)], recompute=recompute)
               for d in (3, 4)]  # fmt: skip
    assert few.nbytes == shorter[0].nbytes + 6 * (shorter[1].nbytes - shorter[0].nbytes)
    if not recompute:
        assert few == activations_of(whole.module, whole.inputs or (), torch.bfloat16, (), recompute=False)


def test_layers_of_two_kinds_are_run_again_once():
    """The first layers dense, the others wider, as in models of experts."""
    model = made(depth=5)
    with torch.device("meta"):
        model.module.blocks.extend(NAMES["Block"](64) for _ in range(6))
        for block in list(model.module.blocks)[5:]:
            block.up, block.down = nn.Linear(64, 512), nn.Linear(512, 64)
    assert stacks_of(model.module) == [("blocks", 0, 5), ("blocks", 5, 6)]
    without, with_ = compute_of(model, training())
    product = 2 * 4 * 32 * 64  # operations of a product, for each column
    assert without.flops == 3 * product * (5 * 2 * 256 + 6 * 2 * 512 + 99)
    assert with_.flops == without.flops + product * (5 * 256 + 6 * 512), "the last product of a block is not run again"
    cut_to(model.module, [(("blocks", 5, 6), 1)])
    assert [len(model.module.blocks), stacks_of(model.module)] == [6, [("blocks", 0, 5)]]


def test_layers_without_parameters_are_passed_over():
    """`plan` ended in an AssertionError."""
    layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 4), nn.Linear(4, 4)])
    assert stacks_of(nn.Sequential(layers)) == [("0", 0, 2), ("0", 3, 2)]


@pytest.mark.parametrize("name", [*_OVER_ONE, *_OVER_TWO])
@pytest.mark.parametrize("codes", [False, True])
def test_a_placement_needs_what_the_plan_of_all_layers_says(name, codes):
    model, ranks = made(depth=7, dim=56), 12
    mesh = (("dp", 12),) if name in _OVER_ONE else (("outer", 4), ("inner", 3))
    place = _OVER_ONE.get(name) or _OVER_TWO[name]
    wanted = training(states_in_8_bits=codes, microbatches=2)
    few = next(row for row in configurations(model, wanted, [UNKNOWN], [mesh]) if row.transform == name)
    with pretended(ranks):
        devices = torch.arange(ranks).view([size for _, size in mesh])
        over = torch.distributed.DeviceMesh("cuda", devices, mesh_dim_names=tuple(n for n, _ in mesh))
        placed = place(zf.precision(on_meta(model.module)), over)
        whole = zf.plan(placed, wanted.optimizer(placed.parameters()), backwards=2)
    assert few.sent == whole.sent_nbytes and few.in_flight == whole.in_flight_nbytes
    assert few.memory.parameters + few.memory.gradients == sum(
        (whole.memory.parameters, whole.memory.gradients, whole.padding.parameters, whole.padding.gradients)
    )
    assert few.memory.optimizer == pytest.approx(whole.memory.optimizer, rel=0.01 if codes else 0)
    latency = wanted.machine.links(*_apart(mesh)).latency
    assert few.latency_s == pytest.approx(sum(latency[n] * count for n, count in whole.collectives.items()))


def test_what_does_not_fit_goes_to_the_nearest_tier_and_no_further():
    model = made(depth=4, dim=512)
    needed = compute_of(model, training())
    states = 8 * sum(p.numel() for p in model.module.parameters())

    def best(memory, **tiers):
        machine = Machine(dataclasses.replace(DEVICES["h100"], memory=memory), per_node=2)
        return configurations(model, Training(machine, reserved=0, **tiers), needed, [(("dp", 2),)])[0]

    assert best(10**9, host=10**10, disk=10**10).tiers == IN_MEMORY
    small = states * 3 // 4
    assert not best(small // 4).fits
    on_host = best(small // 2, host=10**10, disk=10**10)
    assert on_host.fits and on_host.host and not on_host.disk
    on_disk = best(small // 2, host=1000, disk=10**11)
    assert on_disk.fits and on_disk.disk and on_disk.tiers.optim == zf.nvme("/local_nvme", limit=5 * 10**10)
    assert not best(small // 2, host=1000, disk=1000).fits


def test_speeds_are_those_between_the_ranks_of_an_axis():
    """NCCL's ring by hand: nodes of 8 H100, eight cards of 400 Gbit/s a node."""
    links = Machine(DEVICES["h100"]).links(("outer", 16, 8), ("inner", 8, 1), ("dp", 128, 1))
    assert links.sent == {"outer": 0.8 * 50e9, "inner": 0.8 * 450e9, "dp": 0.8 * 400e9}
    assert links.latency["inner"] == pytest.approx(8.4e-6 + 7 * 3.4e-6)
    assert links.latency["outer"] == pytest.approx(8e-6 + 4 * 4e-6 + 16 * 2.8e-6), "PAT, one rank a node"
    assert links.latency["dp"] == pytest.approx(8.4e-6 + (128 - 16) * 3.4e-6 + 15 * 14e-6)
    wide = Machine(DEVICES["rtx4090"], per_node=4, network=12.5e9).links(("outer", 2, 16), ("inner", 16, 1))
    assert wide.sent == {"outer": 0.8 * 12.5e9 / 4, "inner": 0.8 * 12.5e9}
    measured = zf.planning.LinkSpeeds(1e9, 2e9, 3e9, {"dp": 4e9}, 5e9, 6e9, 7e9)
    found = Machine(DEVICES["h100"], measured=measured).links(("dp", 8, 1))
    assert dataclasses.replace(found, latency={}) == measured


def test_more_ranks_cost_latency_and_padding_and_two_axes_answer():
    model = made(depth=4, dim=600)
    needed = compute_of(model, training())
    rows = {ranks: configurations(model, training(), needed, shapes_of(ranks, 8)) for ranks in (8, 64, 256, 1024, 4096)}
    alone = [next(each for each in found if each.transform == "shard_params") for found in rows.values()]
    wholes = [
        each.sent * each.ranks / (each.ranks - 1) for each in alone
    ]  # what would be sent to infinitely many ranks
    assert wholes == sorted(wholes) and wholes[-1] > 1.05 * wholes[0], "rows that ranks do not divide are padded"
    assert alone[-1].latency_s > 0.5 * alone[-1].step_s
    best = rows[4096][0]
    assert best.fits and best.step_s < 0.2 * alone[-1].step_s and len(best.mesh) == 2


def test_the_command_prints_the_table_and_the_code(program, capsys):
    options = ["--per-node", "2", "--usd-per-hour", "2", "--precision", "fp32"]
    status, text = said(capsys, f"{program}:small", *options, "--ranks", "2", "4")
    assert status == 0
    assert f"from {program} import small" in text and "usd per 1e9 tokens" in text
    assert "dp 2" in text and "outer 2 x inner 2" in text and "--nproc-per-node 2" in text
    status, data = said(capsys, f"{program}:small", *options, "--ranks", "4", "--json", "--all")
    found = json.loads(data)
    rows = {(str(row["mesh"]), row["placement"], row["recompute"]): row for row in found["configurations"]}
    assert len(rows) == 2 * (4 + 2)
    row = rows["{'dp': 4}", "shard_params", False]
    assert row["tokens_per_second"] == pytest.approx(4 * 128 / row["step_seconds"])
    assert row["usd_per_1e9_tokens"] == pytest.approx(1e9 / row["tokens_per_second"] / 3600 * 2 * 4)
    assert row["device_bytes"] == row["at_rest_bytes"] + row["in_flight_bytes"] + row["activations_bytes"]


def test_what_the_command_cannot_know_it_says(program, capsys):
    _, text = said(capsys, f"{program}:bare")
    assert "activations are not counted: nobody said what goes in" in text
    _, text = said(capsys, f"{program}:looks")
    assert "activations are not counted: on fake tensors the model raises DataDependentOutputException" in text
    status, text = said(capsys, f"{program}:small", "--memory", "1MB", "--reserve", "1KB", "--host", "0")
    assert status == 1 and "Nothing fits. Nearest:" in text and "does not fit" in text and "fix: more ranks" in text
    assert main(["plan", f"{program}:nothing"]) == 1
    assert "AttributeError" in capsys.readouterr().err


def test_the_command_runs_as_a_module_and_reads_measured_links(program, tmp_path):
    links = {"links": dataclasses.asdict(zf.planning.LinkSpeeds(1e9, 2e9, 3e9, {"dp": 4e5}, 5e9, 6e9, 7e9))}
    (tmp_path / "links.json").write_text(json.dumps(links))
    command = [sys.executable, "-m", "zero_fn", "plan", f"{program}:small", "--ranks", "2", "--json", "--all"]
    done = subprocess.run([*command, "--links", "links.json"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    slow = {row["placement"]: row for row in json.loads(done.stdout)["configurations"]}["shard_params"]
    assert slow["bound_by"] == "collectives" and slow["step_seconds"] > slow["sent_bytes"] / 4e5


def test_bytes_of_a_row_are_held_by_a_run(program, ranks):
    """ZeRO-3 on two ranks: what the command says is there is there."""
    found = planned([f"{program}:small", "--ranks", "2", "--precision", "fp32", "--all"])
    (row,) = [each for each in found.rows if each.transform == "shard_params" and not each.recompute]

    def run():
        names = {"__name__": "of_a_user"}
        exec(MODEL, names)
        model = zf.shard_params(names["Net"](), axis())
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            with zf.traffic() as sent:
                model(torch.zeros(4, 32, dtype=torch.long)).sum().backward()
            optimizer.step()
        assert zf.plan(model).collectives == {"dp": sent.calls["all-gather"] + sent.calls["reduce-scatter"]}
        return zf.memory(model, optimizer).total, sent.nbytes

    held, sent = map(max, zip(*ranks(2).run(run), strict=True))  # the first rank has the larger part
    assert row.nbytes - row.in_flight == held
    assert sent <= row.sent <= 1.001 * sent, "collectives of accelerators send padding, too"
