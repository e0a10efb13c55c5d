"""Copies and means past the caches are torch's, to the bit, wherever the bytes lie and whatever the processor has."""

import ctypes
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.units.kernels.drawn import drawn, same, threads, with_kernels, without_kernels
from zero_fn.kernels import library, nontemporal
from zero_fn.kernels.compiler import Compiler, CompilerError, found_compiler
from zero_fn.kernels.nontemporal import copy, mean

BLOCK = 4 * 4096  # bytes that are written in turns
LARGE = nontemporal._LEAST_NBYTES // 4  # elements of float32 that are not left to torch


@pytest.fixture(autouse=True)
def _one_thread():
    with threads(1):
        yield


INSTRUCTIONS = ["", "-mno-avx512f", "-mno-avx"]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The kernels as processors without some instructions have them."""
    try:
        compiler = found_compiler()
    except CompilerError as error:
        pytest.skip(str(error))
    source, made = Path(nontemporal.__file__).with_suffix(".c"), {}
    for flag in INSTRUCTIONS:
        target = tmp_path_factory.mktemp("kernels") / "nontemporal.so"
        try:
            Compiler((*compiler.command, *filter(None, [flag])), compiler.version).compile([source], target)
        except CompilerError:
            continue  # no such processor
        made[flag] = ctypes.CDLL(str(target))
    assert "" in made
    return made


def placed(numel, offset, dtype, seed):
    """Numbers of all sizes that begin `offset` elements after a line of the cache."""
    room = torch.empty(numel + 64, dtype=dtype)
    start = (-room.data_ptr() % 64) // room.element_size() + offset
    return room[start : start + numel].copy_(drawn(numel, seed=seed, spread=9.0))


dtypes = st.sampled_from([torch.float32, torch.bfloat16])
numels = st.one_of(st.integers(0, 40), st.sampled_from([BLOCK // 4, BLOCK // 2, BLOCK]).map(lambda n: n + 7))


@given(nbytes=numels, into=st.integers(0, 63), source=st.integers(0, 63), flag=st.sampled_from(INSTRUCTIONS))
def test_a_copy_writes_every_byte_and_no_other(compiled, nbytes, into, source, flag):
    nbytes = 5 * nbytes
    what = torch.randint(1, 256, (nbytes + 64,), dtype=torch.uint8)[source : source + nbytes]
    room = torch.zeros(nbytes + 128, dtype=torch.uint8)
    with with_kernels(compiled.get(flag, compiled[""])):
        nontemporal._copy_in_c(room[into : into + nbytes], what)
    assert torch.equal(room[into : into + nbytes], what)
    assert not room[:into].any() and not room[into + nbytes :].any()


@given(
    numel=numels,
    offsets=st.lists(st.integers(0, 31), min_size=3, max_size=6),
    at=st.none() | st.integers(0, 4),
    dtype=dtypes,
    into_dtype=dtypes,
    flag=st.sampled_from(INSTRUCTIONS),
)
def test_a_mean_has_the_bits_of_torch(
    compiled,
    numel,
    offsets,
    at,
    dtype,
    into_dtype,
    flag,
):
    parts = [placed(numel, offset, dtype, seed) for seed, offset in enumerate(offsets[1:])]
    if numel > 2:
        parts[0][0], parts[-1][1], parts[0][2] = torch.inf, torch.nan, 1e-40  # the last one is not normal
    expected = parts[0].float()
    for part in parts[1:]:
        expected = expected + part
    expected = (expected / len(parts)).to(into_dtype)

    for is_in_c in (False, True):
        own = [part.clone() for part in parts]
        is_one_of_them = at is not None and into_dtype == dtype
        into = own[(at or 0) % len(own)] if is_one_of_them else placed(numel, offsets[0], into_dtype, 9)
        if is_in_c:
            before = into._version
            with with_kernels(compiled.get(flag, compiled[""])):
                nontemporal._mean_in_c(into, own)
            assert into._version > before, "autograd has not heard of it"
        else:
            with without_kernels():
                mean(into, own, torch.float32)
        assert same(into, expected)
        assert all(same(one, other) for one, other in zip(own, parts, strict=True) if one is not into)


@pytest.fixture
def called(monkeypatch):
    """Which kernels were called."""
    if library().functions is None:
        pytest.skip(str(library()))
    names = []
    for name in ("_copy_in_c", "_mean_in_c"):
        kernel = getattr(nontemporal, name)
        monkeypatch.setattr(nontemporal, name, lambda *a, n=name, k=kernel: (names.append(n), k(*a)))
    return names


def test_large_tensors_are_given_to_the_kernels_and_others_to_torch(called):
    large, rows = torch.randn(2, LARGE), torch.randn(2, 8, LARGE // 8)
    double, half = large.double(), large.bfloat16()
    copy([large[0]], [large[1]])
    mean(large[0], [large[0], large[1]], torch.float32)
    mean(large[0], [half[0], half[1]], torch.float32)
    mean(torch.empty(2 * LARGE).bfloat16(), [torch.ones(2 * LARGE)] * 2, torch.float32)
    assert called == ["_copy_in_c", *["_mean_in_c"] * 3]
    called.clear()
    for into, source in (
        (large[0, 1:], large[1, 1:]),  # small
        (rows[0].t(), rows[1].t()),  # strides
        (torch.empty(LARGE // 8, 8), rows[1].t()),
        (rows[0].t(), torch.randn(LARGE // 8, 8)),
        (double[0], large[1]),  # casts
        (torch.empty(LARGE, dtype=torch.complex64), torch.complex(*large).conj()),  # conjugated when it is read
        (torch.empty(LARGE), torch._neg_view(large[1])),  # negated when it is read
        (torch.empty(2, LARGE), large[1]),  # shapes
    ):
        copy([into], [source])
        assert torch.equal(into, source.to(into.dtype).expand_as(into))
    mean(double[0], [double[0], double[1]], torch.float64)
    mean(large[0], [large[0], half[1]], torch.float32)
    mean(large[0], [large[0], large[1]], torch.float64)
    with threads(2):
        copy([large[0]], [large[1]])
        mean(large[0], [large[0], large[1]], torch.float32)
    assert not called


def test_a_list_may_hold_small_and_large_ones(called):
    sources = [torch.randn(LARGE), torch.randn(3), torch.randn(2 * LARGE), torch.randn(0)]
    into = [torch.empty_like(source) for source in sources]
    copy(into, sources)
    assert called == ["_copy_in_c"] * 2
    assert into[0]._version and into[2]._version, "autograd has not heard of it"
    assert all(map(torch.equal, into, sources))


def test_what_inference_mode_has_made_may_be_written(called):
    with torch.inference_mode():
        kept = torch.ones(LARGE)
        copy([kept], [torch.zeros(LARGE)])
    assert called and not kept.any()
