"""Buffers, such as the statistics of BatchNorm: all ranks have those of rank 0, or each rank keeps its own.

[Note: when buffers are broadcast] DDP broadcasts the buffers of rank 0 before every forward. Here a forward broadcasts them
only if an earlier forward has changed a buffer on any rank. Each rank notes whether its forwards change one; the note travels
with the control message that begins every backward. A forward in training mode that no backward followed is asked about by a
message of its own. So a model whose buffers never change sends nothing.

Nothing is broadcast while some rank holds a graph that waits for its backward, which may need the values; nor inside
`accumulate` after its first forward.

[Note: changes that no version counts] Writes through `.data`, and some kernels, leave a buffer's version as it is. They are
found by values. To read all values in every forward would cost time, and on an accelerator a wait, for constants such as
masks. So they are compared in the 1st, 2nd, 4th, 8th... forward in training mode since anything visible has changed: a
version, or the mode of a module. Once a change was found so, every forward in training mode counts as one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from xxhash import xxh3_128_hexdigest

from zero_fn.transport.agreement import agree, differ
from zero_fn.transport.line import Line
from zero_fn.transport.segment import Segment

__all__ = ["Statistics"]


class Statistics:
    """The buffers of one transformed module.

    Attributes:
        is_active: Whether buffers are broadcast at all: the module has some, and there are ranks to send them to.
    """

    def __init__(self, transport: Line, *, are_local: bool) -> None:
        self._transport, self._has_peers = transport, transport.size > 1 and not are_local
        self._anchors: list[Callable[[], nn.Module | None]] = []
        self._owners: list[Callable[[], nn.Module | None]] = []
        self._seen: list[tuple[Tensor, int]] = []  # all buffers, with their versions
        self._modes: list[bool] = []  # whether each owner was in training mode in the last forward
        self._values: str | None = None  # a digest of all buffers as they should be; None: not known
        self._quiet = 0  # forwards in training mode since anything visible has changed
        self._changes_unseen = False  # [Note: changes that no version counts]
        self._has_changed = False  # on this rank, since the ranks last told one another
        self._is_due = False  # a buffer has changed on some rank since the last broadcast
        self._asked = True  # nothing can have changed since the ranks told one another
        self._rests_in: list[bool] = []  # the modes in which the ranks last told one another that nothing had changed
        self._agreed: tuple[str, ...] = ()
        self.is_active = False

    def watch(self, anchor: nn.Module) -> None:
        """Adds the buffers of a module and of everything below it."""
        self._anchors.append(weakref.ref(anchor))

    def begin(self) -> None:
        """Finds the buffers, compares their layout over ranks, and lets the first broadcast send them if values differ. For
        the first forward, and the first after loading.

        Communicates 32 bytes to each peer if there are buffers.

        Raises:
            DisagreementError: Ranks hold different buffers.
        """
        found: dict[int, nn.Module] = {}
        for reference in self._anchors:
            anchor = reference()
            if anchor is not None:
                found.update((id(module), module) for module in anchor.modules() if _buffers(module))
        self._owners = [weakref.ref(module) for module in found.values()]
        self._seen = self._now()
        self._has_changed = self._is_due = self._changes_unseen = False
        self._rests_in, self._quiet = [], 0
        self.is_active = bool(self._owners) and self._has_peers
        if self.is_active:
            self._agree()
            self._values = self._digest()
            self._is_due = differ(self._transport.exchange, [self._values])

    def note(self) -> None:
        """A forward has ended: notes whether a buffer has changed since the last time."""
        if not self.is_active:
            return
        now, modes = self._now(), [owner.training for owner in self._live_owners()]
        trains = any(modes)
        if modes != self._modes:
            self._modes, self._quiet = modes, 0
        if not _are_same(now, self._seen):
            self._seen, self._values, self._quiet, self._has_changed = now, None, 0, True
        elif trains:
            self._has_changed |= self._changes_unseen or self._has_other_values()
        if trains:
            self._asked = False

    def _has_other_values(self) -> bool:
        """Whether values may have changed, although no version has. [Note: changes that no version counts]"""
        self._quiet += 1
        if self._quiet.bit_count() > 1:
            return False
        before, self._values = self._values, self._digest()
        self._changes_unseen = before not in (None, self._values)
        return before != self._values

    def bits(self) -> list[bool]:
        """What this rank tells the others: whether a buffer has changed, and whether one has another shape or dtype."""
        return [self._has_changed, self._layout() != self._agreed] if self.is_active else []

    def told(self, union: Sequence[bool]) -> None:
        """What all ranks have told one another."""
        if self.is_active:
            has_changed, has_other_layout = union
            self._asked, self._has_changed = True, False
            self._rests_in = [] if has_changed else self._modes
            self._is_due |= has_changed
            if has_other_layout:
                self._agreed = ()

    def must_ask(self, *, waits: bool) -> bool:
        """Whether a forward in training mode ran and no backward has carried the notes since.

        If forwards wait for their backward: whether something could be sent, were their graphs gone.
        """
        if waits:
            return self._is_due or (not self._asked and self._rests_in != self._modes)
        return not self._asked

    def broadcast(self) -> None:
        """Sends rank 0's buffers if any has changed on any rank. A collective.

        Communicates their bytes from rank 0 to each peer. Waits.

        Raises:
            DisagreementError: A buffer got another shape or dtype on some ranks.
        """
        if not self._is_due:
            return
        self._is_due = False
        if not self._agreed:
            self._agree()
        if any(buffer.numel() for buffer, _ in self._now()):
            self._send()
        self._seen = self._now()
        if self._values is not None:
            self._values = self._digest()

    @torch.no_grad()
    def _send(self) -> None:
        buffers = [buffer for buffer, _ in self._now()]
        sent = torch.cat([_bytes(buffer) for buffer in buffers])
        whole = sent.clone()
        route = [(number, sent.numel()) for number in range(len(self._transport.axes))]
        pieces = Segment(whole, sent.numel(), sent.numel(), route)
        self._transport.all_gather([pieces], "buffers of rank 0").wait()
        if not torch.equal(whole, sent):
            parts = torch.split(whole, [buffer.nbytes for buffer in buffers])
            for buffer, part in zip(buffers, parts, strict=True):
                buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))

    def _agree(self) -> None:
        self._agreed = self._layout()
        agree(
            self._transport.exchange,
            "buffers",
            self._agreed,
            why="a forward would write rank 0's buffers over those of other ranks",
            fix='build the same module on every rank, or shard with buffers="local"',
        )

    def _layout(self) -> tuple[str, ...]:
        return tuple(f"{str(b.dtype).removeprefix('torch.')}{list(b.shape)}" for b, _ in self._now())

    def _live_owners(self) -> list[nn.Module]:
        return [owner for reference in self._owners if (owner := reference()) is not None]

    def _now(self) -> list[tuple[Tensor, int]]:
        """The buffers, with the versions that they have now."""
        buffers = (buffer for owner in self._live_owners() for buffer in _buffers(owner))
        return [(buffer, -1 if buffer.is_inference() else buffer._version) for buffer in buffers]

    def _digest(self) -> str:
        parts = [_bytes(buffer).cpu() for buffer, _ in self._now()]
        return xxh3_128_hexdigest(torch.cat(parts).numpy().data) if parts else ""


def _buffers(module: nn.Module) -> list[Tensor]:
    """The buffers of a module that can be broadcast: dense ones, in memory, of this rank alone."""
    return [buffer for buffer in module._buffers.values() if buffer is not None and _is_plain(buffer)]


def _is_plain(buffer: Tensor) -> bool:
    return buffer.layout is torch.strided and not buffer.is_meta and not isinstance(buffer, DTensor)


def _are_same(some: Sequence[tuple[Tensor, int]], others: Sequence[tuple[Tensor, int]]) -> bool:
    """Whether these are the same tensors at the same versions."""
    return len(some) == len(others) and all(a is b and i == j for (a, i), (b, j) in zip(some, others, strict=True))


def _bytes(buffer: Tensor) -> Tensor:
    flat = buffer.detach().contiguous().view(-1)
    return (torch.view_as_real(flat).view(-1) if flat.is_complex() else flat).view(torch.uint8)
