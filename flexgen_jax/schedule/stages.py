"""Stages: the division of a model's layers over devices, and the work sent to each stage.

Hidden states go from stage to stage. The work of stages is cut into *slots*: the next step of a
group of batches, in all layers of a stage. While one stage computes a slot, the stage after it
computes the slot before.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from typing import NamedTuple

from flexgen_jax.models.spec import ModelSpec
from flexgen_jax.policy.plan import BlockPlan
from flexgen_jax.policy.shapes import BatchShape
from flexgen_jax.schedule.admission import Admission
from flexgen_jax.schedule.backend import Backend
from flexgen_jax.schedule.ledger import Ledger
from flexgen_jax.schedule.loop import BlockLoop
from flexgen_jax.schedule.running import Running
from flexgen_jax.schedule.waves import Step

Division = tuple[range, ...]
"""The layers of each stage."""

HEAD_SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)
"""Shares of tokens that need the head's matmul, one division of layers for each."""

REMEMBERED = 64
"""Number of finished slots that are remembered."""


def groups_of(stages: int) -> tuple[int, ...]:
    """Returns how many groups of batches may be under way: as few as keep all stages busy, or more
    of them, which are smaller, so that less time passes until the last stage has one.

    With 3 stages they are 4 or 12: each stage computes a group, and the tokens of a fourth are
    being looked at.
    """
    return (stages + 1, 4 * stages) if stages > 1 else (1,)


def divided(batches: int, stages: int) -> int:
    """Returns the number of groups of `batches` batches."""
    counts = groups_of(stages)
    return min(max(batches, min(counts)), max(counts))


def divisions(spec: ModelSpec, stages: int) -> list[Division]:
    """Returns ways to divide a model's layers: the first is best for decoding, where each token
    needs the head's matmul, the last for long prompts, where only the last token does."""
    ways = [split_layers(spec, stages, share) for share in HEAD_SHARES]
    return list(dict.fromkeys(ways))


def split_layers(spec: ModelSpec, stages: int, head_share: float = 1.0) -> Division:
    """Divides a model's decoder layers into stages of similar products, each at least one layer.

    head_share: how many tokens of each, from 0 to 1, also take the head's product, which the last
    stage has.
    """
    costs = [float(layer.active_size) for layer in spec.decoders]
    costs[-1] += head_share * spec.head.large_size
    sums = [0.0, *accumulate(costs)]
    count = len(costs)
    # best[n]: the least of the largest sums of the first n layers in so many stages; cut[k][n]:
    # where the last of k stages begins.
    best, cuts = [0.0, *[inf] * count], list[list[int]]()
    for stage in range(1, stages + 1):
        before, cut = best, [0] * (count + 1)
        best = [inf] * (count + 1)
        for stop in range(stage, count + 1):
            for start in range(stage - 1, stop):
                largest = max(before[start], sums[stop] - sums[start])
                if largest < best[stop]:
                    best[stop], cut[stop] = largest, start
        cuts.append(cut)
    ranges, stop = list[range](), count
    for cut in reversed(cuts):
        ranges.append(range(cut[stop], stop))
        stop = cut[stop]
    return tuple(ranges[::-1])


class Told(NamedTuple):
    """A batch's step in a slot: its token, as in `Step`, and the tokens of its sequences that the
    step computes, times their number."""

    batch: int
    token: int
    size: int


@dataclass(frozen=True)
class Slot:
    """The work of all stages at one time, each with its layers.

    steps: of the group's batches; entering: batches that are new, by number; leaving: finished
    batches.
    """

    number: int
    steps: tuple[Told, ...]
    entering: Mapping[int, BatchShape] = field(default_factory=dict)
    leaving: tuple[int, ...] = ()


class Slots:
    """The slots received by a stage: the steps of its loop, and the batches that arrive.

    A thread of its own tells them. plan: into which batches enter.
    """

    def __init__(self, plan: BlockPlan) -> None:
        self._plan, self._layers = plan, len(plan.spec.layers)
        self._admission = Admission(plan)
        self._going: dict[int, Running] = {}
        self._changed = threading.Condition()
        self._slots: deque[Slot] = deque()
        self._steps_of: dict[int, tuple[Told, ...]] = {}
        self._count = 0
        self._is_ended = False
        self._wave: Iterator[Step] = iter(())
        self._visit = 0
        self._dropped: set[Running] = set()
        self._leaving: list[Running] = []
        self._numbers: dict[tuple[Running, int], int] = {}

    def tell(self, slot: Slot) -> None:
        with self._changed:
            self._slots.append(slot)
            self._steps_of[slot.number] = slot.steps
            self._count = slot.number + 1
            self._changed.notify_all()

    def end(self) -> None:
        """No more slots follow."""
        with self._changed:
            self._is_ended = True
            self._changed.notify_all()

    def take(self) -> Step | None:
        """Returns the next step; None if it has to wait for another slot."""
        while True:
            step = next(self._wave, None)
            if step is not None:
                return step
            with self._changed:
                if not self._slots:
                    return None
                slot = self._slots.popleft()
            if slot.entering:
                self._enter(slot.entering)
            self._leaving += [self._going[batch] for batch in slot.leaving if batch in self._going]
            self._wave = self._steps(slot)

    def _enter(self, shapes: Mapping[int, BatchShape]) -> None:
        """Admits batches, by number."""
        entered = self._admission.enter(
            list(shapes.values()), is_first=not self._going, numbers=list(shapes)
        )
        for running in entered:
            self._going[running.number] = running
            running.closing.callback(self._forget, running)

    def _forget(self, running: Running) -> None:
        """Forgets a finished batch."""
        del self._going[running.number]
        self._dropped.discard(running)
        for key in [key for key in self._numbers if key[0] is running]:
            del self._numbers[key]

    def _steps(self, slot: Slot) -> Iterator[Step]:
        told = [(self._going[step.batch], step.token) for step in slot.steps]
        self._numbers |= dict.fromkeys(told, slot.number)
        for layer in range(self._layers if told else 0):
            is_head = layer + 1 == self._layers and self._plan.config.has_head
            for running, token in told:
                if (token >= 0 or not is_head) and running not in self._dropped:
                    yield Step(token, layer, running, self._visit)
            self._visit += 1

    def drop(self, batch: Running) -> None:
        """Leaves out all further steps of a batch."""
        self._dropped.add(batch)

    def enter(self, going: Sequence[Running], max_batches: int | None) -> Sequence[Running]:
        """Batches enter with their slots."""
        return ()

    def leaving(self) -> Sequence[Running]:
        """Returns the batches that have left since the last call."""
        leaving, self._leaving = self._leaving, []
        return leaving

    def number_of(self, step: Step) -> int:
        """Returns the number of a step's slot."""
        return self._numbers[step.batch, step.token]

    def wait(self) -> bool:
        """Waits until there is another slot; returns false if none will come."""
        with self._changed:
            self._changed.wait_for(lambda: self._slots or self._is_ended)
            return bool(self._slots)

    def steps_of(self, number: int) -> tuple[Told, ...]:
        """Returns the steps of a slot that was told lately; () of one that never is."""
        return self._steps_of.get(number, ())

    def sent(self, shift: int, stages: int) -> int | None:
        """Returns the size of the largest slot that some stage sends on in a shift; waits until
        that is known. None where no stage ever sends anything again.

        In shift n, stage s sends slot n - s on.
        """
        numbers = [shift - stage for stage in range(stages - 1)]
        with self._changed:
            self._changed.wait_for(lambda: self._count > shift or self._is_ended)
            if numbers[-1] >= self._count:
                return None
            self._steps_of.pop(numbers[-1] - REMEMBERED, None)
        return max(sum(step.size for step in self.steps_of(number)) for number in numbers)


class StageLoop(BlockLoop):
    """Walks the steps of a stage's slots. Which batches enter and leave is decided
    elsewhere, where the tokens of the last stage are known."""

    def __init__(self, plan: BlockPlan, backend: Backend, ledger: Ledger, slots: Slots) -> None:
        super().__init__(plan, backend, ledger, arrivals=slots, steps=slots)
        self._slots = slots

    def _do(self, step: Step) -> None:
        if step.layer == 0:  # others wait for the slot before, while this one may wait for them
            self._retire_latest(step)
        for running in self._slots.leaving():
            if running.is_going:  # it has not had all tokens that it might have had
                self._retire_latest(step)
                self._leave(running, step)
        super()._do(step)


def told(steps: Sequence[tuple[Running, int]]) -> tuple[Told, ...]:
    """Returns the message to stages about batches and their tokens."""
    return tuple(
        Told(running.number, token, running.rows * running.span(token).tokens)
        for running, token in steps
    )
