"""Trains a reward model on pairs of a better and a worse answer, the second step of RLHF.

    torchrun --nproc-per-node 2 reward.py --model runs/sft --save runs/reward

The model of sft.py gets a head with one number in place of logits. The loss is -log sigmoid of the difference of the two
numbers (Bradley and Terry). Here a rule says which answer is better; of your data, people do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
import words
from torch import Tensor, nn
from transformers import HfArgumentParser, LlamaForSequenceClassification

import zero_fn as zf


@dataclass
class Options:
    model: str = "runs/sft"  # a folder of sft.py
    save: str = "runs/reward"  # a new folder for the reward model
    stage: int = 3  # of ZeRO, 0 is DDP
    rows: int = 64  # pairs of each rank in a step
    steps: int = 100
    lr: float = 1e-3


def pairs(rows: int, seed: int) -> Tensor:
    """Better answers, then as many worse ones to the same prompts; pairs that the rule finds equal are drawn anew."""
    draws = torch.Generator().manual_seed(seed)
    asked = words.prompts(4 * rows, draws)
    one, other = (words.answered(asked, share, draws) for share in (0.3, 0.7))
    more = words.rule(one) - words.rule(other)
    decided = more.nonzero().flatten()[:rows]
    is_one = (more[decided] > 0)[:, None]
    one, other = one[decided], other[decided]
    return torch.cat((one.where(is_one, other), other.where(is_one, one)))


def margins(model: nn.Module, tokens: Tensor) -> Tensor:
    """By how much each better answer is above the worse one. A row is judged at its last byte that is no padding."""
    better, worse = model(input_ids=tokens, use_cache=False).logits.squeeze(-1).chunk(2)
    return better - worse


def main() -> None:
    (options,) = HfArgumentParser(Options).parse_args_into_dataclasses()
    here, place = words.start(options.stage)
    model = words.read(LlamaForSequenceClassification, options.model, place, new_head=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    words.say_bytes("planned", {"model": zf.plan(model, optimizer)})

    for step in range(options.steps):
        tokens = pairs(options.rows, step * here.ranks + here.rank).to(here.device)
        loss = -F.logsigmoid(margins(model, tokens)).mean()
        loss.backward()
        optimizer.step()
        if step == 0:
            words.say_bytes("training", {"model": zf.memory(model, optimizer)})
        optimizer.zero_grad()
        loss = words.over_ranks(loss)
        if here.rank == 0 and (step % 10 == 0 or step == options.steps - 1):
            print(f"step {step}: loss {loss.item():.3f}", flush=True)

    with torch.no_grad():
        unseen = pairs(256, 10**6 + here.rank).to(here.device)
        right = words.over_ranks((margins(model, unseen) > 0).float().mean())
        spread = words.over_ranks(margins(model, unseen).square().mean()).sqrt()
        model.score.weight.div_(spread)  # so that one stands for a usual difference, whatever the training was
    if here.rank == 0:
        print(f"pairs that it has not seen, and judges as the rule does: {right.item():.3f}")
    zf.save_pretrained(model, options.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
