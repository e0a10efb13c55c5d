"""DeepSpeed configs that people have are taken as they are, with what their `"auto"` leaves to the program; and train.

`public_configs.json` has 96 files of public repositories, read on 26 November 2026, each under its repository and path, with
the licence of the repository; and those that guides print.
"""

import json
import os
from math import prod
from pathlib import Path

import pytest
import torch

import zero_fn as zf
from tests.support.groups import alone
from tests.support.ranks import axis
from tests.units.deepspeed.test_cuts import Planned, loss_of
from zero_fn.deepspeed import reporter
from zero_fn.deepspeed.entries import leaves_of
from zero_fn.deepspeed.settings import settings_of
from zero_fn.integrations.trainer_config import settings_for
from zero_fn.monitor.csv import Csv

PUBLIC = {
    name: row["config"] for name, row in json.loads(Path(__file__).with_name("public_configs.json").read_text()).items()
}
OTHERS = {
    "guides 03": {"tensor": 8, "stages": 8},
    "guides 16": {"tensor": 4},
}
"""Axes beside those of data, without which a config cannot be followed."""

_EXAMPLES, _BERT = "deepspeedai/DeepSpeedExamples", "training/bing_bert"
REFUSED = {
    f"{_EXAMPLES}/training/data_efficiency/vit_finetuning/config/ds_config_cifar_random_ltd.json": "data_efficiency",
    f"{_EXAMPLES}/{_BERT}/deepspeed_bsz64k_lamb_config_seq128.json": "sparse_attention",
    f"{_EXAMPLES}/training/MoQ/test.json": "quantize_training",
    f"{_EXAMPLES}/{_BERT}/1-bit_lamb/nccl/deepspeed_bsz32k_onebitlamb_config_seq512_nccl.json": "optimizer.type",
    f"{_EXAMPLES}/compression/cifar/config/ds_config_channel_prune.json": "compression_training",
    f"{_EXAMPLES}/training/autotuning/hf/deberta/ds_config_fp16_tune.json": "autotuning",
    "CarperAI/trlx/examples/summarize_rlhf/configs/ds_config_trlx_gptj_summarize.json": "fp16.fp16_scale_tolerance",
    "OpenGVLab/InternVL/segmentation/zero_configs/adam_zero3_fp16.json": "optimizer.type",
    "OpenGVLab/InternVL/segmentation/zero_configs/adam_zero1_amp.json": "amp",
    "THUDM/CogVLM/finetune_demo/test_config_bf16.json": "offload_optimizer",
    "bigscience-workshop/Megatron-DeepSpeed/examples/curriculum_learning/ds_config_cl.json": "curriculum_learning",
    "cofe-ai/fast-gector/configs/ds_config_fp16.json": "optimizer.weight_decay",
    "deepspeedai/DeepSpeed/tests/model/BingBertSquad/deepspeed_bsz24_fp16_eigenvalue_quantize_config.json": "eigenvalue",
}
"""What is not followed, with the entry for which it is refused: of DeepSpeed 0.19 removed, refused or dropped, but for
`data_efficiency` (layers that drop tokens) and `autotuning`."""

OWN_OPTIMIZER = ("THUDM/SwissArmyTransformer/tests/deepspeed_test.json",)
"""Configs that name an optimizer of the program's own."""

FILLED = {
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0,
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


def read(name, config):
    others = OTHERS.get(name, {})
    return settings_of(config, ranks_of(config), auto_of(config), others=others, makes=name not in OWN_OPTIMIZER)


def test_most_public_configs_are_taken_as_they_are_and_the_others_named():
    refused = {}
    for name, config in PUBLIC.items():
        try:
            settings = read(name, config)
        except zf.ConfigError as error:
            refused[name] = str(error)
        else:
            said = {".".join(path.split(".")[:n]) for path, _ in leaves_of(config) for n in range(1, 6)}
            assert {outcome.entry for outcome in settings.outcomes} & said, name
    assert refused.keys() == REFUSED.keys()
    assert [name for name, entry in REFUSED.items() if entry not in refused[name]] == []
    assert len(PUBLIC) - len(REFUSED) == 83 + 21  # of 96, and all of the guides


def _trained():
    """Each config, for two ranks; one step of a small model."""
    found = []
    torch.compiler.set_stance("force_eager")  # what is compiled is tested elsewhere
    with pytest.MonkeyPatch.context() as patch:
        for sink in ("WandB", "TensorBoard"):  # which need packages
            patch.setattr(reporter, sink, lambda *_, **__: Csv("sink.csv"))
        for name, config in PUBLIC.items():
            sizes = {key: value for key, value in config.items() if key not in _SIZES}
            if name in REFUSED or "pipeline_parallel" in config or "moe" in config:
                continue
            if name in OTHERS:
                sizes["tensor_parallel"] = {**sizes["tensor_parallel"], "tp_size": 2}
            for section in config.get("zero_optimization", {}).values():
                if isinstance(section, dict) and "nvme_path" in section:
                    sizes = json.loads(json.dumps(sizes).replace(section["nvme_path"], os.getcwd()))
            auto = {
                "train_micro_batch_size_per_gpu": 2,
                **{k: v for k, v in auto_of(config).items() if k not in _SIZES},
            }
            own = None if "optimizer" in config and name not in OWN_OPTIMIZER else _adamw
            model = Planned()
            setup = zf.from_deepspeed(model, sizes, axis(), auto=auto, optimizer=own)
            before = next(setup.model.parameters()).full_tensor().clone()
            setup.optimizer.param_groups[0]["lr"] = 0.1
            while setup.steps == setup.skipped_steps < 99:  # in float16 until the loss scale has come down
                setup.scaled(loss_of(setup.model, 0, 0)).backward()
                setup.step()
            assert not torch.equal(next(setup.model.parameters()).full_tensor(), before), name
            if setup.reporter is not None:
                setup.reporter.close()
            found.append(name)
    torch.compiler.set_stance("default")
    return found


def _adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def test_they_train(ranks, tmp_path, monkeypatch):
    for found in ranks(2).run(_in_folder, str(tmp_path)):
        assert len(found) == 83 + 19


def _in_folder(folder):
    before = os.getcwd()
    os.chdir(folder)
    try:
        return _trained()
    finally:
        os.chdir(before)


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
    config = PUBLIC["hiyouga/LLaMA-Factory/examples/deepspeed/ds_z2_autotp_config.json"]
    with alone() as mesh, pytest.raises(zf.ConfigError, match=r"tensor_parallel.autotp_size(.|\n)*zf.from_deepspeed"):
        settings_for(config, Arguments, mesh["dp"], 100)


def _contradicted(**changes):
    config = {**PUBLIC["huggingface/accelerate/examples/deepspeed_config_templates/zero_stage2_config.json"], **changes}

    class Fp16(Arguments):
        mixed_precision = "fp16"

    with alone() as mesh, pytest.raises(zf.ConfigError) as caught:
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
