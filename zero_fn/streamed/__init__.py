"""Optimizers whose states rest in another tier and pass through a few buffers when they are needed.

inner        the optimizer that is streamed: which states it keeps, and its step, borrowed for other parameters
places       where the runtime rests parameters and gradients
pieces       which pieces of parameters are stepped together, and where their states are to rest
pipeline     fetches chunks ahead, computes and writes back: at once, or as the next forward needs it
windows      the parameters and gradients of a chunk: in memory, from their tier, or from an accelerator
states       the states of an optimizer in its stores, and those of whole parameters
one_pass     steps Adam and AdamW by a compiled kernel
stepping     a step over chunks, and what becomes of one that fails
optimizer    the optimizer that does all this, and `streamed`, which makes it
footprint    what an optimizer takes and moves, before it is streamed
"""

from zero_fn.streamed.footprint import NO_LINK, Footprint, Link, footprint
from zero_fn.streamed.optimizer import Streamed, streamed

__all__ = ["NO_LINK", "Footprint", "Link", "Streamed", "footprint", "streamed"]
