"""`import zero_fn` starts nothing: no CUDA context, no process group, no process, no thread; and it needs no cupy."""

import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parent.parent

_CHECK = """
import multiprocessing, sys, threading

sys.modules["cupy"] = None  # importing it raises ImportError, as where it is not installed
import torch
import torch.distributed as dist

torch.manual_seed(7)
state, threads, modules = torch.get_rng_state(), threading.active_count(), set(sys.modules)
{code}
unwanted = (set(sys.modules) - modules) & {{"matplotlib", "tqdm", "pytest", "hypothesis", "IPython", "triton", "transformers",
    "accelerate", "trl", "lightning", "tensorboard", "prometheus_client", "wandb", "mlflow", "comet_ml"}}
noticed = {{
    "CUDA": torch.cuda.is_initialized(),
    "a process group": dist.is_initialized(),
    "a process": bool(multiprocessing.active_children()),
    "a thread": threading.active_count() > threads,
    "the random numbers": not torch.equal(state, torch.get_rng_state()),
    "the default dtype": torch.get_default_dtype() is not torch.float32,
    f"modules {{unwanted}}": bool(unwanted),
}}
sys.exit(", ".join(name for name, found in noticed.items() if found))
"""


def _noticed_after(code):
    """What a new process notices after some code: nothing is an empty text."""
    command = [sys.executable, "-c", _CHECK.format(code=code)]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=120, check=False)
    return (done.stdout + done.stderr).strip()


def test_import_starts_nothing_and_needs_no_cupy():
    assert _noticed_after("import zero_fn, zero_fn.monitor") == ""


def test_what_an_import_must_not_do_is_noticed():
    group = 'dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)'
    assert _noticed_after(f"{group}; torch.rand(1)") == "a process group, the random numbers"
