"""Batches that wait to enter a run: those of a plan, for dry runs and predictions."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence

from flexgen_jax.policy.plan import BlockPlan
from flexgen_jax.policy.schedule import PREFIX


class Planned:
    """The batches of a plan, which enter as soon as the schedule lets them.

    tokens: those of all batches' steps from the prompt's last chunk on; by default, all up to each
    one's length.
    """

    def __init__(self, plan: BlockPlan, tokens: Sequence[int] | None = None) -> None:
        self._plan, self._tokens = plan, tokens
        self._waiting = deque(plan.batches)

    def enter(self, going: Collection[int], most: int | None) -> Mapping[int, Sequence[int]]:
        if PREFIX in going:
            return {}
        if PREFIX in self._waiting:
            self._waiting.remove(PREFIX)
            return {PREFIX: self._plan.tokens(PREFIX)}
        count = len(self._waiting) if most is None else min(most, len(self._waiting))
        return {number: self._tokens_of(number) for number in self._taken(count)}

    def _taken(self, count: int) -> list[int]:
        return [self._waiting.popleft() for _ in range(count)]

    def _tokens_of(self, number: int) -> Sequence[int]:
        tokens = self._plan.tokens(number)
        return [*range(tokens.start, 0), *self._tokens] if self._tokens else tokens

    def wait(self) -> bool:
        return False

    def leave(self, batch: int) -> None:
        """The plan keeps its batches."""


class LastOneLate(Planned):
    """The batches of a plan, of which the last one enters when the others are nearly done.

    late: the wave with which it enters, counted from 0.
    """

    def __init__(self, plan: BlockPlan, tokens: Sequence[int], late: int) -> None:
        super().__init__(plan, tokens)
        self._late = late
        self._waves = -1

    def enter(self, going: Collection[int], most: int | None) -> Mapping[int, Sequence[int]]:
        if PREFIX in going or PREFIX in self._waiting:
            return super().enter(going, most)
        self._waves += 1
        count = len(self._waiting) - (self._waves < self._late)
        return {number: self._tokens_of(number) for number in self._taken(count)}
