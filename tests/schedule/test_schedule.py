"""Waves and look-ahead, without arrays."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from flexgen_jax.policy.schedules import SCHEDULES, Schedule
from flexgen_jax.schedule.waves import LookAhead, Step, Waves

SIZES = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))


@dataclass(frozen=True)
class Numbered:
    """A batch that is nothing but a number and the tokens of its steps."""

    number: int
    left: deque[int] = field(compare=False, default_factory=deque)

    def __eq__(self, other: object) -> bool:
        return self.number == (other.number if isinstance(other, Numbered) else other)

    def __lt__(self, other: Numbered) -> bool:
        return self.number < other.number

    def __hash__(self) -> int:
        return hash(self.number)


class Queue:
    """Batches that wait, each of one row, with room for `most` together."""

    def __init__(self, tokens: Sequence[int], most: int | None = None) -> None:
        self._waiting = [Numbered(n, deque(range(count))) for n, count in enumerate(tokens)]
        self._most = most

    def enter(self, going: Sequence[Numbered], most: int | None) -> Sequence[Numbered]:
        room = len(self._waiting) if self._most is None else self._most - len(going)
        count = max(0, min(room, len(self._waiting) if most is None else most))
        entered, self._waiting = self._waiting[:count], self._waiting[count:]
        return entered

    def wait(self) -> bool:
        return False


class Chunked(Queue):
    """Batches whose prompts go in several chunks."""

    def __init__(self, chunks: Sequence[int]) -> None:
        super().__init__([1] * len(chunks))
        self._waiting = [Numbered(n, deque(range(1 - count, 2))) for n, count in enumerate(chunks)]


@given(
    chunks=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    layers=st.integers(2, 4),
    schedule=st.sampled_from(list(SCHEDULES)),
)
def test_only_the_last_chunk_of_a_prompt_has_a_head(
    chunks: list[int], layers: int, schedule: str
) -> None:
    steps = steps_of(Waves(SCHEDULES[schedule], layers, Chunked(chunks)))
    heads = [(step.batch, step.token) for step in steps if step.layer == layers - 1]
    assert sorted(heads) == [(batch, token) for batch in range(len(chunks)) for token in (0, 1)]
    for batch, count in enumerate(chunks):
        tokens = [step.token for step in steps if step.batch == batch and step.layer == 0]
        assert tokens == list(range(1 - count, 2))


def waves_of(schedule: str, tokens: Sequence[int], layers: int, most: int | None = None) -> Waves:
    return Waves(SCHEDULES[schedule], layers, Queue(tokens, most))


def steps_of(waves: Waves) -> list[Step]:
    found = []
    while (step := waves.take()) is not None:
        found.append(step)
    return found


@given(
    tokens=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    layers=st.integers(1, 4),
    most=st.integers(1, 4),
    schedule=st.sampled_from(list(SCHEDULES)),
)
def test_every_step_once_and_after_what_it_needs(
    tokens: list[int], layers: int, most: int, schedule: str
) -> None:
    done = set()
    for token, layer, batch, _ in steps_of(waves_of(schedule, tokens, layers, most)):
        assert (token, layer, batch) not in done
        assert layer == 0 or (token, layer - 1, batch) in done
        assert token == 0 or (token - 1, layer, batch) in done
        done.add((token, layer, batch))
    assert len(done) == sum(tokens) * layers


@given(
    tokens=st.lists(st.integers(1, 5), min_size=1, max_size=8),
    most=st.integers(1, 4),
    schedule=st.sampled_from(list(SCHEDULES.values())),
)
def test_a_wave_advances_every_batch_by_one_step(
    tokens: list[int], most: int, schedule: Schedule
) -> None:
    """Those that are there are never more than there is room for; none waits once it may enter."""
    steps = steps_of(waves_of(schedule.name, tokens, 1, most))
    waves: dict[int, list[Step]] = {}
    for step in steps:
        waves.setdefault(step.visit, []).append(step)
    going: dict[int, int] = {}
    for found in waves.values():
        entered = [step.batch for step in found if step.token == 0]
        assert {step.batch for step in found} == set(going) | set(entered)
        assert all(step.token == going.get(step.batch, 0) for step in found)
        assert len(found) <= most
        if schedule.waits:
            assert not entered or not going
        if schedule.a_wave is not None:
            assert len(entered) <= schedule.a_wave
        if not schedule.waits and len(found) < most:
            rest = set(range(len(tokens))) - {s.batch for s in steps if s.visit <= found[0].visit}
            assert not rest or (schedule.a_wave is not None and entered)
        going = {s.batch: s.token + 1 for s in found if s.token + 1 < tokens[s.batch.number]}
    assert entered == sorted(entered)


@given(size=SIZES)
def test_equal_lengths_go_zigzag(size: tuple[int, int, int]) -> None:
    """In a continuous schedule too: the same steps in the same order."""
    tokens, layers, batches = size
    lengths = [tokens] * (3 * batches)
    found = [
        steps_of(waves_of(name, lengths, layers, batches)) for name in ("continuous", "zigzag")
    ]
    assert found[0] == found[1]


def test_zigzag_moves_weights_once_a_block_and_row_once_a_batch() -> None:
    assert [s[:3] for s in steps_of(waves_of("zigzag", [1, 1], 2))] == [
        (0, 0, 0),
        (0, 0, 1),
        (0, 1, 0),
        (0, 1, 1),
    ]
    assert [s[:3] for s in steps_of(waves_of("row", [1, 1], 2))] == [
        (0, 0, 0),
        (0, 1, 0),
        (0, 0, 1),
        (0, 1, 1),
    ]


def test_visits_have_one_layer_each() -> None:
    steps = steps_of(waves_of("diagonal", [3, 2, 4], 3))
    assert [s.visit for s in steps] == sorted(s.visit for s in steps)
    assert len({s.visit for s in steps}) == len({(s.visit, s.layer) for s in steps})


def test_look_ahead_shows_what_comes() -> None:
    ahead = LookAhead(waves_of("zigzag", [1, 1], 3), counted=range(3))
    assert [s.visit for s in ahead.visits(-1, 2)] == [0, 1]
    first = ahead.take()
    assert first is not None
    assert ahead.following() == ahead.steps(1)[0]
    assert [s.batch for s in ahead.steps(2)] == [1, 0]
    assert [(s.visit, s.batch) for s in ahead.visits(first.visit, 5)] == [(1, 0), (2, 0)]
    assert [(s.visit, s.batch) for s in ahead.visits(first.visit - 1, 2)] == [(0, 1), (1, 0)]


def test_look_ahead_past_what_is_not_counted() -> None:
    """From the last decoder layer, look-ahead passes head and embedding to the next token."""
    ahead = LookAhead(waves_of("zigzag", [2, 2], 4), counted=(1, 2))
    while (step := ahead.take()) is not None and step[:3] != (0, 2, 1):
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
    waves = waves_of("zigzag", [tokens] * batches, layers)
    ahead, count = LookAhead(waves, counted=range(layers)), 0
    seen = [*ahead.steps(batches)]
    while (step := ahead.take()) is not None:
        assert count <= when or step.batch != dropped
        if count == when:
            ahead.drop(next((s.batch for s in seen if s.batch == dropped), Numbered(dropped)))
        if count >= when:
            assert all(s.batch != dropped for s in ahead.steps(4))
        count += 1
