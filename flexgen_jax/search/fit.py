"""Checks whether a plan fits into the budgets, and finds the nearest one that does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from flexgen_jax.policy.plan import BlockPlan
from flexgen_jax.policy.policy import TIERS, Placement, Policy, Tier, Workload
from flexgen_jax.policy.shapes import BlockShape, Setting
from flexgen_jax.search.memory import peak_bytes

GIB = 1 << 30


@dataclass(frozen=True)
class Budgets:
    """Bytes allowed in each tier, None for no limit of its own.

    shared: bytes that device and host may take together if they are one RAM, else None.
    """

    device: int | None = None
    host: int | None = None
    disk: int | None = None
    shared: int | None = None

    def allowed(self, tier: Tier) -> int | None:
        limit: int | None = getattr(self, tier)
        return limit

    def spare_ram(self, needed: dict[Tier, int]) -> int:
        """Returns the host bytes that a plan leaves free; needed: the plan's bytes by tier."""
        rooms = []
        if self.host is not None:
            rooms.append(self.host - needed["host"])
        if self.shared is not None:
            rooms.append(self.shared - needed["device"] - needed["host"])
        return max(0, min(rooms, default=0))

    def shortfalls(self, needed: dict[Tier, int]) -> list[str]:
        """Returns one sentence for every limit that a plan exceeds; needed: its bytes by tier."""
        sentences = []
        for tier in TIERS:
            limit = self.allowed(tier)
            if limit is not None and needed[tier] > limit:
                flag = f"raise --{tier}-memory"
                if tier == "disk":
                    flag = (
                        "raise --disk-space, delete what other models left in the offload folder, "
                        "choose a larger disk with --offload-dir"
                    )
                sentences.append(
                    f"{human(needed[tier])} needed in tier {tier}, {human(limit)} allowed; "
                    f"{flag} or move something out of that tier"
                )
        together = needed["device"] + needed["host"]
        if self.shared is not None and together > self.shared and not sentences:
            sentences.append(
                f"{human(together)} needed in RAM (tiers device and host together), "
                f"{human(self.shared)} available; move something to disk"
            )
        return sentences


def human(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB // 10 else f"{nbytes / (1 << 20):.1f} MiB"


@dataclass(frozen=True)
class Fitter:
    """Searches placements of one model and workload under budgets."""

    setting: Setting
    workload: Workload
    budgets: Budgets

    def needed(self, policy: Policy) -> dict[Tier, int]:
        shape = BlockShape.of(policy, self.workload)
        return peak_bytes(BlockPlan(self.setting, policy, shape))

    def fits(self, policy: Policy) -> bool:
        return not self.budgets.shortfalls(self.needed(policy))

    def fill_fastest(self, policy: Policy) -> Policy | None:
        """Returns the policy with maximal use of the fastest tiers, or None if none fits.

        Activations are placed first, then the cache, then the weights; all else is kept.
        """
        slowest = Placement(0.0, 0.0)
        best = replace(policy, weights=slowest, cache=slowest, activations=slowest)
        if not self.fits(best):
            # Reading from disk needs buffers; without them a small model may still fit.
            best = replace(policy, weights=Placement(), cache=Placement(), activations=Placement())
            return best if self.fits(best) else None
        for name in ("activations", "cache", "weights"):
            best = self._raise(best, name)
        return best

    def _raise(self, policy: Policy, name: str) -> Policy:
        """Returns the policy with one part in the fastest tiers that fit, in steps of 1 %."""

        def at(device: int, host: int) -> Policy:
            change: dict[str, Any] = {name: Placement(device / 100, host / 100)}
            return replace(policy, **change)

        device = _largest(100, lambda d: self.fits(at(d, 100 - d)))
        if device >= 0:
            return at(device, 100 - device)
        device = max(0, _largest(100, lambda d: self.fits(at(d, 0))))
        host = max(0, _largest(100 - device, lambda h: self.fits(at(device, h))))
        return at(device, host)

    def largest_batches(self, policy: Policy) -> Policy | None:
        """Halves a policy's batches until `fill_fastest` finds a policy; None if it never does."""
        while True:
            fitting = self.fill_fastest(policy)
            if fitting is not None or policy.batch_size * policy.num_batches == 1:
                return fitting
            if policy.num_batches > 1:
                policy = replace(policy, num_batches=policy.num_batches // 2)
            else:
                policy = replace(policy, batch_size=policy.batch_size // 2)

    def advice(self, policy: Policy) -> str:
        """Returns a sentence that gives the nearest plan that fits, as flags."""
        nearest = self.fill_fastest(policy) or self.largest_batches(policy)
        if nearest is None:
            lowest = replace(
                policy,
                batch_size=1,
                num_batches=1,
                weights=Placement(0, 0),
                cache=Placement(0, 0),
                activations=Placement(0, 0),
            )
            tiers = ", ".join(f"{human(n)} {tier}" for tier, n in self.needed(lowest).items())
            return f"no plan fits; the smallest, one sequence from disk, needs {tiers}"
        percent = " ".join(f"{x:g}" for x in nearest.percent)
        return (
            f"the nearest plan that fits: --percent {percent} "
            f"--batch-size {nearest.batch_size} --num-batches {nearest.num_batches}"
        )


def _largest(limit: int, fits: Callable[[int], bool]) -> int:
    """Returns the largest number up to `limit` that fits, or -1; below it, all are taken to fit."""
    if fits(limit):
        return limit
    low, high = -1, limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
