"""The files of a model in a Trainer's folder, which `from_pretrained` reads."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

import zero_fn as zf
from zero_fn.checkpoint.huggingface.write import export
from zero_fn.integrations.adapters import adapter_names, is_adapted, whole_prompts
from zero_fn.integrations.trainer_checkpoints import STATES, load_weights, whole_state

__all__ = ["load_model", "write_model"]


def write_model(trainer: Any, folder: str, dtype: torch.dtype | None) -> None:
    """Writes the model of a Trainer, and what the Trainer writes beside it. All ranks call it.

    Each rank writes its part of a model whose files have one tensor for each of its own; of any
    other model, one rank writes whole values.
    """
    model, state, args = trainer.model, dict[str, Any](), trainer.args
    block: AbstractContextManager[object]
    if isinstance(model, PreTrainedModel) and not args.save_on_each_node and _is_streamable(model):
        convert = partial(_in_files, model)
        export(model, folder, dtype=dtype, convert=convert, replaces=True)
        # The Trainer writes the rest.
        block = patch.object(model, "save_pretrained", lambda *_, **__: None)
    else:
        names = adapter_names(model)
        state = whole_state(model, keep=args.should_save, names=names, dtype=dtype)
        block = whole_prompts(model)
    with block:
        if args.should_save:
            trainer._save(folder, state_dict=state)


def _in_files(model: PreTrainedModel, entries: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that files of transformers have for tensors of the model:
    experts that it stacks are separate in files."""
    found: dict[str, Tensor] = revert_weight_conversion(model, entries)
    return found


def _is_streamable(model: PreTrainedModel) -> bool:
    """Whether each tensor in files is made of one tensor of the model,
    and transformers writes nothing but tensors."""
    if model._auto_class is not None:  # it writes the code of the model, too
        return False
    entries = {
        name: torch.empty(p.shape, dtype=p.dtype, device="meta")
        for name, p in model.named_parameters()
    }
    together = [*_in_files(model, entries).items()]
    alone = [each for entry in entries.items() for each in _in_files(model, dict([entry])).items()]
    first, second = (
        sorted((name, str(value.shape), str(value.dtype)) for name, value in found)
        for found in (together, alone)
    )
    return first == second


def load_model(model: nn.Module, folder: str) -> bool:
    """Loads the weights of a checkpoint.

    Returns False where the Trainer does it by itself: models with adapters.

    Each rank reads its shards from `zero_fn/`. A checkpoint without that folder is read whole by
    `from_pretrained`: names in files are not always those of the model (experts of Mixtral), and
    the Trainer skips what it does not find.
    """
    _require_same_kind(Path(folder), model)
    if not isinstance(model, PreTrainedModel):
        return False
    if (Path(folder) / STATES).is_dir():
        load_weights(Path(folder) / STATES, model)
        return True
    saved, found = type(model).from_pretrained(folder, dtype="auto", output_loading_info=True)
    if found["missing_keys"]:
        raise zf.errors.CheckpointError(
            f"The checkpoint lacks {len(found['missing_keys'])} parameters of the model.",
            first=min(found["missing_keys"]),
            folder=folder,
            fix="resume with the model that was saved; or begin another run: "
            "from_pretrained(checkpoint), then train()",
        )
    model.load_state_dict(saved.state_dict())
    return True


def _require_same_kind(folder: Path, model: nn.Module) -> None:
    """Refuses a checkpoint of adapters alone for a model without,
    and one of a whole model for a model with adapters."""
    has_adapters = any(folder.rglob("adapter_config.json"))
    if has_adapters and isinstance(model, PreTrainedModel) and not hasattr(model, "peft_config"):
        raise zf.errors.CheckpointError(
            "The checkpoint holds adapters alone, and the model has none.",
            folder=folder,
            fix="resume with adapters: ZeroTrainer(model=get_peft_model(base, config), ...); or "
            "begin another run from them: PeftModel.from_pretrained(base, folder, "
            "is_trainable=True)",
        )
    if is_adapted(model) and not has_adapters and (folder / "config.json").is_file():
        raise zf.errors.CheckpointError(
            "The checkpoint holds a whole model, and the model has adapters.",
            folder=folder,
            fix="resume with the model that was saved; or begin another run from its weights: "
            "get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config)",
        )
