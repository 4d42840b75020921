"""Policy search (FlexGen, section 4.3).

Batches, and other choices that are not linear, are enumerated. For each, a linear program chooses
the fractions, and the best few policies are checked by exact peaks and the simulator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import ceil, floor
from statistics import geometric_mean
from typing import Any, NamedTuple

from flexgen_jax.models.config import ModelConfig
from flexgen_jax.policy.cost_model import Costs, block_terms
from flexgen_jax.policy.fit import Budgets
from flexgen_jax.policy.hardware import HardwareProfile
from flexgen_jax.policy.linear_program import Solution, memory_terms, solve
from flexgen_jax.policy.memory import peak_bytes
from flexgen_jax.policy.placement import page_cached
from flexgen_jax.policy.plan import BlockPlan, BlockShape
from flexgen_jax.policy.policy import (
    Attention,
    Placement,
    Policy,
    Tier,
    Workload,
    generated_blocks,
)
from flexgen_jax.policy.simulate import Prediction, simulate

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
NUM_BATCHES = (1, 2, 4, 8, 16, 32)
CHECKED = 3
"""Number of plans to find among the linear program's best candidates; each is simulated."""

SAMPLED_STEPS = 1_500
"""Approximate number of steps to simulate; a longer run is simulated for a sample of its tokens."""

SLACK = 0.05
"""Loss of throughput for which a smaller block is preferred, if the number of sequences is free."""

STEADY = 0.05
"""Part of a disk's rate by which it may vary and count as steady."""

FASTER = 4.0
"""Most times that a disk is taken to be faster or slower than usual."""

GAIN = 1.01
"""Factor of throughput that smaller KV blocks must exceed to be chosen, since the linear program
does not know what their additional reads and programs cost."""

GRAIN = 1000
"""Fractions are rounded to multiples of 1 / GRAIN."""


DAY_S = 86_400

LEAN = 0.9
"""The share of a limit of written bytes that the linear program may use, since the simulator may
find less time for them."""


@dataclass(frozen=True)
class Choices:
    """Values that the search may choose from, in the order of preference."""

    weight_bits: tuple[int, ...] = (16,)
    cache_bits: tuple[int, ...] = (16,)
    attentions: tuple[Attention, ...] = ("host", "device")
    sparsities: tuple[float, ...] = (1.0,)
    kv_block_tokens: tuple[int, ...] = (32, 16, 8, 4)
    prefill_chunks: tuple[int, ...] = (2048, 512, 128)

    @classmethod
    def keeping(cls, policy: Policy) -> Choices:
        """Returns choices that keep a policy's bits, sparsity and, unless it is "auto", attention.

        KV blocks may be smaller than the policy's, down to an eighth, since every sequence has an
        open one; where nothing fits, chunks of prompts may be, too.
        """
        most, chunk = policy.kv_block_tokens, policy.prefill_chunk
        return cls(
            weight_bits=(policy.weight_bits,),
            cache_bits=(policy.cache_bits,),
            attentions=cls.attentions if policy.attention == "auto" else (policy.attention,),
            sparsities=(policy.attention_sparsity,),
            kv_block_tokens=tuple(most >> n for n in range(4) if most >> n),
            prefill_chunks=tuple(chunk >> n for n in (0, 2, 4) if chunk >> n),
        )


@dataclass(frozen=True)
class Plan:
    """A policy, and what it is predicted to do.

    block_sequences, num_sequences: sequences of one block, and of the workload; prefill_s,
    decode_s, total_s: seconds of all blocks of the workload; latency_s: seconds of one block;
    throughput: generated or scored tokens per second; peak_bytes: computed, by tier; busy_s:
    seconds by resource; binding: the resource that is busy for the longest time in a block;
    written: bytes that are written to the disk, but for weights that are stored once.
    """

    policy: Policy
    block_sequences: int
    num_sequences: int
    prefill_s: float
    decode_s: float
    latency_s: float
    throughput: float
    peak_bytes: dict[Tier, int]
    busy_s: dict[str, float]
    binding: str
    written: float

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.decode_s

    @property
    def written_a_day(self) -> float:
        """Bytes that are written to the disk in a day of such work."""
        return self.written / self.total_s * DAY_S


@dataclass(frozen=True)
class Candidate:
    """The linear program's solution for one choice of everything else."""

    policy: Policy
    solution: Solution
    sequences: int
    throughput: float


@dataclass(frozen=True)
class Problem:
    """The task of a search: model, machine, limits and workload.

    workload: its `num_sequences` may be 0, for as many as are best.
    base: a policy with everything that is not searched: schedule, overlap.
    max_latency: seconds that a block may take.
    min_throughput: token/s that are enough; the search then looks for the lowest latency.
    write_limit: bytes that may be written to the disk a day, which wears it.
    """

    config: ModelConfig
    dtype: str
    hw: HardwareProfile
    budgets: Budgets
    unified: bool
    workload: Workload
    base: Policy = field(default_factory=Policy)
    choices: Choices = field(default_factory=Choices)
    max_latency: float | None = None
    min_throughput: float | None = None
    write_limit: int | None = None

    def costs(self, policy: Policy) -> Costs:
        return Costs(self.config, self.dtype, policy, self.hw)

    def of_block(self, policy: Policy) -> Workload:
        """Returns the workload of one block of the policy."""
        block = policy.batch_size * policy.num_batches
        count = min(block, self.workload.num_sequences or block)
        return replace(self.workload, num_sequences=count)

    def plan(self, policy: Policy) -> BlockPlan:
        """Returns the plan of one block of the policy."""
        return self.costs(policy).plan(BlockShape.of(policy, self.of_block(policy)), self.unified)

    def peak(self, policy: Policy) -> dict[Tier, int]:
        return peak_bytes(self.plan(policy))

    def is_met(self, plan: Plan) -> bool:
        """Returns whether a plan keeps the limits of latency, throughput and writes."""
        is_soon = self.max_latency is None or plan.latency_s <= self.max_latency
        is_lean = self.excess_writes(plan) is None
        return is_soon and is_lean and plan.throughput >= (self.min_throughput or 0.0)

    def excess_writes(self, plan: Plan) -> str | None:
        """Returns a sentence for a plan that writes more than is allowed; None for any other."""
        if self.write_limit is None or plan.written_a_day <= self.write_limit:
            return None
        return (
            f"the plan writes {plan.written_a_day / 1e9:.3g} GB a day to the disk, and "
            f"--write-limit allows {self.write_limit / 1e9:.3g} GB; raise it, move the KV cache "
            "and the activations out of that tier, or use --cache-bits 4"
        )


def policies(problem: Problem) -> Iterator[Policy]:
    """Yields the policies for which a linear program has to choose the fractions."""
    choices, wanted = problem.choices, problem.workload.num_sequences
    variants = list(
        product(choices.weight_bits, choices.cache_bits, choices.attentions, choices.sparsities)
    )
    sizes = set(BATCH_SIZES)
    if wanted:
        sizes = {min(size, wanted) for size in sizes}
        sizes |= {ceil(wanted / n) for n in NUM_BATCHES if ceil(wanted / n) <= BATCH_SIZES[-1]}
    for size, batches in product(sorted(sizes), NUM_BATCHES):
        if wanted and size * (batches - 1) >= wanted:
            continue
        for weight_bits, cache_bits, attention, sparsity in variants:
            yield replace(
                problem.base,
                batch_size=size,
                num_batches=batches,
                weight_bits=weight_bits,
                cache_bits=cache_bits,
                attention=attention,
                attention_sparsity=sparsity,
            )


def solved(problem: Problem, policy: Policy, budgets: Budgets | None = None) -> Candidate | None:
    """Returns the linear program's solution for a policy's batches, or None if nothing fits."""
    costs = problem.costs(policy)
    workload = problem.of_block(policy)
    terms = block_terms(costs, workload.typical, problem.unified)
    memory = memory_terms(costs, workload, problem.unified)
    limits = (terms, memory, budgets or problem.budgets, problem.max_latency)
    found = solve(*limits)
    if found is not None and problem.write_limit is not None:
        # In the time of this solution; any that writes less takes no less.
        allowed = LEAN * problem.write_limit * found.total_s / DAY_S
        if terms.written.at(found.fractions) > allowed:
            found = solve(*limits, allowed)
    if found is None:
        return None
    wanted = problem.workload.num_sequences or terms.sequences
    blocks = ceil(wanted / terms.sequences)
    rate = wanted * workload.typical.tokens_each / (blocks * found.total_s)
    return Candidate(policy, found, min(terms.sequences, wanted), rate)


def candidates(problem: Problem) -> list[Candidate]:
    """Returns all candidates that fit, best first; batches near the best ones are tried, too."""
    full: list[Policy] = []
    found = []
    for policy in policies(problem):
        # Batches that are larger than ones without a fit do not fit either.
        if any(_is_no_larger(other, policy) for other in full):
            continue
        answer = _answer(problem, policy)
        if answer is not None:
            found.append(answer)
        elif not _smallest_fits(problem, policy):
            full.append(policy)
    tried = {_batches_of(problem, candidate.policy) for candidate in found}
    for near in sorted(found, key=lambda c: -c.throughput)[:3]:
        for policy in _neighbours(problem, _batches_of(problem, near.policy)):
            if policy not in tried:
                tried.add(policy)
                answer = _answer(problem, policy)
                found += [] if answer is None else [answer]
    return sorted(found, key=lambda candidate: -candidate.throughput)


def _batches_of(problem: Problem, policy: Policy) -> Policy:
    """Returns the policy with the base's `kv_block_tokens`, since `_answer` chooses its own."""
    return replace(policy, kv_block_tokens=problem.base.kv_block_tokens)


def _answer(problem: Problem, policy: Policy) -> Candidate | None:
    """Returns the linear program's best solution over ever smaller KV blocks, or None.

    Smaller blocks can help because every sequence and layer has an open block in RAM, while full
    ones may be on disk. The search stops when they no longer help.
    """
    best, opened = None, -1
    for tokens in problem.choices.kv_block_tokens:
        largest = max(generated_blocks(problem.workload.gen_len, tokens), default=0)
        if largest == opened:
            continue
        opened = largest
        candidate = solved(problem, replace(policy, kv_block_tokens=tokens))
        if candidate is None:
            continue
        if best is not None and candidate.throughput <= GAIN * best.throughput:
            return best
        best = candidate
        if policy.cache_bits == 16 and not candidate.solution.fractions["cd"]:
            return best  # smaller blocks rarely free memory, since open ones are at their homes
    return best


def _is_no_larger(first: Policy, second: Policy) -> bool:
    """Returns whether `first` has no larger or more batches, and attends in the way of `second`."""
    alike = (first.attention, first.is_sparse) == (second.attention, second.is_sparse)
    fewer = first.batch_size <= second.batch_size and first.num_batches <= second.num_batches
    return alike and fewer


def _smallest_fits(problem: Problem, policy: Policy) -> bool:
    """Returns whether the most compressed variant of a policy fits without a latency limit."""
    smallest = replace(
        policy,
        weight_bits=min(problem.choices.weight_bits),
        cache_bits=min(problem.choices.cache_bits),
        kv_block_tokens=min(problem.choices.kv_block_tokens),
    )
    return solved(replace(problem, max_latency=None), smallest) is not None


def _neighbours(problem: Problem, policy: Policy) -> Iterator[Policy]:
    """Yields the policy with batch sizes and counts between those of the coarse grid."""
    for by_size, by_count in ((0.75, 1), (1.25, 1), (1.5, 1), (1, 0.75), (1, 1.5), (0.75, 1.5)):
        size = max(1, round(policy.batch_size * by_size))
        count = max(1, round(policy.num_batches * by_count))
        wanted = problem.workload.num_sequences
        if not wanted or size * (count - 1) < wanted:
            yield replace(policy, batch_size=size, num_batches=count)


class Placed(NamedTuple):
    """The plan of a policy's largest block, and its exact peaks."""

    plan: BlockPlan
    needed: dict[Tier, int]


Peaks = dict[Policy, dict[Tier, int]]
"""The peaks of policies in bytes by tier, exact unless they are beyond the budgets."""


def placed(problem: Problem, candidate: Candidate, known: Peaks) -> Placed | None:
    """Returns the plan of a candidate with rounded fractions and exact peaks within the budgets.

    If the peaks exceed the budgets, the linear program is solved again with smaller ones. Returns
    None if that finds no policy. known: peaks that were found before; others are added.
    """
    budgets = problem.budgets
    for _ in range(8):
        plan = problem.plan(rounded(candidate.policy, candidate.solution))
        if plan.policy not in known:
            known[plan.policy] = peak_bytes(plan, problem.budgets.shortfalls)
        needed = known[plan.policy]
        if not problem.budgets.shortfalls(needed):
            return Placed(plan, needed)
        budgets = reduced(budgets, problem.budgets, needed)
        again = solved(problem, candidate.policy, budgets)
        if again is None:
            return None
        candidate = again
    return None


def rounded(policy: Policy, solution: Solution) -> Policy:
    """Returns the policy with a solution's fractions in whole grains, rounded to slower tiers."""
    parts: dict[str, Any] = {}
    for name, letter in (("weights", "w"), ("cache", "c"), ("activations", "h")):
        shares = solution.fractions
        device = floor(shares[letter + "g"] * GRAIN + 1e-3) / GRAIN
        host = floor((shares[letter + "g"] + shares[letter + "c"]) * GRAIN + 1e-3) / GRAIN
        parts[name] = Placement(device, round(host - device, 6))
    return replace(policy, **parts)


def reduced(budgets: Budgets, asked: Budgets, needed: dict[Tier, int]) -> Budgets:
    """Returns `budgets` for the linear program, less the excess of exact peaks over real budgets.

    asked: the real budgets; needed: the exact peaks by tier.
    """

    def less(limit: int | None, allowed: int | None, used: int) -> int | None:
        if limit is None or allowed is None or used <= allowed:
            return limit
        return max(0, limit - int(1.2 * (used - allowed)) - allowed // GRAIN)

    return Budgets(
        device=less(budgets.device, asked.device, needed["device"]),
        host=less(budgets.host, asked.host, needed["host"]),
        disk=less(budgets.disk, asked.disk, needed["disk"]),
        shared=less(budgets.shared, asked.shared, needed["device"] + needed["host"]),
    )


def evaluate(problem: Problem, policy: Policy) -> Plan:
    """Returns the simulator's prediction for a policy and the problem's workload."""
    plan = problem.plan(policy)
    return _evaluated(problem, Placed(plan, peak_bytes(plan)))


def _evaluated(problem: Problem, found: Placed) -> Plan:
    plan, needed = found
    policy, costs = plan.policy, problem.costs(plan.policy)
    batches, layers = plan.shape.batch_sizes, len(plan.spec.decoders)
    sample = max(1, SAMPLED_STEPS // (layers * len(batches)))
    spare = problem.budgets.spare_ram(needed)
    cached = page_cached(costs.spec, costs.formats, plan.tiers, spare)
    work = problem.of_block(policy).typical
    shape = BlockShape.of(policy, work)
    typical = plan if shape == plan.shape else costs.plan(shape, problem.unified)
    block = simulate(costs, typical, cached, sample)
    sequences = sum(batches)
    wanted = problem.workload.num_sequences or sequences
    count, left = divmod(wanted, sequences)
    blocks = [block] * count
    if left:  # the last block moves as many weights as the others
        last = BlockShape.of(policy, replace(work, num_sequences=left))
        blocks.append(simulate(costs, costs.plan(last, problem.unified), cached, sample))
    return _plan(problem, policy, sequences, wanted, needed, blocks)


def _plan(
    problem: Problem,
    policy: Policy,
    sequences: int,
    wanted: int,
    needed: dict[Tier, int],
    blocks: Sequence[Prediction],
) -> Plan:
    """Adds up the predictions of all blocks; the first one must be a whole block."""
    prefill_s = sum(block.prefill_s for block in blocks)
    decode_s = sum(block.decode_s for block in blocks)
    return Plan(
        policy=policy,
        block_sequences=sequences,
        num_sequences=wanted,
        prefill_s=prefill_s,
        decode_s=decode_s,
        latency_s=blocks[0].total_s,
        throughput=wanted * problem.workload.typical.tokens_each / (prefill_s + decode_s),
        peak_bytes=needed,
        busy_s={name: sum(block.busy_s[name] for block in blocks) for name in blocks[0].busy_s},
        binding=blocks[0].binding,
        written=_written(problem, policy) * wanted / sequences,
    )


def _written(problem: Problem, policy: Policy) -> float:
    """Returns the bytes that a whole block writes to the disk. The simulator does not know them: it
    leaves out tokens in which blocks are sealed."""
    work = problem.of_block(policy).typical
    terms = block_terms(problem.costs(policy), work, problem.unified)
    shares = (("w", policy.weights), ("c", policy.cache), ("h", policy.activations))
    return terms.written.at({f"{name}d": placement.disk for name, placement in shares})


def search(problem: Problem) -> list[Plan]:
    """Returns the best plans, the chosen one first; none if nothing fits or meets the limits.

    Prompts are cut into the largest chunks for which there is a plan: every chunk is another pass
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

    Where the disk's rate varies, the best plans for its slowest, usual and fastest rate are all
    predicted at all of these rates. The first one has the best geometric mean of throughputs.
    """
    low, high = problem.hw.disk_range
    others = [
        replace(problem, hw=problem.hw.with_disk(factor))
        for factor in (max(low, 1 / FASTER), min(high, FASTER))
        if abs(factor - 1) > STEADY
    ]
    if not others:
        return _search_once(problem)
    found = {plan.policy: plan for plan in _search_once(problem)}
    for policy in [plan.policy for other in others for plan in _search_once(other)[:1]]:
        if policy not in found:
            found[policy] = evaluate(problem, policy)
    scores = {
        policy: geometric_mean(
            [plan.throughput, *(evaluate(other, policy).throughput for other in others)]
        )
        for policy, plan in found.items()
        if problem.is_met(plan)
    }
    return _ranked(problem, [found[policy] for policy in scores], scores)


def _search_once(problem: Problem) -> list[Plan]:
    """Searches for the rates of the problem's profile."""
    plans: list[Plan] = []
    looked_at: set[Policy] = set()
    known: Peaks = {}
    for candidate in _shortlist(problem, candidates(problem)):
        found = placed(problem, candidate, known)
        if found is None or found.plan.policy in looked_at:
            continue
        looked_at.add(found.plan.policy)
        plan = _evaluated(problem, found)
        plans += [plan] if problem.is_met(plan) else []
        if len(plans) == CHECKED or len(looked_at) == 4 * CHECKED:
            break
    return _ranked(problem, plans, {plan.policy: plan.throughput for plan in plans})


def _ranked(problem: Problem, plans: list[Plan], scores: Mapping[Policy, float]) -> list[Plan]:
    """Returns plans, the best first; scores: throughputs to compare them by.

    Where the number of sequences is free, plans nearly as fast as the best come first, the smallest
    of them before the others.
    """
    if problem.min_throughput is not None:
        return sorted(plans, key=lambda plan: plan.latency_s)
    ordered = sorted(plans, key=lambda plan: -scores[plan.policy])
    if problem.workload.num_sequences or not plans:
        return ordered
    enough = (1 - SLACK) * scores[ordered[0].policy]
    near = [plan for plan in ordered if scores[plan.policy] >= enough]
    near.sort(key=lambda plan: plan.block_sequences)
    return near + [plan for plan in ordered if plan not in near]


def _shortlist(problem: Problem, found: list[Candidate]) -> list[Candidate]:
    """Returns the candidates to check more closely, in the order in which to do it."""
    if not found:
        return []
    if problem.min_throughput is not None:
        enough = [c for c in found if c.throughput >= problem.min_throughput]
        return sorted(enough, key=lambda c: c.solution.total_s)
    if not problem.workload.num_sequences:
        near = [c for c in found if c.throughput >= (1 - SLACK) * found[0].throughput]
        near.sort(key=lambda c: (c.sequences, -c.throughput))
        # The simulator decides between the smallest, the fastest and one in the middle.
        first = [near[0], found[0], near[len(near) // 2]]
        return first + [c for c in found if c not in first]
    return found


def frontier(problem: Problem) -> list[Candidate]:
    """Returns the latency-throughput frontier (the paper's figure 1).

    It has the candidates that no other beats in both, by rising latency.
    """
    best: list[Candidate] = []
    for candidate in sorted(candidates(problem), key=lambda c: (c.solution.total_s, -c.throughput)):
        if not best or candidate.throughput > best[-1].throughput:
            best.append(candidate)
    return best
