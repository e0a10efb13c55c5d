"""Makes the folders of DeepSpeed that tests read, where deepspeed 0.19 is installed.

    python -m tests.units.checkpoint.made_by_deepspeed

Each is written by DeepSpeed itself after two steps of several ranks. Beside those of whole models `golden.json` holds, for
each of them, every trained parameter as DeepSpeed has it at that moment, and after the next step. In each folder of a model
that was cut there is one, of its parameters and their moments.
"""

import base64
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

HERE = Path(__file__).parent / "of_deepspeed"

STEPS = 2
ROWS = 4
"""Of the batch of each step, over all ranks."""

ZERO1, ZERO2, ZERO3 = ({"zero_optimization": {"stage": stage}} for stage in (1, 2, 3))
BF16 = {"bf16": {"enabled": True}}
IN_FLOAT32 = {"data_types": {"grad_accum_dtype": "fp32"}}
KINDS = {
    "zero1": ZERO1,
    "zero2": {"zero_optimization": {"stage": 2, "round_robin_gradients": True}},
    "zero3": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 8, "sub_group_size": 30}},
    "bf16_zero1": {**ZERO1, **BF16, **IN_FLOAT32},
    "bf16_zero2": {**ZERO2, **BF16},
}
"""Of whole models, on two ranks."""

UNIVERSAL = {"universal_zero1": "zero1", "universal_zero3": "zero3"}
"""What `ds_to_universal` makes of which; of `round_robin_gradients` it makes a mixture, as of 0.19.8."""

LAYERS = [
    {"patterns": [".*1.weight$"], "partition_type": "column", "shape": [[4, 2], -1], "partition_dim": 0},
    {"patterns": [".*2.weight$"], "partition_type": "row"},
    {"patterns": [".*3.weight$"], "partition_type": "column"},
]
TENSOR = {
    "tensor_parallel": {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": LAYERS}}
}
PARTS = {
    "pipeline_zero1": (4, ZERO1),
    "pipeline_bf16": (2, {**ZERO1, **BF16, **IN_FLOAT32}),
    "pipeline_plain": (2, {}),
    "tensor_zero1": (4, {**ZERO1, **TENSOR}),
    "tensor_zero3": (2, {**ZERO3, **TENSOR}),
    "experts_zero2": (4, ZERO2),
    "experts_plain": (2, {}),
}
"""Of models that a pipeline, tensor parallelism or experts have cut in two, with their ranks."""


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


class Middle(nn.Sequential):
    """A layer with a frozen parameter and a buffer."""

    def __init__(self):
        super().__init__(nn.Linear(5, 7), nn.LayerNorm(7))
        self[1].weight.requires_grad_(False)
        self.register_buffer("shift", torch.arange(7.0))


def built():
    """The model of the folders of whole models, before its first step."""
    torch.manual_seed(0)
    return Net()


def changed_by(model, number):
    """The model, of which all values are others."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(number)
    return model


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


# -- with DeepSpeed ----------------------------------------------------------------------------------------------------


def _engine(model, optimizer, config):
    import deepspeed

    config = {"train_micro_batch_size_per_gpu": ROWS // 2, **config}
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def _step(engine, number, part):
    rows = batch(number).chunk(2)[part]
    narrow = rows.to(next(engine.module.parameters()).dtype)
    if engine.pipeline_parallelism:
        engine.train_batch(iter([(narrow, rows)]))
    else:
        engine.backward(_loss(engine(narrow)))
        engine.step()


def _loss(out, *_):
    return (out[0] if isinstance(out, tuple) else out).float().square().mean()


def _save(engine, kind):
    engine.save_checkpoint(str(HERE / kind), tag=f"global_step{STEPS}", client_state={"epoch": 3})


def _trained(engine):
    return {name: p for name, p in engine.module.named_parameters() if p.requires_grad}


def _of_a_whole(kind):
    """Saves a folder; returns the parameters then, and after the next step."""
    from deepspeed.utils import safe_get_full_fp32_param

    model, rank = built(), torch.distributed.get_rank()
    engine = _engine(model, adamw(model), {"gradient_clipping": 0.0, **KINDS[kind]})

    def now():
        is_here = kind in ("zero1", "zero2")  # what DeepSpeed says of round_robin_gradients is of other parameters
        found = {name: p if is_here else safe_get_full_fp32_param(p) for name, p in _trained(engine).items()}
        return {name: value.flatten().tolist() for name, value in found.items()}

    for number in range(STEPS):
        _step(engine, number, rank)
    saved = now()
    _save(engine, kind)
    _step(engine, STEPS, rank)
    return {"saved": saved, "after": now()}


def _of_a_part(kind):
    """Saves a folder; returns what this rank has of each trained parameter and its moments, one after the other."""
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    torch.manual_seed(0)
    if kind.startswith("pipeline"):
        tied = [TiedLayerSpec("embed", nn.Linear, 5, 5, tied_weight_attr=["weight", "bias"]) for _ in range(2)]
        layers = [tied[0], LayerSpec(Middle), LayerSpec(nn.Linear, 7, 5), tied[1]]
        model = PipelineModule(layers, num_stages=2, loss_fn=_loss, partition_method="uniform")
    elif kind.startswith("tensor"):
        model = nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 6), nn.Linear(6, 5), nn.Linear(5, 6))
    else:
        model = nn.Sequential(nn.Linear(5, 5), MoE(5, nn.Linear(5, 5), num_experts=4, ep_size=2, min_capacity=0))
    own = [{"params": [p for p in model.parameters() if p.requires_grad], "name": "all"}]
    own = split_params_into_different_moe_groups_for_optimizer(own)
    made = torch.optim.SGD(own, lr=0.01) if "plain" in kind else torch.optim.AdamW(own, lr=0.01)
    engine = _engine(model, adamw(model) if kind == "pipeline_zero1" else made, PARTS[kind][1])
    rank = torch.distributed.get_rank()
    for number in range(STEPS):
        _step(engine, number, rank // 2 if kind.startswith("tensor") else rank % 2)
    _save(engine, kind)
    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):  # before states of the second group were there
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    moments = [partial(safe_get_full_optimizer_state, optim_state_key=key) for key in ("exp_avg", "exp_avg_sq")]
    values = [Tensor.detach] if "plain" in kind else [safe_get_full_fp32_param, *moments]
    return {name: torch.stack([value(p) for value in values]) for name, p in _trained(engine).items()}


def _whole(kind, found):
    """Of what each rank has: experts have their numbers over all ranks, and cut dims are joined."""
    whole = {}
    for rank, each in enumerate(found):
        for name, value in each.items():
            whole.setdefault(re.sub(r"(?<=experts\.)\d+", lambda n, r=rank: str(int(n[0]) + r % 2 * 2), name), value)
    for name in whole if kind.startswith("tensor") else ():
        a, b = found[0][name], found[1][name]
        if name.startswith("3") or name == "2.weight":
            whole[name] = torch.cat([a, b], dim=2 if name == "2.weight" else 1)
        elif name.startswith("1"):
            whole[name] = torch.cat([a[:, :2], b[:, :2], a[:, 2:], b[:, 2:]], dim=1)
    return {name: base64.b64encode(each.numpy().tobytes()).decode() for name, each in whole.items()}


def _run_rank(kind):
    import deepspeed

    deepspeed.init_distributed("gloo")
    if kind in PARTS:
        found = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(found, _of_a_part(kind))
        path, golden = HERE / kind / "golden.json", _whole(kind, found)
    else:
        path, golden = HERE / "golden.json", {each: _of_a_whole(each) for each in KINDS}
    if torch.distributed.get_rank() == 0:
        path.write_text(json.dumps(golden))


def main():
    """Makes all of them."""
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": os.pathsep.join([str(HERE.parents[3]), *sys.path])}
    for kind, (ranks, _) in {"wholes": (2, None), **PARTS}.items():
        command = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--master-port=29533", __file__, kind]
        subprocess.run([sys.executable, *command], check=True, env=env)
    for kind, source in UNIVERSAL.items():
        (HERE / kind).mkdir(exist_ok=True)
        folders = {"input": HERE / source, "output": HERE / kind}
        command = ["-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
        command += [f"--{way}_folder={folder}/global_step{STEPS}" for way, folder in folders.items()]
        command += ["--num_extract_workers=1", "--num_merge_workers=1"]
        subprocess.run([sys.executable, *command], check=True)
    for script in HERE.rglob("*.py"):  # DeepSpeed copies its converters into each
        script.unlink()


if __name__ == "__main__":
    _run_rank(sys.argv[1]) if len(sys.argv) > 1 else main()
