"""A DeepSpeed config as an entry door: read, checked entry by entry, and turned into transforms and stock objects of torch.

keys         the table of all entries, `keys.txt`
entries      a config, read against that table
optimizers   the section optimizer
rates        the section scheduler
loss_scale   the section fp16
settings     the whole config, as one value
setup        what it makes of a model
"""

from zero_fn.deepspeed.keys import KEYS, Key
from zero_fn.deepspeed.setup import DeepSpeedSetup, from_deepspeed

__all__ = ["KEYS", "DeepSpeedSetup", "Key", "from_deepspeed"]
