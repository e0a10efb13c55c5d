"""Copies and means past the caches are torch's, to the bit, wherever the bytes lie and whatever the processor has."""

import ctypes
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zero_fn.kernels import Library, library, nontemporal
from zero_fn.kernels.compiler import Compiler, CompilerError, found_compiler
from zero_fn.kernels.nontemporal import copy, mean

BLOCK = 4 * 4096  # bytes that are written in turns
LARGE = nontemporal._LEAST_NBYTES // 4  # elements of float32 that are not left to torch


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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


def drawn(numel, offset, dtype, seed):
    """Numbers of all sizes that begin `offset` elements after a line of the cache."""
    generator = torch.Generator().manual_seed(seed)
    room = torch.empty(numel + 64, dtype=dtype)
    start = (-room.data_ptr() % 64) // room.element_size() + offset
    return room[start : start + numel].copy_(torch.randn(numel, generator=generator).mul(9).exp())


dtypes = st.sampled_from([torch.float32, torch.bfloat16])
numels = st.one_of(st.integers(0, 40), st.sampled_from([BLOCK // 4, BLOCK // 2, BLOCK]).map(lambda n: n + 7))


@given(nbytes=numels, into=st.integers(0, 63), source=st.integers(0, 63), flag=st.sampled_from(INSTRUCTIONS))
def test_a_copy_writes_every_byte_and_no_other(compiled, nbytes, into, source, flag):
    functions = compiled.get(flag, compiled[""])
    nbytes = 5 * nbytes
    what = torch.randint(1, 256, (nbytes + 64,), dtype=torch.uint8)[source : source + nbytes]
    room = torch.zeros(nbytes + 128, dtype=torch.uint8)
    nontemporal._copy_in_c(functions, room[into : into + nbytes], what)
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
    functions = compiled.get(flag, compiled[""])
    parts = [drawn(numel, offset, dtype, seed) for seed, offset in enumerate(offsets[1:])]
    if numel > 2:
        parts[0][0], parts[-1][1], parts[0][2] = torch.inf, torch.nan, 1e-40  # the last one is not normal
    expected = parts[0].float()
    for part in parts[1:]:
        expected = expected + part
    expected = (expected / len(parts)).to(into_dtype)

    def by_torch(into, parts):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nontemporal, "library", lambda: Library(None, "for this test"))
            mean(into, parts, torch.float32)

    for written in (by_torch, lambda *args: nontemporal._mean_in_c(functions, *args)):
        own = [part.clone() for part in parts]
        is_one_of_them = at is not None and into_dtype == dtype
        into = own[(at or 0) % len(own)] if is_one_of_them else drawn(numel, offsets[0], into_dtype, 9)
        written(into, own)
        assert torch.equal(into.nan_to_num(-1.0), expected.nan_to_num(-1.0))
        assert all(
            torch.equal(o.nan_to_num(), p.nan_to_num()) for o, p in zip(own, parts, strict=True) if o is not into
        )


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
    pairs = torch.complex(large[0], large[1])
    copy([large[0]], [large[1]])
    mean(large[0], [large[0], large[1]], torch.float32)
    mean(large[0], [large[0].bfloat16(), large[1].bfloat16()], torch.float32)
    mean(torch.empty(2 * LARGE).bfloat16(), [torch.ones(2 * LARGE)] * 2, torch.float32)
    assert called == ["_copy_in_c", *["_mean_in_c"] * 3]
    called.clear()
    for into, source in (
        (large[0, 1:], large[1, 1:]),  # small
        (rows[0].t(), rows[1].t()),  # strides
        (torch.empty(LARGE // 8, 8), rows[1].t()),
        (rows[0].t(), torch.randn(LARGE // 8, 8)),
        (torch.empty(LARGE, dtype=torch.float64), large[1]),  # casts
        (torch.empty(LARGE, dtype=torch.complex64), pairs.conj()),  # conjugated when it is read
        (torch.empty(LARGE), torch._neg_view(large[1])),  # negated when it is read
        (torch.empty(2, LARGE), large[1]),  # shapes
    ):
        copy([into], [source])
        assert torch.equal(into, source.to(into.dtype).expand_as(into))
    mean(large[0].double(), [large[0].double(), large[1].double()], torch.float64)
    mean(large[0], [large[0], large[1].bfloat16()], torch.float32)
    mean(large[0], [large[0], large[1]], torch.float64)
    torch.set_num_threads(2)
    copy([large[0]], [large[1]])
    mean(large[0], [large[0], large[1]], torch.float32)
    assert not called


def test_without_a_compiler_torch_does_the_same(monkeypatch):
    parts = list(torch.randn(3, LARGE))
    means, copies = torch.empty(2, LARGE), torch.empty(2, LARGE)
    for number in range(2):
        mean(means[number], parts, torch.float32)
        copy([copies[number]], [parts[0]])
        monkeypatch.setattr(nontemporal, "library", lambda: Library(None, "for this test"))
    assert torch.equal(*means) and torch.equal(*copies) and torch.equal(copies[0], parts[0])


def test_a_list_may_hold_small_and_large_ones(called):
    sources = [torch.randn(LARGE), torch.randn(3), torch.randn(2 * LARGE), torch.randn(0)]
    into = [torch.empty_like(source) for source in sources]
    copy(into, sources)
    assert called == ["_copy_in_c"] * 2
    assert all(map(torch.equal, into, sources))


@pytest.mark.parametrize("numel", [3, LARGE])
def test_autograd_refuses_what_was_overwritten(numel):
    """As after an operation of torch's own."""
    saved = torch.ones(numel)
    for write in (
        lambda: copy([saved], [torch.ones(numel)]),
        lambda: mean(saved, [torch.ones(numel)] * 2, torch.float32),
    ):
        loss = (torch.ones(numel, requires_grad=True) * saved).sum()
        write()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    with torch.inference_mode():
        kept = torch.ones(numel)
        copy([kept], [torch.zeros(numel)])
    assert not kept.any()
