"""What a run measured: bytes over each link, busy time of each resource, peaks of each tier."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, get_args

from flexgen_jax.config import UserError
from flexgen_jax.policy.policy import TIERS, Tier

Link = Literal["disk_read", "disk_write", "host_to_device", "device_to_host"]
Resource = Literal[
    "disk_read", "disk_write", "host_to_device", "device_to_host", "compute", "host_compute"
]
LINKS: tuple[Link, ...] = get_args(Link)
RESOURCES: tuple[Resource, ...] = get_args(Resource)


class BudgetError(UserError, MemoryError):
    """A plan, or a run, needs more bytes in a tier than its budget; says which and the way out."""


class Metrics:
    """Counters of one run. Safe to use from the threads on which transfers complete."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        with self._lock:
            self.bytes: dict[Link, int] = dict.fromkeys(LINKS, 0)
            self._decode_bytes: dict[Link, int] = dict.fromkeys(LINKS, 0)
            self._is_decoding = False
            self._busy: dict[Resource, float] = dict.fromkeys(RESOURCES, 0.0)
            self._active: dict[Resource, int] = dict.fromkeys(RESOURCES, 0)
            self._since: dict[Resource, float] = dict.fromkeys(RESOURCES, 0.0)

    def begin(self, resource: Resource) -> None:
        """The resource starts one more operation."""
        with self._lock:
            if self._active[resource] == 0:
                self._since[resource] = time.perf_counter()
            self._active[resource] += 1

    def end(self, resource: Resource) -> None:
        """The resource finished one of its operations."""
        with self._lock:
            # An operation begun before a reset is not part of this run.
            if self._active[resource] > 0:
                self._active[resource] -= 1
                if self._active[resource] == 0:
                    self._busy[resource] += time.perf_counter() - self._since[resource]

    def moved(self, link: Link, nbytes: int) -> None:
        with self._lock:
            self.bytes[link] += nbytes
            if self._is_decoding:
                self._decode_bytes[link] += nbytes

    def enter(self, is_decoding: bool) -> None:
        """From now on bytes are those of decoding, or of prefill."""
        with self._lock:
            self._is_decoding = is_decoding

    def report(self) -> dict[str, Any]:
        """{"bytes": {link: bytes}, "decode_bytes": of transfers that began while decoding,
        "busy_s": {resource: seconds}}; busy time is the time in which at least one operation was
        under way."""
        with self._lock:
            return {
                "bytes": dict(self.bytes),
                "decode_bytes": dict(self._decode_bytes),
                "busy_s": dict(self._busy),
            }


class Ledger:
    """Bytes in use in each tier, held to budgets."""

    def __init__(self, budgets: Mapping[Tier, int | None]) -> None:
        self._lock = threading.Lock()
        self._budgets = dict(budgets)
        self._used = dict.fromkeys(TIERS, 0)
        self._peak = dict.fromkeys(TIERS, 0)

    def take(self, tier: Tier, nbytes: int) -> None:
        """Counts an allocation; raises `BudgetError` before it where the budget is exceeded."""
        with self._lock:
            used = self._used[tier] + nbytes
            budget = self._budgets.get(tier)
            if budget is not None and used > budget:
                raise BudgetError(
                    f"{tier} memory: {used} bytes needed, {budget} allowed by {budget_flag(tier)}"
                )
            self._used[tier] = used
            self._peak[tier] = max(self._peak[tier], used)

    def give(self, tier: Tier, nbytes: int) -> None:
        with self._lock:
            self._used[tier] -= nbytes

    @contextmanager
    def holding(self, tier: Tier, nbytes: int) -> Iterator[None]:
        self.take(tier, nbytes)
        try:
            yield
        finally:
            self.give(tier, nbytes)

    @property
    def used(self) -> dict[Tier, int]:
        with self._lock:
            return dict(self._used)

    @property
    def peak(self) -> dict[Tier, int]:
        with self._lock:
            return dict(self._peak)

    def reset_peak(self) -> None:
        with self._lock:
            self._peak = dict(self._used)


def budget_flag(tier: Tier) -> str:
    return "--disk-space" if tier == "disk" else f"--{tier}-memory"
