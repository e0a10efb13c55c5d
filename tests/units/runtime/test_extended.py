"""Trained weights of tensor subclasses that say how they are gathered: `fsdp_pre_all_gather`, `fsdp_post_all_gather`."""

import copy
import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import zero_fn as zf
from tests.support.messages import refused
from tests.support.on_ranks import on_ranks
from tests.support.programs import STAGES
from tests.support.ranks import axis
from tests.support.subclasses import WIDTH, Opened, Rounded, Short, products_alive
from tests.support.wholes import held, wholes


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.first.weight = nn.Parameter(kind(self.first.weight.detach()))

    def forward(self, x):
        y = x + self.second(self.first(x).tanh())
        return y


def _model(kind):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(kind) for _ in range(3)))


def _trained(model, microbatches=1):
    """Whole parameters, by name."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        optimizer.zero_grad()
        if microbatches == 1:
            model(x).float().square().mean().backward()
        else:
            with zf.accumulate(model, unshard=True):
                for part in x.chunk(microbatches):
                    (model(part).float().square().mean() / microbatches).backward()
        optimizer.step()
    named = {name.replace("parametrizations.weight.original0", "weight"): p for name, p in model.named_parameters()}
    names = sorted(named)
    for p in named.values():  # of FSDP2
        local = p.to_local() if isinstance(p, DTensor) else p
        if isinstance(local, Rounded):
            p._local_tensor = local.values
    return [value for value in wholes([held(named[name]) for name in names]) if value is not None]


def _equal(found, expected):
    assert len(found) == 9
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def _flat(kind):
    return zf.transforms.flatten_subclasses(_model(kind))


@pytest.mark.parametrize("kind", [Rounded, Opened])
@on_ranks(2)
def test_they_train_alike_at_every_stage(kind):
    def checkpointed(model):
        return zf.checkpoint_activations(zf.shard_params(model, axis()), where="*")

    expected = _trained(zf.shard_optimizer(_flat(kind), axis()))
    worlds = {
        **{stage: lambda model, make=make: make(model, axis()) for stage, make in STAGES.items()},
        "twice": lambda model: copy.deepcopy(zf.shard_grads(zf.shard_params(model, axis()), axis())),
        "longer": lambda model: zf.shard_params(model, axis(), reshard_after="backward"),
        "states on the host": lambda model: zf.offload(zf.shard_params(model, axis()), grads=zf.cpu()),
        "on the host": lambda model: zf.offload(zf.shard_params(model, axis()), params=zf.cpu()),
    }
    for name, make in worlds.items():
        assert _equal(_trained(make(_flat(kind))), expected), name
    uneven = nn.Linear(WIDTH, 7)
    uneven.weight = nn.Parameter(Rounded(uneven.weight.detach()))  # it would say that its size is another
    x = torch.ones(2, WIDTH)
    assert torch.equal(zf.shard_params(zf.transforms.flatten_subclasses(uneven), axis())(x), uneven(x))
    several = [_trained(make(_flat(kind), axis()), 2) for make in (zf.shard_optimizer, zf.shard_params)]
    assert _equal(*several)
    model = zf.shard_params(_flat(kind), axis())
    with torch.no_grad():
        expected_y = model(x)
        with zf.unsharded(model):
            assert torch.equal(model(x), expected_y)
    assert torch.equal(torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False), expected_y)


@on_ranks(2)
def test_they_travel_in_their_own_bytes_as_planned():
    model = zf.shard_params(_flat(Rounded), axis())
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        optimizer.zero_grad()
        with zf.traffic() as sent:
            model(torch.ones(2, WIDTH)).sum().backward()
            optimizer.step()
        return sent.nbytes

    before = zf.plan(model, optimizer).sent_nbytes
    step()
    after = zf.plan(model, optimizer).sent_nbytes
    assert step() == after
    gathers = 5 * WIDTH * WIDTH // 2  # of 3 units, the last of which stays; elements that this rank sends
    assert before - after == gathers * (4 - 2)
    for kind in (Rounded, Opened):
        model = zf.shard_params(_flat(kind), axis())
        products_alive()
        loss = model(torch.ones(2, WIDTH, requires_grad=True)).sum()
        gc.collect()
        assert products_alive() == 0, "autograd keeps what was gathered"
        loss.backward()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@on_ranks(2)
def test_they_train_as_under_fsdp2(dtype):
    theirs, ours = _model(Rounded), zf.shard_params(_flat(Rounded), axis())
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in (*theirs, theirs):
        fully_shard(module, mesh=axis(), mp_policy=policy)
    if dtype is not None:
        ours = zf.precision(ours, compute=dtype)
    assert _equal(_trained(ours), _trained(theirs))


def _float8():
    float8 = pytest.importorskip("torchao.float8")

    def build():
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
        config = float8.Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=True)
        converted = float8.convert_to_float8_training(model, config=config)
        return converted

    def losses(model):
        optimizer, found = torch.optim.AdamW(model.parameters(), lr=0.01), []
        for step in range(3):
            x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    theirs = build()
    for module in (*theirs.children(), theirs):
        fully_shard(module, mesh=axis())
    model = zf.shard_params(zf.transforms.flatten_subclasses(build()), axis())
    with zf.traffic() as sent:
        found = losses(model)
    assert found == losses(theirs)
    biases, reduced = 4 * 3 * WIDTH, 4 * 3 * (WIDTH * WIDTH + WIDTH)
    assert sent.nbytes < 3 * (6 * (WIDTH * WIDTH + biases) + reduced)  # a byte an element, twice a step


def test_float8_training_of_torchao_is_that_under_fsdp2(ranks):
    pytest.importorskip("torchao")
    ranks(2).run(_float8)


@on_ranks(2)
def test_a_product_of_another_shape_is_refused():
    model = zf.shard_params(_flat(Short), axis())
    for _ in range(2):
        with refused("product_of_another_shape"):
            model(torch.ones(2, WIDTH))
