"""What a kernel has written behind the back of torch."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["was_written"]


def was_written(*tensors: Tensor | None) -> None:
    """Tells autograd of the writes, so that it refuses to use values that it saved before. None is passed over."""
    torch.autograd.graph.increment_version([each for each in tensors if each is not None and not each.is_inference()])
