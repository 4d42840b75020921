"""From the linear program's fractions to a plan that fits: solve, round, compute exact peaks, and
solve again with smaller budgets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import floor
from typing import Any, NamedTuple

from flexgen_jax.policy.plan import BlockPlan
from flexgen_jax.policy.policy import Placement, Policy, Tier
from flexgen_jax.search.fit import Budgets
from flexgen_jax.search.linear_program import Solution
from flexgen_jax.search.memory import peak_bytes
from flexgen_jax.search.problem import Problem

GRAIN = 1000
"""Fractions are rounded to multiples of 1 / GRAIN."""

TRIES = 8
"""How often the linear program is solved because exact peaks exceed its estimate."""


class Placed(NamedTuple):
    """The plan of a policy's largest batch group, its exact peaks, and the linear program's
    budgets."""

    plan: BlockPlan
    needed: dict[Tier, int]
    budgets: Budgets


Peaks = dict[Policy, dict[Tier, int]]
"""The peaks of policies in bytes by tier, exact unless they are beyond the budgets."""


def fitted(
    problem: Problem,
    policy: Policy,
    solve_within: Callable[[Budgets], Solution | None],
    peaks: Peaks | None = None,
    first: Solution | None = None,
    start: Budgets | None = None,
) -> Placed | None:
    """Returns the plan of a policy with rounded fractions and exact peaks within the budgets.

    If the peaks exceed the budgets, the linear program is solved again with smaller ones. Returns
    None if that finds no policy. solve_within: solves it; first: its solution within all of the
    budgets, if that is known; peaks: peaks that were computed before; others are added; start:
    smaller initial budgets instead of `first`.
    """
    first = first if start is None else None
    budgets, peaks = start or problem.budgets, {} if peaks is None else peaks
    for _ in range(TRIES):
        solution, first = first or solve_within(budgets), None
        if solution is None:
            return None
        plan = problem.plan(rounded(policy, solution))
        if plan.policy not in peaks:
            peaks[plan.policy] = peak_bytes(plan, problem.budgets.shortfalls)
        needed = peaks[plan.policy]
        if not problem.budgets.shortfalls(needed):
            return Placed(plan, needed, budgets)
        budgets = reduced(budgets, problem.budgets, needed)
    return None


def rounded(policy: Policy, solution: Solution) -> Policy:
    """Returns the policy with a solution's fractions in whole grains, rounded to slower tiers. The
    CPU has no experts to compute if all weights are on the device."""
    placements: dict[str, Any] = {}
    for name, letter in (("weights", "w"), ("cache", "c"), ("activations", "h")):
        shares = solution.fractions
        device = floor(shares[letter + "g"] * GRAIN + 1e-3) / GRAIN
        host = floor((shares[letter + "g"] + shares[letter + "c"]) * GRAIN + 1e-3) / GRAIN
        placements[name] = Placement(device, round(host - device, 6))
    if policy.host_experts and placements["weights"].device == 1:
        placements["host_experts"] = 0.0
    return replace(policy, **placements)


def reduced(budgets: Budgets, asked: Budgets, needed: dict[Tier, int]) -> Budgets:
    """Returns `budgets` for the linear program, less the excess of exact peaks over real budgets.

    asked: the real budgets; needed: the exact peaks by tier.
    """

    def less(limit: int | None, allowed: int | None, nbytes: int) -> int | None:
        if limit is None or allowed is None or nbytes <= allowed:
            return limit
        return max(0, limit - int(1.2 * (nbytes - allowed)) - allowed // GRAIN)

    return Budgets(
        device=less(budgets.device, asked.device, needed["device"]),
        host=less(budgets.host, asked.host, needed["host"]),
        disk=less(budgets.disk, asked.disk, needed["disk"]),
        shared=less(budgets.shared, asked.shared, needed["device"] + needed["host"]),
    )
