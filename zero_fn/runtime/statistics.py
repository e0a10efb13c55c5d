"""Buffers, such as the statistics of BatchNorm: rank 0's are those of all ranks, or each rank keeps its own.

[Note: when buffers are broadcast] DDP sends the buffers of rank 0 before every forward. Here only those travel that
some forward has changed, and only once they have: each rank notes which modules changed theirs, the notes travel with the
control message that begins every backward, and the next forward sends what any rank had noted. A forward in training
mode that no backward followed is asked about by a message of its own. So a model whose buffers never change sends nothing.

While graphs of earlier forwards wait for their backward nothing is sent, for they may need the values; nor inside
`accumulate` after its first forward; nor while `functional_call` has other tensors in place.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase

from zero_fn.transport.agreement import agree, content_digest, differ
from zero_fn.transport.links import Links
from zero_fn.transport.segment import Segment

__all__ = ["Statistics"]

_Version = tuple[tuple[Tensor, int], ...]


class Statistics:
    """The buffers of one transformed module.

    Attributes:
        is_active: Whether they are broadcast at all: the module has some, and there are ranks to send them to.
    """

    def __init__(self, transport: Links, *, are_local: bool) -> None:
        self._transport, self._has_peers = transport, transport.size > 1 and not are_local
        self._anchors: list[Callable[[], nn.Module | None]] = []
        self._owners: list[Callable[[], nn.Module | None]] = []
        self._seen: list[_Version] = []
        self._changed: list[bool] = []  # on this rank, since the ranks last told one another
        self._due: list[bool] = []  # on any rank, since the last broadcast
        self._asked = True  # nothing can have changed since the ranks told one another
        self._agreed: tuple[str, ...] = ()
        self.is_active = False

    def watch(self, anchor: nn.Module) -> None:
        """Adds the buffers of a module and of everything below it."""
        self._anchors.append(weakref.ref(anchor))

    def begin(self) -> None:
        """The first forward, and the first after loading: finds the buffers, compares their layout over ranks and sends them
        where values differ.

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
        self._changed = [False] * len(self._owners)
        self._due = [False] * len(self._owners)
        self._seen = [_version(owner()) for owner in self._owners]
        self.is_active = bool(self._owners) and self._has_peers
        if not self.is_active:
            return
        self._agree()
        values = [f"{content_digest(buffer)}" for buffer in self._all()]
        if differ(self._transport.exchange, values):
            self._due = [True] * len(self._owners)

    def note(self) -> None:
        """A forward has ended: notes which modules changed their buffers since the last time."""
        for i, reference in enumerate(self._owners):
            module = reference()
            if module is None:
                continue
            version = _version(module)
            if not _same(version, self._seen[i]) or _updates_unseen(module):
                self._seen[i] = version
                self._changed[i] = True
            if module.training:
                self._asked = False

    def bits(self) -> list[bool]:
        """What this rank tells the others: which modules changed, and whether the layout did."""
        return [*self._changed, self._layout() != self._agreed] if self.is_active else []

    def told(self, union: Sequence[bool]) -> None:
        """What all ranks have told one another."""
        if not self.is_active:
            return
        self._asked = True
        self._changed = [False] * len(self._changed)
        self._due = [due or bit for due, bit in zip(self._due, union, strict=False)]
        if union[-1]:
            self._agreed = ()

    @property
    def must_ask(self) -> bool:
        """Whether a forward in training mode ran and no backward has carried the notes since."""
        return self.is_active and not self._asked

    def broadcast(self) -> None:
        """Sends rank 0's buffers of the modules that changed theirs. A collective, in which all ranks send the same.

        Communicates their bytes from rank 0 to each peer. Waits.

        Raises:
            DisagreementError: A buffer got another shape or dtype on some ranks.
        """
        if not any(self._due):
            return
        if not self._agreed:
            self._agree()
        owners = [(i, reference()) for i, reference in enumerate(self._owners) if self._due[i]]
        self._due = [False] * len(self._due)
        chosen = [(i, buffer) for i, module in owners if module is not None for buffer in _buffers(module)]
        buffers = [buffer for _, buffer in chosen if buffer.numel()]
        with torch.no_grad():
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
        for i, module in owners:
            self._seen[i] = _version(module)

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
        return tuple(f"{str(buffer.dtype).removeprefix('torch.')}{list(buffer.shape)}" for buffer in self._all())

    def _all(self) -> Iterator[Tensor]:
        for reference in self._owners:
            module = reference()
            if module is not None:
                yield from _buffers(module)


def _buffers(module: nn.Module) -> list[Tensor]:
    """The buffers that can be sent: dense ones, in memory, of this rank alone."""
    return [buffer for buffer in module._buffers.values() if buffer is not None and _is_plain(buffer)]


def _is_plain(buffer: Tensor) -> bool:
    return buffer.layout is torch.strided and not buffer.is_meta and not isinstance(buffer, DTensor)


def _version(module: nn.Module | None) -> _Version:
    if module is None:
        return ()
    return tuple((buffer, -1 if buffer.is_inference() else buffer._version) for buffer in _buffers(module))


def _same(one: _Version, other: _Version) -> bool:
    return len(one) == len(other) and all(a is b and i == j for (a, i), (b, j) in zip(one, other, strict=True))


def _updates_unseen(module: nn.Module) -> bool:
    """BatchNorm without a counter: its kernel writes the statistics and leaves their version as it is (2.13)."""
    return (
        isinstance(module, _NormBase)
        and module.training
        and module.track_running_stats
        and module.num_batches_tracked is None
    )


def _bytes(buffer: Tensor) -> Tensor:
    flat = buffer.detach().contiguous().view(-1)
    return (torch.view_as_real(flat).view(-1) if flat.is_complex() else flat).view(torch.uint8)
