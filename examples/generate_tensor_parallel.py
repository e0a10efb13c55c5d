"""Writes text with a model of transformers that tensor parallelism cuts by the model's own plan, and ZeRO over a second axis.

    torchrun --nproc-per-node 2 generate_tensor_parallel.py                            a tiny Llama with random weights
    torchrun --nproc-per-node 8 generate_tensor_parallel.py --tp 4 --folder FOLDER     2 groups, with prompts of their own
    torchrun --nproc-per-node 2 generate_tensor_parallel.py --plain                    transformers alone, tp_plan="auto"

Every rank reads from the files what it holds: 1/(dp tp) of each layer, and 1/tp while the layer runs.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import zero_fn as zf

STYLES = {
    "colwise": ColwiseParallel(),
    "rowwise": RowwiseParallel(),
    "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
    "embedding_rowwise": RowwiseParallel(input_layouts=Replicate()),
}
"""The words of plans of dense models of transformers, as styles of torch."""


def write_tiny(folder: str) -> None:
    """A Llama whose tokens differ from one another."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=256, initializer_range=0.3, eos_token_id=None, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)


def sharded(folder: str, mesh: Any) -> Any:
    """Made on meta, cut along tp, then sharded along dp; only then read."""
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    missing = set(model.tp_plan.values()) - STYLES.keys()
    if missing:
        raise SystemExit(f"The plan of {type(model).__name__} has styles that this program does not know: {missing}")
    parallelize_module(model, mesh["tp"], {name: STYLES[style] for name, style in model.tp_plan.items()})
    model = zf.shard_params(model.requires_grad_(False), mesh["dp"])
    zf.load_pretrained(model, folder)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="", help="of from_pretrained; a tiny model with random weights without")
    parser.add_argument("--tp", type=int, default=2, help="ranks that a layer is cut over")
    parser.add_argument("--rows", type=int, default=2, help="prompts at once, in each group")
    parser.add_argument("--tokens", type=int, default=32, help="to generate for each prompt")
    parser.add_argument("--plain", action="store_true", help='transformers alone: tp_plan="auto", over all ranks')
    options = parser.parse_args()
    device = zf.from_environment().start().device
    world = dist.get_world_size()
    tp = world if options.plain else min(options.tp, world)
    mesh = init_device_mesh(device.type, (world // tp, tp), mesh_dim_names=("dp", "tp"))

    with tempfile.TemporaryDirectory() as scratch:
        shared = [options.folder or scratch]
        dist.broadcast_object_list(shared)  # ranks of one host; on several hosts name a folder that all have
        folder = shared[0]
        if not options.folder and dist.get_rank() == 0:
            write_tiny(folder)
        dist.barrier()
        plain = functools.partial(AutoModelForCausalLM.from_pretrained, tp_plan="auto")
        model = (plain(folder) if options.plain else sharded(folder, mesh)).eval()
        dist.barrier()

    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, model.config.vocab_size, (world // tp * options.rows, 8), generator=generator)
    own = prompts.to(device).chunk(world // tp)[mesh["dp"].get_local_rank()]  # the same on all ranks of a tp group
    model.generate(own, max_new_tokens=2, do_sample=False, pad_token_id=0)  # not timed
    began = time.perf_counter()
    found = model.generate(own, max_new_tokens=options.tokens, do_sample=False, pad_token_id=0)[:, own.shape[1] :]
    took = time.perf_counter() - began
    all_found: list[Any] = [None] * world
    dist.all_gather_object(all_found, found.tolist())
    if dist.get_rank() == 0:
        print(f"dp {world // tp}, tp {tp}: {world // tp * found.numel() / took:.1f} tokens/s")
        for rank in mesh.mesh[:, 0].tolist():  # the first of each tp group
            for row in all_found[rank]:
                print("tokens:", *row)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
