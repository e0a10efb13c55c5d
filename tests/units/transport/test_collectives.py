"""The transports on gloo ranks against what each collective says of the tensors of all ranks.

All cases of a test run in one call: each rank makes its own inputs from the seed of a case, and the test makes those of
every rank.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

import zero_fn as zf
from tests.support.collectives import gather, reduce
from tests.support.ranks import axis, sent_by_value
from tests.support.reference import mean_in_rank_order
from zero_fn.local.launcher import LocalRanks
from zero_fn.one_host.same_host import SameHost
from zero_fn.transport import links
from zero_fn.transport import segment as sizes
from zero_fn.transport.direct_exchange import Alone, Exchange
from zero_fn.transport.line import Work
from zero_fn.transport.links import line_over
from zero_fn.transport.native import Native
from zero_fn.transport.segment import Contribution, Segment
from zero_fn.transport.traffic import traffic
from zero_fn.transport.waiting import PeerLost
from zero_fn.values.mesh import mesh_axis

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool)
SMALL, LARGE = 10**9, 1  # values of PACKED_NBYTES by which every piece is packed, or sent alone


def values(seed, numel, dtype, *, exact=True):
    """Values of a case; sums of `exact` ones are exact in any order and every dtype."""
    generator = torch.Generator().manual_seed(seed)
    if not exact:
        return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)
    integers = torch.randint(-4, 5, (numel,), generator=generator)
    return (12 * integers if dtype.is_floating_point or dtype.is_complex else integers).to(dtype)


def is_same(one, other):
    return one.dtype == other.dtype and torch.equal(one, other)


@dataclass(frozen=True)
class Case:
    """One tensor of `numel` elements, cut into pieces of `piece_numel`."""

    numel: int
    piece_numel: int
    dtype: torch.dtype
    seed: int

    def owned(self, rank):
        return slice(min(rank * self.piece_numel, self.numel), min((rank + 1) * self.piece_numel, self.numel))


@contextmanager
def packed(nbytes):
    """Inside, pieces up to so many bytes travel as one."""
    before, sizes.PACKED_NBYTES = sizes.PACKED_NBYTES, nbytes
    try:
        yield
    finally:
        sizes.PACKED_NBYTES = before


def cases_of(n, dtypes):
    """Even, uneven and partly empty cuts, in every dtype. With rows of 3 elements a piece is a multiple of 3."""
    cuts = [(n * 4, 4), (n * 4 - 1, 4), (n + 1, 2), (1, 1), (3 * (n + 1), 6), (0, 0)]
    return [
        Case(numel, piece, dtype, seed)
        for seed, (dtype, (numel, piece)) in enumerate((d, c) for d in dtypes for c in cuts)
    ]


def open_transport(kind):
    own = mesh_axis(axis(), verb="test")
    kinds = {"shared": SameHost, "sockets": Exchange, "native": Native}
    chosen = kinds[kind](own.group, own.rank, own.size)
    assert kind != "shared" or type(links.open_transport(own)) is SameHost
    return chosen


def segment_for(case, n, piece, *, pads):
    """Memory as large as the transport needs, with another tensor's elements after it. Every other piece rests elsewhere."""
    room = n * case.piece_numel if pads else case.numel
    whole = piece.new_ones(room + 5)
    whole[: case.numel] = 0
    source = piece.clone() if case.seed // 2 % 2 else None
    segment = Segment(whole if not pads else whole[:room], case.numel, case.piece_numel, source=source)
    if source is None:
        whole[case.owned(dist.get_rank())] = piece
    return segment


# -- all-gather ------------------------------------------------------------------------------------------------------


def gathered(cases, packed_nbytes, kind):
    """What each segment holds after the all-gather; before it, this rank's piece is right and the rest is not."""
    own = dist.get_rank()
    at_rest = open_transport(kind)
    segments = []
    for case in cases:
        piece = values(case.seed, case.numel, case.dtype)[case.owned(own)]
        segments.append(segment_for(case, dist.get_world_size(), piece, pads=at_rest.pads))
    with packed(packed_nbytes):
        pending = gather(at_rest, segments)
        pending.wait()
        pending.wait()
    if not at_rest.pads:
        assert all(segment.memory[case.numel :].eq(1).all() for segment, case in zip(segments, cases, strict=True))
    return [segment.memory[: case.numel].clone() for segment, case in zip(segments, cases, strict=True)]


@pytest.mark.parametrize("packed_nbytes", [SMALL, LARGE, 40], ids=["packed", "single", "mixed"])
@pytest.mark.parametrize("kind", ["shared", "sockets", "native"])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_all_gather_brings_every_piece_to_every_rank(ranks, n, kind, packed_nbytes):
    """From where it rests, and touches nothing behind a tensor."""
    cases = [case for case in cases_of(n, DTYPES) if case.numel or kind != "native"]
    for got in ranks(n).run(gathered, cases, packed_nbytes, kind):
        for case, whole in zip(cases, got, strict=True):
            assert is_same(whole, values(case.seed, case.numel, case.dtype)), case


def _of_rank_0():
    """Gathers tensors that rank 0 holds, in memory for them alone. The bytes of each."""
    own, found = mesh_axis(axis(), verb="test"), []
    for numel, dtype in ((7, torch.float32), (3, torch.bool), (0, torch.float32)):
        whole = torch.arange(numel).to(dtype)
        memory = whole.clone() if own.rank == 0 else torch.zeros_like(whole)
        pending = gather(open_transport("native"), [Segment(memory, numel, 7)])
        found.append(pending.nbytes)
        pending.wait()
        assert is_same(memory, whole)
    return found


def test_native_broadcasts_what_rank_0_holds_alone(ranks):
    """Buffers of rank 0 were gathered from all ranks: as often their bytes, and their memory."""
    assert ranks(3).run(_of_rank_0) == [[7 * 4 * 2 // 3, 3 * 2 // 3, 0]] * 3


@pytest.mark.parametrize("backend", ["gloo", "other"])
def test_native_gathers_one_by_one_on_gloo_and_together_elsewhere(backend):
    calls = []

    class Group:
        """What a group of ranks is to `Native`."""

        def _get_backend(self, device):
            return self

        def name(self):
            return backend

        def all_gather_single(self, whole, piece):
            calls.append(("one", whole.numel() // piece.numel()))
            return Done()

        def all_gather_single_coalesced(self, wholes, pieces):
            calls.append(("together", len(pieces)))
            return Done()

        def reduce_scatter_single_coalesced(self):
            raise AssertionError("nothing is reduced here")

    class Done:
        def wait(self, _limit):
            calls.append(("waited", 0))

    segments = [Segment(torch.zeros(numel), numel, numel // 2) for numel in (40_000, 60_000)]
    gather(Native(Group(), 0, 2), segments).wait()
    begun = {"gloo": [("one", 2), ("one", 2)], "other": [("together", 2)]}[backend]
    assert calls == [*begun, *len(begun) * [("waited", 0)]]


# -- reduce-scatter --------------------------------------------------------------------------------------------------


def sum_dtype_of(dtype):
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def reduced(cases, packed_nbytes, kind, exact, aliased):
    """This rank's mean of each case, and whether the addend was only read (beyond `out`, if that is part of it)."""
    own = dist.get_rank()
    at_rest = open_transport(kind)
    contributions, originals = [], []
    for case in cases:
        filled = values(1000 * case.seed + own, case.numel, case.dtype, exact=exact)
        addend = torch.cat([filled, filled.new_ones(5)])[: case.numel]  # with another tensor's elements after it
        piece = addend[case.owned(own)]
        out = piece if aliased else torch.full_like(piece, 7)
        contributions.append(Contribution(addend, case.piece_numel, out, sum_dtype_of(case.dtype)))
        originals.append(filled)
    with packed(packed_nbytes):
        reduce(at_rest, contributions).wait()
    answers = []
    for case, contribution, original in zip(cases, contributions, originals, strict=True):
        after = contribution.rows.clone()
        if aliased:
            after[case.owned(own)] = original[case.owned(own)]
        answers.append((contribution.out.clone(), torch.equal(after, original)))
    return answers


def expected_means(cases, n, rank, *, exact):
    means = []
    for case in cases:
        addends = [values(1000 * case.seed + r, case.numel, case.dtype, exact=exact) for r in range(n)]
        means.append(mean_in_rank_order(addends, sum_dtype_of(case.dtype)).to(case.dtype)[case.owned(rank)])
    return means


@pytest.mark.parametrize("packed_nbytes", [SMALL, LARGE, 40], ids=["packed", "single", "mixed"])
@pytest.mark.parametrize(
    ("kind", "aliased"),
    [("shared", False), ("shared", True), ("sockets", False), ("sockets", True), ("native", False)],
    ids=["shared, apart", "shared, aliased", "sockets, apart", "sockets, aliased", "native, apart"],
)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_reduce_scatter_is_the_mean_in_the_order_of_ranks(ranks, n, kind, packed_nbytes, aliased):
    """Bitwise, on values whose sum depends on the order of the addends, also where `out` is a part of the addend.

    So a sum does not depend on how the tensor is cut. The order of the backend is its own: there on values of exact sums.
    """
    exact = kind == "native"
    cases = [case for case in cases_of(n, FLOATS) if case.numel or not exact]
    for rank, answers in enumerate(ranks(n).run(reduced, cases, packed_nbytes, kind, exact, aliased)):
        expected = expected_means(cases, n, rank, exact=exact)
        for case, (mean, only_read), right in zip(cases, answers, expected, strict=True):
            assert is_same(mean, right), case
            assert only_read, case


def test_small_gradients_that_are_summed_in_two_dtypes_do_not_travel_as_one(ranks):
    def means():
        own = torch.full((3,), 256.0 if dist.get_rank() == 0 else 1.0, dtype=torch.bfloat16)
        outs = [torch.empty(1, dtype=dtype) for dtype in (torch.float64, torch.float32)]  # wider than the sums
        both = zip(outs, (torch.float32, torch.bfloat16), strict=True)
        reduce(open_transport("shared"), [Contribution(own, 1, *pair) for pair in both]).wait()
        return [out.item() for out in outs]

    narrow = torch.tensor(256.0).bfloat16().div(3).item()  # 256 + 1 is 256
    assert ranks(3).run(means) == [[86.0, narrow]] * 3


def test_a_message_that_finds_no_room_is_an_error_on_every_rank(ranks):
    def refused():
        group = dist.new_group()
        transport = SameHost(group, dist.get_rank(), 3)
        transport.exchange(torch.zeros(3, 1, dtype=torch.uint8)).wait()
        assert transport._shared is not None
        if dist.get_rank() == 1:
            transport._shared.arena._capacity = 0
        try:
            transport.exchange(torch.zeros(3, 1, dtype=torch.uint8)).wait()
        except (zf.errors.TierError, PeerLost) as error:
            return f"{type(error).__name__}: {error}".partition("\n")[0]
        return "nothing"

    here, there, other = ranks(3).run(refused)
    assert here == other == "PeerLost: the peer has given up"
    assert there.startswith("TierError: Messages to ranks of this host need 128 B of host memory, 0 B")
    assert there.endswith("can be taken.")


# -- all-to-all ------------------------------------------------------------------------------------------------------


def parcel(source, target, seed):
    """What a rank sends to another: tensors of all dtypes and three sizes, of whose numbers some are NaN; or nothing."""
    if source == target or (source + 2 * target + seed) % 3 == 0:
        return []
    found = []
    for number, dtype in enumerate((*DTYPES, torch.complex128, torch.float8_e4m3fn)):
        for rows in (0, 3, 40):
            filled = values(1000 * seed + 100 * source + 10 * target + number, 2 * rows * dtype.itemsize, torch.int64)
            found.append((filled % 2 if dtype is torch.bool else filled).to(torch.uint8).view(dtype).view(rows, 2))
    return [*found, torch.tensor(float(source))]


def laid(tensor, seed):
    """The same, transposed in memory, or row by row."""
    return tensor.t().contiguous().t() if seed else tensor


def sent_to_all(kind):
    """Whether two that are under way at once, and waited for in the other order, bring all to the bit and count bytes."""
    own, n, through = dist.get_rank(), dist.get_world_size(), line_over([mesh_axis(axis(), verb="test")])
    through.raw = open_transport(kind)
    under_way, right = [], []
    with traffic() as sent:
        for seed in range(2):
            sends = [[laid(each, seed) for each in parcel(own, target, seed)] for target in range(n)]
            places = [[laid(each.clone().zero_(), seed) for each in parcel(source, own, seed)] for source in range(n)]
            under_way.append((through.all_to_all(sends, places, 7, "a test", check=kind), places, seed))
            right.append(sum(each.nbytes for several in sends for each in several) == under_way[-1][0].nbytes)
        for pending, places, seed in reversed(under_way):
            pending.wait()
            for source, several in enumerate(places):
                for found, each in zip(several, parcel(source, own, seed), strict=True):
                    right.append(torch.equal(*(x.contiguous().view(-1).view(torch.uint8) for x in (found, each))))
    return [*right, sent.by_collective == {"all-to-all": sum(work.nbytes for work, *_ in under_way)}, sent.nbytes > 0]


@pytest.mark.parametrize("kind", ["shared", "sockets", "native"])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_all_to_all_brings_every_tensor_to_its_place(ranks, n, kind):
    assert all(map(all, ranks(n).run(sent_to_all, kind)))


@pytest.mark.parametrize("kind", ["shared, elsewhere", "shared", "sockets", "native"])
def test_who_waits_in_an_all_to_all_is_told_of_a_rank_that_is_elsewhere_or_late(kind):
    def told():
        through, own, place = line_over([mesh_axis(axis(), verb="test")]), dist.get_rank(), torch.zeros(2)
        through.raw = open_transport(kind.partition(",")[0])
        through.exchange(torch.zeros(1, dtype=torch.uint8))
        try:
            if own and "elsewhere" in kind:
                gather(through, [Segment(torch.ones(4), 4, 2)], "a test").wait()
            elif not own:
                with zf.distributed.set_deadline(1):
                    through.all_to_all([[], [torch.ones(2)]], [[], [place]], 4, "a test").wait()
        except zf.ZeroError as error:
            assert place.eq(0).all()
            return error.summary
        return "nothing"

    with LocalRanks(2) as fresh, sent_by_value(told):
        found = fresh.run(told, timeout_s=30)
    who = "A rank" if kind == "native" else "Rank 1"
    late = [f"{who} of axis 'dp' (2) did not answer within 1 s.", "nothing"]
    parted = ["Ranks 0 and 1 of axis 'dp' (2) are at different collectives."] * 2
    assert found == (parted if "elsewhere" in kind else late)


# -- agreement -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["shared", "sockets", "native"])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_any_and_exchange_are_their_patterns(ranks, n, kind):
    def both():
        own, transport = dist.get_rank(), open_transport(kind)
        bits, rows = torch.zeros(n + 1, dtype=torch.uint8), torch.zeros(n, 16, dtype=torch.uint8)
        bits[own] = 1
        rows[own] = values(own, 16, torch.uint8)
        transport.any(bits).wait()
        transport.exchange(rows).wait()
        return bits, rows

    ored = torch.tensor([1] * n + [0], dtype=torch.uint8)
    exchanged = torch.stack([values(rank, 16, torch.uint8) for rank in range(n)])
    assert all(is_same(bits, ored) and is_same(rows, exchanged) for bits, rows in ranks(n).run(both))


# -- traffic ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 4])
def test_sent_bytes_are_those_of_the_formulas(ranks, n):
    """(n - 1)/n of the whole in each direction, when rows divide; by every transport. What is counted: the laws of plans."""
    numel = 12 * n

    def sent(kind):
        through, segment = open_transport(kind), Segment(torch.zeros(numel), numel, 12)
        arrival = gather(through, [segment])
        arrival.wait()
        reduction = reduce(through, [Contribution(segment.memory[:numel], 12, torch.empty(12), torch.float32)])
        reduction.wait()
        return arrival.nbytes, reduction.nbytes

    share = (n - 1) * numel * 4 // n
    for kind in ("shared", "sockets", "native"):
        assert ranks(n).run(sent, kind) == [(share, share)] * n


# -- without ranks ---------------------------------------------------------------------------------------------------


def test_one_rank_moves_nothing_and_its_mean_is_its_addend():
    lonely = line_over([])
    addend, out = torch.arange(4.0), torch.empty(4)
    with traffic() as sent:
        gather(lonely, [Segment(addend, 4, 4)], "a test").wait()
        reduce(lonely, [Contribution(addend, 4, out, torch.float32)], "a test").wait()
        lonely.any(torch.ones(1, dtype=torch.uint8), "a test").wait()
        lonely.all_to_all([[]], [[]], 4, "a test").wait()
        rows = lonely.exchange(torch.ones(3, dtype=torch.uint8))
    assert torch.equal(out, addend)
    assert rows.shape == (1, 3)
    assert (sent.nbytes, sent.calls) == (0, {})


def test_one_rank_reduces_into_its_own_addend_and_a_transposed_one():
    """A gradient that comes transposed is cut by rows, not laid flat first; `out` is flat all the same."""
    addend = torch.arange(4.0)
    reduce(Alone(), [Contribution(addend, 4, addend, torch.float32)]).wait()
    assert addend.tolist() == [0.0, 1.0, 2.0, 3.0]
    gradient, out = torch.arange(6.0).view(3, 2).t(), torch.empty(6)
    reduce(Alone(), [Contribution(gradient, 2, out, torch.float32)]).wait()
    assert torch.equal(out, gradient.reshape(-1))


def test_a_work_finishes_once_and_lets_go_of_what_it_kept():
    calls = []
    pending = Work(finish=calls.append, kept=("finished",))
    pending.wait()
    pending.wait()
    assert calls == ["finished"]
    assert pending.kept == ()
