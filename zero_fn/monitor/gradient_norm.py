"""The norm of all gradients, in float32 whatever dtype they rest in.

`clip_grad_norm_` of torch computes norms in the dtype of the gradients. In bfloat16 they have three
digits, and sums over ranks are rounded, too: they would depend on how gradients are sharded.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

__all__ = ["clip_grad_norm"]


def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float | None) -> Tensor:
    """The 2-norm of all gradients.

    Clips them to `max_norm`, as `torch.nn.utils.clip_grad_norm_` does; None only measures.

    Communicates, over sharded gradients, one all-reduce of their norms.
    """
    given = [parameter for parameter in parameters if parameter.grad is not None]
    grads = [parameter.grad for parameter in given if parameter.grad is not None]
    narrow = [grad for grad in grads if grad.itemsize < 4]
    if not narrow:
        norm = nn.utils.get_total_norm(grads)
    else:  # not `get_total_norm` of norms: it would reduce each of them
        kinds = (narrow, torch.float32), ([grad for grad in grads if grad.itemsize >= 4], None)
        norms = [
            norm for kind, dtype in kinds if kind for norm in torch._foreach_norm(kind, 2, dtype)
        ]
        norm = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
    if max_norm is not None:
        nn.utils.clip_grads_with_norm_(given, max_norm, norm)
    return norm
