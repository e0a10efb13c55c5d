"""DeepSpeed configs as people write them, and ways to spoil them."""

import copy
import sys
from typing import Any

__all__ = ["CONFIGS", "Json", "changed", "leaves", "shifted"]

Json = dict[str, Any]

ADAM = {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}}
WARMUP = {
    "type": "WarmupDecayLR",
    "params": {"total_num_steps": 1000, "warmup_num_steps": 100, "warmup_max_lr": 3e-4},
}

STAGE_3 = {  # of the documentation of transformers, filled in
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
    "bf16": {"enabled": True},
    "fp16": {
        "enabled": False,
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "optimizer": ADAM,
    "scheduler": WARMUP,
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}
STAGE_2 = {
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True, "adam_w_mode": False}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_type": "linear"}},
    "fp16": {"enabled": True, "loss_scale": 128.0},
    "communication_data_type": "fp32",
    "data_types": {"grad_accum_dtype": "fp32"},
    "prescale_gradients": False,
    "gradient_predivide_factor": 1.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {
        "stage": 2,
        "allgather_partitions": True,
        "allgather_bucket_size": 5e8,
        "reduce_scatter": True,
        "reduce_bucket_size": 500000000,
        "round_robin_gradients": True,
        "ignore_unused_parameters": True,
        "offload_optimizer": {"device": "none", "nvme_path": "/nowhere"},
    },
}
INFINITY = {
    "train_batch_size": 16,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 100, "warmup_num_steps": 10}},
    "aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 1, "single_submit": False, "overlap_events": True},
    "activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": False, "number_checkpoints": 4},
    "checkpoint": {"tag_validation": "Warn", "load_universal": False},
    "tensorboard": {"enabled": False, "output_path": "runs"},
    "zero_optimization": {
        "stage": 3,
        "zero_quantized_weights": False,
        "zero_hpz_partition_size": 1,
        "stage3_param_persistence_threshold": 1e4,
        "stage3_model_persistence_threshold": sys.maxsize,
        "offload_optimizer": {
            "device": "nvme",
            "nvme_path": "/local_nvme",
            "ratio": 0.5,
            "buffer_count": 4,
            "pipeline_read": True,
            "pipeline_write": True,
            "fast_init": False,
        },
        "offload_param": {
            "device": "nvme",
            "nvme_path": "/local_nvme",
            "buffer_count": 5,
            "buffer_size": 1e8,
            "max_in_cpu": 1e9,
            "pin_memory": False,
        },
    },
}
CONFIGS = {"stage 3": STAGE_3, "stage 2": STAGE_2, "infinity": INFINITY}
"""For two ranks."""


def leaves(config, path=()):
    """Every entry that is no object, by its path."""
    for name, value in config.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*path, name))
        else:
            yield (*path, name), value


def changed(config, path, value):
    """A copy with another value at a path, of which all but the last name are there."""
    found = copy.deepcopy(config)
    inside = found
    for name in path[:-1]:
        inside = inside[name]
    inside[path[-1]] = value
    return found


def shifted(config, path, name):
    """A copy in which the entry at a path has another name."""
    found = copy.deepcopy(config)
    inside = found
    for step in path[:-1]:
        inside = inside[step]
    inside[name] = inside.pop(path[-1])
    return found
