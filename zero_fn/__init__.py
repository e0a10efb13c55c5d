"""ZeRO as composable functions on DTensor placements.

model = zf.shard_params(model, mesh["dp"])  # ZeRO-3; transforms return new modules, and compose
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)  # built last: its states are shards, too

checkpoint     memory copies of a run; what `save` and `checkpoints` return
deepspeed      the setup of a DeepSpeed config, and its engine's methods as functions
distributed    ranks: deadlines, preemption, the speed of links
errors         all errors; `ZeroError` is their base
inspect        what `plan`, `describe` and `memory` return
planning       which stage and tiers fit a budget
transforms     less common transforms
wire           formats in which parameters and gradients travel
"""

from zero_fn import checkpoint as checkpoint
from zero_fn import deepspeed as deepspeed
from zero_fn import distributed as distributed
from zero_fn import errors as errors
from zero_fn import inspect as inspect
from zero_fn import planning as planning
from zero_fn import transforms as transforms
from zero_fn import wire as wire
from zero_fn.average import ema
from zero_fn.checkpoint import (
    checkpoints,
    load,
    load_pretrained,
    resume,
    save,
    save_pretrained,
)
from zero_fn.deepspeed import from_deepspeed
from zero_fn.errors import ZeroError
from zero_fn.inspect import check, describe, memory, plan
from zero_fn.launch import launch
from zero_fn.local.from_environment import from_environment
from zero_fn.local.gloo import give_groups_one_thread as _give_groups_one_thread
from zero_fn.monitor.metrics import metrics
from zero_fn.owners import by_owner
from zero_fn.profiling import profile
from zero_fn.streamed import states8bit, streamed
from zero_fn.transforms.accumulate import accumulate
from zero_fn.transforms.checkpoint_activations import checkpoint_activations
from zero_fn.transforms.forward_methods import register_forward_method
from zero_fn.transforms.hybrid import hybrid
from zero_fn.transforms.materialize import materialize
from zero_fn.transforms.offload import offload
from zero_fn.transforms.offloaded_states import offload_states, reload_states
from zero_fn.transforms.precision import precision
from zero_fn.transforms.shard import replicate, shard_grads, shard_optimizer, shard_params
from zero_fn.transforms.tile import tile
from zero_fn.transforms.unsharded import unsharded
from zero_fn.transport.traffic import traffic
from zero_fn.values.tiers import cpu, nvme
from zero_fn.values.units import by_size
from zero_fn.weights import apply_weights, weights

__version__ = "0.3.0"

__all__ = [
    "ZeroError",
    "accumulate",
    "apply_weights",
    "by_owner",
    "by_size",
    "check",
    "checkpoint_activations",
    "checkpoints",
    "cpu",
    "describe",
    "ema",
    "from_deepspeed",
    "from_environment",
    "hybrid",
    "launch",
    "load",
    "load_pretrained",
    "materialize",
    "memory",
    "metrics",
    "nvme",
    "offload",
    "offload_states",
    "plan",
    "precision",
    "profile",
    "register_forward_method",
    "reload_states",
    "replicate",
    "resume",
    "save",
    "save_pretrained",
    "shard_grads",
    "shard_optimizer",
    "shard_params",
    "states8bit",
    "streamed",
    "tile",
    "traffic",
    "unsharded",
    "weights",
]

_NAMESPACES = (
    "checkpoint",
    "deepspeed",
    "distributed",
    "errors",
    "inspect",
    "planning",
    "transforms",
    "wire",
)


def __dir__() -> list[str]:
    """The public names, for `dir` and for completion."""
    return sorted([*__all__, *_NAMESPACES, "__version__"])


# Before a program makes its first group of gloo (`zero_fn/local/gloo.py` says why).
_give_groups_one_thread()
