"""Fine-tunes a causal language model of Hugging Face on texts with ZeRO: all its weights, or adapters (LoRA).

    torchrun --nproc-per-node 8 finetune_hf.py --model llama-3-8b --data texts.jsonl --output_dir runs/a --bf16
    torchrun --nproc-per-node 8 finetune_hf.py ... --config ds.json    # a DeepSpeed config says what rests where
    torchrun --nproc-per-node 8 finetune_hf.py ... --lora 16 --merge   # adapters, and a copy of the model with them

`--data` is a text, or a `.jsonl` with a "text" in each row, or a "prompt" and a "response", which alone has a loss. Options
of TrainingArguments may follow, such as `--learning_rate 1e-5` or `--use_cpu`. Started again with the same `--output_dir`,
a run goes on. One process needs no torchrun. Needs transformers and accelerate, and peft for `--lora`.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, TrainingArguments, default_data_collator
from transformers.trainer_utils import get_last_checkpoint, set_seed

import zero_fn as zf
from zero_fn.integrations.transformers import ZeroTrainer, placed


@dataclass
class Options:
    """The command line, besides TrainingArguments."""

    model: str = field(metadata={"help": "a folder that from_pretrained reads"})
    data: str = field(metadata={"help": "a text, or a .jsonl file"})
    config: str | None = field(default=None, metadata={"help": "a DeepSpeed config, in place of --stage and --offload"})
    stage: int = field(default=3, metadata={"help": "of ZeRO: 0, 1, 2 or 3"})
    offload: bool = field(default=False, metadata={"help": "keep optimizer states on the host"})
    length: int = field(default=1024, metadata={"help": "tokens of a sequence"})
    held_out: float = field(default=0.05, metadata={"help": "share of the sequences to evaluate on"})
    lora: int = field(default=0, metadata={"help": "rank of the adapters; 0 trains all weights"})
    sample: str = field(default="", metadata={"help": "a prompt, to which the trained model writes on at the end"})
    merge: bool = field(default=False, metadata={"help": "with --lora: also save a model that has the adapters added"})


def config_of(options: Options) -> Any:
    """The DeepSpeed config: a file, or what the options say. TrainingArguments decide where it says "auto"."""
    if options.config is not None:
        return options.config
    zero: dict[str, Any] = {"stage": options.stage, "stage3_gather_16bit_weights_on_model_save": True}
    if options.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    return {"zero_optimization": zero, "bf16": {"enabled": "auto"}, "gradient_clipping": "auto"}


def sequences(options: Options, tokenizer: Any) -> list[dict[str, list[int]]]:
    """All rows, one after the other, cut into sequences of equal length. The Trainer gives each rank its own of them."""
    text = Path(options.data).read_text(encoding="utf-8")
    rows = [json.loads(row) for row in text.splitlines()] if options.data.endswith(".jsonl") else [{"text": text}]
    tokens, labels = list[int](), list[int]()
    for row in rows:
        prompt = tokenizer(row["prompt"])["input_ids"] if "prompt" in row else []
        answer = (row["response"] if prompt else row["text"]) + (tokenizer.eos_token or "")
        answer = tokenizer(answer, add_special_tokens=not prompt)["input_ids"]
        tokens += prompt + answer
        labels += [-100] * len(prompt) + answer  # a prompt has no loss
    n = options.length
    cut = [{"input_ids": tokens[i : i + n], "labels": labels[i : i + n]} for i in range(0, len(tokens) - n + 1, n)]
    trained = [each for each in cut if max(each["labels"][1:]) >= 0]
    if len(trained) < 2:
        raise SystemExit(
            f"{options.data} has {len(tokens)} tokens: less than two sequences of --length {n} to train on"
        )
    return trained


def main() -> None:
    parser = HfArgumentParser((Options, TrainingArguments))
    options, args = parser.parse_args_into_dataclasses()  # TrainingArguments start the process group of torchrun
    set_seed(args.seed)  # every rank draws the same adapters
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    rows, config = sequences(options, tokenizer), config_of(options)
    held_out = max(1, int(options.held_out * len(rows)))

    with placed(config, args=args, frozen=options.lora > 0):  # each rank reads its shards, and nothing else
        model = AutoModelForCausalLM.from_pretrained(options.model)
    if options.lora:
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(r=options.lora, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, adapters)
    trainer: Any = ZeroTrainer(
        model=model,
        args=args,
        deepspeed=config,
        train_dataset=rows[held_out:],
        eval_dataset=rows[:held_out],
        data_collator=default_data_collator,
        processing_class=tokenizer,  # is saved with the model
    )
    if args.process_index == 0:
        print(zf.plan(trainer.model))  # bytes of a rank, before the first step
    last = get_last_checkpoint(args.output_dir) if os.path.isdir(args.output_dir) else None
    trainer.train(resume_from_checkpoint=last)
    trainer.log_metrics("eval", trainer.evaluate())
    trainer.save_model()  # all ranks; in the dtype of compute if the config says stage3_gather_16bit_weights_on_model_save

    if options.sample:
        prompt = tokenizer(options.sample, return_tensors="pt").to(args.device)
        written = trainer.model.generate(**prompt, max_new_tokens=32, do_sample=False)  # on all ranks
        if args.process_index == 0:
            print(tokenizer.decode(written[0], skip_special_tokens=True))
    if options.lora and options.merge and args.process_index == 0:  # into a plain base, on the host
        from peft import AutoPeftModelForCausalLM

        merged = AutoPeftModelForCausalLM.from_pretrained(args.output_dir).merge_and_unload()
        merged.save_pretrained(f"{args.output_dir}/merged")
        tokenizer.save_pretrained(f"{args.output_dir}/merged")


if __name__ == "__main__":
    main()
