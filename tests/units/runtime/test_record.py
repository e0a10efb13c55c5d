"""Tensors of a unit in another tier: what is written is read, whichever way it went, and staging memory comes back."""

from contextlib import contextmanager

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import zero_fn as zf
from zero_fn.storage import Slab, storage_on, wait_all
from zero_fn.tiers.parcels import PARCEL_NBYTES, Form, record_nbytes
from zero_fn.tiers.record import Record
from zero_fn.tiers.tier_tensor import TierTensor, _is_for_host

forms_of = st.lists(
    st.builds(
        Form,
        st.one_of(st.integers(0, 40), st.sampled_from([1024, 1025, 1026, PARCEL_NBYTES // 4 + 5])),
        st.sampled_from([torch.float32, torch.bfloat16, torch.complex64, torch.int64]),
        st.none(),
        st.just(PARCEL_NBYTES),
    ),
    min_size=1,
    max_size=6,
)


def recorded(path, forms):
    shelf = storage_on(zf.nvme(path), "a test")
    (place,) = shelf.reserve([record_nbytes(forms)])
    shelf.stage(record_nbytes(forms), 1)
    borrow = shelf.borrow
    shelf.borrow = lambda *what: borrow(*what).fill_(171)
    return Record(shelf, forms, torch.device("cpu"), place), shelf


def values(forms, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-99, 99, (numel,), generator=generator).to(dtype) for numel, dtype, *_ in forms]


@example(forms=[Form(n, torch.float32, None, PARCEL_NBYTES) for n in (3, 5)], chosen={0}, way="behind")  # one parcel
@given(forms=forms_of, chosen=st.sets(st.integers(0, 5)), way=st.sampled_from(["copy", "behind"]))
def test_what_is_written_is_read_and_what_is_beside_it_stays(tmp_path_factory, forms, chosen, way):
    record, shelf = recorded(tmp_path_factory.getbasetemp(), forms)
    expected = [torch.zeros(numel, dtype=dtype) for numel, dtype, *_ in forms]
    for seed in range(2):
        record.fetch()  # what is fetched ahead is out of date once something is written
        new = {n: value for n, value in enumerate(values(forms, seed)) if n in chosen or not seed}
        if way == "behind":
            record.begin_writing(new)
        else:
            for n, value in new.items():
                TierTensor.of(record, n).copy_(value)
        expected = [new.get(n, value) for n, value in enumerate(expected)]
        record.arrive()
        assert all(torch.equal(record.values(n), value) for n, value in enumerate(expected))
        record.drop()
        assert all(torch.equal(TierTensor.of(record, n).clone(), value) for n, value in enumerate(expected))
    assert len(shelf._free) == (1 if record.nbytes else 0)
    assert all(memory.numel() == record.nbytes for memory, *_ in shelf._free)


def test_a_parcel_that_is_being_written_is_read_once_it_is_there(tmp_path):
    record, shelf = recorded(tmp_path, [Form(1024, torch.float32)])
    write = shelf.write

    class Late:
        """A transfer that has not begun when it is waited for."""

        def __init__(self, *what):
            self.what = what

        def wait(self):
            write(*self.what).wait()

    record.begin_writing({0: torch.zeros(1024)})
    record.finish_writing()
    shelf.write = Late
    record.begin_writing({0: torch.ones(1024)})
    memory = Slab(record.parcels[0].nbytes, zf.cpu(), "a test").memory
    wait_all([record.read_parcel(record.parcels[0], memory)])
    assert memory.view(torch.float32).eq(1).all()


@pytest.mark.parametrize("moment", ["before the first", "between", "as the second is waited for"])
def test_what_an_interrupt_has_left_unread_is_read_the_next_time(tmp_path, monkeypatch, moment):
    """It counted as fetched; and a first transfer that had failed told nobody any more."""
    numel = PARCEL_NBYTES // 4
    record, shelf = recorded(tmp_path, [Form(numel, torch.float32)] * 2)
    record.write({n: torch.full((numel,), n + 1.0) for n in range(2)})
    read, number = shelf.read, iter(range(2))

    class Once:
        """A transfer that says once what became of it."""

        def __init__(self, error):
            self.errors = [error]

        def wait(self):
            if self.errors:
                raise self.errors.pop()

    def begun(place, memory):
        is_first = not next(number)
        if moment == "as the second is waited for":
            failure = zf.errors.StorageError("The disk failed.", fix="none")
            return Once(failure if is_first else KeyboardInterrupt())
        if is_first == (moment == "before the first"):
            raise KeyboardInterrupt
        return read(place, memory)

    with monkeypatch.context() as patched:
        patched.setattr(shelf, "read", begun)
        with pytest.raises(KeyboardInterrupt):
            record.arrive()
    assert len(shelf._free) == 1
    record.arrive()
    assert all(record.values(n).eq(n + 1).all() for n in range(2))


@pytest.mark.parametrize("number", [0, 1])
def test_what_an_interrupt_has_left_unwritten_is_written_the_next_time(tmp_path, number):
    """It counted as written, and was what it had been before."""
    numel = PARCEL_NBYTES // 4
    record, shelf = recorded(tmp_path, [Form(numel, torch.float32)] * 2)
    write, turns = shelf.write, iter(range(2))

    def begun(place, memory):
        if next(turns, None) == number:
            raise KeyboardInterrupt
        return write(place, memory)

    shelf.write = begun
    with pytest.raises(KeyboardInterrupt):
        record.begin_writing({n: torch.full((numel,), n + 1.0) for n in range(2)})
    record.arrive()
    assert all(record.values(n).eq(n + 1).all() for n in range(2))


def test_a_large_tensor_lies_in_parcels_of_its_own(tmp_path):
    numel = PARCEL_NBYTES // 4
    record, _ = recorded(tmp_path, [Form(3, torch.float32), Form(2 * numel + 7, torch.float32), Form(5, torch.float64)])
    assert [parcel.nbytes for parcel in record.parcels] == [4096, PARCEL_NBYTES, PARCEL_NBYTES, 4096]
    assert [piece.numel for parcel in record.parcels for piece in parcel.pieces] == [3, numel, numel, 7, 5]


def test_what_is_made_like_a_tensor_in_a_tier_reads_nothing(tmp_path, monkeypatch):
    record, shelf = recorded(tmp_path, [Form(6, torch.float32)])
    tensor = TierTensor.of(record, 0).view(2, 3).t()
    monkeypatch.setattr(shelf, "read", None)
    monkeypatch.setattr(shelf, "borrow", None)
    assert torch.zeros_like(tensor).stride() == (1, 3)
    assert tensor.new_ones(2).tolist() == [1, 1]
    assert (tensor.shape, tensor.dtype, tensor.device.type) == ((3, 2), torch.float32, "cpu")


def test_several_tensors_are_computed_one_at_a_time(tmp_path, monkeypatch):
    record, _ = recorded(tmp_path, [Form(8, torch.float32)] * 3)
    tensors = [TierTensor.of(record, n) for n in range(3)]
    opened = []
    bring, most = Record.opened, 0

    @contextmanager
    def open_one(self, number, **how):
        nonlocal most
        with bring(self, number, **how) as flat:
            opened.append(number)
            most = max(most, len(opened))
            yield flat
            opened.pop()

    monkeypatch.setattr(Record, "opened", open_one)
    torch._foreach_add_(tensors, 2.0)
    torch._foreach_mul_(tensors, torch.tensor(3.0))
    assert [norm.item() for norm in torch._foreach_norm(tensors)] == pytest.approx([6 * 8**0.5] * 3)
    assert most == 1


def test_a_tensor_that_is_given_twice_is_opened_once(tmp_path):
    """What was opened first would be written back last, as it was."""
    record, _ = recorded(tmp_path, [Form(8, torch.float32)])
    tensor = TierTensor.of(record, 0)
    tensor.fill_(3.0)
    tensor.mul_(tensor)
    assert tensor.clone().eq(9).all()
    tensor.add_(tensor[2:3])
    assert tensor.clone().eq(18).all()


def test_what_is_written_or_small_is_computed_on_the_host_for_a_device(tmp_path):
    shelf = storage_on(zf.nvme(tmp_path), "a test")
    forms = [Form(6, torch.float32)]
    record = Record(shelf, forms, torch.device("meta"), *shelf.reserve([record_nbytes(forms)]))
    tensor, aten = TierTensor.of(record, 0), torch.ops.aten
    assert _is_for_host(aten.mul_.Scalar, [tensor, 2.0], {id(tensor)})
    assert _is_for_host(aten.add.Tensor, [tensor, 2.0], set())
    assert not _is_for_host(aten.add.Tensor, [tensor, torch.empty(6, device="meta")], set())
