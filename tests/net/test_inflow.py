"""The speed of a link from the bytes of large messages; small ones, pauses and buffers tell nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corolla.net.inflow import LEAST_BYTES, LEAST_S, SKIPPED_BYTES, InflowMeter

MB = 1 << 20


def brought(meter: InflowMeter, num_bytes: int, bytes_per_s: float, now: float, *, step: int = 50_000) -> float | None:
    """A message of so many bytes comes at this speed; what the meter says at its end."""
    for there in range(step, num_bytes, step):
        assert meter.saw(there, now + there / bytes_per_s) is None
    return meter.saw(0, now + num_bytes / bytes_per_s)


def test_a_large_message_tells_the_speed_of_its_link() -> None:
    meter = InflowMeter()
    assert brought(meter, 4 * MB, 1e6, 100.0) == pytest.approx(1e6)
    assert brought(meter, 4 * MB, 1e7, 200.0) == pytest.approx(1e7)


def test_a_slow_start_is_left_out() -> None:
    meter = InflowMeter()
    assert meter.saw(20_000, 0.0) is None
    assert meter.saw(SKIPPED_BYTES, 3.0) is None  # TCP finds out how fast it may send
    assert meter.saw(SKIPPED_BYTES + 2 * MB, 4.0) is None
    assert meter.saw(0, 9.0) == pytest.approx(2 * MB)


def test_a_small_message_tells_nothing() -> None:
    assert brought(InflowMeter(), SKIPPED_BYTES + LEAST_BYTES - 1, 1e6, 0.0) is None
    assert InflowMeter().saw(0, 1.0) is None


def test_a_message_right_behind_another_is_measured_for_itself() -> None:
    meter = InflowMeter()
    meter.saw(SKIPPED_BYTES, 0.0)
    meter.saw(SKIPPED_BYTES + MB, 1.0)
    assert meter.saw(10_000, 50.0) == pytest.approx(MB)  # the read that ended it brought the start of the next
    assert brought(meter, 4 * MB, 1e6, 51.0, step=100_000) == pytest.approx(1e6)


def test_while_we_do_not_read_nothing_is_measured() -> None:
    meter = InflowMeter()
    meter.saw(SKIPPED_BYTES, 0.0)
    meter.saw(SKIPPED_BYTES + MB, 1.0)
    meter.interrupt()
    assert meter.saw(0, 60.0) is None


@given(st.lists(st.tuples(st.integers(0, 64 * MB), st.floats(0, 10)), max_size=50))
def test_whatever_comes_the_speed_is_one_that_makes_sense(reads: list[tuple[int, float]]) -> None:
    meter, now = InflowMeter(), 0.0
    for num_bytes, pause_s in reads:
        now += pause_s
        sample = meter.saw(num_bytes, now)
        assert sample is None or 0 < sample <= 64 * MB / LEAST_S
