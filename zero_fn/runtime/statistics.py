"""Buffers, such as the statistics of BatchNorm: all ranks have those of rank 0, or each rank keeps its own.

[Note: when buffers are broadcast] DDP broadcasts the buffers of rank 0 before every forward. Here a forward broadcasts them
only if an earlier forward has changed a buffer on any rank. Each rank notes whether its forwards change one; the note travels
with the control message that begins every backward. A forward in training mode that no backward followed is asked about by a
message of its own. So a model whose buffers never change sends nothing.

Nothing is broadcast while graphs of earlier forwards wait for their backward, which may need the values; nor inside
`accumulate` after its first forward; nor while `functional_call` has other tensors in place.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase

from zero_fn.transport.agreement import agree, content_digest, differ
from zero_fn.transport.links import Links
from zero_fn.transport.segment import Segment

__all__ = ["Statistics"]


class Statistics:
    """The buffers of one transformed module.

    Attributes:
        is_active: Whether buffers are broadcast at all: the module has some, and there are ranks to send them to.
    """

    def __init__(self, transport: Links, *, are_local: bool) -> None:
        self._transport, self._has_peers = transport, transport.size > 1 and not are_local
        self._anchors: list[Callable[[], nn.Module | None]] = []
        self._owners: list[Callable[[], nn.Module | None]] = []
        self._seen: list[tuple[Tensor, int]] = []  # all buffers, with their versions
        self._has_changed = False  # on this rank, since the ranks last told one another
        self._is_due = False  # a buffer has changed on some rank since the last broadcast
        self._asked = True  # nothing can have changed since the ranks told one another
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
        self._has_changed = self._is_due = False
        self.is_active = bool(self._owners) and self._has_peers
        if self.is_active:
            self._agree()
            self._is_due = differ(self._transport.exchange, [f"{content_digest(buffer)}" for buffer, _ in self._seen])

    def note(self) -> None:
        """A forward has ended: notes whether a buffer has changed since the last time."""
        owners = self._live_owners()
        now = _versions(owners)
        if not _are_same(now, self._seen) or any(map(_updates_unseen, owners)):
            self._seen, self._has_changed = now, True
        if any(owner.training for owner in owners):
            self._asked = False

    def bits(self) -> list[bool]:
        """What this rank tells the others: whether a buffer has changed, and whether one has another shape or dtype."""
        return [self._has_changed, self._layout() != self._agreed] if self.is_active else []

    def told(self, union: Sequence[bool]) -> None:
        """What all ranks have told one another."""
        if self.is_active:
            has_changed, has_other_layout = union
            self._asked, self._has_changed = True, False
            self._is_due |= has_changed
            if has_other_layout:
                self._agreed = ()

    @property
    def must_ask(self) -> bool:
        """Whether a forward in training mode ran and no backward has carried the notes since."""
        return self.is_active and not self._asked

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
        buffers = [buffer for buffer, _ in self._now() if buffer.numel()]
        if buffers:
            self._send(buffers)
        self._seen = self._now()

    @torch.no_grad()
    def _send(self, buffers: list[Tensor]) -> None:
        sent = torch.cat([_bytes(buffer) for buffer in buffers])
        whole = sent.new_empty(sent.numel() * (self._transport.size if self._transport.pads else 1))
        whole[: sent.numel()] = sent
        route = [(number, sent.numel()) for number in range(len(self._transport.axes))]
        pieces = Segment(whole, sent.numel(), sent.numel(), route)
        self._transport.all_gather([pieces], "buffers of rank 0").wait()
        if not torch.equal(whole[: sent.numel()], sent):
            parts = torch.split(whole[: sent.numel()], [buffer.nbytes for buffer in buffers])
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
        return _versions(self._live_owners())


def _versions(owners: Sequence[nn.Module]) -> list[tuple[Tensor, int]]:
    """The buffers of modules, with the versions that they have now."""
    buffers = (buffer for owner in owners for buffer in _buffers(owner))
    return [(buffer, -1 if buffer.is_inference() else buffer._version) for buffer in buffers]


def _buffers(module: nn.Module) -> list[Tensor]:
    """The buffers of a module that can be broadcast: dense ones, in memory, of this rank alone."""
    return [buffer for buffer in module._buffers.values() if buffer is not None and _is_plain(buffer)]


def _is_plain(buffer: Tensor) -> bool:
    return buffer.layout is torch.strided and not buffer.is_meta and not isinstance(buffer, DTensor)


def _are_same(some: Sequence[tuple[Tensor, int]], others: Sequence[tuple[Tensor, int]]) -> bool:
    """Whether these are the same tensors at the same versions."""
    return len(some) == len(others) and all(a is b and i == j for (a, i), (b, j) in zip(some, others, strict=True))


def _updates_unseen(module: nn.Module) -> bool:
    """Whether it is a BatchNorm without a counter, whose kernel writes the statistics and leaves their version (2.13)."""
    return (
        isinstance(module, _NormBase)
        and module.training
        and module.track_running_stats
        and module.num_batches_tracked is None
    )


def _bytes(buffer: Tensor) -> Tensor:
    flat = buffer.detach().contiguous().view(-1)
    return (torch.view_as_real(flat).view(-1) if flat.is_complex() else flat).view(torch.uint8)
