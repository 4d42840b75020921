"""Which padding is left out while prompts are computed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flexgen_jax.policy.segments import MAX_SEGMENTS, left_out, segments_of

PADDING = st.lists(st.integers(0, 300), min_size=1, max_size=60).map(sorted)


@given(PADDING, st.integers(0, 2000), st.integers(1, 20))
def test_segments_cover_all_rows_and_leave_out_nothing_but_padding(
    padding: list[int], worth: int, together: int
) -> None:
    segments = segments_of(padding, worth, together)
    assert len(segments) <= MAX_SEGMENTS
    start = 0
    for rows, skipped in segments:
        assert rows > 0 and skipped <= min(padding[start : start + rows])
        start += rows
    assert start == (len(padding) if segments else 0)
    assert left_out(segments) <= sum(padding)


@given(PADDING, st.integers(0, 2000), st.integers(1, 20))
def test_segments_are_worth_their_compilation(
    padding: list[int], worth: int, together: int
) -> None:
    """Against one segment, which leaves out what is padding in all rows."""
    segments, one = segments_of(padding, worth, together), segments_of(padding, 10**9, together)
    cost = worth * len(segments) if len(segments) > 1 else 0
    assert left_out(segments) - left_out(one) >= cost


def test_prompts_of_two_lengths_are_two_segments() -> None:
    assert segments_of([0] * 8 + [100] * 8, worth=100) == ((8, 0), (8, 96))
    assert segments_of([0] * 8 + [100] * 8, worth=1000) == ()


def test_prompts_of_one_length_are_not_divided() -> None:
    assert segments_of([0] * 16, worth=0) == ()
    assert segments_of([40] * 16, worth=0) == ((16, 32),)


def test_segments_are_of_rows_that_go_together() -> None:
    assert segments_of([0] * 4 + [64] * 12, worth=0, together=8) == ((8, 0), (8, 64))
