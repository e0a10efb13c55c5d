"""Optimizers whose states rest in another tier and pass through a few buffers when they are needed.

inner_optimizer  the optimizer that is streamed: which states it keeps,
                 and its step, called for other parameters
tier_places      where the runtime rests parameters and gradients
pieces           which pieces of parameters are stepped together (a chunk),
                 and where their states will rest
state_codes      states in 8 bits: which ones, and how those of a piece are coded
shared_blocks    blocks of such states that several ranks have parts of
pipeline         fetches chunks ahead, computes and writes back: at once,
                 or as the next forward needs it
windows          the parameters and gradients of a chunk: in memory,
                 from their tier, or from an accelerator
states           the states of an optimizer: in chunks on a tier, and as
                 the states of whole parameters
fused_adam       steps Adam and AdamW by a compiled kernel
stepping         a step over chunks, and what happens if it fails
optimizer        the optimizer that does all this, and `streamed`, which makes it
states8bit       an optimizer whose states rest in 8 bits
footprint        bytes that an optimizer will take and move, before it is streamed
"""

from zero_fn.streamed.footprint import NO_LINK, Footprint, Link, footprint
from zero_fn.streamed.optimizer import Streamed, streamed
from zero_fn.streamed.states8bit import States8bit, states8bit

__all__ = [
    "NO_LINK",
    "Footprint",
    "Link",
    "States8bit",
    "Streamed",
    "footprint",
    "states8bit",
    "streamed",
]
