"""Trains a policy by group-relative policy optimisation (GRPO, arXiv:2402.03300): RLHF without a critic.

    torchrun --nproc-per-node 2 grpo.py --model runs/sft --save runs/grpo

The policy writes several answers to each prompt. An answer's advantage is how far its reward is above the mean of its group,
in standard deviations. The loss is PPO's clipped surrogate and the distance (KL) from a frozen reference. The rule gives the
reward. The policy writes at its stage: each forward gathers layer by layer, so no rank ever holds the model whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import words
from transformers import HfArgumentParser, LlamaForCausalLM

import zero_fn as zf


@dataclass
class Options:
    model: str = "runs/sft"  # a folder of sft.py: policy and reference begin as it
    save: str = "runs/grpo"  # a new folder for the policy
    stage: int = 3  # of ZeRO, 0 is DDP
    rows: int = 8  # prompts of each rank in a step
    samples: int = 8  # answers to each prompt: a group
    steps: int = 100
    epochs: int = 2  # how often a step trains on its rows
    lr: float = 3e-4
    clip: float = 0.2  # how far an update may move a probability
    beta: float = 0.02  # weight of the distance from the reference


def main() -> None:
    (options,) = HfArgumentParser(Options).parse_args_into_dataclasses()
    here, place = words.start(options.stage)
    policy = words.read(LlamaForCausalLM, options.model, place)
    reference = words.read(LlamaForCausalLM, options.model, place, frozen=True)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=options.lr, weight_decay=0.0)
    models = {"policy": (policy, optimizer), "reference": (reference, None)}
    words.say_bytes("planned", {name: zf.plan(*pair) for name, pair in models.items()})

    def say_held(phase: str) -> None:
        words.say_bytes(phase, {name: zf.memory(*pair) for name, pair in models.items()})

    for step in range(options.steps):
        torch.manual_seed(step * here.ranks + here.rank)  # every rank draws other answers
        draws = torch.Generator().manual_seed(step * here.ranks + here.rank)
        asked = words.prompts(options.rows, draws).repeat_interleave(options.samples, 0).to(here.device)

        away = zf.offload_states(reference, to=zf.cpu())
        tokens = words.generate(policy, asked)  # at stage 3 a rank that is done goes on until all are
        if step == 0:
            say_held("generating")
        away.restore()
        mask, rewards = words.written(tokens), words.rule(tokens)
        groups = rewards.view(options.rows, options.samples)
        above = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        advantages = above.view(-1, 1)  # the same for all bytes of an answer
        with torch.no_grad():
            old, kept = words.log_probs(policy, tokens), words.log_probs(reference, tokens)
        away = zf.offload_states(reference, to=zf.cpu())

        for epoch in range(options.epochs):
            new = words.log_probs(policy, tokens)
            ratio = (new - old).exp()
            gain = torch.minimum(ratio * advantages, ratio.clamp(1 - options.clip, 1 + options.clip) * advantages)
            distance = (kept - new).exp() - (kept - new) - 1  # its mean is the KL, and it is never below 0
            loss = words.mean(options.beta * distance - gain, mask)
            loss.backward()
            optimizer.step()
            if step == epoch == 0:
                say_held("training")
            optimizer.zero_grad()
        away.restore()
        reward, moved = (words.over_ranks(each).item() for each in (rewards.mean(), words.mean(distance, mask)))
        if here.rank == 0 and (step % 10 == 0 or step == options.steps - 1):
            print(f"step {step}: reward {reward:.3f}, KL {moved:.3f}", flush=True)

    zf.save_pretrained(policy, options.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
