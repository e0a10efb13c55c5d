"""`placed`: `from_pretrained` straight into shards, so that no rank ever holds the model whole.

transformers builds a model on meta, gives it to `maybe_distribute_model`, and then reads from each
file the rows that the local part of each parameter needs. Here a transform replaces
`maybe_distribute_model`. Names of keys, ties, buffers and casts stay transformers' own.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, core_model_loading
from transformers.distributed import DistributedConfig
from transformers.utils.quantization_config import QuantizationMethod

import zero_fn as zf
from zero_fn.deepspeed.entries import Config
from zero_fn.deepspeed.placement import made_by
from zero_fn.deepspeed.setup import agreed_settings
from zero_fn.integrations.model_placement import Place, all_ranks, place_module
from zero_fn.integrations.trainer_config import settings_for
from zero_fn.runtime.registry import runs_of, units_of
from zero_fn.runtime.slot import slot_of
from zero_fn.transforms.substitute import move_buffers, reserve
from zero_fn.values.dtensors import alone, on_spec
from zero_fn.values.units import subclass_of

__all__ = ["placed"]


@contextmanager
def placed(
    place: Place[nn.Module] | Config,
    mesh: DeviceMesh | None = None,
    *,
    args: Any = None,
    auto: Mapping[str, object] | None = None,
    frozen: bool = False,
) -> Iterator[None]:
    """Makes `from_pretrained` of transformers return a transformed model;
    each rank reads only the shards that it owns.

        with placed("ds_config.json", args=args):  # or with placed(lambda model:
                                                   zf.shard_params(model, mesh["dp"])):
            model = AutoModelForCausalLM.from_pretrained(folder)
        trainer = ZeroTrainer(model=model, args=args, deepspeed="ds_config.json", train_dataset=...)

    Shards go to the device of the mesh, or to a tier, unit by unit. A function gets the model
    on meta, without values: it may not add adapters or read a weight. Adapters come
    afterwards; then the transforms are called again, by a ZeroTrainer, a ZeroAccelerator,
    `from_deepspeed` or by hand.

    Weights that torchao quantises, as they are read or in a folder that was saved quantised, are an
    exception: transformers quantises whole weights, so each rank holds the quantised model whole in
    host memory before it cuts its shards. `place` gets that model with its values, after
    `zf.transforms.flatten_subclasses`, and may add adapters.

    With a config, communicates 16 bytes per rank, by which ranks learn that all have the same one.

    Args:
        place: Any chain of transforms; or a DeepSpeed config, as a path or the object itself, whose
            stage, dtypes and tiers are taken. Its batch sizes, clipping, optimizer and scheduler
            are looked at where the model is trained, or here with `args`.
        mesh: The mesh for that config; None makes one axis of all ranks, "dp",
            and their process group if there is none.
        args: TrainingArguments, which decide where the config says `"auto"`, as in a ZeroTrainer.
        auto: Values where there are no `args`, by their paths: `{"bf16.enabled": True}`.
        frozen: With a config, the model is not trained: it keeps the dtype of its files. For a
            base of adapters, or a reference model. Without, parameters rest in float32, as the
            config's masters.

    Raises:
        ConfigError: transformers has no such hook; `from_pretrained` was told to distribute the
            model itself; weights are quantised by another library than torchao; or the config
            cannot be followed.
        DisagreementError: Ranks have different configs.
        StateError: Nothing was loaded inside, or `place` transformed nothing.
    """
    if callable(place) and (mesh, args, auto, frozen) != (None, None, None, False):
        raise zf.errors.ConfigError(
            "placed() was given options for a DeepSpeed config, and a function.",
            fix='placed("ds_config.json", mesh, args=args); or placed(lambda model: '
            'zf.shard_params(model, mesh["dp"])) alone',
        )
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise zf.errors.ConfigError(
            "placed() was given something else where a mesh was expected.",
            got=type(mesh).__name__,
            fix='placed("ds_config.json", args=args); or placed("ds_config.json", mesh["dp"])',
        )
    if not callable(place):
        mesh = mesh or all_ranks(None if args is None else args.device.type)
        place = _configured(place, mesh, args, auto or {}, frozen=frozen)
    if (
        not hasattr(PreTrainedModel, "maybe_distribute_model")
        or DistributedConfig().tp_size is None
    ):
        raise zf.errors.ConfigError(
            "This version of transformers cannot load a model that is transformed already.",
            why="it has no PreTrainedModel.maybe_distribute_model that a "
            "transform could stand in for",
            fix="pip install 'transformers>=5.24'; or a model on meta, "
            "and zf.load_pretrained(model, folder)",
        )
    loaded: list[nn.Module] = []
    read = functools.partial(
        _from_pretrained, PreTrainedModel.from_pretrained.__func__, place, loaded
    )
    distribute = functools.partial(_distribute, place)
    wrap = functools.partial(_as_read, core_model_loading._dtensor_from_local_like)
    with (
        patch.object(PreTrainedModel, "from_pretrained", classmethod(read)),
        patch.object(PreTrainedModel, "maybe_distribute_model", classmethod(distribute)),
        patch.object(core_model_loading, "_dtensor_from_local_like", wrap),
    ):
        yield
    if not loaded:
        raise zf.errors.StateError(
            "Nothing was loaded inside placed().",
            fix="with placed(...): model = AutoModelForCausalLM.from_pretrained(folder)",
        )


def _configured(
    config: Config, mesh: DeviceMesh, args: Any, auto: Mapping[str, object], *, frozen: bool
) -> Place[nn.Module]:
    """The transforms of a DeepSpeed config."""
    if args is not None:
        settings = settings_for(config, args, mesh, max(0, args.max_steps))
    else:
        settings = agreed_settings(config, lambda _: auto, mesh, is_placing=True)
    return lambda model: made_by(settings, mesh, model.requires_grad_(False) if frozen else model)


def _trim() -> None:
    """Makes glibc return the memory of transformers' reading threads,
    which would otherwise stay: as much as the shards."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _as_read(wrap: Callable[..., DTensor], local: Tensor, like: DTensor) -> DTensor:
    """Stands in for transformers' `wrap`, which moves a shard to the device:
    not one that will rest in a tier."""
    slot, local = slot_of(like), alone(local.contiguous())  # see `alone`: `deepcopy` needs it
    if slot is None or not slot.kind.is_away:
        return wrap(local, like)
    return on_spec(local, like._spec)


def _lacking(cls: type, **facts: object) -> zf.errors.CheckpointError:
    return zf.errors.CheckpointError(
        "The files lack parameters of the model.",
        model=cls.__name__,
        **facts,
        why="ranks would draw initial values for their parts alike",
        fix="load it whole, then transform: "
        f"zf.shard_params({cls.__name__}.from_pretrained(folder), mesh['dp'])",
    )


def _distribute(place: Place[nn.Module], cls: type, model: Any, *_: Any) -> Any:
    """Stands in for `maybe_distribute_model`: transforms the model on meta,
    before its values are read."""
    # The entry only made transformers call this function, and must not be saved.
    del model.config.distributed_config
    method = getattr(model, "quantization_method", None)
    if method == QuantizationMethod.TORCHAO:
        return model  # transformed by `_from_pretrained`, when it has been read and quantised
    if method is not None:
        raise zf.errors.ConfigError(
            "placed() cannot load weights that are quantised in this way.",
            method=getattr(method, "value", method),
            why="shards are cut from plain memory, and what these were "
            "quantised with is kept beside it",
            fix="quantise plain weights with torchao: from_pretrained(folder, "
            "quantization_config=TorchAoConfig(Int8WeightOnlyConfig())); if the config "
            "dequantises them, load without placed(): "
            f"zf.shard_params({cls.__name__}.from_pretrained(folder), mesh['dp'])",
        )
    model.tie_weights()  # a tie that is made after the transform would be two parameters
    placed_model = place_module(place, model)[0]
    for run in runs_of(placed_model, verb="placed"):
        reserve(run, "placed", on_meta=True)
    return placed_model


def _from_pretrained(
    read: Callable[..., Any],
    place: Place[nn.Module],
    loaded: list[nn.Module],
    cls: type,
    *args: Any,
    **options: Any,
) -> Any:
    """Stands in for `from_pretrained`; `read` is transformers' own."""
    names = ("distributed_config", "tp_plan", "tp_size")
    asked = next((name for name in names if options.get(name) is not None), None)
    if asked is not None:
        raise zf.errors.ConfigError(
            "from_pretrained was told to distribute a model that placed() transforms.",
            argument=f"{asked}={options[asked]!r}",
            fix=f"leave out {asked}, or load without placed()",
        )
    with_info = options.pop("output_loading_info", False)
    try:
        model, info = read(
            cls, *args, **options, distributed_config=DistributedConfig(), output_loading_info=True
        )
    except zf.errors.ShardedAccessError as error:  # from the initialisation of what was not read
        raise _lacking(cls) from error
    if info["missing_keys"]:
        raise _lacking(cls, first=min(info["missing_keys"]))
    # A quantised model: transformers reads a folder that was saved quantised as trained.
    if not zf.inspect.is_transformed(model):
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.requires_grad and subclass_of(parameter) is None)
        model = place_module(place, zf.transforms.flatten_subclasses(model))[0]
    for axis in [axis for run in runs_of(model, verb="placed") for axis in run.transport.axes]:
        move_buffers(model, axis.device_type)
    for unit in units_of(model):
        unit.follow_moved()  # into memory of its own
        _trim()
    zf.transforms.refresh(model)
    loaded.append(model)
    return (model, info) if with_info else model
