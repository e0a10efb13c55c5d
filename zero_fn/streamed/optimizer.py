"""`streamed(optimizer, tier)`: an elementwise optimizer whose states are offloaded to another tier.

A step visits the parameters chunk by chunk. The states of a chunk are views of a buffer; the
optimizer's own `step` runs on the pieces of parameters in the chunk, which are plain tensors over
the memory of the parameters; then the buffer is written back. So the arithmetic is the optimizer's
own, and each element meets the same operations as without streaming.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Literal, Protocol, TypeVar, overload, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero_fn.advice import say_if_alone, say_if_rounded, say_if_slow
from zero_fn.errors import LayoutError, PlacementError, StateError, StorageError, TierError
from zero_fn.runtime.bfloat16_step import as_kept
from zero_fn.runtime.elementwise import TORCH_ELEMENTWISE
from zero_fn.runtime.optimizers import take_over_states
from zero_fn.runtime.slot import is_cut, meshes_of
from zero_fn.runtime.uncompiled import uncompiled
from zero_fn.streamed.fused_adam import arithmetic_of, say_if_one_thread
from zero_fn.streamed.inner_optimizer import (
    hand_over,
    require_not_streamed,
    require_streamable,
    stand_in,
)
from zero_fn.streamed.pieces import BUFFER_NBYTES, Planner
from zero_fn.streamed.shared_blocks import agree_on_largest, divided_among
from zero_fn.streamed.states import States, loaded
from zero_fn.streamed.stepping import Steps
from zero_fn.streamed.tier_places import follow
from zero_fn.transport.agree import on_all_ranks
from zero_fn.values.dtensors import rest_gradient
from zero_fn.values.tiers import Cpu, Tier, nbytes_of_text

__all__ = ["Streamed", "TakesTier", "planned", "streamed"]


@runtime_checkable
class TakesTier(Protocol):
    """An optimizer that moves its states itself: `zf.by_owner(...)`."""

    def with_states_in(self, tier: Tier | None, **options: object) -> Any: ...


T = TypeVar("T", bound=TakesTier)


@overload
def streamed(optimizer: T, tier: Tier | None = None) -> T: ...
@overload
def streamed(
    optimizer: Optimizer,
    tier: Tier | None = None,
    *,
    fraction: float = 1.0,
    buffer: int | str = BUFFER_NBYTES,
    finish: Literal["step", "forward"] = "step",
    elementwise: bool = False,
) -> Streamed: ...
def streamed(
    optimizer: Any,
    tier: Tier | None = None,
    *,
    fraction: float = 1.0,
    buffer: int | str = BUFFER_NBYTES,
    finish: Literal["step", "forward"] = "step",
    elementwise: bool = False,
) -> Any:
    """Offloads the states of an optimizer to host memory or a disk,
    and returns an optimizer that steps them from there.

        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
        optimizer = zf.streamed(optimizer, zf.nvme("/local_nvme"))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)

    The updates are those of `optimizer`, to the bit. States on `zf.nvme` pass through at most four
    buffers, which are read ahead and written back while others are computed; they are never in
    memory together. States on `zf.cpu` rest in one range of host memory of exact size. Where the
    model computes on the CPU, that is its own memory, and nothing is copied.

    Adam and AdamW with `fused=True` are stepped in one pass by a kernel in C, compiled at first
    use, which gives the bits of torch's step. It also takes gradients in bfloat16
    (`parameter.grad_dtype`), as if cast before. Where it cannot be used, torch does the step;
    `print(optimizer)` says which, and why. Without `fused` a step takes several times as long,
    which a warning says once; `fused=False` silences it.

    With `finish="forward"`, `step()` returns before offloaded parameters and gradients
    (`zf.offload`) are stepped. They are stepped unit by unit (a unit is a wrap group), each unit
    before its parameters are read next: while the device computes a unit, the host steps the next
    ones, and a disk reads and writes beside it. Any read or write of parameters, gradients or
    states completes the step first. Learning rates and options are those at the call of `step()`,
    so the numbers are the same.

    Communicates, over sharded or replicated parameters: a byte per rank at the end of a step, by
    which all ranks learn that one has failed; with `finish="forward"` one more at its beginning,
    for the step before.

    Args:
        optimizer: One of torch.optim that treats every element alone (Adam, AdamW, SGD, Adagrad,
            RMSprop, Adadelta, Adamax, NAdam, RAdam, ASGD, Rprop); for another class see
            `elementwise`. States that it has are moved.
        tier: `zf.nvme(path)` or `zf.cpu()`. None: for each parameter the tier of
            `zf.offload(model, optim=tier)`; the states of other parameters stay on the device. Of
            all of them, if gradients rest in another dtype than parameters (`precision(grads=)`),
            or parameters are rounded (`precision(round=)`): both are widened buffer by buffer.
        fraction: The part of the states, in bytes rounded to whole buffers, that is in the tier;
            the rest stays on the device. Buffers of both kinds take turns, so that transfers run
            beside computation (twin-flow).
        buffer: Bytes of a buffer, as a number or as text ("64MiB").
            Larger parameters pass through it in pieces.
        finish: When a step is finished: "step", when `step()` returns; or "forward",
            before what it steps is used next.
        elementwise: Your word that an optimizer of another class,
            also one derived from a class of torch, does this:

            - A new value is computed from the old value, the gradient and the states of that
              element, and the options of its group: from no norm, mean, sum, maximum or shape of
              a tensor (how many dims it has may be looked at), and from nothing of other
              elements or parameters.
            - Everything it keeps is in `self.state[parameter]`: tensors of the parameter's shape,
              each with memory of its own, and numbers or tensors of one element. Nothing is kept in
              groups, in attributes, on parameters, or by the identity or the order of parameters.
            - `step()` may be called several times in a step, each time for some of
              the parameters, in any order.

            zero_fn tries one step of seven elements, to learn which states it keeps,
            and does not check your word.

    Returns:
        An optimizer over the same `param_groups`; step this one. `state_dict()` reads all states
        into memory, in the format of `optimizer`. To step, save or load `optimizer` itself raises.

    Raises:
        PlacementError: The optimizer looks at whole tensors; or it is not known to treat every
            element alone, and `elementwise` is not given; or states share memory; or
            `finish="forward"` of an optimizer that is not torch's, which might read what has
            changed since `step()`.
        LayoutError: `finish` is another word.
        StateError: The optimizer was streamed already.
        TierError: No tier was given; or the tier, or host memory for its buffers,
            is too small. Nothing was moved.
        StorageError: The path takes no files, or the disk failed.
            The optimizer still has its states.

    Source:
        ZeRO-Infinity, Rajbhandari et al. 2021, 5.2.2; the split of states over two tiers:
        ZeRO-Offload++ (twin-flow), 2023.
    """
    if isinstance(optimizer, TakesTier):
        given = {
            "fraction": (fraction, 1.0),
            "buffer": (buffer, BUFFER_NBYTES),
            "finish": (finish, "step"),
        }
        return optimizer.with_states_in(
            tier, **{name: value for name, (value, usual) in given.items() if value != usual}
        )
    require_not_streamed(optimizer.inner if isinstance(optimizer, Streamed) else optimizer)
    plan = planned(optimizer, tier, fraction, buffer, finish)
    require_streamable(optimizer, elementwise=elementwise)
    found = Streamed(plan, waits=finish == "forward")
    say_if_alone(optimizer)
    say_if_slow(optimizer)
    say_if_rounded(optimizer)
    say_if_one_thread(
        optimizer, sum(nbytes for tier, nbytes in found.tier_nbytes().items() if tier is not None)
    )
    return found


def planned(
    optimizer: Optimizer,
    tier: Tier | None,
    fraction: float,
    buffer: int | str,
    finish: str,
    *,
    codes: bool = False,
) -> Planner:
    """How the states of an optimizer are cut, for these options of `streamed`."""
    if not 0 < fraction <= 1:
        raise TierError(
            "fraction is the part of the states that goes to the tier: more than 0, at most 1.",
            got=fraction,
            fix="fraction=0.5: half of the bytes",
        )
    if finish not in ("step", "forward"):
        raise LayoutError(
            'finish is neither "step" nor "forward".',
            got=finish,
            fix='finish="step", or finish="forward"',
        )
    if finish == "forward" and type(optimizer) not in TORCH_ELEMENTWISE:
        raise PlacementError(
            'finish="forward" is for optimizers of torch.optim, '
            f"and {type(optimizer).__name__} is another class.",
            why="it may read something that changes between step() and the next forward",
            fix='finish="step"; or torch.optim.AdamW',
        )
    return Planner(optimizer, tier, fraction, nbytes_of_text(buffer, "buffer"), codes)


class Streamed(Optimizer):
    """An optimizer whose states are offloaded to host memory or a disk.

    Made by `streamed`; used as any optimizer.

    Attributes:
        inner: The optimizer that was given to `streamed`, whose arithmetic is used.
            It can no longer be used itself.
        tier: The tier of the states; None: for each parameter the tier of
            `zf.offload(model, optim=tier)`.
        states: The states, in chunks.
    """

    inner: Optimizer
    tier: Tier | None
    states: States
    takes_from_tiers = True  # parameters that rest there

    def __init__(self, planner: Planner, *, waits: bool) -> None:
        inner = planner.inner
        shared = {
            name: value for name, value in vars(inner).items() if name.startswith("_optimizer_")
        }
        self.__setstate__(
            {"inner": inner, "tier": planner.tier, "defaults": inner.defaults, **shared}
        )
        self._planner = planner
        self._steps = Steps(inner, waits=waits)
        self._begin(inner.state, "Moving the states of an optimizer")
        hand_over(inner, "states8bit" if planner.codes else "streamed")

    # -- what looks like any optimizer -------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups of `inner`."""
        groups: list[dict[str, Any]] = self.inner.param_groups
        return groups

    @property
    def state(self) -> Mapping[Tensor, Mapping[str, Any]]:  # type: ignore[override]
        """The states of each parameter by name, read-only: step counts and other values in memory,
        and None for a state in a tier.

        `state_dict` reads those.
        """
        self._steps.finish()
        return self.states.shown()

    @property
    def buffers_nbytes(self) -> int:
        """Bytes of the buffers in host memory through which states, parameters and gradients pass,
        and of what lies beside them there: the scales of states in 8 bits."""
        beside = sum(
            chunk.beside_nbytes for chunk in self.states.chunks if chunk.is_stepped_on_host
        )
        stores = sum(store.buffers_nbytes for store in self.states.stores.values())
        return stores + self.states.ring.nbytes + beside

    def tier_nbytes(self) -> dict[Tier | None, int]:
        """Bytes reserved for states, by tier, in whole pages; the key None is the device."""
        found: dict[Tier | None, int] = {
            tier: store.nbytes for tier, store in self.states.stores.items()
        }
        beside = sum(
            chunk.beside_nbytes for chunk in self.states.chunks if not chunk.is_stepped_on_host
        )
        return found | {None: found.get(None, 0) + beside} if beside else found

    def __repr__(self) -> str:
        stores, chunks = self.states.stores, self.states.chunks
        where = " and ".join(map(str, stores.values()))
        on_host = any(isinstance(tier, Cpu) for tier in stores)
        if on_host and all(chunk.device.type == "cpu" for chunk in chunks):
            where += ", the device's own: nothing is copied"
        if self.states.ring.count:
            where += f"; parameters and gradients through {self.states.ring}"
        kind, how = type(self.inner).__name__, arithmetic_of(self.inner)
        how += ", before the next forward" if self._steps.waits else ""
        bits = ", states in 8 bits" if self._planner.codes else ""
        return (
            f"{type(self).__name__} ({kind}, {len(chunks)} chunks{bits}: {where}; "
            f"stepped by {how})\n{self.inner!r}"
        )

    def __getstate__(self) -> dict[str, Any]:
        raise StateError(
            "A streamed optimizer cannot be copied or pickled.",
            tier=self.tier,
            why="its states are in a file or in memory of this process, "
            "and a copy would share them",
            fix="save optimizer.state_dict(), or zf.save(folder, model, "
            "optimizer); load it into a new one",
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters.

        All states are read into memory once, and room is made for all of them anew.

        Communicates what `state_dict` does, and a byte per rank when room is made.

        Raises:
            StateError: An earlier step failed half-way.
            TierError: The tier is too small. The next step tries again.
            StorageError: The disk failed.
        """
        self._steps.finish_on_all_ranks(self._parameters())
        self.inner.add_param_group(param_group)
        self._make_room_for_new()

    def state_dict(self) -> dict[str, Any]:
        """All states and groups in the format of `inner`, copied into memory.

        Communicates, over sharded parameters, of which every rank has a part to save: a byte per
        rank. Over parameters that every rank has whole, one rank may save alone.

        Raises:
            StateError: An earlier step failed half-way.
            StorageError: The disk failed on this rank or, of sharded parameters, on another, or
                does not hold what was written to it.
        """
        return stand_in(self.inner, self.param_groups, self._whole("state_dict")).state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads states and groups, as `inner` would.

        An optimizer whose step has failed may step again afterwards.

        Communicates a byte per rank, by which all ranks learn that one has failed.

        Raises:
            CheckpointError: A state does not fit its parameter, or is the shard of another rank.
            TierError: The tier has no room.
            StorageError: The disk failed.
        """
        with suppress(StorageError, StateError):  # what is loaded mends it
            self._steps.finish()
        self._steps.waiting = None
        self._steps.failed = "states could not be loaded"
        doing = "Loading the states of an optimizer"
        found = on_all_ranks(
            meshes_of(self._parameters()),
            lambda: loaded(self.inner, state_dict, on_host=True),
            doing,
        )
        self.inner.param_groups, states = found
        self._begin(states, doing)

    @torch.no_grad()
    @uncompiled  # [Note: what is compiled]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps all parameters that have gradients, chunk by chunk.

        All ranks call it together; see `streamed`.

        Args:
            closure: Evaluated first, with gradients enabled; its value is returned.

        Raises:
            StorageError: The disk failed on this rank or another,
                or does not hold what was written to it.
            StateError: An earlier step failed half-way.
            PlacementError: A gradient is sparse, plain where its parameter is not, or on another
                mesh; or an option of a group makes the optimizer look at whole tensors.
        """
        self._steps.finish_on_all_ranks(self._parameters())
        self._steps.require_whole("step")
        require_streamable(self.inner, elementwise=True)
        for parameter in self.states.known:
            follow(parameter)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._make_room_for_new()
        # A scheduler that was built on the inner optimizer looks for this.
        self.inner._opt_called = True  # type: ignore[attr-defined]
        for parameter in self._parameters():
            rest_gradient(parameter)
        if self.states.divided:  # [Note: tried first]
            trying = "A step of a streamed optimizer"
            agree_on_largest(
                on_all_ranks(
                    meshes_of(self._parameters()), lambda: self._steps.tried(self.states), trying
                )
            )
        self._steps.on_all_ranks(self._parameters(), lambda: self._steps.take(self.states))
        return loss

    def _begin(
        self, states: Mapping[Tensor, dict[str, Any]], doing: str, planner: Planner | None = None
    ) -> None:
        """Makes room for all parameters, and copies these states there:
        they stay until all ranks have theirs."""
        parameters = self._parameters()
        divided = divided_among(parameters) if self._planner.codes else {}

        def taken() -> Mapping[Tensor, Mapping[str, Any]]:
            kept = {parameter: as_kept(parameter, own) for parameter, own in states.items()}
            take_over_states(stand_in(self.inner, self.param_groups, kept))
            return kept

        if divided and states:
            kept = on_all_ranks(meshes_of(parameters), taken, doing)
            largest = {
                each: blocks.largest_of(each, kept.get(each, {}))
                for each, blocks in divided.items()
            }
            agree_on_largest(largest)

        def make() -> States:
            return States(planner or self._planner, parameters, taken(), divided)

        self.states = on_all_ranks(meshes_of(parameters), make, doing)
        self._steps.failed = None

    def _make_room_for_new(self) -> None:
        """Makes room for parameters that groups have got since the last time, in any way."""
        if set(map(id, self._parameters())) - set(map(id, self.states.known)):
            self._begin(
                self._whole("add_param_group"), "Making room for the states of an optimizer"
            )

    def _whole(self, verb: str) -> defaultdict[Tensor, dict[str, Any]]:
        """The states of whole parameters, in memory; see `state_dict`."""
        self._steps.require_whole(verb)

        def read() -> defaultdict[Tensor, dict[str, Any]]:
            self._steps.finish()
            return self.states.whole()

        return on_all_ranks(
            meshes_of(filter(is_cut, self.states.known)), read, "Reading the states of an optimizer"
        )

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]
