"""Elementwise optimizers step on local tensors, and nothing of it is to be seen. The numbers: promises/test_optimizers.py."""

import copy
import gc
import sys
import weakref
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import zero_fn as zf
from tests.support.groups import pretended

PLAIN = {Tensor, nn.Parameter}


@contextmanager
def seen_by(kind):
    """The types of the parameters that the arithmetic of an optimizer gets in this block."""
    seen = []
    module, name = sys.modules[kind.__module__], kind.__name__.lower()
    arithmetic = getattr(module, name)

    def spy(params, *args, **kwargs):
        seen.extend(map(type, params))
        arithmetic(params, *args, **kwargs)

    with patch.object(module, name, spy):
        yield seen


def ready(mesh):
    """A layer with gradients."""
    model = zf.shard_params(nn.Linear(4, 4), mesh)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return model


def test_the_arithmetic_sees_plain_tensors_unless_a_gradient_is_cut_otherwise():
    """The local tensor of that would be taken for the gradient of the shard."""
    with pretended(2) as mesh, seen_by(torch.optim.Adam) as seen:
        model = ready(mesh)
        torch.optim.AdamW(model.parameters()).step()
        assert seen and set(seen) <= PLAIN
        replicated = zf.replicate(nn.Linear(4, 4), mesh)
        replicated.weight.grad = model.weight.detach()
        seen.clear()
        torch.optim.AdamW(replicated.parameters()).step()
        assert set(seen) == {DTensor}


def test_copies_and_states_of_an_optimizer_know_nothing_of_it():
    with pretended(2) as mesh:
        model = ready(mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.step()
        assert "_init_group" not in copy.deepcopy(optimizer).__dict__
        assert all(isinstance(optimizer.state[p]["exp_avg"], DTensor) for p in model.parameters())
        gone = weakref.ref(optimizer)
        gc.disable()
        try:
            del optimizer
            assert gone() is None
        finally:
            gc.enable()


def test_sgd_keeps_its_momentum_under_the_resting_parameters_for_every_hook():
    """torch writes it under the tensors of the arithmetic, which are local ones."""
    with pretended(2) as mesh, seen_by(torch.optim.SGD) as seen:
        model = ready(mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        keys = []
        optimizer.register_step_post_hook(lambda o, *_: keys.append(set(map(id, o.state))))
        buffers = []
        for _ in range(2):
            optimizer.step()
            buffers.append([optimizer.state[p]["momentum_buffer"] for p in model.parameters()])
        assert keys == [set(map(id, model.parameters()))] * 2
        assert seen and set(seen) <= PLAIN
        assert all(isinstance(buffer, DTensor) for buffer in buffers[0])
        assert all(one is other for one, other in zip(*buffers, strict=True))  # the same objects, updated in place


def test_sgd_steps_again_after_a_step_that_raised():
    with pretended(2) as mesh:
        model = ready(mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with (
            patch.object(sys.modules[torch.optim.SGD.__module__], "sgd", side_effect=RuntimeError("no memory")),
            pytest.raises(RuntimeError, match="no memory"),
        ):
            optimizer.step()
        model.bias.grad = None
        optimizer.step()
        assert set(map(id, optimizer.state)) >= {id(model.weight)}
        assert all(isinstance(key, DTensor) for key in optimizer.state)
