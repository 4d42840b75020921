"""Schedules as data: pure generators of steps, in the order in which they are computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
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


def zigzag(tokens: int, layers: int, batches: int) -> Iterator[Step]:
    """Yields steps in which all batches go through a layer before the next layer (algorithm 1)."""
    visit = 0
    for token in range(tokens):
        for layer in range(layers):
            for batch in range(batches):
                yield Step(token, layer, batch, visit)
            visit += 1


def row(tokens: int, layers: int, batches: int) -> Iterator[Step]:
    """Yields steps in which each batch is finished before the next one (no block schedule)."""
    visit = 0
    for batch in range(batches):
        for token in range(tokens):
            for layer in range(layers):
                yield Step(token, layer, batch, visit)
                visit += 1


@dataclass(frozen=True)
class Schedule:
    """An order of steps, and what follows from it for memory and time.

    steps: (tokens, layers, batches) -> the steps in their order.
    shares_weights: whether a layer's weights are moved once for all batches of a block, which the
        device then computes one after the other; else once for each batch.
    prefills_first: whether all prompts are prefilled before the first token is decoded.
    """

    name: str
    steps: Callable[[int, int, int], Iterator[Step]]
    shares_weights: bool
    prefills_first: bool


SCHEDULES: Mapping[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        Schedule("zigzag", zigzag, shares_weights=True, prefills_first=True),
        Schedule("row", row, shares_weights=False, prefills_first=False),
    )
}


IsCounted = Callable[[Step], bool]


class LookAhead:
    """Iterates over steps, shows those that come next, and can drop some of them."""

    def __init__(self, steps: Iterator[Step]) -> None:
        self._steps = steps
        self._next: deque[Step] = deque()
        self._is_dropped: Callable[[Step], bool] = lambda step: False

    def __iter__(self) -> Iterator[Step]:
        while self._fill(1):
            yield self._next.popleft()

    def drop(self, is_dropped: Callable[[Step], bool]) -> None:
        """From now on leaves out the steps for which `is_dropped` is true."""
        self._is_dropped = is_dropped
        self._next = deque(step for step in self._next if not is_dropped(step))

    def steps(self, count: int, is_counted: IsCounted = lambda step: True) -> list[Step]:
        """Returns the next steps, until `count` of them are counted, or fewer at the end."""
        found: list[Step] = []
        while count and self._fill(len(found) + 1) > len(found):
            found.append(self._next[len(found)])
            count -= is_counted(found[-1])
        return found

    def visits(
        self, after: int, count: int, is_counted: IsCounted = lambda step: True
    ) -> list[Step]:
        """Returns the first step of each visit after visit `after`, until `count` of these steps
        are counted, or fewer at the end."""
        found: list[Step] = []
        index = 0
        while count and self._fill(index + 1) > index:
            step = self._next[index]
            if step.visit > (found[-1].visit if found else after):
                found.append(step)
                count -= is_counted(step)
            index += 1
        return found

    def _fill(self, count: int) -> int:
        """Queues steps until `count` are ready; returns how many are, fewer only at the end."""
        while len(self._next) < count:
            step = next(self._steps, None)
            if step is None:
                break
            if not self._is_dropped(step):
                self._next.append(step)
        return min(count, len(self._next))
