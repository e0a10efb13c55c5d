"""Files of `torch.save` are values: what they name beside tensors and a few classes is refused before it is called."""

import pickle
import tracemalloc
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

from zero_fn.checkpoint.others.dcp import MetadataUnpickler
from zero_fn.checkpoint.others.torch_files import Foreign, TensorInFile, read_torch_file
from zero_fn.errors import CheckpointError

CALLED = []


def trap(*args):
    """What a pickle must not reach."""
    CALLED.append(args)


class Calls:
    """Its pickle calls a function."""

    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


class _Restored:
    def __setstate__(self, state):
        CALLED.append(state)

    def __getstate__(self):
        return {"a": 1}


@pytest.mark.parametrize("value", [Calls(trap, 1), Calls(nn.Linear, 2, 2), _Restored(), trap, nn.Linear(1, 1), Path])
def test_objects_of_other_classes_are_refused(value, tmp_path):
    CALLED.clear()
    torch.save({"client": [value]}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="names something that is not read"):
        read_torch_file(tmp_path / "x.pt")
    (tmp_path / "x").write_bytes(pickle.dumps(value))
    with pytest.raises(CheckpointError, match="names something that is not read"), (tmp_path / "x").open("rb") as file:
        MetadataUnpickler(file).load()
    assert CALLED == []


VIEWS = {
    "whole": torch.arange(24.0).view(2, 3, 4),
    "in the middle": torch.arange(24.0)[5:9],
    "transposed": torch.arange(24.0).view(4, 6).t(),
    "with gaps": torch.arange(24.0)[::3],
    "expanded": torch.arange(3.0).expand(4, 3),
    "a number": torch.tensor(3.0),
    "empty": torch.empty(0, 3),
    "bfloat16": torch.arange(4).bfloat16(),
    "float8": torch.arange(4.0).to(torch.float8_e4m3fn),
    "uint16": torch.arange(4).to(torch.uint16),
    "bool": torch.tensor([True, False]),
    "a parameter": nn.Parameter(torch.ones(2)),
}


def _opened(path):
    found = read_torch_file(path)["x"]
    source = Foreign(path.parent, lambda name: name)
    source.add("model", "x", "", found.shape, found)
    return found, source


@pytest.mark.parametrize("name", VIEWS)
def test_tensors_are_read_as_they_were(name, tmp_path):
    torch.save({"x": VIEWS[name]}, tmp_path / "x.pt")
    found, source = _opened(tmp_path / "x.pt")
    for read in (source.read_tensor(found), source.whole(("model", "x"))):
        assert read.dtype == VIEWS[name].dtype
        assert torch.equal(read.float(), VIEWS[name].float())
    source.close()


def test_values_are_read_as_they_were(tmp_path):
    value = {"a": [1, 2.5, None, True, "x", b"y", (1, 2)], 3: OrderedDict(b={4, 5}), "size": torch.Size([2])}
    torch.save(value, tmp_path / "x.pt")
    assert read_torch_file(tmp_path / "x.pt") == value


def test_a_tensor_of_a_gpu_is_read_where_there_is_none(tmp_path):
    torch.save({"x": torch.ones(3)}, tmp_path / "cpu.pt")
    with zipfile.ZipFile(tmp_path / "cpu.pt") as cpu, zipfile.ZipFile(tmp_path / "x.pt", "w") as gpu:
        for name in cpu.namelist():
            gpu.writestr(name, cpu.read(name).replace(b"X\3\0\0\0cpu", b"X\6\0\0\0cuda:7"))
    assert _opened(tmp_path / "x.pt")[1].whole(("model", "x")).tolist() == [1, 1, 1]


def test_other_files_are_refused(tmp_path):
    (tmp_path / "old.pt").write_bytes(pickle.dumps({"a": 1}))
    torch.save(torch.ones(3), tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    torch.save(torch.ones(3), tmp_path / "plain.pt")
    files = {"big.pt": (zipfile.ZIP_STORED, b"big"), "compressed.pt": (zipfile.ZIP_DEFLATED, b"little")}
    for name, (compression, order) in files.items():
        with (
            zipfile.ZipFile(tmp_path / "plain.pt") as plain,
            zipfile.ZipFile(tmp_path / name, "w", compression) as other,
        ):
            for each in plain.namelist():
                other.writestr(each, order if each.endswith("byteorder") else plain.read(each))
    assert isinstance(read_torch_file(tmp_path / "plain.pt"), TensorInFile)
    for name in ("old.pt", "legacy.pt", *files):
        with pytest.raises(CheckpointError, match="damaged"):
            read_torch_file(tmp_path / name)


def test_a_number_in_a_metadata_takes_no_memory(tmp_path):
    """A flipped bit makes LONG_BINPUT of SETITEM, and a number of the 4 bytes that follow."""
    (tmp_path / "a").write_bytes(b"\x80\x04Nr" + (1 << 24).to_bytes(4, "little") + b".")
    tracemalloc.start()
    try:
        with (tmp_path / "a").open("rb") as file:
            assert MetadataUnpickler(file).load() is None
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
