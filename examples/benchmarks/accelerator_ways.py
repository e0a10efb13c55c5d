"""The ways to train a GPT on one accelerator, and the bytes that each takes by arithmetic, before anything is built.

    plain             parameters in bfloat16, float32 masters that torch's AdamW steps; gradients are cast as they come
    FSDP2             fully_shard for each block over a group of one, computing in bfloat16
    FSDP2, host       the same with CPUOffloadPolicy: parameters, gradients, states and the step on the host
    device            zf.shard_params over a group of one, zf.precision
    zero1, zero2      the other stages
    precision         zf.precision alone, without a group
    states            states on the host: gradients and parameters visit them (plain ZeRO-Offload)
    host              parameters, gradients and states on the host
    host, forward     the same; the next forward finishes the step, unit by unit
    host, 16 bits     the same with gradients in bfloat16, summed in float32
    disk              parameters, gradients and states on the disk

All compute in bfloat16 with masters, gradient sums and states in float32, and are stepped by a fused AdamW.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from contestants import GPT, RATE
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.profiler import record_function

import zero_fn as zf
from zero_fn.storage.host_memory import available

HOST_KEPT_FREE = 10 << 30
SHARE_OF_DEVICE = 0.88  # the rest is for the context, workspaces and holes of the allocator
_VOCABULARY = 256


class Shape(NamedTuple):
    """Of a GPT."""

    layers: int
    width: int
    sequence: int

    @staticmethod
    def named(text: str) -> Shape:
        """`"24x2048x1024"`."""
        return Shape(*map(int, text.split("x")))

    @property
    def numel(self) -> int:
        """Its parameters."""
        block = 12 * self.width**2 + 13 * self.width
        return self.layers * block + (2 * _VOCABULARY + self.sequence + 2) * self.width

    def flops(self, tokens: int) -> int:
        """Of a step, without what is recomputed: six for each weight that multiplies and token, and causal attention."""
        weights = self.layers * 12 * self.width**2 + _VOCABULARY * self.width
        return 6 * tokens * (weights + self.layers * self.width * self.sequence)

    def activations_nbytes(self, tokens: int, *, recomputes: bool) -> int:
        """What a block keeps for its backward is about 34 bytes a token and unit of width. With recomputation one block keeps
        that, and the others their inputs."""
        per_token = 2 * self.layers + 34 if recomputes else 34 * self.layers
        return tokens * (per_token * self.width + 10 * _VOCABULARY)

    @property
    def in_use_nbytes(self) -> int:
        """Two gathered blocks, and the gradients of one in both dtypes."""
        return 10 * 12 * self.width**2


class Trained(NamedTuple):
    """A model in training.

    Attributes:
        model: A GPT.
        parameters: Those whose gradients are clipped and stepped.
        update: Steps the optimizer and drops the gradients.
        plan: What zero_fn predicts; None for others.
    """

    model: Any
    parameters: list[Tensor]
    update: Callable[[], None]
    plan: Callable[[], zf.inspect.Plan] | None = None

    def step(self, tokens: Tensor) -> Tensor:
        """One step on `tokens`, "batch sequence+1" of bytes, with exact clipping. Returns the loss."""
        with record_function("forward"):
            logits = self.model(tokens[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        with record_function("backward"):
            loss.backward()  # type: ignore[no-untyped-call]
        with record_function("clip"):
            nn.utils.clip_grad_norm_(self.parameters, 1.0)
        with record_function("update"):
            self.update()
        return loss.detach()


class Way(NamedTuple):
    """How a model is trained, with bytes of each parameter.

    Attributes:
        build: Takes a model in float32 on the device, and a folder of a disk.
        device, host: Bytes of each parameter that rest there.
        link: Bytes of each parameter that a step copies to the device and from it.
    """

    build: Callable[[GPT, str], Trained]
    device: int
    host: int = 0
    link: tuple[int, int] = (0, 0)


def group_of_one(device_type: str) -> DeviceMesh | None:
    """The mesh of this process alone; None where there is no NCCL and nobody began a group."""
    if not dist.is_initialized():
        if device_type != "cuda":
            return None
        torch.cuda.set_device(0)
        store = FileStore(f"{tempfile.mkdtemp()}/store", 1)
        dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    assert dist.group.WORLD is not None
    return DeviceMesh.from_group(dist.group.WORLD, device_type, mesh_dim_names=("dp",))


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, *, is_ours: bool = False) -> Trained:
    """A model whose own parameters are clipped and stepped. `is_ours`: zero_fn predicts what it takes."""

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Trained(model, list(model.parameters()), update, (lambda: zf.plan(model, optimizer)) if is_ours else None)


def _adamw(model: nn.Module, *, fused: bool = True) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE, fused=fused)


def _is_fused_on(device: torch.device) -> bool:
    return device.type in ("cpu", "cuda")  # else only torch's other kernels are there


def _plain(model: GPT, _path: str) -> Trained:
    masters = [parameter.detach().clone() for parameter in model.parameters()]
    model = model.bfloat16()
    for parameter, master in zip(model.parameters(), masters, strict=True):

        def cast(of: Tensor, to: Tensor = master) -> None:
            assert of.grad is not None
            to.grad, of.grad = of.grad.to(to.dtype), None

        parameter.register_post_accumulate_grad_hook(cast)  # type: ignore[no-untyped-call]
    optimizer = torch.optim.AdamW(masters, lr=RATE, fused=_is_fused_on(masters[0].device))
    parameters = [parameter.detach() for parameter in model.parameters()]

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()
        torch._foreach_copy_(parameters, masters)

    return Trained(model, masters, update)


def fsdp2(mesh: DeviceMesh, policy: OffloadPolicy) -> Callable[[GPT, str], Trained]:
    """FSDP2, in bfloat16."""

    def build(model: GPT, _path: str) -> Trained:
        options: dict[str, Any] = {
            "mesh": mesh,
            "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
            "offload_policy": policy,
        }
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)  # in place
        return stepped(model, _adamw(model))

    return build


def _fsdp2_on_cuda(policy: Callable[[], OffloadPolicy]) -> Callable[[GPT, str], Trained]:
    def build(model: GPT, path: str) -> Trained:
        mesh = group_of_one(model.head.weight.device.type)
        assert mesh is not None
        return fsdp2(mesh, policy())(model, path)

    return build


def _on_device(stage: Callable[..., GPT] | None) -> Callable[[GPT, str], Trained]:
    def build(model: GPT, _path: str) -> Trained:
        device = model.head.weight.device
        mesh = None if stage is None else group_of_one(device.type)
        ours = zf.precision(model if mesh is None or stage is None else stage(model, mesh, donate=True))
        return stepped(ours, _adamw(ours, fused=_is_fused_on(device)), is_ours=True)

    return build


def _states(model: GPT, _path: str) -> Trained:
    ours = zf.precision(model)
    return stepped(ours, zf.streamed(_adamw(ours), zf.cpu()), is_ours=True)


def _away(
    tier: Callable[[str], Any], finish: Any = "step", grads: torch.dtype | None = None
) -> Callable[[GPT, str], Trained]:
    def build(model: GPT, path: str) -> Trained:
        to = tier(path)
        ours = zf.precision(model, grads=grads)
        ours = zf.offload(ours, params=to, grads=to, optim=to, reshard_after="backward", donate=True)
        return stepped(ours, zf.streamed(_adamw(ours), finish=finish), is_ours=True)

    return build


_PLAIN = Way(_plain, 18)
WAYS = {
    "plain": _PLAIN,
    "device": Way(_on_device(zf.shard_params), 16),
    "host": Way(_away(lambda _: zf.cpu()), 2, 18),
    "host, forward": Way(_away(lambda _: zf.cpu(), "forward"), 2, 18),
    "host, 16 bits": Way(_away(lambda _: zf.cpu(), grads=torch.bfloat16), 2, 16),
    "FSDP2, host": Way(_fsdp2_on_cuda(CPUOffloadPolicy), 0, 16, (8, 4)),  # gathered in float32, for each pass
    "states": Way(_states, 10, 8),
    "FSDP2": Way(_fsdp2_on_cuda(OffloadPolicy), 16),
    "disk": Way(_away(zf.nvme), 2),
    "zero1": Way(_on_device(zf.shard_optimizer), 18),
    "zero2": Way(_on_device(zf.shard_grads), 18),
    "precision": Way(_on_device(None), 18),
    "plain, again": _PLAIN,
}


def built_on(device: torch.device, shape: Shape) -> GPT:
    """A GPT in float32, the same each time, drawn by the device."""
    torch.manual_seed(0)
    with device:
        return GPT(*shape)


def device_nbytes(device: torch.device) -> int:
    """The memory of a device that is this program's to use; without CUDA, the host's."""
    if device.type != "cuda":
        return available().nbytes
    return int(SHARE_OF_DEVICE * torch.cuda.get_device_properties(0).total_memory)


def host_nbytes() -> int:
    """The memory of the host that this program may still take."""
    return available().nbytes - HOST_KEPT_FREE


def forget(device: torch.device) -> str:
    """Gives back what nobody uses. Returns what is still held, in words; empty if that is little."""
    gc.collect()
    if device.type != "cuda":
        return ""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch._C._host_emptyCache()  # torch's pinned memory
    held = torch.cuda.memory_allocated()
    return f"{held / 1e9:.1f} GB of the device are still held" if held > 1 << 28 else ""
