"""The memory ledger: bytes in use in each tier, within budgets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from flexgen_jax.errors import UserError
from flexgen_jax.policy.policy import TIERS, Tier


class BudgetError(UserError, MemoryError):
    """A plan or run needs more bytes in a tier than its budget; the message states the way out."""


class Ledger:
    """Counts the bytes in use in each tier, and their peak, and refuses what exceeds a budget."""

    def __init__(self, budgets: Mapping[Tier, int | None]) -> None:
        self._budgets = dict(budgets)
        self._used = dict.fromkeys(TIERS, 0)
        self._peak = dict.fromkeys(TIERS, 0)
        self._relief: dict[Tier, tuple[int, Callable[[int], None]]] = {}

    @contextmanager
    def relieved(self, tier: Tier, limit: int, relieve: Callable[[int], None]) -> Iterator[None]:
        """Calls `relieve` with the bytes to release before more than `limit` bytes are in use, if
        that many can be."""
        self._relief[tier] = limit, relieve
        try:
            yield
        finally:
            del self._relief[tier]

    def room(self, tier: Tier) -> int | None:
        """Returns the bytes that can be reserved without relief; None if it never
        is."""
        return self._relief[tier][0] - self._used[tier] if tier in self._relief else None

    def reserve(self, tier: Tier, nbytes: int) -> None:
        """Reserves bytes for an allocation; raises `BudgetError` if they exceed the budget."""
        room = self.room(tier)
        if room is not None and nbytes > room:
            self._relief[tier][1](nbytes - room)
        total = self._used[tier] + nbytes
        budget = self._budgets.get(tier)
        if budget is not None and total > budget:
            raise BudgetError(
                f"{tier} memory: {total} bytes are needed, but {budget_flag(tier)} allows {budget}"
            )
        self._used[tier] = total
        self._peak[tier] = max(self._peak[tier], total)

    def release(self, tier: Tier, nbytes: int) -> None:
        self._used[tier] -= nbytes

    @contextmanager
    def reserving(self, tier: Tier, nbytes: int) -> Iterator[None]:
        self.reserve(tier, nbytes)
        try:
            yield
        finally:
            self.release(tier, nbytes)

    @property
    def used(self) -> dict[Tier, int]:
        return dict(self._used)

    @property
    def peak(self) -> dict[Tier, int]:
        return dict(self._peak)

    def reset_peak(self) -> None:
        self._peak = dict(self._used)


def budget_flag(tier: Tier) -> str:
    return "--disk-space" if tier == "disk" else f"--{tier}-memory"
