"""Generates text under a memory limit that the parameters exceed (ZeRO-Inference).

    python examples/generate_nvme.py --path /local_nvme                # memory for a third of the parameters
    python examples/generate_nvme.py --path /local_nvme --stock        # the same without zf.offload: memory runs out

The model is built on `meta`, without memory, and initialised unit by unit straight into files on the disk. Before that the
process limits its own memory to less than the parameters: on the CPU by `RLIMIT_DATA`, on a GPU by torch. Each forward reads
every block once, while the one before it computes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from gpt import GPT, Block, Config, generate
from program import device_option, limit_memory, option, parse
from torch import nn

import zero_fn as zf


@dataclass(frozen=True)
class Options:
    """The command line."""

    path: str = option(".", "a folder of a local disk")
    layers: int = option(16, "blocks")
    dim: int = option(1024, "width")
    heads: int = option(8, "attention heads")
    window: int = option(64, "bytes that the model sees")
    tokens: int = option(8, "bytes to write")
    memory: float = option(0.3, "share of the parameters' bytes that may be in memory")
    workspace: int = option(64 << 20, "bytes of memory for activations and the allocator")
    stock: bool = option(False, "hold the parameters in memory: it runs out")
    device: str | None = device_option()

    def __post_init__(self) -> None:
        _ = self.config  # raises if the shape is impossible

    @property
    def config(self) -> Config:
        """The shape of the model."""
        return Config(layers=self.layers, dim=self.dim, heads=self.heads, seq=self.window)


def parameters_nbytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def run(options: Options) -> None:
    device = options.device or "cpu"
    with torch.device("meta"):
        model = GPT(options.config).requires_grad_(False)  # so that the plan counts no gradients
    nbytes = parameters_nbytes(model)
    room = int(options.memory * nbytes) + options.workspace
    limit_memory(device, room)
    print(f"{nbytes / 1e6:.0f} MB of parameters, {room / 1e6:.0f} MB of memory for all else")
    torch.manual_seed(0)
    start = time.perf_counter()
    if options.stock:
        model.to_empty(device=device)
        for module in model.modules():
            reset = getattr(module, "reset_parameters", None)
            if reset is not None:
                reset()
    else:
        model = zf.offload(model, params=zf.nvme(options.path), units=Block)
        print(zf.plan(model).held)
        model = zf.materialize(model, device)
    print(f"initialised in {time.perf_counter() - start:.1f} s, {zf.held(model).total / 1e6:.0f} MB in memory")
    prompt = torch.tensor(list(b"Once upon a time"), device=device)
    start = time.perf_counter()
    with torch.inference_mode():
        text = generate(model, prompt, options.tokens, window=options.window)
    took = time.perf_counter() - start
    print(
        f"{options.tokens} tokens in {took:.1f} s, {nbytes * options.tokens / took / 1e9:.2f} GB/s of parameters: "
        f"{bytes(text.tolist())!r}"
    )


if __name__ == "__main__":
    run(parse(Options, __doc__))
