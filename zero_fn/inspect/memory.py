"""The bytes of training state that this rank holds, measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from zero_fn.owners import ByOwner
from zero_fn.runtime.pending_gradient import PendingGradient
from zero_fn.runtime.registry import units_of
from zero_fn.runtime.unit import Unit
from zero_fn.storage.stored_files import StoredFiles
from zero_fn.streamed import Streamed
from zero_fn.tiers.tier_tensor import TierTensor
from zero_fn.values.chained_optimizer import Optimizers, members_of
from zero_fn.values.dtensors import local_of
from zero_fn.values.tiers import is_accelerator, is_away

__all__ = ["MemoryUse", "held", "padding_nbytes"]


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of training state that this rank holds: measured by `held`, predicted by `plan`.

    Attributes:
        parameters: Bytes of parameters between uses, and of gathered copies that are kept.
        gradients: Bytes of `.grad`, and of local sums that are not reduced yet.
        optimizer: Bytes of optimizer states in the memory of the device; step counts are left out.
        buffers: Bytes of staging buffers in host memory, through which offloaded parameters,
            gradients and states pass.
        tiers: Bytes of files and host memory that offloaded parameters,
            gradients and states take, by tier, in whole pages.
    """

    parameters: int
    gradients: int
    optimizer: int
    buffers: int = 0
    tiers: Mapping[str, int] = field(default_factory=dict)

    @property
    def on_device(self) -> int:
        """Bytes in the memory of the device, without `buffers`, which are in host memory."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def on_host(self) -> int:
        """Bytes of host memory in use beside an accelerator: `buffers`,
        and what was offloaded to `zf.cpu()`."""
        return self.buffers + sum(
            nbytes for tier, nbytes in self.tiers.items() if tier.startswith("cpu(")
        )

    @property
    def total(self) -> int:
        """Bytes in the memory of the device and in `buffers`.

        What was offloaded to host memory or disks is not counted.
        """
        return self.on_device + self.buffers

    def by_memory(self, device_type: str) -> tuple[int, int]:
        """Bytes in the memory of a device of this type, and in host memory beside it.

        For the CPU all is in the first.
        """
        return (self.on_device, self.on_host) if is_accelerator(device_type) else (self.total, 0)


def held(module: nn.Module, optimizer: Optimizers | None = None) -> MemoryUse:
    """Counts the bytes that parameters, gradients and optimizer states take on this rank now,
    each storage once.

    Buffers of the module and activations are not counted. Communicates nothing.

    Args:
        module: Any module, transformed or not.
        optimizer: The optimizer over its parameters, if there is one yet, or a sequence of them.

    Returns:
        A `MemoryUse`: bytes by kind, and by tier for what was offloaded.
    """
    parameters = [local_of(parameter) for parameter in module.parameters()]
    grads = [parameter.grad for parameter in module.parameters()]
    # Gradients inside `accumulate` are those from before it.
    grads = [grad.earlier if isinstance(grad, PendingGradient) else grad for grad in grads]
    gradients = [local_of(grad) for grad in grads if grad is not None]
    buffers: list[torch.UntypedStorage] = []
    for unit in units_of(module):
        memory = unit.gather.whole
        parameters += [
            buffer for group in unit.memory.groups for buffer in group.kept()
        ]  # with the padding between them
        parameters += [slot.flat for slot in unit.slots]
        parameters += memory.buffers if memory is not None else ()
        gradients += [grad for grad in unit.gradients.local if grad is not None]
        buffers += unit.gradients.memory().held()
    shelves = [
        shelf
        for run in {unit.run for unit in units_of(module)}
        for _, shelf in run.offloaded.shelves()
    ]
    tiers = Counter[str]()
    for shelf in shelves:
        tiers[str(shelf if isinstance(shelf, StoredFiles) else shelf.tier)] += shelf.nbytes
    here = passing = 0
    optimizers = members_of(optimizer)
    device_type = parameters[0].device.type if parameters else "cpu"
    for each in optimizers:
        if not isinstance(each, Streamed | ByOwner):
            continue
        passing += each.buffers_nbytes
        for tier, nbytes in each.tier_nbytes().items():
            if is_away(tier, device_type):
                tiers[str(tier)] += nbytes
            else:
                here += nbytes
    return MemoryUse(
        _nbytes(parameters),
        _nbytes(gradients, buffers),
        _nbytes(_states(optimizers)) + here,
        sum(shelf.buffers_nbytes for shelf in shelves) + passing,
        dict(+tiers),
    )


def _states(optimizers: Sequence[Optimizer]) -> Iterator[Tensor]:
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for name in state:
                value = state.get(name)  # None if a streamed optimizer has it in a tier
                if name != "step":
                    yield from (
                        local_of(leaf) for leaf in tree_leaves(value) if isinstance(leaf, Tensor)
                    )


def _nbytes(tensors: Iterable[Tensor], buffers: Iterable[torch.UntypedStorage] = ()) -> int:
    """Bytes of the memory behind tensors, and of buffers.

    Storages may overlap: one may be a range of another.
    """
    storages = [
        *buffers,
        *(t.untyped_storage() for t in tensors if not (t.is_meta or isinstance(t, TierTensor))),
    ]
    ranges = sorted(
        (storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages
    )
    total = reached = 0
    for start, end in ranges:
        total += max(end - max(start, reached), 0)
        reached = max(reached, end)
    return total


def padding_nbytes(unit: Unit) -> tuple[int, int]:
    """Bytes of padding in the memory at rest of a unit, and in that of its gradients."""
    is_away = any(group.kind.is_gradient_away for group in unit.memory.groups)
    parameters = sum(group.padding_nbytes for group in unit.memory.groups)
    return parameters, 0 if is_away else unit.gradients.memory().padding_nbytes
