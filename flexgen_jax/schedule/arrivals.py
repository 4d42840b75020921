"""Batches that wait to enter a run: those of a plan, for dry runs and predictions."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from flexgen_jax.policy.plan import BlockPlan
from flexgen_jax.schedule.admission import block_of
from flexgen_jax.schedule.running import Running


class Planned:
    """The batches of a plan, which enter as soon as the schedule lets them.

    tokens: those of all batches' steps from the prompt's last chunk on; by default, all up to each
    one's length.
    """

    def __init__(self, plan: BlockPlan, tokens: Sequence[int] | None = None) -> None:
        self.batches = block_of(plan)
        self._waiting = deque(self.batches)
        for running in self.batches if tokens else ():
            if not running.is_prefix:
                running.left = deque([*range(running.tokens.start, 0), *(tokens or ())])

    def enter(self, going: Sequence[Running], max_batches: int | None) -> Sequence[Running]:
        if any(running.is_prefix for running in going):
            return ()
        prefixes = sum(running.is_prefix for running in self._waiting)
        if prefixes:
            return self._take(prefixes)
        return self._take(
            len(self._waiting) if max_batches is None else min(max_batches, len(self._waiting))
        )

    def _take(self, count: int) -> list[Running]:
        return [self._waiting.popleft() for _ in range(count)]

    def wait(self) -> bool:
        return False


class Again(Planned):
    """The batches of a plan. When all have left, the prompts of the same batches enter."""

    def __init__(self, plan: BlockPlan, tokens: Sequence[int]) -> None:
        super().__init__(plan, tokens)
        self._second = Planned(plan, (0,))

    def enter(self, going: Sequence[Running], max_batches: int | None) -> Sequence[Running]:
        if self._waiting:
            return super().enter(going, max_batches)
        return () if going else self._second.enter(going, max_batches)


class Alone(Planned):
    """The prompts of a plan's largest batch, which enters after all other batches have left."""

    def __init__(self, plan: BlockPlan) -> None:
        super().__init__(plan, (0,))
        batches = [running for running in self.batches if not running.is_prefix]
        largest = max(batches, key=lambda running: running.shape.rows * running.shape.prompt_len)
        self._waiting = deque(running for running in self.batches if running.is_prefix)
        self._waiting.append(largest)


class LastOneLate(Planned):
    """The batches of a plan; the last one enters when the others are nearly finished.

    late: the wave of its entry, from 0.
    """

    def __init__(self, plan: BlockPlan, tokens: Sequence[int], late: int) -> None:
        super().__init__(plan, tokens)
        self._late = late
        self._waves = -1

    def enter(self, going: Sequence[Running], max_batches: int | None) -> Sequence[Running]:
        has_prefix = any(running.is_prefix for running in (*going, *self._waiting))
        if has_prefix:
            return super().enter(going, max_batches)
        self._waves += 1
        return self._take(max(0, len(self._waiting) - (self._waves < self._late)))
