"""ZeRO as composable functions on DTensor placements.

model = zf.shard_params(model, mesh["dp"])  # ZeRO-3; transforms return new modules, and compose
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)  # built last: its states are shards, too
"""

from zero_fn.average import Average, ema
from zero_fn.checkpoint import (
    Checkpoint,
    Mirror,
    Saving,
    checkpoints,
    load,
    load_pretrained,
    mirror,
    resume,
    save,
    save_pretrained,
)
from zero_fn.deepspeed import DeepSpeedSetup, from_deepspeed
from zero_fn.errors import (
    CheckpointError,
    ConfigError,
    DisagreementError,
    LayoutError,
    LostRankError,
    MeshError,
    PlacementError,
    ShardedAccessError,
    StaleError,
    StateError,
    StorageError,
    TierError,
    UnitError,
    ZeroError,
)
from zero_fn.inspect.check import check, is_transformed
from zero_fn.inspect.describe import Description, describe
from zero_fn.inspect.memory import Held, held
from zero_fn.launch import launch
from zero_fn.local.from_environment import StartedRank, from_environment
from zero_fn.local.gloo import give_groups_one_thread
from zero_fn.local.preemption import Preemption, preemption
from zero_fn.monitor.metrics import Metrics, metrics
from zero_fn.owners import ByOwner, by_owner
from zero_fn.planning import LinkSpeeds, Plan, Proposal, Proposals, autoplan, measure_links, plan
from zero_fn.profiling import Profile, profile
from zero_fn.streamed import States8bit, Streamed, states8bit, streamed
from zero_fn.transforms.accumulate import accumulate
from zero_fn.transforms.checkpoint_activations import checkpoint_activations
from zero_fn.transforms.flatten_subclasses import flatten_subclasses
from zero_fn.transforms.forward_methods import gather_in
from zero_fn.transforms.hybrid import hybrid, zero1, zero2, zero3
from zero_fn.transforms.materialize import materialize
from zero_fn.transforms.offload import offload
from zero_fn.transforms.offloaded_states import Evicted, evict
from zero_fn.transforms.precision import precision
from zero_fn.transforms.shard import replicate, shard_grads, shard_optimizer, shard_params
from zero_fn.transforms.tile import tile, untiled
from zero_fn.transforms.unsharded import refresh, unsharded
from zero_fn.transport.traffic import Sent, traffic
from zero_fn.transport.waiting import guard
from zero_fn.values.tiers import cpu, nvme
from zero_fn.values.units import by_size
from zero_fn.values.wire import Wire, delta4, float8, int4, int8
from zero_fn.weights import Weights, WeightsVersion, apply_weights, weights

__version__ = "0.2.0"

__all__ = [
    "Average",
    "ByOwner",
    "Checkpoint",
    "CheckpointError",
    "ConfigError",
    "DeepSpeedSetup",
    "Description",
    "DisagreementError",
    "Evicted",
    "Held",
    "LayoutError",
    "LinkSpeeds",
    "LostRankError",
    "MeshError",
    "Metrics",
    "Mirror",
    "PlacementError",
    "Plan",
    "Preemption",
    "Profile",
    "Proposal",
    "Proposals",
    "Saving",
    "Sent",
    "ShardedAccessError",
    "StaleError",
    "StartedRank",
    "StateError",
    "States8bit",
    "StorageError",
    "Streamed",
    "TierError",
    "UnitError",
    "Weights",
    "WeightsVersion",
    "Wire",
    "ZeroError",
    "accumulate",
    "apply_weights",
    "autoplan",
    "by_owner",
    "by_size",
    "check",
    "checkpoint_activations",
    "checkpoints",
    "cpu",
    "delta4",
    "describe",
    "ema",
    "evict",
    "flatten_subclasses",
    "float8",
    "from_deepspeed",
    "from_environment",
    "gather_in",
    "give_groups_one_thread",
    "guard",
    "held",
    "hybrid",
    "int4",
    "int8",
    "is_transformed",
    "launch",
    "load",
    "load_pretrained",
    "materialize",
    "measure_links",
    "metrics",
    "mirror",
    "nvme",
    "offload",
    "plan",
    "precision",
    "preemption",
    "profile",
    "refresh",
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
    "untiled",
    "weights",
    "zero1",
    "zero2",
    "zero3",
]
