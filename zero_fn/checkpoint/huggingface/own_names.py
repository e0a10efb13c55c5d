"""Whether tensors have the names in files that they have in the model."""

from __future__ import annotations

from torch import nn

from zero_fn.errors import CheckpointError

__all__ = ["require_own_names"]


def require_own_names(model: nn.Module) -> None:
    """Refuses models whose tensors have other names in files of transformers than in the model."""
    if hasattr(model, "peft_config"):
        raise CheckpointError(
            "A model with adapters is not what from_pretrained loads.",
            model=type(model).__name__,
            fix="ZeroTrainer.save_model() writes adapters; or merge them before the transform: "
            "model.merge_and_unload()",
        )
    if getattr(model, "is_quantized", False):
        raise CheckpointError(
            "A quantised model is not saved in a way that from_pretrained loads.",
            model=type(model).__name__,
            why="in files of transformers, a quantised weight and what it was quantised "
            "with have names of their own",
            fix="zf.save(folder, model); or, before the transform, "
            "model.save_pretrained(folder) on rank 0",
        )
