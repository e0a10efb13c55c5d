"""`by_owner(optimizer)`: any optimizer over shards, each tensor stepped whole by one rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from zero_fn.advice import say_if_alone, say_if_rounded
from zero_fn.errors import PlacementError, StateError
from zero_fn.owners.assignment import Cost, Dealing, Dealt, batches, cost_of
from zero_fn.owners.batched_step import Arithmetic, Owned, step_batches
from zero_fn.owners.exchange import LinesByAxis
from zero_fn.owners.states import on_owners, states_on_all_ranks
from zero_fn.owners.states_in_tier import Shelf
from zero_fn.owners.trial import require_independent
from zero_fn.runtime.bfloat16_step import as_kept
from zero_fn.runtime.optimizers import require_own_shard
from zero_fn.runtime.slot import meshes_of, slot_of
from zero_fn.runtime.uncompiled import uncompiled
from zero_fn.streamed.inner_optimizer import hand_over, require_not_streamed, stand_in
from zero_fn.streamed.optimizer import Streamed
from zero_fn.streamed.states import loaded
from zero_fn.tiers.tier_tensor import in_memory
from zero_fn.transport.agree import on_all_ranks
from zero_fn.values.dtensors import rest_gradient
from zero_fn.values.tiers import Tier, nbytes_of_text

__all__ = ["ByOwner", "by_owner"]

BATCH_NBYTES = 64 << 20


def by_owner(
    optimizer: Optimizer, *, cost: Cost | None = None, batch: int | str = BATCH_NBYTES
) -> ByOwner:
    """Lets any optimizer step sharded parameters: each tensor is stepped whole,
    by one rank, its owner.

        muon = zf.by_owner(torch.optim.Muon(matrices, lr=0.02))

    The updates are those of replicas, to the bit, at every stage and number of ranks. In a step the
    shards of gradients and values travel to the owner. The optimizer's own `step` runs there on
    plain whole tensors, and new values travel back. States rest whole at the owner, 1/n of them on
    each rank. Tensors go in batches: while one is stepped, the next arrives and the one before
    leaves. Memory beside the states: two and a half batches, and up to two more for messages
    between ranks that share no memory.

    Where all ranks hold a whole parameter (`zf.replicate`), it has an owner, too: only its new
    values travel. Parameters of no transform are stepped by every rank, as without `by_owner`.

    Communicates, in a step, with Ψ elements of b bytes over n ranks that cut them: 3 Ψ b (n-1)/n²
    bytes from each rank. Over several axes, that along each of them. `state_dict` and
    `load_state_dict` send all states, `zf.save` and `zf.load` none.

    Args:
        optimizer: Any that steps each parameter from its own value, gradient, states and options,
            and keeps its states in `state[parameter]`. This is tried on two small parameters. Its
            parameters are those of the model after the last transform. States that it has are
            moved. All ranks have the same parameters in the same order.
        cost: What a step of a parameter costs, by which owners are chosen: a function of the
            parameter. None: elements times the shorter side of a matrix or of a stack of them
            (Newton-Schulz, Shampoo), elements of any other tensor.
        batch: Bytes of values and gradients that an owner takes at a time,
            as a number or as text ("64MiB").

    Returns:
        An optimizer over the same `param_groups`; step this one. `state_dict()`, which all ranks
        call, is that of a stock optimizer. To step, save or load `optimizer` itself raises.

    Raises:
        PlacementError: The optimizer computes a step of one parameter from others, or cannot step
            one alone (it wants a closure), or a parameter is neither sharded nor replicated.
            Nothing was moved.
        StateError: The optimizer was streamed already, or given to `by_owner` before.
        DisagreementError: Ranks have different parameters.

    Source:
        An owner for each matrix, the longest processing time first: Megatron-LM's layer-wise Muon,
        2026; for Shampoo Anil et al. 2020, arXiv:2002.09018, section 4.
    """
    if isinstance(optimizer, Streamed | ByOwner):
        verb = "streamed" if isinstance(optimizer, Streamed) else "stepped by owners"
        raise StateError(
            f"by_owner was given an optimizer that is {verb} already.",
            fix="zf.by_owner(torch.optim.Muon(...)); "
            "with states in another tier zf.streamed(zf.by_owner(...), tier)",
        )
    require_not_streamed(optimizer)
    require_independent(optimizer, optimizer.param_groups)
    found = ByOwner(optimizer, cost or cost_of, nbytes_of_text(batch, "batch"))
    say_if_alone(optimizer)
    say_if_rounded(optimizer)
    return found


class ByOwner(Optimizer):
    """An optimizer whose parameters are stepped whole, each by its owner.

    Made by `by_owner`; used as any optimizer.

    Attributes:
        inner: The optimizer that was given to `by_owner`, whose arithmetic is used.
            It can no longer be used itself.
        state: The states by parameter: whole ones of those that this rank owns,
            and nothing of the others.
        failed: Why the last step stopped half-way; None if it did not.
            What loads states sets it to None.
    """

    inner: Optimizer
    state: defaultdict[Tensor, dict[str, Any]]
    steps_wholes = True  # not shards
    # Whether it steps parameters that rest in tiers: once the optimizer was given to `streamed`.
    takes_from_tiers = False

    def __init__(self, inner: Optimizer, cost: Cost, nbytes: int) -> None:
        shared = {
            name: value for name, value in vars(inner).items() if name.startswith("_optimizer_")
        }
        self.__setstate__(
            {"inner": inner, "defaults": inner.defaults, "state": defaultdict(dict), **shared}
        )
        self._dealing = Dealing(cost)
        self._nbytes = nbytes
        self._lines = LinesByAxis()
        # Owners by the identity of the parameter, in the order of dealing.
        self._dealt: dict[int, Dealt] = {}
        # Of the last step: the parameters that had gradients,
        # what travelled together, and a text that says so.
        self._plan: tuple[list[int], list[list[Dealt]], str] | None = None
        self.failed: str | None = None
        self._tier: Tier | None = None
        self._shelves: dict[Tier, Shelf] = {}
        self._deal()
        self._take(inner.state)
        hand_over(inner, "by_owner")  # last: one that is refused stays as it was

    # -- what looks like any optimizer -------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups of `inner`."""
        groups: list[dict[str, Any]] = self.inner.param_groups
        return groups

    def __repr__(self) -> str:
        own = sum(each.is_mine for each in self._dealt.values())
        kind = type(self.inner).__name__
        where = "".join(f"; {shelf}" for shelf in self._shelves.values())
        return (
            f"ByOwner ({kind}, this rank owns {own} of {len(self._dealt)} "
            f"tensors{where})\n{self.inner!r}"
        )

    def __getstate__(self) -> dict[str, Any]:
        raise StateError(
            "An optimizer that steps by owners cannot be copied or pickled.",
            why="each rank has the states of its own tensors alone",
            fix="save optimizer.state_dict(), or zf.save(folder, model, optimizer); load it into "
            "zf.by_owner(Muon(matrices))",
        )

    def owner_of(self, parameter: Tensor) -> Dealt | None:
        """Who steps a parameter; None if every rank does."""
        return self._dealt.get(id(parameter))

    def tier_of(self, parameter: Tensor) -> Tier | None:
        """The tier of the states of a parameter; None: they are in the memory of its device."""
        slot = slot_of(parameter)
        if not self.takes_from_tiers:
            return None
        return self._tier or (slot.home.tiers.optim if slot is not None else None)

    @property
    def buffers_nbytes(self) -> int:
        """Bytes of the buffers in host memory through which states pass."""
        return sum(shelf.storage.buffers_nbytes for shelf in self._shelves.values())

    def tier_nbytes(self) -> dict[Tier | None, int]:
        """Bytes taken of tiers for states, in whole pages."""
        return {tier: shelf.storage.nbytes for tier, shelf in self._shelves.items()}

    def with_states_in(self, tier: Tier | None, **options: object) -> ByOwner:
        """Moves the states to another tier, at their owners.

        `zf.streamed(optimizer, tier)` calls it.

        Raises:
            PlacementError: An option other than the tier was given,
                which streamed whole tensors do not have.
            TierError: The tier has no room.
            StorageError: The path takes no files, or the disk failed.
        """
        homes = [slot.home for slot in map(slot_of, self._parameters()) if slot is not None]
        if options or any(home.tiers.fraction != 1 for home in homes if tier is None):
            raise PlacementError(
                "zf.streamed(zf.by_owner(...)) takes a tier alone, "
                f"and got {', '.join(options) or 'fraction'}.",
                why="each tensor is stepped whole, and in the step; "
                "its states pass through a buffer of their size",
                fix="zf.streamed(zf.by_owner(optimizer), tier)",
            )
        before = self._tier, self.takes_from_tiers
        self._tier = tier
        self.takes_from_tiers = True
        try:
            self.state = self._rested(self.state)
        except BaseException:
            self._tier, self.takes_from_tiers = before
            raise
        return self

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters, which get owners. All ranks call it."""
        self.inner.add_param_group(param_group)
        try:
            require_independent(self.inner, self.param_groups[-1:])
            self._deal()
        except BaseException:
            self.param_groups.pop()
            raise

    def state_dict(self) -> dict[str, Any]:
        """All states and groups in the format of `inner`, on every rank: states of the shape of a
        sharded parameter are sharded alike.

        All ranks call it; it sends the states from their owners.

        Raises:
            StateError: An earlier step failed half-way.
        """
        self.require_whole("state_dict")
        states = {
            **self.state,
            **states_on_all_ranks([*self._dealt.values()], self.state, self._lines, self._nbytes),
        }
        # States in the same order on all ranks.
        states = {each: states[each] for each in self._parameters() if each in states}
        return stand_in(self.inner, self.param_groups, defaultdict(dict, states)).state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads states and groups, as `inner` would: shards or whole tensors.

        All ranks call it; shards travel to the owners. An optimizer whose step has failed may step
        again afterwards, unless ranks have lost one another.

        Raises:
            CheckpointError: A state is the shard of another rank.
        """
        groups, states = loaded(self.inner, state_dict, on_host=False)
        self._take(states)
        self.inner.param_groups, self.failed = groups, None

    @torch.no_grad()
    @uncompiled
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps all parameters that have gradients. All ranks call it together; see `by_owner`.

        Args:
            closure: Evaluated first, with gradients enabled; its value is returned.

        Raises:
            PlacementError: A gradient is sparse.
            StateError: An earlier step failed half-way.
            DisagreementError: Ranks have gradients of different parameters.
            LostRankError: A rank has ended, or its optimizer raised.
        """
        self.require_whole("step")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._deal()
        # A scheduler built on the inner one looks for it.
        self.inner._opt_called = True  # type: ignore[attr-defined]
        plain: list[Owned] = []
        present: list[int] = []
        for parameter in self._parameters():
            rest_gradient(parameter)
            if parameter.grad is None:
                continue
            if parameter.grad.layout is not torch.strided:
                raise _sparse(parameter)
            if id(parameter) in self._dealt:
                present.append(id(parameter))
            else:
                plain.append(Owned(parameter, parameter.detach(), parameter.grad))
        travelling, check = self._plan_of(present)
        arithmetic = Arithmetic(self.inner, self.state, self._shelf_of)
        try:
            if not travelling:  # others may have gradients
                self._lines.agree(
                    dict.fromkeys(
                        leg.axis for each in self._dealt.values() for leg in each.route.legs
                    ),
                    check,
                )
            step_batches(travelling, arithmetic, self._lines, check)
            if plain:
                arithmetic.step(plain)
            arithmetic.finish()
            for shelf in self._shelves.values():
                shelf.finish()
        except BaseException as error:
            self.failed = f"{type(error).__name__} in the last step"
            # Other ranks wait; after Ctrl-C, which all get, they may go on.
            if isinstance(error, Exception):
                self._lines.give_up()
            raise
        for each in self._dealt.values():
            if each.parameter.grad is not None:
                # A parameter of another owner, too: torch asks whether any rank has stepped.
                self.state.setdefault(each.parameter, {})
        return loss

    # -- owners ------------------------------------------------------------------------------------

    def _deal(self) -> None:
        """Gives owners to parameters that have none."""
        new = [parameter for parameter in self._parameters() if id(parameter) not in self._dealt]
        for each in self._dealing.deal(new) if new else ():
            self._dealt[id(each.parameter)] = each
            self._plan = None

    def _plan_of(self, present: list[int]) -> tuple[list[list[Dealt]], str]:
        """What travels together in a step of these parameters,
        and a text that must be the same on all ranks."""
        if self._plan is None or self._plan[0] != present:
            chosen = set(present)
            travelling = batches(
                [each for key, each in self._dealt.items() if key in chosen], self._nbytes
            )
            rows = [
                [(each.route.shape, each.parameter.dtype, each.number) for each in batch]
                for batch in travelling
            ]
            self._plan = present, travelling, f"{crc32(repr(rows).encode()):08x}"
        return self._plan[1:]

    def _take(self, states: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Takes over states that every rank has: shards of them, or whole ones."""

        def require_own() -> None:
            for parameter, own in states.items():
                slot = slot_of(parameter)
                for name, value in own.items():
                    if slot is not None and slot.spec is not None and isinstance(value, DTensor):
                        require_own_shard(
                            f"The optimizer's {name} of {slot.fqn!r}", value, slot.spec.mesh
                        )

        states = {parameter: as_kept(parameter, own) for parameter, own in states.items()}
        if states:
            on_all_ranks(
                meshes_of(self._parameters()), require_own, "Loading the states of an optimizer"
            )
        moved = on_owners([*self._dealt.values()], states, self._lines, self._nbytes)
        self.state = self._rested(
            {parameter: moved.get(parameter, dict(own)) for parameter, own in states.items()}
        )

    def _rested(
        self, states: Mapping[Tensor, dict[str, Any]]
    ) -> defaultdict[Tensor, dict[str, Any]]:
        """States where they are to rest; the ones that are given stay.

        All ranks call it; an error on one comes on all.
        """
        found = defaultdict[Tensor, dict[str, Any]](dict, states)

        def put() -> None:
            for parameter, own in states.items():
                shelf = self._shelf_of(parameter)
                if shelf is not None and own:
                    found[parameter] = shelf.keep({}, tree_map(in_memory, own))
            for shelf in self._shelves.values():
                shelf.finish()

        if self.takes_from_tiers:
            # On new shelves: the places of the states before would never be given back.
            before, self._shelves = self._shelves, {}
            try:
                on_all_ranks(
                    meshes_of(self._parameters()), put, "Moving the states of an optimizer"
                )
            except BaseException:
                self._shelves = before
                raise
        return found

    def _shelf_of(self, parameter: Tensor) -> Shelf | None:
        """Where the states of a parameter rest, if they are to be in another tier."""
        tier = self.tier_of(parameter)
        if tier is not None and tier not in self._shelves:
            self._shelves[tier] = Shelf(tier, f"states of {type(self.inner).__name__}")
        return self._shelves[tier] if tier is not None else None

    def require_whole(self, verb: str) -> None:
        """Refuses what needs all parameters after the same step."""
        if self.failed is not None:
            raise StateError(
                f"{verb} of an optimizer whose step failed half-way.",
                failed=self.failed,
                why="some parameters are one step ahead of the others",
                fix="load the last checkpoint: zf.load(folder, model, optimizer)",
            )

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]


def _sparse(parameter: Tensor) -> PlacementError:
    return PlacementError(
        "Sparse gradients cannot travel to an owner.",
        parameter=slot_of(parameter) or list(parameter.shape),
        fix="compute it with sparse=False: F.embedding(tokens, weight)",
    )
