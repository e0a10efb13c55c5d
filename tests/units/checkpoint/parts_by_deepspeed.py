"""Makes a folder of a model that DeepSpeed 0.19 has cut by a pipeline, tensor parallelism or experts, after two steps.

    DS_ACCELERATOR=cpu torchrun --nproc-per-node 4 -m tests.units.checkpoint.parts_by_deepspeed pipeline_zero1

Models are in two parts. `golden.json` holds what DeepSpeed has then of each trained parameter, and of its moments.
"""

import base64
import json
import re
import sys
from functools import partial

import torch
from torch import Tensor, nn

from tests.units.checkpoint.made_by_deepspeed import HERE, STEPS, adamw, batch

ZERO1, ZERO2, ZERO3 = ({"zero_optimization": {"stage": stage}} for stage in (1, 2, 3))
LAYERS = [
    {"patterns": [".*1.weight$"], "partition_type": "column", "shape": [[4, 2], -1], "partition_dim": 0},
    {"patterns": [".*2.weight$"], "partition_type": "row"},
    {"patterns": [".*3.weight$"], "partition_type": "column"},
]
TENSOR = {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": LAYERS}}
KINDS = {
    "pipeline_zero1": ZERO1,
    "pipeline_bf16": {**ZERO1, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "pipeline_plain": {},
    "tensor_zero1": {**ZERO1, "tensor_parallel": TENSOR},
    "tensor_zero3": {**ZERO3, "tensor_parallel": TENSOR},
    "experts_zero2": ZERO2,
    "experts_plain": {},
}
"""Their configs: on two ranks for bf16, plain and tensor_zero3, and on four for the others."""


class Middle(nn.Sequential):
    """A layer with a frozen parameter and a buffer."""

    def __init__(self):
        super().__init__(nn.Linear(5, 7), nn.LayerNorm(7))
        self[1].weight.requires_grad_(False)
        self.register_buffer("shift", torch.arange(7.0))


def _loss(out, *_):
    return (out[0] if isinstance(out, tuple) else out).float().square().mean()


def _of_rank(kind):
    """Saves a folder; returns what this rank has of each trained parameter and its moments, one after the other."""
    import deepspeed
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    if kind.startswith("pipeline"):
        tied = [TiedLayerSpec("embed", nn.Linear, 5, 5, tied_weight_attr=["weight", "bias"]) for _ in range(2)]
        layers = [tied[0], LayerSpec(Middle), LayerSpec(nn.Linear, 7, 5), tied[1]]
        model = PipelineModule(layers, num_stages=2, loss_fn=_loss, partition_method="uniform")
    else:
        experts = nn.Sequential(nn.Linear(5, 5), MoE(5, nn.Linear(5, 5), num_experts=4, ep_size=2, min_capacity=0))
        cut = nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 6), nn.Linear(6, 5), nn.Linear(5, 6))
        model = cut if kind.startswith("tensor") else experts
    groups = [{"params": [p for p in model.parameters() if p.requires_grad], "name": "all"}]
    groups = split_params_into_different_moe_groups_for_optimizer(groups)
    made = torch.optim.SGD(groups, lr=0.01) if "plain" in kind else torch.optim.AdamW(groups, lr=0.01)
    config = {"train_micro_batch_size_per_gpu": 2, **KINDS[kind]}
    optimizer = adamw(model) if kind == "pipeline_zero1" else made
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    rank = torch.distributed.get_rank()
    for number in range(STEPS):
        rows = batch(number).chunk(2)[rank // 2 if kind.startswith("tensor") else rank % 2]
        if kind.startswith("pipeline"):
            engine.train_batch(iter([(rows.to(next(engine.module.parameters()).dtype), rows)]))
        else:
            engine.backward(_loss(engine(rows)))
            engine.step()
    engine.save_checkpoint(str(HERE / kind), tag=f"global_step{STEPS}", client_state={"epoch": 3})
    trained = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):  # before states of the second group were there
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    moments = [partial(safe_get_full_optimizer_state, optim_state_key=key) for key in ("exp_avg", "exp_avg_sq")]
    values = [Tensor.detach] if "plain" in kind else [safe_get_full_fp32_param, *moments]
    return {name: torch.stack([value(p) for value in values]) for name, p in trained.items()}


if __name__ == "__main__":
    kind = sys.argv[1]
    mine, found = _of_rank(kind), [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, mine)
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
    if torch.distributed.get_rank() == 0:
        golden = {name: base64.b64encode(each.numpy().tobytes()).decode() for name, each in whole.items()}
        (HERE / kind / "golden.json").write_text(json.dumps(golden))
        for script in (HERE / kind).glob("*.py"):  # DeepSpeed copies its converters there
            script.unlink()
