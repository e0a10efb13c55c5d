"""The four transforms over a mesh axis. Each adds one requirement to those of earlier transforms.

What a rank holds between steps, of Ψ parameters of b bytes over n ranks,
and what it sends in a step:

    verb               parameters   gradients             optimizer states   bytes sent
    replicate          whole        whole                 whole              2 (n - 1)/n Ψ b
    shard_optimizer    whole        1/n, a whole buffer   1/n                2 (n - 1)/n Ψ b
    shard_grads        whole        1/n                   1/n                2 (n - 1)/n Ψ b
    shard_params       1/n          1/n                   1/n                3 (n - 1)/n Ψ b at most

Each implies those above it. An optimizer sees the shards: ceil(rows / n)
rows of a parameter of `rows` rows.

[Note: several axes] A module may be transformed over two data axes of one mesh, in any order: two
axes are two transforms. Each axis shards what was asked of it. Collectives are hierarchical
(`zero_fn.transport.links`): where the inner axis shards parameters, the outer one carries 1/n of
them. A transform over a second axis gathers, unit by unit, what the first has cut in another way
than both together do.

A module that tensor parallelism placed on other axes of the mesh keeps its placements. Its
parameters rest on the mesh of all these axes (`zero_fn.values.grid`), and are DTensors on the model
axes again while a unit runs.
"""

from __future__ import annotations

from typing import Literal, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zero_fn.errors import LayoutError
from zero_fn.transforms.selection import Where, selected
from zero_fn.transforms.substitute import substitute
from zero_fn.values.assignment import Assignment
from zero_fn.values.home import Home, ReshardAfter, Stage
from zero_fn.values.mesh import mesh_axis
from zero_fn.values.units import Units, anchors_of, distinct_parameters

__all__ = ["replicate", "shard_grads", "shard_optimizer", "shard_params"]

M = TypeVar("M", bound=nn.Module)
Buffers = Literal["broadcast", "local"] | None


def replicate(
    module: M,
    mesh: DeviceMesh,
    *,
    units: Units = None,
    where: Where = None,
    buffers: Buffers = None,
    donate: bool = False,
) -> M:
    """Trains replicas of a module over one mesh axis (data parallelism as by DDP, ZeRO stage 0).

    Every rank holds whole parameters, gradients and optimizer states. Parameters and gradients are
    DTensors with placement `Replicate`; gradients are averaged over the axis while backward runs.

    Communicates, in bytes sent per rank and step, for Ψ parameters of b bytes over n ranks:
        all-reduce of gradients    2 (n - 1)/n Ψ b    as a reduce-scatter and an all-gather

    Args, Returns, Raises: those of `shard_params`.
    """
    return _join(module, mesh, "replicate", Home(Stage.NOTHING), units, where, 0, buffers, donate)


def shard_optimizer(
    module: M,
    mesh: DeviceMesh,
    *,
    units: Units = None,
    where: Where = None,
    persist_below: int = 0,
    buffers: Buffers = None,
    donate: bool = False,
) -> M:
    """Shards the optimizer states of a module over one mesh axis (ZeRO stage 1).

    Each parameter shows an optimizer this rank's shard, a DTensor, so the states that any torch
    optimizer makes are shards too. The shard is a view of the whole parameter, which stays in
    memory for compute and is gathered again after a step has changed the shards. The gradient is a
    view of a whole gradient buffer.

    Communicates, in bytes sent per rank and step, for Ψ parameters of b bytes over n ranks:
        reduce-scatter of gradients    (n - 1)/n Ψ b
        all-gather of parameters       (n - 1)/n Ψ b    before the first forward after a step,
                                                        also in evaluation

    Args, Returns, Raises: those of `shard_params`.

    Source:
        ZeRO, Rajbhandari et al. 2020, 5.1 (P_os) and 7.2.1 (volume 2Ψ).
    """
    return _join(
        module,
        mesh,
        "shard_optimizer",
        Home(Stage.OPTIMIZER),
        units,
        where,
        persist_below,
        buffers,
        donate,
    )


def shard_grads(
    module: M,
    mesh: DeviceMesh,
    *,
    units: Units = None,
    where: Where = None,
    persist_below: int = 0,
    buffers: Buffers = None,
    donate: bool = False,
) -> M:
    """Shards gradients and optimizer states of a module over one mesh axis (ZeRO stage 2,
    as FSDP's SHARD_GRAD_OP).

    As `shard_optimizer`, but a whole gradient lives only until backward has left its unit (the
    wrap group of FSDP, usually one transformer block) and the unit was reduced. Whole
    parameters stay in memory.

    Communicates what `shard_optimizer` does.

    Args, Returns, Raises: those of `shard_params`.

    Source:
        ZeRO, Rajbhandari et al. 2020, 5.2 (P_os+g) and 7.2.1 (volume 2Ψ).
    """
    return _join(
        module, mesh, "shard_grads", Home(Stage.GRADS), units, where, persist_below, buffers, donate
    )


def shard_params(
    module: M,
    mesh: DeviceMesh,
    *,
    units: Units = None,
    where: Where = None,
    persist_below: int = 0,
    reshard_after: Literal["forward", "backward"] = "forward",
    buffers: Buffers = None,
    donate: bool = False,
) -> M:
    """Shards the parameters of a module over one mesh axis (ZeRO stage 3, as FSDP's FULL_SHARD).

        model = zf.shard_params(model, mesh["dp"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)  # its states are shards, too

    Between uses each of n ranks keeps 1/n of every parameter, as a DTensor. Parameters are gathered
    in units (the wrap groups of FSDP, usually one transformer block each): a unit is all-gathered
    just before its forward and its backward, and freed after. Gradients and optimizer states are
    sharded, too. Build the optimizer after the last transform.

    Shapes, for a parameter of `rows` rows over `n` ranks, s = ceil(rows / n):
        at rest     "s ..."
        gathered    "n s ... -> (n s) ..."                  then cut at `rows`
        reduced     "src (n s) ... -> n s ...", mean        rank keeps its `s` rows

    Communicates, in bytes sent per rank and step, for Ψ parameters of b bytes over n ranks:
        all-gather        2 (n - 1)/n Ψ b    one for the forward, one for the backward; less the
                                             units that stay gathered from forward to backward (the
                                             last block and the root)
        reduce-scatter    1 (n - 1)/n Ψ b

    Args:
        module: Any module, on any device: each shard goes to the device of the mesh as it is cut,
            and so do buffers. On `meta`, shards are on `meta` too.
        mesh: One named axis, `mesh["dp"]`, along which all ranks hold the same module. For a
            second data axis of the same mesh, transform again. Axes of tensor parallelism
            stay as they are.
        units: What is gathered together: module classes, patterns of module names (`"layers.*"`),
            or `zf.by_size`. None: each of the repeated blocks, each other module of more than 64
            MiB, and the rest.
        where: Which parameters to shard: patterns of parameter names, or a function of name and
            parameter. The others rest as they do in `module`, or replicated. None: all.
        persist_below: Parameters of fewer bytes than this rest replicated, and are never gathered.
        reshard_after: When gathered parameters are freed.
            "backward" is one all-gather less, and more memory.
        buffers: "broadcast": before a forward, all ranks get the buffers of rank 0 if a forward has
            changed any, as in DDP. "local": each rank keeps its own. None: as an earlier transform
            said, or "broadcast".
        donate: Free each whole parameter as soon as its shard is cut; `module` can no longer run.

    Returns:
        A new module with the type, the parameter names and the outputs of `module`. `module` is
        unchanged and still runs (unless donated).

    Raises:
        MeshError: `mesh` is not one axis, or does not go with the axes of earlier transforms.
        PlacementError: A parameter is sharded over `mesh` already, shares memory with another, or
            belongs to a model of which another part was transformed.
        UnitError: `units` matches nothing, or contradicts an earlier transform.
        LayoutError: `where` selects nothing, `buffers` is another word or contradicts an earlier
            transform, or the module cannot be copied.
        DisagreementError: In the first forward: ranks hold different values.
        StateError: `module` is running, or was donated.

    Source:
        ZeRO, Rajbhandari et al. 2020, 5.3 (P_os+g+p) and 7.2.2 (volume 3Ψ).
    """
    home = Home(Stage.PARAMS, reshard_after=ReshardAfter.named(reshard_after))
    return _join(module, mesh, "shard_params", home, units, where, persist_below, buffers, donate)


def _join(
    module: M,
    mesh: DeviceMesh,
    verb: str,
    home: Home,
    units: Units,
    where: Where,
    persist_below: int,
    buffers: Buffers,
    donate: bool,
) -> M:
    if buffers not in (None, "broadcast", "local"):
        raise LayoutError(
            'buffers is neither "broadcast" nor "local".',
            got=repr(buffers),
            fix='buffers="broadcast" (rank 0 sends its own, '
            'as in DDP) or buffers="local" (each rank keeps its own)',
        )
    axis = mesh_axis(mesh, verb=verb)
    named = distinct_parameters(module)
    if persist_below < 0:
        raise LayoutError(
            "persist_below is a number of bytes.", got=persist_below, fix="persist_below=100_000"
        )
    replicated = Home()
    homes = {
        parameter.fqn: replicated
        if parameter.parameter.numel() * parameter.parameter.element_size() < persist_below
        else home
        for parameter in selected(named, where)
    }
    anchors = None if units is None else tuple(anchors_of(module, units))
    request = Assignment(over=((axis, homes),), anchors=anchors, buffers=buffers)
    return substitute(module, request, verb=verb, donate=donate)
