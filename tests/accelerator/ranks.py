"""What two ranks of an accelerator do beside training, over the backend's own collectives, as on NCCL: what they hold, where
the host waits, and what a profile says. `random_programs.py` trains."""

import copy
import gc
import itertools
from functools import partial
from itertools import islice
from unittest.mock import patch

import torch
from torch import nn

import zero_fn as zf
from tests.accelerator import device
from tests.accelerator.programs import Net, adamw, all_away, batches, net, trained, values
from tests.support.collectives import gather, reduce
from zero_fn.transport.agree import Bits
from zero_fn.transport.links import line_over, open_transport
from zero_fn.transport.native import Native
from zero_fn.transport.segment import Contribution, Segment
from zero_fn.values.mesh import mesh_axis

__all__ = ["CASES"]

STAGES = {stage: getattr(zf, stage) for stage in ("zero1", "zero2", "zero3")}


def share(rank):
    for batch in batches():
        yield batch.chunk(2)[rank]


def proposals(mesh, tiers):
    """What `autoplan` proposes (of sixteen proposals one) gives the same numbers, but for the sum of a norm over whole
    gradients, and the rank that holds more holds what it said."""
    found = zf.planning.autoplan(
        net(), mesh, "1GiB", links=zf.distributed.measure_links(mesh, path=tiers[1].paths[0], rounds=1), tier=tiers
    )
    assert {p.bound for p in found.all} <= {"collectives", "optimizer", "disk", "link"}
    assert len(found.all) == 40
    first = {}
    for proposal in found.all[::16]:
        model = proposal.place(net(), mesh)
        optimizer = adamw(model) if proposal.tier is None else zf.streamed(adamw(model))
        numbers = trained(model, optimizer, islice(share(mesh.get_local_rank()), 2)), values(model)
        assert device.same(numbers, first.setdefault(proposal.transform == "replicate", numbers)), proposal.away
        held, said = zf.memory(model, optimizer), proposal.memory
        pairs = [(held.optimizer, said.optimizer), (held.buffers, said.buffers), (held.on_host, proposal.host)]
        pairs += [(held.tiers.get(str(tier), 0), said.tiers.get(str(tier), 0)) for tier in tiers]
        assert all(own == most if mesh.get_local_rank() == 0 else own <= most for own, most in pairs), pairs


class Wide(nn.Module):
    """Units of 1 MiB and more, with a buffer in each and one in no file."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(512, 512), nn.BatchNorm1d(512)) for _ in range(4))
        self.register_buffer("scale", torch.full((512,), 2.0), persistent=False)
        self.tied = self.scale
        self.head = nn.Linear(512, 64)
        self.shared = self.head

    def forward(self, x):
        for block in self.blocks:
            x = block(x * self.scale)
        return self.shared(x)

    def reset_parameters(self):
        nn.init.constant_(self.scale, 2.0)


UNIT = 4 * (512 * 512 + 4 * 512 + 1)


def from_elsewhere(mesh, tiers):
    """A model of the CPU, or of meta, comes to the device of the mesh unit by unit: it takes what rests and one unit."""
    ways = {**STAGES, "replicate": zf.replicate}
    ways["in bf16"] = lambda model, axis: zf.shard_params(zf.precision(model.bfloat16(), rest=torch.float32), axis)
    ways["given"] = lambda model, axis: zf.shard_params(model, axis, donate=True)
    ways["in two"] = lambda model, axis: zf.shard_grads(
        zf.shard_params(model, axis, where="blocks.*"), axis, donate=True
    )
    for tier in tiers:
        ways[f"to {tier}"] = lambda model, axis, tier=tier: zf.shard_params(zf.offload(model, params=tier), axis)
    torch.manual_seed(0)
    plain = Wide()
    x = torch.randn(8, 512)
    for name, place in ways.items():
        before = device.used()[0]
        model = place(copy.deepcopy(plain), mesh)
        require_room(name, [*model.parameters(), *model.buffers()], model, before)
        expected = [] if name == "in bf16" else [plain(x).sum().item()]
        found = [model(x.to(device.NAME)).sum().item()] if expected else []
        assert device.same(found, expected), name
        model.cpu()
        device.used()  # what the forward has taken is not meant
        zf.transforms.refresh(model)  # takes parameters back, as it does those that `from_pretrained` has read
        require_room(f"{name}, back", [*model.parameters()], model, before)
        del model
    with torch.device("meta"):
        model = Wide()
    before = device.used()[0]
    model = zf.materialize(zf.shard_params(model, mesh))
    require_room("meta", [*model.parameters(), *model.buffers()], model, before)


class Rotary(Net):
    """With a buffer that never changes, as tables of rotary positions, and a frozen part."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.full((1,), 0.5), persistent=False)

    def forward(self, tokens):
        return super().forward(tokens) * self.scale


def the_host_runs_ahead(mesh, tiers):
    """A step makes the host wait for the device nowhere: the device would have nothing to do meanwhile."""
    host, _ = tiers
    ways = {**STAGES}
    ways["zero3, bfloat16"] = lambda model, axis: zf.shard_params(zf.precision(model), axis)
    ways["zero3, parameters on the host"] = lambda model, axis: zf.shard_params(zf.offload(model, params=host), axis)
    tokens = next(batches())
    for name, place in ways.items():
        torch.manual_seed(0)
        plain = Rotary().to(device.NAME)
        device.waits()
        model = place(plain, mesh)
        count = device.waits()
        assert count <= 1 or "host" in name, (name, count, "for the digests of all parameters, once")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if "host" not in name else None
        for step in range(6):
            device.waits()
            model(tokens).float().square().mean().backward()
            if optimizer is not None:
                optimizer.step()
            model.zero_grad()
            count = device.waits()
            assert not count or step < 2, (name, step, count)  # the first forwards compare ranks, and record


def profiled(mesh, tiers):
    """The parts of a step by the events of the device, without a wait of the host for it in between; and its memory, of which
    peaks are the program's. The allocator that pretends has no numbers, so they are given here."""
    if device.NAME == "pretend":
        with (
            patch("torch.accelerator.memory_stats", lambda: {f"allocated_bytes.all.{n}": v for n, v in USED.items()}),
            patch("torch.accelerator.memory_allocated", lambda: USED["current"]),
            patch("torch.accelerator.get_memory_info", lambda: (2, 7)),
            patch("torch.accelerator.reset_peak_memory_stats", side_effect=AssertionError("the peak is the program's")),
            patch("torch.cuda.reset_peak_memory_stats", side_effect=AssertionError("the peak is the program's")),
        ):
            return _profiled(mesh, tiers)
    return _profiled(mesh, tiers)


USED = {"current": 5, "peak": 9}


def _profiled(mesh, tiers):
    for name, tier in {"device": None, "host": tiers[0], "disk": tiers[1]}.items():
        model = zf.shard_params(net() if tier is None else all_away(net().cpu(), tier), mesh)
        optimizer = adamw(model) if tier is None else zf.streamed(adamw(model))
        trained(model, optimizer, islice(share(mesh.get_local_rank()), 2))
        most = torch.accelerator.memory_stats().get("allocated_bytes.all.peak", 0)
        metrics = zf.metrics(model, optimizer, every=1, norm=False)
        with zf.profile(model, optimizer) as profile:  # beside a reader that began before, and ends before
            trained(model, optimizer, islice(share(mesh.get_local_rank()), 3))
            metrics.step()
            metrics.close()
        with zf.metrics(model, optimizer, every=1, norm=False) as metrics:
            trained(model, optimizer, islice(share(mesh.get_local_rank()), 1))
            found = metrics.step()
        assert found['zero_fn_step_peak_memory_bytes{tier="device"}'] == profile.memory["peak"]["device"] >= most > 0
        assert 0 < profile.memory["at rest"]["device"] < profile.memory["peak"]["device"]
        assert found['zero_fn_memory_free_bytes{tier="device"}'] < found['zero_fn_memory_limit_bytes{tier="device"}']
        assert len(profile.steps) == 3 * mesh.size()
        assert all(abs(sum(each.parts.values()) - each.seconds) < 1e-6 for each in profile.steps), profile.steps
        if device.NAME == "pretend":  # it always keeps up with the host
            idle, busy = (sum(each.parts[part] for each in profile.steps) for part in ("idle", "compute"))
            assert idle > 0.2 * busy, profile.steps
        assert profile.numbers["sent"] == profile.numbers["planned"]["sent"], (name, profile.numbers)
        assert ("from host" in profile.numbers["moved"]) == (tier is not None), profile.numbers["moved"]
        assert any(each.parts["copies"] > 0 for each in profile.steps) == (tier is not None), name
        assert found["zero_fn_steps_total"] == 1 and found.get("zero_fn_step_seconds"), found


def gathered_behind_copies(mesh, tiers):
    """An all-gather waits for the copies of the shards from the host. What computes the unit before waits for neither."""
    for tier in tiers:
        for stage, place in STAGES.items():
            model = place(zf.offload(net(), params=tier), mesh)
            tokens = next(batches())
            for _ in range(2):  # the first forward records what comes next
                model(tokens).square().mean().backward()
            device.streams()
            model(tokens).square().mean().backward()
            stalls, copies, _ = device.streams()
            assert copies, "nothing came from the host"
            assert not stalls, (stage, tier, stalls)


def require_room(name, tensors, model, before):
    """They are on the device or in their tier, and have taken no more than they take now and one unit."""
    gc.collect()  # what the graph of a forward has saved may be in a cycle
    now, most = device.used()
    held = zf.memory(model).on_device + sum(
        buffer.nbytes for buffer in model.buffers()
    )  # those of before are let go later
    assert {tensor.device.type for tensor in tensors} == {device.NAME}, name
    assert now - before <= held + device.SLACK_NBYTES, (name, held, now - before)
    assert most - before <= held + UNIT + device.SLACK_NBYTES - 64, (name, held, most - before)


def owners_and_formats(mesh, tiers):
    """Whole tensors that their owners step, and what travels in fewer bits, coded on the device, also where it comes from the
    host: the same numbers at every stage and in every tier."""
    places = (None, *tiers)
    ways = {
        "owners": ({}, itertools.product(STAGES, places)),
        "differences": ({"gather": zf.wire.delta4(), "reduce": zf.wire.int8()}, [("zero1", None), ("zero2", None)]),
        "blocks": (
            {"gather": zf.wire.int8(), "reduce": zf.wire.int4()},
            [("zero1", None), *(("zero3", place) for place in places)],
        ),
    }
    for name, (wires, pairs) in ways.items():
        found = []
        for stage, tier in pairs:
            model = STAGES[stage](zf.precision(net(), compute=torch.float32, **wires), mesh)
            if name == "owners":
                optimizer = zf.by_owner(torch.optim.Adafactor(model.parameters(), lr=1e-2))
                optimizer = optimizer if tier is None else zf.streamed(optimizer, tier)
            else:
                model = model if tier is None else all_away(model, tier)
                optimizer = adamw(model) if tier is None else zf.streamed(adamw(model))
            losses = trained(model, optimizer, islice(share(mesh.get_local_rank()), 2))
            found.append([losses, values(model)])
            assert device.same(found[0], found[-1]), (name, stage, tier)


def many_under_way(mesh, tiers):
    """Their memory is taken anew at once."""
    transport, rank, size = open_transport(mesh_axis(mesh, verb="a test")), mesh.get_local_rank(), mesh.size()
    numel, under_way = 1 << 18, []
    for number in range(8):
        rows = torch.full((numel,), float(number + rank), device=device.NAME)
        out = torch.empty(numel // size, device=device.NAME)
        reduction = reduce(transport, [Contribution(rows, len(out), out, torch.float32)])
        memory = torch.empty(numel, device=device.NAME)
        source = torch.full((numel // size,), float(number + rank), device=device.NAME)
        arrival = gather(transport, [Segment(memory, numel, len(source), source=source)])
        del rows, source
        under_way.append((number, reduction, out, arrival, memory))
    for number, reduction, out, arrival, memory in under_way:
        reduction.wait()
        arrival.wait()
        junk = torch.full((numel,), -1.0, device=device.NAME)
        assert out.cpu().eq(number + (size - 1) / 2).all(), f"sum {number}"
        assert memory.cpu().view(size, -1).eq(number + torch.arange(size)[:, None]).all(), f"gather {number}"
        del junk


def bits_beside_the_computation(mesh, tiers):
    """Those that nobody reads, too; and reductions that are dropped before their end."""
    links = line_over([mesh_axis(mesh, verb="a test")])
    busy, rows = torch.ones(512, 512, device=device.NAME), torch.ones(1 << 16, device=device.NAME)
    for number in range(10):
        busy = (busy @ busy).clamp_(-1, 1)
        reduce(
            links.raw,
            [Contribution(rows, len(rows) // links.size, rows[: len(rows) // links.size].clone(), rows.dtype)],
        )
        bits = [(number + rank) % 3 == 0 for rank in range(3)]
        own = [bit and rank % links.size == links.rank for rank, bit in enumerate(bits)]
        with torch.device(device.NAME):  # as many programs for an accelerator begin
            Bits(links, own, "nothing that is read")
            sent = Bits(links, own, "a test")
        assert sent._bits.device.type == "cpu", "a message of the host, which is pinned on a real device"
        found = sent.read()
        assert found == bits, (number, found, bits)


CASES = {
    "many under way": many_under_way,
    "bits beside the computation": bits_beside_the_computation,
    "owners and formats": owners_and_formats,
    "proposals": proposals,
    "from elsewhere": from_elsewhere,
    "the host runs ahead": the_host_runs_ahead,
    "gathered behind copies": gathered_behind_copies,
    "profiled": profiled,
}


LONG = {"proposals", "from elsewhere", "profiled"}  # for the night


def results(mesh, folder, cases):
    """What became of some of the cases. After one that is wrong there are no more: the other rank waits."""
    assert mesh.size() == 1 or isinstance(open_transport(mesh_axis(mesh, verb="a test")), Native)
    said = {}
    for name in cases:
        said[name] = device.outcome(name, partial(CASES[name], mesh, (device.host(), zf.nvme(folder))))
        if said[name] not in ("right", device.UNMEASURED):
            break
    return said
