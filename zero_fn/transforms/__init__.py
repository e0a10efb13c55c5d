"""The verbs: each a function from a module to a new module.

shard                    replicate, shard_optimizer, shard_grads, shard_params
hybrid                   shards over one axis, replicates over another
precision                dtypes of computing, gradients and rest; formats on the wire
offload                  parameters, gradients and states in another tier
offload_states           all state of a model out of memory, and back (`offloaded_states`)
checkpoint_activations   forwards that run again in the backward
                         (`recomputation`, `offloaded_activations`)
accumulate, unsharded    blocks: several backwards and one reduction; whole parameters
                         (`accumulation_window`: one that stays open between calls)
materialize              initialises a model on `meta`, unit by unit
register_forward_method  methods that read whole parameters (`forward_methods`)
tile                     huge linears and embeddings as parts
flatten_subclasses       tensor subclasses (quantized, float8) as the plain tensors they are made of
substitute               what each of them does: a copy of the module with other parameters
                         (`closures`, `selection`, `loading`, `generating`, `ddp_refusal`)
"""

from zero_fn.transforms.flatten_subclasses import flatten_subclasses
from zero_fn.transforms.tile import untiled
from zero_fn.transforms.unsharded import refresh

__all__ = ["flatten_subclasses", "refresh", "untiled"]
