"""What is compared: the same GPT under each way to train it on several ranks.

Every contestant is built from the same seed and steps a stock, fused AdamW at the same rate. What a user would set is
set; nothing is tuned for one shape. DeepSpeed takes part where it is installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import zero_fn as zf

RATE = 3e-4


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        q, k, v = self.qkv(self.norm_attention(x)).view(b, s, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, d)
        x = x + self.out(mixed)
        y: Tensor = x + self.down(F.gelu(self.up(self.norm_mlp(x)), approximate="tanh"))
        return y


class GPT(nn.Module):
    """A small byte-level GPT. With `recomputes`, blocks keep their inputs only, and run again in backward."""

    recomputes = False

    def __init__(self, layers: int, dim: int, seq: int, *, vocabulary: int = 256) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, dim), nn.Embedding(seq, dim)
        self.blocks = nn.ModuleList(Block(dim, max(1, dim // 64)) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


@dataclass
class Contestant:
    """A model in training.

    Attributes:
        model: What is called.
        backward: Backward of a loss.
        update: Steps the optimizer and drops the gradients.
        held: Bytes of parameters and optimizer state on this rank, where the framework says so.
        autocast: Whether the forward runs under autocast to bfloat16.
    """

    model: nn.Module
    backward: Callable[[Tensor], None]
    update: Callable[[], None]
    held: Callable[[], int | None]
    autocast: bool = False

    def step(self, tokens: Tensor) -> Tensor:
        """One step on `tokens`, "batch seq+1" of bytes. Returns the loss of this rank."""
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.autocast):
            logits = self.model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        self.backward(loss)
        self.update()
        return loss.detach()


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer, *, autocast: bool = False) -> Contestant:
    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def held() -> int:
        inner = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
        states = [value for state in inner.state.values() for value in state.values()]
        tensors = [t for t in (*model.parameters(), *states) if isinstance(t, Tensor)]
        local = [t._local_tensor if hasattr(t, "_local_tensor") else t for t in tensors]
        return sum(t.numel() * t.element_size() for t in local)

    return Contestant(model, torch.autograd.backward, update, held, autocast)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)


def ddp(model: GPT, mesh: DeviceMesh, bf16: bool) -> Contestant:
    wrapped = DistributedDataParallel(
        model, process_group=mesh.get_group(), gradient_as_bucket_view=True, static_graph=True
    )
    return _trained(wrapped, _adamw(model), autocast=bf16)


def redundancy(*, as_buckets: bool) -> Callable[[GPT, DeviceMesh, bool], Contestant]:
    """DDP with torch's ZeRO-1. Its parameters travel one by one, or in buckets of which they are views."""

    def build(model: GPT, mesh: DeviceMesh, bf16: bool) -> Contestant:
        wrapped = DistributedDataParallel(
            model, process_group=mesh.get_group(), gradient_as_bucket_view=True, static_graph=True
        )
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=as_buckets, lr=RATE, fused=True
        )
        return _trained(wrapped, optimizer, autocast=bf16)

    return build


def fsdp2(*, reshards: bool) -> Callable[[GPT, DeviceMesh, bool], Contestant]:
    """FSDP2, which frees whole parameters after forward or keeps them until backward is done."""

    def build(model: GPT, mesh: DeviceMesh, bf16: bool) -> Contestant:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshards)
        fully_shard(model, mesh=mesh, mp_policy=policy)  # in place
        return _trained(model, _adamw(model))

    return build


def deepspeed(
    stage: int, optimizer: Mapping[str, object] | None = None
) -> Callable[[GPT, DeviceMesh, bool], Contestant]:
    """A stage of DeepSpeed with its defaults, but for clipping: left out, it clips by a norm of 1 (0.19.8), which no other
    contestant does. `optimizer` is an entry of its configuration, in place of the stock AdamW."""

    def build(model: GPT, mesh: DeviceMesh, bf16: bool) -> Contestant:
        if mesh.device_type == "cpu":
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
            os.environ.setdefault("LOCAL_SIZE", str(mesh.size()))  # else each bucket of gradients starts `numactl`
        ds = importlib.import_module("deepspeed")

        ds.init_distributed(dist_backend=torch.distributed.get_backend())
        config = {
            "train_micro_batch_size_per_gpu": 1,  # only DeepSpeed's own data loader and its logs read it
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": bf16},
        }
        stock = _adamw(model) if optimizer is None else None
        config |= {} if optimizer is None else {"optimizer": dict(optimizer)}
        needed = [parameter for parameter in model.parameters() if parameter.requires_grad]
        engine, *_ = ds.initialize(model=model, optimizer=stock, model_parameters=needed, config=config)
        return Contestant(engine, engine.backward, engine.step, lambda: None)

    return build


def zero_fn(transform: Callable[..., nn.Module]) -> Callable[[GPT, DeviceMesh, bool], Contestant]:
    """A transform of this package."""

    def build(model: GPT, mesh: DeviceMesh, bf16: bool) -> Contestant:
        sharded = transform(model, mesh)
        sharded = zf.precision(sharded) if bf16 else sharded
        contestant = _trained(sharded, optimizer := _adamw(sharded))

        def held() -> int:
            memory = zf.memory(sharded, optimizer)
            return memory.parameters + memory.optimizer

        contestant.held = held
        return contestant

    return build


CONTESTANTS: dict[str, Callable[[GPT, DeviceMesh, bool], Contestant]] = {
    "ddp": ddp,
    "ddp+zro": redundancy(as_buckets=False),
    "ddp+zro-view": redundancy(as_buckets=True),
    "fsdp2": fsdp2(reshards=True),
    "fsdp2-keep": fsdp2(reshards=False),
    "deepspeed1": deepspeed(1),
    "deepspeed2": deepspeed(2),
    "deepspeed3": deepspeed(3),
    "replicate": zero_fn(zf.replicate),
    "zero1": zero_fn(zf.shard_optimizer),
    "zero2": zero_fn(zf.shard_grads),
    "zero3": zero_fn(zf.shard_params),
}


def available() -> list[str]:
    """Those that this machine can run."""
    has_deepspeed = importlib.util.find_spec("deepspeed") is not None
    return [name for name in CONTESTANTS if has_deepspeed or not name.startswith("deepspeed")]
