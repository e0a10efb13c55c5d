"""Inference with weights that memory does not hold: read from a disk or where a folder has them, however ranks cut them, in
as many bits as asked, with two units in memory at most."""

import math
import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

import zero_fn as zf
from tests.axes.grids import grid
from tests.support.models import Language
from tests.support.ranks import axis
from tests.support.wholes import full
from zero_fn.runtime.registry import units_of
from zero_fn.storage import pool
from zero_fn.storage.host_memory import map_memory
from zero_fn.tiers import parcels

PLACES = {
    "one rank": (1, lambda model: model),
    "replicas": (2, lambda model: zf.replicate(model, axis())),
    "shards": (3, lambda model: zf.shard_params(model, axis())),
    "two axes": (4, lambda model: zf.hybrid(model, grid("outer", "inner"))),
}


def model_of(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return Language(vocabulary=67, dim=34).to(dtype).requires_grad_(False)


def on_meta(dtype=torch.bfloat16):
    with torch.device("meta"):
        return model_of(dtype)


def written(folder, dtype=torch.bfloat16):
    """A model, and its weights in two files of a folder. The tied one is there once."""
    model = model_of(dtype)
    values = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    names = sorted(values)
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({name: values[name] for name in part}, folder / f"model-{number}.safetensors")
    return model


def tokens(seed, rows=2):
    return torch.randint(67, (rows, 5), generator=torch.Generator().manual_seed(seed))


def require_same_outputs(model, expected):
    """In the first pass, and in the next, which follow a schedule; under both modes, with other numbers of sequences."""
    for seed, mode in enumerate((torch.no_grad, torch.inference_mode, torch.inference_mode)):
        with mode():
            assert torch.equal(model(tokens(seed, seed + 1)), expected(tokens(seed, seed + 1)))


# -- from files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "resident"), [*((name, 0.0) for name in PLACES), ("one rank", 0.4), ("shards", 0.4)])
def test_weights_are_read_where_a_folder_has_them(ranks, tmp_path, name, resident):
    """On any number of ranks, of which each reads its own rows; beside others that stay in memory."""
    written(tmp_path)
    ranks(PLACES[name][0]).run(reads_in_place, str(tmp_path), name, resident)


def reads_in_place(folder, name, resident):
    model = zf.offload(PLACES[name][1](on_meta()), params=zf.nvme(folder), resident=resident)
    expected = model_of()
    zf.load_pretrained(model, folder, copy=False)
    require_same_outputs(model, expected)
    tiers = zf.memory(model).tiers
    assert list(tiers) == [f"files in {folder}"], "nothing was copied to the disk"
    planned = zf.plan(model)
    assert dict(planned.memory.tiers) == dict(tiers)
    assert {place: moved.read % sum(tiers.values()) for place, moved in planned.moved.items()} == dict.fromkeys(
        tiers, 0
    )
    for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(full(parameter), other)
    again = zf.precision(model, compute=torch.bfloat16)  # another transform copies what it takes over
    require_same_outputs(again, expected)
    assert sum(nbytes for tier, nbytes in zf.memory(again).tiers.items() if tier.startswith("nvme")) > 0


def test_what_is_read_in_place_is_not_changed(tmp_path):
    written(tmp_path)
    before = [path.read_bytes() for path in sorted(tmp_path.iterdir())]
    model = zf.offload(on_meta(), params=zf.nvme(tmp_path))
    zf.load_pretrained(model, tmp_path, copy=False)
    with pytest.raises(zf.errors.StateError), torch.no_grad():
        next(iter(model.parameters())).zero_()
    with pytest.raises(zf.errors.StateError):  # one, not one a parameter
        model.load_state_dict(model_of().state_dict())
    model.blocks[0].requires_grad_()
    with pytest.raises(zf.errors.StateError):
        zf.streamed(torch.optim.AdamW(model.parameters()), zf.nvme(tmp_path))
    model.requires_grad_(False)
    assert before == [path.read_bytes() for path in sorted(tmp_path.iterdir())]
    require_same_outputs(model, model_of())


def test_what_is_trained_or_has_values_is_not_read_in_place(tmp_path):
    written(tmp_path)
    trained, filled = (zf.offload(on_meta(), params=zf.nvme(tmp_path)) for _ in range(2))
    trained.requires_grad_()
    zf.load_pretrained(filled, tmp_path)
    for model in (trained, filled):
        with pytest.raises(zf.errors.CheckpointError, match=r" 1 +: (trained|have values).*such as"):
            zf.load_pretrained(model, tmp_path, copy=False)


def test_a_file_that_changes_under_a_model_is_found(tmp_path, landing):
    written(tmp_path)
    model = zf.offload(on_meta(), params=zf.nvme(tmp_path))
    zf.load_pretrained(model, tmp_path, copy=False)
    with torch.no_grad():
        model(tokens(0))
        path = tmp_path / "model-1.safetensors"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(bytes(content))
        with pytest.raises(zf.errors.StorageError, match=r"model-1\.safetensors"):
            model(tokens(0))


# -- memory --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def landing(monkeypatch):
    """Bytes of each mapping that is made for what a disk fills. Small units are read like large ones."""
    made = []

    def noted(nbytes, what, **options):
        made.append(nbytes)
        return map_memory(nbytes, what, **options)

    monkeypatch.setattr(parcels, "_LANDING_NBYTES", 256)
    monkeypatch.setattr(pool, "map_memory", noted)
    return made


@pytest.mark.parametrize("copy", [True, False])
def test_two_units_are_in_memory_at_most(tmp_path, landing, copy):
    """However often the model runs; the memory of one unit serves the next."""
    written(tmp_path)
    model = zf.offload(on_meta(), params=zf.nvme(tmp_path))
    zf.load_pretrained(model, tmp_path, copy=copy)
    largest = max(unit.memory.landing_nbytes for unit in units_of(model))
    for _ in range(4):
        require_same_outputs(model, model_of())
    assert len(landing) == 3, "the root, which stays, and two blocks"
    assert sum(sorted(landing)[-2:]) <= 2 * largest
    assert zf.plan(model).in_flight_nbytes <= 2 * largest + 4096, "and what is too small to be read straight"


@pytest.mark.parametrize("part", [0.1, 0.3, 0.5, 0.9])
def test_the_part_that_stays_is_spread_evenly(tmp_path, part):
    model = zf.offload(model_of(), params=zf.nvme(tmp_path), resident=part)
    stays, all_nbytes, largest = 0, 0, 0
    for unit in units_of(model):
        for slot in unit.slots:
            nbytes = slot.path.numel * 2
            stays, all_nbytes = stays + nbytes * (not slot.kind.is_away), all_nbytes + nbytes
            largest = max(largest, nbytes)
            assert abs(stays - part * all_nbytes) <= largest / 2
    assert zf.memory(model).parameters == stays + zf.plan(model).padding.parameters
    require_same_outputs(model, model_of())


class Scaled(nn.Module):
    """Autograd saves the second parameter, which lies after more than a parcel."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(900, 900, bias=False), nn.Linear(900, 901, bias=False)
        self.scale = nn.Parameter(torch.randn(901))

    def forward(self, x):
        return (self.second(self.first(x)) * self.scale)[..., :900]


@pytest.mark.parametrize("dtypes", [{}, {"rest": torch.bfloat16, "compute": torch.float32}])
def test_what_autograd_remembers_is_there_however_it_came(tmp_path, dtypes):
    """After an edit, copies in bfloat16 are made anew by the forward, and read straight to their place by the backward."""
    torch.manual_seed(0)
    plain = nn.Sequential(Scaled(), Scaled())
    cast = zf.precision(plain, **dtypes)
    models = cast, zf.offload(cast, params=zf.nvme(tmp_path), units=Scaled)
    x = torch.randn(2, 900)
    for _ in range(2):
        for model in models:
            model.zero_grad()
            model(x).float().square().mean().backward()
        for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert torch.equal(full(one.grad), full(other.grad))
            with torch.no_grad():
                one.mul_(0.5), other.mul_(0.5)


# -- fewer bits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["one rank", "shards"])
def test_codes_rest_in_the_tier_and_a_pass_reads_them_alone(ranks, tmp_path, name):
    written(tmp_path)
    ranks(PLACES[name][0]).run(reads_codes, str(tmp_path), name)


def reads_codes(folder, name):
    """The bits are those of the same format in memory, at first and later; after an edit the codes are made anew."""
    for wire in (zf.wire.int8(), zf.wire.int4(block=32)):
        expected = zf.precision(PLACES[name][1](model_of()), gather=wire)
        for copy in (False, True):
            model = zf.offload(zf.precision(PLACES[name][1](on_meta()), gather=wire), params=zf.nvme(folder))
            zf.load_pretrained(model, folder, copy=copy)
            require_same_outputs(model, expected)
            coded = [
                each for unit in units_of(model) for each in unit.memory.groups if each.record and each.record.codes
            ]
            assert coded and all(each.record.source is each.record.codes for each in coded)
        with torch.no_grad():
            for each in (model, expected):
                each.blocks[0].up.weight.mul_(2)
        require_same_outputs(model, expected)


@pytest.mark.nightly
def test_a_trained_model_writes_as_well_in_fewer_bits(tmp_path):
    """Perplexity within 1 % in int8 and 3 % in int4, of text that it has not seen."""
    root = Path(__file__).parents[2]
    text = b"".join(page.read_bytes() for page in sorted((root / "docs" / "guides").glob("*.md")))
    rows = torch.tensor(list(text[: len(text) // 128 * 128])).view(-1, 128)
    torch.manual_seed(0)
    model = runpy.run_path(str(root / "examples" / "generate.py"))["GPT"](2, 128, 4, 128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(60):
        seen = rows[torch.randint(len(rows) - 64, (16,))]
        F.cross_entropy(model(seen[:, :-1]).flatten(0, 1), seen[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    def perplexity(model):
        with torch.inference_mode():
            logits = model(rows[-64:, :-1])
        return math.exp(F.cross_entropy(logits.flatten(0, 1), rows[-64:, 1:].flatten()).item())

    exact = perplexity(model.requires_grad_(False))
    assert exact < 25, "of 256, so it has learnt something"
    for wire, bound in ((zf.wire.int8(), 0.01), (zf.wire.int4(), 0.03)):
        coded = zf.offload(zf.precision(model, compute=torch.float32, gather=wire), params=zf.nvme(tmp_path))
        first, second = (perplexity(coded) for _ in range(2))
        assert first == second != exact
        assert abs(second / exact - 1) < bound
