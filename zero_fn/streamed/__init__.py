"""Optimizers whose states rest in another tier and pass through a few buffers when they are needed.

schema       which states an optimizer keeps per element, found out on a parameter of seven elements
chunk        pieces of parameters with room for their states, and what a step sees of them
store        where chunks rest, and the buffers they pass through
one_pass     steps Adam and AdamW by a compiled kernel
pipeline     fetches ahead, computes and writes back
optimizer    the optimizer that does all this, and `streamed`, which makes it
"""

from zero_fn.streamed.optimizer import Streamed, streamed

__all__ = ["Streamed", "streamed"]
