"""A whole program, started as users start it: `python` per rank, with the environment of `env://`.

Under torchrun: `test_several_axes.py`, and with restarts `test_train_gpt.py`.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

TRAIN = """
import os, signal, sys, time
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import zero_fn as zf

torch.set_num_threads(1)
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
model = zf.shard_params(model, mesh["dp"])
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for step in range(5):
    dist.barrier()  # what is in flight when a rank is killed is lost with it
    if step == 2 and dist.get_rank() == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    began_s = time.monotonic()
    try:
        model(x).square().mean().backward()
    except zf.LostRankError as error:
        print(f"after {time.monotonic() - began_s:.1f} s: {error}", flush=True)
        os._exit(7)
    optimizer.step()
    optimizer.zero_grad()
os._exit(0)  # nobody was told
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


def environment(**added: object) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        **{name: str(value) for name, value in added.items()},
    }


def test_survivors_name_a_killed_rank_even_if_it_served_the_store(program: Path) -> None:
    """Rank 0 serves the store of `env://`: with it go the last words of everyone. Others: `transport/test_desync.py`."""
    victim = 0
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program), str(victim)],
            env=environment(RANK=rank, WORLD_SIZE=3, MASTER_ADDR="localhost", MASTER_PORT=port),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        said = {rank: process.communicate(timeout=120)[0] for rank, process in enumerate(ranks)}
    finally:
        for process in ranks:
            process.kill()
    assert ranks[victim].returncode == -signal.SIGKILL
    for rank in {0, 1, 2} - {victim}:
        assert ranks[rank].returncode == 7, said[rank]
        seconds = float(said[rank].split()[1])
        assert seconds < 3, said[rank]
        assert "closed the connection" in said[rank]
        blamed = said[rank].partition(": ")[2].splitlines()[0]
        assert str(victim) in blamed.partition(" of axis")[0], said[rank]
