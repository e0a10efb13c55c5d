"""Optimizers that look at whole tensors, over shards:
each tensor is stepped by one rank, its owner.

optimizer        the optimizer, and `by_owner`, which makes it
assignment       which rank owns which tensor, and which tensors travel together
routes           how a tensor travels: a leg for each axis of its mesh
exchange         tensors on their way to the owners, and back
batched_step     a step: batches arrive, are stepped and leave
states           all states, from their owners to all ranks and back
states_in_tier   states in another tier
trial            a step on two small parameters: whether parameters are independent,
                 which states a first step makes
footprint        bytes that it takes and sends
"""

from zero_fn.owners.assignment import Dealt
from zero_fn.owners.optimizer import ByOwner, by_owner

__all__ = ["ByOwner", "Dealt", "by_owner"]
