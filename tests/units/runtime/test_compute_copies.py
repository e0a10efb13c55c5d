"""Parameters that rest on a disk in float32 and are computed with in a smaller dtype: gathers read copies in that dtype,
which are what the parameters are, whatever wrote them last."""

import errno
from types import SimpleNamespace
from typing import TypeVar
from unittest.mock import Mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, AdamW

import zero_fn as zf
from tests.support.messages import refused
from tests.support.profiles import examples
from tests.units.storage.disks import answers, failing
from zero_fn.kernels import library
from zero_fn.storage import Slab, storage_on, wait_all
from zero_fn.tiers.compute_copies import Copying, ParameterRecord
from zero_fn.tiers.parcels import PARCEL_NBYTES, Form, record_nbytes
from zero_fn.tiers.record import Record
from zero_fn.tiers.tier_tensor import TierTensor

MIB = 1 << 20
WAYS = ("copy", "at once", "behind", "parcel")
_R = TypeVar("_R", bound=Record)


class Pair:
    """A record with copies."""

    def __init__(self, path, numels):
        forms = [Form(numel, torch.float32) for numel in numels]
        copies = [Form(numel, torch.bfloat16, torch.float32) for numel in numels]
        self.record, self.copies = self._record(ParameterRecord, path, forms), self._record(Record, path, copies)
        self.record.copies = self.copies
        self.expected = [torch.zeros(numel) for numel in numels]

    @staticmethod
    def _record(kind, path, forms):
        shelf = storage_on(zf.nvme(path), "a test")
        (place,) = shelf.reserve([record_nbytes(forms)])
        return kind(shelf, forms, torch.device("cpu"), place)

    def write(self, way, number, value):
        self.expected[number] = value
        if way == "copy":
            TierTensor.of(self.record, number).copy_(value)
        elif way == "at once":
            self.record.write({number: value})
        elif way == "behind":
            self.record.begin_writing({number: value})
        else:
            self._by_parcels(number, value)

    def _by_parcels(self, number, value):
        """As a step does: with their copies."""
        for index, parcel in enumerate(self.record.parcels):
            memory, room = pages(parcel.nbytes), pages(self.copies.parcels[index].nbytes)
            wait_all([self.record.read_parcel(parcel, memory)])
            for piece, offset in zip(parcel.pieces, parcel.offsets, strict=True):
                if piece.parameter == number:
                    own = memory[offset : offset + 4 * piece.numel].view(torch.float32)
                    own.copy_(value[piece.start : piece.stop])
            self.record.fill_copy(index, memory, self.record.begin_copy(index, room))
            wait_all([self.record.write_parcel(parcel, memory)])
            wait_all([self.record.write_copy(index, room)])

    def gathered(self):
        self.record.fetch_ahead()
        assert self.record.arrived(exact=False) is None
        found = [self.record.read.values(number).clone() for number in range(len(self.expected))]
        self.record.let_go()
        return found


def pages(nbytes):
    """Memory for direct I/O."""
    return Slab(nbytes, zf.cpu(), "a test").memory[:nbytes]


@examples(dev=60, ci=1000, deep=20_000)
@example(numels=[0, 7], program=[("parcel", 1, 0)])  # a tensor without elements took the room of the next one
@given(
    numels=st.lists(st.sampled_from([0, 1, 7, 1025, PARCEL_NBYTES // 4 + 5]), min_size=1, max_size=4),
    program=st.lists(
        st.one_of(st.just(None), st.tuples(st.sampled_from(WAYS), st.integers(0, 3), st.integers(0, 99))), max_size=8
    ),
)
def test_what_is_gathered_is_what_was_written_last(tmp_path_factory, numels, program):
    """None is a gather; the others write one tensor in one of the ways. A gather after a gather reads copies alone."""
    pair = Pair(tmp_path_factory.getbasetemp(), numels)
    for action in [*program, None, None]:
        if action is not None:
            way, number, seed = action
            generator = torch.Generator().manual_seed(seed)
            pair.write(way, number % len(numels), torch.randn(numels[number % len(numels)], generator=generator))
            continue
        are_copies = pair.record.source is pair.copies
        for found, value in zip(pair.gathered(), pair.expected, strict=True):
            assert torch.equal(found.bfloat16(), value.bfloat16())
            assert found.dtype == (torch.bfloat16 if are_copies else torch.float32)
        assert pair.record.source is pair.copies


@pytest.mark.parametrize(("compute", "fused"), [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float16, True)])
def test_the_kernel_writes_bfloat16_copies_of_what_it_steps(tmp_path, monkeypatch, compute, fused):
    """Others are cast after the step: those without a gradient, all of an optimizer that torch steps, other dtypes."""
    tier = zf.nvme(tmp_path)
    model = zf.offload(zf.precision(net(), compute=compute), params=tier, optim=tier)
    optimizer = zf.streamed(AdamW(model.parameters(), lr=0.01, fused=fused))
    model[2].bias.requires_grad_(False)
    model(inputs(0)).float().square().mean().backward()
    cast = 0
    fill = ParameterRecord.fill_copy

    def counted(record, index, memory, rooms):
        nonlocal cast
        cast += sum(room.numel() for room in rooms.values())
        fill(record, index, memory, rooms)

    monkeypatch.setattr(ParameterRecord, "fill_copy", counted)
    optimizer.step()
    is_sent = fused and compute == torch.bfloat16 and library().functions is not None
    assert cast == (model[2].bias.numel() if is_sent else sum(p.numel() for p in model.parameters()))


class Scaled(nn.Module):
    """A parameter without elements before another, as shards of ranks often are."""

    def __init__(self):
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.scale = nn.Parameter(torch.randn(24))

    def forward(self, x):
        return x * self.scale + self.empty.sum()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 24), nn.LayerNorm(24), Scaled())


def inputs(seed):
    return torch.randn(3, 24, generator=torch.Generator().manual_seed(seed))


def test_a_forward_reads_half_the_bytes_once_a_step_has_been_taken(tmp_path, monkeypatch):
    linear = nn.Linear(1024, 1024, bias=False)
    model = zf.offload(zf.precision(linear), params=zf.nvme(tmp_path))
    optimizer = zf.streamed(SGD(model.parameters(), lr=0.1), zf.cpu())
    read = []

    def seen(request, result):
        read.append(0 if request.is_write else result)
        return result

    answers(monkeypatch, seen)

    def read_by(forward):
        read.clear()
        forward()
        return sum(read)

    x = torch.ones(1024)
    assert read_by(lambda: model(x)) == 4 * MIB
    assert read_by(lambda: model(x)) == 2 * MIB
    model(x).sum().backward()
    optimizer.step()
    assert read_by(lambda: model(x)) == 2 * MIB
    with torch.no_grad():
        model.weight.zero_()
    assert read_by(lambda: model(x)) == 4 * MIB
    assert not model(x).any()


@pytest.mark.parametrize("is_cast", [True, False])
def test_copies_are_there_where_they_are_smaller_and_nowhere_else(tmp_path, is_cast):
    tier = zf.nvme(tmp_path)
    for rests, computes, is_smaller in (
        (torch.float32, torch.bfloat16, True),
        (torch.float64, torch.float32, True),
        (torch.bfloat16, torch.bfloat16, False),
        (torch.bfloat16, torch.float32, False),
    ):
        linear = nn.Linear(64, 64, bias=False, dtype=rests)
        model = zf.offload(zf.precision(linear, compute=computes) if is_cast else linear, params=tier)
        resting = 64 * 64 * rests.itemsize
        copies = 64 * 64 * computes.itemsize if is_smaller and is_cast else 0
        assert zf.memory(model).tiers[str(tier)] == zf.plan(model).memory.tiers[str(tier)] == resting + copies
        x = torch.ones(64, dtype=rests)
        expected = nn.functional.linear(x.to(computes), linear.weight.to(computes)) if is_cast else linear(x)
        assert torch.equal(model(x).to(expected.dtype), expected)


def test_a_cast_of_the_module_makes_other_copies(tmp_path):
    model = zf.offload(zf.precision(net()), params=zf.nvme(tmp_path))
    expected = zf.precision(net())
    x = inputs(0)
    model(x)
    for dtype in (torch.float64, torch.bfloat16, torch.float32):
        model, expected = model.to(dtype), expected.to(dtype)
        assert torch.equal(model(x), expected(x))


def test_a_copy_that_cannot_be_written_is_an_error_and_made_by_the_next_forward(tmp_path):
    model = zf.offload(zf.precision(net()), params=zf.nvme(tmp_path))
    expected = zf.precision(net())(inputs(0))
    for _ in range(5):  # more often than there are units: a copy that was not written is never taken for one
        with failing(errno.ENOSPC, reads=False), pytest.raises(zf.errors.StorageError, match="compute copies in"):
            model(inputs(0))
    assert torch.equal(model(inputs(0)), expected)
    assert torch.equal(model(inputs(0)), expected)


def test_a_copy_that_a_step_cannot_write_is_not_counted_on(tmp_path, monkeypatch):
    model = zf.offload(zf.precision(net()), params=zf.nvme(tmp_path))
    optimizer = zf.streamed(AdamW(model.parameters(), lr=0.01), zf.cpu())
    model(inputs(0)).square().mean().backward()
    saved = {name: value.clone() for name, value in model.state_dict().items()}

    def change(request, result):
        is_second_copy = "compute copies" in request.file.name and request.begin == 4096
        return -errno.EIO if request.is_write and is_second_copy else result

    with monkeypatch.context() as patch, refused("disk_fails"):
        answers(patch, change)
        optimizer.step()
    records = {parameter.record for parameter in model.parameters()}
    assert sum(record.source is record for record in records) == 1
    model.load_state_dict(saved)
    assert torch.equal(model(inputs(1)), zf.precision(net())(inputs(1)))


def test_a_copy_whose_write_has_failed_counts_as_outdated_however_often_it_is_waited_for():
    """A transfer says once that it has failed; who cleans up after a step waits again."""
    transfer = Mock(wait=Mock(side_effect=[zf.errors.StorageError("The disk failed.", fix="none"), None]))
    original, copy = SimpleNamespace(version=3), SimpleNamespace(version=-1)
    copying = Copying(transfer, original, copy)
    with pytest.raises(zf.errors.StorageError):
        copying.wait()
    copying.wait()
    assert copy.version != original.version
