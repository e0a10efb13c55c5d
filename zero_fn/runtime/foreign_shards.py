"""Shards of another rank: what `torch.load` gives to all ranks if one of them called `torch.save` on a sharded state_dict.

Such a file holds the shards of the rank that wrote it. A DTensor read from it lies on an equal mesh, but its mesh still
stands where it was written, which tells it apart. Training would go on with the first rows in place of the others.
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from zero_fn.errors import CheckpointError
from zero_fn.runtime.registry import slot_of
from zero_fn.runtime.uncompiled import uncompiled

__all__ = ["require_own_shard", "require_own_states"]


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
        "optimizer, options=StateDictOptions(full_state_dict=True)) on every rank, torch.save(sd) on one",
    )


@uncompiled
def require_own_states(optimizer: Optimizer) -> None:
    """The same of all states of an optimizer."""
    for parameter, states in optimizer.state.items():
        if isinstance(parameter, DTensor):
            for name, value in states.items() if isinstance(states, dict) else ():
                if isinstance(value, DTensor):
                    slot = slot_of(parameter)
                    of = f" of {slot.fqn!r}" if slot is not None else ""
                    require_own_shard(f"The optimizer's {name}{of}", value, parameter.device_mesh)
