"""What `from_deepspeed` makes of a model trains as the config says, at every stage and in every tier, on ranks."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zero_fn as zf
from tests.support.groups import alone
from tests.support.on_ranks import on_ranks
from tests.support.ranks import axis
from tests.support.seeds import seed_generator
from tests.support.wholes import full
from tests.support.worlds import WIDTH, Tower, noise
from tests.units.deepspeed.configs import ADAM
from zero_fn.runtime.slot import slot_of

MICRO, STEPS, MICROBATCHES = 3, 4, 2
BASE = {
    "train_micro_batch_size_per_gpu": MICRO,
    "gradient_accumulation_steps": MICROBATCHES,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "weight_decay": 0.1, "fused": False}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_num_steps": 3, "warmup_max_lr": 0.02, "warmup_type": "linear"},
    },
}
RATES = [0.0, 0.0, 0.02 * (1 / 3), 0.02 * (2 / 3)]


def zero(stage, **more):
    return {**BASE, "zero_optimization": {"stage": stage, **more}}


def built():
    seed_generator(0)
    return Tower()


def loss_of(model, step, number):
    output = model(noise(MICRO, WIDTH, seed=10 * step + number))
    return output.float().square().mean()


def step_of(setup, step, factor=1.0):
    """A step, as a loop that was written for a config has it; `factor` times the gradients, such as infinity."""
    with zf.accumulate(setup.model):
        for number in range(setup.accumulation_steps):
            (setup.scaled(loss_of(setup.model, step, number)) * factor).backward()
    return setup.step()


def trained(setup):
    """Parameters after a few steps."""
    for step in range(STEPS):
        step_of(setup, step)
        assert all(parameter.grad is None for parameter in setup.model.parameters())
    return values(setup.model)


def values(model):
    return {name: full(parameter) for name, parameter in model.named_parameters()}


def by_hand(*, max_norm=0.0):
    """The same steps of plain replicas: means over microbatches, then over ranks in their order, clipped, AdamW."""
    model = built()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(STEPS):
        for number in range(MICROBATCHES):
            (loss_of(model, step, number) / MICROBATCHES).backward()
        for parameter in model.parameters():
            parts = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
            assert parameter.grad is not None
            dist.all_gather(parts, parameter.grad)
            parameter.grad = sum(parts[1:], parts[0]) / len(parts)
        if max_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.param_groups[0]["lr"] = RATES[step]
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def furthest(one, other):
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one if one[name].numel())


def stages(folder):
    disk = {"device": "nvme", "nvme_path": folder}
    return {
        "nothing said": BASE,
        **{f"stage {stage}": zero(stage) for stage in range(4)},
        "stage 3, small ones whole": zero(3, stage3_param_persistence_threshold=10),
        "stage 1, states on the host": zero(1, offload_optimizer={"device": "cpu"}),
        "stage 2, states on a disk": zero(2, offload_optimizer=disk),
        "stage 3, half the states on a disk": zero(3, offload_optimizer={**disk, "ratio": 0.5}),
        "stage 3, parameters on a disk": zero(3, offload_param=disk),
        "stage 3, everything on a disk": zero(3, offload_optimizer=disk, offload_param=disk),
    }


def some_stages(folder):
    """Of all stages and tiers one of each kind, for what has little to do with them."""
    chosen = ("stage 0", "stage 1", "stage 3", "stage 2, states on a disk", "stage 3, everything on a disk")
    return {name: config for name, config in stages(folder).items() if name in chosen}


def _every_stage(folder):
    hand = by_hand()
    found = []
    for name, config in stages(folder).items():
        setup = zf.from_deepspeed(built(), config, axis())
        assert setup.micro_batch_size == MICRO
        assert setup.scaler is None
        found.append((name, furthest(trained(setup), hand)))
    return found


@pytest.mark.parametrize("n", [2, pytest.param(1, marks=pytest.mark.nightly)])
def test_every_stage_and_tier_trains_to_the_bits_of_plain_replicas(ranks, tmp_path, n):
    for found in ranks(n).run(_every_stage, str(tmp_path)):
        assert [difference for difference in found if difference[1]] == []


@on_ranks(2)
def test_gradients_are_clipped_as_the_config_says(folder):
    """Norms of shards are summed in another order than those of wholes, so only stages 1 to 3 agree to the bit."""
    hand = by_hand(max_norm=0.05)
    clipped = {name: {**config, "gradient_clipping": 0.05} for name, config in some_stages(folder).items()}
    found = {name: trained(zf.from_deepspeed(built(), config, axis())) for name, config in clipped.items()}
    assert furthest(by_hand(), hand) > 1e-3, "clipping has to matter here"
    for name in found:
        if name not in ("nothing said", "stage 0", "stage 3, small ones whole"):
            assert furthest(found[name], found["stage 1"]) == 0.0, name
    assert max(furthest(one, hand) for one in found.values()) < 1e-6


@on_ranks(2)
def test_bf16_is_precision_with_sums_in_float32(folder):
    hand = zf.precision(zf.shard_params(built(), axis()), compute=torch.bfloat16, reduce=torch.float32)
    optimizer = torch.optim.AdamW(hand.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(STEPS):
        with zf.accumulate(hand):
            for number in range(MICROBATCHES):
                (loss_of(hand, step, number) / MICROBATCHES).backward()
        optimizer.param_groups[0]["lr"] = RATES[step]
        optimizer.step()
        optimizer.zero_grad()
    golden = values(hand)
    for config in some_stages(folder).values():
        setup = zf.from_deepspeed(built(), {**config, "bf16": {"enabled": True}}, axis())
        assert furthest(trained(setup), golden) == 0.0


def _overflowing(config, rank):
    """One rank alone has a gradient that is not finite, in the second step."""
    setup = zf.from_deepspeed(built(), config, axis())
    before = []
    scales, rates = [], []
    for step in range(4):
        before.append(values(setup.model))
        norm = step_of(setup, step, math.inf if step == 1 and dist.get_rank() == rank else 1.0)
        assert norm is not None
        assert math.isfinite(norm) == (step != 1)
        scales.append(setup.scaler.get_scale() if setup.scaler is not None else 1.0)
        rates.append(setup.optimizer.param_groups[0]["lr"])
    after = values(setup.model)
    assert furthest(before[2], before[1]) == 0.0
    assert furthest(after, before[2]) > 0.0
    assert all(bool(value.isfinite().all()) for value in after.values())
    assert rates == [RATES[1], RATES[1], RATES[2], RATES[3]], "a skipped step moves no rate"
    if setup.scaler is not None:
        assert scales == [1024.0, 512.0, 512.0, 512.0]


@pytest.mark.parametrize(
    ("stage", "dtype", "max_norm"),
    [
        (0, "fp16", 1.0),
        (1, "fp16", 0.0),
        (2, "bf16", 1.0),
        (3, "fp16", 1.0),
        (3, "bf16", 0.0),
        ("cpu", "bf16", 0.0),
        ("nvme", "fp16", 1.0),
    ],
)
def test_a_step_that_overflows_on_one_rank_is_skipped_on_all(ranks, tmp_path, dtype, stage, max_norm):
    section = {"enabled": True}
    if dtype == "fp16":
        section |= {"initial_scale_power": 10, "hysteresis": 1}
    tiers = {"offload_optimizer": {"device": stage, "nvme_path": str(tmp_path)}} if isinstance(stage, str) else {}
    config = zero(2 if isinstance(stage, str) else stage, **tiers)
    ranks(2).run(_overflowing, {**config, dtype: section, "gradient_clipping": max_norm}, 1)


@on_ranks(2)
def test_adam_is_fused_unless_the_config_says_otherwise(folder):
    """torch's fused kernels round the last elements of a tensor in another way, so shards may differ by a rounding."""
    hand = by_hand()
    optimizer = {"type": "AdamW", "params": {"weight_decay": 0.1}}
    found = [
        zf.from_deepspeed(built(), {**config, "optimizer": optimizer}, axis())
        for config in some_stages(folder).values()
    ]
    assert all(group["fused"] for setup in found for group in setup.optimizer.param_groups)
    assert max(furthest(trained(setup), hand) for setup in found) < 1e-6


@on_ranks(2)
def test_overflows_are_taken_where_the_config_does_not_want_them_looked_for():
    config = {**zero(2), "bf16": {"enabled": True, "check_grad_overflow": False}}
    setup = zf.from_deepspeed(built(), config, axis())
    assert step_of(setup, 0, math.inf) is None
    assert any(bool(value.isnan().any()) for value in values(setup.model).values())


def _resumed(config, folder):
    def steps(setup, first, last):
        for step in range(first, last):
            step_of(setup, step, math.inf if step == 1 else 1.0)  # so that the scale moves before it is saved

    through = zf.from_deepspeed(built(), config, axis())
    steps(through, 0, 3)
    assert (through.steps, through.skipped_steps) == (3, 1)
    zf.save(folder, through.model, through.optimizer, extra={"setup": through})
    steps(through, 3, 6)
    seed_generator(1)
    resumed = zf.from_deepspeed(Tower(), config, axis())
    zf.load(folder, resumed.model, resumed.optimizer, extra={"setup": resumed})
    steps(resumed, 3, 6)
    assert (resumed.steps, resumed.skipped_steps) == (6, 1)
    assert resumed.rates == through.rates == [resumed.optimizer.param_groups[0]["lr"]]
    assert resumed.device == torch.device("cpu")
    assert (resumed.scaler is None) or resumed.scaler.get_scale() == through.scaler.get_scale()
    return furthest(values(resumed.model), values(through.model))


@pytest.mark.parametrize(("device", "dtype"), [("none", "bf16"), ("nvme", "fp16")])
def test_training_goes_on_where_it_was_saved(ranks, tmp_path, dtype, device):
    section = {"enabled": True}
    if dtype == "fp16":
        section |= {"initial_scale_power": 10, "loss_scale_window": 2}
    config = {**zero(3, offload_optimizer={"device": device, "nvme_path": str(tmp_path)}), dtype: section}
    assert ranks(2).run(_resumed, config, str(tmp_path / "saved")) == [0.0, 0.0]


@on_ranks(4)
def test_a_secondary_partition_is_an_axis_of_the_mesh():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    config = zero(3, zero_hpz_partition_size=2)
    setup = zf.from_deepspeed(built(), config, mesh)
    by_transforms = zf.shard_grads(zf.shard_params(built(), mesh["inner"]), mesh["outer"])
    assert str(zf.describe(setup.model)) == str(zf.describe(by_transforms))
    assert furthest(trained(setup), by_hand()) < 1e-6
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    divided = zf.from_deepspeed(built(), config, flat)
    assert str(zf.describe(divided.model)) == str(zf.describe(by_transforms))
    assert furthest(trained(divided), by_hand()) < 1e-6
    with pytest.raises(zf.MeshError, match=r"that it divides, or a mesh of two axes"):
        zf.from_deepspeed(built(), zero(3, zero_hpz_partition_size=3), flat)
    with pytest.raises(zf.MeshError, match="takes one mesh axis, got 2"):
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

    scheduler = {
        "type": "WarmupCosineLR",
        "params": {"total_num_steps": 10, "warmup_num_steps": 2, "warmup_type": "linear"},
    }
    config = {"train_batch_size": 4, "zero_optimization": {"stage": 2}, "scheduler": scheduler}
    setup = zf.from_deepspeed(built(), config, axis(), optimizer=make)
    assert isinstance(setup.optimizer, Momentum)
    assert setup.scheduler is not None
    zf.check(setup.model, setup.optimizer)
    both = zf.from_deepspeed(built(), {**config, "optimizer": ADAM}, axis(), optimizer=make)
    assert {outcome.became for outcome in both.outcomes if outcome.entry.startswith("optimizer")} == {
        "not used: optimizer= was given"
    }
    for _ in range(2):
        setup.optimizer.step()
        setup.scheduler.step()
    assert [group["lr"] for group in setup.optimizer.param_groups] == [0.125, 0.25]
    for wrong in (torch.optim.SGD(built().parameters()), "SGD"):
        with pytest.raises(zf.ConfigError, match="function of the transformed model"):
            zf.from_deepspeed(built(), config, axis(), optimizer=wrong)


@on_ranks(2)
def test_ranks_with_other_configs_are_told_before_anything_is_done(folder):
    rank = dist.get_rank()
    model = built()
    with pytest.raises(zf.DisagreementError, match=r"gradient_clipping = 0\.5(.|\n)*gradient_clipping = 1\.5"):
        zf.from_deepspeed(model, {**BASE, "gradient_clipping": 0.5 + rank}, axis())
    with pytest.raises(zf.DisagreementError, match="cannot be read"):  # one rank has no such file
        zf.from_deepspeed(model, BASE if rank else f"{folder}/nowhere.json", axis())
    with pytest.raises(zf.ConfigError, match=r"zero_optimization\.stage"):  # all have the same mistake
        zf.from_deepspeed(model, zero(7), axis())
    disk = {"device": "nvme", "nvme_path": folder if rank else f"{folder}/."}  # a disk of its own
    setup = zf.from_deepspeed(model, zero(3, offload_optimizer=disk), axis())
    loss_of(setup.model, 0, 0).backward()
    setup.step()


@on_ranks(2)
def test_a_threshold_above_every_parameter_keeps_all_whole(folder):
    """A threshold above every parameter: whole between uses, which is stage 2."""
    for tiers in ({}, {"offload_param": {"device": "nvme", "nvme_path": folder}}):
        config = zero(3, stage3_param_persistence_threshold=1e9, **tiers)
        setup = zf.from_deepspeed(built(), config, axis())
        if not tiers:
            assert str(zf.describe(setup.model)) == str(zf.describe(zf.shard_grads(built(), axis())))
        assert furthest(trained(setup), by_hand()) == 0.0


def test_autos_are_filled_in_before_anything_is_read():
    config = {**BASE, "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto"}
    with alone() as mesh:
        auto = {"train_micro_batch_size_per_gpu": 5, "gradient_clipping": 0.5}
        setup = zf.from_deepspeed(built(), config, mesh["dp"], auto=auto)
        assert (setup.micro_batch_size, setup.settings.max_norm) == (5, 0.5)
        assert ["gradient_clipping", "0.5"] in [line.split()[:2] for line in str(setup).splitlines()]
        with pytest.raises(zf.ConfigError, match="gradient_clipping, train_micro_batch_size_per_gpu"):
            zf.from_deepspeed(built(), config, mesh["dp"])


def test_the_argument_is_left_as_it_was_and_a_refusal_changes_nothing():
    with alone() as mesh:
        model = built()
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        with pytest.raises(zf.ConfigError):
            zf.from_deepspeed(model, {**BASE, "gradient_clippin": 1}, mesh["dp"], donate=True)
        setup = zf.from_deepspeed(model, {**BASE, "optimizer": ADAM}, mesh["dp"])
        setup.scaled(loss_of(setup.model, 0, 0)).backward()
        setup.step()
        assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_it_prints_what_became_of_each_entry():
    with alone() as mesh:
        setup = zf.from_deepspeed(built(), zero(3, overlap_comm=True, reduce_bucket_size="auto"), mesh["dp"])
    rows = [line.split(maxsplit=2) for line in str(setup).splitlines()]
    assert ["zero_optimization.stage", "3", "zf.shard_params"] in rows
    assert [
        "zero_optimization.reduce_bucket_size",
        '"auto"',
        "nothing to set: computed from the units of the model",
    ] in rows
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
    "weights": ({"zero_quantized_weights": True}, [zf.int8(), zf.int8(), None]),
    "gradients": ({"zero_quantized_gradients": True}, [None, None, zf.int4()]),
    "frozen": ({"zero_quantized_nontrainable_weights": True}, [None, zf.int8(), None]),
    "both": ({"zero_quantized_weights": True, "zero_quantized_gradients": True}, [zf.int8(), zf.int8(), zf.int4()]),
}


@pytest.mark.parametrize("name", FORMATS)
@on_ranks(2)
def test_what_zero_plus_plus_quantises_travels_in_formats(name):
    flags, wanted = FORMATS[name]
    for bf16 in (False, True):
        seed_generator(0)
        plain = nn.Sequential(nn.Linear(64, 70), nn.Linear(70, 64).requires_grad_(False))
        setup = zf.from_deepspeed(plain, {**zero(3, **flags), "bf16": {"enabled": bf16}}, axis())
        slots = [slot_of(layer.weight) for layer in setup.model]
        kinds = [slot.kind for slot in slots if slot is not None]
        assert [*(kind.gather for kind in kinds), kinds[0].scatter] == wanted
        x = torch.ones(2, 64, dtype=torch.bfloat16 if bf16 else torch.float32)
        with zf.accumulate(setup.model):
            setup.scaled(setup.model(x).float().square().mean()).backward()
        setup.step()


def test_what_travels_in_four_bits_is_summed_in_float32():
    config = {**zero(3, zero_quantized_gradients=True), "bf16": {"enabled": True}, "communication_data_type": "bf16"}
    with alone() as mesh, pytest.raises(zf.ConfigError, match="summed in float32"):
        zf.from_deepspeed(built(), config, mesh)
