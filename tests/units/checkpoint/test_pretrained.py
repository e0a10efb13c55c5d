"""Folders of safetensors, read straight into shards of any stage and tier, from meta too."""

import copy
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

import zero_fn as zf
from tests.axes.grids import Decoder, grid, parallelized
from tests.support.groups import alone
from tests.support.messages import Headed, refusals, refused
from tests.support.on_ranks import on_ranks
from tests.support.ranks import axis
from tests.support.seeds import seed_generator
from tests.support.wholes import full
from tests.units.checkpoint.worlds import WORLDS, Tied, differing
from zero_fn.checkpoint.format.files import TensorFile, TensorReader
from zero_fn.checkpoint.format.folders import Draft
from zero_fn.checkpoint.huggingface.write import export


class Turning(nn.Module):
    """A buffer that is in no file, and one that is."""

    def __init__(self):
        super().__init__()
        self.register_buffer("frequencies", torch.empty(4), persistent=False)
        self.register_buffer("seen", torch.empty(5))
        self.reset_parameters()

    def reset_parameters(self):
        torch.arange(4, out=self.frequencies).mul_(0.5)
        self.seen.zero_()


def turning(seed, styles=None):
    """A seeded decoder that turns."""
    seed_generator(seed)
    model = Decoder() if styles is None else parallelized(grid("dp", "tp")["tp"], styles)
    model.turn = Turning()
    model.turn.seen += seed
    return model


def written(folder, model):
    """Writes a model as Hugging Face does, in three files; returns what was written."""
    folder.mkdir()
    state = {name: value.detach().contiguous() for name, value in model.state_dict().items()}
    files = {name: f"model-0000{number % 3 + 1}-of-00003.safetensors" for number, name in enumerate(sorted(state))}
    for file in set(files.values()):
        save_file({name: state[name] for name in state if files[name] == file}, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return state


def _read_and_written(world, folder, expected):
    """What differs from the files of a folder, in memory and from meta, and what of that in files that are written."""
    wrong = []
    for device in ("meta", "cpu"):
        if device == "meta" and (WORLDS[world].styles is not None or world == "plain"):
            continue
        with torch.device(device):
            model = turning(7, WORLDS[world].styles)
        model = WORLDS[world].place(model, str(folder))
        zf.load_pretrained(model, folder / "hf")
        found = {name: full(value) for name, value in model.state_dict().items()}
        frequencies = {"frequencies": torch.arange(4) * 0.5}
        wrong += differing(expected | frequencies, {**found, "frequencies": model.turn.frequencies})
        if WORLDS[world].styles is None:
            model(torch.zeros(1, 3, dtype=torch.long)).sum().backward()
    zf.save_pretrained(model, folder / "whole")
    zf.save_pretrained(model, folder / "half", dtype=torch.bfloat16, max_shard=300)
    index = json.loads((folder / "half" / "model.safetensors.index.json").read_text())["weight_map"]
    half = {name: load_file(folder / "half" / file)[name] for name, file in index.items()}
    wrong += differing({name: value.bfloat16() for name, value in expected.items()}, half)
    return wrong + differing(expected, load_file(folder / "whole" / "model.safetensors"))


@pytest.mark.parametrize(
    "world", ["plain", "zero2", "zero3 on 4", "hpz", "tensor parallel", "sequence parallel", "away"]
)
def test_every_way_to_rest_has_what_is_in_the_files_and_is_written_whole(ranks, world, tmp_path):
    expected = written(tmp_path / "hf", turning(3))
    n = WORLDS[world].ranks
    assert ranks(n).run(_read_and_written, world, tmp_path, expected) == [[]] * n
    assert len(list((tmp_path / "half").glob("model-*"))) > 3
    assert sorted(file.name for file in (tmp_path / "whole").iterdir()) == ["model.safetensors"]


@pytest.mark.parametrize(("source", "target"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_values_are_rounded_to_the_dtype_at_rest(source, target, tmp_path):
    expected = {name: value.detach().to(source) for name, value in Decoder().state_dict().items()}
    save_file(expected, tmp_path / "model.safetensors")
    with alone() as mesh, torch.device("meta"):
        model = zf.shard_params(Decoder().to(target), mesh)
        zf.load_pretrained(model, tmp_path / "model.safetensors")
    assert all(torch.equal(full(value), expected[name].to(target)) for name, value in model.state_dict().items())


@pytest.mark.parametrize("names", [["a.weight"], ["b.weight"], ["a.weight", "b.weight"]])
def test_tied_parameters_are_found_by_any_of_their_names(names, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "zero_fn.checkpoint.format.contents.BUFFER_NBYTES", 32
    )  # two values are compared a part at a time
    value = torch.randn(3, 3)
    save_file({name: value.clone() for name in names}, tmp_path / "weights.safetensors")
    with alone() as mesh:
        with torch.device("meta"):
            model = zf.shard_params(Tied("a", "b"), mesh)
        zf.load_pretrained(model, tmp_path)
        assert torch.equal(full(model.a.weight), value)
        assert model.a.weight is model.b.weight
        save_file({"a.weight": value, "b.weight": value + 1}, tmp_path / "weights.safetensors")
        with refused("checkpoint_of_two_values_for_a_tie"):
            zf.load_pretrained(model, tmp_path)


def test_names_are_mapped_and_what_is_missing_is_drawn(tmp_path):
    save_file({"old.weight": torch.full((2, 3), 4.0)}, tmp_path / "a.safetensors")
    with alone() as mesh:
        with torch.device("meta"):
            model = zf.shard_params(nn.Linear(3, 2), mesh)
        seed_generator(0)
        zf.load_pretrained(model, tmp_path, rename={r"^old\.": ""}, strict=False)
        seed_generator(0)
        assert torch.equal(full(model.weight), torch.full((2, 3), 4.0))
        assert torch.equal(full(model.bias), nn.Linear(3, 2).bias)


def test_scaled_numbers_of_a_byte_are_not_read_as_values(tmp_path):
    save_file({"weight": torch.ones(2, 3).to(torch.float8_e4m3fn), "bias": torch.ones(2)}, tmp_path / "a.safetensors")
    with pytest.raises(zf.errors.CheckpointError, match=r"weight: torch\.float8_e4m3fn in the checkpoint"):
        zf.load_pretrained(nn.Linear(3, 2), tmp_path)


def test_folders_without_safetensors_are_refused(tmp_path):
    model = nn.Linear(3, 2)
    with pytest.raises(zf.errors.StorageError):
        zf.load_pretrained(model, tmp_path / "nowhere")
    zf.save(tmp_path / "runs" / "step-1", model)
    with pytest.raises(zf.errors.CheckpointError, match=r"zf\.load\(folder"):
        zf.load_pretrained(model, tmp_path / "runs")


def _with(**attributes):
    model = nn.Linear(2, 2)
    vars(model).update(attributes)
    return model


def _in_place_in_other_bits(folder):
    save_file({name: value.bfloat16() for name, value in Headed().state_dict().items()}, folder / "model.safetensors")
    with torch.device("meta"):
        model = zf.offload(Headed().requires_grad_(False), params=zf.nvme(folder))
    zf.load_pretrained(model, folder, copy=False)


test_refusals = refusals(
    {
        "pretrained_of_another_kind": lambda folder: (
            torch.save({}, folder / "pytorch_model.bin"),
            zf.load_pretrained(nn.Linear(2, 2), folder),
        ),
        "pretrained_onto_meta": lambda folder: zf.load_pretrained(nn.Linear(2, 2, device="meta"), folder),
        "pretrained_is_quantised": lambda folder: zf.save_pretrained(_with(is_quantized=True), folder),
        "pretrained_with_adapters": lambda folder: zf.save_pretrained(_with(peft_config={}), folder),
        "parameters_cannot_be_read_in_place": _in_place_in_other_bits,
    }
)


def _refuse(*_):
    raise zf.errors.StorageError("A disk refused.", fix="another disk")


# -- written -----------------------------------------------------------------------------------------------------------


def test_tiles_and_ties_are_written_once(tmp_path):
    plain = nn.Sequential(nn.Linear(3, 10), nn.Tanh(), nn.Linear(10, 3))
    with alone() as mesh:
        tiled = zf.shard_params(zf.tile(copy.deepcopy(plain), parts=3, where="0.*"), mesh)
        zf.save_pretrained(tiled, tmp_path / "tiled")
        zf.save_pretrained(zf.shard_params(Tied("a", "b"), mesh), tmp_path / "tied")
    found = load_file(tmp_path / "tiled" / "model.safetensors")
    assert all(torch.equal(value, found[name]) for name, value in plain.state_dict().items())
    assert load_file(tmp_path / "tied" / "model.safetensors").keys() == {"a.weight"}


def test_a_model_that_is_there_is_not_overwritten(tmp_path):
    zf.save_pretrained(nn.Linear(3, 2), tmp_path)
    before = load_file(tmp_path / "model.safetensors")
    with refused("pretrained_is_there_already"):
        zf.save_pretrained(nn.Linear(3, 2), tmp_path, max_shard=8)
    with pytest.raises(zf.errors.TierError):
        zf.save_pretrained(nn.Linear(3, 2), tmp_path / "b", max_shard="much")
    assert before.keys() == load_file(tmp_path / "model.safetensors").keys()
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("read", [[], ["model.safetensors", "model.safetensors.index.json"]])
def test_files_that_no_reader_takes_are_replaced_under_their_names(read, tmp_path):
    names = {f"model-0000{number}-of-00002.safetensors" for number in (1, 2)}
    for name in (*names, *read):
        (tmp_path / name).write_text("{}")
    export(nn.Linear(3, 2), tmp_path, max_shard=8, replaces=True)
    assert {path.name for path in tmp_path.iterdir()} == {*names, "model.safetensors.index.json"}


@pytest.mark.parametrize("where", ["append", "finish", "commit"])
@on_ranks(2)
def test_a_save_that_fails_on_one_rank_leaves_no_model(folder, where):
    """In a tensor, at the end of a file, or as all are given their names. All raise."""
    model, folder = zf.shard_params(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), axis()), Path(folder)
    fails = axis().get_local_rank() == (where != "commit")
    with pytest.MonkeyPatch.context() as patched:
        if fails:
            patched.setattr(Draft if where == "commit" else TensorFile, where, _refuse)
        with pytest.raises(zf.errors.StorageError, match="A disk refused"):
            zf.save_pretrained(model, folder, max_shard=300)
    dist.barrier()
    assert list(folder.iterdir()) == []
    dist.barrier()
    zf.save_pretrained(model, folder, max_shard=300)
    zf.load_pretrained(model, folder)


@on_ranks(2)
def test_ranks_with_tensors_of_different_names_are_refused(folder):
    names = ["a", "b"] if axis().get_local_rank() else ["a", "c"]
    with refused("pretrained_of_two_stages"):
        zf.save_pretrained(nn.ModuleDict({name: nn.Linear(2, 2) for name in names}), f"{folder}/hf")


# -- bytes -------------------------------------------------------------------------------------------------------------


def _wide():
    return nn.Sequential(nn.Linear(8192, 64, bias=False), nn.Linear(8192, 63, bias=False))


def _bytes_read(folder, cut):
    """Bytes that a rank reads, and those that it owns."""
    read, fill = [], TensorReader._fill

    def counted(self, view, offset):
        read.append(len(view))
        fill(self, view, offset)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(TensorReader, "_fill", counted)
        with torch.device("meta"):
            model = _wide()
        if cut == "columns":
            model = parallelize_module(model, grid("dp", "tp")["tp"], {"*": RowwiseParallel()})
        model = zf.shard_params(model, axis() if cut == "rows" else grid("dp", "tp")["dp"])
        zf.load_pretrained(model, folder)
    expected = torch.arange(4096 * 8.0).repeat(16).view(64, -1)
    assert torch.equal(full(model[0].weight)[:, :4096], expected[:, :4096])
    return sum(read), sum(p.to_local().nbytes for p in model.parameters())


@pytest.mark.parametrize(("n", "cut"), [(3, "rows"), (4, "columns")])
def test_a_rank_reads_what_it_owns(ranks, n, cut, tmp_path):
    save_file(
        {"0.weight": torch.arange(4096 * 8.0).repeat(16).view(64, -1), "1.weight": torch.randn(63, 8192)},
        tmp_path / "a.safetensors",
    )
    for read, owned in ranks(n).run(_bytes_read, tmp_path, cut):
        assert read <= 1.01 * owned
