"""One axis: its collectives do not hang.

Every wait has a deadline, and every failure names ranks and the collective.

What can go wrong between ranks, and the error that every rank raises:

    a rank ended, was stopped          `LostRankError`: which rank, in which collective
    or is busy elsewhere
    ranks are at different             where ranks share memory, `DisagreementError` before any
    collectives                        byte is used; with `TORCH_DISTRIBUTED_DEBUG=DETAIL`, where
                                       the backend compares; elsewhere `LostRankError` at the
                                       deadline

Where ranks share memory, a rank that gives up tells the others which rank it blames, and these
blame the same. Elsewhere a rank blames the one that it waited for; if the backend's own collective
failed, it can blame none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from traceback import clear_frames
from typing import Any, Protocol
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
from torch import Tensor

from zero_fn.errors import DisagreementError, LostRankError, ZeroError
from zero_fn.transport import waiting
from zero_fn.transport.segment import ByRank, Contribution, Segment
from zero_fn.transport.traffic import count, open_counts
from zero_fn.transport.waiting import Failure, OutOfStep, PeerLost, deadline, lost, set_timeout_of
from zero_fn.values import watching
from zero_fn.values.mesh import Axis
from zero_fn.values.watching import Moment

__all__ = ["MISMATCH", "Line", "Transport", "Work"]

MISMATCH = "Detected mismatch between collectives"
"""How torch begins the error of a backend that compares: TORCH_DISTRIBUTED_DEBUG=DETAIL."""


class _GroupState:
    """Shared by all lines on a process group: how many collectives were issued,
    and the error of the one that failed."""

    __slots__ = ("count", "failure")

    def __init__(self) -> None:
        self.count = 0
        self.failure: ZeroError | None = None


_groups: WeakKeyDictionary[Any, _GroupState] = WeakKeyDictionary()


class Work:
    """A collective under way."""

    __slots__ = ("finish", "kept", "line", "name", "nbytes", "on_stream", "works")

    def __init__(
        self,
        works: Sequence[tuple[Any, int | None]] = (),
        finish: Callable[..., object] | None = None,
        kept: tuple[Any, ...] = (),
        nbytes: int = 0,
        *,
        on_stream: bool = False,
    ) -> None:
        # Each work with the peer at its other end; None for collectives of the backend.
        self.works = works
        self.finish = finish  # called once the works are done, with `kept`
        self.kept = kept  # what must live until then
        self.nbytes = nbytes  # of payload that this rank sends
        # A stream waits, not the host, which would wait as well if a deadline were passed on.
        self.on_stream = on_stream
        self.line: Line | None = None  # on which it was issued
        # What an error says of this work: number, text, elements, check.
        self.name: tuple[int, str, int, str] = (0, "", 0, "")

    def wait(self) -> None:
        """Waits until the result may be used.

        May be called again. On CUDA the current stream waits, not the host.

        Raises:
            LostRankError: A rank has ended, or did not answer before the deadline.
            DisagreementError: A rank is at another collective.
        """
        line = self.line
        if line is not None and line.shared.failure is not None:
            raise line.told(line.shared.failure)
        works, finish, kept = self.works, self.finish, self.kept
        self.works = ()
        self.finish = None
        self.kept = ()
        try:
            for work, peer in works:
                try:
                    if self.on_stream:
                        work.wait()
                    else:
                        work.wait(waiting.limit)
                except RuntimeError as error:
                    raise lost(error, peer) from error
            if finish is not None:
                finish(*kept)
        except (PeerLost, OutOfStep) as failure:
            if line is None:
                raise
            raise line.failed(failure, self.name) from failure


class Transport(Protocol):
    """What moves bytes along one axis. All ranks call the same operations in the same order.

    `mark` is a number below 2^31 that tells operations apart and is the same on every rank. A
    transport compares it with those of its peers, if it can. Plans have an attribute `numel`: the
    elements of all tensors.
    """

    pads: bool
    """Whether the memory of a `Segment` must have room for `n` full pieces."""

    def gather_plan(self, segments: Sequence[Segment]) -> Any:
        """How these segments travel: views are cut here, once for
        all gathers of the same memory."""

    def all_gather(self, plan: Any, mark: int = 0) -> Work:
        """Fills each segment of a plan from the pieces of all ranks."""

    def reduce_plan(self, contributions: Sequence[Contribution], buffers: Sequence[Tensor]) -> Any:
        """How these contributions travel, and others with the same sizes and dtypes,
        to the same places of other buffers."""

    def reduce_scatter(
        self, plan: Any, rows: Sequence[Tensor], buffers: Sequence[Tensor], mark: int = 0
    ) -> Work:
        """Writes into the place of each contribution in `buffers` the mean over ranks of
        this rank's piece of its rows."""

    def all_to_all(
        self, sends: ByRank, places: ByRank, device: torch.device, mark: int = 0
    ) -> Work:
        """Fills `places[r]` with what rank `r` sends to this one, which sends `sends[r]` to it.

        All rest on `device`.
        """

    def any(self, bits: Tensor, mark: int = 0) -> Work:
        """Ors a uint8 tensor of 0 and 1 over the ranks, in place."""

    def exchange(self, rows: Tensor, mark: int = 0) -> Work:
        """Fills the rows of the other ranks in a uint8 tensor with a row for each rank,
        in which this rank's is filled."""

    def give_up(self, failure: Failure | None = None) -> None:
        """Tells the peers, if it can, that this rank sends nothing more after a failure,
        and which rank it blames."""


class Line:
    """The collectives along one axis, or along several (`Lines`).

    `what` names the tensors in errors: "parameters of unit layers.0". After a failure every
    collective on the same process group raises it again: peers and this rank are out of step.
    """

    def __init__(self, raw: Transport, axis: Axis | None) -> None:
        self.raw = raw
        self.pads = raw.pads
        self.axes: tuple[Axis, ...] = () if axis is None else (axis,)  # the innermost first
        # Among the ranks of all axes, of which those of the first have consecutive numbers.
        self.rank, self.size = (axis.rank, axis.size) if axis is not None else (0, 1)
        self.device = torch.device(axis.device_type if axis is not None else "cpu")
        self.shared = (
            _GroupState() if axis is None else _groups.setdefault(axis.group, _GroupState())
        )
        # Along the other axes of a module, whose ranks would wait for
        # this one after a failure here.
        self.beside: Sequence[Transport] = ()
        self._marks: dict[str, int] = {}
        if axis is not None:
            set_timeout_of(axis)

    def along(self, number: int) -> Line:
        """The collectives along one of the axes."""
        return self

    def gather_plan(self, segments: Sequence[Segment]) -> Any:
        """How an all-gather moves these segments, for many gathers of the same memory."""
        return self.raw.gather_plan(segments)

    def all_gather(self, plan: Any, what: str) -> Work:
        """Fills each segment from the pieces of all ranks.

        `plan`: that of segments, or a list of them; of none nothing is sent.
        """
        if type(plan) is list:
            if not plan:
                return Work()
            plan = self.raw.gather_plan(plan)
        return self._issue("all-gather", " of " + what, plan.numel, self.raw.all_gather, plan)

    def reduce_plan(self, contributions: Sequence[Contribution], buffers: Sequence[Tensor]) -> Any:
        """How a reduction sums these contributions, for many with the same sizes and dtypes,
        into other buffers."""
        return self.raw.reduce_plan(contributions, buffers)

    def reduce_scatter(
        self, plan: Any, rows: Sequence[Tensor], buffers: Sequence[Tensor], what: str
    ) -> Work:
        """Writes the mean over ranks of this rank's piece of each of `rows`
        into its place in `buffers`."""
        return self._issue(
            "reduce-scatter",
            " of " + what,
            plan.numel,
            self.raw.reduce_scatter,
            plan,
            rows,
            buffers,
        )

    def all_to_all(
        self, sends: ByRank, places: ByRank, numel: int, what: str, *, check: str = ""
    ) -> Work:
        """Sends tensors from rank to rank, of any dtypes and strides, to the bit.

        Along one axis only.

        `sends[r]` goes to rank `r` of the axis, which has places of the same shapes and dtypes in
        the same order; `places[r]` are filled with what rank `r` sends. Those of this rank are
        empty. Until `wait` nobody may write `sends`, nor read or write `places`. `numel` (elements
        that all ranks send together) and the text `check` must be the same on every rank.
        """
        assert not sends[self.rank] and not places[self.rank], "a rank sends nothing to itself"
        what = " of " + what
        return self._issue(
            "all-to-all", what, numel, self.raw.all_to_all, sends, places, self.device, check=check
        )

    def any(self, bits: Tensor, what: str, *, check: str = "") -> Work:
        """Ors a uint8 tensor of 0 and 1 over the ranks, in place.

        The text `check` must be the same on every rank.
        """
        return self._issue(
            "control", "agreement on " + what, bits.numel(), self.raw.any, bits, check=check
        )

    def exchange(self, message: Tensor, what: str = "digests") -> Tensor:
        """The messages of all ranks, one row each, on the host.

        Waits. A message is uint8, of one length on all ranks.
        """
        rows = torch.empty(self.size, message.numel(), dtype=torch.uint8, device=self.device)
        rows[self.rank] = message
        self._issue(
            "control", "exchange of " + what, message.numel(), self.raw.exchange, rows
        ).wait()
        return rows.cpu()

    def give_up(self) -> None:
        """Tells the peers, after a failure elsewhere, that this rank sends nothing more."""
        self.raw.give_up()

    def _issue(
        self,
        kind: str,
        what: str,
        numel: int,
        operation: Callable[..., Work],
        *payload: object,
        check: str = "",
    ) -> Work:
        """Begins an operation of the transport on `payload`.

        `numel` and `check` must be the same on every rank.
        """
        shared = self.shared
        if shared.failure is not None:
            raise self.told(shared.failure)
        text = what if kind == "control" else kind + what
        mark = self._marks.get(text)
        if mark is None:
            mark = self._marks[text] = crc32(text.encode())
        if check:
            mark ^= crc32(check.encode())
        name = shared.count, text, numel, check
        shared.count += 1
        for watch in watching.watchers:
            watch.note(Moment.ISSUE)
        try:
            work = operation(*payload, (mark ^ numel * 0x9E3779B1) & 0x7FFFFFFF)
        except (PeerLost, OutOfStep) as failure:
            raise self.failed(failure, name) from failure
        except RuntimeError as error:
            if MISMATCH not in str(error):
                raise
            raise self.failed(lost(error, None), name) from error
        except KeyboardInterrupt as interrupt:
            # A notebook keeps them, and they keep the message.
            clear_frames(interrupt.__traceback__)
            raise
        work.line, work.name = self, name
        if open_counts and self.size > 1:
            count(kind, work.nbytes, self.axes[0].name)
        for watch in watching.watchers:
            watch.issued(work, kind)
        return work

    def failed(self, failure: Failure, name: tuple[int, str, int, str]) -> ZeroError:
        """The error for a failed collective: the first one on the process group."""
        if self.shared.failure is None:
            assert self.axes, "one rank alone lost a peer"
            self.raw.give_up(failure)
            number, text, numel, check = name
            collective = f"#{number} {text} ({numel} elements{f', {check}' if check else ''})"
            self.shared.failure = _explained(failure, collective, self.axes[0])
        return self.told(self.shared.failure)

    def told(self, failure: ZeroError) -> ZeroError:
        """A failure on this axis, after the ranks along the others were
        told that nothing more comes."""
        for raw in self.beside:
            raw.give_up()
        return failure


def _explained(failure: Failure, collective: str, axis: Axis) -> ZeroError:
    """The error for the user."""
    here = f"rank {axis.rank}, waiting in {collective}"
    if isinstance(failure, OutOfStep):
        first, second = sorted((failure.seen_by, failure.peer))
        return DisagreementError(
            f"Ranks {first} and {second} of axis {axis} are at different collectives.",
            here=here,
            why="the ranks did not run the same forwards and backwards, "
            "or one of them raised and went on, or left out optimizer.step()",
            fix="run the same program on every rank (config.layerdrop = 0.0, encoder_layerdrop, "
            "decoder_layerdrop: models of transformers skip layers at random); units= of a "
            "transform can join what only some ranks call to what all call",
        )
    if MISMATCH in str(failure):
        return DisagreementError(
            f"Ranks of axis {axis} are at different collectives.",
            here=here,
            why=str(failure),
            fix="run the same forwards, backwards and steps of optimizers on every rank",
        )
    who = (
        f"A rank of axis {axis}" if failure.peer is None else f"Rank {failure.peer} of axis {axis}"
    )
    if failure.is_late:
        return LostRankError(
            f"{who} did not answer within {deadline():g} s.",
            here=here,
            why="it is stopped, or busy outside the collectives, or waits for something else",
            fix="see where it is (py-spy dump --pid); if it only needs longer: "
            "zf.distributed.set_deadline(...)",
        )
    return LostRankError(
        f"{who} closed the connection.",
        here=here,
        why="the process ended, was killed (often because memory ran out: see dmesg), or gave up",
        fix="look for the first error on that rank; start all ranks again from the last checkpoint",
    )
