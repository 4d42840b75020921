"""Schedules and look-ahead, without arrays."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flexgen_jax.policy.schedule import SCHEDULES, LookAhead, Schedule, row, zigzag

SIZES = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))


@given(size=SIZES, schedule=st.sampled_from(list(SCHEDULES)))
def test_every_step_once_and_after_what_it_needs(size: tuple[int, int, int], schedule: str) -> None:
    tokens, layers, batches = size
    steps = list(SCHEDULES[schedule].steps(range(tokens), layers, range(batches)))
    done = set()
    for step in steps:
        token, layer, batch, _ = step
        assert (token, layer, batch) not in done
        assert layer == 0 or (token, layer - 1, batch) in done
        assert token == 0 or (token - 1, layer, batch) in done
        done.add((token, layer, batch))
    assert len(done) == tokens * layers * batches


@given(size=SIZES, schedule=st.sampled_from(list(SCHEDULES.values())))
def test_a_schedule_is_what_it_says(size: tuple[int, int, int], schedule: Schedule) -> None:
    """Visits follow one another, have one layer each, and are as many as weights are moved."""
    tokens, layers, batches = size
    steps = list(schedule.steps(range(tokens), layers, range(batches)))
    visits = tokens * layers * (1 if schedule.shares_weights else batches)
    assert [s.visit for s in steps] == sorted(s.visit for s in steps)
    assert len({s.visit for s in steps}) == visits == len({(s.visit, s.layer) for s in steps})
    if tokens > 1 and batches > 1:
        prompts_first = [s.token > 0 for s in steps] == sorted(s.token > 0 for s in steps)
        assert prompts_first == schedule.prefills_first


def test_zigzag_moves_weights_once_a_block_and_row_once_a_batch() -> None:
    assert [s[:3] for s in zigzag(range(1), 2, range(2))] == [
        (0, 0, 0),
        (0, 0, 1),
        (0, 1, 0),
        (0, 1, 1),
    ]
    assert [s[:3] for s in row(range(1), 2, range(2))] == [
        (0, 0, 0),
        (0, 1, 0),
        (0, 0, 1),
        (0, 1, 1),
    ]


def test_look_ahead_shows_what_comes() -> None:
    ahead = LookAhead(zigzag(range(1), 3, range(2)), counted=range(3))
    assert [s.visit for s in ahead.visits(-1, 2)] == [0, 1]
    first = next(iter(ahead))
    assert ahead.following() == ahead.steps(1)[0]
    assert [s.batch for s in ahead.steps(2)] == [1, 0]
    assert [(s.visit, s.batch) for s in ahead.visits(first.visit, 5)] == [(1, 0), (2, 0)]
    assert [(s.visit, s.batch) for s in ahead.visits(first.visit - 1, 2)] == [(0, 1), (1, 0)]


def test_look_ahead_past_what_is_not_counted() -> None:
    """From the last decoder layer, look-ahead passes head and embedding to the next token."""
    ahead = LookAhead(zigzag(range(2), 4, range(2)), counted=(1, 2))
    while next(iter(ahead))[:3] != (0, 2, 1):
        pass
    steps = ahead.counted(2)
    assert [s.layer for s in steps] == [3, 3, 0, 0, 1, 1]
    visits = ahead.visits(2, 1)
    assert [(s.token, s.layer, s.batch) for s in visits] == [(0, 3, 0), (1, 0, 0), (1, 1, 0)]
    assert [s.layer for s in ahead.visits(2, 1, counts_all=True)] == [3]
    assert ahead.steps(0) == ahead.counted(0) == ahead.visits(2, 0) == []
    assert len(ahead.steps(99)) == len(ahead.counted(99)) == 10


@given(size=SIZES, dropped=st.integers(0, 3), when=st.integers(0, 12))
def test_dropped_steps_are_neither_shown_nor_run(
    size: tuple[int, int, int], dropped: int, when: int
) -> None:
    tokens, layers, batches = size
    steps = list(zigzag(range(tokens), layers, range(batches)))
    ahead = LookAhead(iter(steps), counted=range(layers))
    run = []
    for count, step in enumerate(ahead):
        run.append(step)
        if count == when:
            ahead.drop(lambda s: s.batch == dropped)
        if count >= when:
            assert all(s.batch != dropped for s in ahead.steps(4))
    expected = [s for i, s in enumerate(steps) if i <= when or s.batch != dropped]
    assert run == expected
