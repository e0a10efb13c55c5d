"""What versions of torch do in another way, with or without this library, where a test must know."""

from __future__ import annotations

import pytest
import torch
from torch.torch_version import TorchVersion

__all__ = ["IS_2_11", "IS_BEFORE_2_14", "not_in_2_11"]

_version = TorchVersion(torch.__version__)
IS_2_11 = _version < "2.12"
IS_BEFORE_2_14 = _version < "2.14"


def not_in_2_11(why: str) -> pytest.MarkDecorator:
    """Skips a test, or one of its parameters, in torch 2.11."""
    return pytest.mark.skipif(IS_2_11, reason=why)
