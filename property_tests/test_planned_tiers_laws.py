"""Law 9 in tiers: what is planned on `meta`, before anything is made, is what is held once it was made and stepped."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer

import zero_fn as zf
from tests.simulation import Simulated
from tests.simulation.simulated import axis
from tests.support.profiles import examples
from zero_fn.runtime.slot import slot_of

STAGES = ("plain", "replicate", "zero1", "zero2", "zero3")
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda ps: torch.optim.AdamW(ps),
    "fused": lambda ps: torch.optim.AdamW(ps, fused=True),
    "amsgrad": lambda ps: torch.optim.Adam(ps, amsgrad=True),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.01),
}


@dataclass(frozen=True)
class Planned:
    """A model, and where its state is to rest."""

    widths: tuple[int, ...]
    frozen: frozenset[int]
    stage: str
    optimizer: str
    tiers: tuple[tuple[str, str], ...]
    fraction: float
    where: str | None
    reshard_after: str
    dtypes: dict[str, torch.dtype]
    order: tuple[int, ...]


tiers = st.dictionaries(st.sampled_from(["params", "grads", "optim"]), st.sampled_from(["nvme", "cpu"]), min_size=1)
plans = st.builds(
    Planned,
    widths=st.lists(st.sampled_from([1, 5, 17, 64, 301]), min_size=1, max_size=4).map(tuple),
    frozen=st.frozensets(st.integers(1, 6), max_size=2),
    stage=st.sampled_from(STAGES),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    tiers=tiers.map(lambda chosen: tuple(chosen.items())),
    fraction=st.sampled_from([1.0, 0.5]),
    where=st.sampled_from([None, "0.*"]),
    reshard_after=st.sampled_from(["forward", "backward"]),
    dtypes=st.fixed_dictionaries({}, optional=dict.fromkeys(("compute", "grads"), st.just(torch.bfloat16))),
    order=st.permutations(range(3)).map(tuple),
)


class Part(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(12, width), nn.LayerNorm(width), nn.Linear(width, 12)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(self.norm(self.up(x)))
        return down


def planned_and_made(case: Planned, path: str) -> tuple[zf.Plan, zf.Plan, zf.Held, zf.Plan] | str:
    """The plan on meta, that of what was made, what it holds after two steps, and the plan then; or what was refused."""
    with torch.device("meta"):
        model: Any = nn.Sequential(*map(Part, case.widths))
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number not in case.frozen)
    chosen: dict[str, Any] = {kind: zf.nvme(path) if tier == "nvme" else zf.cpu() for kind, tier in case.tiers}
    if "optim" in chosen:
        chosen["fraction"] = case.fraction
    transforms = (
        lambda m: m if case.stage == "plain" else getattr(zf, case.stage)(m, axis()),
        lambda m: zf.offload(m, where=case.where, reshard_after=case.reshard_after, **chosen),
        lambda m: zf.precision(m, **({"compute": torch.float32} | case.dtypes)) if case.dtypes else m,
    )
    for number in case.order:
        model = transforms[number](model)
    try:
        planned = zf.plan(model, OPTIMIZERS[case.optimizer](model.parameters()))
    except zf.TierError as error:  # parameters in a tier, and no tier for the states
        return error.summary
    model = zf.materialize(model, "cpu")
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    if any(slot_of(parameter).kind.must_be_streamed for parameter in model.parameters()):  # type: ignore[union-attr]
        optimizer = zf.streamed(optimizer)
    made = zf.plan(model, optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 12)).float().square().mean().backward()
        optimizer.step()
    return planned, made, zf.held(model, optimizer), zf.plan(model, optimizer)


@examples(dev=25, ci=300, deep=5_000)
@given(case=plans)
def test_what_is_planned_on_meta_is_what_is_held(simulated: Simulated, case: Planned) -> None:
    with tempfile.TemporaryDirectory() as path:
        answers = simulated(2).run(planned_and_made, case, path)
    for answer in answers:
        if isinstance(answer, str):
            assert "no tier" in answer
            continue
        planned, made, held, later = answer
        assert made == planned
        assert held.total == later.held.total + later.padding.total
        assert held.tiers == later.held.tiers == planned.held.tiers
