"""What a config says of dtypes, of activations, of wholes and of compilation is done to the model."""

import sys
import types
from unittest.mock import patch

import pytest
import torch
from torch import nn

import zero_fn as zf
from tests.support.groups import alone
from tests.support.messages import refused
from tests.units.deepspeed.programs import built, zero
from zero_fn.runtime.registry import units_of


def test_autocast_ends_with_an_error_in_a_forward():
    with alone() as mesh:
        setup = zf.from_deepspeed(built(), {**zero(3), "torch_autocast": {"enabled": True, "dtype": "bf16"}}, mesh)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            setup.model(torch.ones(1, 1))
    assert not torch.is_autocast_enabled("cpu")


class Buffered(nn.Module):
    _keep_in_fp32_modules_strict = {"ro*y"}  # noqa: RUF012
    _keep_in_fp32_modules = ["mask"]  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        for name, value in {
            "rotary": torch.ones(3),
            "mask": torch.ones(3),
            "count": torch.ones(3, dtype=torch.int),
        }.items():
            self.register_buffer(name, value)

    def forward(self, x):
        return self.layer(x)


def _dtypes(compute="bf16", **data_types):
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD"}, "data_types": data_types}
    config |= {compute: {"enabled": True}} if compute else {}
    with alone() as mesh:
        model = Buffered()
        model.rotary = model.rotary.bfloat16()  # as some load it
        made = zf.from_deepspeed(model, config, mesh["dp"]).model
        assert model.mask.dtype == torch.float32  # that of the caller
        return [buffer.dtype for _, buffer in made.named_buffers()]


def test_buffers_are_cast_but_for_those_that_are_kept():
    wide, narrow, whole = torch.float32, torch.bfloat16, torch.int
    assert _dtypes(param_dtype="bf16") == [wide, wide, whole]
    assert _dtypes(buffer_dtype="bf16") == [wide, narrow, whole]
    assert _dtypes(buffer_dtype="bf16", keep_in_fp32_modules=[]) == [narrow, narrow, whole]
    assert _dtypes(buffer_dtype="bf16", keep_in_fp32_modules=["m*k"]) == [narrow, wide, whole]
    assert _dtypes("fp16", buffer_dtype="bf16") == [wide, wide, whole], "fp16 has a list of its own"
    assert _dtypes("", buffer_dtype="bf16") == [narrow, narrow, whole], "in float32 nothing has to be kept"


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))


class Leafy(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixture, self.blocks = Nested(), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))


@pytest.mark.parametrize(
    "said", [{"classes": ["here.Nested"]}, {"names": ["mixture"]}, {"name_suffixes": ["ture"]}, None]
)
def test_leaf_modules_are_gathered_as_wholes(said):
    zero = {"stage": 3, **({"leaf_module": said} if said else {})}
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD"}, "zero_optimization": zero}
    with alone() as mesh:
        names = {unit.name for unit in units_of(zf.from_deepspeed(Leafy(), config, mesh["dp"]).model) if unit.slots}
        blocks = {"blocks.0", "blocks.1"}
        assert names == blocks | ({"mixture"} if said else {f"mixture.experts.{n}" for n in range(3)})
        placed = zf.from_deepspeed(Leafy(), config, mesh["dp"]).model
        assert zf.from_deepspeed(placed, config, mesh["dp"]).model is placed
        zero["leaf_module"] = {"classes": ["MixtralSparseMoeBlock"]}
        with refused("config_of_wholes_that_are_not_there"):
            zf.from_deepspeed(Leafy(), config, mesh["dp"])


def test_a_threshold_above_every_parameter_keeps_all_whole_between_uses():
    with alone() as mesh:
        setup = zf.from_deepspeed(built(), zero(3, stage3_param_persistence_threshold=1e9), mesh)
        assert str(zf.describe(setup.model)) == str(zf.describe(zf.shard_grads(built(), mesh)))


def test_no_more_parameters_stay_whole_than_the_config_allows():
    """The first small ones in the order of the model, as DeepSpeed counts them."""
    zero = {"stage": 3, "stage3_param_persistence_threshold": 4, "stage3_model_persistence_threshold": 9}
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD"}, "zero_optimization": zero}
    with alone() as mesh:
        model = zf.from_deepspeed(Leafy(), config, mesh["dp"]).model
        whole = [name for name, each in model.named_parameters() if "Shard" not in str(each.placements)]
        assert whole == ["mixture.experts.0.bias", "mixture.experts.1.bias"]


def test_each_block_is_compiled_by_itself():
    section = {"enabled": True, "kwargs": {"dynamic": False}}
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD"}, "compile": section}
    with alone() as mesh, patch.object(nn.Module, "compile", autospec=True) as compiled:
        model = zf.from_deepspeed(Leafy(), config, mesh["dp"]).model
    calls = [(call.args[0], call.kwargs) for call in compiled.call_args_list]
    options = {"backend": "inductor", "dynamic": False}
    assert calls == [(block, options) for block in (*model.mixture.experts, *model.blocks)]


def test_rates_are_scaled_by_the_package_mup(monkeypatch):
    """Its function gets the parameters of the transformed model, which have what the program has set on those of its own."""
    package = types.ModuleType("mup")

    def mu_adam(params, **options):
        return torch.optim.Adam([{"params": [each], "lr": options["lr"] / each.infshape} for each in params], **options)

    package.MuAdam = mu_adam
    model = nn.Linear(4, 4)
    model.weight.infshape, model.bias.infshape = 4.0, 1.0
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "MuAdam", "params": {"lr": 0.4, "eps": 1e-6}}}
    with alone() as mesh:
        monkeypatch.setitem(sys.modules, "mup", package)
        setup = zf.from_deepspeed(model, config, mesh["dp"])
        assert setup.rates == [0.1, 0.4]
        setup.model(torch.ones(1, 4)).sum().backward()
        assert setup.step() is not None
