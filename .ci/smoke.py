"""What an installed package does in an empty environment: ranks train, states rest on a disk, a checkpoint loads."""

import os
import shutil
import sysconfig
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zero_fn as zf


def train(folder):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = zf.shard_params(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)), mesh["dp"])
    optimizer = zf.streamed(torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), zf.nvme(folder))
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(60):
        x = torch.randn(64, 16)
        loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    zf.save(f"{folder}/runs/step-60", model, optimizer)
    zf.load(f"{folder}/runs", model, optimizer)
    zf.from_deepspeed(
        nn.Linear(2, 2),
        {"train_batch_size": 2, "zero_optimization": {"stage": 1}, "optimizer": {"type": "Adam"}},
        mesh["dp"],
    )
    return losses, str(optimizer)


if __name__ == "__main__":
    installed = Path(zf.__file__).resolve()
    assert installed.is_relative_to(Path(sysconfig.get_path("purelib")).resolve()), f"this is the clone: {installed}"
    with tempfile.TemporaryDirectory() as folder:
        ranks = zf.launch(train, 2, folder)
    assert all(losses[-1] < losses[0] / 2 for losses, _ in ranks), ranks
    losses, text = ranks[0]
    has_compiler = shutil.which(os.environ.get("CC", "cc")) is not None
    assert has_compiler == ("no kernels" not in text), text  # the package brings the sources of its kernels
    print(f"zero_fn {zf.__version__}: loss {losses[0]:.2f} -> {losses[-1]:.2f}; {text.splitlines()[0]}")
