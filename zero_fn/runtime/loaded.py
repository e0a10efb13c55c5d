"""States of optimizers that were loaded: whole ones are sharded as their parameters are, shards of another rank are refused.

`torch.load` gives such shards to all ranks if one of them called `torch.save` on a sharded state_dict: the file holds those
of the rank that wrote it. A DTensor read from it lies on an equal mesh, but its mesh still stands where it was written,
which tells it apart. Training would go on with the first rows in place of the others.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.optim import Optimizer

from zero_fn.errors import CheckpointError
from zero_fn.resting import alone, on_spec
from zero_fn.runtime.registry import slot_of
from zero_fn.runtime.slot import Slot
from zero_fn.runtime.uncompiled import uncompiled

__all__ = ["require_own_shard", "settle_states", "sharded"]


def require_own_shard(what: str, entry: DTensor, mesh: DeviceMesh) -> None:
    """For a loaded tensor that is to take the place of one on `mesh`.

    Raises:
        CheckpointError: It holds the shard of another rank. Raised on the ranks that did not write the file.
    """
    if entry.device_mesh is mesh or entry.device_mesh != mesh:
        return
    theirs, ours = entry.device_mesh.get_coordinate(), mesh.get_coordinate()
    assert theirs is not None and ours is not None, "a mesh without this rank"
    if all(placement.is_replicate() or theirs[i] == ours[i] for i, placement in enumerate(entry.placements)):
        return
    raise CheckpointError(
        f"{what} holds the shard of another rank.",
        written_by=f"the rank at {list(theirs)} of the mesh",
        read_by=f"the rank at {list(ours)}",
        why="one rank called torch.save on a sharded state_dict, so the file has the shards of that rank only",
        fix="save with torch.distributed.checkpoint, every rank its part; or whole tensors: sd = get_state_dict(model, "
        "optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True)) on every rank, torch.save(sd) on "
        "rank 0",
    )


def sharded(whole: Tensor, slot: Slot, spec: DTensorSpec) -> DTensor:
    """This rank's part of a whole tensor, at rest as the parameter of a slot is, in memory of its own."""
    return on_spec(alone(slot.owned_of_full(whole)), spec)


@uncompiled
def settle_states(optimizer: Optimizer) -> None:
    """Takes over what was loaded into an optimizer.

    Raises:
        CheckpointError: A state is the shard of another rank.
    """
    for parameter, states in optimizer.state.items():
        slot = slot_of(parameter)
        if slot is None or slot.spec is None or not isinstance(states, dict):
            continue
        for name, value in states.items():
            if isinstance(value, DTensor):
                require_own_shard(f"The optimizer's {name} of {slot.fqn!r}", value, slot.spec.mesh)
            elif isinstance(value, Tensor) and name != "step" and tuple(value.shape) == slot.full_shape:
                states[name] = sharded(value, slot, slot.spec)
