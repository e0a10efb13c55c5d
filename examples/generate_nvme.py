"""Generates text with a model that is larger than the memory the program allows itself (ZeRO-Inference).

    python examples/generate_nvme.py --path /local_nvme                # memory for a third of the parameters
    python examples/generate_nvme.py --path /local_nvme --stock        # the same without zf.offload: memory runs out

The model is built on `meta`, without memory, and initialised unit by unit straight into files on the disk. Before that the
process limits its own memory (`RLIMIT_DATA`) to less than the parameters. Each forward reads every block once, while the one
before it computes.
"""

from __future__ import annotations

import argparse
import resource
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from gpt import GPT, Block, Config, generate
from torch import nn

import zero_fn as zf


@dataclass(frozen=True)
class Options:
    path: str
    layers: int
    dim: int
    tokens: int
    memory: float
    workspace: int
    stock: bool


def data_nbytes() -> int:
    """Bytes of private memory that this process has mapped."""
    rows = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(rows["VmData"].split()[0]) * 1024


def parameters_nbytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def run(options: Options) -> None:
    with torch.device("meta"):
        model = GPT(Config(layers=options.layers, dim=options.dim, heads=8, seq=128))
    nbytes = parameters_nbytes(model)
    room = int(options.memory * nbytes) + options.workspace
    resource.setrlimit(resource.RLIMIT_DATA, (data_nbytes() + room, resource.RLIM_INFINITY))
    print(f"{nbytes / 1e6:.0f} MB of parameters, {room / 1e6:.0f} MB of memory for all else")
    torch.manual_seed(0)
    start = time.perf_counter()
    if options.stock:
        model.to_empty(device="cpu")
        for module in model.modules():
            reset = getattr(module, "reset_parameters", None)
            if reset is not None:
                reset()
    else:
        model = zf.offload(model, params=zf.nvme(options.path), units=Block)
        print(zf.plan(model).held)
        model = zf.materialize(model, "cpu")
    print(f"initialised in {time.perf_counter() - start:.1f} s, {zf.held(model).total / 1e6:.0f} MB in memory")
    prompt = torch.tensor(list(b"Once upon a time"))
    start = time.perf_counter()
    with torch.inference_mode():
        text = generate(model, prompt, options.tokens, window=64)
    took = time.perf_counter() - start
    print(
        f"{options.tokens} tokens in {took:.1f} s, {nbytes * options.tokens / took / 1e9:.2f} GB/s of parameters: "
        f"{bytes(text.tolist())!r}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--path", default=".", help="a folder of a local disk")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--memory", type=float, default=0.3, help="of the parameters' bytes")
    parser.add_argument("--workspace", type=int, default=64 << 20, help="bytes beside it: activations, allocator")
    parser.add_argument("--stock", action="store_true", help="hold the parameters in memory: it runs out")
    given = parser.parse_args()
    run(Options(**vars(given)))


if __name__ == "__main__":
    main()
