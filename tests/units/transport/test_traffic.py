"""What this rank sends, counted."""

from __future__ import annotations

import pytest

from zero_fn.transport.traffic import count, traffic


def test_bytes_are_counted_by_collective() -> None:
    with traffic() as sent:
        count("all-gather", 100)
        count("reduce-scatter", 30)
        count("all-gather", 10)
    assert sent.by_collective == {"all-gather": 110, "reduce-scatter": 30}
    assert sent.calls == {"all-gather": 2, "reduce-scatter": 1}


def test_control_messages_are_not_payload() -> None:
    with traffic() as sent:
        count("control", 16)
        count("all-gather", 100)
    assert sent.nbytes == 100
    assert sent.by_collective["control"] == 16


def test_nothing_is_counted_outside_the_block() -> None:
    with traffic() as sent:
        pass
    count("all-gather", 100)
    assert sent.nbytes == 0


def test_inner_blocks_count_for_themselves_and_for_outer_ones() -> None:
    with traffic() as outer:
        count("all-gather", 1)
        with traffic() as inner:
            count("all-gather", 2)
        count("all-gather", 4)
    assert (outer.nbytes, inner.nbytes) == (7, 2)


def test_counts_may_be_read_inside_and_stop_when_the_block_raises() -> None:
    with pytest.raises(ValueError, match="stop"), traffic() as sent:
        count("all-gather", 5)
        assert sent.nbytes == 5
        raise ValueError("stop")
    count("all-gather", 5)
    assert sent.nbytes == 5


def test_a_count_prints_what_it_counted() -> None:
    with traffic() as sent:
        assert repr(sent) == "Sent(nothing)"
        count("all-gather", 100)
    assert repr(sent) == "Sent(all-gather 100 B in 1)"
