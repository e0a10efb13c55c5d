"""`torch.compile(model, fullgraph=True)`: one graph with the collectives in it gives what eager replicas give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.utils

from tests.acceptance.worlds import ALL, WIDTH, Tower, World, differences, noise
from tests.ranks import Ranks


def _train(build: Any, world: World, backend: Any = "aot_eager", steps: int = 3) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = world.place(build())
    run = model if world.is_replica else torch.compile(model, backend=backend, fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        run(noise(4, WIDTH, seed=step)).square().mean().backward()
        world.reduce(model)
        world.note_model(model)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        world.note("output", run(noise(4, WIDTH, seed=step)))


@pytest.mark.parametrize("stage", ALL)
def test_one_graph_trains_as_replicas(ranks: Ranks, stage: str) -> None:
    def trial(world: World) -> None:
        _train(Tower, world)

    for found in ranks(2, deadline_s=120).run(differences, trial, stages=[stage]):
        assert found == []
