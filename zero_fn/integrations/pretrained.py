"""`placed`: `from_pretrained` straight into what rests, so that no rank ever holds the model whole.

transformers builds a model on meta, offers it to `maybe_distribute_model`, and then reads of each file what the local part of
each parameter needs. In place of its own distribution stands a transform; keys, ties, buffers and casts are still its own.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import nn
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.utils.quantization_config import QuantizationMethod

import zero_fn as zf
from zero_fn.integrations.placing import Place, place_module
from zero_fn.runtime.entry import runs_of, units_of
from zero_fn.transforms.substitute import move_buffers
from zero_fn.values.units import subclass_of

__all__ = ["placed"]


@contextmanager
def placed(place: Place[nn.Module]) -> Iterator[None]:
    """Makes `from_pretrained` of transformers return a transformed model; each rank reads only the shards that it owns.

        with placed(lambda model: zf.zero3(model, mesh["dp"])):
            model = AutoModelForCausalLM.from_pretrained(folder)

    What a rank reads goes to the device of its mesh, or to a tier, unit by unit. The model is on meta when `place` gets it:
    no transform that reads values may be part of it.

    With a `quantization_config` of torchao, or of a folder that was saved quantised, each rank holds the quantised model in
    host memory before its shards are cut from it: transformers quantises whole weights. `place` gets it with its values, as
    `zf.flatten_subclasses` leaves it, so adapters can be added there.

    Args:
        place: Any chain of transforms.

    Raises:
        ConfigError: transformers has no such hook; `from_pretrained` was told to distribute the model itself; or weights are
            quantised by another library than torchao.
        StateError: Nothing was loaded inside, or `place` transformed nothing.
    """
    if not hasattr(PreTrainedModel, "maybe_distribute_model"):
        raise zf.ConfigError(
            "This version of transformers cannot load a model that is transformed already.",
            why="it has no PreTrainedModel.maybe_distribute_model",
            fix="pip install 'transformers>=5.24'; or zf.zero3(AutoModelForCausalLM.from_pretrained(folder), mesh['dp'])",
        )
    loaded: list[nn.Module] = []
    read = functools.partial(_from_pretrained, PreTrainedModel.from_pretrained.__func__, place, loaded)
    distribute = functools.partial(_distribute, place)
    with (
        patch.object(PreTrainedModel, "from_pretrained", classmethod(read)),
        patch.object(PreTrainedModel, "maybe_distribute_model", classmethod(distribute)),
    ):
        yield
    if not loaded:
        raise zf.StateError(
            "Nothing was loaded inside placed().",
            fix="with placed(...): model = AutoModelForCausalLM.from_pretrained(folder)",
        )


def _trim() -> None:
    """Gives memory back that threads of transformers took for what they read: glibc keeps it, as much as the shards again."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _lacking(cls: type, **facts: object) -> zf.CheckpointError:
    return zf.CheckpointError(
        "The files lack parameters of the model.",
        model=cls.__name__,
        **facts,
        why="ranks would draw initial values for their parts alike",
        fix=f"load it whole, then transform: zf.zero3({cls.__name__}.from_pretrained(folder), mesh['dp'])",
    )


def _distribute(place: Place[nn.Module], cls: type, model: Any, *_: Any) -> Any:
    """In place of `maybe_distribute_model`: the model is on meta, and its values are read next.

    Raises:
        ConfigError: Its weights are quantised by a library whose tensors do not say what they are made of.
    """
    del model.config.distributed_config  # which only led here, and must not be saved
    method = getattr(model, "quantization_method", None)
    if method == QuantizationMethod.TORCHAO:
        return model  # transformed when it has been read: transformers quantises whole weights, one after the other
    if method is not None:
        raise zf.ConfigError(
            "placed() cannot load weights that are quantised in this way.",
            method=getattr(method, "value", method),
            why="shards are cut from plain memory, and what these were quantised with is kept beside it",
            fix="quantise plain weights with torchao: from_pretrained(folder, "
            "quantization_config=TorchAoConfig(Int8WeightOnlyConfig())); if the config dequantises them, load without "
            f"placed(): zf.zero3({cls.__name__}.from_pretrained(folder), mesh['dp'])",
        )
    model.tie_weights()  # a tie that is made after the transform would be two parameters
    return place_module(place, model)[0]


def _from_pretrained(
    read: Callable[..., Any], place: Place[nn.Module], loaded: list[nn.Module], cls: type, *args: Any, **options: Any
) -> Any:
    """In place of `from_pretrained`: `read` is that of transformers."""
    asked = next((name for name in ("distributed_config", "tp_plan", "tp_size") if options.get(name) is not None), None)
    if asked is not None:
        raise zf.ConfigError(
            "from_pretrained was told to distribute a model that placed() transforms.",
            argument=f"{asked}={options[asked]!r}",
            fix=f"leave out {asked}, or load without placed()",
        )
    with_info = options.pop("output_loading_info", False)
    try:
        model, info = read(cls, *args, **options, distributed_config=DistributedConfig(), output_loading_info=True)
    except zf.ShardedAccessError as error:  # from the initialisation of what was not read
        raise _lacking(cls) from error
    if info["missing_keys"]:
        raise _lacking(cls, first=min(info["missing_keys"]))
    if not zf.is_transformed(model):  # quantised
        for parameter in model.parameters():
            if subclass_of(parameter) is not None:
                parameter.requires_grad_(
                    False
                )  # from a folder that was saved quantised, transformers reads them trained
        model = place_module(place, zf.flatten_subclasses(model))[0]
    for axis in [axis for run in runs_of(model, verb="placed") for axis in run.transport.axes]:
        move_buffers(model, axis.device_type)
    for unit in units_of(model):
        unit.follow_moved()  # into memory of its own
        _trim()
    zf.refresh(model)
    loaded.append(model)
    return (model, info) if with_info else model
