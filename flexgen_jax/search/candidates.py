"""Candidates of a policy search: batches and other choices that are not linear, each with the best
fractions by the linear program."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import ceil

from flexgen_jax.policy.policy import Policy, generated_blocks
from flexgen_jax.search.cost_model import block_terms
from flexgen_jax.search.fit import Budgets
from flexgen_jax.search.linear_program import Solution, memory_terms, solve
from flexgen_jax.search.problem import DAY_S, Problem

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
NUM_BATCHES = (1, 2, 4, 8, 16, 32)

GAIN = 1.01
"""Minimum throughput gain for smaller KV blocks, because the linear program ignores the cost of
their additional reads and programs."""

LARGE_LAYERS_SHARE = 0.3
"""Two layers' weights are large if they exceed this share of device memory."""

LEAN = 0.9
"""The share of a limit of written bytes that the linear program may use, since the simulator may
find less time for them."""


MAX_NEIGHBOUR_RATIO = 4
"""Maximum ratio of batch sizes, and of numbers of batches, near a policy's."""


@dataclass(frozen=True)
class Candidate:
    """The linear program's solution for one choice of everything else."""

    policy: Policy
    solution: Solution
    sequences: int
    throughput: float


def policies(problem: Problem) -> Iterator[Policy]:
    """Yields policies whose fractions the linear program chooses."""
    choices, num_sequences = problem.choices, problem.workload.num_sequences
    variants = list(
        product(
            choices.weight_bits,
            choices.cache_bits,
            choices.attentions,
            choices.sparsities,
            _copies(problem),
            choices.draft_tokens,
        )
    )
    sizes = set(BATCH_SIZES)
    if num_sequences:
        sizes = {min(size, num_sequences) for size in sizes}
        sizes |= {
            ceil(num_sequences / n)
            for n in NUM_BATCHES
            if ceil(num_sequences / n) <= BATCH_SIZES[-1]
        }
    for size, batches in product(sorted(sizes), NUM_BATCHES):
        if num_sequences and size * (batches - 1) >= num_sequences:
            continue
        for weight_bits, cache_bits, attention, sparsity, copies, guesses in variants:
            if guesses and (attention == "host" or sparsity < 1):
                continue
            yield replace(
                problem.base,
                batch_size=size,
                num_batches=batches,
                weight_bits=weight_bits,
                cache_bits=cache_bits,
                attention=attention,
                attention_sparsity=sparsity,
                copies_ahead=copies,
                draft_tokens=guesses,
            )


def _copies(problem: Problem) -> tuple[bool, ...]:
    """Returns whether weights may be copied to the device ahead, and whether plans without that are
    tried: where two layers take much of the device."""
    ahead, device = problem.base.copies_ahead, problem.budgets.device
    if problem.setting.unified or device is None or not ahead:
        return (ahead,)
    costs = problem.costs(problem.base)
    largest = max(costs.layer_bytes(layer) for layer, _ in costs.spec.decoder_kinds)
    return (True, False) if 2 * largest > LARGE_LAYERS_SHARE * device else (True,)


def solution_of(problem: Problem, policy: Policy, budgets: Budgets) -> Solution | None:
    """Returns the linear program's solution for a policy's batches, or None if nothing fits."""
    costs = problem.costs(policy)
    workload = problem.of_block(policy)
    terms = block_terms(costs, workload.typical)
    within = partial(
        solve,
        terms=terms,
        memory=memory_terms(costs, workload),
        budgets=budgets,
        max_latency=problem.max_latency,
    )
    solution = within()
    if solution is not None and problem.write_limit is not None:
        # In the time of this solution; any that writes less takes no less.
        allowed = LEAN * problem.write_limit * solution.total_s / DAY_S
        if terms.written.at(solution.fractions) > allowed:
            solution = within(max_written=allowed)
    return solution


def solved(problem: Problem, policy: Policy) -> Candidate | None:
    """Returns a policy's batches with the best fractions, or None if nothing fits."""
    solution = solution_of(problem, policy, problem.budgets)
    if solution is None:
        return None
    workload, sequences = problem.of_block(policy), policy.batch_size * policy.num_batches
    num_sequences = problem.workload.num_sequences or sequences
    blocks = ceil(num_sequences / sequences)
    rate = num_sequences * workload.typical.tokens_each / (blocks * solution.total_s)
    return Candidate(policy, solution, min(sequences, num_sequences), rate)


def candidates(problem: Problem, centre: Policy | None = None) -> list[Candidate]:
    """Returns all candidates that fit, best first; batches between the best ones and the next of
    the grid are tried, too. centre: a policy; sizes and numbers of batches that differ from its own
    by more than `MAX_NEIGHBOUR_RATIO` times are left out."""
    full: list[Policy] = []
    fitting: list[Candidate] = []
    for policy in policies(problem):
        if centre is not None and not _is_near(centre, policy):
            continue
        # Batches that are larger than ones without a fit do not fit either.
        if any(_is_no_larger(other, policy) for other in full):
            continue
        answer = _answer(problem, policy)
        if answer is not None:
            fitting.append(answer)
        elif not _smallest_fits(problem, policy):
            full.append(policy)
    tried = {_batches_of(problem, candidate.policy) for candidate in fitting}
    for best in sorted(fitting, key=lambda c: -c.throughput)[:3]:
        for policy in _neighbours(problem, _batches_of(problem, best.policy)):
            if policy not in tried:
                tried.add(policy)
                answer = _answer(problem, policy)
                fitting += [] if answer is None else [answer]
    return sorted(fitting, key=lambda candidate: -candidate.throughput)


def _batches_of(problem: Problem, policy: Policy) -> Policy:
    """Returns the policy with the base's `kv_block_tokens` and `host_experts`, since `_answer`
    chooses its own."""
    base = problem.base
    return replace(policy, kv_block_tokens=base.kv_block_tokens, host_experts=base.host_experts)


def _answer(problem: Problem, policy: Policy) -> Candidate | None:
    """Returns the linear program's best solution over ever smaller KV blocks, or None.

    Smaller blocks can help because every sequence and layer has an open block in RAM, while full
    ones may be on disk. The search stops when they no longer help.
    """
    if policy.host_experts is None and problem.setting.config.has_experts:
        policy = replace(policy, host_experts=problem.costs(policy).host_share())
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


def _is_near(first: Policy, second: Policy) -> bool:
    """Returns whether batch sizes, and numbers of batches, differ by at most
    `MAX_NEIGHBOUR_RATIO`."""
    pairs = (
        (first.batch_size, second.batch_size),
        (first.num_batches, second.num_batches),
    )
    return all(max(pair) <= MAX_NEIGHBOUR_RATIO * min(pair) for pair in pairs)


def _is_no_larger(first: Policy, second: Policy) -> bool:
    """Returns whether `first` has no larger or more batches, and attends in the way of `second`."""
    alike = all(
        getattr(first, name) == getattr(second, name)
        for name in ("attention", "is_sparse", "copies_ahead", "draft_tokens")
    )
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
        num_sequences = problem.workload.num_sequences
        if not num_sequences or size * (count - 1) < num_sequences:
            yield replace(policy, batch_size=size, num_batches=count)


def frontier(problem: Problem) -> list[Candidate]:
    """Returns the latency-throughput frontier (the paper's figure 1).

    It has the candidates that no other beats in both, by rising latency.
    """
    best: list[Candidate] = []
    for candidate in sorted(candidates(problem), key=lambda c: (c.solution.total_s, -c.throughput)):
        if not best or candidate.throughput > best[-1].throughput:
            best.append(candidate)
    return best
