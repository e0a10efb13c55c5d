"""Ranks on two hosts: who shares memory, what goes over the link, and what happens if it is slow, loses frames or breaks.

Two hosts are namespaces of this machine: see `tests/support/hosts.py`.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zero_fn as zf
from tests.outside.examples.programs import ROOT, said_on_ranks
from tests.support.hosts import OWN, PORT, CannotMakeHosts, Hosts, Link, ask
from tests.support.metronome import Metronome
from zero_fn.one_host.same_host import SameHost
from zero_fn.transport.links import open_transport
from zero_fn.values.mesh import mesh_axis

pytestmark = pytest.mark.nightly
DEADLINE_S, NOTICED_S = 1.5, 2.0
WIDTH, DEPTH, STEPS = 64, 4, 2


@pytest.fixture(scope="module")
def hosts():
    try:
        made = Hosts()
    except CannotMakeHosts as error:
        pytest.skip(f"no network namespace: {error}")
    yield made
    made.close()


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.inner(x))


def trained(kind, width=WIDTH):
    """A model and its optimizer, on each of 2 x 2 ranks."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(width) for _ in range(DEPTH)))
    if kind == "zero3":
        model = zf.shard_params(model, flat)
    elif kind == "hybrid":
        model = zf.hybrid(model, grid)
    else:
        model = zf.shard_params(model, grid["inner"])
        model = (zf.shard_grads if kind == "hpz" else zf.shard_params)(model, grid["outer"])
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def step(model, optimizer, number):
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


# -- shared memory and sockets ---------------------------------------------------------------------------------------


def test_an_axis_shares_memory_if_all_its_ranks_are_of_one_host(hosts):
    """Processes of the two hosts have the same numbers, and what they open as a peer's memory may be their own."""

    def who_shares():
        found = []
        for shape, names in (((2, 2), ("outer", "inner")), ((4,), ("dp",))):
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            for name in names:
                transport = open_transport(mesh_axis(mesh[name], verb="test"))
                assert isinstance(transport, SameHost)
                found.append(transport.shares_memory)
        return os.uname().nodename, os.getpid(), found

    names, pids, shares = zip(*hosts.run(who_shares).values, strict=True)
    assert names == ("host-a", "host-a", "host-b", "host-b")
    assert set(pids[:2]) & set(pids[2:]), "no two ranks have one number: this shows nothing"
    assert all(each == [False, True, False] for each in shares), shares


@pytest.mark.parametrize(("kind", "axis", "crossing"), [
    ("zero3", "dp", 2 / 3), ("hybrid", "outer", 1), ("hpz", "outer", 1), ("both", "outer", 1),
])  # fmt: skip
def test_the_link_carries_the_bytes_that_the_plan_says(hosts, kind, axis, crossing):
    """Gloo adds about 150 bytes to a message, and the barriers here a little more."""

    def counted():
        model, optimizer = trained(kind)
        for number in range(2):
            step(model, optimizer, number)
        dist.barrier()
        before, loopback = ask("count"), loopback_nbytes()
        dist.barrier()
        with zf.traffic() as sent:
            step(model, optimizer, 2)
        dist.barrier()
        time.sleep(0.1)  # what is on the way
        after = ask("count")
        assert after["dropped"] == before["dropped"]
        planned = zf.plan(model, optimizer).sent_by_axis
        over = loopback_nbytes() - loopback
        return after["payload"] - before["payload"], over, dict(sent.by_axis), dict(planned), sum(sent.calls.values())

    found = hosts.run(counted).values
    messages = crossing * 3 * 4 * found[0][4] if kind == "zero3" else 4 * found[0][4]
    expected = sum(planned[axis] * crossing for _, _, _, planned, _ in found)
    for over_link, over_loopback, sent, planned, _ in found:
        assert sent == planned
        rest = over_link - expected
        assert 0 < rest < 200 * messages + 2000, (over_link, expected, messages)
        # Along an axis over both hosts, ranks of one host use sockets, too.
        own = planned[axis] * (1 - crossing) * 2
        assert own <= over_loopback < own * 1.1 + 3000, (over_loopback, own)


def loopback_nbytes():
    """Bytes that this host has sent to itself over sockets."""
    return next(int(line.split()[9]) for line in open("/proc/net/dev") if line.split()[0] == "lo:")


# -- numbers ---------------------------------------------------------------------------------------------------------


def losses(kind, began=bool):
    """Losses of a rank, and the seconds of its steps."""
    model, optimizer = trained(kind)
    began()
    began_s = time.monotonic()
    found = [step(model, optimizer, number) for number in range(STEPS)]
    return found, time.monotonic() - began_s


@pytest.fixture(scope="module")
def on_one_host(ranks):
    """Losses of four ranks that share memory."""
    return {kind: [found for found, _ in ranks(4).run(losses, kind)] for kind in ("zero3", "hybrid")}


LINKS = {"clean": Link(), "delay": Link(delay_ms=200), "loss": Link(loss=0.01), "rate": Link(mbit=5)}


@pytest.mark.parametrize("kind", ["zero3", "hybrid"])
@pytest.mark.parametrize("name", LINKS)
def test_losses_over_a_link_are_those_of_one_host(hosts, on_one_host, kind, name):
    def program():
        found, took_s = losses(kind, lambda: ask("begin"))
        return found, took_s, ask("count")["dropped"]

    link = LINKS[name]
    ran = hosts.run(program, link=link)
    assert [found for found, _, _ in ran.values] == on_one_host[kind]
    took_s, dropped = max(took for _, took, _ in ran.values), max(each for _, _, each in ran.values)
    least_s = STEPS * 2 * link.delay_ms / 1e3  # a step has at least a forward and a backward over the link
    assert took_s > least_s and (dropped > 0) == (link.loss > 0)


# -- what is lost ----------------------------------------------------------------------------------------------------


class Strikes(torch.autograd.Function):
    """The identity, whose forward or backward on rank 3 asks for a fault."""

    @staticmethod
    def forward(ctx, x, fault, when):
        ctx.fault = fault if when == "backward" else ""
        if when == "forward" and dist.get_rank() == 3:
            ask(fault)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.fault and dist.get_rank() == 3:
            ask(ctx.fault)
        return grad, None, None


class StrikesInSave:
    """Something to save, which asks for a fault."""

    def __init__(self, fault):
        self.fault = fault

    def state_dict(self):
        if dist.get_rank() == 3:
            ask(self.fault)
        return {}


@pytest.mark.parametrize("kind", ["zero3", "hybrid"])
@pytest.mark.parametrize("when", ["forward", "backward", "save"])
@pytest.mark.parametrize("fault", ["cut", "vanish"])
def test_who_is_left_is_told_in_time_of_a_link_that_broke(hosts, tmp_path, fault, when, kind):
    def told(deadline_s):
        model, optimizer = trained(kind)
        step(model, optimizer, 0)
        if when == "save":
            zf.save(tmp_path / "step-1", model, optimizer)
        else:
            model.get_submodule("1").register_forward_hook(lambda _module, _args, out: Strikes.apply(out, fault, when))
        dist.barrier()
        time.sleep(0.2)  # the barrier is over everywhere, and no message is on the link
        try:
            with zf.distributed.set_deadline(deadline_s):
                if when == "save":
                    zf.save(tmp_path / "step-2", model, optimizer, extra={"last": StrikesInSave(fault)})
                for number in range(1, 4):
                    step(model, optimizer, number)
        except zf.ZeroError as error:
            return type(error).__name__, str(error), time.monotonic()
        return "", "", time.monotonic()

    with Metronome() as metronome:
        ran = hosts.run(told, DEADLINE_S)
    survivors = [value for value in ran.values if value is not None]
    assert len(survivors) == (4 if fault == "cut" else 2)
    for name, text, at_s in survivors:
        assert name == "LostRankError", text
        # Rank 0 may wait as long for another before it answers in a save.
        late_s = metronome.seconds(ran.struck_s + DEADLINE_S * (2 if when == "save" else 1), at_s)
        assert late_s < NOTICED_S, (late_s, text)
        if when == "save":
            assert re.search(r"here : rank \d, waiting for rank \d", text), text
            continue
        assert re.match(r"Rank \d of axis '(dp|outer|inner)' \(\d\) ", text), text
        assert re.search(r"here : rank \d, waiting in #\d+ .* of (unit|units) [\d.]+", text), text
    if when == "save":
        assert [found.path.name for found in zf.checkpoints(tmp_path) if found.is_complete] == ["step-1"]


# -- folders ---------------------------------------------------------------------------------------------------------


def outcome(act):
    try:
        act()
    except zf.ZeroError as error:
        return str(error)
    return ""


def bits(model):
    return [parameter.detach().to_local().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("there", ["nothing", "what a killed save has left"])
@pytest.mark.parametrize("writes", ["save", "save_pretrained"])
def test_a_save_to_a_folder_of_each_host_is_refused_everywhere(hosts, writes, there):
    """Files that a host has for itself must never be half of a checkpoint that is complete on the other."""

    def program():
        model, optimizer = trained("zero3")
        if there != "nothing" and dist.get_rank() == 2:
            for kind in ("model", "optimizer", "extra"):
                (Path(OWN, "runs", ".step-1.saving", kind)).mkdir(parents=True)
            Path(OWN, "runs", "step-1", ".model.safetensors.saving").mkdir(parents=True)
        dist.barrier()
        if writes == "save":
            said = outcome(lambda: zf.save(f"{OWN}/runs/step-1", model, optimizer))
        else:
            said = outcome(lambda: zf.save_pretrained(model, f"{OWN}/runs/step-1", max_shard=20_000))
        dist.barrier()
        found = [str(path) for path in Path(OWN).rglob("*") if path.is_file() and path.name != ".hosts"]
        return said, outcome(lambda: step(model, optimizer, 0)), found

    for said, trains, found in hosts.run(program).values:
        assert "This rank does not see the folder that rank 0 has made for a checkpoint." in said
        assert "a folder that all hosts share" in said
        assert not trains and not found


@pytest.mark.parametrize("there", ["host-a", "host-b", "others"])
def test_a_load_from_a_folder_of_each_host_is_refused_and_changes_nothing(hosts, tmp_path, there):
    """Of two checkpoints of one name, on two hosts, a model would get half of each."""

    def program():
        model, optimizer = trained("zero3")
        for number in range(2):
            step(model, optimizer, number)
            zf.save(tmp_path / str(number) / "step-1", model, optimizer)
        name, number = os.uname().nodename, dist.get_rank() // 2
        if there in (name, "others") and dist.get_rank() % 2 == 0:
            shutil.copytree(tmp_path / str(number if there == "others" else 0), f"{OWN}/runs")
        dist.barrier()
        before = bits(model)
        said = outcome(lambda: zf.load(f"{OWN}/runs", model, optimizer))
        assert not outcome(lambda: zf.load(tmp_path / "1", model, optimizer))  # a folder of both hosts
        return said, all(map(torch.equal, before, bits(model)))

    for said, is_same in hosts.run(program).values:
        expected = "Looking for checkpoints failed." if there == "host-b" else "does not see the checkpoint that rank 0"
        assert expected in said and is_same, said


# -- torchrun --------------------------------------------------------------------------------------------------------


TINY = ("--layers=2", "--dim=16", "--heads=2", "--seq=16", "--batch=8", "--steps=4", "--save-every=4")


def under_torchrun(folder):
    """Runs pretrain.py as users do, an agent on each host; how the agent ended, and what it printed. One that loses a rank:
    `test_kubernetes.py`."""
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"host-a:{PORT}", "--rdzv-id", "run"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", *meeting]
    program = [str(ROOT / "examples" / "pretrain.py"), *TINY, f"--save={folder}"]
    done = subprocess.run([*torchrun, *program], capture_output=True, text=True, check=False)
    left = {int(name) for name in os.listdir("/proc") if name.isdigit()} - {1, os.getpid()}
    return done.returncode, done.stdout + done.stderr, left


def test_pretrain_under_torchrun_gives_the_losses_of_one_host(hosts, ranks, tmp_path):
    for status, printed, left in hosts.run(under_torchrun, str(tmp_path / "two"), per_host=1).values:
        assert status == 0 and not left, printed
    said_on_ranks(ranks(4), tmp_path, " ".join(["pretrain.py", *TINY, "--save=one"]))
    one, two = (zf.load(tmp_path / name, only="extra")["losses"] for name in ("one", "two"))
    assert len(one) == 4 and one == two


# -- copies in memory ------------------------------------------------------------------------------------------------

COPIED = 256  # features: 12 bytes of state for each of 263,168 elements


def bytes_of(model):
    return b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())


def step_of_all(model, optimizer, number):
    """On the same batch on all ranks: their number does not change a sum."""
    x = torch.randn(4, COPIED, generator=torch.Generator().manual_seed(number))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def copied(folder, until):
    """Trains up to a step, with a copy after each, from where a run was left; the step it went on from, and parameters."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    torch.manual_seed(until)  # what is not loaded is seen
    model = zf.shard_params(nn.Sequential(*(Layer(COPIED) for _ in range(DEPTH))), mesh["dp"])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    said = zf.resume(folder, model, optimizer)
    first = said["step"] if said else 0
    copies = zf.checkpoint.memory_copies(folder, model, optimizer, every=1)
    for number in range(first, until):
        step_of_all(model, optimizer, number)
        copies.update(extra={"step": number + 1})
    zf.checkpoint.saving.wait_for_saving()
    with zf.unsharded(model):
        return first, bytes_of(model)


def undisturbed():
    torch.manual_seed(3)
    model = nn.Sequential(*(Layer(COPIED) for _ in range(DEPTH)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for number in range(5):
        step_of_all(model, optimizer, number)
    return bytes_of(model)


def test_a_host_that_has_lost_its_memory_gets_what_its_ranks_read(hosts, tmp_path):
    def run(lost):
        firsts, folder = [copied(f"{tmp_path}/{lost}", 3)[0]], Path("/dev/shm")
        dist.barrier()
        before = ask("count")["payload"]
        dist.barrier()
        if lost is not None and dist.get_rank() == 2 * lost:  # as a new host in its place
            (copies,) = folder.glob("zero_fn-*")
            shutil.rmtree(copies)
        dist.barrier()
        first, values = copied(f"{tmp_path}/{lost}", 5)
        dist.barrier()
        return [*firsts, first], values, ask("count")["payload"] - before

    sent = {}
    for lost in (None, 0, 1):
        for firsts, values, nbytes in hosts.run(run, lost).values:
            assert firsts == [0, 3]
            assert values == undisturbed()
            sent[lost] = nbytes
    files = 12 * 263_168 // 2
    for lost in (0, 1):  # the files of two ranks, and not of all four; and what all have written of them
        assert files < sent[lost] - sent[None] < 1.2 * files


def test_after_a_host_has_vanished_the_other_has_all(hosts, tmp_path):
    def run():
        copied(str(tmp_path), 3)
        dist.barrier()
        time.sleep(0.3)  # the barrier is over on all of them
        rank = dist.get_rank()
        if rank > 1:
            ask("vanish")
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=rank, world_size=2)
        return copied(str(tmp_path), 5)

    for first, values in hosts.run(run).values[:2]:
        assert first == 3
        assert values == undisturbed()
