"""ZeRO as composable functions on DTensor placements."""

from zero_fn.recipes import zero1, zero2, zero3
from zero_fn.traffic import traffic
from zero_fn.transforms.precision import precision
from zero_fn.transforms.shard import replicate, shard_grads, shard_optimizer, shard_params
