"""Makes the folders of DeepSpeed that tests read, where deepspeed 0.19 is installed.

    python -m tests.units.checkpoint.made_by_deepspeed

Each is written by DeepSpeed itself on two ranks, after two steps. Beside them `golden.json` holds, for each folder, every
trained parameter as DeepSpeed gives it at that moment, and after the next step.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

HERE = Path(__file__).parent / "of_deepspeed"

RANKS = 2
STEPS = 2
ROWS = 4
"""Of the batch of each step, over all ranks."""

KINDS = {
    "zero1": {"zero_optimization": {"stage": 1}},
    "zero2": {"zero_optimization": {"stage": 2, "round_robin_gradients": True}},
    "zero3": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 8, "sub_group_size": 30}},
    "bf16_zero1": {
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
    "bf16_zero2": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}},
}
UNIVERSAL = {"universal_zero1": "zero1", "universal_zero3": "zero3"}
"""What `ds_to_universal` makes of which; of `round_robin_gradients` it makes a mixture, as of 0.19.8."""


class Net(nn.Module):
    """Odd sizes, a tied pair, a frozen parameter, a buffer and a scalar."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.middle = nn.Linear(5, 7)
        self.norm = nn.LayerNorm(7)
        self.back = nn.Linear(7, 5, bias=False)
        self.last = nn.Linear(5, 5)
        self.last.weight = self.first.weight
        self.gain = nn.Parameter(torch.ones(1))
        self.norm.weight.requires_grad_(False)
        self.register_buffer("shift", torch.arange(5.0))

    def forward(self, x):
        inner = self.norm(self.middle(self.first(x).tanh()))
        return self.last(self.back(inner) + self.shift.to(x.dtype)) * self.gain


def built():
    """The model of the folders, before its first step."""
    torch.manual_seed(0)
    return Net()


def groups(model):
    """Two groups: biases do not decay."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for name, p in trained if not name.endswith("bias")]},
        {"params": [p for name, p in trained if name.endswith("bias")], "weight_decay": 0.0, "lr": 0.02},
    ]


def adamw(model):
    """The optimizer of the folders."""
    return torch.optim.AdamW(groups(model), lr=0.01, betas=(0.8, 0.95), weight_decay=0.1)


def batch(step):
    """What all ranks together see in a step: "row feature"."""
    return torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(step))


def loss_of(model, rows):
    """The loss of a rank: a mean over its rows."""
    return model(rows).float().square().mean()


def _run_rank():
    import deepspeed

    deepspeed.init_distributed("gloo")
    golden = {kind: _trained(kind) for kind in KINDS}
    if torch.distributed.get_rank() == 0:
        (HERE / "golden.json").write_text(json.dumps(golden))
    torch.distributed.destroy_process_group()


def _trained(kind):
    """Saves a folder; returns the parameters then, and after the next step."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    rank = torch.distributed.get_rank()
    model = built()
    config = {"train_micro_batch_size_per_gpu": ROWS // RANKS, "gradient_clipping": 0.0, **KINDS[kind]}
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=config)

    def step(number):
        rows = batch(number).chunk(RANKS)[rank].to(next(engine.module.parameters()).dtype)
        engine.backward(loss_of(engine, rows))
        engine.step()

    def now():
        trained = [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad]
        is_here = kind in ("zero1", "zero2")  # what DeepSpeed says of round_robin_gradients is of other parameters
        return {name: (p if is_here else safe_get_full_fp32_param(p)).flatten().tolist() for name, p in trained}

    for number in range(STEPS):
        step(number)
    saved = now()
    engine.save_checkpoint(str(HERE / kind), tag=f"global_step{STEPS}", client_state={"epoch": 3})
    step(STEPS)
    return {"saved": saved, "after": now()}


def main():
    """Makes all of them."""
    command = ["-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", "--master-port=29533", __file__, "rank"]
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(HERE.parents[3])}
    subprocess.run([sys.executable, *command], check=True, env=env)
    for kind, source in UNIVERSAL.items():
        (HERE / kind).mkdir(exist_ok=True)
        folders = [
            f"--input_folder={HERE / source}/global_step{STEPS}",
            f"--output_folder={HERE / kind}/global_step{STEPS}",
        ]
        command = [
            "-m",
            "deepspeed.checkpoint.ds_to_universal",
            *folders,
            "--inject_missing_state",
            "--num_extract_workers=1",
        ]
        subprocess.run([sys.executable, *command, "--num_merge_workers=1"], check=True)
    for script in HERE.rglob("*.py"):  # DeepSpeed copies its converters into each
        script.unlink()


if __name__ == "__main__":
    _run_rank() if len(sys.argv) > 1 else main()
