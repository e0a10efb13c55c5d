"""What tests of integrations share: ranks that accelerate knows, tiny models, data, and a Trainer's run as numbers."""

import gc
import math
import os
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_fn as zf
from tests.outside.examples.programs import skip_without
from tests.outside.integrations.architectures import model_named
from tests.support.on_ranks import on_ranks
from tests.support.programs import STAGES
from tests.support.ranks import axis

skip_without("transformers", "accelerate", "peft", extra="transformers")

VOCABULARY = 64

on_two_ranks = on_ranks(2, fixture="prepared", deadline_s=240)
"""A test of a program, as `on_ranks` makes it, on ranks that have imported the libraries."""


def at_night(program):
    """The same, under `.ci/nightly`: an integration has one run of every day."""
    return pytest.mark.nightly(on_two_ranks(program))


def needs(package):
    """Skips a test without a package, which `.ci/test --all` installs."""
    return pytest.mark.skipif(find_spec(package) is None, reason=f"the package {package} is not installed")


def import_all(*modules):
    """Imports what takes longer than a collective may wait for a peer. Runs on the ranks."""
    start()
    for module in ("zero_fn.integrations.transformers", *modules):
        import_module(module)


def start():
    """Lets accelerate and transformers see the ranks of the pool, and nothing of the case before. Runs on the ranks."""
    os.environ.update(
        HF_HUB_OFFLINE="1",
        TOKENIZERS_PARALLELISM="false",
        RANK=str(dist.get_rank()),
        LOCAL_RANK=str(dist.get_rank()),
        WORLD_SIZE=str(dist.get_world_size()),
        LOCAL_WORLD_SIZE=str(dist.get_world_size()),
    )
    import transformers
    from accelerate.state import AcceleratorState, GradientState

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for name in [name for name in os.environ if name.startswith("ACCELERATE_DYNAMO")]:
        del os.environ[name]  # what arguments wrote there is read by every later Trainer
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    gc.collect()


def place(stage="zero3", **options):
    """What `place=` is given: a stage over all ranks."""
    return lambda model: STAGES[stage](model, axis(), **options)


def on_a_disk(folder):
    """A stage over all ranks, whose state rests on a disk."""
    disk = zf.nvme(folder)
    return lambda model: zf.offload(zf.shard_params(model, axis()), params=disk, grads=disk, optim=disk)


def llama(seed=0, **options):
    """Two layers, 32 wide."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = {
        "vocab_size": VOCABULARY, "num_key_value_heads": 2, "max_position_embeddings": 64, **sizes, **special, **options
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**config))


gpt2 = partial(model_named, "gpt2", seed=0, n_positions=64)
"""With dropout and a head tied to the embedding."""

mixtral = partial(model_named, "mixtral", seed=0)
"""Experts in stacked parameters."""


def tokenizer():
    """Words are numbers."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{str(number): number for number in range(3, VOCABULARY)}}
    made = Tokenizer(WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<pad>"
    )


def adapted(model, *targets, seed=1, **options):
    """A model with adapters of rank 4 at some modules, whose first values make no difference."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    return get_peft_model(model, LoraConfig(r=4, target_modules=[*targets], **options))


def lora():
    """Adapters, of which one matrix of a layer is frozen, as in LoRA-FA: it must be saved, too."""
    model = adapted(llama(), "q_proj", "v_proj", seed=0)
    for name, parameter in model.named_parameters():
        if "layers.0" in name and "lora_A" in name:
            parameter.requires_grad_(False)
    return model


def written(folder, build=llama, dtype=torch.float32, **options):
    """A folder of transformers, on every rank."""
    start()
    if dist.get_rank() == 0:
        build().to(dtype).save_pretrained(folder, **options)
    dist.barrier()


def read(folder):
    """The model of a folder."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def on_meta(folder):
    """The model of a folder, without its values."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))


def logits_of(model):
    """Of two sequences."""
    with torch.no_grad():
        return model.eval()(input_ids=Counting().tokens[:2]).logits


def require_equal(found, wanted):
    """The same names, with the same values."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


class Counting(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sequences that count on by one, two or three."""

    def __init__(self, n=32, length=12):
        generator = torch.Generator().manual_seed(7)
        first = torch.randint(3, VOCABULARY, (n, 1), generator=generator)
        step = torch.randint(1, 4, (n, 1), generator=generator)
        self.tokens = 3 + (first + step * torch.arange(length)) % (VOCABULARY - 3)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        tokens = self.tokens[index]
        return {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}


def arguments(folder, **options):
    """TrainingArguments of four steps, each logged, and nothing saved."""
    from transformers import TrainingArguments

    return TrainingArguments(output_dir=str(folder), **(COMMON | options))


COMMON = {
    "use_cpu": True, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "max_steps": 4,
    "learning_rate": 1e-2, "lr_scheduler_type": "cosine", "warmup_steps": 1, "weight_decay": 0.1, "max_grad_norm": 0.5,
    "logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True, "seed": 3,
}  # fmt: skip


def stock_trainer(folder, model, given=None, **options):
    """The Trainer of transformers, of arguments, and of whatever else it is given."""
    from transformers import Trainer

    return _trainer(Trainer, folder, model, given, options)


def zero_trainer(folder, model, stage="zero3", given=None, **options):
    """A ZeroTrainer; with the stage "disk" everything rests on one, and the optimizer is streamed."""
    from zero_fn.integrations.transformers import ZeroTrainer

    ways = {"place": on_a_disk(folder), "finish": zf.streamed} if stage == "disk" else {"place": place(stage)}
    return _trainer(ZeroTrainer, folder, model, ways | (given or {}), options)


def configured(folder, config, model=None, given=None, **options):
    """A ZeroTrainer of a DeepSpeed config."""
    from zero_fn.integrations.transformers import ZeroTrainer

    model = llama() if model is None else model
    return _trainer(ZeroTrainer, folder, model, {"deepspeed": config} | (given or {}), options)


def _trainer(kind, folder, model, given, options):
    start()
    data = {"train_dataset": Counting(), "eval_dataset": Counting(8)}
    return kind(model=model, args=arguments(folder, **options), **data, **(given or {}))


SIZES = {
    **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"),
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "initial_scale_power": 8, "hysteresis": 1},
}
OWN = {
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
    },
}


def zero(stage, **more):
    """A DeepSpeed config of a stage that leaves to the Trainer what it can."""
    return {**SIZES, "zero_optimization": {"stage": stage, "reduce_bucket_size": "auto", **more}}


class Overflowing(nn.Module):
    """One rank's loss is not finite in one of its calls."""

    def __init__(self, inner, call, rank):
        super().__init__()
        self.inner, self.call, self.rank, self.calls = inner, call, rank, 0

    def forward(self, **inputs):
        self.calls += 1
        output = self.inner(**inputs)
        if self.calls == self.call and dist.get_rank() == self.rank:
            output["loss"] = output["loss"] * math.inf
        return output


_NUMBERS = ("loss", "grad_norm", "eval_loss", "learning_rate", "rewards/margins")


def numbers(trainer, **options):
    """Trains; every loss, norm of gradients and rate that was logged."""
    torch.manual_seed(11)  # dropout draws the same masks, whatever was drawn before
    trainer.train(**options)
    return [(name, float(entry[name])) for entry in trainer.state.log_history for name in _NUMBERS if name in entry]


def require_close(found, wanted, tolerance=2e-5):
    """The same entries, with the same numbers."""
    assert wanted, "nothing was logged"
    assert [name for name, _ in found] == [name for name, _ in wanted]
    far = [(a, b) for a, b in zip(found, wanted, strict=True) if not abs(a[1] - b[1]) <= tolerance * max(1, abs(b[1]))]
    assert not far, f"found and wanted: {far}"
