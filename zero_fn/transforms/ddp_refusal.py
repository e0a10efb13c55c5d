"""`DistributedDataParallel` around a transformed module: both would reduce its gradients.

Trainers wrap whatever module they are given. DDP asks the module, by an attribute, which parameters
to leave alone; what stands there answers with an error, in place of one from deep inside torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from zero_fn.errors import StateError

__all__ = ["refuse_ddp"]


def refuse_ddp(module: nn.Module) -> None:
    """Lets `DistributedDataParallel(module)` raise a StateError on every rank,
    before it communicates."""
    module.__dict__["_ddp_params_and_buffers_to_ignore"] = _Refusing()


class _Refusing:
    def __iter__(self) -> Iterator[str]:
        raise StateError(
            "A transformed module was wrapped in DistributedDataParallel.",
            why="the transform reduces its gradients, and so would the wrapper",
            fix="train the transformed module itself; trainers that do are ZeroTrainer "
            "(zero_fn.integrations.transformers) and ZeroAccelerator (.accelerate)",
        )
