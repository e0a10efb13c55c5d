"""What `autoplan` predicts follows from plan and links; all ranks decide alike; the fastest that fits wins."""

import dataclasses
from collections import Counter

import pytest
import torch
from torch import nn

import zero_fn as zf
from tests.support.groups import pretended
from tests.support.messages import Headed, refusals
from tests.support.ranks import axis as axis_of_ranks
from tests.support.seeds import seed_generator
from tests.support.wholes import full
from zero_fn.streamed.pieces import ParameterPiece
from zero_fn.tiers import parcels
from zero_fn.transforms import shard
from zero_fn.transforms.offload import offloaded
from zero_fn.values.home import Home

SPEEDS = zf.planning.LinkSpeeds(10e9, 1e9, 2e9, {"dp": 0.5e9}, None, None)
STAGES = ("replicate", "shard_optimizer", "shard_grads", "shard_params")


@pytest.fixture
def axis():
    with pretended(4) as mesh:
        yield mesh


def model():
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])


def unlike():
    """Blocks that differ in one thing each, and are not counted as one: in what is frozen, in a bias, in a shape."""
    module = nn.Sequential(*[nn.Linear(64, 64, bias=number != 5) for number in range(8)])
    module[6].weight = nn.Parameter(torch.empty(128, 32))
    module[2].weight.requires_grad_(False)
    return module


def by_kind(found):
    return {(proposal.transform, proposal.away): proposal for proposal in found.all}


def assert_follows(proposal, module, mesh, disk, links, compute_s):
    """What is predicted is what the plan of the same transforms says, at the speeds of the links."""
    by_hand = getattr(zf, proposal.transform)(module, mesh)
    elements = zf.plan(by_hand).memory.optimizer / 8
    if proposal.away != "nothing":
        by_hand = offloaded(by_hand, Home(tiers=proposal.tiers), reserves=False)
    without, planned = zf.plan(by_hand), zf.plan(by_hand, torch.optim.AdamW(by_hand.parameters()))
    assert proposal.nbytes == planned.peak_nbytes
    assert proposal.disk == planned.memory.tiers.get(str(disk), 0)
    assert proposal.collectives_s == pytest.approx(planned.sent_nbytes / links.sent["dp"])
    fetched, moved = without.moved.get(str(disk), (0, 0)), planned.moved.get(str(disk), (0, 0))
    assert proposal.fetch_s == pytest.approx(_on_disk(fetched, links))
    assert proposal.fetch_s + proposal.disk_s == pytest.approx(_on_disk(moved, links))
    if links.to_device is None:
        passes, link_s = max(compute_s + proposal.collectives_s, proposal.fetch_s), 0
        assert proposal.optimizer_s == pytest.approx(elements * 28 / links.memory)
    else:
        passes = max(compute_s, proposal.collectives_s, proposal.fetch_s, proposal.fetch_link_s)
        link_s = proposal.link_s
        assert proposal.host == planned.host_nbytes
        assert proposal.fetch_link_s == pytest.approx(max(without.link[0] / 20e9, without.link[1] / 25e9))
        assert (link_s + proposal.fetch_link_s > 0) == (proposal.away != "nothing")
    assert proposal.step_s == passes + max(proposal.optimizer_s, proposal.disk_s, link_s)


def _on_disk(moved, links):
    return moved[0] / links.disk_read + moved[1] / links.disk_write


def test_what_is_predicted_follows_from_the_plan_and_the_links(axis):
    disk = zf.nvme("/scratch")
    with torch.device("meta"):
        module = model()
    found = by_kind(zf.planning.autoplan(module, axis, "1GiB", links=SPEEDS, tier=disk, compute_s=0.5))
    kinds = ("nothing", "states on disk", "gradients, states on disk", "parameters, gradients, states on disk")
    assert set(found) == {(stage, kind) for stage in STAGES for kind in kinds}
    for proposal in found.values():
        assert_follows(proposal, module, axis, disk, SPEEDS, 0.5)
        assert proposal.bound == "compute"
    gathered = reduced = 2 * (64 * 64 + 64) * 4  # the root holds no parameters itself
    in_flight = [found[stage, "nothing"].in_flight for stage in STAGES]
    assert in_flight == [reduced, reduced, reduced, gathered + reduced]


def test_what_is_bound_by_the_disk_says_so(axis):
    with torch.device("meta"):
        large = nn.Linear(16384, 16384, bias=False)
    slow = zf.planning.LinkSpeeds(10e9, 1e8, 1e8, {"dp": 0.5e9}, None, None)
    found = by_kind(zf.planning.autoplan(large, axis, "1TiB", links=slow, tier=zf.nvme("/scratch")))
    states, buffers = 16384**2 * 8 // 4, 4 * 64 * 2**20
    there = found["shard_optimizer", "states on disk"]
    assert (there.memory.optimizer, there.memory.buffers) == (0, buffers)
    assert there.disk_s == pytest.approx((2 * states - buffers) / 1e8)
    assert there.bound == "disk"
    everything = found["shard_params", "parameters, gradients, states on disk"]
    assert everything.bound == "disk"
    assert everything.step_s == everything.fetch_s + everything.disk_s


ON_ACCELERATORS = zf.planning.LinkSpeeds(10e9, 1e9, 2e9, {"dp": 5e9}, 20e9, 25e9, 1000e9)


@pytest.mark.parametrize("blocks", [model, unlike])
def test_an_accelerator_has_the_host_as_a_tier_too(blocks):
    """Planned without one. What is used less is never nearer; the host's memory is no part of the device's."""
    host, disk = zf.cpu(), zf.nvme("/no/such/path")
    with torch.device("meta"):
        module = zf.precision(blocks())
    with pretended(4, device_type="cuda") as mesh:
        found = by_kind(
            zf.planning.autoplan(module, mesh, "1GiB", links=ON_ACCELERATORS, tier=(disk, host), compute_s=1e-6)
        )
        assert len(found) == 4 * 10
        for proposal in found.values():
            assert_follows(proposal, module, mesh, disk, ON_ACCELERATORS, 1e-6)
    nearer = {None: 0, host: 1, disk: 2}
    for proposal in found.values():
        params, grads, optim = (nearer[getattr(proposal.tiers, kind)] for kind in ("params", "grads", "optim"))
        assert params <= grads <= optim
    elements = sum(each.numel() for each in module.parameters() if each.requires_grad) // 4
    here, there = found["shard_params", "nothing"], found["shard_params", "parameters, gradients, states on host"]
    assert here.optimizer_s == pytest.approx(28 * elements / 1000e9)  # stepped where the states are
    assert there.optimizer_s == pytest.approx(28 * elements / 10e9)
    assert (there.memory.parameters, there.memory.gradients, there.memory.optimizer, here.host) == (0, 0, 0, 0)
    assert there.host >= 18 * elements  # and copies to compute with
    assert "parameters, gradients on host, states on disk" in {away for _, away in found}
    assert there.bound == "collectives"


def test_work_does_not_grow_with_blocks_that_are_alike(monkeypatch):
    """Each stage is placed once for its ten choices of tiers, and parcels of blocks that are alike are cut up once: 60 s of
    CPU for 70 B before."""
    calls = Counter()

    def count(owner, name, counts):
        own = getattr(owner, name)

        def counted(*args, **named):
            calls[name] += counts(*args)
            return own(*args, **named)

        monkeypatch.setattr(owner, name, counted)

    count(shard, "substitute", lambda *_: 1)
    count(parcels, "chunks_of", lambda *_: 1)
    count(ParameterPiece, "lie", lambda piece, _: piece.in_parcel is not None)

    def work(blocks):
        calls.clear()
        parcels.planned_parcels.cache_clear()
        with torch.device("meta"):
            module = zf.precision(nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(blocks)]))
        with pretended(2, device_type="cuda") as mesh:
            found = zf.planning.autoplan(
                module, mesh, "1TB", links=ON_ACCELERATORS, tier=(zf.cpu(), zf.nvme("/scratch"))
            )
        assert len(found.all) == 40
        return dict(calls)

    few = work(4)
    assert few["substitute"] == len(STAGES) and few["chunks_of"] and few["lie"]
    assert work(8) == few


def best(mesh, budget, links, *tier):
    """The placement of 1.07 GB of parameters. Nothing has to be there."""
    with torch.device("meta"):
        large = nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(16)])
    found = zf.planning.autoplan(large, mesh, budget, links=links, tier=tier)
    assert [proposal.fits for proposal in found.all] == sorted((p.fits for p in found.all), reverse=True)
    return f"{found.best.transform}: {found.best.away}"


# GB with what is in flight: nothing on the disk 2.8 in stage 1, 2.0 in stage 2, 1.3 in stage 3; with gradients and states
# there 1.3 in stages 1 and 2, 0.6 in stage 3; with everything there 0.37.
@pytest.mark.parametrize(
    ("budget", "limit", "expected"),
    [
        ("100GB", None, "shard_optimizer: nothing"),
        ("2.5GB", None, "shard_grads: nothing"),
        ("1.8GB", None, "shard_grads: states on disk"),
        ("1.8GB", "100MiB", "shard_params: nothing"),
        ("1.3GB", None, "shard_optimizer: gradients, states on disk"),
        ("1GB", None, "shard_params: gradients, states on disk"),
        ("0.5GB", None, "shard_optimizer: parameters, gradients, states on disk"),
    ],
)
def test_the_fastest_that_fits_is_first(axis, budget, limit, expected):
    assert best(axis, budget, SPEEDS, zf.nvme("/scratch", limit=limit)) == expected


@pytest.mark.parametrize(
    ("host", "disk", "expected"),
    [
        ("2GiB", "1KB", "shard_optimizer: parameters, gradients, states on host"),
        ("1GB", "1KB", "shard_params: gradients, states on host"),
        ("600MB", "10GB", "shard_optimizer: parameters, gradients on host, states on disk"),
        ("400MB", "10GB", "shard_params: gradients on host, states on disk"),
    ],
)
def test_limits_of_both_tiers_are_kept(host, disk, expected):
    with pretended(4, device_type="cuda") as mesh:
        tiers = zf.cpu(limit=host), zf.nvme("/scratch", limit=disk)
        assert best(mesh, "600MB", ON_ACCELERATORS, *tiers) == expected


def test_what_fits_nowhere_is_told_the_nearest():
    tiers = zf.cpu(limit="320MB"), zf.nvme("/scratch", limit="500MB")
    nearest = r"(?s)nearest *: shard_params, .* on host, .* on disk"
    with pretended(4, device_type="cuda") as mesh, pytest.raises(zf.errors.TierError, match=nearest):
        best(mesh, "600MB", ON_ACCELERATORS, *tiers)


def test_states_are_those_of_the_optimizer_given(axis):
    def held(**options):
        found = by_kind(zf.planning.autoplan(model(), axis, "1GiB", links=SPEEDS, **options))
        proposal = found["shard_params", "nothing"]
        return proposal.memory.optimizer, proposal.optimizer_s * 10e9

    elements = 8 * (64 * 64 + 64) // 4
    assert held() == (8 * elements, pytest.approx(28 * elements))
    momentum = held(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
    assert momentum == (4 * elements, pytest.approx(20 * elements))
    assert held(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)) == (0, pytest.approx(12 * elements))
    with pytest.raises(zf.errors.PlacementError, match="cannot be streamed"):
        held(optimizer=lambda parameters: torch.optim.LBFGS(parameters), tier=zf.nvme("/scratch"))


def test_a_proposal_places_what_it_proposes(ranks, tmp_path):
    """What is held then is what it said, to the byte; and training gives the bits of the same stage in memory."""

    def trained(module, *, is_streamed):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        optimizer = zf.streamed(optimizer) if is_streamed else optimizer
        for _ in range(2):
            optimizer.zero_grad()
            module(torch.ones(2, 64)).square().mean().backward()
            optimizer.step()
        return [full(parameter) for parameter in module.parameters()], zf.memory(module, optimizer)

    def placed(path):
        links = zf.planning.LinkSpeeds(1e9, 1e9, 1e9, {"dp": 1e9}, None, None)
        seed_generator(0)
        module, wrong = model(), []
        found = zf.planning.autoplan(
            module, axis_of_ranks(), "1GiB", links=links, tier=zf.nvme(path), persist_below=300
        )
        golden, _ = trained(zf.replicate(module, axis_of_ranks()), is_streamed=False)
        for proposal in found.all:
            own = proposal.place(module, axis_of_ranks(), persist_below=300)
            values, held = trained(own, is_streamed=proposal.tier is not None)
            is_right = all(torch.equal(one, other) for one, other in zip(values, golden, strict=True))
            if not is_right or held.total != proposal.memory.total:
                wrong.append(f"{proposal.transform}, {proposal.away}: {held} {proposal.memory}")
        return wrong

    for wrong in ranks(2).run(placed, str(tmp_path)):
        assert wrong == []


def test_activations_are_taken_from_the_budget(axis):
    needs = zf.planning.autoplan(model(), axis, "1GiB", links=SPEEDS).best.nbytes
    assert (
        zf.planning.autoplan(model(), axis, needs + 5000, links=SPEEDS, activations=5000).best.transform
        == "shard_optimizer"
    )
    assert (
        zf.planning.autoplan(model(), axis, needs + 4999, links=SPEEDS, activations=5000).best.transform
        != "shard_optimizer"
    )


def test_the_module_is_left_alone(axis):
    """Ties count once, buffers and modes stay; and nothing of what was planned is found by a later transform."""
    module = nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 8, bias=False))
    module[2].weight = module[0].weight
    before = dict(module.state_dict())
    found = zf.planning.autoplan(module, axis, "1GiB", links=SPEEDS)
    assert module[2].weight is module[0].weight
    assert all(tensor.data_ptr() == before[name].data_ptr() for name, tensor in module.state_dict().items())
    assert by_kind(found)["replicate", "nothing"].memory.optimizer == 8 * (8 * 8 + 2 * 8)
    assert zf.plan(zf.shard_params(module, axis)).memory.parameters == 4 * (8 * 8 + 2 * 8) // 4


def test_a_proposal_is_printed_with_what_bounds_it(axis):
    text = str(zf.planning.autoplan(model(), axis, 300_000, links=SPEEDS, tier=zf.nvme("/scratch")))
    lines = text.splitlines()
    assert lines[0] == "budget 292.97 KiB per rank, and nvme('/scratch')"
    assert lines[1].split()[:6] == ["placement", "mesh", "elsewhere", "at", "rest", "MB"]
    assert "does not fit" in lines[-1]
    assert "does not fit" not in lines[2]


def test_ranks_with_uneven_shards_decide_alike(ranks):
    """On the edge of the budget of the rank that holds more."""

    def planned():
        module, links = nn.Linear(5, 3, bias=False), zf.planning.LinkSpeeds(1e9, None, None, {"dp": 1e9}, None, None)
        found = zf.planning.autoplan(module, axis_of_ranks(), "1GiB", links=links)
        own = zf.plan(zf.shard_params(module, axis_of_ranks())).memory.total
        (sharded,) = [p for p in found.all if p.transform == "shard_params"]
        return str(found), [sharded.memory.total - sharded.memory.optimizer, own]

    (first, here), (second, there) = ranks(2).run(planned)
    assert first == second
    assert here[0] == there[0] and here[1] > there[1]


def test_links_are_measured_alike_on_all_ranks(ranks, tmp_path):
    def measured(path):
        return zf.distributed.measure_links(axis_of_ranks(), path=path, nbytes="1MiB", rounds=2)

    first, second = ranks(2).run(measured, str(tmp_path))
    assert first == second
    speeds = (first.memory, first.disk_read, first.disk_write, first.sent["dp"])
    assert all(speed is not None and 1e5 < speed < 1e13 for speed in speeds)
    assert (first.to_device is None) == (not torch.cuda.is_available())
    assert [line.split(maxsplit=1)[0] for line in str(first).splitlines()][:4] == ["memory", "disk,", "disk,", "sent"]


def test_a_disk_that_one_rank_lacks_is_an_error_on_all(ranks, tmp_path):
    def measured(path):
        try:
            zf.distributed.measure_links(
                axis_of_ranks(), path=path + "/missing" * axis_of_ranks().get_local_rank(), nbytes=4096
            )
        except zf.errors.StorageError as error:
            return error.summary
        return "nothing"

    here, there = ranks(2).run(measured, str(tmp_path))
    assert here == "Measuring a disk failed on rank 1 of axis 'dp' (2)."
    assert there.startswith("No file can be made in")


def test_a_process_of_its_own_has_links_too():
    found = zf.distributed.measure_links(nbytes="1MiB", rounds=1)
    assert (found.disk_read, found.disk_write, found.sent) == (None, None, {})
    assert dataclasses.replace(found, memory=1.0).memory == 1.0 < found.memory


def _planned(axis, *tier, **speeds):
    return zf.planning.autoplan(model(), axis, "1GiB", links=dataclasses.replace(SPEEDS, **speeds), tier=tier or None)


test_refusals = refusals(
    {
        "planned_axis_was_not_measured": lambda four: _planned(four, sent={}),
        "planned_disk_was_not_measured": lambda four: _planned(four, zf.nvme("/scratch"), disk_read=None),
        "planned_accelerator_was_not_measured": lambda gpus: _planned(gpus, zf.cpu(), to_device=1e9),
        "planned_host_is_the_device": lambda four: _planned(four, zf.cpu(), zf.nvme("/scratch")),
        "planned_disks_are_two": lambda four: _planned(four, zf.nvme("/disk0"), zf.nvme("/disk1")),
        "planned_module_is_transformed": lambda four: zf.planning.autoplan(
            zf.shard_grads(model(), four), four, "1GiB", links=SPEEDS
        ),
        "nothing_fits_the_budget": lambda four: zf.planning.autoplan(Headed(), four, 100, links=SPEEDS),
        "planned_links_are_no_file": lambda: zf.planning.LinkSpeeds.read("links.json"),
    }
)
