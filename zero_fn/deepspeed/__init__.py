"""DeepSpeed configs: each entry is checked, and the config is turned into
transforms and stock objects of torch.

keys             the table of all entries that are known, `keys.toml`
entries          the entries of a config, read against that table
auto             what a Trainer's arguments say where a config says "auto"
optimizers       the section optimizer
muon_lamb_lion   the optimizers that torch does not have
schedulers       the section scheduler
loss_scale       the section fp16
precision        dtypes, autocast, recomputation and compilation
reporter         what a config prints and logs
settings         a whole config as one value
tensor_parallel  a model cut over more axes than that of ZeRO
placement        a model placed as the settings say
setup            `from_deepspeed`: the settings, applied to a model
engine_methods   methods of DeepSpeed's engine, as functions of a setup
check_command    `python -m zero_fn deepspeed check`
launch_command   `python -m zero_fn launch`: the launcher's options, for torchrun
"""

from zero_fn.deepspeed.engine_methods import (
    backward,
    is_boundary,
    load_checkpoint,
    save_checkpoint,
    step,
)
from zero_fn.deepspeed.keys import KEYS, Key
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
