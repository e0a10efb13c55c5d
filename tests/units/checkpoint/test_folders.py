"""What checkpoints there are, which are kept, how many messages a save takes, and who else reads the files."""

import threading
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

import zero_fn as zf
from tests.axes.grids import Decoder
from tests.simulation import axis as simulated_axis
from tests.support.messages import refusals
from tests.support.on_ranks import on_ranks
from tests.support.ranks import Ranks, axis
from tests.support.seeds import seed_generator
from tests.units.checkpoint.worlds import differing, everything
from zero_fn.checkpoint import rank_files
from zero_fn.checkpoint.format.folders import Draft
from zero_fn.checkpoint.format.own_folder import OwnFolder
from zero_fn.storage import Slab


def _steps(folder):
    return [found.step for found in zf.checkpoints(folder)]


def test_checkpoints_says_what_there_is(tmp_path):
    assert zf.save(tmp_path / "step-20", nn.Linear(3, 3)).is_done()
    zf.save(tmp_path / "step-10", nn.Linear(30, 30))
    (tmp_path / ".step-30.saving").mkdir()
    (tmp_path / "notes").mkdir()
    left, first, second = zf.checkpoints(tmp_path)
    assert (left.is_complete, left.step) == (False, 30)
    assert (first.step, second.step) == (20, 10), "in the order in which they were saved"
    assert first.is_complete and first.ranks == 1 and first.saved_at_ns < second.saved_at_ns
    assert second.nbytes == sum(file.stat().st_size for file in second.path.rglob("*") if file.is_file()) > 900 * 4
    assert first.made_by["torch"] == torch.__version__
    assert zf.checkpoints(first.path) == [first]


def test_keep_leaves_the_newest_of_this_name(tmp_path):
    zf.save(tmp_path / "best-1", nn.Linear(2, 2))
    (tmp_path / "step-5").mkdir()  # not a checkpoint
    for step in range(10, 70, 10):
        zf.save(tmp_path / f"step-{step}", nn.Linear(2, 2), keep=2)
    assert _steps(tmp_path) == [1, 50, 60]
    assert (tmp_path / "step-5").exists()
    zf.save(tmp_path / "step-70", nn.Linear(2, 2), keep=1, background=True).wait()
    assert _steps(tmp_path) == [1, 70]


def test_nothing_is_removed_before_there_are_as_many_as_are_kept(tmp_path):
    for step in range(1, 6):
        zf.save(tmp_path / f"step-{step}", nn.Linear(2, 2), keep=3)
        assert _steps(tmp_path) == list(range(max(step - 2, 1), step + 1))


def test_what_cannot_be_pruned_stays_with_a_warning(tmp_path, monkeypatch):
    zf.save(tmp_path / "step-1", nn.Linear(2, 2))

    def refuse(*_):
        raise PermissionError(13, "no")

    monkeypatch.setattr("shutil.rmtree", refuse)
    with pytest.warns(RuntimeWarning, match="could not remove an old checkpoint"):
        zf.save(tmp_path / "step-2", nn.Linear(2, 2), keep=1)
    monkeypatch.undo()
    assert [found.step for found in zf.checkpoints(tmp_path) if found.is_complete] == [2]


# -- async -------------------------------------------------------------------------------------------------------------


def test_a_failure_of_a_thread_is_raised_by_the_next_save(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    model = nn.Linear(3, 3)
    entered, go = threading.Event(), threading.Event()
    real = zf.checkpoint.rank_files.RankFiles.write_rest

    def late(files):
        entered.set()
        go.wait()
        monkeypatch.setattr("os.fsync", refuse)
        real(files)

    monkeypatch.setattr("zero_fn.checkpoint.rank_files.RankFiles.write_rest", late)
    saving = zf.save(tmp_path / "step-1", model, background=True)
    assert entered.wait(10)
    assert not saving.is_done()
    go.set()
    with pytest.raises(zf.errors.StorageError, match="No space left"):
        zf.save(tmp_path / "step-2", model)
    monkeypatch.undo()
    assert saving.is_done()
    zf.save(tmp_path / "step-2", model)
    assert _steps(tmp_path) == [2]


def test_load_waits_for_the_save_under_way(tmp_path, monkeypatch):
    real = zf.checkpoint.rank_files.RankFiles.write_rest

    def late(files):
        time.sleep(0.2)  # a slow disk: the load below begins before it has written
        real(files)

    monkeypatch.setattr("zero_fn.checkpoint.rank_files.RankFiles.write_rest", late)
    model = nn.Linear(3, 3)
    expected = model.weight.detach().clone()
    zf.save(tmp_path / "step-1", model, background=True)
    with torch.no_grad():
        model.weight.zero_()
    zf.load(tmp_path, model)
    assert torch.equal(model.weight, expected)


def test_values_are_copied_into_as_many_bytes(tmp_path, monkeypatch):
    copied = []

    class Counted(Slab):
        def __init__(self, nbytes, *args, **kwargs):
            copied.append(nbytes)
            super().__init__(nbytes, *args, **kwargs)

    monkeypatch.setattr(rank_files, "Slab", Counted)
    zf.save(tmp_path / "step-1", nn.Linear(20, 10), background=True).wait()
    assert copied == [13 * 64 + 64]  # of 800 bytes and of 40, to whole 64


# -- ranks -------------------------------------------------------------------------------------------------------------


def _messages(folder):
    """Elements of the messages that the last rank sends and gets for a save."""
    sizes = []

    def counted(act):
        def call(group, tensors, *rest):
            sizes.append(sum(tensor.numel() for tensor in tensors))
            return act(group, tensors, *rest)

        return call

    model = zf.shard_params(nn.Linear(64, 3), axis())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zf.save(folder / "step-1", model)  # makes a process group
    others = ("all_gather", "all_reduce", "broadcast", "barrier", "all_gather_into_tensor")
    with pytest.MonkeyPatch.context() as patched:
        for name in ("send", "recv"):
            patched.setattr(dist.ProcessGroup, name, counted(getattr(dist.ProcessGroup, name)))
        for name in others:
            patched.setattr(dist, name, lambda *_, **__: sizes.append(name))  # noqa: B023
        zf.save(folder / "step-2", model, optimizer)
    return sizes


@pytest.mark.parametrize("n", [2, 4])
def test_a_rank_sends_as_many_messages_whatever_their_number(ranks, n, tmp_path):
    assert ranks(n).run(_messages, tmp_path)[-1] == [640] * 4, "one to rank 0 and one back, to begin and to commit"


def _over_many(folder):
    """Saves and loads on many ranks; how many of them a reader has asked, and what differs."""
    model = zf.shard_params(nn.Sequential(nn.Linear(40, 40), nn.LayerNorm(3)), simulated_axis())
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.5
    optimizer.step()
    zf.save(folder / "step-1", model, optimizer, extra={"rank": dist.get_rank()})
    expected = everything(model, optimizer)
    optimizer.step()
    assert zf.load(folder, model, optimizer)["rank"] == dist.get_rank()
    asked = OwnFolder(folder / "step-1", lambda name: name, (dist.get_rank(), dist.get_world_size()))._parts
    return len(asked), differing(expected, everything(model, optimizer))


def test_a_reader_asks_a_few_of_many_ranks(simulated, tmp_path):
    for asked, wrong in simulated(20).run(_over_many, tmp_path):
        assert asked <= 8 + 1
        assert wrong == []
    other = nn.Sequential(nn.Linear(40, 40), nn.LayerNorm(3))
    with pytest.raises(zf.errors.CheckpointError, match="20 ranks have saved different values"):
        zf.load(tmp_path, other)
    zf.load(tmp_path, other, only="model")


def test_names_are_changed_in_models_only(tmp_path):
    zf.save(tmp_path / "step-1", nn.Linear(2, 2), extra={"weight": torch.ones(2)})
    inner = nn.ModuleDict({"inner": nn.Linear(2, 2)})
    assert torch.equal(zf.load(tmp_path, inner, rename={"^": "inner."})["weight"], torch.ones(2))


@on_ranks(2)
def test_ranks_that_name_different_folders_are_told(folder):
    with pytest.raises(zf.errors.DisagreementError, match="ranks 0 and 1 were given different arguments"):
        zf.save(f"{folder}/step-{dist.get_rank()}", nn.Linear(2, 2))
    dist.barrier()
    assert list(Path(folder).iterdir()) == []


def _alone(folder):
    told = folder / "told"
    if dist.get_rank() == 1:
        while not told.exists():
            time.sleep(0.05)  # it never calls save, and ends once the other has been told
        return
    with (
        zf.distributed.set_deadline(1),
        pytest.raises(zf.errors.LostRankError, match="call save and load on every rank"),
    ):
        zf.save(folder / "step-1", nn.Linear(2, 2))
    told.touch()


def test_a_save_that_one_rank_alone_calls_ends_at_the_deadline(tmp_path):
    fresh = Ranks()
    try:
        fresh(2).run(_alone, tmp_path)
    finally:
        fresh.close()


def _stages(folder, names):
    """Two stages of a pipeline, of which each rank has one: other names, other buffers."""
    rank = dist.get_rank()
    seed_generator(rank)
    stage = nn.ModuleDict({names[rank]: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))})
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1, momentum=0.9)
    stage[names[rank]](torch.randn(5, 3)).sum().backward()
    optimizer.step()
    expected = {name: value.clone() for name, value in stage.state_dict().items()}
    zf.save(folder / "step-1", stage, optimizer)
    for value in stage.state_dict().values():
        value.zero_()
    zf.load(folder, stage, optimizer)
    return [name for name, value in stage.state_dict().items() if not torch.equal(value, expected[name])]


def test_stages_of_a_pipeline_are_one_checkpoint(ranks, tmp_path):
    assert ranks(2).run(_stages, tmp_path, ("0", "1")) == [[], []]
    whole = nn.ModuleDict({name: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for name in "01"})
    zf.load(tmp_path, whole, torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9))
    del whole["1"]
    with pytest.raises(zf.errors.CheckpointError, match="not in the model"):
        zf.load(tmp_path, whole)


@on_ranks(2)
def test_stages_with_the_same_names_are_refused(folder):
    seed_generator(dist.get_rank())
    stage = nn.Sequential(nn.Linear(3, 3), *[nn.Linear(3, 3)] * dist.get_rank())
    with pytest.raises(zf.errors.CheckpointError, match="different tensors under one name"):
        zf.save(f"{folder}/step-1", stage)
    dist.barrier()
    assert list(Path(folder).iterdir()) == []


# -- refused -----------------------------------------------------------------------------------------------------------


def _made_on_each_host(folder):
    with patch.object(Draft, "make", lambda self: self.path.mkdir() or "made elsewhere"):
        zf.save(folder / "step-1", nn.Linear(2, 2))


def _loaded_on_each_host(saved):
    with patch("zero_fn.checkpoint.loading.saved_as", side_effect=["0", "1"]):
        zf.load(saved, nn.Linear(2, 2))


def _closed_copies(folder):
    copies = zf.checkpoint.memory_copies(folder, nn.Linear(2, 2), every=1)
    copies.close()
    copies.update()


test_refusals = refusals(
    {
        "checkpoint_is_nowhere": lambda folder: zf.load(folder, nn.Linear(2, 2)),
        "checkpoint_of_no_place": lambda folder: zf.load(folder / "runs"),
        "checkpoint_loads_nothing": lambda: zf.load("runs", only="weights"),
        "checkpoint_in_a_folder_of_each_host": _made_on_each_host,
        "checkpoint_of_another_host": _loaded_on_each_host,
        "memory_copies_every_no_step": lambda: zf.checkpoint.memory_copies("runs", nn.Linear(2, 2), every=0),
        "memory_copies_that_are_closed": _closed_copies,
    }
)


# -- others who read the files -----------------------------------------------------------------------------------------


@on_ranks(3)
def test_torch_distributed_checkpoint_reads_the_files_of_the_model(folder):
    seed_generator(0)
    plain = Decoder()
    zf.save(f"{folder}/step-1", zf.shard_params(plain, axis()))
    state = {name: torch.zeros_like(value) for name, value in plain.state_dict().items()}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(f"{folder}/step-1/model"), no_dist=True)
    assert differing(plain.state_dict(), state) == []


def test_the_safetensors_library_reads_the_files(tmp_path):
    model = nn.ModuleDict({"a": nn.Linear(3, 5), "b": nn.Linear(2, 2).bfloat16(), "c": nn.Linear(1, 1).double()})
    model.register_buffer("flags", torch.tensor([True, False, True]))
    model.register_buffer("empty", torch.zeros(0, 4))
    zf.save(tmp_path / "step-1", model)
    assert differing(model.state_dict(), load_file(tmp_path / "step-1" / "model" / "00000-0.safetensors")) == []
