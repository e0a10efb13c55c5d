"""What is said once: a UserWarning with what to write instead, at the line of the user."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW

import zero_fn as zf
from tests.support.groups import alone
from tests.support.messages import refused
from tests.support.ranks import axis
from zero_fn import errors

SLOW = "is stepped on the host without fused=True"
ROUNDED = "without float32 masters"


@pytest.fixture(autouse=True)
def _nothing_was_said(monkeypatch):
    monkeypatch.setattr("zero_fn.errors._said", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.fixture
def mesh():
    with alone() as axis:
        yield axis


def trained(model, optimizer):
    for _ in range(2):
        model(torch.ones(2, 4, dtype=next(model.parameters()).dtype)).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_a_streamed_adam_that_is_not_fused_says_so_once(mesh, kind):
    model = zf.shard_params(nn.Linear(4, 4), mesh)
    with pytest.warns(UserWarning, match=f"{kind.__name__} {SLOW}") as said:
        optimizer = zf.streamed(kind(model.parameters()), zf.cpu())
    assert len(said) == 1
    assert said[0].filename == __file__
    assert "..., fused=True)" in str(said[0].message)
    trained(model, optimizer)
    zf.streamed(kind(model.parameters()), zf.cpu())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_adam_over_parameters_that_rest_in_few_bits_says_so(mesh, dtype):
    """At its first step, and where it is streamed."""
    model = zf.shard_params(nn.Linear(4, 4).to(dtype), mesh)
    with pytest.warns(UserWarning, match=f"AdamW trains parameters that rest in .*{ROUNDED}") as said:
        trained(model, AdamW(model.parameters()))
    assert len(said) == 1
    assert "weight" in str(said[0].message)
    assert "zf.precision" in str(said[0].message)
    errors._said.clear()
    with pytest.warns(UserWarning, match=ROUNDED):
        zf.streamed(AdamW(model.parameters(), fused=True), zf.cpu())
    errors._said.clear()
    warnings.filterwarnings("ignore", ".*without float32 masters")  # as it says
    trained(model, AdamW(model.parameters()))


def test_nothing_is_said_of_what_is_right(mesh):
    """An optimizer that says whether it is fused, or is not Adam; masters in float32; what is frozen."""
    model = zf.precision(zf.shard_params(nn.Linear(4, 4), mesh))
    trained(model, AdamW(model.parameters()))
    for optimizer in (*(AdamW(model.parameters(), fused=fused) for fused in (True, False)), SGD(model.parameters())):
        trained(model, zf.streamed(optimizer, zf.cpu()))
    frozen = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    frozen[0].bfloat16().requires_grad_(False)
    AdamW(zf.shard_params(frozen, mesh).parameters()).step()
    rounded = zf.shard_params(nn.Linear(4, 4).bfloat16(), mesh)
    trained(rounded, SGD(rounded.parameters(), lr=0.1))


LOSSES = {
    "replicated": lambda loss: zf.replicate(loss, axis()),
    "ddp": DistributedDataParallel,
    "frozen": lambda loss: loss.requires_grad_(False),
}


def _beside(how):
    """What is said of a loss with a parameter that is in the optimizer beside the model."""
    torch.manual_seed(0)
    model = zf.shard_params(nn.Linear(4, 4), axis())
    loss = LOSSES.get(how, lambda loss: loss)(nn.Linear(4, 1))
    optimizer = SGD([*model.parameters(), *loss.parameters()], lr=0.1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if how == "streamed":
            zf.streamed(optimizer, zf.cpu())
        elif how == "checked":
            zf.check(model, optimizer)
        else:
            y = model(torch.ones(2, 4))
            (y if how == "not trained" else loss(y)).sum().backward()
            optimizer.step()
            optimizer.step()
    errors._said.clear()
    if how != "plain":  # and an error of `check` would be raised
        zf.check(model, optimizer)
    errors._said.clear()
    return [str(one.message) for one in said if "trains plain parameters beside" in str(one.message)]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("how", ["plain", "checked", "streamed", "replicated", "ddp", "frozen", "not trained"])
def test_plain_parameters_beside_a_transformed_model_are_told_where_ranks_would_drift(ranks, how, n):
    for said in ranks(n).run(_beside, how):
        assert len(said) == (how in ("plain", "checked", "streamed") and n > 1)
        assert all("loss = zf.replicate(loss, mesh['dp'])" in one and "of 2" in one for one in said)


def test_an_optimizer_over_two_transformed_modules_is_right(mesh):
    """`check` knew one module only, and said that the other was stale."""
    first, second = zf.shard_params(nn.Linear(4, 4), mesh), zf.replicate(nn.Linear(4, 4), mesh)
    optimizer = SGD([*first.parameters(), *second.parameters()], lr=0.1)
    zf.check(first, optimizer)
    zf.check(second, optimizer)
    with refused("check_optimizer_that_lacks_parameters"):
        zf.check(first, SGD(second.parameters(), lr=0.1))
    later = zf.replicate(second, mesh)
    with pytest.raises(zf.errors.StaleError, match="holds 2 parameters that the model does not have"):
        zf.check(first, optimizer)
    zf.check(later, SGD([*first.parameters(), *later.parameters()], lr=0.1))
