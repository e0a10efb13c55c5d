"""Optimizers of DeepSpeed that torch does not have: Muon beside an AdamW, LAMB, and Lion.

Options are DeepSpeed's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_fn.errors import ConfigError
from zero_fn.streamed.inner_optimizer import raw_step
from zero_fn.values.chained_optimizer import as_one

__all__ = ["Lamb", "Lion", "muon_with_adam"]

Betas = tuple[float, float]


class _OfDeepSpeed(Optimizer):
    """An optimizer with numbers from 0 on as options, which steps one parameter after the other."""

    def __init__(self, params: Any, **options: Any) -> None:
        for name, value in options.items():
            for number in value if isinstance(value, tuple) else (value,):
                if number < 0 or (name == "betas" and number >= 1):
                    raise ValueError(f"{name} is {value}")
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps all parameters that have gradients, after the closure, whose value is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(group, parameter, self.state[parameter])
        return loss

    def _step(self, group: dict[str, Any], parameter: Any, state: dict[str, Any]) -> None:
        raise NotImplementedError


class _Muon(_OfDeepSpeed):
    """torch's Muon, also of tensors of more than two dims.

    One of four dims is stepped as the matrix of its filters, any other as a stack of matrices.
    """

    def _step(self, group: dict[str, Any], parameter: Any, state: dict[str, Any]) -> None:
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        tensors = parameter.detach(), parameter.grad, state["momentum_buffer"]
        states: dict[Tensor, Any] = {}
        for value, grad, momentum in zip(*map(_matrices, tensors), strict=True):
            states[piece := nn.Parameter(value)] = {"momentum_buffer": momentum}
            piece.grad = grad
        options = {name: group[name] for name in ("lr", "momentum", "weight_decay")}
        part = torch.optim.Muon([*states], **options)
        part.state.update(states)
        raw_step(part)


def _matrices(tensor: Tensor) -> Sequence[Tensor]:
    if tensor.ndim == 4:
        return [tensor.view(len(tensor), -1)]
    return [tensor] if tensor.ndim == 2 else tensor.view(-1, *tensor.shape[-2:]).unbind()


def muon_with_adam(
    params: Any,
    models: Iterable[nn.Module],
    lr: float | None = None,
    muon_lr: float | None = None,
    adam_lr: float | None = None,
    momentum: float = 0.95,
    betas: Betas = (0.9, 0.95),
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    ns_method: str = "gram",
) -> Optimizer:
    """Muon over hidden weights of some models, or of each group of them, and AdamW over the others.

    As DeepSpeed does, Muon has what is of two dims or more, and neither "embed" nor "lm_head" by
    its name. `lr` is the rate of both, unless one has its own.
    """
    if ns_method not in ("gram", "standard") or any(
        isinstance(rate, bool) for rate in (lr, muon_lr, adam_lr)
    ):
        raise ValueError('a rate is no number, or ns_method neither "gram" nor "standard"')
    names = {
        id(parameter): name.lower()
        for model in models
        for name, parameter in model.named_parameters()
    }

    def is_hidden(parameter: Tensor) -> bool:
        if (name := names.get(id(parameter))) is None:
            raise ConfigError(
                "Muon takes parameters by their names, and one is in no model.",
                parameter=list(parameter.shape),
                fix="the model and its optimizer in one call: accelerator.prepare(model, "
                "DummyOptim(model.parameters()))",
            )
        return parameter.ndim >= 2 and "embed" not in name and "lm_head" not in name

    listed = [*params]
    hidden, others = list[dict[str, Any]](), list[dict[str, Any]]()
    for group in listed if listed and isinstance(listed[0], Mapping) else [{"params": listed}]:
        parts: tuple[list[Any], list[Any]] = ([], [])
        for parameter in group["params"]:
            parts[is_hidden(parameter)].append(parameter)
        for found, part in zip((others, hidden), parts, strict=True):
            if part:
                found.append({**group, "params": part, "use_muon": found is hidden})
    members: list[Optimizer] = []
    own, adams = (
        next(rate for rate in rates if rate is not None)
        for rates in ((muon_lr, lr, 0.02), (adam_lr, lr, 3e-4))
    )
    if hidden:
        members.append(_Muon(hidden, lr=own, momentum=momentum, weight_decay=weight_decay))
    if others:
        members.append(
            torch.optim.AdamW(others, lr=adams, betas=betas, eps=eps, weight_decay=weight_decay)
        )
    return as_one(members)


class Lamb(_OfDeepSpeed):
    """The LAMB of csrc/lamb: an update of Adam with weight decay,
    times the norm of a tensor over the norm of its update.

    The quotient stays between `min_coeff` and `max_coeff`, and is 1 where a norm is 0.
    (You et al. 2019, arXiv:1904.00962.)
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
    ) -> None:
        options = {
            "eps_inside_sqrt": eps_inside_sqrt,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
        }
        super().__init__(
            params, lr=lr, betas=betas, eps=eps, max_coeff=max_coeff, min_coeff=min_coeff, **options
        )

    def _step(self, group: dict[str, Any], parameter: Any, state: dict[str, Any]) -> None:
        (beta1, beta2), eps, grad = group["betas"], group["eps"], parameter.grad
        if not state:
            state["step"] = 0
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter)
        state["step"] += 1
        first, second = state["exp_avg"].lerp_(grad, 1 - beta1), state["exp_avg_sq"]
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = second.add(eps).sqrt_() if group["eps_inside_sqrt"] else second.sqrt().add_(eps)
        update = (first / root).add_(parameter, alpha=group["weight_decay"])
        size, change = torch.linalg.vector_norm(parameter), torch.linalg.vector_norm(update)
        ratio = (
            (size / change)
            .clamp(group["min_coeff"], group["max_coeff"])
            .where((size != 0) & (change != 0), 1.0)
        )
        rate, done = group["lr"], state["step"]
        if group["bias_correction"]:
            rate = rate * math.sqrt(1 - beta2**done) / (1 - beta1**done)
        parameter.sub_(update.mul_(ratio * rate))


class Lion(_OfDeepSpeed):
    """Steps of one size for each element alone, along the sign of a moment.
    (Chen et al. 2023, arXiv:2302.06675.)"""

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: Betas = (0.9, 0.999), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, weight_decay=weight_decay)

    def _step(self, group: dict[str, Any], parameter: Any, state: dict[str, Any]) -> None:
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        moment, (beta1, beta2) = state["exp_avg"], group["betas"]
        direction = moment.lerp(parameter.grad, 1 - beta1).sign_()
        parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction * group["lr"])
        moment.lerp_(parameter.grad, 1 - beta2)
