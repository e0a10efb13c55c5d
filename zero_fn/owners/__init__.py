"""Optimizers that look at whole tensors, over shards:
each tensor is stepped by one rank, its owner.

routes         how a tensor travels: a leg for each axis of its mesh
dealing        which rank owns which tensor, and which tensors travel together
trips          tensors on their way to the owners, and back
stepping       a step: batches arrive, are stepped and leave
states         all states, from their owners to all ranks and back
shelf          states in another tier
trials         what small trials tell: whether parameters are independent,
               which states a first step makes
footprint      bytes that it takes and sends
optimizer      the optimizer that does all this, and `by_owner`, which makes it
"""

from zero_fn.owners.assignment import Dealt
from zero_fn.owners.optimizer import ByOwner, by_owner

__all__ = ["ByOwner", "Dealt", "by_owner"]
