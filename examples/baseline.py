"""The same training by plain torch DDP: what `train_gpt.py` compares itself with. Nothing of zero_fn is in here."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from gpt import GPT, next_byte_loss
from options import Options
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["ddp_backward", "ddp_model"]


class Autocast(nn.Module):
    """Runs a module in bf16, its parameters and gradients in fp32."""

    def __init__(self, module: nn.Module, device: str) -> None:
        super().__init__()
        self.module = module
        self.device = device

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16):
            logits: Tensor = self.module(tokens)
        return logits


def ddp_model(options: Options, device: str) -> nn.Module:
    """The model of the same seed, replicated by DDP with its most frugal buckets."""
    torch.manual_seed(options.seed)
    with torch.device(device):
        module: nn.Module = GPT(options.config)
    if options.precision == "bf16":
        module = Autocast(module, device)
    return DistributedDataParallel(module, gradient_as_bucket_view=True)


def ddp_backward(model: nn.Module, microbatches: Tensor) -> Tensor:
    """One backward for each microbatch, one all-reduce for all; "microbatch row time" -> the mean loss."""
    assert isinstance(model, DistributedDataParallel)
    total = torch.zeros((), device=microbatches.device)
    for index, tokens in enumerate(microbatches):
        with nullcontext() if index == len(microbatches) - 1 else model.no_sync():
            loss = next_byte_loss(model, tokens) / len(microbatches)
            loss.backward()
        total += loss.detach()
    return total
