"""How a model computes: `bf16`, `fp16`, `data_types`, `torch_autocast`,
`activation_checkpointing`, `compile`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zero_fn.deepspeed.entries import Entries
from zero_fn.values.dtypes import SHORT_NAMES

__all__ = ["COMPUTING", "TENSOR", "Computing", "run_under_autocast"]

_ZERO = "zero_optimization"
_NARROW = ("stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save")
_PARKS = "activation_checkpointing.cpu_checkpointing"
_RECOMPUTES = (
    "activation_checkpointing.partition_activations",
    "pipeline.activation_checkpoint_interval",
)
TENSOR = ("tensor_parallel.autotp_size", "tensor_parallel.tp_size", "tensor_parallel.tp.tp_size")
"""Entries that say over how many ranks a model is cut by its own plan."""


@dataclass(frozen=True, slots=True)
class Computing:
    """How a model computes."""

    compute: torch.dtype | None  # of gathered parameters; None: the dtype at rest
    reduce: torch.dtype  # of gradient sums
    grads: torch.dtype | None  # of gradients at rest; None: that of their parameters
    # Dtype of trained parameters at rest; None: float32, and that of the model for frozen ones.
    rest: torch.dtype | None
    saved: torch.dtype | None  # in which a Trainer saves its model; None: that at rest
    buffers: torch.dtype | None  # of floating point buffers; None: as they are
    # Patterns in names of buffers in float32; None: those of the model.
    keeps_wide: tuple[str, ...] | None
    autocast: torch.dtype | None  # of torch.autocast around forwards
    recomputes: bool  # whether blocks are computed again in backward
    parks: bool  # whether what they keep is on the host
    compiles: Mapping[str, Any] | None  # options with which units are compiled


def _compute(entries: Entries) -> torch.dtype | None:
    """The dtype in flight."""
    if entries["bf16.enabled"] and entries["fp16.enabled"]:
        raise entries.refused(
            "fp16.enabled", "one dtype, and bf16.enabled is true", '"fp16": {"enabled": false}'
        )
    own = "bf16" if entries["bf16.enabled"] else "fp16" if entries["fp16.enabled"] else "fp32"
    asked = entries["data_types.param_dtype"] or own
    if asked != own and (own, asked) != ("fp32", "bf16"):
        wants = f'"{own}", in which the model computes'
        fix = f'"param_dtype": "{own}"; or remove it'
        raise entries.refused("data_types.param_dtype", wants, fix)
    return None if asked == "fp32" else SHORT_NAMES[asked]


def _rest(entries: Entries) -> torch.dtype | None:
    """The dtype of trained parameters at rest: float32, unless both they and
    their states are to be narrow."""
    masters = entries["bf16.bf16_master_weights_and_grads"]
    states = entries["bf16.bf16_optimizer_states"]
    if masters != states:
        said = str(masters).lower()
        fix = f'"bf16_optimizer_states": {said}'
        raise entries.refused(
            "bf16.bf16_optimizer_states", f"{said}: states have the dtype of their masters", fix
        )
    return torch.bfloat16 if masters and entries["bf16.enabled"] else None


def _autocast(entries: Entries) -> torch.dtype | None:
    if not entries["torch_autocast.enabled"]:
        return None
    if (
        entries["torch_autocast.dtype"].endswith("16")
        and "b" not in entries["torch_autocast.dtype"]
    ):
        fix = '"torch.bfloat16"; or "fp16": {"enabled": true}'
        raise entries.refused("torch_autocast.dtype", "bfloat16: float16 needs a loss scale", fix)
    return torch.bfloat16


def _keeps_wide(entries: Entries) -> tuple[str, ...] | None:
    path = "data_types.keep_in_fp32_modules"
    return None if entries[path] == "auto" else entries.words(path)


def _compiles(entries: Entries) -> Mapping[str, Any] | None:
    is_asked = (
        entries["compile.deepcompile"]
        or entries["compile.enabled"]
        or entries["compile.disable"] is False
    )
    options = entries["compile.kwargs"] or {}
    if not isinstance(options, Mapping):
        raise entries.refused("compile.kwargs", "an object", '"kwargs": {"dynamic": true}')
    others = [path for path in (*_RECOMPUTES, _PARKS) if entries[path]]
    others += [path for path in TENSOR if entries[path] > 1]
    if is_asked and others:
        raise entries.refused(
            others[0], "none beside compile: torch compiles no such blocks", "remove it, or compile"
        )
    return {"backend": entries["compile.backend"], **options} if is_asked else None


def _reduce(entries: Entries) -> torch.dtype:
    """The dtype of gradient sums."""
    name = entries["communication_data_type"] or "fp32"
    if name != "fp32" and not (entries["bf16.enabled"] or entries["fp16.enabled"]):
        wants = "fp32: gradients are sent in the dtype of the computation"
        raise entries.refused(
            "communication_data_type", wants, '"bf16": {"enabled": true}; or remove it'
        )
    if name != "fp32" and entries[f"{_ZERO}.zero_quantized_gradients"]:
        wants = "fp32: what travels in 4 bits is summed in float32"
        raise entries.refused("communication_data_type", wants, '"communication_data_type": "fp32"')
    return SHORT_NAMES[name]


def _grads(entries: Entries) -> torch.dtype | None:
    """The dtype of gradients at rest."""
    path = "data_types.grad_accum_dtype"
    if entries[path] == "fp32":
        return None
    if not entries["bf16.enabled"]:
        wants = '"fp32": only bf16 computes gradients that may rest in 16 bits'
        raise entries.refused(path, wants, '"bf16": {"enabled": true}; or remove it')
    return torch.bfloat16


COMPUTING: Mapping[str, Callable[[Entries], Any]] = {
    "compute": _compute,
    "reduce": _reduce,
    "grads": _grads,
    "rest": _rest,
    "saved": lambda entries: (
        _compute(entries) if any(entries[f"{_ZERO}.{name}"] for name in _NARROW) else None
    ),
    "buffers": lambda entries: SHORT_NAMES.get(entries["data_types.buffer_dtype"]),
    "keeps_wide": _keeps_wide,
    "autocast": _autocast,
    "recomputes": lambda entries: any(entries[path] for path in (*_RECOMPUTES, _PARKS)),
    "parks": lambda entries: entries[_PARKS],
    "compiles": _compiles,
}
"""What reads each field of `Computing`."""


class _AutocastHooks:
    """Opens a block of torch.autocast before each forward, and closes it after, also after an
    error. Hooks, because a copy of the model has them, too."""

    def __init__(self, device_type: str, dtype: torch.dtype) -> None:
        self.device_type = device_type
        self.dtype = dtype
        self.open: list[torch.autocast] = []

    def before(self, *_: object) -> None:
        """Begins a forward."""
        self.open.append(torch.autocast(self.device_type, self.dtype))
        self.open[-1].__enter__()  # type: ignore[no-untyped-call]

    def after(self, *_: object) -> None:
        """Ends it."""
        self.open.pop().__exit__(None, None, None)


def run_under_autocast(model: nn.Module, device_type: str, dtype: torch.dtype) -> None:
    """Makes each call of a model run under torch.autocast, unless it does already."""
    hooks = _AutocastHooks(device_type, dtype)
    if not any(
        isinstance(getattr(hook, "__self__", None), _AutocastHooks)
        for hook in model._forward_pre_hooks.values()
    ):
        model.register_forward_pre_hook(hooks.before, prepend=True)
        model.register_forward_hook(hooks.after, always_call=True)
