"""Policy search (FlexGen, section 4.3).

Batches, and other choices that are not linear, are enumerated. For each, a linear program chooses
the fractions, and the best few policies are checked by exact peaks and the simulator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import floor
from statistics import geometric_mean

from flexgen_jax.models.spec_of_config import model_spec
from flexgen_jax.policy.placement import page_cached
from flexgen_jax.policy.policy import Placement, Policy, Tier
from flexgen_jax.policy.shapes import BlockShape
from flexgen_jax.search.candidates import Candidate, candidates, solution_of
from flexgen_jax.search.cost_model import block_terms
from flexgen_jax.search.fit import Budgets
from flexgen_jax.search.linear_program import weight_bytes
from flexgen_jax.search.memory import peak_bytes
from flexgen_jax.search.problem import Plan, Problem
from flexgen_jax.search.rounding import GRAIN, Peaks, Placed, fitted
from flexgen_jax.search.simulate import Prediction, simulate

CHECKED = 3
"""Number of plans to find among the linear program's best candidates; each is simulated."""

SAMPLED_STEPS = 1_500
"""Approximate number of steps to simulate; a longer run is simulated for a sample of its tokens."""

MAX_EXACT_TENSORS = 10_000
"""Of a model with more tensors, exact peaks take seconds: the first candidate's excess is
subtracted from the other candidates' budgets."""

SMALLER_GROUP_LOSS = 0.05
"""Loss of throughput that a smaller batch group may cost, if the number of sequences is free."""

STEADY = 0.05
"""Relative variation of a disk's rate that counts as steady."""

FASTER = 4.0
"""Most times that a disk is taken to be faster or slower than usual."""


def evaluate(problem: Problem, policy: Policy) -> Plan:
    """Returns the simulator's prediction for a policy and the problem's workload."""
    plan = problem.plan(policy)
    return _evaluated(problem, Placed(plan, peak_bytes(plan), problem.budgets))


def _evaluated(problem: Problem, placed: Placed) -> Plan:
    plan, needed = placed.plan, placed.needed
    policy, costs = plan.policy, problem.costs(plan.policy)
    batches, layers = plan.shape.batch_sizes, len(plan.spec.decoders)
    sample = max(1, SAMPLED_STEPS // (layers * len(batches)))
    spare = problem.budgets.spare_ram(needed)
    cached = page_cached(costs.spec, costs.formats, plan.tiers, spare)
    work = problem.of_block(policy).typical
    shape = BlockShape.of(policy, work)
    typical = plan if shape == plan.shape else costs.plan(shape)
    block = simulate(costs, typical, cached, sample)
    sequences = sum(batches)
    num_sequences = problem.workload.num_sequences or sequences
    count, remainder = divmod(num_sequences, sequences)
    blocks = [block] * count
    if remainder:  # the last batch group moves the same weights
        last = BlockShape.of(policy, replace(work, num_sequences=remainder))
        blocks.append(simulate(costs, costs.plan(last), cached, sample))
    return _plan(problem, policy, sequences, num_sequences, needed, blocks)


def _plan(
    problem: Problem,
    policy: Policy,
    sequences: int,
    num_sequences: int,
    needed: dict[Tier, int],
    blocks: Sequence[Prediction],
) -> Plan:
    """Adds up the predictions of all blocks; the first candidate must be a whole batch group."""
    prefill_s = sum(block.prefill_s for block in blocks)
    decode_s = sum(block.decode_s for block in blocks)
    return Plan(
        policy=policy,
        block_sequences=sequences,
        num_sequences=num_sequences,
        prefill_s=prefill_s,
        decode_s=decode_s,
        latency_s=blocks[0].total_s,
        throughput=num_sequences * problem.workload.typical.tokens_each / (prefill_s + decode_s),
        peak_bytes=needed,
        busy_s={name: sum(block.busy_s[name] for block in blocks) for name in blocks[0].busy_s},
        moved_bytes={name: sum(block.bytes[name] for block in blocks) for name in blocks[0].bytes},
        binding=blocks[0].binding,
        written=_written(problem, policy) * num_sequences / sequences,
    )


def _written(problem: Problem, policy: Policy) -> float:
    """Returns the bytes that a whole block writes to the disk. The simulator does not know them: it
    skips tokens that seal blocks."""
    work = problem.of_block(policy).typical
    terms = block_terms(problem.costs(policy), work)
    shares = (("w", policy.weights), ("c", policy.cache), ("h", policy.activations))
    return terms.written.at({f"{name}d": placement.disk for name, placement in shares})


def search(problem: Problem) -> list[Plan]:
    """Returns the best plans, the chosen one first; none if nothing fits or meets the limits.

    Prompts are cut into the largest chunks that have a plan: every chunk is another pass
    over the weights.
    """
    longest, plans = problem.workload.prompt_len, list[Plan]()
    for number, chunk in enumerate(problem.choices.prefill_chunks):
        if number == 0 or chunk < longest:
            plans = _search(replace(problem, base=replace(problem.base, prefill_chunk=chunk)))
        if plans:
            break
    return plans


def _search(problem: Problem) -> list[Plan]:
    """Searches with chunks of the base's size.

    If the disk's rate varies, the best plans for its slowest, usual and fastest rate are predicted
    at each of these rates. The plan with the best geometric mean of throughputs comes first.
    """
    low, high = problem.hw.disk_range
    slower_problems = [
        replace(problem, hw=problem.hw.with_disk(factor))
        for factor in (max(low, 1 / FASTER), min(high, FASTER))
        if abs(factor - 1) > STEADY
    ]
    if not slower_problems:
        return _search_once(problem)
    plans = {plan.policy: plan for plan in _search_once(problem)}
    for policy in [
        plan.policy
        for slower_problem in slower_problems
        for plan in _search_once(slower_problem)[:1]
    ]:
        if policy not in plans:
            plans[policy] = evaluate(problem, policy)
    scores = {
        policy: geometric_mean(
            [
                plan.throughput,
                *(
                    evaluate(slower_problem, policy).throughput
                    for slower_problem in slower_problems
                ),
            ]
        )
        for policy, plan in plans.items()
        if problem.is_met(plan)
    }
    return _ranked(problem, [plans[policy] for policy in scores], scores)


def _search_once(problem: Problem) -> list[Plan]:
    """Searches for the rates of the problem's profile."""
    plans: list[Plan] = []
    looked_at: set[Policy] = set()
    peaks: Peaks = {}
    is_large = len(model_spec(problem.setting.config).tensors) > MAX_EXACT_TENSORS
    start: Budgets | None = None
    for candidate in _shortlist(problem, candidates(problem)):
        placed = fitted(
            problem=problem,
            policy=candidate.policy,
            solve_within=partial(solution_of, problem, candidate.policy),
            peaks=peaks,
            first=candidate.solution,
            start=start,
        )
        if placed is not None and is_large and placed.budgets != problem.budgets:
            start = placed.budgets
        if placed is None or placed.plan.policy in looked_at:
            continue
        looked_at.add(placed.plan.policy)
        plan = _evaluated(problem, placed)
        cached = _with_expert_cache(problem, placed)
        if cached is not None:
            plan = max(plan, _evaluated(problem, cached), key=lambda plan: plan.throughput)
        plans += [plan] if problem.is_met(plan) else []
        if len(plans) == CHECKED or len(looked_at) == 4 * CHECKED:
            break
    ranked = _ranked(problem, plans, {plan.policy: plan.throughput for plan in plans})
    return _with_all_copied(problem, ranked)


def _with_all_copied(problem: Problem, plans: list[Plan]) -> list[Plan]:
    """Returns plans, the best first, with one more if the best computes experts on the CPU although
    copying all of them is faster."""
    if not plans or not plans[0].policy.host_experts or problem.base.host_experts is not None:
        return plans
    plan = problem.plan(replace(plans[0].policy, host_experts=0.0))
    needed = peak_bytes(plan)
    if problem.budgets.shortfalls(needed):
        return plans
    copied = _evaluated(problem, Placed(plan, needed, problem.budgets))
    is_better = copied.throughput > plans[0].throughput and problem.is_met(copied)
    return [copied, *plans] if is_better else plans


def _with_expert_cache(problem: Problem, placed: Placed) -> Placed | None:
    """Returns a plan in which half of the device's experts make room for a cache of experts; None
    if it does not fit, or if nothing is known of how often experts are chosen: if all are chosen
    equally often, a cache saves no more copies than experts that always stay on the device."""
    plan = placed.plan
    policy, formats = plan.policy, plan.formats
    if plan.unified or not plan.setting.experts.shares or policy.expert_cache_bytes:
        return None
    total, _ = weight_bytes(plan.config, formats)
    shared = sum(formats.weight(tensor).nbytes for (tensor,) in plan.spec.placed_units[0])
    nbytes = int(policy.weights.device * total - shared) // 2
    if nbytes <= 0 or policy.weights.device == 1:
        return None
    device = floor((policy.weights.device - nbytes / total) * GRAIN) / GRAIN
    host = policy.weights.host + policy.weights.device - device
    fewer = replace(policy, weights=Placement(device, round(host, 6)))
    needed = peak_bytes(problem.plan(fewer))
    allowed = problem.budgets.allowed("device")
    if allowed is not None:  # more experts on the host also take more room while they are copied
        nbytes = min(nbytes, allowed - needed["device"])
    needed["device"] += max(0, nbytes)
    if nbytes <= 0 or problem.budgets.shortfalls(needed):
        return None
    cached = problem.plan(replace(fewer, expert_cache_bytes=nbytes))
    return Placed(cached, needed, placed.budgets)


def _ranked(problem: Problem, plans: list[Plan], scores: Mapping[Policy, float]) -> list[Plan]:
    """Returns plans, the best first; scores: throughputs to compare them by.

    If the number of sequences is free, plans within a small loss of the best come first, smallest
    first.
    """
    if problem.min_throughput is not None:
        return sorted(plans, key=lambda plan: plan.latency_s)
    ordered = sorted(plans, key=lambda plan: -scores[plan.policy])
    if problem.workload.num_sequences or not plans:
        return ordered
    enough = (1 - SMALLER_GROUP_LOSS) * scores[ordered[0].policy]
    close = [plan for plan in ordered if scores[plan.policy] >= enough]
    close.sort(key=lambda plan: plan.block_sequences)
    return close + [plan for plan in ordered if plan not in close]


def _shortlist(problem: Problem, fitting: list[Candidate]) -> list[Candidate]:
    """Returns the candidates to simulate, in order."""
    if not fitting:
        return []
    if problem.min_throughput is not None:
        enough = [c for c in fitting if c.throughput >= problem.min_throughput]
        return sorted(enough, key=lambda c: c.solution.total_s)
    if not problem.workload.num_sequences:
        close = [
            c for c in fitting if c.throughput >= (1 - SMALLER_GROUP_LOSS) * fitting[0].throughput
        ]
        close.sort(key=lambda c: (c.sequences, -c.throughput))
        # The simulator decides between the smallest, the fastest and one in the middle.
        first = [close[0], fitting[0], close[len(close) // 2]]
        return first + [c for c in fitting if c not in first]
    # Next, the best candidate that differs in using the CPU for experts, or not.
    best, *others = fitting
    uses_host = bool(best.policy.host_experts)
    others.sort(key=lambda c: bool(c.policy.host_experts) == uses_host)
    return [best, *others[:1], *(c for c in fitting if c not in (best, *others[:1]))]
