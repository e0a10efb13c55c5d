"""Programs over a model in tiers and its streamed optimizer: where everything rests, and actions with a number each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_value_

import zero_fn as zf
from property_tests.programs import OPTIMIZERS
from property_tests.rules import Accumulate, Backward, Evaluate, Fail, OnRank, Step, ZeroGrad
from tests.simulation import axis
from tests.support.models import Language
from tests.support.offloaded import offloaded
from tests.support.programs import STAGES
from tests.support.seeds import seed_generator
from zero_fn.values.mesh import root_of
from zero_fn.values.tiers import is_accelerator

__all__ = ["ACTIONS", "Placed", "places", "programs", "trained"]

PARTS = ("embedding", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "norm")
LATE = "blocks.2"  # what may be given to the optimizer in a group of its own, after steps


@dataclass(frozen=True)
class Placed:
    """What is trained by what, and where it rests."""

    stage: str  # over "dp"; "plain" is no transform
    optimizer: str
    states: frozenset[str]
    outer: str | None = None  # the stage over a second axis, "outer", if there is one
    compute: torch.dtype | None = None
    groups: str = "one"
    fraction: float = 1.0
    where: str | None = None
    is_offloaded_first: bool = False
    is_tiled: bool = False
    recomputes: str = "no"  # whether activations of blocks are kept, computed again, or wait in a tier, too
    tier: str = "nvme"
    buffer: str = "1MiB"
    options: dict[str, Any] = field(default_factory=dict)  # of the stages
    finish: str = "step"
    grads: torch.dtype | None = None
    round: Any = None  # of parameters that rest in bfloat16


class Training(OnRank):
    """A model and its optimizer; in memory if no path is given.

    Attributes:
        device_type: Where it computes.
        axis: The axis of its stages, as a function.
    """

    device_type = "cpu"
    axis: Callable[[], DeviceMesh] = staticmethod(axis)

    def __init__(self, placed, path):
        seed_generator(0)
        self.placed, self.path, self.ranks = placed, path, [dist.get_rank()]
        model = Language(blocks=4).to(self.device_type)
        if placed.is_tiled:
            model = zf.tile(model, where="*.up.weight", parts=3)
        self.models, self.schedule = [self._transformed(model)], None
        self.optimizer = self.made_optimizer()
        self.saved = None
        self.average = []

    @property
    def model(self):
        return self.models[0]

    def part(self, model, number):
        return model.blocks[number % 4]

    def forward(self, model, seed, rank):
        generator = torch.Generator().manual_seed(100 * seed + rank)
        tokens = torch.randint(37, (2, 5), generator=generator).to(self.device_type)
        return [model(tokens).float()]

    def unsharded(self, *, writeback):
        is_plain = self.placed.stage == "plain" and self.placed.outer is None
        return nullcontext() if is_plain else super().unsharded(writeback=writeback)

    def follow(self, rule, seed):
        """Runs a rule; what this rank has seen."""
        found = self.do(rule, seed)
        return found[0] if found else None

    def _transformed(self, model):
        placed = self.placed
        tiers = {name: self.tier(self.path) for name in placed.states} if self.path else {}
        stage, is_plain = placed.stage, placed.stage == "plain" and placed.outer is None
        if is_plain and not tiers and is_accelerator(self.device_type):
            stage = "replicate"  # so that all sums have the order of a transform
        elif is_plain and not tiers:
            tiers = {"params": zf.cpu()}  # where they are, for the same
        if "optim" in tiers:
            tiers["fraction"] = placed.fraction
        outer, dtypes = placed.outer, (placed.compute, placed.grads)
        rounded = {"rest": torch.bfloat16, "round": placed.round} if placed.round else {}

        def staged(module, stage, mesh):
            options = {key: value for key, value in placed.options.items() if key == "units" or stage != "replicate"}
            return STAGES[stage](module, mesh, **options)

        transforms = [
            lambda m: m if stage == "plain" else staged(m, stage, self.axis()),
            lambda m: m if outer is None else staged(m, outer, root_of(self.axis())["outer"]),
            lambda m: zf.offload(m, where=placed.where, **tiers) if tiers else m,
            lambda m: (
                m
                if dtypes == (None, None) and not rounded
                else zf.precision(m, compute=dtypes[0] or torch.float32, grads=dtypes[1], **rounded)
            ),
        ]
        for transform in reversed(transforms) if placed.is_offloaded_first else transforms:
            model = transform(model)
        if placed.recomputes == "no":
            return model
        parked = self.tier(self.path) if self.path and placed.recomputes == "parked" else None
        return zf.checkpoint_activations(model, units="blocks.?", offload=parked)

    def tier(self, path):
        """Where states rest: on a disk, and of an accelerator on the host, too."""
        is_host = is_accelerator(self.device_type) and self.placed.tier == "cpu"
        return zf.cpu(pinned=False) if is_host else zf.nvme(path)

    def made_optimizer(self):
        optimizer = OPTIMIZERS[self.placed.optimizer](self._groups())
        if is_accelerator(self.device_type):
            optimizer.param_groups = [{**group, "foreach": False} for group in optimizer.param_groups]  # as on the host
        if self.path is None:
            return zf.streamed(optimizer) if self.placed.round else optimizer
        how = {"buffer": self.placed.buffer, "finish": self.placed.finish}
        if "optim" in self.placed.states and self.placed.where is None:
            return zf.streamed(optimizer, **how)  # each to the tier that offload said
        tier = zf.nvme(self.path) if self.placed.tier == "nvme" else zf.cpu()
        return zf.streamed(optimizer, tier, fraction=self.placed.fraction, **how)

    def _groups(self):
        parameters = list(self.model.parameters())
        if self.placed.groups == "vectors apart":
            return [
                {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
                {"params": [p for p in parameters if p.ndim > 1]},
            ]
        if self.placed.groups == "late":
            return [{"params": [p for name, p in self.model.named_parameters() if not name.startswith(LATE)]}]
        if self.placed.groups == "mixed":
            return [{"params": parameters[1::2]}, {"params": parameters[::2], "lr": 0.02}]
        return [{"params": parameters}]

    def of(self, part):
        prefix = PARTS[part % len(PARTS)]
        return [p for name, p in self.model.named_parameters() if name.startswith(prefix)]

    def holds(self):
        """This rank's part of all parameters and states."""
        yield from map(own, self.model.parameters())
        states = self.optimizer.state_dict()["state"]
        for number in sorted(states):
            yield from (own(torch.as_tensor(states[number][name])) for name in sorted(states[number]))


def own(tensor):
    """A copy of what this rank has of it."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone().cpu()


RULES = {
    "backward": lambda _: Backward(),
    "backward_of_two_forwards": lambda _: Backward(forwards=2),
    "backward_of_microbatches": lambda number: Accumulate(unshard=number % 3 == 0),
    "step": lambda _: Step(keeps=True),
    "zero_grad": lambda number: ZeroGrad(bool(number % 3)),
    "evaluate": lambda _: Evaluate(),
    "fail": lambda number: Fail("backward" if number % 2 else "forward", number),
}
"""What programs in memory do, too."""


def _follow(rule):
    return lambda training, number: training.follow(rule(number), number)


ACTIONS = {name: _follow(rule) for name, rule in RULES.items()}


def action(do):
    ACTIONS[do.__name__] = do
    return do


def loss_of(training, seed):
    return training.loss(training.model, seed, *training.ranks)


@action
def backward_of_a_penalty(training, part):
    penalty = sum((p * p).sum() for p in training.of(part))
    assert isinstance(penalty, Tensor)
    if penalty.requires_grad:
        whole = penalty.full_tensor() if isinstance(penalty, DTensor) else penalty
        (loss_of(training, part) + 0.01 * whole).backward()


@action
def assign_gradients(training, part):
    trained = [p for p in training.of(part) if p.requires_grad]
    if trained:
        for p, grad in zip(trained, torch.autograd.grad(loss_of(training, part), trained), strict=True):
            p.grad = grad


@action
def drop_gradients(training, part):
    for p in training.of(part):
        p.grad = None


@action
def scale_gradients(training, part):
    for p in training.of(part):
        if p.grad is not None:
            p.grad.mul_(0.5)


@action
def clip(training, number):
    training.clip(Step(clip=0.05 if number % 2 else 1e9))
    return [training.norm]


@action
def clip_values(training, _):
    parameters = list(training.model.parameters())
    if any(p.grad is not None for p in parameters):  # torch raises without any
        clip_grad_value_(parameters, 1e-3)


@action
def read_gradients(training, part):
    return [own(p.grad) for p in training.of(part) if p.grad is not None]


@action
def step_with_a_closure(training, seed):
    def closure():
        training.optimizer.zero_grad()
        return training.follow(Backward(), seed)[0]

    return [training.optimizer.step(closure)]


@action
def change_rates(training, number):
    for group in training.optimizer.param_groups:
        group["lr"] *= 0.5 if number % 2 else 1.5


@action
def freeze(training, part):
    for p in training.of(part):
        p.requires_grad_(not p.requires_grad)


@action
def read(training, part):
    return [own(p) for p in training.of(part)]


@action
def copy_the_model(training, seed):
    if training.placed.grads is not None:  # copies take none
        training.model.zero_grad()
    kept = training.models
    training.models = copy.deepcopy(kept)
    seen = training.follow(Evaluate(), seed)
    training.models = kept
    return seen


@action
def edit(training, part):
    with torch.no_grad():
        for p in training.of(part):
            p.mul_(0.9).add_(0.01)


@action
def edit_whole(training, part):
    with training.unsharded(writeback=True):
        edit(training, part)


@action
def fill(training, part):
    for p in training.of(part):
        nn.init.constant_(p, 0.05)


@action
def swap(training, _):
    with torch.no_grad():
        first, second = training.model.blocks[0].down.weight, training.model.blocks[1].down.weight
        kept = first.clone()
        first.copy_(second)
        second.copy_(kept)


@action
def average(training, number):
    """Of parameters over steps, as EMA keeps; every third time it is put in their place."""
    with torch.no_grad():
        parameters = list(training.model.parameters())
        training.average = training.average or [p.detach().clone() for p in parameters]
        for p, kept in zip(parameters, training.average, strict=True):
            kept.lerp_(p.detach(), 0.5)
            if number % 3 == 0:
                p.copy_(kept)


@action
def save(training, _):
    values = {name: value.clone() for name, value in training.model.state_dict().items()}
    training.saved = copy.deepcopy(training.optimizer.state_dict()), values


@action
def load(training, number):
    if training.saved is not None:
        states, values = training.saved
        if len(states["param_groups"]) == len(training.optimizer.param_groups):
            training.optimizer.load_state_dict(copy.deepcopy(states))
            if number % 2:
                training.model.load_state_dict(values)


@action
def make_the_optimizer_anew(training, _):
    states = training.optimizer.state_dict()
    if training.placed.groups != "late":
        training.optimizer = training.made_optimizer()
        training.optimizer.load_state_dict(states)


@action
def stream_what_has_stepped(training, _):
    """The optimizer is made, loaded, and streamed only then."""
    states = training.optimizer.state_dict()
    if training.placed.groups != "late" and training.placed.round is None:  # a stock one would round them
        stock = OPTIMIZERS[training.placed.optimizer](training._groups())
        stock.load_state_dict(states)  # with the way of its arithmetic
        if training.path is not None:
            stock = zf.streamed(stock, training.tier(training.path), buffer="1MiB")
        training.optimizer = stock


@action
def add_a_group(training, _):
    if training.placed.groups == "late" and len(training.optimizer.param_groups) == 1:
        way = training.optimizer.param_groups[0]["foreach"]
        training.optimizer.add_param_group({"params": training.of(PARTS.index(LATE)), "lr": 0.03, "foreach": way})


@action
def offload_and_reload(training, _):
    if training.path is not None:
        offloaded(training.model, training.optimizer)
        zf.reload_states(training.model)


def trained(placed, program, path):
    """What each action has seen, and what is held in the end."""
    training = Training(placed, path)
    seen = [ACTIONS[name](training, number) or [] for name, number in program]
    return [*seen, list(training.holds())]


places = st.builds(
    Placed,
    stage=st.sampled_from(["plain", "replicate", "zero1", "zero2", "zero3"]),
    outer=st.sampled_from([None, None, None, "replicate", "zero1", "zero2", "zero3"]),
    compute=st.sampled_from([None, None, torch.bfloat16]),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    groups=st.sampled_from(["one", "vectors apart", "late", "mixed"]),
    states=st.frozensets(st.sampled_from(["params", "grads", "optim"])),
    fraction=st.sampled_from([1.0, 0.5]),
    where=st.sampled_from([None, "blocks.*", "*weight", "blocks.1.*"]),
    is_offloaded_first=st.booleans(),
    is_tiled=st.sampled_from([False, False, True]),
    recomputes=st.sampled_from(["no", "no", "yes", "parked"]),
    tier=st.sampled_from(["nvme", "cpu"]),
    buffer=st.sampled_from(["64KiB", "1MiB"]),
    finish=st.sampled_from(["step", "forward"]),
    grads=st.sampled_from([None, None, torch.bfloat16]),
    round=st.sampled_from([None, None, None, "stochastic", "kahan"]),
    options=st.fixed_dictionaries(
        {},
        optional={
            "units": st.sampled_from(["blocks.*", "blocks.1", zf.by_size(nbytes=3000)]),
            "persist_below": st.sampled_from([50, 1000]),
        },
    ),
)
_BACKWARDS = ["backward"] * 3 + [name for name in ACTIONS if name.startswith("backward_")] + ["assign_gradients"]
_OF_GRADIENTS = ["drop_gradients"] * 4 + [
    "scale_gradients",
    "clip",
    "clip_values",
    "read_gradients",
    "offload_and_reload",
    "edit",
]
_BETWEEN = [*sorted({*ACTIONS} - {*_BACKWARDS, *_OF_GRADIENTS, "step", "zero_grad"}), "offload_and_reload", "edit"]


def some_of(names, least, most):
    return st.lists(st.tuples(st.sampled_from(names), st.integers(0, 5)), min_size=least, max_size=most)


one_step = st.tuples(
    some_of(_BETWEEN, 0, 2),
    some_of(["zero_grad"], 0, 1),
    some_of(_BACKWARDS, 1, 2),
    some_of(_OF_GRADIENTS, 0, 4),
    st.just([("step", 0)]),
).map(lambda parts: list(chain.from_iterable(parts)))
programs = st.lists(one_step, min_size=2, max_size=6).map(lambda steps: list(chain.from_iterable(steps)))
