"""Kinds of models and of programs with several: GANs, dropout, uneven batches, recurrent and parametrized modules, one rank,
parameters of another mesh, of subclasses, with sparse gradients."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.two_tensor import TwoTensor

import zero_fn as zf
from tests.axes.grids import parallelized
from tests.promises.tables import each_as_replicas
from tests.support.groups import pretended, pretended_grid
from tests.support.messages import refused
from tests.support.models import Odd, Recomputed
from tests.support.on_ranks import on_ranks
from tests.support.programs import STAGES
from tests.support.ranks import axis
from tests.support.wholes import full
from tests.support.worlds import ALL, WIDTH, Tower, as_replicas, noise


def _adversaries(world):
    """A GAN: each model's loss runs through the other, which is frozen or whose gradients are thrown away."""
    generator, critic = world.build(Tower), world.build(Tower, seed=1)
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-2) for model in (generator, critic)]
    for step in range(3):
        real, seed = noise(4, WIDTH, seed=step), noise(4, WIDTH, seed=50 + step)
        with torch.no_grad():
            fake = generator(seed)
        world.step(critic, optimizers[1], critic(real).mean() - critic(fake).mean())
        critic.requires_grad_(step % 2 == 0)
        world.step(generator, optimizers[0], critic(generator(seed)).mean())
        critic.requires_grad_(True).zero_grad()


def _one_loss_of_two_models(world):
    """Under two optimizers in turn, one of both models and one of parts."""
    student, teacher = world.build(Tower), world.build(Tower, seed=1)
    shared = torch.optim.AdamW([*student.parameters(), *teacher.blocks.parameters()], lr=1e-2)
    ends = torch.optim.SGD([*teacher.enter.parameters(), *teacher.leave.parameters()], lr=1e-2, momentum=0.9)
    for step in range(4):
        x = noise(4, WIDTH, seed=step)
        loss = (student(x) - teacher(x)).square().mean() + student(teacher(x)).mean()
        loss.backward()
        world.reduce(student, teacher)
        world.note_model(student, teacher)
        (ends if step % 2 else shared).step()
        for model in (student, teacher):
            model.zero_grad()


def _dropout(world):
    """Computed again; the stream of random numbers goes on through all steps. Ranks have 1, 2, ... rows: scaled by the user,
    the mean over ranks is that over all rows."""
    model = world.build(lambda: Recomputed(dropout=0.3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(100 + rank)
    for step in range(3):
        loss = model(noise(rank + 1, WIDTH, seed=step)).square().mean(1).sum()
        world.step(model, optimizer, loss * 2 / (n + 1))
        world.note("the stream", torch.rand(3))


class Zeros(nn.Module):
    """A parametrization with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.5]))

    def forward(self, weight):
        return weight.triu() * self.scale


class Awkward(nn.Module):
    """Attention, LSTM, weight norms of both kinds and the newer spectral norm are drawn by the laws."""

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(WIDTH, 5, batch_first=True)
        self.widen = nn.Linear(5, WIDTH)
        self.encoder = nn.TransformerEncoderLayer(6, 2, 7, dropout=0.1, batch_first=True)
        self.old_spectral = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.orthogonal = nn.utils.parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))
        self.triangular = nn.Linear(WIDTH, WIDTH)
        nn.utils.parametrize.register_parametrization(self.triangular, "weight", Zeros())
        self.lists = nn.ParameterList([torch.randn(3, WIDTH), torch.randn(WIDTH)])
        self.pair = nn.ParameterDict({"a": torch.randn(WIDTH)})

    def forward(self, x):
        x, _ = self.gru(self.encoder(x))
        x = self.triangular(self.orthogonal(self.old_spectral(self.widen(x))))
        return x * self.pair["a"] + self.lists[0].sum(0) * self.lists[1]


class Doubled(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("two", torch.tensor(2.0))

    def forward(self, x):
        return x * self.two


class Scripted(nn.Module):
    """Functions that TorchScript holds, with a buffer, beside a module whose parameters it does not hold."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)
        self.doubled = torch.jit.script(Doubled())
        self.traced = torch.jit.trace(nn.ReLU(), torch.zeros(3))

    def forward(self, x):
        return self.leave(self.traced(self.doubled(self.enter(x))))


def _trains_with_buffers(build, world):
    model = world.build(build)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        torch.manual_seed(step)
        world.step(model, optimizer, model(noise(2, 3, WIDTH, seed=step)).square().mean())
        for name, buffer in model.named_buffers():
            world.note(name, buffer)
        model.load_state_dict(model.state_dict())
    if build is Scripted:  # hooks of state dicts cannot be registered with scripts: they raised
        model = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        world.step(model, optimizer, model(noise(2, 3, WIDTH, seed=5)).square().mean())


TRIALS = {
    "adversaries": _adversaries,
    "one loss of two models, two optimizers": _one_loss_of_two_models,
    "dropout, computed again, and uneven batches": _dropout,
    "recurrent, parametrized": partial(_trains_with_buffers, Awkward),
    "scripted functions between layers": partial(_trains_with_buffers, Scripted),
}

test_models_and_programs_of_any_kind_are_exact = each_as_replicas(TRIALS)


@as_replicas(n=1, stages=ALL)
def test_one_rank_communicates_nothing_and_is_exact(world):
    model = world.build(Odd)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with zf.traffic() as sent:
        for step in range(3):
            tokens = torch.randint(0, 37, (2, 5), generator=torch.Generator().manual_seed(step))
            world.step(model, optimizer, model(tokens).square().mean())
            with world.accumulate(model):
                model(tokens).mean().backward()
            total = nn.utils.clip_grad_norm_([p for p in model.parameters() if not p.is_complex()], 1.0)
            world.note("norm", total)
    assert not sum(sent.calls.values()), sent.calls


# -- refused ----------------------------------------------------------------------------------------------------------


def test_parameters_of_another_mesh_are_refused_and_left_as_they_are():
    """On one mesh each element counts once in a norm: `tests/axes/test_tensor_parallel.py`."""
    with pretended_grid(2, 2) as mesh:
        model = parallelized(mesh["tp"])
        before = list(model.parameters())
        for stage in ALL:
            with refused("mesh_is_not_that_of_tensor_parallelism"):
                STAGES[stage](model, init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)))
        assert all(one is other for one, other in zip(before, model.parameters(), strict=True))


class Marked(nn.Parameter):
    """A parameter that only its class tells from others."""


def _two():
    return TwoTensor(torch.randn(4, WIDTH), torch.randn(4, WIDTH))


def test_parameters_of_subclasses_are_refused_by_name():
    """They were taken for plain memory: one of two parts. As buffers they may stand beside what is transformed."""
    with pretended(2) as mesh:
        for make in (
            lambda: nn.Parameter(_two()),
            lambda: nn.Parameter(_two(), requires_grad=False),
            lambda: Marked(torch.randn(4, WIDTH)),
            lambda: nn.Parameter(DTensor.from_local(_two(), mesh, [Replicate()], run_check=False)),
        ):
            for count in (1, 2):  # several of them were said to share memory
                model = nn.ParameterDict({f"weight{number}": make() for number in range(count)})
                before = list(model.parameters())
                for verb in (partial(zf.shard_params, mesh=mesh), zf.precision, partial(zf.offload, optim=zf.cpu())):
                    with pytest.raises(
                        zf.errors.PlacementError, match=r"'weight0' is a \w+, and no shard of it would be"
                    ):
                        verb(model)
                assert [id(parameter) for parameter in model.parameters()] == [id(parameter) for parameter in before]
        plain = nn.Linear(WIDTH, 4)
        plain.register_buffer("weight0", _two())
        assert type(zf.shard_params(plain, mesh).weight0) is TwoTensor


class SparseInFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.ones(6, 4))

    def forward(self, tokens):
        return nn.functional.embedding(tokens, self.table, sparse=True)


@pytest.mark.parametrize("stage", ["zero1", "zero3"])
@on_ranks(2)
def test_sparse_gradients_are_refused_by_name(stage):
    with pytest.raises(zf.errors.PlacementError):
        STAGES[stage](nn.EmbeddingBag(8, 4, sparse=True, mode="sum"), axis())
    model = STAGES[stage](nn.Sequential(SparseInFunction(), nn.Linear(4, 3)), axis())
    with refused("gradient_is_sparse"):
        model(torch.tensor([[1, 2]])).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    model[0].table.requires_grad_(False)
    model(torch.tensor([[1, 2]])).sum().backward()
    assert torch.equal(full(model[1].bias.grad), torch.full((3,), 2.0))
