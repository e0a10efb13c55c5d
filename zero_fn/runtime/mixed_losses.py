"""A loss may hold a penalty on resting parameters: `loss + 0.01 * sum(p.square().sum() for p in model.parameters())`.

What a model gave is a plain tensor and such a penalty a DTensor, so their sum is one. In backward torch then hands the
plain part its gradient as a DTensor too (2.13), and the first operation there with a plain tensor raises. Here backward
begins with a look at the graph: where a plain part begins, a hook gives it the gradient that is this rank's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.distributed.tensor import DTensor

from zero_fn.runtime.dtensor_operations import is_ours

__all__ = ["allow_mixed_losses"]

_OF_DTENSOR = ("RedistributeBackward", "_FromTorchTensorBackward")  # the other functions of users give plain tensors


def allow_mixed_losses() -> None:
    """From now on plain losses may be added to tensors of our meshes. Does nothing the second time."""
    if "backward" not in vars(DTensor):
        DTensor.backward = _backward  # type: ignore[assignment]


def _backward(self: DTensor, *args: Any, **kwargs: Any) -> None:
    parts = _plain_parts(self.grad_fn) if self.grad_fn is not None and is_ours(self) else ()
    handles = [node.register_prehook(_plain) for node in parts]
    try:
        Tensor.backward(self, *args, **kwargs)  # type: ignore[no-untyped-call]
    finally:
        for handle in handles:
            handle.remove()


def _plain(grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads)


def _plain_parts(root: Node) -> Iterator[Node]:
    """Where parts of a graph begin whose tensors are plain, below a node whose tensor is a DTensor.

    An operation gives a DTensor if any of its operands is one, so its nodes are those from which a leaf that is a DTensor
    can be reached, and the root: a penalty on frozen parameters has no leaf. No function in between is entered: it may turn
    one into the other.
    """
    parents: dict[Node, list[Node]] = {root: []}
    reached = [root]  # nodes of DTensors, whose parents are too
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if isinstance(node, BackwardCFunction):
            if node.name() in _OF_DTENSOR:
                reached.append(node)
            continue
        if isinstance(getattr(node, "variable", None), DTensor):
            reached.append(node)
        for child, _ in node.next_functions:
            if child is None:
                continue
            if child not in parents:
                parents[child] = []
                waiting.append(child)
            parents[child].append(node)
    of_dtensors: set[Node] = set()
    while reached:
        node = reached.pop()
        if node not in of_dtensors:
            of_dtensors.add(node)
            reached += parents[node]
    return (
        node for node in parents if node not in of_dtensors and any(parent in of_dtensors for parent in parents[node])
    )
