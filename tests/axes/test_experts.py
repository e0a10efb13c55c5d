"""Experts on an axis along which the batch differs too: dense parameters over dp and ep, experts over dp, as one process."""

import importlib
import math
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import zero_fn as zf
from tests.axes.grids import differing, grid, snapshot
from tests.support.on_ranks import on_ranks
from tests.support.programs import STAGES
from tests.support.wholes import full

EXAMPLES = str(Path(__file__).parents[2] / "examples")


def _example(name="moe"):
    if EXAMPLES not in sys.path:
        sys.path.append(EXAMPLES)
    return importlib.import_module(name)


def _tokens(step, rank, shape=(24,)):
    return torch.randint(32, shape, generator=torch.Generator().manual_seed(1000 * step + rank))


def _loss(model, step, rank):
    """Each token is to be followed by another."""
    tokens = _tokens(step, rank)
    return F.cross_entropy(model(tokens), (7 * tokens + 3) % 32)


def _trained(model, ranks, loss_of=_loss):
    """Losses and norms of four clipped steps on the batches of these ranks."""
    optimizer, seen = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for step in range(4):
        loss = torch.stack([loss_of(model, step, rank) for rank in ranks]).mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        seen.append((mean.item(), full(norm).item()))
    return seen


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(4)
def test_experts_train_as_in_one_process(stage):
    """Losses and norms over all parameters, clipped; in float64, where orders of summation differ far below the bound."""
    example = _example()
    options = example.Options(stage=stage)
    seen = _trained(example.build(options, grid("dp", "ep")).double(), [dist.get_rank()])
    expected = _trained(example.build(options).double(), range(4))
    assert torch.tensor(seen, dtype=torch.float64).sub(torch.tensor(expected, dtype=torch.float64)).abs().max() < 1e-12


@pytest.mark.parametrize(("top", "residual"), [(1, 1), (2, 0)])
@on_ranks(4)
def test_experts_with_a_capacity_train_as_in_one_process(top, residual):
    """Each rank has a capacity for itself; all have tokens beyond it."""
    example = _example("moe_capacity")
    options = example.Options(top=top, residual=residual, capacity_factor=0.75, min_capacity=1)

    def loss_of(model, step, rank):
        loss = example.loss_of(model, _tokens(step, rank))
        return loss

    seen = _trained(example.build(options, grid("dp", "ep")).double(), [dist.get_rank()], loss_of)
    expected = _trained(example.build(options).double(), range(4), loss_of)
    assert torch.tensor(seen, dtype=torch.float64).sub(torch.tensor(expected, dtype=torch.float64)).abs().max() < 1e-12


@pytest.mark.parametrize("top", [1, 2])
@pytest.mark.parametrize(("factors", "least", "rooms"), [((0.5, 0.75), 1, (3, 4.5)), ((0.25, 0.5), 4, (2, 3))])
def test_a_capacity_is_for_first_choices_then_for_second_ones(top, factors, least, rooms):
    """As a loop over tokens in their order deals them out, in training and in evaluation; `rooms` for each of `top`. Where
    top is 2, a dense MLP is beside the experts."""
    options = {"capacity_factor": factors[0], "eval_capacity_factor": factors[1], "min_capacity": least}
    example = _example("moe_capacity")
    layer = example.build(example.Options(top=top, residual=top - 1, **options)).double()[1]
    x = torch.randn(24, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weights, chosen = layer.router(x).softmax(-1).topk(top)
    for is_training, room in zip((True, False), rooms, strict=True):
        left, kept = [max(least, math.ceil(room * top))] * 4, torch.zeros_like(weights)
        for choice in range(top):
            for token, expert in enumerate(chosen[:, choice].tolist()):
                kept[token, choice] = weights[token, choice] if left[expert] > 0 else 0.0
                left[expert] -= 1
        assert (kept == 0).any()
        total = kept.sum(1, keepdim=True).clamp_min(1e-12) if top > 1 else 1.0
        answers = F.gelu(x[:, None, None] @ layer.up[chosen]) @ layer.down[chosen]  # "token top 1 dim"
        y = ((kept / total)[..., None] * answers[:, :, 0]).sum(1)
        if top == 2:
            share = layer.coefficient(x).softmax(-1)
            y = share[:, :1] * y + share[:, 1:] * layer.mlp(x)
        assert (layer.train(is_training)(x) - x - y).abs().max() < 1e-12


def _mixtral(folder):
    example = _example("mixtral_experts")
    plain, mesh = example.build(example.Options()), grid("dp", "ep")
    if dist.get_rank() == 0:
        plain.save_pretrained(folder)
    dist.barrier()

    def loss_of(model, step, rank):
        tokens = _tokens(step, rank, (2, 16))
        loss = model(tokens, labels=tokens, output_router_logits=True).loss
        return loss

    expected = torch.tensor(_trained(plain, range(4), loss_of))
    for weights in ("", folder):
        model = example.build(example.Options(weights=weights), mesh)
        assert all(p.device_mesh.ndim == 2 for p in model.parameters())
        seen = torch.tensor(_trained(model.train(), [dist.get_rank()], loss_of))
        assert (seen - expected).abs().max() < 1e-5


@pytest.mark.nightly
def test_mixtral_of_transformers_trains_with_experts_on_an_axis(ranks, tmp_path):
    """As the plain model in one process does; also where each rank reads its shards from files. In float32, as norms and
    the router of Mixtral compute in it whatever the model does."""
    from tests.outside.integrations.worlds import import_all  # skips without the extra

    case = ranks(4, deadline_s=240)
    case.run(import_all)
    case.run(_mixtral, str(tmp_path))


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(4)
def test_experts_send_nothing_along_their_axis(stage):
    model = _example().build(_example().Options(stage=stage), grid("dp", "ep"))
    _loss(model, 0, dist.get_rank()).backward()
    with zf.traffic() as sent:
        _loss(model, 0, dist.get_rank()).backward()
    assert dict(sent.by_axis) == dict(zf.plan(model).sent_by_axis)


@on_ranks(4)
def test_experts_that_travel_in_formats_are_summed_and_divided_as_others_are():
    """Their gradients hold the sum along their own axis already. Codes of eight bits are off by less than a hundredth."""
    example, found = _example(), []
    for stage, formats in (
        (1, {}),
        (1, {"reduce": zf.wire.int8()}),
        (3, {"reduce": zf.wire.int8(), "gather": zf.wire.int8()}),
    ):
        model = example.build(example.Options(stage=stage, dim=64), grid("dp", "ep"))
        model = zf.precision(model, compute=torch.float32, **formats)
        for _ in range(2):
            model.zero_grad()
            with zf.traffic() as sent:
                _loss(model, 0, dist.get_rank()).backward()
        assert dict(sent.by_axis) == dict(zf.plan(model).sent_by_axis)
        found.append({name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None})
    exact, coded, gathered = found
    for name, grad in exact.items():
        for other in (coded[name], gathered[name]):
            assert grad is not None and other is not None
            assert (other - grad).norm() <= 0.03 * grad.norm(), name
    assert any(not torch.equal(grad, coded[name]) for name, grad in exact.items() if "up" in name)


class Router(nn.Module):
    """Only the rank that is chosen has work for its expert."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(4, 4)
        self.expert = nn.Parameter(torch.ones(2, 4))

    def forward(self, x, *, is_chosen):
        y = self.dense(x)
        return y * self.expert.to_local() if is_chosen else y


def _router(axis):
    model = Router()
    model.expert = nn.Parameter(distribute_tensor(model.expert.detach(), axis, [Shard(0)]))
    return model


@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
@on_ranks(4)
def test_experts_without_tokens_wait_for_nobody(stage):
    """An expert without a token has a gradient of zeros, or none."""
    mesh, shard = grid("dp", "ep"), STAGES[stage]
    model = shard(shard(_router(mesh["ep"]), mesh["dp"]), mesh["ep"], where="dense.*")
    chosen = dist.get_rank() == 1
    for _ in range(2):
        model(torch.ones(3, 4), is_chosen=chosen).sum().backward()
    whole = full(model.get_parameter("expert").grad)
    assert whole is not None
    assert (whole[0] == 0).all()
    assert (whole[1] != 0).all()


@on_ranks(4)
def test_experts_on_no_data_axis_are_refused():
    mesh = grid("dp", "ep")
    for model in (_router(mesh["ep"]), zf.shard_params(_router(mesh["ep"]), mesh["dp"])):  # alone; not left out
        with pytest.raises(zf.errors.PlacementError, match="'expert' is sharded over the axis already"):
            zf.shard_params(model, mesh["ep"])


@on_ranks(4)
def test_experts_saved_on_one_mesh_go_on_on_another(folder):
    """Of 2 x 2 ranks in stage 3, on 4 x 1 in stage 1; in float64, where orders of sums differ far below the bound."""
    example, losses, models = _example(), [], []
    for shape, stage in (((2, 2), 3), ((4, 1), 1)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ep"))
        model = example.build(example.Options(stage=stage), mesh).double()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        for number in range(1 if models else 0, 2):
            if number:
                state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
                if models:
                    dcp.load(state, checkpoint_id=folder)
                    states = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
                    set_state_dict(model, optimizer, **states)
                else:
                    dcp.save(state, checkpoint_id=folder)
            loss = _loss(model, number, dist.get_rank())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        models.append([full(parameter) for parameter in model.parameters()])
    assert abs(losses[0] - losses[1]) < 1e-12
    assert all((one - other).abs().max() < 1e-12 for one, other in zip(*models, strict=True))


@on_ranks(4)
def test_stages_agree_to_the_bit_in_bfloat16_with_accumulation():
    """A model that computes in bfloat16 below float32 at rest."""
    example, mesh = _example(), grid("dp", "ep")
    given = []
    for stage in (1, 2, 3):
        model = zf.precision(example.build(example.Options(stage=stage), mesh), compute=torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with zf.accumulate(model):
            for number in range(2):
                (_loss(model, number, dist.get_rank()) / 2).backward()
        optimizer.step()
        given.append(snapshot(model))
    assert differing(given[0], given[1]) == differing(given[0], given[2]) == []
