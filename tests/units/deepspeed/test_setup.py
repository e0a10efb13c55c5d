"""What `from_deepspeed` makes of a model: where it rests, what it steps with, which steps it skips, and what it refuses."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zero_fn as zf
from tests.support.groups import alone
from tests.support.messages import Headed, refusals, refused
from tests.support.on_ranks import on_ranks
from tests.support.ranks import axis
from tests.support.seeds import seed_generator
from tests.support.worlds import Tower
from tests.units.deepspeed.programs import BASE, RATES, built, furthest, loss_of, step_of, values, zero
from zero_fn.deepspeed.placement import require_placed
from zero_fn.deepspeed.settings import settings_of
from zero_fn.runtime.slot import slot_of


@pytest.mark.parametrize(
    ("stage", "device", "dtype", "max_norm"),
    [
        (0, "none", "fp16", 1.0),
        (1, "none", "fp16", 0.0),
        (2, "none", "bf16", 1.0),
        (3, "none", "bf16", 0.0),
        (2, "cpu", "bf16", 0.0),
        (2, "nvme", "fp16", 1.0),
    ],
)
@on_ranks(2)
def test_a_step_that_overflows_on_one_rank_is_skipped_on_all(folder, stage, device, dtype, max_norm):
    """The second step, in which a gradient of rank 1 is not finite."""
    section = {"enabled": True, **({"initial_scale_power": 10, "hysteresis": 1} if dtype == "fp16" else {})}
    tiers = {} if device == "none" else {"offload_optimizer": {"device": device, "nvme_path": folder}}
    config = {**zero(stage, **tiers), dtype: section, "gradient_clipping": max_norm}
    setup = zf.from_deepspeed(built(), config, axis())
    before, scales, rates = [], [], []
    for step in range(4):
        before.append(values(setup.model))
        norm = step_of(setup, step, math.inf if step == 1 and dist.get_rank() == 1 else 1.0)
        assert norm is not None and math.isfinite(norm) == (step != 1)
        scales.append(1024.0 if setup.scaler is None else setup.scaler.get_scale())
        rates += setup.rates
    after = values(setup.model)
    assert furthest(before[2], before[1]) == 0.0
    assert furthest(after, before[2]) > 0.0
    assert all(bool(value.isfinite().all()) for value in after.values())
    assert rates == [RATES[1], RATES[1], RATES[2], RATES[3]], "a skipped step moves no rate"
    assert scales == ([1024.0, 512.0, 512.0, 512.0] if dtype == "fp16" else [1024.0] * 4)


@on_ranks(2)
def test_overflows_are_taken_where_the_config_does_not_want_them_looked_for():
    config = {**zero(2), "bf16": {"enabled": True, "check_grad_overflow": False}}
    setup = zf.from_deepspeed(built(), config, axis())
    assert step_of(setup, 0, math.inf) is None
    assert any(bool(value.isnan().any()) for value in values(setup.model).values())


@on_ranks(2)
def test_training_goes_on_where_it_was_saved(folder):
    """With states on a disk, and after a skipped step has moved the scale."""

    def steps(setup, first, last):
        for step in range(first, last):
            step_of(setup, step, math.inf if step == 1 else 1.0)

    fp16 = {"enabled": True, "initial_scale_power": 10, "loss_scale_window": 2}
    config = {**zero(3, offload_optimizer={"device": "nvme", "nvme_path": folder}), "fp16": fp16}
    through = zf.from_deepspeed(built(), config, axis())
    steps(through, 0, 3)
    assert (through.steps, through.skipped_steps) == (3, 1)
    zf.save(f"{folder}/saved", through.model, through.optimizer, extra={"setup": through})
    steps(through, 3, 6)
    seed_generator(1)
    resumed = zf.from_deepspeed(Tower(), config, axis())
    zf.load(f"{folder}/saved", resumed.model, resumed.optimizer, extra={"setup": resumed})
    steps(resumed, 3, 6)
    assert (resumed.steps, resumed.skipped_steps) == (6, 1)
    assert resumed.rates == through.rates == [resumed.optimizer.param_groups[0]["lr"]]
    assert resumed.scaler.get_scale() == through.scaler.get_scale()
    assert furthest(values(resumed.model), values(through.model)) == 0.0


@on_ranks(4)
def test_a_secondary_partition_is_an_axis_of_the_mesh():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    config = zero(3, zero_hpz_partition_size=2)
    setup = zf.from_deepspeed(built(), config, mesh)
    by_transforms = zf.shard_grads(zf.shard_params(built(), mesh["inner"]), mesh["outer"])
    assert str(zf.describe(setup.model)) == str(zf.describe(by_transforms))
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    divided = zf.from_deepspeed(built(), config, flat)
    assert str(zf.describe(divided.model)) == str(zf.describe(by_transforms))
    with refused("config_of_second_shards_on_one_axis"):
        zf.from_deepspeed(built(), zero(3, zero_hpz_partition_size=3), flat)
    with pytest.raises(zf.errors.MeshError):
        zf.from_deepspeed(built(), zero(3), mesh)
    whole = zf.from_deepspeed(built(), zero(3, zero_hpz_partition_size=4), flat)
    assert str(zf.describe(whole.model)) == str(zf.describe(zf.shard_params(built(), flat)))


@on_ranks(2)
def test_an_optimizer_may_be_ones_own():
    class Momentum(torch.optim.SGD):
        pass

    def make(model):
        decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
        others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.5}]
        return Momentum(groups, lr=0.25, momentum=0.9)

    warmup = {"total_num_steps": 10, "warmup_num_steps": 2, "warmup_type": "linear"}
    config = {"train_batch_size": 4, "zero_optimization": {"stage": 2}}
    config["scheduler"] = {"type": "WarmupCosineLR", "params": warmup}
    setup = zf.from_deepspeed(built(), config, axis(), optimizer=make)
    assert isinstance(setup.optimizer, Momentum)
    assert setup.scheduler is not None
    zf.check(setup.model, setup.optimizer)
    both = zf.from_deepspeed(built(), {**config, "optimizer": BASE["optimizer"]}, axis(), optimizer=make)
    assert {outcome.became for outcome in both.outcomes if outcome.entry.startswith("optimizer")} == {
        "not used: optimizer= was given"
    }
    for _ in range(2):
        setup.optimizer.step()
        setup.scheduler.step()
    assert [group["lr"] for group in setup.optimizer.param_groups] == [0.125, 0.25]
    with pytest.raises(zf.errors.ConfigError, match="function of the transformed model"):
        zf.from_deepspeed(built(), config, axis(), optimizer="SGD")
    with refused("config_beside_an_optimizer_of_before"):
        zf.from_deepspeed(built(), config, axis(), optimizer=torch.optim.SGD(built().parameters()))


@on_ranks(2)
def test_ranks_with_other_configs_are_told_before_anything_is_done(folder):
    rank = dist.get_rank()
    model = built()
    with pytest.raises(zf.errors.DisagreementError, match=r"gradient_clipping = 0\.5(.|\n)*gradient_clipping = 1\.5"):
        zf.from_deepspeed(model, {**BASE, "gradient_clipping": 0.5 + rank}, axis())
    with pytest.raises(zf.errors.DisagreementError, match="cannot be read"):  # one rank has no such file
        zf.from_deepspeed(model, BASE if rank else f"{folder}/nowhere.json", axis())
    with pytest.raises(zf.errors.ConfigError, match=r"zero_optimization\.stage"):  # all have the same mistake
        zf.from_deepspeed(model, zero(7), axis())
    disk = {"device": "nvme", "nvme_path": folder if rank else f"{folder}/."}  # a disk of its own
    setup = zf.from_deepspeed(model, zero(3, offload_optimizer=disk), axis())
    loss_of(setup.model, 0, 0).backward()
    setup.step()


def test_the_argument_is_left_as_it_was_and_a_refusal_changes_nothing():
    with alone() as mesh:
        model = built()
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        with pytest.raises(zf.errors.ConfigError):
            zf.from_deepspeed(model, {**BASE, "gradient_clippin": 1}, mesh["dp"], donate=True)
        setup = zf.from_deepspeed(model, BASE, mesh["dp"])
        setup.scaled(loss_of(setup.model, 0, 0)).backward()
        setup.step()
        assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_it_prints_what_became_of_each_entry_and_of_auto():
    config = {**zero(3), "gradient_clipping": "auto"}
    with alone() as mesh:
        setup = zf.from_deepspeed(built(), config, mesh, auto={"gradient_clipping": 0.5})
    rows = [line.split(maxsplit=2) for line in str(setup).splitlines()]
    assert ["zero_optimization.stage", "3", "zf.shard_params"] in rows
    assert ["gradient_clipping", "0.5"] in [row[:2] for row in rows]
    assert any(row[0] == "optimizer.params.lr" for row in rows)


@on_ranks(2)
def test_weights_of_16_bits_have_masters():
    """As in DeepSpeed: masters of what is trained; what is frozen stays, where something is computed in 16 bits."""
    model = built().bfloat16()
    frozen = next(name for name, _ in model.named_parameters())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name != frozen)
    for stage in range(4):
        for dtype in ("bf16", "fp16", "none"):
            config = {**zero(stage), **({dtype: {"enabled": True}} if dtype != "none" else {})}
            setup = zf.from_deepspeed(model, config, axis())
            dtypes = {name: parameter.dtype for name, parameter in setup.model.named_parameters()}
            assert dtypes.pop(frozen) == (torch.float32 if dtype == "none" else torch.bfloat16)
            assert set(dtypes.values()) == {torch.float32}
            before = values(setup.model)
            for name, value in model.named_parameters():
                assert torch.equal(before[name], value.float())
            setup.optimizer.param_groups[0]["lr"] = 1e-4  # less than bfloat16 can add
            setup.scaled(loss_of(setup.model, 0, 0)).backward()
            setup.step()
            after = values(setup.model)
            assert all(not torch.equal(after[name], before[name]) for name in dtypes if after[name].numel())


FORMATS = {  # of the trained matrix and the frozen one, and of gradients
    "weights": ({"zero_quantized_weights": True}, [zf.wire.int8(), zf.wire.int8(), None]),
    "gradients": ({"zero_quantized_gradients": True}, [None, None, zf.wire.int4()]),
    "frozen": ({"zero_quantized_nontrainable_weights": True}, [None, zf.wire.int8(), None]),
    "both": (
        {"zero_quantized_weights": True, "zero_quantized_gradients": True},
        [zf.wire.int8(), zf.wire.int8(), zf.wire.int4()],
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_what_zero_plus_plus_quantises_travels_in_formats(name):
    flags, wanted = FORMATS[name]
    plain = nn.Sequential(nn.Linear(64, 70), nn.Linear(70, 64).requires_grad_(False))
    with alone() as mesh:
        model = zf.from_deepspeed(plain, zero(3, **flags), mesh).model
        trained, frozen = (slot_of(layer.weight).kind for layer in model)
    assert [trained.gather, frozen.gather, trained.scatter] == wanted


def test_what_travels_in_four_bits_is_summed_in_float32():
    config = {**zero(3, zero_quantized_gradients=True), "bf16": {"enabled": True}, "communication_data_type": "bf16"}
    with alone() as mesh, pytest.raises(zf.errors.ConfigError, match="summed in float32"):
        zf.from_deepspeed(built(), config, mesh)


def _placed_otherwise(one):
    model = zf.shard_optimizer(nn.Linear(2, 2), one)
    config = {"train_batch_size": 2, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    zf.from_deepspeed(model, config, one, optimizer=lambda model: torch.optim.SGD(model.parameters()))


test_refusals = refusals(
    {
        "config_without_an_optimizer": lambda one: zf.from_deepspeed(nn.Linear(2, 2), {"train_batch_size": 2}, one),
        "config_says_otherwise_than_what_is_placed": _placed_otherwise,
        "config_has_another_mesh_than_what_is_placed": lambda grid: require_placed(
            settings_of({"train_batch_size": 4}, 2), grid["tp"], zf.shard_optimizer(nn.Linear(2, 2), grid["dp"])
        ),
        "mesh_has_two_axes": lambda grid: zf.shard_grads(Headed(), grid),
        "mesh_has_two_axes_without_names": lambda four: zf.replicate(nn.Linear(2, 2), init_device_mesh("cpu", (2, 2))),
        "hybrid_over_an_axis_that_is_missing": lambda grid: zf.hybrid(nn.Linear(2, 2), grid, shard="tp"),
    }
)
