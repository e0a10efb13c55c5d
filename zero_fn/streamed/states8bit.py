"""`states8bit(optimizer)`: an elementwise optimizer whose states rest in 8 bits."""

from __future__ import annotations

from typing import Literal

from torch.optim import Optimizer

from zero_fn.advice import say_if_alone, say_if_rounded, say_if_slow
from zero_fn.errors import StateError
from zero_fn.streamed.inner_optimizer import require_not_streamed, require_streamable
from zero_fn.streamed.optimizer import Streamed, planned
from zero_fn.streamed.pieces import BUFFER_NBYTES
from zero_fn.streamed.stepping import Steps
from zero_fn.values.tiers import Tier

__all__ = ["States8bit", "states8bit"]


def states8bit(optimizer: Optimizer, *, elementwise: bool = False) -> States8bit:
    """Keeps the states of an optimizer in 8 bits: 2.03 bytes a parameter for Adam,
    where float32 takes 8.

        optimizer = zf.states8bit(torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True))
        optimizer = zf.streamed(optimizer, zf.nvme("/local_nvme"))  # also in another tier

    Each state is kept as a byte an element and a float32 scale for each block of 256 elements. A
    step decodes the states of a buffer to float32, runs the optimizer's own arithmetic, and codes
    them again. Blocks are those of the whole tensor in the order of its rows, so numbers do not
    depend on the number of ranks, the stage, the mesh or the tier. Parameters of fewer than 4,096
    elements keep their states as they are.

    Adam and AdamW with `fused=True` are stepped on the CPU by a kernel in C in one pass. It has the
    bits of decoding, torch's step and coding.

    Communicates, in a step, what `zf.streamed` does. A parameter of which a rank has parts of
    blocks (its rows are no multiples of 256, or columns are cut) is stepped twice, and each rank
    sends 8 (n-1)/n bytes for each of its blocks and states, to learn how large values are. All
    ranks call it together: they tell one another which parameters are such, by a byte each.

    `state_dict()` has states in float32, in the format of the optimizer, and to load them gives the
    same codes again. So states go from and to a stock optimizer. `zf.save` writes the codes;
    `zf.load` reads codes into any optimizer, and float32 into this one.

    Args:
        optimizer: AdamW, Adam, NAdam, RAdam, Adamax, SGD, RMSprop, Adagrad or Adadelta of
            torch.optim. States that it has are coded. Its parameters are those of the model after
            the last transform, and rest in float32.
        elementwise: Your word that an optimizer of another class treats every element alone; see
            `zf.streamed`. Its states have names that torch gives them (`exp_avg`, `exp_avg_sq`,
            `momentum_buffer`, ...).

    Returns:
        An optimizer over the same `param_groups`; step this one. The tiers of
        `zf.offload(model, optim=tier)` are kept to.

    Raises:
        PlacementError: The optimizer looks at whole tensors, is not known to treat every element
            alone, or keeps a state that has no form in 8 bits.
        StateError: The optimizer was streamed already, or given to `by_owner`.

    Source:
        8-bit Optimizers via Block-wise Quantization, Dettmers et al. 2022, arXiv:2110.02861.
    """
    if isinstance(optimizer, Streamed):
        raise StateError(
            "states8bit was given an optimizer that is streamed already.",
            fix="zf.streamed(zf.states8bit(torch.optim.AdamW(...)), tier)",
        )
    require_not_streamed(optimizer)
    require_streamable(optimizer, elementwise=elementwise)
    found = States8bit(
        planned(optimizer, None, 1.0, BUFFER_NBYTES, "step", codes=True), waits=False
    )
    say_if_alone(optimizer)
    say_if_slow(optimizer)
    say_if_rounded(optimizer)
    return found


class States8bit(Streamed):
    """An optimizer whose states rest in 8 bits. Made by `states8bit`; used as any optimizer."""

    def with_states_in(
        self,
        tier: Tier | None,
        *,
        fraction: float = 1.0,
        buffer: int | str = BUFFER_NBYTES,
        finish: Literal["step", "forward"] = "step",
    ) -> States8bit:
        """Moves the states to another tier. `zf.streamed(optimizer, tier, ...)` calls it."""
        planner = planned(self.inner, tier, fraction, buffer, finish, codes=True)
        states = self._whole("zf.streamed")
        self._begin(states, "Moving the states of an optimizer", planner)
        self._planner = planner
        self.tier = tier
        self._steps = Steps(self.inner, waits=finish == "forward")
        return self
