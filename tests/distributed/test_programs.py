"""What users do with a model beside a plain step: every program gives what plain replicas give, in every stage.

A program runs forwards and backwards on a model and leaves gradients; replicas average theirs afterwards. Everything is
float64, where the few orders of summation that differ stay far below the tolerance, and errors of meaning do not.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero_fn as zf
from tests.support import worlds
from tests.support.profiles import SIZES
from tests.support.ranks import Ranks
from tests.support.seeds import seed_generator
from tests.support.worlds import World, differences
from zero_fn.runtime.entry import units_of
from zero_fn.runtime.in_flight import Phase

WIDTH = 6
TOLERANCE = 1e-11

Program = Callable[[nn.Module, int], object]


def noise(*shape: int, seed: int) -> Tensor:
    """A float64 input of this rank."""
    return worlds.noise(*shape, seed=seed, dtype=torch.float64)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 9)
        self.second = nn.Linear(9, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(x)))


class Stack(nn.Module):
    """Layers between two linears of the root."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.leave = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = self.run(layer, x)
        output: Tensor = self.leave(x)
        return output

    def run(self, layer: nn.Module, x: Tensor) -> Tensor:
        output: Tensor = layer(x)
        return output


class Checkpointed(Stack):
    """Each layer is a checkpoint around a unit."""

    reentrant = False

    def run(self, layer: nn.Module, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(layer, x, use_reentrant=self.reentrant)
        return output


class Reentrant(Checkpointed):
    reentrant = True


class InnerCheckpoint(Layer):
    """A checkpoint inside a unit."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.first, x, use_reentrant=self.reentrant)
        return x + checkpoint(self.second, torch.tanh(hidden), use_reentrant=self.reentrant)


class InnerReentrant(InnerCheckpoint):
    reentrant = True


def _inside(kind: type[Layer]) -> Callable[[], Stack]:
    def build() -> Stack:
        model = Stack()
        model.layers = nn.ModuleList(kind() for _ in range(3))
        return model

    return build


class Shared(Stack):
    """One layer runs three times."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.layers[0](x)
        output: Tensor = self.leave(self.layers[1](x))
        return output


class TwoHeads(Stack):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.layers[0](self.enter(x))
        return self.layers[1](x), self.leave(self.layers[2](x))


@dataclass
class Output:
    value: Tensor
    note: str


class Structured(Stack):
    def forward(self, x: Tensor) -> dict[str, object]:  # type: ignore[override]
        return {"out": [Output(super().forward(x), "n")], "x": x}


class Opaque:
    def __init__(self, value: Tensor) -> None:
        self.value = value


class OpaqueOutputs(Stack):
    def run(self, layer: nn.Module, x: Tensor) -> Tensor:
        return Opaque(layer(x)).value

    def forward(self, x: Tensor) -> Opaque:  # type: ignore[override]
        return Opaque(super().forward(x))


class OpaqueLayer(Layer):
    def forward(self, x: Tensor) -> Opaque:  # type: ignore[override]
        return Opaque(super().forward(x))


class OpaqueLayers(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(OpaqueLayer() for _ in range(3))

    def run(self, layer: nn.Module, x: Tensor) -> Tensor:
        output: Tensor = layer(x).value
        return output


class PartlyUsed(Stack):
    """The layer that runs depends on the rank's data; all gathers happen, some gradients do not."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        kept = [layer(x) for layer in self.layers]
        chosen = kept[dist.get_rank() % 2]
        output: Tensor = self.leave(chosen)
        return output


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, 5, num_layers=2, batch_first=True)
        self.attention = nn.MultiheadAttention(5, 1, batch_first=True)
        self.out = nn.utils.parametrizations.weight_norm(nn.Linear(5, WIDTH))
        self.old = nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.table = nn.ParameterList([torch.randn(3, WIDTH), torch.randn(WIDTH)])
        self.pair = nn.ParameterDict({"a": torch.randn(WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.rnn(x.view(-1, 2, WIDTH))
        hidden, _ = self.attention(hidden, hidden, hidden)
        output: Tensor = self.spectral(self.old(self.out(hidden)))
        return output * self.pair["a"] + self.table[0].sum(0) * self.table[1]


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 5, 3, padding=1), nn.GroupNorm(1, 5), nn.ReLU(), nn.ConvTranspose2d(5, 1, 3, padding=1)
        ).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.body(x.view(-1, 1, 2, 3))
        return output


def plain(model: nn.Module, step: int) -> None:
    model(noise(4, WIDTH, seed=step)).square().mean().backward()


def structured(model: nn.Module, step: int) -> None:
    model(noise(4, WIDTH, seed=step))["out"][0].value.square().mean().backward()


def opaque(model: nn.Module, step: int) -> None:
    model(noise(4, WIDTH, seed=step)).value.square().mean().backward()


def several_forwards_one_backward(model: nn.Module, step: int) -> None:
    losses = [model(noise(4, WIDTH, seed=10 * step + i)).square().mean() for i in range(3)]
    torch.stack(losses).sum().backward()


def forwards_then_backwards(model: nn.Module, step: int) -> None:
    losses = [model(noise(4, WIDTH, seed=10 * step + i)).square().mean() for i in range(3)]
    for loss in losses:
        loss.backward()


def retain_graph(model: nn.Module, step: int) -> None:
    loss = model(noise(4, WIDTH, seed=step)).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def one_head_at_a_time(model: nn.Module, step: int) -> None:
    first, second = model(noise(4, WIDTH, seed=step))
    first.square().mean().backward(retain_graph=True)
    second.square().mean().backward()


def one_head_only(model: nn.Module, step: int) -> None:
    model(noise(4, WIDTH, seed=step))[step % 2].square().mean().backward()


def both_heads(model: nn.Module, step: int) -> None:
    first, second = model(noise(4, WIDTH, seed=step))
    (first.square().mean() + second.square().mean()).backward()


def evaluation_between(model: nn.Module, step: int) -> None:
    x = noise(4, WIDTH, seed=step)
    with torch.inference_mode() if step == 0 else torch.no_grad():
        before = model(x)
    model.eval()
    loss = model(x).square().mean()
    model.train()
    with torch.no_grad():
        assert torch.equal(model(x), before)
    discarded = model(x)  # a graph that never runs backward
    loss.backward()
    del discarded


def evaluation_with_gradients_first(model: nn.Module, step: int) -> None:
    model(noise(4, WIDTH, seed=step + 50))
    plain(model, step)


def accumulating(model: nn.Module, step: int) -> None:
    is_transformed = bool(units_of(model))
    with zf.accumulate(model) if is_transformed else nullcontext():
        for i in range(3):
            plain(model, 10 * step + i)
            with torch.no_grad():
                model(noise(2, WIDTH, seed=i))


def freezing(model: nn.Module, step: int) -> None:
    parts = list(model.layers)  # type: ignore[attr-defined]
    for i, layer in enumerate(parts):
        layer.requires_grad_(i != step % len(parts))
    plain(model, step)


def failing_forward(model: nn.Module, step: int) -> None:
    broken = model.layers[1].first  # type: ignore[attr-defined]
    x = noise(4, WIDTH, seed=step)
    with pytest.raises(RuntimeError):
        model(x[:, :3])
    hook = broken.register_forward_pre_hook(_raise)
    with pytest.raises(ZeroDivisionError):
        model(x)
    hook.remove()
    assert all(unit.in_flight.phase is Phase.AT_REST for unit in units_of(model))
    plain(model, step)


def failing_accumulation(model: nn.Module, step: int) -> None:
    """What a block has summed before an exception is dropped, not reduced."""
    if units_of(model):
        with pytest.raises(ZeroDivisionError), zf.accumulate(model):
            plain(model, step + 100)
            _raise()
        assert all(parameter.grad is None for parameter in model.parameters())
    accumulating(model, step)


def _raise(*_: object) -> None:
    raise ZeroDivisionError


def failing_backward(model: nn.Module, step: int) -> None:
    x = noise(4, WIDTH, seed=step)
    seen = []
    hook = model.layers[1].register_forward_hook(  # type: ignore[attr-defined]
        lambda module, args, output: seen.append(output.register_hook(_raise))
    )
    loss = model(x).square().mean()
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    hook.remove()
    model.zero_grad()
    plain(model, step)


def children_alone(model: nn.Module, step: int) -> None:
    x = noise(4, WIDTH, seed=step)
    enter, layers, leave = model.enter, model.layers, model.leave  # type: ignore[attr-defined]
    hidden = layers[0].first(x)
    loss = leave(layers[2](layers[0].second(torch.tanh(hidden)))).square().mean() + enter(x).sum()
    loss.backward()


def input_gradients(model: nn.Module, step: int) -> None:
    x = noise(4, WIDTH, seed=step).requires_grad_()
    model(x).square().mean().backward()
    assert x.grad is not None
    model(x.grad.detach()).sum().backward()


def gradient_penalty(model: nn.Module, step: int) -> None:
    x = noise(4, WIDTH, seed=step).requires_grad_()
    output = model(x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    (output.square().mean() + slope.square().mean()).backward()


def gradients_by_autograd_grad(model: nn.Module, step: int) -> None:
    loss = model(noise(4, WIDTH, seed=step)).square().mean()
    parameters = list(model.parameters())
    for parameter, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = grad


def backward_into_some(model: nn.Module, step: int) -> None:
    loss = model(noise(4, WIDTH, seed=step)).square().mean()
    loss.backward(inputs=list(model.layers.parameters()))  # type: ignore[attr-defined]


def saved_on_host(model: nn.Module, step: int) -> None:
    with torch.autograd.graph.save_on_cpu():
        plain(model, step)


def kept_gathered_weight(model: nn.Module, step: int) -> None:
    weights: list[Tensor] = []
    layer = model.layers[0]  # type: ignore[attr-defined]
    hook = layer.first.register_forward_hook(lambda module, args, output: weights.append(module.weight))
    loss = model(noise(4, WIDTH, seed=step)).square().mean()
    hook.remove()
    (loss + weights[0].square().sum()).backward()


CASES: dict[str, tuple[Callable[[], nn.Module], Program]] = {
    "plain": (Stack, plain),
    "checkpoint around units": (Checkpointed, plain),
    "reentrant checkpoint around units": (Reentrant, plain),
    "checkpoint inside units": (_inside(InnerCheckpoint), plain),
    "reentrant checkpoint inside units": (_inside(InnerReentrant), plain),
    "shared layer": (Shared, plain),
    "structured outputs": (Structured, structured),
    "opaque outputs": (OpaqueOutputs, opaque),
    "opaque outputs of units": (OpaqueLayers, plain),
    "unused on some ranks": (PartlyUsed, plain),
    "recurrent, attention, parametrized": (Recurrent, plain),
    "convolution, channels last": (Convolution, plain),
    "several forwards, one backward": (Stack, several_forwards_one_backward),
    "several forwards of a shared layer": (Shared, several_forwards_one_backward),
    "several forwards, then backwards": (Stack, forwards_then_backwards),
    "retain_graph": (Stack, retain_graph),
    "one head at a time": (TwoHeads, one_head_at_a_time),
    "one head only": (TwoHeads, one_head_only),
    "both heads": (TwoHeads, both_heads),
    "evaluation between": (Stack, evaluation_between),
    "forward without backward first": (Stack, evaluation_with_gradients_first),
    "accumulate": (Stack, accumulating),
    "accumulate with reentrant checkpoints": (Reentrant, accumulating),
    "freezing between steps": (Stack, freezing),
    "failing forward": (Stack, failing_forward),
    "failing backward": (Stack, failing_backward),
    "failing accumulation": (Stack, failing_accumulation),
    "children alone": (Stack, children_alone),
    "gradients of inputs": (Stack, input_gradients),
    "gradient penalty": (Stack, gradient_penalty),
    "autograd.grad": (Stack, gradients_by_autograd_grad),
    "backward(inputs=)": (Stack, backward_into_some),
    "save_on_cpu": (Stack, saved_on_host),
    "gathered weight kept by a hook": (Stack, kept_gathered_weight),
}


def _differences(case: str, variant: str) -> list[str]:
    build, program = CASES[case]

    def trial(world: World) -> None:
        model = world.build(lambda: build().double())
        if variant == "deepcopy" and not world.is_replica:
            model = copy.deepcopy(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for step in range(2):
            seed_generator(step)
            program(model, step)
            world.reduce(model)
            world.note_model(model)
            optimizer.step()
            optimizer.zero_grad()
        world.note_model(model)

    return differences(trial, tolerance=TOLERANCE)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("case", CASES)
def test_a_program_gives_what_replicas_give(ranks: Ranks, case: str, n: int) -> None:
    for found in ranks(n).run(_differences, case, "as it is"):
        assert found == []


@pytest.mark.parametrize("case", ["plain", "shared layer", "recurrent, attention, parametrized"])
def test_a_deep_copy_trains_on_its_own(ranks: Ranks, case: str) -> None:
    for found in ranks(2).run(_differences, case, "deepcopy"):
        assert found == []
