"""Tiers change no bit: whatever is offloaded, at any stage, in any order of transforms, training gives the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.optim import Optimizer

import zero_fn as zf
from property_tests.streamed_programs import own
from tests.simulation import Simulated
from tests.simulation.simulated import axis
from tests.support.models import Language
from tests.support.profiles import examples
from tests.support.seeds import seed_generator

STAGES = ("plain", "replicate", "zero1", "zero2", "zero3")
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01, amsgrad=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.05),
}


@dataclass(frozen=True)
class Run:
    """What is trained, and what of it is offloaded."""

    stage: str
    optimizer: str
    max_norm: float | None
    backwards: int
    accumulates: bool
    compute: torch.dtype | None
    states: frozenset[str]
    fraction: float
    where: str | None
    order: tuple[int, ...]
    checkpoints: bool
    without: tuple[str | None, ...]  # in each step, what has no gradient


runs = st.builds(
    Run,
    stage=st.sampled_from(STAGES),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    max_norm=st.sampled_from([None, 0.05, 1e9]),
    backwards=st.integers(1, 2),
    accumulates=st.booleans(),
    compute=st.sampled_from([None, torch.bfloat16]),
    states=st.frozensets(st.sampled_from(["params", "grads", "optim"]), min_size=1),
    fraction=st.sampled_from([1.0, 0.5]),
    where=st.sampled_from([None, "blocks.*", "*weight", "blocks.1.*"]),
    order=st.permutations(range(3)).map(tuple),
    checkpoints=st.booleans(),
    without=st.tuples(*[st.sampled_from([None, None, "embedding", "blocks.0", "blocks.1", "blocks.3", "norm"])] * 3),
)


def trained(run: Run, path: str | None) -> list[Tensor]:
    """Losses and parameters of three steps; offloaded if `path` is given."""
    seed_generator(0)
    model: Any = Language(blocks=4)
    tiers: dict[str, Any] = {name: zf.nvme(path) for name in run.states} if path is not None else {}
    if "optim" in tiers:
        tiers["fraction"] = run.fraction
    transforms = (
        lambda m: m if run.stage == "plain" else getattr(zf, run.stage)(m, axis()),
        lambda m: zf.offload(m, where=run.where, **tiers) if tiers else m,
        lambda m: zf.precision(m, compute=run.compute) if run.compute is not None else m,
    )
    for number in run.order:
        model = transforms[number](model)
    if run.checkpoints:
        model = zf.checkpoint_activations(model, units="blocks.*")
    optimizer = OPTIMIZERS[run.optimizer](model.parameters())
    if path is not None:
        optimizer = zf.streamed(optimizer, None if "optim" in tiers else zf.nvme(path), buffer="64KiB")
    losses = []
    for step, without in enumerate(run.without):
        optimizer.zero_grad()
        if run.accumulates and run.stage != "plain":
            with zf.accumulate(model):
                losses += [backward(model, step, micro) for micro in range(run.backwards)]
        else:
            losses += [backward(model, step, micro) for micro in range(run.backwards)]
        for name, parameter in model.named_parameters():
            if without is not None and name.startswith(without):
                parameter.grad = None
        if run.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), run.max_norm)
        optimizer.step()
    return [*losses, *(own(p) for p in model.parameters())]


def backward(model: Any, step: int, micro: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * axis().get_local_rank() + micro)
    loss: Tensor = model(torch.randint(37, (2, 5), generator=generator)).float().logsumexp(-1).mean()
    loss.backward()
    return loss.detach()


# A chunk that was stepped in one buffer was taken from another one, with its states of before, after a step without some.
@example(
    Run(
        stage="plain",
        optimizer="sgd",
        max_norm=None,
        backwards=1,
        accumulates=False,
        compute=None,
        states=frozenset(["params"]),
        fraction=1.0,
        where=None,
        order=(0, 1, 2),
        checkpoints=False,
        without=(None, "blocks.0", None),
    ),
    1,
)
@examples(dev=10, ci=500, deep=20_000)
@given(runs, st.integers(1, 2))
def test_offload_changes_no_bit(simulated: Simulated, tmp_path_factory: Any, run: Run, n: int) -> None:
    path = str(tmp_path_factory.getbasetemp())
    expected, found = simulated(n).run(trained, run, None), simulated(n).run(trained, run, path)
    assert all(map(torch.equal, chain(*found), chain(*expected)))
