"""The bytes of training state that this rank holds, measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from zero_fn.resting import local_of
from zero_fn.runtime.entry import units_of
from zero_fn.runtime.tier_tensor import TierTensor
from zero_fn.streamed import Streamed

__all__ = ["Held", "held"]


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of each state on this rank.

    Attributes:
        parameters: At rest, and gathered where gathered ones are kept.
        gradients: Of `.grad`, and local sums that were not reduced yet.
        optimizer: Of the optimizer's state tensors; step counts are left out. Of a streamed one, the host memory that it
            takes: its buffers, or all states on `cpu`.
    """

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All three."""
        return self.parameters + self.gradients + self.optimizer


def held(module: nn.Module, optimizer: Optimizer | None = None) -> Held:
    """Measures the memory behind parameters, gradients and optimizer states now, each storage once.

    Works on any module, transformed or not; buffers of the module and activations are not counted.

    Args:
        module: The module.
        optimizer: The optimizer over its parameters, if there is one yet.

    Returns:
        Bytes on this rank. Communicates nothing.
    """
    parameters = [local_of(parameter) for parameter in module.parameters()]
    gradients = [local_of(parameter.grad) for parameter in module.parameters() if parameter.grad is not None]
    for unit in units_of(module):
        parameters += unit.buffers()
        gradients += [grad for grad in unit.gradients.local if grad is not None]
    streaming = optimizer.resident_nbytes if isinstance(optimizer, Streamed) else 0
    return Held(_nbytes(parameters), _nbytes(gradients), _nbytes(_states(optimizer)) + streaming)


def _states(optimizer: Optimizer | None) -> Iterator[Tensor]:
    if optimizer is not None:
        for state in optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor) and name != "step":
                    yield local_of(value)


def _nbytes(tensors: Iterable[Tensor]) -> int:
    storages = {}
    for tensor in tensors:
        if isinstance(tensor, TierTensor):
            continue
        storage = tensor.untyped_storage()
        # On meta every storage has address 0 and none has bytes.
        storages[storage._cdata if tensor.is_meta else storage.data_ptr()] = 0 if tensor.is_meta else storage.nbytes()
    return sum(storages.values())
