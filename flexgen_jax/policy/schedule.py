"""Schedules as data: pure generators of steps, in the order in which they are computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple


class Step(NamedTuple):
    """Layer `layer` of batch `batch` for token `token`; token 0 is the prompt's prefill.

    Layers are numbered with the embedding as 0 and the head last. `visit` counts up whenever
    the layer changes: steps of one visit share the layer's weights.
    """

    token: int
    layer: int
    batch: int
    visit: int


def zigzag(tokens: Sequence[int], layers: int, batches: Sequence[int]) -> Iterator[Step]:
    """Yields steps in which all batches go through a layer before the next layer (algorithm 1)."""
    visit = 0
    for token in tokens:
        for layer in range(layers):
            for batch in batches:
                yield Step(token, layer, batch, visit)
            visit += 1


def row(tokens: Sequence[int], layers: int, batches: Sequence[int]) -> Iterator[Step]:
    """Yields steps in which each batch is finished before the next one (no block schedule)."""
    visit = 0
    for batch in batches:
        for token in tokens:
            for layer in range(layers):
                yield Step(token, layer, batch, visit)
                visit += 1


@dataclass(frozen=True)
class Schedule:
    """An order of steps, and what follows from it for memory and time.

    steps: (tokens, number of layers, batches) -> the steps in their order.
    shares_weights: whether a layer's weights are moved once for all batches of a block, which the
        device then computes one after the other; else once for each batch.
    prefills_first: whether all prompts are prefilled before the first token is decoded.
    """

    name: str
    steps: Callable[[Sequence[int], int, Sequence[int]], Iterator[Step]]
    shares_weights: bool
    prefills_first: bool


SCHEDULES: Mapping[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        Schedule("zigzag", zigzag, shares_weights=True, prefills_first=True),
        Schedule("row", row, shares_weights=False, prefills_first=False),
    )
}


FILLED = 8
"""Steps that are taken from a schedule at once."""


class LookAhead:
    """Iterates over steps, shows those that come next, and can drop some of them.

    counted: the layers whose steps count where look-ahead is limited by a number; the others are
    shown besides them.
    """

    def __init__(self, steps: Iterator[Step], counted: Container[int]) -> None:
        self._steps = steps
        self._counted = counted
        self._next: deque[Step] = deque()
        self._is_dropped: Callable[[Step], bool] | None = None

    def __iter__(self) -> Iterator[Step]:
        while self._next or self._fill(FILLED):
            yield self._next.popleft()

    def drop(self, is_dropped: Callable[[Step], bool]) -> None:
        """From now on leaves out the steps for which `is_dropped` is true."""
        self._is_dropped = is_dropped
        self._next = deque(step for step in self._next if not is_dropped(step))

    def following(self) -> Step | None:
        """Returns the next step; None at the end."""
        return self._next[0] if self._next or self._fill(FILLED) else None

    def steps(self, count: int) -> list[Step]:
        """Returns the next `count` steps, or fewer at the end."""
        if len(self._next) < count:
            self._fill(count)
        return list(islice(self._next, count))

    def counted(self, count: int) -> list[Step]:
        """Returns the next steps, until `count` of them are counted, or fewer at the end."""
        found: list[Step] = []
        while count:
            for step in islice(self._next, len(found), None):
                found.append(step)
                count -= step.layer in self._counted
                if not count:
                    return found
            if not self._fill(len(found) + FILLED):
                return found
        return found

    def visits(self, after: int, count: int, counts_all: bool = False) -> list[Step]:
        """Returns the first step of each visit after visit `after`, until `count` of these steps
        are counted, or fewer at the end."""
        found: list[Step] = []
        seen = 0
        while count:
            for step in islice(self._next, seen, None):
                seen += 1
                if step.visit > after:
                    after = step.visit
                    found.append(step)
                    count -= counts_all or step.layer in self._counted
                    if not count:
                        return found
            if not self._fill(seen + FILLED):
                return found
        return found

    def count_of(self, visit: int) -> int:
        """Returns how many of the next steps belong to a visit, up to the first one that does
        not."""
        count = 0
        while True:
            for step in islice(self._next, count, None):
                if step.visit != visit:
                    return count
                count += 1
            if not self._fill(count + FILLED):
                return count

    def _fill(self, count: int) -> bool:
        """Queues steps until `count` are ready; returns whether any were added."""
        before = len(self._next)
        for step in self._steps:
            if self._is_dropped is None or not self._is_dropped(step):
                self._next.append(step)
                if len(self._next) >= count:
                    break
        return len(self._next) > before
