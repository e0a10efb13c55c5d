"""Rows as they travel: C and torch agree to the bit, records lie as `values.wire` says, and what comes back is near."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zero_fn.kernels import Library, library, records
from zero_fn.kernels.records import decode, decode_mean, encode
from zero_fn.values.wire import Wire

needs_kernels = pytest.mark.skipif(library().functions is None, reason=str(library()))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HIGHEST = {"int4": 7, "int8": 127, "float8_e4m3fn": 448, "float8_e5m2": 57344}
FORMATS = [
    *(
        Wire(codes, 64, is_symmetric=s, rotates=r)
        for codes in ("int4", "int8")
        for s in (True, False)
        for r in (True, False)
    ),
    *(Wire(codes, 64) for codes in ("float8_e4m3fn", "float8_e5m2")),
]
each_format = pytest.mark.parametrize("wire", FORMATS, ids=str)
wires = st.builds(
    lambda wire, block: Wire(wire.codes, block, is_symmetric=wire.is_symmetric, rotates=wire.rotates),
    st.sampled_from(FORMATS),
    st.one_of(st.sampled_from([32, 256, 4096]), st.integers(32, 4096)),
)


@pytest.fixture(
    params=[pytest.param(True, marks=needs_kernels), False], ids=lambda is_in_c: "C" if is_in_c else "torch"
)
def by(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(records, "library", lambda: Library(None, "for this test"))


both = pytest.mark.usefixtures("by")


def drawn(rows, form, dtype, seed):
    """Rows of many sizes, with zeros, denormal floats, huge ones, NaN and infinities in some of them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, form.row_numel, generator=generator)
    values *= 10.0 ** torch.randint(-12, 4, (rows, 1), generator=generator)
    values[torch.rand(values.shape, generator=generator) < 0.1] = 0.0
    for row in range(0, rows, 2):
        at = int(torch.randint(form.row_numel, (), generator=generator))
        values[row, at] = (torch.nan, -torch.nan, torch.inf, -torch.inf, 3e38, -1e30, -0.0)[(seed + row) % 7]
    for row in range(3, rows, 4):
        values[row] *= 1e-32 if seed % 2 else 0.0
    return values.to(dtype)


def encoded(values, form, held=None):
    out = torch.full((len(values), form.row_nbytes), 77, dtype=torch.uint8)
    encode(values, form, out, held)
    return out


def decoded(parts, form, dtype=torch.float32):
    out = torch.full((len(parts[0]), form.row_numel), 77, dtype=dtype)
    if len(parts) > 1:
        decode_mean(parts, form, out)
    else:
        decode(parts[0], form, out)
    return out


def heads(coded, form):
    """The scales, and the least values of an asymmetric format: float32, [R, blocks, 1 or 2]."""
    places = coded.view(len(coded), form.blocks, form.nbytes)
    return places[..., : form.head_nbytes].contiguous().view(torch.float32)


def of_elements(of_blocks, form):
    return of_blocks.repeat_interleave(form.numel, -1)[:, : form.row_numel]


def same(one, other):
    """The same bits, but for those inside a NaN."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[one.element_size()]
    known = torch.ones_like(one, dtype=torch.bool) if one.dtype == torch.uint8 else ~(one.isnan() & other.isnan())
    return one.dtype == other.dtype and torch.equal(one.view(bits)[known], other.view(bits)[known])


def everything(values, held, form, dtype):
    coded = [encoded(values, form, held), encoded(values.flip(1), form)]
    added = values.to(dtype).flip(0).contiguous()
    decode(coded[0], form, added, add=True)
    means = [decoded(coded[:1] * (n % 2) + coded[::-1] * (n // 2), form, dtype) for n in (1, 2, 3)]
    return [*coded, added, *means]


@needs_kernels
@given(
    wire=wires,
    row_numel=st.one_of(st.integers(32, 300), st.integers(32, 9000), st.sampled_from([64, 256, 768, 4096])),
    rows=st.integers(0, 6),
    dtypes=st.tuples(*[st.sampled_from(DTYPES)] * 3),
    has_held=st.booleans(),
    seed=st.integers(0, 999),
)
def test_c_and_torch_agree(wire, row_numel, rows, dtypes, has_held, seed):
    form = wire.records(row_numel)
    values = drawn(rows, form, dtypes[0], seed)
    held = drawn(rows, form, dtypes[1], seed + 1) if has_held else None
    in_c = everything(values, held, form, dtypes[2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "library", lambda: Library(None, "for this test"))
        by_torch = everything(values, held, form, dtypes[2])
    for number, (one, other) in enumerate(zip(in_c, by_torch, strict=True)):
        assert same(one, other), number


@both
@each_format
@pytest.mark.parametrize("row_numel", [64, 33, 129, 640])
def test_a_code_is_at_most_half_a_scale_away(wire, row_numel):
    form = wire.records(row_numel)
    values = torch.randn(50, row_numel, generator=torch.Generator().manual_seed(row_numel))
    coded = encoded(values, form)
    far = (decoded([coded], form) - values).abs()
    scale = of_elements(heads(coded, form)[..., 0], form)
    if wire.codes.startswith("int"):
        assert (far <= 0.501 * scale).all() and (wire.rotates or far.max() > 0.4 * scale.min())
    else:
        mantissa, least = (3, 2.0**-6) if wire.codes == "float8_e4m3fn" else (2, 2.0**-14)
        assert (far <= 2.0 ** -(mantissa + 1) * 1.001 * torch.maximum(values.abs(), least * scale)).all()
    if not wire.rotates and wire.is_symmetric:
        blocks = torch.nn.functional.pad(values, (0, form.blocks * form.numel - row_numel)).view(50, form.blocks, -1)
        assert torch.equal(heads(coded, form)[..., 0], blocks.abs().amax(-1) / torch.tensor(float(HIGHEST[wire.codes])))


@both
@pytest.mark.parametrize("row_numel", [64, 63, 101])  # of one block, even and odd, and of two, of 51 and 50 elements
@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize("codes", ["int4", "int8"])
def test_records_lie_as_the_format_says(codes, is_symmetric, row_numel):
    form = Wire(codes, 64, is_symmetric=is_symmetric).records(row_numel)
    highest = HIGHEST[codes] if is_symmetric else 2 * HIGHEST[codes] + 1
    span = torch.arange(3 * row_numel).view(3, row_numel) % (2 * highest + 1 if is_symmetric else highest + 1)
    values = (span - highest if is_symmetric else span - 5).float()
    for begin in range(0, row_numel, form.numel):  # the largest and the least, so that the scale is 1
        values[:, begin] = highest if is_symmetric else highest - 5
        values[:, begin + 1] = -highest if is_symmetric else -5
    coded = encoded(values, form).view(3, form.blocks, form.nbytes)
    for row in range(3):
        for block in range(form.blocks):
            found = values[row, block * form.numel : (block + 1) * form.numel]
            numbers = [int(value) + (0 if is_symmetric else 5) for value in found]
            numbers += [0 if is_symmetric else 5] * (form.numel - len(numbers))  # a missing element is 0.0
            if codes == "int4":
                half = -(-form.numel // 2)
                numbers += [0] * (2 * half - form.numel)
                numbers = [
                    low & 15 | (high & 15) << 4 for low, high in zip(numbers[:half], numbers[half:], strict=True)
                ]
            expected = torch.tensor([1.0] if is_symmetric else [1.0, -5.0]).view(torch.uint8).tolist()
            expected += [number & 255 for number in numbers]
            assert coded[row, block].tolist() == expected + [0] * (form.nbytes - len(expected))
    assert torch.equal(decoded([coded.view(3, -1)], form), values)


@both
@pytest.mark.parametrize(
    ("row_numel", "block", "run"),
    [
        *((100, 64, 2), (120, 64, 4), (384, 64, 64), (66, 64, 1), (80, 64, 8), (1000, 4096, 8), (144, 4096, 16)),
        *((run, 4096, run) for run in (32, 64, 128, 256, 512, 1024, 2048, 4096)),
    ],
)
@pytest.mark.parametrize("is_symmetric", [True, False])
def test_a_rotated_block_is_coded_as_its_product_with_a_hadamard_matrix(row_numel, block, run, is_symmetric):
    rotated = Wire("int8", block, is_symmetric=is_symmetric, rotates=True).records(row_numel)
    plain = Wire("int8", block, is_symmetric=is_symmetric).records(row_numel)
    assert rotated.rotated == run
    matrix = torch.ones(1, 1)
    while len(matrix) < run:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    whole = torch.randint(-9, 9, (5, row_numel), generator=torch.Generator().manual_seed(0)).float()  # sums are exact
    coded = encoded(whole, rotated)
    assert torch.equal(coded, encoded((whole.view(-1, run) @ matrix).view(5, -1), plain))
    expected = (decoded([coded], plain).view(-1, run).double() @ matrix.double() / run).view(5, -1)
    torch.testing.assert_close(decoded([coded], rotated).double(), expected, rtol=1e-5, atol=1e-5)


@both
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_float_of_eight_bits_comes_back(dtype):
    every = torch.arange(256).to(torch.uint8).view(dtype).float()
    every = every[every.isfinite()]
    form = Wire("float8_e4m3fn" if dtype == torch.float8_e4m3fn else "float8_e5m2").records(len(every))
    for scale in (1.0, 2.0**-90, 2.0**90):
        coded = encoded(every[None] * scale, form)
        assert torch.equal(coded[0, 4 : 4 + len(every)], every.to(dtype).view(torch.uint8))
        assert same(decoded([coded], form), every[None] * scale)


@both
@each_format
def test_a_block_with_no_finite_number_is_nan_and_no_other(wire):
    form = wire.records(320)
    values = torch.randn(4, 320, generator=torch.Generator().manual_seed(0))
    for row, value in enumerate((torch.nan, torch.inf, -torch.inf, -torch.nan)):
        values[row, 64 * row + 7] = value
    coded = encoded(values, form)
    is_bad = torch.eye(4, 5, dtype=torch.bool)
    assert torch.equal(heads(coded, form)[..., 0].isnan(), is_bad)
    assert not coded.view(4, 5, form.nbytes)[..., form.head_nbytes :][is_bad].any()
    for dtype in DTYPES:
        assert torch.equal(decoded([coded], form, dtype).isnan(), of_elements(is_bad, form))
    assert torch.equal(
        decoded([encoded(values.nan_to_num(0.0, 0.0, 0.0), form), coded], form).isnan(), of_elements(is_bad, form)
    )


@both
@each_format
def test_zeros_and_what_is_too_small_become_zero(wire):
    form = wire.records(64)
    values = torch.tensor([0.0, -0.0, 1e-42, -(2.0**-110)])[:, None].expand(4, 64).contiguous()
    values[:, ::3] = 0.0
    coded = encoded(values, form)
    places = coded[:, form.head_nbytes :]
    assert not heads(coded, form)[..., 0].any() and not places.any()
    assert (decoded([coded], form) - values).abs().max() < 2.0**-100
    width = torch.zeros(2, 64)
    width[:, 5] = torch.tensor([2.0**-100, 2.0**-100 * (1 - 2.0**-24)])
    if wire.rotates and not wire.is_symmetric:
        width /= 2  # rotated, it is there with both signs
    assert (heads(encoded(width, form), form)[..., 0] > 0).flatten().tolist() == [True, False]


@both
@pytest.mark.parametrize("codes", ["int4", "int8"])
def test_a_constant_row_comes_back_whole_where_the_least_value_travels(codes):
    form = Wire(codes, is_symmetric=False).records(64)
    values = torch.tensor([[0.1], [-3e30], [7.0], [-0.0]]).expand(4, 64).contiguous()
    coded = encoded(values, form)
    assert torch.equal(decoded([coded], form), values)
    assert heads(coded, form)[..., 1].flatten().signbit().tolist() == [False, True, False, False], "no zero is negative"


@both
@each_format
@pytest.mark.parametrize("dtype", DTYPES)
def test_means_and_sums_are_rounded_once(wire, dtype):
    form = wire.records(200)
    parts = [encoded(torch.randn(9, 200, generator=torch.Generator().manual_seed(seed)), form) for seed in range(3)]
    first, second, third = (decoded([part], form) for part in parts)
    mean = torch.full((9, 200), 77, dtype=dtype)
    decode_mean(parts, form, mean)
    assert same(mean, (((first + second) + third) / 3).to(dtype))
    decode_mean(parts[:1], form, mean)
    assert same(mean, first.to(dtype)) and same(mean, decoded(parts[:1], form, dtype))
    decode(parts[1], form, mean, add=True)
    assert same(mean, (first.to(dtype).float() + second).to(dtype))


@both
@each_format
def test_a_row_does_not_depend_on_others_nor_on_threads(wire):
    form = wire.records(1000)
    values = drawn(300, form, torch.bfloat16, 0)
    coded = encoded(values, form)
    out = decoded([coded], form)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(0))
    assert torch.equal(encoded(values[order], form), coded[order])
    assert torch.equal(encoded(values[7:8], form), coded[7:8])
    before = torch.get_num_threads()
    torch.set_num_threads(3 if before == 1 else 1)
    try:
        assert torch.equal(encoded(values, form), coded)
        assert same(decoded([coded], form), out)
    finally:
        torch.set_num_threads(before)


@both
@pytest.mark.parametrize("wire", [Wire("int8"), Wire("int4", is_difference=True)], ids=str)
def test_what_is_held_is_subtracted_in_float32(wire):
    form = wire.records(100)
    values = torch.randn(6, 100, generator=torch.Generator().manual_seed(0))
    held = values.bfloat16()
    difference = values - held.float()
    assert difference.any()
    assert torch.equal(encoded(values, form, held), encoded(difference, form))
    decode(encoded(values, form, held), form, now := held.float(), add=True)
    assert (now - values).abs().max() < difference.abs().max() / 10


@both
def test_writes_are_seen_by_autograd_and_sizes_are_checked():
    form = Wire("int8").records(64)
    for dtype in DTYPES:
        values, coded = torch.ones(3, 64, dtype=dtype), torch.zeros(3, form.row_nbytes, dtype=torch.uint8)
        before = values._version, coded._version
        encode(values, form, coded)
        decode(coded, form, values)
        assert values._version > before[0] and coded._version > before[1]
        for wrong in (coded[:2], coded[:, :-1], coded.view(torch.int8), coded.t().contiguous().t()):
            with pytest.raises(AssertionError):
                encode(values, form, wrong)
    with pytest.raises(AssertionError):
        decode_mean([], form, values)
