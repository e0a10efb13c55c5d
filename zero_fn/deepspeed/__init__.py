"""A DeepSpeed config as an entry door: read, checked entry by entry, and turned into transforms and stock objects of torch.

entries      one object of the JSON, of which every entry is asked for by name
file         from a path to that JSON
sharding     the section zero_optimization
optimizers   the section optimizer
rates        the section scheduler
loss_scale   the section fp16
settings     the whole config, as one value
setup        what it makes of a model
"""

from zero_fn.deepspeed.setup import DeepSpeedSetup, from_deepspeed

__all__ = ["DeepSpeedSetup", "from_deepspeed"]
