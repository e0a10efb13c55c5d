"""What all launchers are compared with."""

import pytest

from tests.outside.launchers.runs import TORCHRUN, Marked, losses, pretrain

STEPS = 400


@pytest.fixture(scope="session")
def expected(tmp_path_factory):
    """The losses of two ranks under torchrun, which nothing disturbs."""
    folder = tmp_path_factory.mktemp("torchrun")
    Marked(folder).finished([*TORCHRUN, "2", *pretrain(folder / "runs", STEPS)])
    return losses(folder / "runs")
