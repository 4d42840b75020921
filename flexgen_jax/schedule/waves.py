"""Steps in order, and a look ahead.

A *wave* is one pass through the layers; every admitted batch advances by one step.
Between waves, batches leave and others enter. Schedules differ in when they may enter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple, Protocol

from flexgen_jax.policy.schedules import Schedule
from flexgen_jax.schedule.running import Running


class Step(NamedTuple):
    """Layer `layer` of batch `batch` for token `token`.

    Token 0 is the prefill of the prompt, or of its last chunk; the chunk before that is token -1,
    and so on. Only steps from token 0 on have a head. The last chunk of a prefix is token -1.
    Layers are numbered with the embedding as 0 and the head last. `visit` counts up whenever
    the layer changes: steps of one visit share the layer's weights.
    """

    token: int
    layer: int
    batch: Running
    visit: int


class Arrivals(Protocol):
    """Batches that wait to enter."""

    def enter(self, going: Sequence[Running], max_batches: int | None) -> Sequence[Running]:
        """Returns batches that enter now, if there are some and there is room.

        going: the batches that have further steps; max_batches: how many batches may enter.
        """

    def wait(self) -> bool:
        """Waits until something may enter, after nothing could; returns whether it ever will."""


class Steps(Protocol):
    """Steps in their order."""

    def take(self) -> Step | None:
        """Returns the next step; None if there is none before a batch enters or leaves."""

    def drop(self, batch: Running) -> None:
        """Leaves out all further steps of a batch."""


class Waves:
    """The steps of all batches, wave by wave; see `Steps`."""

    def __init__(self, schedule: Schedule, layers: int, arrivals: Arrivals) -> None:
        self._schedule, self._layers, self._arrivals = schedule, layers, arrivals
        self._going: list[Running] = []
        self._dropped: set[Running] = set()
        self._visit = 0
        self._wave: Iterator[Step] = iter(())

    def take(self) -> Step | None:
        step = next(self._wave, None)
        if step is None:
            self._wave = self._steps(self._next())
            step = next(self._wave, None)
        return step

    def drop(self, batch: Running) -> None:
        self._going = [running for running in self._going if running is not batch]
        self._dropped.add(batch)

    def _next(self) -> dict[Running, int]:
        """Returns the next token of each batch, of those that have one or enter now."""
        self._dropped.clear()
        schedule = self._schedule
        if not (schedule.waits and self._going):
            self._going += self._arrivals.enter(self._going, schedule.a_wave)
        tokens = {running: running.left.popleft() for running in self._going}
        self._going = [running for running in self._going if running.left]
        return tokens

    def _steps(self, tokens: Mapping[Running, int]) -> Iterator[Step]:
        for layer in range(self._layers if tokens else 0):
            for batch, token in tokens.items():
                is_asked = token >= 0 or layer + 1 < self._layers
                if is_asked and batch not in self._dropped:
                    yield Step(token, layer, batch, self._visit)
            self._visit += 1


FILLED = 8
"""Steps that are taken from a schedule at once."""


class LookAhead:
    """Takes steps, shows those that come next, and can drop those of a batch.

    counted: the layers whose steps count where look-ahead is limited by a number; all other steps
    are shown in addition.
    """

    def __init__(self, source: Steps, counted: Container[int]) -> None:
        self._source = source
        self._counted = counted
        self._next: deque[Step] = deque()

    def take(self) -> Step | None:
        """Takes the next step; None if there is none before a batch enters or leaves."""
        return self._next.popleft() if self._next or self._fill(FILLED) else None

    def drop(self, batch: Running) -> None:
        """From now on leaves out the steps of a batch."""
        self._source.drop(batch)
        self._next = deque(step for step in self._next if step.batch is not batch)

    def following(self) -> Step | None:
        """Returns the next step; None if there is none yet."""
        return self._next[0] if self._next or self._fill(FILLED) else None

    def steps(self, count: int) -> list[Step]:
        """Returns the next `count` steps, or fewer at the end."""
        if len(self._next) < count:
            self._fill(count)
        return list(islice(self._next, count))

    def counted(self, count: int) -> list[Step]:
        """Returns the next steps, until `count` of them are counted, or fewer at the end."""
        steps: list[Step] = []
        while count:
            for step in islice(self._next, len(steps), None):
                steps.append(step)
                count -= step.layer in self._counted
                if not count:
                    return steps
            if not self._fill(len(steps) + FILLED):
                return steps
        return steps

    def visits(self, after: int, count: int, counts_all: bool = False) -> list[Step]:
        """Returns the first step of each visit after visit `after`, until `count` of these steps
        are counted, or fewer at the end."""
        first: list[Step] = []
        seen = 0
        while count:
            for step in islice(self._next, seen, None):
                seen += 1
                if step.visit > after:
                    after = step.visit
                    first.append(step)
                    count -= counts_all or step.layer in self._counted
                    if not count:
                        return first
            if not self._fill(seen + FILLED):
                return first
        return first

    def count_of(self, visit: int) -> int:
        """Returns the number of consecutive next steps that belong to a visit."""
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
        while len(self._next) < count and (step := self._source.take()) is not None:
            self._next.append(step)
        return len(self._next) > before
