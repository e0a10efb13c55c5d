"""Trains an actor and a critic by proximal policy optimisation (PPO), the last step of RLHF.

    torchrun --nproc-per-node 2 ppo.py --model runs/sft --save runs/ppo            the rule gives the reward
    torchrun --nproc-per-node 2 ppo.py --model runs/sft --reward runs/reward       the model of reward.py gives it

A step has three phases. The actor writes answers, whole on each rank. Then all models judge them: the reward, less the
distance (KL) of the actor from a frozen reference, is spread over the bytes as advantages (GAE). Then actor and critic are
trained on these rows several times. A model that a phase does not need leaves the GPU for the host, and comes back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import words
from torch import Tensor, nn
from transformers import HfArgumentParser, LlamaForCausalLM, LlamaForSequenceClassification, LlamaForTokenClassification

import zero_fn as zf


@dataclass
class Options:
    model: str = "runs/sft"  # a folder of sft.py: actor, critic and reference begin as it
    reward: str = ""  # a folder of reward.py; without, the rule
    save: str = "runs/ppo"  # a new folder for the actor
    stage: int = 3  # of ZeRO, 0 is DDP
    rows: int = 32  # prompts of each rank in a step
    steps: int = 100
    epochs: int = 2  # how often a step trains on its rows
    parts: int = 2  # into which each epoch cuts them
    lr: float = 3e-4
    critic_lr: float = 1e-3
    clip: float = 0.2  # how far an update may move a probability, and the critic's value
    kl: float = 0.05  # reward that a nat of distance from the reference costs
    gamma: float = 1.0
    lam: float = 0.95


def values_of(critic: nn.Module, tokens: Tensor) -> Tensor:
    """What the critic expects before each byte of the answers."""
    return critic(input_ids=tokens, use_cache=False).logits[:, words.PROMPT - 1 : -1, 0].float()


def advantages_of(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> Tensor:
    """Generalised advantages (arXiv:1506.02438). After the end of an answer rewards and values are 0."""
    found, later = torch.zeros_like(values), torch.zeros_like(values[:, 0])
    following = torch.cat((values[:, 1:], torch.zeros_like(values[:, :1])), 1)
    for t in reversed(range(values.shape[1])):
        later = rewards[:, t] + gamma * following[:, t] - values[:, t] + gamma * lam * later
        found[:, t] = later
    return found


def main() -> None:
    (options,) = HfArgumentParser(Options).parse_args_into_dataclasses()
    here, place = words.start(options.stage)
    actor = words.read(LlamaForCausalLM, options.model, place)
    critic = words.read(LlamaForTokenClassification, options.model, place, new_head=True)
    frozen = {"reference": words.read(LlamaForCausalLM, options.model, place, frozen=True)}
    if options.reward:
        frozen["reward"] = words.read(LlamaForSequenceClassification, options.reward, place, frozen=True)
    actor_optimizer = torch.optim.AdamW(actor.parameters(), lr=options.lr, weight_decay=0.0)
    critic_optimizer = torch.optim.AdamW(critic.parameters(), lr=options.critic_lr, weight_decay=0.0)
    trained = {"actor": (actor, actor_optimizer), "critic": (critic, critic_optimizer)}
    models = {**trained, **{name: (model, None) for name, model in frozen.items()}}
    words.say_bytes("planned", {name: zf.plan(*pair) for name, pair in models.items()})

    def say_held(phase: str) -> None:
        if step == 0 and phase not in said:
            said.append(phase)
            words.say_bytes(phase, {name: zf.memory(*pair) for name, pair in models.items()})

    said: list[str] = []
    host = zf.cpu()
    away = [zf.offload_states(model, to=host) for model in frozen.values()]
    for step in range(options.steps):
        torch.manual_seed(step * here.ranks + here.rank)  # every rank draws other answers
        draws = torch.Generator().manual_seed(step * here.ranks + here.rank)
        asked = words.prompts(options.rows, draws).to(here.device)

        away.append(
            zf.offload_states(critic, critic_optimizer, to=host)
        )  # 1: of the models the actor alone is in memory, whole
        with zf.unsharded(actor):  # one gather for all bytes; inside, ranks need not keep pace
            tokens = words.generate(actor, asked)
            say_held("generating")

        for each in away:  # 2: all models are there, as shards, and nothing is trained
            each.restore()
        mask = words.written(tokens)
        with torch.no_grad():
            old = words.log_probs(actor, tokens)
            distance = old - words.log_probs(frozen["reference"], tokens)
            values = values_of(critic, tokens) * mask
            rule = score = words.rule(tokens)
            if options.reward:
                score = frozen["reward"](input_ids=tokens, use_cache=False).logits[:, 0].float()
        say_held("judging")
        away = [zf.offload_states(model, to=host) for model in frozen.values()]
        rewards = -options.kl * distance * mask
        rewards.scatter_add_(1, mask.sum(1, keepdim=True).long() - 1, score[:, None])  # at the last byte of an answer
        advantages = advantages_of(rewards, values, options.gamma, options.lam)
        returns = advantages + values
        centred = advantages - words.over_ranks(words.mean(advantages, mask))
        advantages = centred * words.over_ranks(words.mean(centred.square(), mask)).add(1e-8).rsqrt()

        for _ in range(options.epochs):  # 3: frozen models are away
            for part in torch.randperm(options.rows, generator=draws).to(here.device).chunk(options.parts):
                ratio = (words.log_probs(actor, tokens[part]) - old[part]).exp()
                clipped = ratio.clamp(1 - options.clip, 1 + options.clip)
                gain = torch.minimum(ratio * advantages[part], clipped * advantages[part])
                words.mean(-gain, mask[part]).backward()
                value, before = values_of(critic, tokens[part]), values[part]
                near = before + (value - before).clamp(-options.clip, options.clip)
                error = torch.maximum((value - returns[part]).square(), (near - returns[part]).square())
                words.mean(0.5 * error, mask[part]).backward()
                for _, optimizer in trained.values():
                    optimizer.step()
                say_held("training")
                for _, optimizer in trained.values():
                    optimizer.zero_grad()
        reached = [words.over_ranks(each).item() for each in (rule.mean(), score.mean(), words.mean(distance, mask))]
        if here.rank == 0 and (step % 10 == 0 or step == options.steps - 1):
            print("step {}: reward {:.3f}, score {:.3f}, KL {:.3f}".format(step, *reached), flush=True)

    zf.save_pretrained(actor, options.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
