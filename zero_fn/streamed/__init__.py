"""Optimizers whose states rest in another tier and pass through a few buffers when they are needed.

schema       which states an optimizer keeps per element, found out on a parameter of seven elements
chunk        pieces of parameters with room for their states, and what a step sees of them
store        where chunks rest, and the buffers they pass through
planned      which chunks an optimizer is stepped in, and where their states are to rest
parcels      the way of parameters and gradients that rest in another tier
visits       the way of an accelerator's parameters and gradients to their states on the host, and back
one_pass     steps Adam and AdamW by a compiled kernel
pipeline     fetches ahead, computes and writes back
stepped      one step over chunks
joined       states of whole parameters and of their pieces
footprint    what an optimizer takes and moves, before it is streamed
optimizer    the optimizer that does all this, and `streamed`, which makes it
"""

from zero_fn.streamed.footprint import NO_LINK, Footprint, Link, footprint
from zero_fn.streamed.optimizer import Streamed, streamed

__all__ = ["NO_LINK", "Footprint", "Link", "Streamed", "footprint", "streamed"]
