"""Buffers, such as the statistics of BatchNorm: all ranks have those of rank 0,
or each rank keeps its own.

[Note: when buffers are broadcast] As under DDP, rank 0's are sent before a forward, if the forward
before it changed any. Whether forwards do is found once for each combination of modes (training,
evaluation) of the modules with buffers: the first such forward compares all values before and
after, and one message tells the ranks. So a model whose buffers never change sends nothing, and one
with BatchNorm sends them before each forward that follows one in training mode.

Nothing is broadcast while some rank holds a graph that waits for its backward, which may need the
values; nor inside `accumulate` after its first forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from xxhash import xxh3_128_hexdigest

from zero_fn.errors import warn_once
from zero_fn.transport.agree import agree, differ
from zero_fn.transport.line import Line
from zero_fn.transport.segment import Segment

__all__ = ["ModuleBuffers"]

_Modes = tuple[bool, ...]


class ModuleBuffers:
    """The buffers of one transformed module."""

    def __init__(self, transport: Line, *, are_local: bool) -> None:
        self._transport = transport
        self._has_peers = transport.size > 1 and not are_local
        self._anchors: list[Callable[[], nn.Module | None]] = []
        self._owners: list[Callable[[], nn.Module | None]] = []
        # Whether forwards in these modes change a buffer on any rank.
        self._change: dict[_Modes, bool] = {}
        # The same on this rank alone, where the ranks have not told one another yet.
        self._untold: dict[_Modes, bool] = {}
        self._before = ""  # a digest of all buffers before the forward that runs in such modes
        self._versions: list[tuple[int, int]] = []  # ... in modes whose forwards change none
        self.is_due = False  # a buffer may have changed on some rank since the last broadcast
        # Whether buffers are broadcast at all: there are some, and ranks to send them to.
        self.is_active = False

    def watch(self, anchor: nn.Module) -> None:
        """Adds the buffers of a module and of everything below it."""
        self._anchors.append(weakref.ref(anchor))

    def begin(self) -> None:
        """Finds the buffers, compares their layout over ranks,
        and lets the first broadcast send them if values differ.

        For the first forward, and the first after loading.

        Communicates 32 bytes to each peer if there are buffers.

        Raises:
            DisagreementError: Ranks hold different buffers.
        """
        found: dict[int, nn.Module] = {}
        for reference in self._anchors:
            anchor = reference()
            if anchor is not None:
                found.update(
                    (id(module), module) for module in anchor.modules() if _buffers(module)
                )
        self._owners = [weakref.ref(module) for module in found.values()]
        self._change = {}
        self._untold = {}
        self.is_due = False
        self.is_active = bool(self._owners) and self._has_peers
        if self.is_active:
            agree(
                self._transport,
                "buffers",
                [f"{str(b.dtype).removeprefix('torch.')}{list(b.shape)}" for b in self._now()],
                why="a forward would write rank 0's buffers over those of other ranks",
                fix='build the same module on every rank, or shard with buffers="local"',
            )
            self.is_due = differ(self._transport, [self._digest()])

    def note_begun(self) -> None:
        """A forward begins."""
        if self.is_active:
            if (change := self._change.get(self._modes())) is None:
                self._before = self._digest()
            elif not change:
                self._versions = self._versions_now()

    def note_ended(self) -> None:
        """A forward has ended."""
        if self.is_active:
            modes = self._modes()
            if modes in self._change:
                self.is_due |= self._change[modes]
                if not self._change[modes] and self._versions != self._versions_now():
                    # Of this rank alone: no message is due in which the others could be told.
                    warn_once(
                        "A forward changed a buffer that the first forwards in this mode did not: "
                        "each rank keeps its own.",
                        fix="change it from the first forward on, "
                        "or model.load_state_dict(model.state_dict()), after which "
                        'forwards are looked at again; buffers="local" if ranks are to differ',
                    )
            else:
                self._untold[modes] = (
                    self._untold.get(modes, False) or self._before != self._digest()
                )

    def note_block(self) -> None:
        """A block has ended in which any rank may have run any forwards."""
        self.is_due |= any(self._change.values()) or not self._change

    @property
    def may_communicate(self) -> bool:
        """Whether the next forwards in the modes of now may tell the
        ranks something, or send buffers."""
        return self.is_active and (
            self.is_due or bool(self._untold) or self._change.get(self._modes()) is not False
        )

    def to_tell(self) -> tuple[list[bool], str]:
        """What the ranks have to tell one another before the next forward:
        bits, and what they are about."""
        return list(self._untold.values()), str(list(self._untold))

    def told(self, union: Sequence[bool]) -> None:
        """What all ranks have told one another."""
        self._change.update(zip(self._untold, union, strict=True))
        self._untold = {}
        self.is_due |= any(union)

    @torch.no_grad()
    def broadcast(self) -> None:
        """Sends rank 0's buffers: their bytes from rank 0 to each peer. Waits."""
        self.is_due = False
        buffers = self._now()
        if not any(buffer.numel() for buffer in buffers):
            return
        sent = torch.cat([_bytes(buffer) for buffer in buffers])
        whole = sent.clone()
        later = [(number, sent.numel()) for number in range(1, len(self._transport.axes))]
        pieces = Segment(whole, sent.numel(), sent.numel(), later=later)
        self._transport.all_gather([pieces], "buffers of rank 0").wait()
        if not torch.equal(whole, sent):
            parts = torch.split(whole, [buffer.nbytes for buffer in buffers])
            for buffer, part in zip(buffers, parts, strict=True):
                buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))

    def _live_owners(self) -> list[nn.Module]:
        return [owner for reference in self._owners if (owner := reference()) is not None]

    def _modes(self) -> _Modes:
        """For each module with buffers, whether it is in training mode."""
        return tuple([owner.training for owner in self._live_owners()])

    def _now(self) -> list[Tensor]:
        return [buffer for owner in self._live_owners() for buffer in _buffers(owner)]

    def _versions_now(self) -> list[tuple[int, int]]:
        return [
            (id(buffer), 0 if buffer.is_inference() else buffer._version) for buffer in self._now()
        ]

    def _digest(self) -> str:
        parts = [_bytes(buffer).cpu() for buffer in self._now()]
        return xxh3_128_hexdigest(torch.cat(parts).numpy().data) if parts else ""


def _buffers(module: nn.Module) -> list[Tensor]:
    """The buffers of a module that can be broadcast: dense ones, in memory, of this rank alone."""
    return [
        buffer for buffer in module._buffers.values() if buffer is not None and _is_plain(buffer)
    ]


def _is_plain(buffer: Tensor) -> bool:
    return buffer.layout is torch.strided and not buffer.is_meta and not isinstance(buffer, DTensor)


def _bytes(buffer: Tensor) -> Tensor:
    flat = buffer.detach().contiguous().view(-1)
    return (torch.view_as_real(flat).view(-1) if flat.is_complex() else flat).view(torch.uint8)
