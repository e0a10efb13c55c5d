"""How often a step copies what it trains, counted: every operation that writes elements of one large tensor into another.

For a parameter of n pieces on n ranks of one host:

    gather where the parameter rests     1 piece into the arena, for all peers; n - 1 out of theirs
    gather of a shard into a whole       the same, and this rank's piece into the whole
    reduce                               n - 1 pieces into the arena

Pieces of all ranks are added from where they lie, autograd's gradients are read as they come, gathered parameters are used
where they lie, and the optimizer steps in place.
"""

from collections import Counter
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zero_fn as zf
from tests.support.ranks import axis
from zero_fn.kernels import nontemporal

WIDTH, LAYERS = 512, 3
PIECES = {2: WIDTH * WIDTH // 2, 4: WIDTH * WIDTH // 4}
# In _foreach_copy_, _to_copy, split_with_sizes_copy, _chunk_cat, ...
COPYING = ("copy", "cat", "clone", "contiguous", "stack")


class Copies(TorchDispatchMode):
    """Elements written by copies inside the block, of tensors of at least `least` elements, by operation."""

    def __init__(self, least):
        super().__init__()
        self.least = least
        self.numels = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        name = func.__name__.partition(".")[0]
        if any(word in name for word in COPYING):
            written = (args[0] if name.endswith("copy_") else made, (kwargs or {}).get("out"))
            numels = {id(tensor): tensor.numel() for tensor in tree_leaves(written) if isinstance(tensor, Tensor)}
            self.numels[name] += sum(numel for numel in numels.values() if numel >= self.least)
        return made

    def counting_kernels(self):
        """Copies in C are no operations of torch: inside the block they are counted too."""

        def counted(into, source):
            copied(into, source)
            if into.numel() >= self.least:
                self.numels["in C"] += into.numel()

        copied = nontemporal._copy_in_c
        return patch.object(nontemporal, "_copy_in_c", counted)


def _copies(transform, n):
    torch.manual_seed(0)
    model = transform(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))), axis(), units=nn.Linear)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(3):  # the last one follows a recorded schedule and has states
        with Copies(PIECES[n]) as copies, copies.counting_kernels():
            model(torch.ones(2, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return copies.numels


@pytest.mark.parametrize(
    ("transform", "pieces", "n"),
    [
        # ZeRO-3 gathers each layer in forward, and again in backward all but the last.
        *((zf.shard_params, lambda n: (2 * LAYERS - 1) * (n + 1) + LAYERS * (n - 1), n) for n in (2, 4)),
        (zf.shard_grads, lambda n: LAYERS * n + LAYERS * (n - 1), 4),
        (zf.shard_optimizer, lambda n: LAYERS * n + LAYERS * (n - 1), 2),
        (zf.replicate, lambda n: LAYERS * n + LAYERS * (n - 1), 4),  # gradients are gathered in place of parameters
    ],
    ids=["zero3 on 2", "zero3 on 4", "zero2 on 4", "zero1 on 2", "replicate on 4"],
)
def test_a_step_copies_large_tensors_as_often_as_stated(ranks, transform, pieces, n):
    for copied in ranks(n).run(_copies, transform, n):
        assert sum(copied.values()) == pieces(n) * PIECES[n], copied
