"""Architectures of transformers, a few kB each: losses, gradients and weights are those of replicas, to the bit.

Each trains two steps at stages 1 to 3; then again at one stage with an option more, in turn: activations that are computed
again (`gradient_checkpointing_enable`), or bfloat16 in compute, beside `zf.replicate` of the same.
"""

from functools import partial

import pytest
import torch
from torch import nn

import zero_fn as zf
from tests.outside.integrations.architectures import ALL, inputs_of, model_named
from tests.outside.integrations.worlds import at_night, on_two_ranks, require_equal, start
from tests.support.programs import STAGES, parameters
from tests.support.ranks import axis
from tests.support.worlds import differences, trained

_STAGES = ("zero1", "zero2", "zero3")
_DAILY = ("llama", "deepseek_v3", "clip", "bart")


def _again(model):
    model.gradient_checkpointing_enable()
    return model


@pytest.mark.parametrize(
    ("name", "number"),
    [
        pytest.param(name, number, id=name, marks=() if name in _DAILY else pytest.mark.nightly)
        for number, name in enumerate(ALL)
    ],
)
@on_two_ranks
def test_an_architecture_trains_as_replicas(name, number):
    start()

    def program(model, run, step):
        run.backward(model(**inputs_of(name, step)).loss)

    def found(build, stages, **how):
        beside = how.pop("beside", None)
        return differences(trained(build, program, optimizer="adamw", **how), stages=stages, beside=beside)

    lines = found(lambda: model_named(name), _STAGES)
    stage = _STAGES[number // 2 % len(_STAGES)]
    if number % 2:
        in_bfloat16 = partial(zf.precision, compute=torch.bfloat16)
        lines += found(lambda: model_named(name), [stage], transform=in_bfloat16, beside="replicate")
    elif getattr(model_named(name), "supports_gradient_checkpointing", False):
        lines += found(lambda: _again(model_named(name)), [stage])
    assert not lines, "\n".join(lines[:5])


@pytest.mark.parametrize("name", ["llama", "gemma", "gpt2", "mixtral", "qwen2", "t5", "bart"])
@at_night
def test_an_architecture_on_meta_is_materialized_as_it_is_built(name):
    """The same constants, all buffers, and draws of the same spread: norms, convolutions and routers have no
    reset_parameters(), RoPE's frequencies are in no file, and the head of gemma shares a row of zeros."""
    start()
    runs = []
    for stage in ("replicate", "zero1", "zero3"):
        with torch.device("meta"):
            model = STAGES[stage](model_named(name), axis())
        torch.manual_seed(0)
        zf.materialize(model, "cpu")
        runs.append(parameters(model) | dict(model.named_buffers()))
        require_equal(runs[-1], runs[0])
    assert model(**inputs_of(name, 0)).loss.isfinite()
    torch.manual_seed(1)
    plain = model_named(name)
    built = dict(plain.named_parameters()) | dict(plain.named_buffers())
    assert list(runs[0]) == list(built)
    for tensor, value in runs[0].items():
        expected = built[tensor]
        if not isinstance(expected, nn.Parameter) or expected.unique().numel() == 1:
            assert torch.equal(value, expected), tensor
            continue
        assert value.mean().abs() < 0.35 * expected.std(), tensor
        assert 0.8 < value.std() / expected.std() < 1.25 or value.numel() < 200, tensor
        assert torch.equal(_zero_rows(value), _zero_rows(expected)), tensor


def _zero_rows(value):
    return (value == 0).reshape(len(value), -1).all(1)
