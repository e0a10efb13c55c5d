"""A whole program, started as users start it: `python` per rank, with the environment of `env://`.

Under torchrun, also with restarts: `test_examples.py`.
"""

import os
import signal
import socket
import subprocess
import sys

import pytest

from tests.outside.examples.programs import ROOT

TRAIN = """
import os, signal, time
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
    if step == 2 and dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    began_s = time.monotonic()
    try:
        model(x).square().mean().backward()
    except zf.errors.LostRankError as error:
        print(f"after {time.monotonic() - began_s:.1f} s: {error}", flush=True)
        os._exit(7)
    optimizer.step()
    optimizer.zero_grad()
os._exit(0)  # nobody was told
"""


@pytest.mark.nightly  # test_desync.py has it without torchrun
def test_survivors_name_a_killed_rank_even_if_it_served_the_store(tmp_path):
    """Rank 0 serves the store of `env://`: with it go the last words of everyone. Others: `transport/test_desync.py`."""
    (tmp_path / "train.py").write_text(TRAIN)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1]), "GLOO_SOCKET_IFNAME": "lo"}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "3", **meeting}
    ranks = [
        subprocess.Popen(
            [sys.executable, tmp_path / "train.py"],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        said = [process.communicate(timeout=120)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert ranks[0].returncode == -signal.SIGKILL
    for rank in (1, 2):
        assert ranks[rank].returncode == 7, said[rank]
        assert float(said[rank].split()[1]) < 3, said[rank]
        assert "closed the connection" in said[rank]
        blamed = said[rank].partition(": ")[2].splitlines()[0]
        assert "0" in blamed.partition(" of axis")[0], said[rank]
