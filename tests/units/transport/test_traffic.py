"""What this rank sends, counted."""

import pytest

from zero_fn.transport.traffic import count, traffic


def test_bytes_are_counted_by_collective_and_control_messages_are_not_payload():
    with traffic() as sent:
        assert repr(sent) == "Sent(nothing)"
        count("all-gather", 100, "dp")
        count("reduce-scatter", 30, "dp")
        count("all-gather", 10, "other")
        count("control", 16)
    assert sent.by_collective == {"all-gather": 110, "reduce-scatter": 30, "control": 16}
    assert sent.calls == {"all-gather": 2, "reduce-scatter": 1, "control": 1}
    assert sent.by_axis == {"dp": 130, "other": 10}
    assert sent.nbytes == 140
    assert repr(sent) == "Sent(all-gather 110 B in 2, reduce-scatter 30 B in 1, control 16 B in 1)"


def test_a_block_counts_for_outer_ones_and_stops_at_its_end_though_it_raises():
    with pytest.raises(ValueError, match="stop"), traffic() as outer:
        count("all-gather", 1)
        with traffic() as inner:
            count("all-gather", 2)
            assert inner.nbytes == 2
        count("all-gather", 4)
        raise ValueError("stop")
    count("all-gather", 8)
    assert (outer.nbytes, inner.nbytes) == (7, 2)
