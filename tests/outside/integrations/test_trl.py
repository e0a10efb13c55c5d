"""The trainers of trl over transformed models: the numbers of DDP, whether the trainer or the user transforms the model."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

import zero_fn as zf
from tests.outside.examples.programs import skip_without
from tests.outside.integrations.worlds import (
    VOCABULARY,
    at_night,
    llama,
    numbers,
    on_two_ranks,
    place,
    read,
    require_close,
    start,
    tokenizer,
)
from tests.support.eviction import evicted
from tests.support.profiles import by_night

skip_without("trl", "datasets", extra="trl")

_COMMON = {
    "use_cpu": True, "bf16": False, "per_device_train_batch_size": 2, "max_steps": 3, "learning_rate": 1e-2,
    "lr_scheduler_type": "constant", "max_grad_norm": 0.5, "logging_steps": 1, "save_strategy": "no", "report_to": [],
    "disable_tqdm": True, "seed": 3, "gradient_accumulation_steps": 2,
}  # fmt: skip


NEEDED = ["trl.trainer.dpo_trainer"]
"""The others are imported where they are tested: at night, when ranks may wait."""


def _text(first, step, length):
    return " ".join(str(3 + (first + step * i) % (VOCABULARY - 3)) for i in range(length))


def _rows(trainer):
    """Texts of various lengths: ranks have other numbers of tokens."""
    if trainer == "SFTTrainer":
        return [{"text": _text(7 * i, 1 + i % 3, 4 + i % 7)} for i in range(24)]
    prompts = [_text(5 * i, 1, 3 + i % 2) for i in range(24)]
    if trainer in ("GRPOTrainer", "RLOOTrainer"):
        return [{"prompt": prompt} for prompt in prompts]
    pairs = [(" " + _text(5 * i + 3, 1, 3 + i % 4), " " + _text(9 * i, 2, 2 + i % 3)) for i in range(24)]
    if trainer == "RewardTrainer":
        return [{"chosen": p + good, "rejected": p + bad} for p, (good, bad) in zip(prompts, pairs, strict=True)]
    if trainer == "KTOTrainer":
        both = zip(prompts, pairs, strict=True)
        return [{"prompt": p, "completion": pair[i % 2], "label": i % 2 == 0} for i, (p, pair) in enumerate(both)]
    return [{"prompt": p, "chosen": good, "rejected": bad} for p, (good, bad) in zip(prompts, pairs, strict=True)]


def _length_reward(completions, **_):
    """Larger numbers are better."""
    return [sum(float(word) for word in text.split() if word.isdigit()) / 100 for text in completions]


def _written(folder, trainer):
    """Reference models are loaded from where the model came from."""
    if dist.get_rank() == 0:
        if trainer == "RewardTrainer":
            from transformers import LlamaForSequenceClassification

            config = llama().config
            config.num_labels = 1
            torch.manual_seed(0)
            LlamaForSequenceClassification(config).save_pretrained(folder)
        else:
            llama().save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    dist.barrier()


def _trainer(folder, trainer, kind, options, *, stage="zero3", **more):
    """A trainer over replicas ("replicas"), one that transforms its model ("mixin"), over a transformed one ("before"), or
    over one that was read straight into shards, to which it adds adapters ("placed")."""
    import trl
    from datasets import Dataset, disable_progress_bars
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    from zero_fn.integrations.transformers import ZeroTrainerMixin, placed

    start()
    disable_progress_bars()
    theirs = getattr(trl, trainer)
    ours = type(f"Zero{trainer}", (ZeroTrainerMixin, theirs), {})
    auto = AutoModelForSequenceClassification if trainer == "RewardTrainer" else AutoModelForCausalLM
    with placed(place()) if kind == "placed" else nullcontext():
        model = auto.from_pretrained(folder)
    config = getattr(trl, trainer.replace("Trainer", "Config"))
    arguments = {"args": config(output_dir=folder, **(_COMMON | options)), "processing_class": tokenizer(), **more}
    arguments["train_dataset"] = Dataset.from_list(_rows(trainer))
    if trainer in ("GRPOTrainer", "RLOOTrainer"):
        arguments["reward_funcs"] = _length_reward
    if kind == "replicas":
        return theirs(model=model, **arguments)
    if kind in ("mixin", "placed"):
        return ours(model=model, place=place(stage), **arguments)
    # The head is a unit of its own, as that of a real vocabulary is: these trainers read its weight in the model's forward.
    units = None if trainer == "RewardTrainer" else ["model.layers.?", "lm_head"]
    return ours(model=place(units=units)(model), **arguments)


CASES = {
    "SFTTrainer": {"max_length": 16},
    "DPOTrainer": {"max_length": 16},
    "RewardTrainer": {"max_length": 16},
    "GRPOTrainer": {"num_generations": 2, "max_completion_length": 6, "beta": 0.04, "max_steps": 2},
    "KTOTrainer": {"max_length": 16, "max_steps": 2},
    "RLOOTrainer": {"num_generations": 2, "max_completion_length": 6, "max_steps": 2},
}


@at_night
def test_an_adapter_is_trained_and_resumed_over_a_base_that_was_read_into_shards(folder):
    """DPO of an adapter that the trainer makes: its reference is the base without it, which no rank has read whole."""
    from peft import LoraConfig

    _written(folder, "DPOTrainer")
    options = {"max_length": 16, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}

    def trainer(kind):
        torch.manual_seed(3)
        adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
        return _trainer(folder, "DPOTrainer", kind, options, peft_config=adapter)

    wanted = numbers(trainer("replicas"))
    for kind in ("mixin", "placed"):
        require_close(numbers(trainer(kind)), wanted, 5e-5)
    require_close(numbers(trainer("placed"), resume_from_checkpoint=f"{folder}/checkpoint-2"), wanted, 5e-5)


@pytest.mark.parametrize("trainer", by_night(CASES, ["DPOTrainer"]))
@on_two_ranks
def test_a_trainer_of_trl_has_the_numbers_of_replicas(folder, trainer):
    _written(folder, trainer)
    wanted = numbers(_trainer(folder, trainer, "replicas", CASES[trainer]))
    for kind in ("mixin", "before"):
        ours = _trainer(folder, trainer, kind, CASES[trainer])
        require_close(numbers(ours), wanted, 5e-5)
        assert zf.inspect.is_transformed(ours.model)


@at_night
def test_a_reference_model_is_placed_and_evicted_by_itself(folder):
    """Evicted before, between and after two trainings."""
    _written(folder, "DPOTrainer")
    options = {"max_length": 16, "max_steps": 2}

    def reference():
        return read(folder).eval().requires_grad_(False)

    wanted = numbers(_trainer(folder, "DPOTrainer", "replicas", options, ref_model=reference()))
    ours = place("zero3")(reference())
    away = evicted(ours)
    for _ in range(2):
        assert zf.memory(ours).parameters == 0
        away.restore()
        require_close(numbers(_trainer(folder, "DPOTrainer", "mixin", options, ref_model=ours)), wanted, 5e-5)
        away = evicted(ours)


@pytest.mark.parametrize("trainer", ["DPOTrainer", "GRPOTrainer"])
@at_night
def test_a_reference_model_moves_towards_the_policy(folder, trainer):
    """The reference moves towards the policy after each step, as that of replicas does; it was not placed by hand."""
    _written(folder, trainer)
    options = {**CASES[trainer], "beta": 0.5, "max_steps": 3, "sync_ref_model": True, "ref_model_sync_steps": 1}
    theirs = _trainer(folder, trainer, "replicas", options)
    wanted = numbers(theirs)
    for stage in ("zero1", "zero3"):
        ours = _trainer(folder, trainer, "mixin", options, stage=stage)
        require_close(numbers(ours), wanted, 5e-5)
        moved = dict(ours.ref_model.named_parameters())
        for name, parameter in theirs.ref_model.named_parameters():
            torch.testing.assert_close(moved[name].full_tensor(), parameter, atol=1e-5, rtol=1e-5)
    with pytest.raises(zf.errors.ConfigError, match="whole reference model"):
        _trainer(folder, trainer, "before", options)
