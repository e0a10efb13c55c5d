"""What the benchmark of an accelerator computes, without one: shares and gaps of a trace, and where a large model rests."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "examples" / "benchmarks"


@pytest.fixture(autouse=True)
def _beside_the_benchmarks(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])


def _event(cat, name, begin_ms, end_ms):
    return {"cat": cat, "name": name, "ts": 5e6 + 1e3 * begin_ms, "dur": 1e3 * (end_ms - begin_ms)}


def test_a_trace_says_what_the_device_did_and_what_the_host_did_while_it_waited():
    from accelerator_traces import lines

    events = [
        _event("user_annotation", "a step", 0, 100),
        _event("user_annotation", "backward", 0, 60),
        _event("user_annotation", "update", 60, 95),
        _event("cpu_op", "aten::mm", 0, 2),
        _event("cpu_op", "aten::copy_", 55, 80),
        _event("kernel", "gemm", 0, 20),
        _event("kernel", "gemm", 15, 30),  # on another stream, at once
        _event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 25, 40),
        _event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 45, 50),
    ]
    shares, host, first, second = lines(events)
    assert shares == (
        "100.0 ms; computes 35.0 ms (35 %), copies 15.0 ms (15 %), both 5.0 ms (5 %), neither 55.0 ms (55 %)"
    )
    assert host == "host: backward 60.0 ms, update 35.0 ms"
    assert first == "  nothing for 50.00 ms from 50.0 ms on: update 35.0, aten::copy_ 25.0, backward 10.0"
    assert second == "  nothing for 5.00 ms from 40.0 ms on: backward 5.0"


def test_a_large_model_rests_where_the_least_is_on_the_host():
    from accelerator_largest import Rest, fitting
    from accelerator_ways import Shape

    shape = Shape.named("32x4096x1024")
    assert 6.4e9 < shape.numel < 6.5e9
    assert fitting(shape, 16384, 200e9, 0) == Rest(False, False, 0.0)
    assert fitting(shape, 16384, 75e9, 118e9) == Rest(False, False, 1.0)
    assert fitting(shape, 16384, 9e9, 118e9) == Rest(True, True, 1.0)
    assert fitting(shape, 16384, 9e9, 116e9) is None
    assert fitting(shape, 16384, 14e9, 112.5e9) == Rest(True, True, 0.9)
