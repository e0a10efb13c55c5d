"""Makes folders of models that DeepSpeed 0.19 has cut by pipelines, tensor parallelism or experts, where it is installed.

    python -m tests.units.checkpoint.parts_by_deepspeed

Each is written by DeepSpeed itself after two steps. Beside them `golden_parts.json` holds each trained parameter and its
moments as DeepSpeed gives them at that moment.
"""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from typing import Any

import torch
from torch import Tensor, nn

from tests.units.checkpoint.made_by_deepspeed import HERE, STEPS, adamw, batch

ZERO1 = {"zero_optimization": {"stage": 1}}
LAYERS = [
    {"patterns": [".*wide.weight$"], "partition_type": "column"},
    {"patterns": [".*fused.weight$"], "partition_type": "column", "shape": [[4, 2], -1], "partition_dim": 0},
    {"patterns": [".*back.weight$"], "partition_type": "row"},
]
TENSOR = {
    "tensor_parallel": {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": LAYERS}}
}
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "pipeline_zero1": (4, ZERO1),
    "pipeline_bf16": (2, {**ZERO1, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}),
    "pipeline_plain": (2, {}),
    "tensor_zero1": (4, {**ZERO1, **TENSOR}),
    "tensor_zero3": (2, {"zero_optimization": {"stage": 3}, **TENSOR}),
    "experts_zero2": (4, {"zero_optimization": {"stage": 2}}),
    "experts_plain": (2, {}),
}
"""On how many ranks, and the config: two ranks have different parts of the model, and four are two pairs of them."""


class Middle(nn.Sequential):
    """A layer with a frozen parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 7), nn.LayerNorm(7))
        self[1].weight.requires_grad_(False)
        self.register_buffer("shift", torch.arange(7.0))


class Cut(nn.Module):
    """Layers that are cut along their rows, in two blocks of rows, along their columns, and not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.fused = nn.Linear(5, 6), nn.Linear(5, 6)
        self.norm, self.back = nn.LayerNorm(5), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.back(self.wide(self.norm(x)) * self.fused(x))  # type: ignore[no-any-return]


def _loss(out: Any, _: Tensor | None = None) -> Tensor:
    return (out[0] if isinstance(out, tuple) else out).float().square().mean()  # type: ignore[no-any-return]


def _engine(kind: str) -> Any:
    import deepspeed
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    torch.manual_seed(0)
    if kind.startswith("pipeline"):
        tied = [TiedLayerSpec("embed", nn.Linear, 5, 5, tied_weight_attr=["weight", "bias"]) for _ in range(2)]
        layers = [tied[0], LayerSpec(Middle), LayerSpec(nn.Linear, 7, 5), tied[1]]
        model: Any = PipelineModule(layers, num_stages=2, loss_fn=_loss, partition_method="uniform")
    else:
        experts = nn.Sequential(nn.Linear(5, 5), MoE(5, nn.Linear(5, 5), num_experts=4, ep_size=2, min_capacity=0))
        model = Cut() if kind.startswith("tensor") else experts
    groups: Any = [{"params": [p for p in model.parameters() if p.requires_grad], "name": "all"}]
    if kind.startswith("experts"):
        groups = split_params_into_different_moe_groups_for_optimizer(groups)
    made = torch.optim.SGD(groups, lr=0.01) if "plain" in kind else torch.optim.AdamW(groups, lr=0.01)
    config = {"train_micro_batch_size_per_gpu": 2, **KINDS[kind][1]}
    optimizer = adamw(model) if kind == "pipeline_zero1" else made
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def _of_rank(kind: str) -> dict[str, list[Tensor]]:
    """Saves a folder; returns what this rank has of each trained parameter, and of its moments."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    engine, rank, found = _engine(kind), torch.distributed.get_rank(), {}
    for number in range(STEPS):
        rows = batch(number).chunk(2)[rank // 2 if kind.startswith("tensor") else rank % 2]
        if kind.startswith("pipeline"):
            engine.train_batch(iter([(rows.to(next(engine.module.parameters()).dtype), rows)]))
        else:
            engine.backward(_loss(engine(rows)))
            engine.step()
    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):  # before states of the second group were there
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    for name, p in engine.module.named_parameters():
        if p.requires_grad:
            is_plain = "plain" in kind
            moments = () if is_plain else (safe_get_full_optimizer_state(p, m) for m in ("exp_avg", "exp_avg_sq"))
            found[name] = [p.detach() if is_plain else safe_get_full_fp32_param(p), *moments]
    engine.save_checkpoint(str(HERE / kind), tag=f"global_step{STEPS}", client_state={"epoch": 3})
    return found


def _whole(kind: str, found: list[dict[str, list[Tensor]]]) -> dict[str, list[Tensor]]:
    """What all ranks have, together."""
    whole: dict[str, list[Tensor]] = {}
    for rank, each in enumerate(found):
        for name, values in each.items():
            whole.setdefault(re.sub(r"(?<=experts\.)\d+", lambda n, r=rank: str(int(n[0]) + r % 2 * 2), name), values)
    for name in whole if kind.startswith("tensor") else ():
        pairs = [*zip(found[0][name], found[1][name], strict=True)]
        if name.startswith("wide") or name == "back.weight":
            whole[name] = [torch.cat(pair, dim=int(name == "back.weight")) for pair in pairs]
        elif name.startswith("fused"):
            whole[name] = [torch.cat([a[:2], b[:2], a[2:], b[2:]]) for a, b in pairs]
    return whole


def _run_rank(kind: str) -> None:
    import deepspeed

    deepspeed.init_distributed("gloo")
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, _of_rank(kind))
    if torch.distributed.get_rank() == 0:
        path = HERE / "golden_parts.json"
        golden = json.loads(path.read_text()) if path.exists() else {}
        golden[kind] = {
            name: [base64.b64encode(value.float().contiguous().numpy().tobytes()).decode() for value in values]
            for name, values in _whole(kind, found).items()
        }
        path.write_text(json.dumps(golden))


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        _run_rank(sys.argv[2])
    else:
        env = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(HERE.parents[3])}
        for kind in sys.argv[1:] or KINDS:
            command = ["-m", "torch.distributed.run", f"--nproc-per-node={KINDS[kind][0]}", __file__, "rank", kind]
            subprocess.run([sys.executable, *command], check=True, env=env)
        for script in HERE.rglob("*.py"):  # DeepSpeed copies its converters into each
            script.unlink()
