"""What all launchers are compared with."""

from __future__ import annotations

import sys

import pytest

from tests.outside.launchers.runs import Marked, losses, pretrain

STEPS = 400


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of two ranks under torchrun, which nothing disturbs."""
    folder = tmp_path_factory.mktemp("torchrun")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    Marked(folder).finished([*torchrun, *pretrain(folder / "runs", STEPS)])
    return losses(folder / "runs")
