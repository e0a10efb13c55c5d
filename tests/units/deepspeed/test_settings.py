"""A DeepSpeed config as a value: what it becomes, and the error for every way in which it can be wrong."""

import base64
import json
import math
import re
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.units.deepspeed.configs import ADAM, CONFIGS, INFINITY, STAGE_2, STAGE_3, changed, leaves
from zero_fn.deepspeed.entries import Entries, config_of
from zero_fn.deepspeed.keys import KEYS, OTHER_NAMES
from zero_fn.deepspeed.more_optimizers import Lamb, Lion
from zero_fn.deepspeed.settings import Sharding, settings_of
from zero_fn.errors import ConfigError
from zero_fn.values.tiers import Tiers, cpu, nvme

_MOST = sys.maxsize
SMALL = {"train_micro_batch_size_per_gpu": 2, "optimizer": ADAM}


def became(config, ranks=1):
    """What became of each entry."""
    return {outcome.entry: outcome.became for outcome in settings_of(config, ranks).outcomes}


def refusal(config, ranks=1):
    """The error of a config that cannot be followed, with its fix."""
    with pytest.raises(ConfigError) as caught:
        settings_of(config, ranks)
    assert caught.value.fix
    return str(caught.value)


def test_stage_3_with_offload_is_read_as_it_says():
    settings = settings_of(STAGE_3, 2)
    assert (settings.micro_batch_size, settings.accumulation_steps) == (4, 4)
    assert (settings.computing.compute, settings.computing.reduce) == (torch.bfloat16, torch.float32)
    assert settings.skips_overflow
    assert settings.scaler is None
    assert settings.max_norm == 1.0
    assert settings.sharding == Sharding(stage=3, persist_most=_MOST, tiers=Tiers(cpu(), None, cpu()))
    assert settings.stock is not None
    assert settings.stock.kind is torch.optim.AdamW
    assert settings.stock.options == {
        "lr": 3e-4,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "weight_decay": 0.1,
        "fused": True,
    }
    assert isinstance(settings.scheduler, partial)
    assert settings.scheduler.keywords["kind"] == "WarmupDecayLR"
    options = settings.scheduler.keywords["options"]
    assert (options["warmup_num_steps"], options["total_num_steps"], options["warmup_max_lr"]) == (100, 1000, 3e-4)


def test_stage_2_in_float16_is_read_as_it_says():
    settings = settings_of(STAGE_2, 2)
    assert (settings.micro_batch_size, settings.accumulation_steps) == (8, 1)
    assert settings.computing.compute is torch.float16
    assert isinstance(settings.scaler, partial)
    assert settings.scaler.keywords == {
        "first": 128.0, "window": None, "hysteresis": 2, "is_refilled": False, "least": 1.0
    }  # fmt: skip
    assert settings.sharding == Sharding(stage=2, persist_most=_MOST)
    assert settings.stock is not None
    assert (settings.stock.kind, settings.stock.options["weight_decay"]) == (torch.optim.Adam, 0.0)


def test_infinity_is_read_as_it_says():
    settings = settings_of(INFINITY, 2)
    disk = nvme("/local_nvme")
    assert (settings.micro_batch_size, settings.accumulation_steps) == (8, 1)
    assert settings.sharding == Sharding(3, 1, 10_000, _MOST, (), Tiers(disk, None, disk, 0.5))
    assert settings.stock is not None
    assert settings.stock.kind is torch.optim.SGD
    assert not settings.skips_overflow


def test_every_entry_has_an_outcome():
    """Nothing is accepted and forgotten."""
    for config in CONFIGS.values():
        outcomes = list(became(config, 2))
        assert len(outcomes) == len(set(outcomes))
        lost = [
            path for path, _ in leaves(config) if not {".".join(path[: n + 1]) for n in range(len(path))} & {*outcomes}
        ]
        assert not lost


def test_the_same_config_asks_for_the_same_with_any_optimizer_name_of_deepspeed():
    def stock(kind, **params):
        found = settings_of({**SMALL, "optimizer": {"type": kind, "params": params}}, 1).stock
        assert found is not None
        return found.kind, found.options.get("weight_decay")

    assert stock("Adam") == stock("adam") == stock("AdamW") == stock("ADAMW") == (torch.optim.AdamW, 0.0)
    assert stock("DeepSpeedCPUAdam") == stock("FusedAdam") == stock("Adam")
    assert stock("DeepSpeedCPUAdam", adam_w_mode=False) == (torch.optim.Adam, 0.0)
    assert stock("DeepSpeedCPUAdagrad") == stock("Adagrad")
    assert stock("Lamb") == stock("FusedLamb") == (Lamb, None)
    assert stock("Lion") == stock("DeepSpeedCPULion", betas=[0.9, 0.99]) == (Lion, None)
    with pytest.raises(ConfigError, match="DeepSpeed has removed it, too"):
        stock("OneBitAdam")
    assert stock("Adam", adam_w_mode=False) == (torch.optim.Adam, 0.0)
    assert stock("AdamW", adam_w_mode=False) == (torch.optim.AdamW, 0.0)
    assert stock("AdamW", torch_adam=True) == (torch.optim.AdamW, 0.01)
    assert stock("Adagrad", weight_decay=0.5) == stock("adagrad", weight_decay=0.5) == (torch.optim.Adagrad, 0.5)
    assert stock("RMSprop") == (torch.optim.RMSprop, None)


def test_of_three_batch_sizes_two_give_the_third():
    def sizes(ranks, **given):
        names = {
            "whole": "train_batch_size",
            "micro": "train_micro_batch_size_per_gpu",
            "steps": "gradient_accumulation_steps",
        }
        settings = settings_of({"optimizer": ADAM, **{names[name]: value for name, value in given.items()}}, ranks)
        return settings.micro_batch_size, settings.accumulation_steps

    assert sizes(4, whole=32) == (8, 1)
    assert sizes(4, micro=8) == (8, 1)
    assert sizes(4, micro=8, steps=3) == (8, 3)
    assert sizes(4, whole=32, micro=2) == (2, 4)
    assert sizes(4, whole=32, steps=2) == (4, 2)
    assert sizes(4, whole=32, steps=4, micro=2) == (2, 4)


def test_batch_sizes_that_contradict_one_another_are_refused():
    whole, micro, steps = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    contradicting = (
        {whole: 30}, {whole: 2}, {whole: 32, micro: 3}, {whole: 32, steps: 3}, {whole: 32, steps: 4, micro: 4},
        {whole: 4, micro: 8}, {steps: 4}, {},
    )  # fmt: skip
    for given in contradicting:
        assert micro in refusal({"optimizer": ADAM, **given}, 4), given


def test_clipping_is_deepspeeds_where_nothing_is_said():
    assert settings_of(SMALL, 1).max_norm == 1.0
    assert "default" in became(SMALL)["gradient_clipping"]
    assert settings_of({**SMALL, "gradient_clipping": 0}, 1).max_norm == 0.0


# -- what is refused ---------------------------------------------------------------------------------------------------

_WRONG = {
    bool: ("true", 1, 0.0, [], {"a": 1}),
    int: ("8", True, [8], {"a": 1}, math.nan, math.inf, -3),
    float: ("0.1", True, [0.1, 0.2, 0.3], {"a": 1}, math.nan, math.inf),
    str: (7, True, [], "", "other"),
    list: ("0.9", [0.9, "0.95"], {"a": 1}, [math.nan, 0.9]),
}


def test_an_entry_of_another_kind_is_named():
    """Each entry of each config with values of other kinds."""
    unnamed, tried = [], 0
    for config in CONFIGS.values():
        words = became(config, 2)
        for path, value in leaves(config):
            wrong = _WRONG[type(value)] if value != "auto" else ("other", True, -1, math.nan)
            if words[".".join(path)].startswith(("no", "always")):
                wrong = tuple(bad for bad in wrong if bad != math.inf)  # no limit, which is no less than any
            if path[-1] in ("tag_validation", "nvme_path", "output_path"):  # any text
                wrong = (7, True)
            unnamed += [(path, bad) for bad in wrong if path[-1] not in refusal(changed(config, path, bad), 2)]
            tried += len(wrong)
    assert not unnamed
    assert tried >= 300


_REFUSED = {
    "zero_optimization": (True, []),
    "zero_optimization.stage": ("auto",),
    "zero_optimization.offload_param": ("cpu",),
    "optimizer": ({"params": {"lr": 0.1}},),
    "optimizer.type": ("Adma", "MuAdam", "OneBitLamb", "Optimizer", "lr_scheduler"),
    "optimizer.params.lr": ("auto", -1),
    "optimizer.params.betas": ([0.9, 1.5], [0.9]),
    "optimizer.params.learning_rate": (1e-3,),
    "optimizer.params.bias_correction": (False,),
    "scheduler": ({"params": {"warmup_num_steps": 10}},),
    "scheduler.params.warmup_min_lr": ([0.0, 0.1],),
    "bf16": (True,),
    "fp16.enabled": (True,),
    "zero_optimization.zenflow": ({"topk_ratio": 0.1},),
    "wandb": ({"projekt": "x"}, True),
    "tensor_parallel": ({"autotp_size": 2},),  # not without axes beside the ranks
    "pipeline_parallel": ({"pp_size": 2},),
    "torch_autocast": ({"enabled": True, "dtype": "fp16"},),
    "bf16.bf16_optimizer_states": (True,),
    "data_types": ({"grad_accum_dtype": "fp16"}, {"param_dtype": "fp16"}, {"keep_in_fp32_modules": [1]}),
    "compile": ({"enabled": True, "kwargs": ["dynamic"]},),
    "data_parallel_size": (1, 4),
    "compression_training": ({"weight_quantization": {}},),
}
"""Of sections, and of entries that are checked against others. Values beyond the bounds of an entry: see the last tests."""


def test_a_value_that_cannot_be_followed_is_refused_by_its_name():
    for name, values in _REFUSED.items():
        path = tuple(name.split("."))
        for value in values:
            found = refusal(changed(STAGE_3, path, value), 2)
            assert path[-1] in found or path[0] in found, (name, value)


def test_a_misspelt_entry_is_named_with_what_was_meant():
    """DeepSpeed takes such a config, and clips at its default."""
    found = refusal({**SMALL, "gradient_cliping": 0.5})
    assert re.search(r"gradient_cliping(.|\n)*fix +: gradient_clipping, or remove it", found)
    found = refusal({**SMALL, "zero_optimization": {"stage": 1, "overlap_com": True}})
    assert re.search(r"zero_optimization.overlap_com\b(.|\n)*overlap_comm, or remove", found)


def test_an_entry_in_another_place_is_told_where_it_belongs():
    for config, entry, fix in (
        ({"zero_optimization": {"aio": {"use_gds": True}}}, "zero_optimization.aio", "at the top level"),
        ({"offload_param": {"device": "cpu"}}, "offload_param", "in zero_optimization"),
        ({"bf16": {"enabled": True, "initial_scale_power": 8}}, "bf16.initial_scale_power", "in fp16"),
        ({"optimizer": {"type": "Adam", "params": {"lr": 0.1}, "eps": 1e-6}}, "optimizer.eps", "in optimizer.params"),
    ):
        found = refusal({**SMALL, **config})
        assert re.search(rf"entry +: {entry}\n", found)
        assert re.search(rf"fix +: write it {fix}$", found), "to remove it would drop an offload"


def test_a_config_of_init_inference_is_told_its_page_and_never_to_remove_its_offload():
    """Whose `zero` is `zero_optimization` of a training."""
    zero = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/disk"}}
    config = {"dtype": "fp16", "replace_with_kernel_inject": True, "enable_cuda_graph": True, "mp_size": 2}
    found = refusal({**SMALL, "zero": zero, "tensor_parallel": {"enabled": True}, "max_tokens": 64, **config})
    assert "has 6 entries" in found and found.count("docs/guides/inference.md") == 6
    assert "remove it" not in found and "zero_optimization" in found
    assert "docs/guides/inference.md" in refusal({"zero": zero}) and "remove it" not in refusal({"zero": zero})


def test_an_entry_in_another_place_that_changes_nothing_is_taken_and_told_its_place():
    """So many configs are: with the keys of fp16 in bf16, at DeepSpeed's own defaults."""
    fp16 = {"loss_scale": 0, "initial_scale_power": 10, "hysteresis": 2}
    words = became({**SMALL, "bf16": {"enabled": True, **fp16}, "fp16": {"enabled": False, **fp16}})
    assert {words[f"bf16.{name}"] for name in fp16} == {"belongs in fp16, where it would change nothing"}
    words = became({**SMALL, "optimizer": {**ADAM, "adam_w_mode": True}, "_comment": "of mine"})
    assert words["optimizer.adam_w_mode"] == "belongs in optimizer.params, where it would change nothing"
    assert words["_comment"] == "a comment"
    words = became({**SMALL, "zero_optimization": {"aio": {"block_size": 2**20, "queue_depth": 32}}})
    assert words["zero_optimization.aio"] == "belongs at the top level, where it would change nothing"


@pytest.mark.parametrize(
    ("path", "value", "fix"),
    [
        ("gradient_clipping", "1.0", '"gradient_clipping": 1.0'),
        ("bf16.enabled", "True", '"enabled": true'),
        ("bf16.enabled", 1, '"enabled": true'),
        ("communication_data_type", "fp61", '"communication_data_type": "fp16"'),
        ("communication_data_type", "bfp16", '"fp32" or "bf16" or "fp16", or remove it'),
        ("optimizer.params.weight_decay", "0.2", '"weight_decay": 0.2'),
        ("optimizer.params.weight_decay", "high", "a number, or remove it"),
        ("optimizer.params.betas", [0.9, "0.95"], "2 numbers, or remove it"),
        ("steps_per_print", 0.5, "a whole number from 0, or remove it"),
        ("zero_optimization.stage", 4, "a whole number from 0 to 3, or remove it"),
        ("fp16.min_loss_scale", -1, "a number from 0, or remove it"),
    ],
)
def test_a_fix_says_what_was_meant_and_nothing_else(path, value, fix):
    assert re.search(rf"fix +: {re.escape(fix)}$", refusal(_with(path, value)))


@pytest.mark.parametrize(("said", "least"), [(1, 1.0), (1e-3, 1e-3), (1e-8, 2.0**-24), (0, 2.0**-24)])
def test_the_least_scale_is_any_that_float16_can_hold(said, least):
    scaler = settings_of({**SMALL, "fp16": {"enabled": True, "min_loss_scale": said}}, 1).scaler
    assert isinstance(scaler, partial)
    assert scaler.keywords["least"] == least


def _scheduler(kind, **params):
    return settings_of({**SMALL, "scheduler": {"type": kind, "params": params}}, 1).scheduler


def test_cosine_is_a_warm_up_only_if_its_steps_are_there():
    steps = {"total_num_steps": 50, "warmup_num_steps": 5}
    found = _scheduler("Cosine", **steps, cos_min_ratio=0.1)
    assert found.keywords == _scheduler("WarmupCosineLR", **steps, cos_min_ratio=0.1).keywords
    words = became({**SMALL, "scheduler": {"type": "Cosine", "params": steps}})
    assert (words["scheduler.type"], words["optimizer.type"]) == (
        KEYS["scheduler.type"].became["Cosine"], "that of torch.optim"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "params", "entry", "fix"),
    [
        ("Cosine", {}, "type", r"WarmupCosineLR(.|\n)*CosineAnnealingLR"),
        ("Cosine", {"total_num_steps": 50}, "type", r"WarmupCosineLR(.|\n)*CosineAnnealingLR"),
        ("Cosine", {"T_max": 50}, "type", r"WarmupCosineLR(.|\n)*CosineAnnealingLR"),
        ("Cosine", {"total_num_steps": 50, "warmup_num_steps": 5, "warmup_max_lr": 0.1}, "params.warmup_max_lr", ""),
        ("OneCycle", {"cycle_min_lr": 1e-4}, "params.cycle_max_lr", "1e-3"),
        ("LRRangeTest", {"lr_range_test_max_lr": 1e-4}, "params.lr_range_test_max_lr", "lr_range_test_min_lr$"),
        ("Polynomial", {}, "type", "a scheduler of torch"),
        ("WarmupLR", {"warmup_num_step": 5}, "params.warmup_num_step", "warmup_num_steps$"),
    ],
)
def test_of_a_scheduler_only_what_is_not_there_is_refused(kind, params, entry, fix):
    with pytest.raises(ConfigError) as caught:
        _scheduler(kind, **params)
    assert caught.value.facts["entry"] == f"scheduler.{entry}"
    assert re.search(fix, str(caught.value.fix))


@pytest.mark.parametrize(
    ("more", "entry"),
    [
        ({"tensor_parallel": {"autotp_size": 2, "tp_size": 4}}, "tensor_parallel.tp_size"),
        ({"tensor_parallel": {"autotp_size": 4, "tp": {"tp_size": 2}}}, "tensor_parallel.tp.tp_size"),
        ({"moe": {"enabled": True, "ep_size": 4}, "moe_expert_parallel_size": 2}, "moe.ep_size"),
    ],
)
def test_of_two_names_of_one_size_none_is_dropped(more, entry):
    with pytest.raises(ConfigError, match="remove one of the two") as caught:
        settings_of({**SMALL, **more}, 4, others={})
    assert caught.value.facts["entry"] == entry


def test_offload_without_a_place_is_refused():
    for section in ("offload_optimizer", "offload_param"):
        for path in ({}, {"nvme_path": "auto"}, {"nvme_path": None}):
            zero = {"stage": 3, section: {"device": "nvme", **path}}
            assert f"zero_optimization.{section}.nvme_path" in refusal({**SMALL, "zero_optimization": zero})


def test_sections_that_contradict_the_stage_are_refused():
    for zero, words in (
        ({"stage": 2, "cpu_offload": True, "offload_optimizer": {"device": "cpu"}}, "zero_optimization.cpu_offload"),
        ({"offload_optimizer": {"device": "cpu"}}, "states of replicas"),
        ({"stage": 0, "zero_hpz_partition_size": 2}, "zero_optimization.zero_hpz_partition_size"),
        ({"zero_quantized_weights": True}, "no weights are sent"),
    ):
        assert words in refusal({**SMALL, "zero_optimization": zero})
    experts = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}, "moe_expert_parallel_size": 2}
    assert "no second partition beside it" in refusal({**SMALL, **experts})


@pytest.mark.parametrize(
    ("section", "tiers"),
    [
        ({"offload_optimizer": {"device": "cpu", "ratio": 0}}, Tiers()),
        ({"offload_param": {"device": "nvme", "nvme_path": "/disk"}}, Tiers(nvme("/disk"), None, cpu())),
        ({"offload_optimizer": {"device": "cpu", "gradients": True}}, Tiers(None, cpu(), cpu())),
        ({"cpu_offload": True, "cpu_offload_use_pin_memory": False}, Tiers(None, None, cpu(pinned=False))),
    ],
    ids=["nothing of the states", "parameters, nothing said of their states", "gradients beside the states", "older"],
)
def test_tiers_are_those_that_the_sections_of_offload_say(section, tiers):
    settings = settings_of({**SMALL, "zero_optimization": {"stage": 3, **section}}, 1)
    assert settings.sharding == Sharding(stage=3, persist_most=_MOST, tiers=tiers)


def test_gradients_rest_in_the_dtype_that_a_config_says():
    narrow = changed(STAGE_3, ("data_types",), {"grad_accum_dtype": "bf16"})
    assert (settings_of(STAGE_3, 2).computing.grads, settings_of(narrow, 2).computing.grads) == (None, torch.bfloat16)
    found = refusal({**SMALL, "data_types": {"grad_accum_dtype": "bf16"}})
    assert "only bf16 computes gradients that may rest in 16 bits" in found


def test_gradients_that_are_not_computed_in_a_dtype_are_not_sent_in_it():
    assert "sent in the dtype of the computation" in refusal({**SMALL, "communication_data_type": "bf16"})
    assert settings_of({**SMALL, "communication_data_type": "fp32"}, 1).computing.reduce is torch.float32
    both = {**SMALL, "communication_data_type": "bf16", "bf16": {"enabled": True}}
    assert settings_of(both, 1).computing.reduce is torch.bfloat16


# -- files -------------------------------------------------------------------------------------------------------------


def test_text_is_read_as_the_dict_in_it(tmp_path, monkeypatch):
    """As Hugging Face does: JSON, in base64 too. A file of that name is read first."""
    text = json.dumps(STAGE_3, indent=1)
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    assert config_of(f"\n {text}") == config_of(encoded) == STAGE_3
    for path in ("nowhere.json", "e30", "eyJ" * 300):  # the last two begin as base64 of an object does
        with pytest.raises(ConfigError, match=r"OSError|FileNotFoundError"):
            config_of(path)
    monkeypatch.chdir(tmp_path)
    Path("e30=").write_text(text)
    assert config_of("e30=") == config_of(tmp_path / "e30=") == STAGE_3


def test_what_is_no_config_is_refused(tmp_path):
    for number, (content, complaint) in enumerate(
        (
            (b'{"bf16": {"enabled": true},}', "JSONDecodeError: Expecting property name"),
            (b"", "JSONDecodeError: Expecting value"),
            (b"[" * 100_000, "RecursionError"),
            (b'{"gradient_clipping": -Infinity}', "not finite"),
            (b'{"a": "\xff"}', "UnicodeDecodeError"),
        )
    ):
        file = tmp_path / f"{number}.json"
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=rf"(?s)cannot be read.*{complaint}"):
            config_of(file)
    for path in (tmp_path / "nowhere.json", tmp_path, "\0", '{"a": 1', '{"a": 1} x'):
        with pytest.raises(ConfigError, match="cannot be read"):
            config_of(path)


# -- all at once -------------------------------------------------------------------------------------------------------


def test_everything_that_is_wrong_is_said_at_once():
    config = {
        "gradient_cliping": 1.0,
        "gradient_clipping": "1.0",
        "train_batch_size": 30,
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "fp16": {"enabled": True, "hysteresis": "auto"},
        "optimizer": {"type": "SGD", "params": {"lr": "auto", "betas": [0.9, 0.99], "moment": 0.9, "fused": "yes"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_max_ratio": 1, "warmup_min_ratio": 0.1}},
        "zero_optimization": {
            "stage": 0,
            "zero_hpz_partition_size": 2,
            "mics_shard_size": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": 1},
        },
        "amp": {"enabled": True},
    }
    wrong = [
        "gradient_cliping", "gradient_clipping", "train_batch_size", "fp16.enabled", "optimizer.params.betas",
        "optimizer.params.moment", "optimizer.params.fused", "scheduler.params.warmup_max_ratio",
        "scheduler.params.warmup_min_ratio", "scheduler.params.total_num_steps", "amp",
        "zero_optimization.mics_shard_size", "zero_optimization.offload_optimizer.pin_memory",
        "fp16.hysteresis, optimizer.params.lr",
    ]  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        settings_of(config, 2)
    lines = [str(line) for line in caught.value.facts.values()]
    assert {line.partition(" = ")[0] for line in lines} == set(wrong), "and nothing that follows from another mistake"
    assert len(lines) == len(wrong)
    assert all("; " in line for line in lines)


# -- names and autos ---------------------------------------------------------------------------------------------------


def test_entries_of_stage_3_may_be_written_without_it():
    """DeepSpeed reads both names; configs of axolotl have the shorter ones."""
    names = [path.rpartition(".")[2] for path in OTHER_NAMES if path.startswith("zero_optimization.")]
    assert len(names) >= 9
    for name in names:
        value = KEYS[f"zero_optimization.stage3_{name}"].default
        short = {**SMALL, "zero_optimization": {"stage": 3, name: value}}
        long = {**SMALL, "zero_optimization": {"stage": 3, f"stage3_{name}": value}}
        one, other = settings_of(short, 1), settings_of(long, 1)
        assert one.sharding == other.sharding
        assert one.outcomes[-2].became == other.outcomes[-2].became
        found = refusal({**SMALL, "zero_optimization": {name: value, f"stage3_{name}": value}})
        assert f"zero_optimization.{name} and zero_optimization.stage3_{name}" in found
    zero = {"stage": 3, "param_persistence_threshold": 7}
    assert settings_of({**SMALL, "zero_optimization": zero}, 1).sharding.persist_numel == 7
    found = refusal({**SMALL, "zero_optimization": {"max_reuse_distance": "far"}})
    assert re.search(r"entry +: zero_optimization\.max_reuse_distance", found)


AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"},
}
FILLED = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "bf16.enabled": True,
    "optimizer.params.lr": 1e-4,
    "optimizer.params.weight_decay": 0.1,
}


def test_autos_are_filled_in_by_their_paths():
    before = json.dumps(AUTO)
    settings = settings_of(AUTO, 2, FILLED)
    assert json.dumps(AUTO) == before
    assert (settings.micro_batch_size, settings.accumulation_steps, settings.max_norm) == (4, 2, 0.5)
    assert settings.computing.compute is torch.bfloat16
    assert settings.stock is not None
    assert (settings.stock.options["lr"], settings.stock.options["weight_decay"]) == (1e-4, 0.1)
    words = {outcome.entry: outcome.became for outcome in settings.outcomes}
    assert words["train_batch_size"] == "of the other two"
    assert words["zero_optimization.stage3_param_persistence_threshold"] == "none: every parameter is sharded"


@pytest.mark.parametrize("left", [{name} for name in FILLED] + [set(FILLED)], ids=len)
def test_all_autos_that_are_left_are_named(left):
    given = {name: value for name, value in FILLED.items() if name not in left}
    with pytest.raises(ConfigError, match='"auto"') as caught:
        settings_of(AUTO, 2, given)
    assert set(str(caught.value.facts["entry"]).split(", ")) == left
    assert f'auto={{"{next(iter(sorted(left)))}"' in caught.value.fix or len(left) > 1


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        ("zero_optimization.stage", 1, "contradicts(.|\n)*stage = 3, and auto= has 1"),
        ("bf16", 1, "contradicts(.|\n)*bf16 = "),
        ("bf16.enabled.more", 1, "contradicts"),
        ("optimizer.params.betas", 1, "wants : 2 numbers"),
        ("nowhere", 1, "the name of an entry"),
    ],
)
def test_what_is_filled_in_is_not_said_otherwise_and_is_read(path, value, complaint):
    with pytest.raises(ConfigError, match=complaint):
        settings_of(AUTO, 2, {**FILLED, path: value})


def test_what_is_not_there_is_filled_in():
    config = {"optimizer": ADAM, "zero_optimization": {"stage": 3}}
    settings = settings_of(config, 2, {"train_micro_batch_size_per_gpu": 4, "bf16.enabled": True})
    assert (settings.micro_batch_size, settings.computing.compute) == (4, torch.bfloat16)
    assert config == {"optimizer": ADAM, "zero_optimization": {"stage": 3}}
    assert settings_of(config, 2, {"train_batch_size": 8, "zero_optimization.stage": 3}).micro_batch_size == 4


# -- the table ---------------------------------------------------------------------------------------------------------


def _with(path, value):
    """A config with one more entry."""
    config = {**SMALL, "scheduler": {"type": "WarmupLR", "params": {}}}
    config["optimizer"] = {"type": "AdamW", "params": {**ADAM["params"]}}
    inside = config
    *sections, name = path.split(".")
    for section in sections:
        inside = inside.setdefault(section, {})
    inside[name] = value
    return config


def _other(key):
    """A value of the kind of an entry that is not its default."""
    if key.kind.name == "off":
        return {"enabled": True}
    if key.kind.name == "flag":
        return not key.default
    return (*key.kind.choices, key.kind.least + 7)[0] if key.kind.name != "text" or key.kind.choices else "x"


def test_each_row_of_the_table_does_what_it_says():
    """A hint changes nothing and says why; of what is refused the default is taken, and another told what to write; a value
    beyond the bounds is never taken, nor is a word that is none of the choices."""
    for key in KEYS.values():
        assert key.became, key
        assert key.kind.name in ("flag", "text", "whole", "number", "off", "any"), key
        if key.default is not None:
            assert key.default == "" or key.kind.taken(key.default) == key.default, key
        if isinstance(key.became, dict):
            assert set(key.became) >= set(key.kind.choices), key
        if key.kind.name == "flag" and isinstance(key.became, dict):
            for value in (True, False):
                said = key.became.get(str(value).lower(), key.became.get("else"))
                outcomes = Entries(_with(key.path, value)).outcomes
                assert said and {each.became for each in outcomes if each.entry == key.path} == {said}, key
        if key.role == "hint":
            for value in (_other(key), "auto"):
                assert became(_with(key.path, value))[key.path] == key.became
        least, most = key.kind.least, key.kind.most
        beyond = [least - 1] if key.kind.name in ("whole", "number") else []
        beyond += [least + 0.5] if key.kind.name == "whole" else []
        beyond += [most + 1] if most < math.inf else ["other"] if key.kind.choices else []
        for value in beyond:
            assert key.path in refusal(_with(key.path, value)), (key, value)
        if key.role == "refused":
            found = refusal(_with(key.path, _other(key)))
            assert key.path in found and str(key.became) in found, key
            if key.default is not None and not key.path.startswith("scheduler"):
                assert became(_with(key.path, key.default))[key.path] in ("as here", "off, as here")


def test_bfloat16_is_in_a_config_by_two_names_at_most_once():
    assert settings_of({**SMALL, "bfloat16": {"enabled": True}}, 1).computing.compute is torch.bfloat16
    found = refusal({**SMALL, "bf16": {"enabled": True}, "bfloat16": {"check_grad_overflow": False}})
    assert "one of bf16 and bfloat16" in found
