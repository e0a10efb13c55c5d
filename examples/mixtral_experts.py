"""Mixtral of transformers on data x expert ranks: its experts are cut over `ep`, and tokens travel to them and back.

    torchrun --nproc-per-node 4 mixtral_experts.py --ep 2
    torchrun --nproc-per-node 8 mixtral_experts.py --ep 8 --weights mistralai/Mixtral-8x7B-v0.1

transformers stacks the experts of a layer in two parameters, and lets one register what computes them. Every rank has
another batch. For Qwen-MoE, OLMoE, DeepSeek-V3 and others write their classes for those of Mixtral.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer

import zero_fn as zf
from zero_fn.integrations.transformers import placed

STACKED = ("gate_up_proj", "down_proj")


@dataclass
class Options:
    ep: int = 2  # ranks that share the experts of a layer; the data axis has the rest
    weights: str = ""  # a folder or a name for from_pretrained; without, a tiny model
    batch: int = 2  # of each rank in a step
    steps: int = 10


class Exchange(torch.autograd.Function):
    """Sends rows to other ranks and receives rows from them. The backward sends the gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.way_back = received, sent, group
        result = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return Exchange.apply(grad, *ctx.way_back), None, None, None


def experts_over(group: Any, experts: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """What transformers calls for the experts of a layer: "token dim" in and out, "token top" experts and their weights."""
    order, top, ranks = chosen.flatten().argsort(stable=True), chosen.shape[1], group.size()  # by expert
    asked = torch.bincount(chosen.flatten(), minlength=experts.num_experts).view(ranks, -1)
    asking = Exchange.apply(asked, [1] * ranks, [1] * ranks, group)  # from each rank to the experts here
    sent, received = asked.sum(1).tolist(), asking.sum(1).tolist()
    arrived = Exchange.apply(x[order // top], sent, received, group)
    here = torch.arange(asking.shape[1], device=x.device).repeat(ranks).repeat_interleave(asking.flatten())
    by_expert = here.argsort(stable=True)
    parts = arrived[by_expert].split(asking.sum(0).tolist())
    stacked = zip(parts, experts.gate_up_proj.to_local(), experts.down_proj.to_local(), strict=True)
    answers = [F.linear(experts._apply_gate(F.linear(part, up)), down) for part, up, down in stacked]
    returned = Exchange.apply(torch.cat(answers)[by_expert.argsort()], received, sent, group)
    return torch.zeros_like(x).index_add(0, order // top, (returned * weights.flatten()[order, None]).to(x.dtype))


def place(mesh: DeviceMesh, model: Any) -> nn.Module:
    """Cuts the experts over ep, then all that is left over dp and ep. The model may be on meta."""
    ALL_EXPERTS_FUNCTIONS.register("over_ep", partial(experts_over, mesh.get_group("ep")))
    model.set_experts_implementation("over_ep")
    for experts in (module for name, module in model.named_modules() if name.endswith(".experts")):
        for name in STACKED:
            whole = getattr(experts, name).detach()
            setattr(experts, name, nn.Parameter(distribute_tensor(whole, mesh["ep"], [Shard(0)])))
    model = zf.shard_params(model, mesh["dp"], units=MixtralDecoderLayer)
    return zf.shard_params(model, mesh["ep"], where=lambda name, _: not name.endswith(STACKED))


def build(options: Options, mesh: Any = None) -> nn.Module:
    """The model; without a mesh it is the plain one of transformers."""
    torch.manual_seed(0)  # every rank builds the same values
    if options.weights:  # each rank reads its shards alone
        with placed(partial(place, mesh)):
            return MixtralForCausalLM.from_pretrained(options.weights)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MixtralConfig(**sizes, vocab_size=64, num_key_value_heads=2, num_local_experts=4)
    return place(mesh, MixtralForCausalLM(config)) if mesh else MixtralForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser()
    for field in fields(Options):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    options = Options(**vars(parser.parse_args()))
    shape = (int(os.environ["WORLD_SIZE"]) // options.ep, options.ep)
    mesh = init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", shape, mesh_dim_names=("dp", "ep"))
    model = build(options, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draws = torch.Generator().manual_seed(dist.get_rank())  # every rank of both axes has other tokens
    for step in range(options.steps):
        tokens = torch.randint(64, (options.batch, 16), generator=draws).to(mesh.device_type)
        loss = model(tokens, labels=tokens, output_router_logits=True).loss  # with that of the router
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()  # over dense parameters and experts
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.5f}, norm {norm.item():.5f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
