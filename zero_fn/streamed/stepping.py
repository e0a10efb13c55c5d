"""Steps of a streamed optimizer: its own arithmetic on the pieces of each chunk,
and what becomes of one that fails.

[Note: where a step is computed] A step is computed where the states are: on the host if they rest
in another tier than the memory of an accelerator, as in ZeRO-Offload (Ren et al. 2021, section
4.1). States are the larger part, so gradients and parameters on the device are copied to the host,
and the parameters back; what rests in a tier is on the host already.

[Note: a step that failed half-way] Chunks before the failure are stepped, chunks after it are not,
and the rest of a training loop cannot know. So the optimizer refuses to step until its states are
loaded again, on every rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_fn.errors import StateError
from zero_fn.runtime.attributes import attributes_of
from zero_fn.runtime.bfloat16_step import Widened, rounding_of
from zero_fn.runtime.holding import numbering_of
from zero_fn.runtime.slot import meshes_of
from zero_fn.storage import NOTHING, InMemory
from zero_fn.streamed.fused_adam import CodesInPlace, steps_in_one_pass, takes_codes
from zero_fn.streamed.inner_optimizer import raw_step, stand_in
from zero_fn.streamed.pieces import Chunk, ParameterPiece
from zero_fn.streamed.pipeline import ChunkPipeline, Waiting
from zero_fn.streamed.states import States
from zero_fn.streamed.tier_places import records_of
from zero_fn.streamed.windows import Window, Windows
from zero_fn.tiers.record import Record
from zero_fn.tiers.tier_tensor import TierTensor, in_memory
from zero_fn.transport.agree import on_all_ranks
from zero_fn.values.dtensors import local_of
from zero_fn.values.strides import in_strides

__all__ = ["Steps"]

_group = attrgetter("group")


class Steps:
    """The steps of an optimizer."""

    def __init__(self, inner: Optimizer, *, waits: bool) -> None:
        # Whether parameters in tiers are stepped when they are used next (`finish="forward"`).
        self.waits = waits
        self.failed: str | None = None  # why the last step stopped half-way; None if it did not
        # The part of the last step that waits; None if nothing does.
        self.waiting: Waiting | None = None
        # Whether the next step goes from the last chunk to the first. [Note: back and forth]
        self.is_backwards = False
        self._inner = inner

    def __del__(self) -> None:
        """Parameters outlive their optimizer.

        Nothing is stepped here: the garbage collector may call it at any moment.
        """
        if self.waiting is not None:
            self.waiting.abandon()

    def take(self, states: States) -> None:
        """Steps the parameters that have gradients."""
        # By id, because torch takes longer for a hash.
        grads = {id(p): p.grad for p in states.known if p.grad is not None}
        chunks = [
            chunk
            for chunk in states.chunks
            if any(id(cut.parameter) in grads for cut in chunk.cuts)
        ]
        for chunk in chunks:
            states.require_as_planned(chunk)
        now: list[Chunk] = []
        later: list[Chunk] = []
        of_later: list[Sequence[Record]] = []
        for chunk in chunks:
            parameters = [cut.parameter for cut in chunk.cuts]
            stepped = [tensor for p in parameters if id(p) in grads for tensor in (p, grads[id(p)])]
            records = records_of([*stepped, *parameters])
            for record in records:
                # Two steps of one parcel at once would each write back what the other has changed.
                record.settle()
            if self.waits and all(map(_is_in_a_tier, stepped)):
                later.append(chunk)
                of_later.append(records)
            else:
                now.append(chunk)
        step = _Step(self._inner)
        try:
            order = now[::-1] if self.is_backwards else now  # [Note: back and forth]
            ChunkPipeline([states, Windows(states.ring, grads)], order, step).run()
            self.is_backwards = not self.is_backwards
            if later:
                self.waiting = Waiting([states, Windows(states.ring, grads)], later, step, of_later)
        except BaseException:
            if step.count:
                self.failed = f"the step failed after {step.count} of {len(chunks)} chunks"
            raise

    def tried(self, states: States) -> dict[Tensor, dict[str, Tensor]]:
        """The largest values of each block of divided states after this step, on this rank; of none
        of a parameter without a gradient. [Note: tried first]"""
        step = _Step(self._inner)
        found = {parameter: dict[str, Tensor]() for parameter in states.divided}
        for chunk in states.chunks:
            if any(cut.parameter in found for cut in chunk.cuts):
                states.require_as_planned(chunk)
        for parameter, cuts in states.divided.items():
            if parameter.grad is None:
                continue
            value = in_memory(local_of(parameter))
            grad = in_strides(in_memory(local_of(parameter.grad)), value.stride())
            for cut, device in cuts:
                after = step.tried(cut, value, grad, device)
                cut.note_largest(found[parameter], after)
        return found

    def finish(self) -> None:
        """Finishes the part of the last step that waits, on this rank."""
        if self.waiting is None:
            return
        try:
            self.waiting.finish()
        except BaseException:
            self.failed = self.failed or f"the step failed after {self.waiting.progress}"
            raise
        self.waiting = None

    def on_all_ranks(self, parameters: Sequence[Tensor], act: Callable[[], None]) -> None:
        """Takes a part of a step on all ranks. If it fails on one, no rank may step again."""
        try:
            on_all_ranks(meshes_of(parameters), act, "A step of a streamed optimizer")
        except Exception:
            if meshes_of(parameters):
                self.failed = self.failed or "it failed on one rank, and others have stepped"
            raise

    def finish_on_all_ranks(self, parameters: Sequence[Tensor]) -> None:
        """Finishes the part of the last step that waits, on all ranks;
        all raise if it fails on one."""
        if self.waits:
            self.on_all_ranks(parameters, self.finish)

    def require_whole(self, verb: str) -> None:
        """Refuses what needs all parameters after the same step."""
        if self.failed is not None:
            raise StateError(
                f"{verb} of an optimizer whose step failed half-way.",
                failed=self.failed,
                why="some parameters are one step ahead of the others",
                fix="load the last checkpoint: model.load_state_dict(...); "
                "optimizer.load_state_dict(...)",
            )


def _is_in_a_tier(tensor: Tensor) -> bool:
    local = local_of(tensor)
    return isinstance(local, TierTensor) and local.moved is None


class _Step:
    """One step under way: called for each chunk, it runs the arithmetic of the inner optimizer."""

    def __init__(self, inner: Optimizer) -> None:
        """Begins a step of the optimizer whose arithmetic it is."""
        self.count = 0  # number of chunks that were updated, at least in part
        self._inner = inner
        self._room = torch.empty(0, device="cpu")
        # The options of now, whatever is in the groups, and in the tensors in them,
        # when a chunk is stepped.
        self._options = [
            {
                name: value.clone() if isinstance(value, Tensor) else value
                for name, value in group.items()
            }
            for group in inner.param_groups
        ]

    def __call__(self, chunk: Chunk, room: InMemory, window: Window) -> None:
        """Steps the parameters of one chunk."""
        self.count += 1
        states = room.memory
        rooms = {}
        if window.record is not None and chunk.parcel is not None and window.copy.numel():
            rooms = window.record.begin_copy(chunk.parcel, window.copy)
        codes = CodesInPlace() if states.device.type == "cpu" and takes_codes(self._inner) else None
        own = {
            cut: cut.states(states) if codes is None else codes.of(cut, states)
            for cut in window.values
        }
        stepping, stepped, widened = self._arranged(window.values, window.grads, own, states.device)
        sends = _sends(stepped, rooms) if states.device.type == "cpu" else {}
        if not steps_in_one_pass(stepping, sends, codes.scales if codes is not None else {}):
            sends = {}
            if codes is not None and codes.scales:
                own = {cut: cut.states(states) for cut in stepped}
                stepping, stepped, widened = self._arranged(
                    window.values, window.grads, own, states.device
                )
            for piece in stepped.values():
                _widen(piece)
            raw_step(stepping)
        for cut, piece in stepped.items():
            value, after = window.values[cut], stepping.state.get(piece, {})
            if cut in widened:
                after = {**after, **widened[cut].round(piece, value)}
            elif value.device != states.device:
                value.copy_(piece)
            cut.keep(states, after)
        if window.record is not None and chunk.parcel is not None and rooms:
            sent = {cut.in_parcel for cut, piece in stepped.items() if piece in sends}
            left = {begin: room for begin, room in rooms.items() if begin not in sent}
            window.record.fill_copy(chunk.parcel, window.parcel, left)

    def tried(
        self, cut: ParameterPiece, value: Tensor, grad: Tensor, device: torch.device
    ) -> Mapping[str, Any]:
        """The states of a piece after this step, of which nothing else changes.
        [Note: tried first]"""
        value, grad = (cut.of(whole).to(device, copy=True) for whole in (value, grad))
        own = {
            name: each.clone() if isinstance(each, Tensor) else each
            for name, each in cut.states(NOTHING).items()
        }
        stepping, stepped, _ = self._arranged({cut: value}, {cut: grad}, {cut: own}, device)
        _widen(stepped[cut])
        raw_step(stepping)
        found: Mapping[str, Any] = stepping.state[stepped[cut]]
        return found

    def _arranged(
        self,
        values: Mapping[ParameterPiece, Tensor],
        grads: Mapping[ParameterPiece, Tensor],
        own: Mapping[ParameterPiece, dict[str, Any]],
        device: torch.device,
    ) -> tuple[Optimizer, dict[ParameterPiece, nn.Parameter], dict[ParameterPiece, Widened]]:
        """The optimizer over pieces with these states, what it updates in place of the user's
        parameters, and which of these are to be rounded."""
        state: defaultdict[Any, Any] = defaultdict(dict)
        groups: list[dict[str, Any]] = []
        stepped: dict[ParameterPiece, nn.Parameter] = {}
        widened: dict[ParameterPiece, Widened] = {}
        numels = [cut.piece.numel for cut in values if rounding_of(cut.parameter) is not None]
        room = self._room_of(sum(numels), device)
        for number, cuts in groupby(sorted(values, key=_group), key=_group):
            members = []
            for cut in cuts:
                value = values[cut].to(device)
                if rounding_of(cut.parameter) is not None:
                    own_room, room = room[: value.numel()], room[value.numel() :]
                    numbering = numbering_of(cut.parameter)
                    widened[cut] = Widened(
                        cut.parameter, value, own[cut], numbering, cut.piece.start, own_room
                    )
                    value = widened[cut].values
                piece = stepped[cut] = _stand_in(cut, value, grads[cut].to(device))
                members.append(piece)
                if own[cut]:
                    state[piece] = own[cut]
            groups.append({**self._options[number], "params": members})
        return stand_in(self._inner, groups, state), stepped, widened

    def _room_of(self, numel: int, device: torch.device) -> Tensor:
        """Memory for values in float32, shared by all chunks:
        to get new memory takes longer than to step them."""
        if self._room.numel() < numel or self._room.device != device:
            self._room = torch.empty(numel, device=device)
        return self._room


def _stand_in(cut: ParameterPiece, value: Tensor, grad: Tensor) -> nn.Parameter:
    """The parameter that the optimizer updates in place of the user's: the piece,
    with the piece of the gradient."""
    piece = nn.Parameter(value, requires_grad=cut.parameter.requires_grad)
    vars(piece).update(attributes_of(cut.parameter))
    if grad.dtype != piece.dtype:
        piece.grad_dtype = grad.dtype
    piece.grad = grad
    return piece


def _widen(piece: nn.Parameter) -> None:
    """Gives a piece its gradient in its own dtype: steps of torch take no other."""
    grad = piece.grad
    if grad is not None and grad.dtype != piece.dtype:
        piece.grad = None
        piece.grad_dtype = piece.dtype
        piece.grad = grad.to(piece.dtype)


def _sends(
    stepped: Mapping[ParameterPiece, nn.Parameter], rooms: Mapping[int, Tensor]
) -> dict[Tensor, Tensor]:
    """The compute copies in bfloat16, which the kernel writes beside the parameters
    that it steps, by parameter."""
    found: dict[Tensor, Tensor] = {}
    for cut, piece in stepped.items():
        room = rooms.get(cut.in_parcel) if cut.in_parcel is not None and cut.piece.numel else None
        if room is not None and room.dtype == torch.bfloat16:
            found[piece] = cut.laid(room)
    return found
