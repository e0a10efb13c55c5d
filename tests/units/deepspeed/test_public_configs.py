"""DeepSpeed configs that people have are taken as they are, with what their `"auto"` leaves to the program; and train.

`public_configs.json` has 96 files of public repositories, read on 26 November 2026, each under its repository and path, with
the licence of the repository; and those that guides print. Some are `refused`, for the entry that is named: DeepSpeed 0.19
has removed, refuses or drops it, but for `data_efficiency` (layers that drop tokens) and `autotuning`. `axes` are those
beside data, without which a config cannot be followed; `has_own_optimizer` if it names one of the program.
"""

import json
import tomllib
from math import prod
from pathlib import Path

import pytest
import torch
from torch.func import functional_call

import zero_fn as zf
from tests.support.groups import alone
from tests.support.profiles import by_night
from tests.support.ranks import axis
from tests.support.wholes import means
from tests.units.deepspeed.configs import BASES, lost_entries, merged
from tests.units.deepspeed.programs import STEPS, built, furthest, loss_of, step_of, values
from zero_fn.deepspeed import reporter
from zero_fn.deepspeed.entries import leaves_of
from zero_fn.deepspeed.settings import settings_of
from zero_fn.integrations.trainer_config import settings_for
from zero_fn.monitor import Csv

PUBLIC = json.loads(Path(__file__).with_name("public_configs.json").read_text())
ROWS = tomllib.loads(Path(__file__).with_name("stages.toml").read_text())

FILLED = {
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "gradient_clipping": 0.1,
    "optimizer.params.lr": 3e-5, "optimizer.params.betas": [0.8, 0.999], "optimizer.params.eps": 1e-8,
    "optimizer.params.weight_decay": 3e-7, "scheduler.params.warmup_min_lr": 0, "scheduler.params.warmup_max_lr": 3e-5,
    "scheduler.params.warmup_num_steps": 10, "scheduler.params.total_num_steps": 100,
}  # fmt: skip
_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def auto_of(config):
    """What a program says where a config says "auto", or lacks a batch size."""
    said = dict(leaves_of(config))
    bf16 = "bfloat16" if "bfloat16" in config else "bf16"
    values = {**FILLED, f"{bf16}.enabled": said.get("fp16.enabled") is not True, "fp16.enabled": False}
    auto = {path: value for path, value in values.items() if said.get(path) == "auto"}
    if not any(isinstance(said.get(name), int) for name in _SIZES[:2]):
        auto["train_micro_batch_size_per_gpu"] = 2
    return auto


def ranks_of(config):
    """As many ranks as the batch sizes of a config are for."""
    whole, *parts = (config.get(name) for name in _SIZES)
    micro = [part for part in parts if isinstance(part, int)]
    return whole // prod(micro) if isinstance(whole, int) and micro else 1 if whole == 1 else 2


def test_public_configs_are_taken_as_they_are_but_for_those_that_say_which_entry_is_refused():
    for name, row in PUBLIC.items():
        config, makes = row["config"], "has_own_optimizer" not in row
        how = {"others": row.get("axes", {}), "makes": makes}
        if "refused" in row:
            with pytest.raises(zf.errors.ConfigError) as caught:
                settings_of(config, ranks_of(config), auto_of(config), **how)
            assert row["refused"] in str(caught.value), name
        else:
            settings = settings_of(config, ranks_of(config), auto_of(config), **how)
            assert lost_entries(config, [outcome.entry for outcome in settings.outcomes]) == [], name
    assert len(PUBLIC) >= 117


# -- they train as replicas do -----------------------------------------------------------------------------------------


class Replicas:
    """Plain torch, trained as a config says: a whole model on each rank, gradients averaged in the order of ranks."""

    def __init__(self, model, settings, make):
        self.model, self.settings = model.to(settings.computing.rest or torch.float32), settings
        self.optimizer = settings.stock(model) if make is None else make(model)
        self.rates = None if settings.scheduler is None else settings.scheduler(self.optimizer)

    def step(self, number, scale):
        computing, steps = self.settings.computing, self.settings.accumulation_steps
        for micro in range(steps):
            weights = {name: each.to(computing.compute or each.dtype) for name, each in self.model.named_parameters()}

            def computed(x, weights=weights):
                with torch.autocast("cpu", computing.autocast, enabled=computing.autocast is not None):
                    return functional_call(self.model, weights, x.to(weights["enter.weight"].dtype))

            loss = loss_of(computed, number, micro)
            (loss / steps * scale).backward()
        parameters = list(self.model.parameters())
        for parameter, mean in zip(parameters, means([each.grad for each in parameters], parameters), strict=True):
            parameter.grad = mean / scale * (axis().size() if self.settings.sums else 1)
        is_finite = all(bool(parameter.grad.isfinite().all()) for parameter in parameters)
        if is_finite or not self.settings.skips_overflow:
            if self.settings.max_norm:
                torch.nn.utils.clip_grad_norm_(parameters, self.settings.max_norm)
            self.optimizer.step()
            if self.rates is not None:
                self.rates.step()
        self.optimizer.zero_grad()


def is_plain(settings):
    """Whether plain replicas give the same numbers: what is sent is what was computed."""
    sharding, rests_narrow = settings.sharding, settings.computing.rest is torch.bfloat16
    is_coded = any((sharding.gather, sharding.gather_frozen, sharding.scatter))
    return not is_coded and not (rests_narrow and settings.max_norm)  # a norm of parts is rounded in another way


def distance(config, auto, make, *, rate=None):
    """How far a few steps take a model from replicas; None where these do something else."""
    setup = zf.from_deepspeed(built(), config, axis(), auto=auto, optimizer=make)
    by_hand = Replicas(built(), setup.settings, make)
    while setup.steps - setup.skipped_steps < STEPS and setup.steps < 99:  # until float16 has found its scale
        for group in (*setup.optimizer.param_groups, *by_hand.optimizer.param_groups):
            group["lr"] = rate or group["lr"]
        scale = 1.0 if setup.scaler is None else setup.scaler.get_scale()
        by_hand.step(setup.steps, scale)
        step_of(setup, setup.steps)
    if setup.reporter is not None:
        setup.reporter.close()
    found = values(setup.model)
    assert furthest(found, values(built())) > 1e-3
    return furthest(found, values(by_hand.model)) if is_plain(setup.settings) else None


def on_disk(folder, config):
    """A config whose disks are a folder."""
    zero = config.get("zero_optimization", {})
    disks = {
        name: {"nvme_path": folder} for name, each in zero.items() if isinstance(each, dict) and "nvme_path" in each
    }
    return merged(config, {"zero_optimization": disks} if disks else {})


def _rows(folder, kind):
    configs = {name: on_disk(folder, {**BASES["base"], **sections}) for name, sections in ROWS[kind].items()}
    return {name: distance(config, None, None) for name, config in configs.items()}


@pytest.mark.parametrize(("kind", "n"), by_night([("stages", 2), ("optimizers", 2), ("stages", 1)], [("stages", 2)]))
def test_every_stage_and_tier_trains_to_the_bits_of_replicas(ranks, tmp_path, kind, n):
    for found in ranks(n).run(_rows, str(tmp_path), kind):
        assert {name: difference for name, difference in found.items() if difference != 0.0} == {}


def _public(folder, every):
    """Of each config of so many."""
    found = {}
    with pytest.MonkeyPatch.context() as patch, torch.compiler.set_stance("force_eager"):  # compiled: test_forms.py
        patch.chdir(folder)
        for sink in ("WandB", "TensorBoard"):  # which need packages
            patch.setattr(reporter, sink, lambda *_, **__: Csv("sink.csv"))
        for name, row in [*PUBLIC.items()][::every]:
            config = row["config"]
            if "refused" not in row and not {"pipeline_parallel", "tensor_parallel", "moe"} & config.keys():
                entries = {key: value for key, value in config.items() if key not in _SIZES}
                auto = {key: value for key, value in auto_of(config).items() if key not in _SIZES}
                auto["train_micro_batch_size_per_gpu"] = 2
                make = None if "optimizer" in config and "has_own_optimizer" not in row else _adamw
                found[name] = distance(on_disk(folder, entries), auto, make, rate=0.1)
    return found


def _adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("every", "taken", "compared"), [(5, 22, 22), pytest.param(1, 100, 98, marks=pytest.mark.nightly)]
)
def test_public_configs_train_as_replicas_do(ranks, tmp_path, every, taken, compared):
    """But for norms, which are summed in another order, and fused kernels, which round the last elements in another way."""
    for found in ranks(2, deadline_s=240).run(_public, str(tmp_path), every):
        known = {name: difference for name, difference in found.items() if difference is not None}
        assert (len(found), len(known)) == (taken, compared)
        assert {name: difference for name, difference in known.items() if difference > 1e-5} == {}


# -- a Trainer ---------------------------------------------------------------------------------------------------------


class Arguments:
    """What the arguments of a Trainer say, on two ranks."""

    per_device_train_batch_size, gradient_accumulation_steps, max_grad_norm = 2, 1, 1.0
    learning_rate, weight_decay, adam_beta1, adam_beta2, adam_epsilon = 3e-5, 3e-7, 0.8, 0.999, 1e-8
    fp16_full_eval = bf16_full_eval = False
    mixed_precision = "no"  # of bf16, fp16 and the launcher

    @staticmethod
    def get_warmup_steps(steps):
        """A tenth of the training."""
        return steps // 10


def test_a_trainer_whose_ranks_all_have_batches_of_their_own_cuts_no_layers():
    config = PUBLIC["hiyouga/LLaMA-Factory/examples/deepspeed/ds_z2_autotp_config.json"]["config"]
    with (
        alone() as mesh,
        pytest.raises(zf.errors.ConfigError, match=r"tensor_parallel.autotp_size(.|\n)*zf.from_deepspeed"),
    ):
        settings_for(config, Arguments, mesh["dp"], 100)


def _contradicted(**changes):
    template = PUBLIC["huggingface/accelerate/examples/deepspeed_config_templates/zero_stage2_config.json"]
    config = {**template["config"], **changes}

    class Fp16(Arguments):
        mixed_precision = "fp16"

    with alone() as mesh, pytest.raises(zf.errors.ConfigError) as caught:
        settings_for(config, Fp16, mesh["dp"], 100)
    return tuple(str(line) for line in caught.value.facts.values())


def test_values_that_contradict_the_arguments_are_named_with_both():
    assert _contradicted(gradient_clipping=0.5, train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=2) == (
        "train_micro_batch_size_per_gpu = 4, and per_device_train_batch_size is 2",
        "gradient_accumulation_steps = 2, and gradient_accumulation_steps is 1",
        "gradient_clipping = 0.5, and max_grad_norm is 1.0",
    )
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.8, 0.999]}}
    assert _contradicted(optimizer=optimizer, fp16={"enabled": False}) == (
        "fp16.enabled = false, and fp16 is true",
        "optimizer.params.lr = 0.001, and learning_rate is 3e-05",
    )
    scheduler = {"type": "WarmupDecayLR", "params": {"total_num_steps": 7, "warmup_num_steps": 3}}
    assert _contradicted(scheduler=scheduler) == (
        "scheduler.params.warmup_num_steps = 3, and warmup_steps is 10",
        "scheduler.params.total_num_steps = 7, and the steps of the training is 100",
    )
