"""DeepSpeed configs: each entry is checked, and the config is turned into
transforms and stock objects of torch.

keys         the table of all entries that are known, `keys.toml`
entries      the entries of a config, read against that table
optimizers   the section optimizer
rates        the section scheduler
loss_scale   the section fp16
settings     a whole config as one value
computing    how it computes
placement    ... the model placed by them
cutting      ... and cut over other axes
autocast     ... and run under torch.autocast
reporter     what it prints and logs
setup        `from_deepspeed`: the settings, applied to a model
manners      what the engine does in a loop, as functions
"""

from zero_fn.deepspeed.keys import KEYS, Key
from zero_fn.deepspeed.manners import backward, is_boundary, load_checkpoint, save_checkpoint, step
from zero_fn.deepspeed.setup import DeepSpeedSetup, from_deepspeed

__all__ = [
    "KEYS",
    "DeepSpeedSetup",
    "Key",
    "backward",
    "from_deepspeed",
    "is_boundary",
    "load_checkpoint",
    "save_checkpoint",
    "step",
]
