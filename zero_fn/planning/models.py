"""A model to plan for, on `meta`: from a `config.json` of Hugging Face,
from `module:function`, or of a well-known shape."""

from __future__ import annotations

import copy
import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zero_fn.errors import ConfigError

__all__ = ["SHAPES", "PlannedModel", "copy_with", "model_of", "on_meta"]


def _llama(hidden: int, inner: int, layers: int, heads: int, **more: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": 32000,
        **more,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "7B": _llama(4096, 11008, 32, 32),
    "13B": _llama(5120, 13824, 40, 40),
    "30B": _llama(6656, 17920, 60, 52),
    "70B": _llama(8192, 28672, 80, 64, num_key_value_heads=8),
    "175B": {
        "model_type": "gpt2",
        "n_embd": 12288,
        "n_layer": 96,
        "n_head": 96,
        "n_positions": 4096,
    },
    "405B": _llama(16384, 53248, 126, 128, num_key_value_heads=8, vocab_size=128256),
    "8x22B": _llama(6144, 16384, 56, 48, num_key_value_heads=8, vocab_size=32768)
    | {"model_type": "mixtral"},
}
"""Configs of transformers: LLaMA 7B, 13B and 33B, Llama 2 70B, GPT-3,
Llama 3.1 405B, Mixtral 8x22B."""


@dataclass(frozen=True)
class PlannedModel:
    """A model on `meta`, and how a program gets it."""

    module: nn.Module
    # Inputs of one microbatch, on `meta`; None if nobody said.
    inputs: Mapping[str, Any] | tuple[Any, ...] | None
    tokens: int  # of one microbatch; 0 if nobody said
    imports: str  # a line of Python,
    source: str  # and those after it that make `model` on `meta`


def model_of(what: str, sequence: int, microbatch: int) -> PlannedModel:
    """The model that a word of a command line means.

    Args:
        what: A `config.json`, or a folder with one; `module:function`, which returns a module, or a
            module and the arguments of its forward, and is called on `meta`; or a name of `SHAPES`.
        sequence: Tokens of a sequence of a language model.
        microbatch: Sequences of a microbatch.

    Raises:
        ConfigError: There is no such model, or it cannot be made.
    """
    path = Path(what)
    path = path / "config.json" if path.is_dir() else path
    try:
        if what in SHAPES:
            given = ", ".join(f"{name}={value!r}" for name, value in SHAPES[what].items())
            return _of_config(SHAPES[what], sequence, microbatch, f"AutoConfig.for_model({given})")
        if path.is_file():
            source = f"AutoConfig.from_pretrained({os.fspath(path.parent)!r})"
            return _of_config(json.loads(path.read_text()), sequence, microbatch, source)
        if ":" in what:
            return _of_function(what)
    except ConfigError:
        raise
    except Exception as error:  # whatever code of users and of transformers raises
        raise ConfigError(
            f"The model {what!r} cannot be made on `meta`.",
            why=f"{type(error).__name__}: {error}",
            fix="a config.json of transformers, or module:function that makes the model "
            "under torch.device('meta')",
        ) from error
    raise ConfigError(
        f"There is no model {what!r}.",
        got="neither a file, nor a folder with a config.json, nor module:function, nor a name",
        names=", ".join(SHAPES),
        fix="the path of a config.json",
    )


def _of_config(
    config: Mapping[str, Any], sequence: int, microbatch: int, source: str
) -> PlannedModel:
    if "model_type" not in config:
        raise ConfigError(
            "The config of a model has no model_type.",
            has=", ".join(sorted(config)),
            fix="the config.json of a model of transformers, "
            'which has "model_type": "llama" or another',
        )
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "A size such as 7B, and a config of Hugging Face, are made by transformers.",
            why=str(error),
            fix="pip install transformers; or give module:function, which makes the model",
        ) from error
    made = transformers.AutoConfig.for_model(**{**config, "use_cache": False})
    names = [name for name in config.get("architectures") or () if hasattr(transformers, name)]
    maker: Any = (
        getattr(transformers, names[0])._from_config
        if names
        else transformers.AutoModelForCausalLM.from_config
    )
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module: nn.Module = maker(made, dtype=torch.float32)
        tokens = torch.zeros(microbatch, sequence, dtype=torch.long)
    made_by = f"{names[0]}._from_config" if names else "AutoModelForCausalLM.from_config"
    classes = ", ".join(sorted({"AutoConfig", made_by.partition(".")[0]}))
    lines = f'config = {source}\nwith torch.device("meta"):\n    model = {made_by}(config)'
    has_tokens = hasattr(module, "get_input_embeddings") and module.main_input_name == "input_ids"
    inputs = {"input_ids": tokens, "labels": tokens} if has_tokens else None
    return PlannedModel(
        module.train(),
        inputs,
        tokens.numel() if has_tokens else 0,
        f"from transformers import {classes}",
        lines,
    )


def _of_function(what: str) -> PlannedModel:
    name, _, attribute = what.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        function = getattr(import_module(name), attribute)
    finally:
        sys.path.remove(os.getcwd())
    with torch.device("meta"):
        found = function()
    module, given = found if isinstance(found, tuple) else (found, None)
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"{what} returns no module.",
            got=type(module).__name__,
            fix="return model, or (model, inputs)",
        )
    inputs = given if given is None or isinstance(given, Mapping | tuple) else (given,)
    leaves = tree_leaves(inputs)
    tokens = next(
        (
            leaf.numel()
            for leaf in leaves
            if isinstance(leaf, Tensor) and not leaf.is_floating_point()
        ),
        0,
    )
    left = "model" if given is None else "model, _"
    lines = f'with torch.device("meta"):\n    {left} = {attribute}()'
    return PlannedModel(module, inputs, tokens, f"from {name} import {attribute}", lines)


def copy_with(module: nn.Module, made: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy of a module with other parameters and buffers: what `made` returns for each."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(made(parameter), parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = made(buffer)
    return copy.deepcopy(module, memo)


def on_meta(module: nn.Module) -> nn.Module:
    """A copy without memory: parameters and buffers of the same shapes on `meta`."""
    return copy_with(module, lambda tensor: torch.empty_like(tensor, device="meta"))
