"""Pickles are values: what a file of `torch.save` names beside tensors and a few classes is refused before it is called."""

from __future__ import annotations

import builtins
import io
import os
import pickle
import tracemalloc
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_fn as zf
from tests.units.checkpoint.made_by_deepspeed import HERE
from zero_fn.checkpoint.others.foreign import Foreign
from zero_fn.checkpoint.others.pickles import Inert, PlacedTensor, read_lone_pickle, read_pickle
from zero_fn.errors import CheckpointError

CALLED: list[object] = []


def trap(*args: object) -> None:
    """What a pickle must not reach."""
    CALLED.append(args)


class _Calls:
    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


class _Restored:
    def __setstate__(self, state: object) -> None:
        CALLED.append(state)

    def __getstate__(self) -> object:
        return {"a": 1}


HAND_MADE = {
    "reduce": b"cos\nsystem\n(S'true'\ntR.",
    "eval": b"c__builtin__\neval\n(S'1'\ntR.",
    "inst": b"(S'true'\nios\nsystem\n.",
    "obj": b"(cos\nsystem\nS'true'\no.",
    "stack global": b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.",
    "attributes of what is admitted": b"\x80\x04\x8c\x0bcollections\x8c\x14OrderedDict.__init__\x93.",
    "a name in what is admitted": b"\x80\x04\x8c\x05torch\x8c\x04load\x93\x8c\x04true\x85R.",
    "a constructor of an admitted class": b"cbuiltins\ngetattr\n(ccollections\nOrderedDict\nS'mro'\ntR.",
    "attributes of a class": b"ctorch\ndevice\n}S'args'\nI1\nsb.",
    "slots of a class": b"ctorch\ndevice\nN}S'__new__'\nctorch\nSize\ns\x86b.",
    "slots of a dict": b"ccollections\nOrderedDict\nN}S'update'\nctorch\nSize\ns\x86b.",
    "attributes of a function": b"ctorch._utils\n_rebuild_parameter\n}S'_function'\nctorch\nSize\nsb.",
    "slots of a function": b"ctorch._utils\n_rebuild_parameter\nN}S'_function'\nctorch\nSize\ns\x86b.",
    "an extension": b"\x80\x02\x82\x01.",
    "an empty stack": b".",
    "no end": b"}",
    "a storage without an archive": b"(S'storage'\nctorch\nFloatStorage\nS'../../x'\nS'cpu'\nI4\ntQ.",
    "a storage of another kind": b"(S'module'\nctorch\nSize\nS'0'\nS'cpu'\nI4\ntQ.",
    "a function that makes tensors": b"ctorch._tensor\n_rebuild_from_type_v2\n(ctorch\nSize\nctorch\nTensor\n)}tR.",
    "a tensor of nothing": b"ctorch._utils\n_rebuild_tensor_v2\n(I1\nI0\n(I2\nt(I1\ntI00\n}tR.",
}


def _archive(path: Path, pickled: bytes, storage: bytes = b"\0" * 16) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", pickled)
        archive.writestr("a/data/0", storage)
    return path


@pytest.mark.parametrize("name", HAND_MADE)
def test_hand_made_programs_are_refused_without_running(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, function in ((os, "system"), (builtins, "eval"), (torch, "load")):
        monkeypatch.setattr(module, function, trap)
    before = {name: vars(kind).copy() for name, kind in (("Inert", Inert), ("OrderedDict", OrderedDict))}
    CALLED.clear()
    with pytest.raises(CheckpointError):
        read_pickle(_archive(tmp_path / "x.pt", HAND_MADE[name]))
    assert CALLED == []
    torch.save(nn.Parameter(torch.ones(2)), tmp_path / "y.pt")
    assert isinstance(read_pickle(tmp_path / "y.pt"), PlacedTensor), "what may be called is what it was"
    assert {name: vars(kind).copy() for name, kind in (("Inert", Inert), ("OrderedDict", OrderedDict))} == before


@pytest.mark.parametrize("value", [_Calls(trap, 1), _Calls(nn.Linear, 2, 2), _Restored(), trap, nn.Linear(1, 1), Path])
@pytest.mark.parametrize("protocol", [2, 4])
def test_objects_of_other_classes_are_refused(value: object, protocol: int, tmp_path: Path) -> None:
    CALLED.clear()
    torch.save({"client": [value]}, tmp_path / "x.pt", pickle_protocol=protocol)
    with pytest.raises(CheckpointError, match="names something that is not read"):
        read_pickle(tmp_path / "x.pt")
    assert CALLED == []


def test_a_malicious_file_in_a_folder_of_deepspeed_changes_nothing(tmp_path: Path) -> None:
    for path in (HERE / "zero1" / "global_step2").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    torch.save({"optimizer_state_dict": _Calls(trap)}, tmp_path / "zero_pp_rank_1_mp_rank_00_optim_states.pt")
    CALLED.clear()
    with pytest.raises(CheckpointError, match=r"named .*trap"):
        zf.load(tmp_path, nn.Linear(1, 1), strict=False)
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


class _OneFile(Foreign):
    """Values of one file."""


@pytest.mark.parametrize("name", VIEWS)
def test_tensors_are_read_as_they_were(name: str, tmp_path: Path) -> None:
    torch.save({"x": VIEWS[name]}, tmp_path / "x.pt")
    found = read_pickle(tmp_path / "x.pt")["x"]
    assert isinstance(found, PlacedTensor)
    source = _OneFile(tmp_path, lambda name: name)
    source.add("model", "x", "", found.shape, found)
    for read in (source.read_tensor(found), source.whole(("model", "x"))):
        assert read.dtype == VIEWS[name].dtype
        assert torch.equal(read.float(), VIEWS[name].float())
    source.close()


def test_values_are_read_as_they_were(tmp_path: Path) -> None:
    value = {"a": [1, 2.5, None, True, "x", b"y", (1, 2)], 3: OrderedDict(b={4, 5}), "size": torch.Size([2])}
    for protocol in (2, 4):
        torch.save(value, tmp_path / "x.pt", pickle_protocol=protocol)
        assert read_pickle(tmp_path / "x.pt") == value


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "old.pt").write_bytes(pickle.dumps({"a": 1}))
    torch.save(torch.ones(3), tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", b"(S'storage'\nctorch\nFloatStorage\nS'0'\nS'cpu'\nI4\ntQ.")
        archive.writestr("a/data/0", b"\0" * 999)
    (tmp_path / "compressed.pt").write_bytes(buffer.getvalue())
    (tmp_path / "big.pt").write_bytes(_archive(tmp_path / "x", b"N.").read_bytes())
    with zipfile.ZipFile(tmp_path / "big.pt", "a") as archive:
        archive.writestr("a/byteorder", b"big")
    for name in ("old.pt", "legacy.pt", "compressed.pt", "big.pt"):
        with pytest.raises(CheckpointError, match="damaged"):
            read_pickle(tmp_path / name)


def test_a_number_in_a_pickle_takes_no_memory(tmp_path: Path) -> None:
    """A flipped bit makes LONG_BINPUT of SETITEM, and a number of the 4 bytes that follow."""
    (tmp_path / "a").write_bytes(b"\x80\x04Nr" + (1 << 24).to_bytes(4, "little") + b".")
    tracemalloc.start()
    try:
        assert read_lone_pickle(tmp_path / "a") is None
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_damaged_storage_is_found_before_it_is_read(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(1000)}, tmp_path / "x.pt")
    found = read_pickle(tmp_path / "x.pt")["x"]
    raw = bytearray((tmp_path / "x.pt").read_bytes())
    raw[found.offset + 1234] ^= 1
    (tmp_path / "x.pt").write_bytes(raw)
    source = _OneFile(tmp_path, lambda name: name)
    source.add("model", "x", "", found.shape, found)
    with pytest.raises(CheckpointError, match="checksum"):
        source.whole(("model", "x"))
