"""One pass in C, and what stands in for it, have the bits of torch's fused Adam and AdamW."""

import itertools
import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from tests.units.kernels.drawn import drawn, needs_kernels, same, threads, without_kernels
from zero_fn.kernels import adam
from zero_fn.kernels.adam import AdamPiece, AdamRates, Rounding, by_torch, in_c, rounding
from zero_fn.kernels.codes import BLOCK_NUMEL

PLAIN = AdamRates(1e-2, 0.9, 0.999, 1e-8, 0.1, is_decoupled=True, amsgrad=False, maximize=False)

STATES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")

rates_of_users = st.builds(
    AdamRates,
    lr=st.sampled_from([1e-3, 0.02, 3e-4, 1.0, 0.0]),
    beta1=st.sampled_from([0.9, 0.5, 0.3, 0.0]),
    beta2=st.sampled_from([0.999, 0.95, 0.0]),
    eps=st.sampled_from([1e-8, 1e-3]),
    weight_decay=st.sampled_from([0.0, 0.1, 1e-2]),
    is_decoupled=st.booleans(),
    amsgrad=st.booleans(),
    maximize=st.booleans(),
)


def stock(rates, params, grads):
    """Parameters and states after a step for each list of gradients, by torch's own optimizer."""
    parameters = [nn.Parameter(p.clone()) for p in params]
    options = {"lr": rates.lr, "betas": (rates.beta1, rates.beta2), "eps": rates.eps}
    options |= {"weight_decay": rates.weight_decay, "amsgrad": rates.amsgrad, "maximize": rates.maximize}
    optimizer = (torch.optim.AdamW if rates.is_decoupled else torch.optim.Adam)(parameters, fused=True, **options)
    for step in grads:
        for parameter, grad in zip(parameters, step, strict=True):
            parameter.grad = grad.float()
        optimizer.step()
    states = [optimizer.state[p][name] for p in parameters for name in STATES[: 3 if rates.amsgrad else 2]]
    return [*(p.detach() for p in parameters), *states]


def stepped(rates, params, grads, *, in_one_pass, is_coded=False):
    """The same by the kernel, or by its stand-in; and the parameters in bfloat16. Coded: the moments have eight bits."""
    params, names = [p.clone() for p in params], STATES[: 3 if rates.amsgrad else 2]
    sends = [torch.zeros_like(p, dtype=torch.bfloat16) for p in params]
    states = [{name: torch.zeros_like(p, dtype=torch.uint8 if is_coded else None) for name in names} for p in params]
    if is_coded:
        for p, own in zip(params, states, strict=True):
            own |= {f"{name}_scale": torch.zeros(-(-p.numel() // BLOCK_NUMEL)) for name in names}
    written = [*params, *sends, *itertools.chain.from_iterable(own.values() for own in states)]
    before = [each._version for each in written]
    for number, step in enumerate(grads, 1):
        pieces = [
            AdamPiece(param=p, grad=g, step=number, send=send, **{"max_exp_avg_sq": None, **own})
            for p, g, send, own in zip(params, step, sends, states, strict=True)
        ]
        if in_one_pass:
            how = rounding(rates)
            assert how is not None
            in_c(pieces, rates, how)
        else:
            by_torch(pieces, rates)
    if in_one_pass:  # torch's fused kernel tells autograd nothing
        assert all(each._version > known or not each.numel() for each, known in zip(written, before, strict=True))
    return [*params, *itertools.chain.from_iterable(own.values() for own in states), *sends]


def all_same(found, expected):
    return all(same(one, other) for one, other in zip(found, expected, strict=True))


@needs_kernels
def test_this_build_of_torch_rounds_in_a_way_that_the_kernel_has():
    """If this fails torch's kernel has changed: the step goes on by torch, slower. Add its way to `Rounding`."""
    assert rounding(PLAIN) is not None


@needs_kernels
@given(
    rates=rates_of_users,
    numels=st.lists(st.one_of(st.integers(0, 40), st.integers(0, 34_000)), min_size=1, max_size=3),
    is_half=st.booleans(),
    count=st.sampled_from([1, 3]),
    seed=st.integers(0, 99),
)
@example(PLAIN, [200_003, 0, 5, 0], True, 3, 0)
@example(PLAIN, [150_001, 70_000], False, 3, 0)
def test_one_pass_has_the_bits_of_the_fused_step(rates, numels, is_half, count, seed):
    """Gradients in bfloat16 as if cast before, parameters in bfloat16 as if cast after; by what stands in for it, too, which
    is all there is for amsgrad, maximize and the decay of Adam."""
    params = [drawn(n, seed=seed + i) for i, n in enumerate(numels)]
    grads = [[drawn(n, seed=seed + 10 * step + i) for i, n in enumerate(numels)] for step in range(1, 4)]
    if is_half:
        grads = [[g.bfloat16() for g in step] for step in grads]
    expected = stock(rates, params, grads)
    expected += [p.bfloat16() for p in expected[: len(params)]]
    is_for_torch = rates.amsgrad or rates.maximize or bool(rates.weight_decay and not rates.is_decoupled)
    assert (rounding(rates) is None) == is_for_torch
    with threads(count):
        assert is_for_torch or all_same(stepped(rates, params, grads, in_one_pass=True), expected)
        assert all_same(stepped(rates, params, grads, in_one_pass=False), expected)


@needs_kernels
def test_what_is_not_finite_stays_so():
    """Infinities to the bit; of a NaN only that it is one, as its payload is nobody's promise."""
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-45, -1e-40, 3e38] * 3)
    for rates in (PLAIN, AdamRates(1e-2, 0.9, 0.999, 1e-8, 0.0, is_decoupled=False, amsgrad=False, maximize=False)):
        params, grads = [torch.ones(len(special) - 1)], [[special[:-1]], [special[1:]]]
        expected = stock(rates, params, grads)
        found = stepped(rates, params, grads, in_one_pass=True)
        assert all_same(found, [*expected, expected[0].bfloat16()])


@needs_kernels
def test_casts_to_bfloat16_are_those_of_torch():
    """Of every float that has ties, carries and overflows near it: a step of nothing sends the parameter."""
    halves = torch.arange(1 << 16, dtype=torch.int32) << 16
    bits = torch.cat([halves + offset for offset in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    param = bits.view(torch.float32).clone()
    expected = param.bfloat16()
    zeros, send = torch.zeros(3, len(param)), torch.empty(len(param), dtype=torch.bfloat16)
    rates = AdamRates(0.0, 0.9, 0.999, 1e-8, 0.0, is_decoupled=True, amsgrad=False, maximize=False)
    how = rounding(rates)
    assert how is not None
    in_c([AdamPiece(param, zeros[0], zeros[1], zeros[2], None, 1, send)], rates, how)
    assert same(send, expected)


@needs_kernels
def test_every_way_of_rounding_is_another(monkeypatch):
    """So that the trial tells them apart; and where none agrees with torch there is none."""
    ways = [Rounding(*how) for how in itertools.product((True, False), (0, 1, 2), (0, 1, 2), (8,))]
    found = [torch.cat([t.flatten() for t in adam._tried(PLAIN, how)]).numpy().tobytes() for how in ways]
    assert len(set(found)) == len(ways)
    monkeypatch.setattr(adam, "_tried", lambda rates, how: [])
    monkeypatch.setattr(adam, "_same", lambda one, other: False)
    adam._found_rounding.cache_clear()
    try:
        assert rounding(PLAIN) is None
    finally:
        adam._found_rounding.cache_clear()


@needs_kernels
def test_rates_whose_factor_depends_on_a_fusion_are_left_to_torch():
    """`1 - lr * weight_decay` of torch is in double precision, perhaps fused: where it would show, it is not used."""
    draw = random.Random(0)
    middle = Fraction(np.float64(np.float32(0.9))) + Fraction(1, 2**25)  # between two floats, a tie
    target = 1 - (middle + Fraction(1, 2**54))
    assert Fraction(float(target)) == target
    for _ in range(10_000):
        decay = draw.uniform(0.5, 1.0)
        lr = float(target) / decay
        if lr * decay == float(target) and Fraction(lr) * Fraction(decay) != target:
            rates = AdamRates(lr, 0.9, 0.999, 1e-8, decay, is_decoupled=True, amsgrad=False, maximize=False)
            if np.float32(1 - lr * decay) != np.float32(float(1 - Fraction(lr) * Fraction(decay))):
                assert rounding(rates) is None
                return
    pytest.fail("no such rates found")


def test_without_kernels_no_way_is_offered():
    with without_kernels():
        assert rounding(PLAIN) is None


@needs_kernels
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("is_half", [False, True])
def test_moments_in_eight_bits_step_as_if_decoded_and_encoded(is_half, count):
    """One pass, and torch's kernel between decoding and encoding by torch: around the ends of vectors, blocks and tasks."""
    numels = [0, 1, 15, 16, 17, 255, 256, 257, 271, 1023, 1024, 1025, 4097, (1 << 15) - 1, (1 << 15) + 257, 200_003]
    params = [drawn(n, seed=n) for n in numels] + [drawn(600, seed=1).view(20, 30).t()]
    grads = [[drawn(p.numel(), seed=p.numel() + step).view_as(p) for p in params] for step in range(1, 5)]
    for step in grads:
        step[-1] = step[-1].t().contiguous().t()
        step[7][::2] = 0.0
    grads[2][5][3] = torch.inf
    if is_half:
        grads = [[g.bfloat16() for g in step] for step in grads]
    with threads(count):
        found = stepped(PLAIN, params, grads, in_one_pass=True, is_coded=True)
        with without_kernels():
            expected = stepped(PLAIN, params, grads, in_one_pass=False, is_coded=True)
    assert all_same(found, expected)
    assert found[5].isnan().all() and sum(int(f.isnan().any()) for f in found[: len(params)]) == 1
    exact = stepped(PLAIN, params, grads, in_one_pass=True)[: len(params)]
    errors = [(f - e).abs().max() for f, e in zip(found, exact, strict=False) if e.numel() not in (0, 255)]
    assert max(errors) < 4 * PLAIN.lr  # four steps of which none is much longer than lr
    assert max(errors) > 0
