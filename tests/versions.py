"""What torch 2.11 cannot do, with or without this library: tests of it are for those who have a newer one."""

from __future__ import annotations

import pytest
import torch
from torch.torch_version import TorchVersion

__all__ = ["IS_2_11", "not_in_2_11"]

IS_2_11 = TorchVersion(torch.__version__) < "2.12"


def not_in_2_11(why: str) -> pytest.MarkDecorator:
    """Skips a test, or one of its parameters, in torch 2.11."""
    return pytest.mark.skipif(IS_2_11, reason=why)
