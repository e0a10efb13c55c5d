"""Prints, as JSON, the entries that an installed DeepSpeed reads from its config, each with its default.

    PYTHONPATH=FOLDER DS_ACCELERATOR=cpu python keys_of_deepspeed.py > keys_of_deepspeed.json

Sections that are models of pydantic list their fields. Of the others, a dict notes what the reader asks for, and the default
that it gives; null where it gives none.
"""

import inspect
import json
from typing import get_args

from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.compile.config import CompileConfig
from deepspeed.monitor.config import DeepSpeedMonitorConfig
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

MODELS = {
    "zero_optimization": DeepSpeedZeroConfig,
    "bf16": DeepSpeedBF16Config,
    "fp16": DeepSpeedFP16Config,
    "tensor_parallel": TPTrainingConfig,
    "compile": CompileConfig,
    "comms_logger": CommsLoggerConfig,
    "": DeepSpeedMonitorConfig,
}
DICTS = {
    "activation_checkpointing": {"profile": False},
    "aio": {"block_size": 1},
    "checkpoint": {"tag_validation": "WARN", "writer": {"type": "FAST"}},
    "data_types": {"grad_accum_dtype": None},
    "flops_profiler": {"enabled": False},
    "optimizer": {"type": "Adam", "params": {}},
    "scheduler": {"type": "WarmupLR", "params": {}},
    "timers": {"throughput": {"enabled": True}},
    "torch_autocast": {"enabled": True, "dtype": "torch.bfloat16", "lower_precision_safe_modules": []},
    "train_batch_size": 1,
}


class Asked(dict):
    """A dict that notes what it is asked for."""

    def __init__(self, values, path, notes):
        inside = {
            name: Asked(each, f"{path}{name}.", notes) if isinstance(each, dict) else each
            for name, each in values.items()
        }
        super().__init__(inside)
        self._path, self._notes = path, notes

    def _note(self, name, default=None):
        path = f"{self._path}{name}"
        if self._notes.get(path) is None:
            self._notes[path] = default if isinstance(default, int | float | str | list) else None

    def __contains__(self, name):
        self._note(name)
        return super().__contains__(name)

    def __getitem__(self, name):
        self._note(name)
        return super().__getitem__(name)

    def get(self, name, default=None):
        self._note(name, default)
        return super().get(name, default)

    def keys(self):
        return self


def fields(model, path):
    found = {}
    for own, field in model.model_fields.items():
        name, kinds = f"{path}{field.alias or own}", (field.annotation, *get_args(field.annotation))
        inner = next((kind for kind in kinds if inspect.isclass(kind) and issubclass(kind, BaseModel)), None)
        if inner is not None:
            found |= fields(inner, f"{name}.")
        else:
            default = None if field.default is PydanticUndefined else field.default
            found[name] = default if isinstance(default, int | float | str | list | None) else str(default)
    return found


def main():
    notes = {}
    DeepSpeedConfig(Asked(DICTS, "", notes))
    found = dict(notes)
    for section, model in MODELS.items():
        found |= fields(model, f"{section}." if section else "")
    for kind in ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"):
        for name, parameter in inspect.signature(getattr(lr_schedules, kind)).parameters.items():
            if name != "optimizer":
                default = None if parameter.default is inspect.Parameter.empty else parameter.default
                found.setdefault(f"scheduler.params.{name}", default)
    sections = {path.rpartition(".")[0] for path in found}
    rows = {path: value for path, value in sorted(found.items()) if path not in sections}
    print("{\n" + ",\n".join(f"{json.dumps(path)}: {json.dumps(value)}" for path, value in rows.items()) + "\n}")


if __name__ == "__main__":
    main()
