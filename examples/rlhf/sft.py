"""Fine-tunes a causal model on prompts and answers (SFT), the first step of RLHF: the loss is that of the answers alone.

    torchrun --nproc-per-node 2 sft.py --save runs/sft        on CPUs, or a GPU for each rank; or python sft.py
    torchrun --nproc-per-node 2 sft.py --stage 0              DDP: the same weights, to the bit

A tiny Llama is built here. `--model FOLDER` starts from a model that you have. Needs transformers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import words
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM

import zero_fn as zf


@dataclass
class Options:
    save: str = "runs/sft"  # a new folder for the model
    model: str = ""  # a folder with a Llama over these bytes; without, one is built
    stage: int = 3  # of ZeRO, 0 is DDP
    dim: int = 64
    layers: int = 2
    rows: int = 64  # of each rank in a step
    steps: int = 150
    lr: float = 3e-3


def main() -> None:
    (options,) = HfArgumentParser(Options).parse_args_into_dataclasses()
    here, place = words.start(options.stage)
    if options.model:
        model = words.read(LlamaForCausalLM, options.model, place)
    else:
        sizes = {"hidden_size": options.dim, "intermediate_size": 2 * options.dim, "num_hidden_layers": options.layers}
        ends = {"pad_token_id": words.PAD, "eos_token_id": words.END}
        config = LlamaConfig(vocab_size=128, max_position_embeddings=64, num_attention_heads=4, **sizes, **ends)
        model = place(LlamaForCausalLM(config).to(here.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    words.say_bytes("planned", {"model": zf.plan(model, optimizer)})

    for step in range(options.steps):
        draws = torch.Generator().manual_seed(step * here.ranks + here.rank)
        tokens = words.answered(words.prompts(options.rows, draws), 0.5, draws).to(here.device)
        loss = words.mean(-words.log_probs(model, tokens), words.written(tokens))  # bytes of the prompt have no loss
        loss.backward()
        optimizer.step()
        if step == 0:
            words.say_bytes("training", {"model": zf.memory(model, optimizer)})
        optimizer.zero_grad()
        loss = words.over_ranks(loss)
        if here.rank == 0 and (step % 10 == 0 or step == options.steps - 1):
            print(f"step {step}: loss {loss.item():.3f}", flush=True)

    torch.manual_seed(here.rank)
    tokens = words.generate(model, words.prompts(64, torch.Generator().manual_seed(here.rank)).to(here.device))
    reward = words.over_ranks(words.rule(tokens).mean())
    if here.rank == 0:
        print(f"reward by the rule {reward.item():.3f}, such as {bytes(tokens[0].tolist())!r}")
    zf.save_pretrained(model, options.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
