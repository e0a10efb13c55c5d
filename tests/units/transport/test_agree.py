"""Ranks that disagree raise the same error on every rank, naming the first difference."""

import pytest
import torch
import torch.distributed as dist

from tests.axes.grids import grid
from tests.support.ranks import axis
from zero_fn.errors import DisagreementError
from zero_fn.transport.agree import agree, digest
from zero_fn.transport.links import line_over
from zero_fn.values.digests import content_digest
from zero_fn.values.mesh import mesh_axis


def message(rows_by_rank, common):
    """What this rank is told when some ranks hold other rows than `common`; "" if all agree."""
    try:
        agree(
            line_over([mesh_axis(axis(), verb="test")]),
            "layouts",
            rows_by_rank.get(dist.get_rank(), common),
            why="it would hang",
            fix="mend it",
        )
    except DisagreementError as error:
        return str(error)
    return ""


ROWS = ["weight  float32[4, 4]", "bias  float32[4]"]


TEXT = (
    "Ranks 0 and 1 hold different layouts.\n"
    "  rank_0 : bias  float32[4]\n"
    "  rank_1 : bias  float32[5]\n"
    "  why    : it would hang\n"
    "  fix    : mend it"
)
MANY = [f"layers.{i}.weight  float32[4096, 4096]" for i in range(2000)]


@pytest.mark.parametrize(
    ("others", "common", "expected"),
    [
        ({}, ROWS, ""),
        ({}, [], ""),
        ({}, ["ü"] * 40, ""),
        ({1: [ROWS[0], "bias  float32[5]"]}, ROWS, TEXT),
        ({2: [ROWS[0], "x"], 3: ["y", ROWS[1]]}, ROWS, "rank_2 : x"),  # the first that differs from rank 0
        ({0: ["z", ROWS[1]]}, ROWS, "rank_0 : z"),  # the odd one
        ({1: [*ROWS, "extra"]}, ROWS, "rank_1 : extra"),
        ({1: ROWS[:1]}, ROWS, "rank_1 : nothing after 1 parameters"),
        ({1: []}, ROWS, "rank_1 : nothing after 0 parameters"),
        ({1: [*MANY[:-1], "last"]}, MANY, "rank_1 : last"),
    ],
    ids=["alike", "alike, empty", "alike, long", "one", "first", "rank 0", "more", "fewer", "none", "long"],
)
def test_every_rank_is_told_the_first_row_that_differs(ranks, others, common, expected):
    (found,) = set(ranks(4).run(message, others, common))
    assert expected in found and bool(found) == bool(expected)


def _over_two_axes():
    links = line_over([mesh_axis(grid("outer", "inner")[name], verb="test") for name in ("inner", "outer")])
    return links.rank, links.exchange(torch.tensor([dist.get_rank()], dtype=torch.uint8)).view(-1).tolist()


def test_ranks_of_two_axes_have_the_numbers_that_errors_give_them(ranks):
    assert ranks(4).run(_over_two_axes) == [(rank, [0, 1, 2, 3]) for rank in range(4)]


def test_a_digest_is_sixteen_bytes_and_sees_every_row_and_their_order():
    assert len(digest(ROWS)) == 16
    assert len({digest(rows) for rows in (ROWS, ROWS[::-1], ROWS[:1], [*ROWS, ""], [])}) == 5


@pytest.mark.parametrize(
    "dtype",
    ["float16", "bfloat16", "float32", "float64", "complex64", "complex128", "int64", "uint8", "bool"],
)
def test_the_digest_of_contents_sees_every_element_wherever_it_lies(dtype):
    for shape in ((), (3,), (2, 3), (8,), (11,)):
        one = torch.zeros(shape, dtype=getattr(torch, dtype))
        for number in range(one.numel()):
            other = one.clone()
            other.view(-1)[number] = 1
            assert content_digest(other) != content_digest(one)
        memory = torch.randn(one.numel() + 3).mul(10).to(one.dtype)
        assert content_digest(memory[3:]) == content_digest(memory[3:].clone())


def test_the_digest_of_contents_does_not_depend_on_strides():
    """Nor does it ask for the stride of one element, which torch calls contiguous at any."""
    x = torch.randn(4, 6)
    assert content_digest(x.t()) == content_digest(x.t().contiguous())
    one = torch.ones(3, 64)[0, :1].as_strided((1,), (64,))
    assert content_digest(one) == content_digest(torch.ones(1))


@pytest.mark.parametrize("tensor", [torch.empty(0), torch.empty(3, device="meta")], ids=["empty", "meta"])
def test_what_has_no_contents_has_digest_0(tensor):
    assert content_digest(tensor) == 0
