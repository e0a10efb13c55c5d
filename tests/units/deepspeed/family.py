"""The shapes of the DeepSpeed configs that libraries around transformers ship, as of August 2026, written down by hand.

transformers   tests/units/deepspeed, and the documentation
accelerate     examples/deepspeed_config_templates, tests/units/deepspeed, an example of long sequences
trl            accelerate_configs, as the dict that accelerate's DeepSpeedPlugin makes of the YAML
axolotl        deepspeed_configs
LLaMA-Factory  examples/deepspeed
"""

from __future__ import annotations

from typing import Any

from tests.units.deepspeed.configs import Json

__all__ = ["ARGUMENTS", "FAMILY"]

_BATCHES: Json = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
_STEPS: Json = {"gradient_accumulation_steps": "auto", "gradient_clipping": "auto"}
_SCALE: Json = {
    "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1
}  # fmt: skip
_DTYPES: Json = {"fp16": {"enabled": "auto", **_SCALE}, "bf16": {"enabled": "auto"}}
_HOST: Json = {"device": "cpu", "pin_memory": True}
_LIVE: Json = {"stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9}
_AUTO_SIZES: Json = dict.fromkeys(
    ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"), "auto"
)


def _optimizer(*names: str, **params: Any) -> Json:
    return {"type": "AdamW", "params": {**dict.fromkeys(names, "auto"), **params}}


def _warmup(kind: str, *more: str) -> Json:
    names = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", *more)
    return {"type": kind, "params": dict.fromkeys(names, "auto")}


def _stage_2(**more: Any) -> Json:
    zero = {"allgather_partitions": True, "allgather_bucket_size": 2e8, "reduce_scatter": True}
    return {
        "stage": 2,
        "overlap_comm": True,
        "reduce_bucket_size": "auto",
        "contiguous_gradients": True,
        **zero,
        **more,
    }


def _stage_3(**more: Any) -> Json:
    zero = {"stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9}
    save = {"stage3_gather_16bit_weights_on_model_save": "auto"}
    return {**zero, **_AUTO_SIZES, **_LIVE, **save, **more}


# -- accelerate, transformers, trl -------------------------------------------------------------------------------------

_ONE_STEP: Json = {"gradient_accumulation_steps": 1, "gradient_clipping": "auto", **_BATCHES}
_LOGGED: Json = {"steps_per_print": 2000, "wall_clock_breakdown": False}
_OFFLOAD: Json = {"offload_optimizer": _HOST, "offload_param": _HOST}


def _template(zero: Json) -> Json:
    return {
        "fp16": {"enabled": True, **_SCALE},
        "optimizer": _optimizer("lr", "weight_decay", torch_adam=True, adam_w_mode=True),
        "scheduler": _warmup("WarmupDecayLR", "total_num_steps"),
        "zero_optimization": zero,
        **_ONE_STEP,
        **_LOGGED,
    }


def _documented(zero: Json) -> Json:
    return {"zero_optimization": zero}


_PATHS: Json = {name: {**_HOST, "nvme_path": "/nvme"} for name in ("offload_optimizer", "offload_param")}
_ACCELERATE: dict[str, Json] = {
    "accelerate stage 1": _template({"stage": 1, "reduce_bucket_size": "auto"}),
    "accelerate stage 2": _template(_stage_2()),
    "accelerate stage 2, offload": _template(_stage_2(offload_optimizer=_HOST)),
    "accelerate stage 3": _template(_stage_3()),
    "accelerate stage 3, offload": _template(_stage_3(**_OFFLOAD)),
    "accelerate, tests, stage 2": {
        **_DTYPES, **_ONE_STEP, **_LOGGED, "zero_optimization": _stage_2(offload_optimizer=_HOST),
        "optimizer": _optimizer("lr", "weight_decay"), "scheduler": _warmup("WarmupLR"),
    },
    "accelerate, tests, stage 2, model only": {
        **_DTYPES, **_ONE_STEP, **_LOGGED, "zero_optimization": _stage_2(offload_optimizer=_HOST),
    },
    "accelerate, tests, stage 3": {
        **_DTYPES, **_ONE_STEP, **_LOGGED, "zero_optimization": _stage_3(**_PATHS),
        "optimizer": _optimizer("lr", "weight_decay", torch_adam=True, adam_w_mode=True),
        "scheduler": _warmup("WarmupLR"),
    },
    "accelerate, tests, stage 3, model only": {**_DTYPES, "zero_optimization": _stage_3(**_OFFLOAD), "train_batch_size": 4},
    "accelerate, long sequences": {
        "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}, "gradient_accumulation_steps": 1, **_BATCHES,
        "seq_parallel_communication_data_type": "bf16",
    },
}  # fmt: skip
_TRANSFORMERS: dict[str, Json] = {
    "transformers, tests, stage 2": {
        **_DTYPES, **_BATCHES, **_STEPS, **_LOGGED, "scheduler": _warmup("WarmupLR"),
        "zero_optimization": _stage_2(offload_optimizer=_HOST, reduce_bucket_size=2e8),
        "optimizer": _optimizer("lr", "betas", "eps", "weight_decay"),
    },
    "transformers, tests, stage 3": {
        "fp16": {"enabled": True, **_SCALE}, **_LOGGED,
        "zero_optimization": {
            **_stage_3(**_OFFLOAD), "sub_group_size": 1e14, **dict.fromkeys(_AUTO_SIZES, 0),
            "stage3_gather_fp16_weights_on_model_save": True,
        },
        "optimizer": {
            "type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}
        },
        "scheduler": {
            "type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 500}
        },
    },
    "transformers, documentation, stage 1": _documented({"stage": 1}),
    "transformers, documentation, stage 2": _documented({
        **_stage_2(offload_optimizer=_HOST), "allgather_bucket_size": 5e8, "reduce_bucket_size": 5e8,
        "round_robin_gradients": True,
    }),
    "transformers, documentation, stage 3": _documented(_stage_3(**_OFFLOAD)),
}  # fmt: skip


def _of_plugin(stage: int, **more: Any) -> Json:
    none = {"device": "none", "nvme_path": None}
    zero = {"stage": stage, "offload_optimizer": none, "offload_param": none}
    zero["stage3_gather_16bit_weights_on_model_save"] = stage == 3
    sizes = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 1}
    return {**sizes, "zero_optimization": zero, "bf16": {"enabled": True}, "steps_per_print": None, **more}


_TRL: dict[str, Json] = {
    "trl stage 1": _of_plugin(1),
    "trl stage 2": _of_plugin(2, gradient_accumulation_steps="auto", gradient_clipping="auto"),
    "trl stage 3": _of_plugin(3, gradient_accumulation_steps="auto", zero_allow_untested_optimizer=True),
}

# -- axolotl, LLaMA-Factory --------------------------------------------------------------------------------------------

_AXOLOTL_SCALE: Json = {"enabled": "auto", "auto_cast": False, **_SCALE, "initial_scale_power": 32}
_AXOLOTL: Json = {**_BATCHES, **_STEPS, "wall_clock_breakdown": False}
_BOTH: Json = {**_AXOLOTL, "bf16": {"enabled": "auto"}, "fp16": _AXOLOTL_SCALE}
_COMPILED: Json = {"compile": {"disable": False, "backend": "inductor"}}
_ONE: Json = {"stage": 1, "overlap_comm": True}
_TWO: Json = {"stage": 2, "offload_optimizer": {"device": "cpu"}, "contiguous_gradients": True, "overlap_comm": True}
_THREE: Json = {
    "stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 0, "reduce_bucket_size": "auto",
    "prefetch_bucket_size": "auto", "param_persistence_threshold": "auto", "max_live_parameters": 0,
    "max_reuse_distance": 0, "gather_16bit_weights_on_model_save": True,
}  # fmt: skip
_IN_BF16: Json = {**_AXOLOTL, "bf16": {"enabled": True}, "zero_allow_untested_optimizer": True}
_UNFORCED: Json = {**_IN_BF16, "zero_force_ds_cpu_optimizer": False}
_AXOLOTLS: dict[str, Json] = {
    "axolotl zero1": {**_BOTH, "zero_optimization": _ONE},
    "axolotl zero1_torch_compile": {**_BOTH, **_COMPILED, "zero_optimization": _ONE},
    "axolotl zero2": {**_BOTH, "zero_optimization": _TWO},
    "axolotl zero2_torch_compile": {**_BOTH, **_COMPILED, "zero_optimization": _TWO},
    "axolotl zero3": {**_BOTH, "zero_optimization": _THREE},
    "axolotl zero3_bf16": {**_IN_BF16, "zero_optimization": _THREE},
    "axolotl zero3_bf16_cpuoffload_all": {**_UNFORCED, "zero_optimization": {**_THREE, **_OFFLOAD}},
    "axolotl zero3_bf16_cpuoffload_params": {**_UNFORCED, "zero_optimization": {**_THREE, "offload_param": _HOST}},
}
_FACTORY: Json = {**_BATCHES, **_STEPS, **_DTYPES, "zero_allow_untested_optimizer": True}
_FACTORY_2: Json = _stage_2(
    overlap_comm=False, allgather_bucket_size=5e8, reduce_bucket_size=5e8, round_robin_gradients=True
)
_FACTORY_3: Json = _stage_3(overlap_comm=False, stage3_gather_16bit_weights_on_model_save=True)
_FACTORIES: dict[str, Json] = {
    "LLaMA-Factory z0": {**_FACTORY, "zero_optimization": {**_FACTORY_2, "stage": 0}},
    "LLaMA-Factory z2": {**_FACTORY, "zero_optimization": _FACTORY_2},
    "LLaMA-Factory z2, offload": {**_FACTORY, "zero_optimization": {**_FACTORY_2, "offload_optimizer": _HOST}},
    "LLaMA-Factory z2, tensor parallel": {
        **_FACTORY, "_comment": "supported models: ...", "zero_optimization": _FACTORY_2,
        "tensor_parallel": {"autotp_size": 2},
    },
    "LLaMA-Factory z3": {**_FACTORY, "zero_optimization": _FACTORY_3},
    "LLaMA-Factory z3, offload": {**_FACTORY, "zero_optimization": {**_FACTORY_3, **_OFFLOAD}},
    "LLaMA-Factory z3, fp8": {
        "train_micro_batch_size_per_gpu": "auto", **_STEPS, "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": True, "fp16": {"enabled": False, **_SCALE}, "bf16": {"enabled": "auto"},
        "zero_optimization": {
            **_FACTORY_3, "offload_optimizer": {"device": "cpu", "pin_memory": False}, "reduce_bucket_size": 12845056,
            "stage3_prefetch_bucket_size": 11560550, "stage3_param_persistence_threshold": 35840,
        },
        "steps_per_print": 10000000, "comms_config": {"verbose": False},
        "monitor_config": {"enabled": True, "tag": "DeepSpeedMonitor", "csv_monitor": {"enabled": False}},
    },
}  # fmt: skip

FAMILY: dict[str, Json] = {**_ACCELERATE, **_TRANSFORMERS, **_TRL, **_AXOLOTLS, **_FACTORIES}
"""33 configs, for a Trainer with the arguments below."""


class ARGUMENTS:
    """What the arguments of a Trainer say, on two ranks."""

    per_device_train_batch_size, gradient_accumulation_steps, max_grad_norm = 2, 1, 1.0
    learning_rate, weight_decay, adam_beta1, adam_beta2, adam_epsilon = 3e-5, 3e-7, 0.8, 0.999, 1e-8
    fp16_full_eval = bf16_full_eval = False
    mixed_precision = "no"  # of bf16, fp16 and the launcher

    @staticmethod
    def get_warmup_steps(steps: int) -> int:
        """A tenth of the training."""
        return steps // 10
