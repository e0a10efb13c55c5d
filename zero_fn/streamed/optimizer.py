"""`streamed(optimizer, tier)`: an elementwise optimizer with its states in another tier.

A step visits the parameters chunk by chunk. The states of a chunk are views of a buffer; the optimizer's own `step` runs
on the pieces of the parameters in it, plain tensors over their memory; the buffer goes back. So the arithmetic is the
optimizer's own, and each element meets the same operations as without streaming.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero_fn.errors import LayoutError, PlacementError, StateError, StorageError, TierError
from zero_fn.resting import rest_gradient
from zero_fn.runtime.elementwise import TORCH_ELEMENTWISE
from zero_fn.runtime.everywhere import everywhere, is_cut
from zero_fn.runtime.optimizers import say_if_rounded, say_if_slow, take_over_states
from zero_fn.runtime.uncompiled import uncompiled
from zero_fn.streamed.inner import hand_over, replaced, require_not_streamed, require_streamable
from zero_fn.streamed.one_pass import arithmetic_of
from zero_fn.streamed.pieces import BUFFER_NBYTES, Planner
from zero_fn.streamed.places import follow
from zero_fn.streamed.states import States, loaded_on_host
from zero_fn.streamed.stepping import Steps
from zero_fn.values.tiers import Cpu, Tier, nbytes_of_text

__all__ = ["Streamed", "streamed"]


def streamed(
    optimizer: Optimizer,
    tier: Tier | None = None,
    *,
    fraction: float = 1.0,
    buffer: int | str = BUFFER_NBYTES,
    finish: Literal["step", "forward"] = "step",
    elementwise: bool = False,
) -> Streamed:
    """Moves the states of an optimizer to a tier and returns an optimizer that steps them from there.

        optimizer = zf.streamed(torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True), zf.nvme("/local_nvme"))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)

    The updates are those of `optimizer`, to the bit. On `nvme` the states pass through at most four buffers, read ahead
    and written back while others are computed, and never are in memory together; on `cpu` they rest in one range of memory
    of exact size. Where the model computes on the CPU, that is the device's own memory, and nothing is copied.

    Adam and AdamW with `fused=True` are stepped in one pass by a kernel in C, compiled at first use, whose bits are those of
    torch's; it also takes gradients in bfloat16 (`parameter.grad_dtype`), as if cast before. `print(optimizer)` says whether
    it is used, and if not, why: torch then does the same step. Without `fused` a step takes several times as long, which a
    warning says once; `fused=False` says that it is meant.

    With `finish="forward"`, a step of offloaded parameters and gradients (`zf.offload`) is done unit by unit, each before
    its parameters are read next: while the device computes a unit, the host steps the next ones, and a disk reads and
    writes beside it. Any read or write of parameters, gradients or states in between completes the step first. Learning
    rates and options are those at the call of `step()`, so the numbers are the same.

    Communicates, over sharded or replicated parameters: a byte per rank at the end of a step, by which all ranks learn that
    one has failed; with `finish="forward"` one more at its beginning, for the step before.

    Args:
        optimizer: One of torch.optim that treats every element alone (Adam, AdamW, SGD, Adagrad, RMSprop, Adadelta, Adamax,
            NAdam, RAdam, ASGD, Rprop), or see `elementwise`. States that it has are moved.
        tier: `zf.nvme(path)` or `zf.cpu()`. None: for each parameter the tier that `zf.offload(model, optim=tier)` said; the
            states of others stay on the device.
        fraction: The part of the states, in bytes rounded to whole buffers, that is in the tier; the rest stays on the
            device. Buffers of both kinds take turns, so that transfers run beside computation (twin-flow).
        buffer: Bytes of a buffer, as a number or as text. Larger parameters pass through it in pieces.
        finish: When a step is finished: "step", when `step()` returns; or "forward", before what it steps is used next.
        elementwise: Your word for an optimizer of another class, also for one derived from those of torch:

            - A new value is computed from the old value, the gradient and the states of that element, and the options of its
              group: from no norm, mean, sum, maximum or shape of a tensor (how many dims it has may be looked at), and from
              nothing of other elements or parameters.
            - Everything it keeps is in `self.state[parameter]`: tensors of the parameter's shape, each with memory of its
              own, and numbers or tensors of one element. Nothing is kept in groups, in attributes, on parameters, or by the
              identity or the order of parameters.
            - `step()` may be called several times in a step, each time for some of the parameters, in any order.

            zero_fn tries one step of seven elements, and checks no more than that.

    Returns:
        An optimizer over the same `param_groups`; step this one. `state_dict()` reads all states into memory, in the format
        of `optimizer`. To step, save or load `optimizer` itself raises.

    Raises:
        PlacementError: The optimizer is not known to treat every element alone, and `elementwise` is not given; it is known
            not to, or seen to break that word; or `finish="forward"` of one that is not torch's, which might read what has
            changed since `step()`.
        LayoutError: `finish` names no moment.
        StateError: It is streamed already.
        TierError: The tier, or the memory for its buffers, is too small; or no tier was given. Nothing was moved.
        StorageError: The path takes no files, or the disk failed. The optimizer has its states.

    Source:
        ZeRO-Infinity, Rajbhandari et al. 2021, 5.2.2; the split of states over two tiers: ZeRO-Offload++ (twin-flow), 2023.
    """
    if not 0 < fraction <= 1:
        raise TierError(
            "fraction is not a part of the states.", got=fraction, fix="fraction=0.5: half of them, in bytes"
        )
    require_not_streamed(optimizer.inner if isinstance(optimizer, Streamed) else optimizer)
    if finish not in ("step", "forward"):
        raise LayoutError("finish names no moment.", got=finish, fix='finish="step", or finish="forward"')
    if finish == "forward" and type(optimizer) not in TORCH_ELEMENTWISE:
        raise PlacementError(
            f"{type(optimizer).__name__} has to finish its steps at once.",
            why="it may read what changes between step() and the next forward; optimizers of torch.optim do not",
            fix='finish="step"; or torch.optim.AdamW',
        )
    require_streamable(optimizer, elementwise=elementwise)
    found = Streamed(Planner(optimizer, tier, fraction, nbytes_of_text(buffer, "buffer")), waits=finish == "forward")
    say_if_slow(optimizer)
    say_if_rounded(optimizer)
    return found


class Streamed(Optimizer):
    """An optimizer whose states are in a tier; made by `streamed`.

    Attributes:
        inner: The optimizer that was given to `streamed`, whose arithmetic is used.
        tier: The tier of the states; None: for each parameter the tier that `zf.offload` gave.
        states: The states, in chunks.
    """

    inner: Optimizer
    tier: Tier | None
    states: States
    takes_from_tiers = True  # parameters that rest there

    def __init__(self, planner: Planner, *, waits: bool) -> None:
        inner = planner.inner
        shared = {name: value for name, value in vars(inner).items() if name.startswith("_optimizer_")}
        self.__setstate__({"inner": inner, "tier": planner.tier, "defaults": inner.defaults, **shared})
        self._planner = planner
        self._steps = Steps(inner, waits=waits)
        self._begin(inner.state, "Moving the states of an optimizer")
        hand_over(inner)

    # -- what looks like any optimizer ----------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups of `inner`."""
        groups: list[dict[str, Any]] = self.inner.param_groups
        return groups

    @property
    def state(self) -> Mapping[Tensor, Mapping[str, Any]]:  # type: ignore[override]
        """The states of each parameter by name, read-only: values that are in memory, such as step counts, and None for a
        state in a tier, which `state_dict` reads."""
        self._steps.finish()
        return self.states.shown()

    @property
    def buffers_nbytes(self) -> int:
        """Bytes of host memory that states, parameters and gradients pass through."""
        return sum(store.buffers_nbytes for store in self.states.stores.values()) + self.states.ring.nbytes

    def tier_nbytes(self) -> dict[Tier | None, int]:
        """Bytes reserved for states, by tier, in whole pages; the key None is the device."""
        return {tier: store.nbytes for tier, store in self.states.stores.items()}

    def __repr__(self) -> str:
        stores, chunks = self.states.stores, self.states.chunks
        where = " and ".join(map(str, stores.values()))
        if any(isinstance(tier, Cpu) for tier in stores) and all(chunk.device.type == "cpu" for chunk in chunks):
            where += ", the device's own: nothing is copied"
        if self.states.ring.count:
            where += f"; parameters and gradients through {self.states.ring}"
        kind, how = type(self.inner).__name__, arithmetic_of(self.inner)
        how += ", before the next forward" if self._steps.waits else ""
        return f"Streamed ({kind}, {len(chunks)} chunks: {where}; stepped by {how})\n{self.inner!r}"

    def __getstate__(self) -> dict[str, Any]:
        raise StateError(
            "An optimizer whose states are in a tier cannot be copied or pickled.",
            tier=self.tier,
            why="its states are in a file, or in memory, of this process",
            fix="save optimizer.state_dict(); load it into zf.streamed(AdamW(model.parameters()), tier)",
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to `inner`. All states are read into memory once, and room is made for all of them anew.

        Communicates as `state_dict` does, and as `streamed` to make room.

        Raises:
            StateError: A step has failed half-way.
            TierError: The tier is too small. The next step tries again.
            StorageError: The disk failed.
        """
        self._steps.finish_everywhere(self._parameters())
        self.inner.add_param_group(param_group)
        self._make_room_for_new()

    def state_dict(self) -> dict[str, Any]:
        """All states and groups in the format of `inner`, copied into memory.

        Communicates, over sharded parameters, of which every rank has a part to save: a byte per rank. Over parameters
        that every rank has whole, one rank may save alone.

        Raises:
            StateError: A step has failed half-way.
            StorageError: The disk failed on this rank or, of sharded parameters, on another, or does not hold what was
                written to it.
        """
        with replaced(self.inner, self.param_groups, self._whole("state_dict")):
            return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads states and groups, as `inner` would. After that an optimizer whose step had failed may step again.

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
        loaded: list[tuple[list[dict[str, Any]], dict[Tensor, dict[str, Any]]]] = []
        everywhere(self._parameters(), lambda: loaded.append(loaded_on_host(self.inner, state_dict)), doing)
        self.inner.param_groups, states = loaded[0]
        self._begin(states, doing)

    @torch.no_grad()
    @uncompiled  # [Note: what is compiled]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps all parameters, chunk by chunk.

        Args:
            closure: Evaluated first, with gradients enabled; its value is returned.

        Raises:
            StorageError: The disk failed on this rank or another, or does not hold what was written to it.
            StateError: An earlier step failed half-way.
            PlacementError: A gradient is sparse, plain where its parameter is not, or on another mesh; or an option of a
                group makes the optimizer look at whole tensors.
        """
        self._steps.finish_everywhere(self._parameters())
        self._steps.require_whole("step")
        require_streamable(self.inner, elementwise=True)
        for parameter in self.states.known:
            follow(parameter)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._make_room_for_new()
        self.inner._opt_called = True  # type: ignore[attr-defined]  # a scheduler built on the inner one looks for it
        for parameter in self._parameters():
            rest_gradient(parameter)
        self._steps.everywhere(self._parameters(), lambda: self._steps.take(self.states))
        return loss

    def _begin(self, states: Mapping[Tensor, dict[str, Any]], doing: str) -> None:
        """Makes room for all parameters, and copies these states there: they stay until all ranks have theirs."""
        made: list[States] = []

        def make() -> None:
            with replaced(self.inner, self.param_groups, states):
                take_over_states(self.inner)
                made.append(States(self._planner, self._parameters(), states))

        everywhere(self._parameters(), make, doing)
        self.states = made[0]
        self._steps.failed = None

    def _make_room_for_new(self) -> None:
        """Makes room for parameters that groups have got since the last time, in any way."""
        if set(map(id, self._parameters())) - set(map(id, self.states.known)):
            self._begin(self._whole("add_param_group"), "Making room for the states of an optimizer")

    def _whole(self, verb: str) -> defaultdict[Tensor, dict[str, Any]]:
        """The states of whole parameters, in memory; see `state_dict`."""
        self._steps.require_whole(verb)
        whole: list[defaultdict[Tensor, dict[str, Any]]] = []

        def read() -> None:
            self._steps.finish()
            whole.append(self.states.whole())

        everywhere(filter(is_cut, self.states.known), read, "Reading the states of an optimizer")
        return whole[0]

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]
