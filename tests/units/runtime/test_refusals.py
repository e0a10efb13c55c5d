"""What a transformed model refuses: calls at the wrong moment, modules that were edited, optimizers that would step amiss.

Operations on its tensors: `test_refused.py`.
"""

import contextlib
import threading
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

import zero_fn as zf
from tests.support.eviction import evicted
from tests.support.groups import alone
from tests.support.messages import Headed, a_batch, refusals, refused

VERBS = {
    "accumulate": lambda model: zf.accumulate(model).__enter__(),
    "check": lambda model: zf.check(model, torch.optim.SGD(model.parameters(), lr=0.1)),
    "describe": zf.describe,
    "materialize": lambda model: zf.materialize(model, "cpu"),
    "plan": zf.plan,
    "refresh": zf.transforms.refresh,
    "unsharded": lambda model: zf.unsharded(model).__enter__(),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_module_that_no_transform_returned_is_refused(verb):
    with pytest.raises(zf.errors.StateError, match=f"^{verb} was given a module that no transform returned"):
        VERBS[verb](nn.Linear(2, 2))


@pytest.mark.parametrize("block", [zf.accumulate, zf.unsharded])
def test_a_model_in_use_is_not_changed(block):
    with alone() as mesh:
        model = zf.shard_params(Headed(), mesh)
        for change in (
            lambda: zf.shard_grads(model, mesh),
            lambda: zf.unsharded(model.layers[0]).__enter__(),
            lambda: zf.accumulate(model, unshard=True).__enter__(),
            lambda: evicted(model),
        ):
            with block(model), pytest.raises(zf.errors.StateError, match="was called while the module is in use"):
                change()


@pytest.mark.parametrize("write", [torch.jit.trace, torch.export.export])
def test_a_forward_that_gathers_is_not_written_into_a_file(write):
    with alone() as mesh, refused("forward_is_traced"):
        write(zf.shard_params(Headed(), mesh), (a_batch(),))


def test_a_transformed_model_is_called_in_one_thread_at_a_time():
    def call():
        try:
            model(torch.ones(1, 2))
        except zf.errors.StateError as error:
            found.append(error)

    def meanwhile(*_):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    found = []
    with alone() as mesh:
        model = zf.shard_params(nn.Linear(2, 2), mesh)
        handle = model.register_forward_pre_hook(meanwhile)
        model(torch.ones(1, 2))
        handle.remove()
        call()  # one after the other, any thread may call it
    (error,) = found
    with refused("forward_in_two_threads"):
        raise error


def _evict_what_is_unsharded(model):
    with zf.unsharded(model):
        evicted(model)


class Catching(nn.Module):
    """Goes on after an interrupt in its block."""

    def __init__(self):
        super().__init__()
        self.block, self.bias = nn.Linear(2, 2), nn.Parameter(torch.zeros(2))

    def forward(self, x):
        with contextlib.suppress(KeyboardInterrupt):
            self.block(x)
        return self.block(x)


def _go_on_after_an_interrupt(one):
    model = zf.shard_params(Catching(), one, units=nn.Linear)
    with mock.patch.object(model.block, "forward", side_effect=KeyboardInterrupt):
        model(torch.ones(1, 2))


class Doubled(nn.Module):
    def forward(self, weight):
        return weight * 2

    def right_inverse(self, weight):
        return weight / 2


def _parametrize_in_a_forward(model):
    def pre_hook(layer, _):
        parametrize.register_parametrization(layer, "weight", Doubled())

    model.head.register_forward_pre_hook(pre_hook)
    model(a_batch())


def _call_with_a_part_on_meta(two):
    with torch.device("meta"):
        model = zf.shard_params(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3)), two)
    model[1].to_empty(device="cpu")
    model(a_batch())


def _step_a_tie_that_was_cut(one):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    model[1] = zf.shard_params(model[1], one)
    model(a_batch()).sum().backward()
    torch.optim.AdamW(model.parameters()).step()


def _step_by_bitsandbytes(two):
    kind = type("AdamW8bit", (torch.optim.AdamW,), {"__module__": "bitsandbytes.optim.adamw"})
    model = zf.replicate(Headed(), two)
    kind(model.parameters()).step()


def _step_that_would_round():
    model = zf.precision(Headed().bfloat16(), round="stochastic")
    model(a_batch()).float().sum().backward()
    torch.optim.AdamW(model.parameters(), fused=False).step()


def _save_a_partial_value(two, folder):
    model = nn.Linear(4, 4)
    model.bias = nn.Parameter(zf.shard_params(nn.Linear(4, 4), two).weight.detach().sum(0))
    zf.save(folder / "step-1", model)


def _save_a_state_in_parts(two, folder):
    model = zf.shard_params(nn.Linear(4, 4), two)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model.weight] = {"rows": torch.zeros(3)}
    zf.save(folder / "step-1", model, optimizer)


test_refusals = refusals(
    {
        "describe_of_a_plain_module": lambda: zf.describe(Headed()),
        "evicted_inside_unsharded": _evict_what_is_unsharded,
        "forward_goes_on_after_an_interrupt": _go_on_after_an_interrupt,
        "parameter_is_pruned_after_the_transform": lambda model: prune.l1_unstructured(model.head, "weight", 0.5),
        "parametrization_with_an_inverse_in_a_forward": _parametrize_in_a_forward,
        "parameter_was_replaced": lambda model: (
            setattr(model.head, "weight", nn.Parameter(torch.zeros(3, 4))),
            model(a_batch()),
        ),
        "parameter_was_replaced_by_nothing": lambda model: (
            model.head.register_parameter("bias", None),
            zf.transforms.refresh(model),
        ),
        "parameter_is_late": lambda model: (
            setattr(model.layers[0], "adapter", nn.Linear(4, 2)),
            model(a_batch()),
        ),
        "part_of_a_model_that_stays_on_meta": _call_with_a_part_on_meta,
        "step_of_a_tie_that_a_transform_has_cut": _step_a_tie_that_was_cut,
        "step_of_bitsandbytes": _step_by_bitsandbytes,
        "step_that_would_round_by_itself": _step_that_would_round,
        "checkpoint_of_a_partial_value": _save_a_partial_value,
        "checkpoint_of_a_state_in_parts": _save_a_state_in_parts,
    }
)
