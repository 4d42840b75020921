"""Plans for stages: a linear program per stage, and the time of all stages together.

Each stage keeps all groups' caches, and takes one group at a time through its layers, so that its
weights move once per group. The slowest stage decides how long a slot takes (FlexGen, section 4.4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import NamedTuple

from flexgen_jax.models.config import ModelConfig
from flexgen_jax.policy.placement import page_cached
from flexgen_jax.policy.policy import Policy, Tier
from flexgen_jax.policy.shapes import BlockShape
from flexgen_jax.schedule.stages import Division, groups_of
from flexgen_jax.search.cost_model import block_terms
from flexgen_jax.search.fit import Budgets
from flexgen_jax.search.linear_program import Solution, memory_terms, solve
from flexgen_jax.search.problem import Problem
from flexgen_jax.search.rounding import fitted
from flexgen_jax.search.search import SAMPLED_STEPS
from flexgen_jax.search.simulate import simulate

MAX_GROUP_SEQUENCES = 4096
"""Sequences in a group, at most."""

WORSE = 6
"""After this many consecutive shapes that are no better, those of two sizes of groups, the search
ends."""

MIN_MOVE_SPEEDUP = 1.05
"""Placed weights move to another division of layers if its predicted speedup exceeds this
factor."""


@dataclass(frozen=True)
class StagePlan:
    """A stage's policy for all groups, and its seconds for one group: the prompts, and a token."""

    policy: Policy
    prefill_s: float
    token_s: float
    peak_bytes: dict[Tier, int]


class Link(NamedTuple):
    """How long it takes to hand hidden states on: seconds, and bytes per second beyond that."""

    seconds: float
    rate: float


LOOPBACK = Link(0.001, 0.45e9)
"""The link between two processes of one machine, by gloo."""


class Shape(NamedTuple):
    """Sequences in a batch, batches in a group, and groups that are under way at once."""

    rows: int
    batches: int
    groups: int

    @property
    def group_rows(self) -> int:
        return self.rows * self.batches


@dataclass(frozen=True)
class ChainPlan:
    """Plans of all stages for batches of one shape, and their predicted time for all sequences of
    the workload."""

    stages: tuple[StagePlan, ...]
    layers: Division
    shape: Shape
    prefill_s: float
    decode_s: float
    tokens: int
    decoded: int

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.decode_s

    @property
    def throughput(self) -> float:
        """Generated tokens per second."""
        return self.tokens / self.total_s

    @property
    def decode_throughput(self) -> float:
        """Tokens per second while decoding, the prompts' first ones left out."""
        return self.decoded / self.decode_s if self.decode_s else 0.0


def stage_plan(problem: Problem, shape: Shape) -> StagePlan | None:
    """Returns the plan of a stage, whose layers are those of `problem.setting`; None if none fits.

    The linear program has the time of one group, and the memory of all.
    """
    best: StagePlan | None = None
    choices = problem.choices.attentions
    if problem.setting.unified and "device" in choices:
        choices = ("device",)  # the same processor, without a way around
    for attention in choices:
        one = replace(
            problem.base,
            batch_size=shape.rows,
            num_batches=shape.batches,
            attention=attention,
        )
        plan = _stage_plan(problem, one, shape.groups)
        if plan is not None and (best is None or _seconds(problem, plan) < _seconds(problem, best)):
            best = plan
        if plan is not None and plan.policy.cache.device == 1:
            break  # then it makes no difference where attention would be
    return best


def _seconds(problem: Problem, plan: StagePlan) -> float:
    return plan.prefill_s + (problem.workload.gen_len - 1) * plan.token_s


def _stage_plan(problem: Problem, group_policy: Policy, groups: int) -> StagePlan | None:
    """Returns the plan of a stage. group_policy: the policy of one group."""
    every = replace(group_policy, num_batches=group_policy.num_batches * groups)
    terms = block_terms(problem.costs(group_policy), problem.of_block(group_policy).typical)
    memory = memory_terms(problem.costs(every), problem.of_block(every))

    def solve_within(budgets: Budgets) -> Solution | None:
        return solve(terms, memory, budgets)

    placed = fitted(problem, every, solve_within)
    if placed is None:
        return None
    return predicted(problem, placed.plan.policy, groups, placed.needed)


def predicted(problem: Problem, policy: Policy, groups: int, needed: dict[Tier, int]) -> StagePlan:
    """Returns the plan of a given policy. needed: its exact peaks."""
    group_policy = replace(policy, num_batches=max(1, policy.num_batches // groups))
    costs = problem.costs(group_policy)
    work = problem.of_block(group_policy).typical
    plan = costs.plan(BlockShape.of(group_policy, work))
    spare = problem.budgets.spare_ram(needed)
    cached = page_cached(costs.spec, costs.formats, plan.tiers, spare)
    sample = max(1, SAMPLED_STEPS // (len(plan.spec.decoders) * len(plan.shape.batch_sizes)))
    # The second group finds the page cache as the first has left it.
    group = simulate(costs, plan, cached, sample)
    tokens = max(work.gen_len - 1, 1)
    return StagePlan(policy, group.prefill_s, group.decode_s / tokens, needed)


def chain_plan(
    problem: Problem,
    stages: Sequence[StagePlan],
    layers: Division,
    shape: Shape,
    hidden_bytes: int,
    link: Link,
) -> ChainPlan:
    """Returns the time of all stages together. hidden_bytes: of one token of a sequence."""
    count, work, rows = len(stages), problem.workload, shape.group_rows
    num_sequences = work.num_sequences or rows * shape.groups
    typical = work.typical

    def slot_s(each: Callable[[StagePlan], float], tokens: int) -> float:
        shift = link.seconds + rows * tokens * hidden_bytes / link.rate if count > 1 else 0.0
        slowest = max(map(each, stages))
        # A middle stage sends, in one shift, its results for the previous shift's input.
        return slowest + shift if count > 2 else max(slowest, shift)

    prefill = slot_s(lambda stage: stage.prefill_s, typical.prompt_len)
    token = slot_s(lambda stage: stage.token_s, 1)
    passes = ceil(num_sequences / rows)
    filling = (count - 1) * ceil(num_sequences / (rows * shape.groups))
    steps = max(typical.gen_len - 1, 0)
    return ChainPlan(
        stages=tuple(stages),
        layers=layers,
        shape=shape,
        prefill_s=(passes + filling) * prefill,
        decode_s=steps * max(passes, count) * token,  # with few groups, slots stay empty
        tokens=num_sequences * typical.gen_len,
        decoded=num_sequences * steps,
    )


def shapes(problem: Problem, groups: int) -> Iterator[Shape]:
    """Yields shapes with `groups` groups, largest groups first."""
    num_sequences = problem.workload.num_sequences
    rows = min(
        MAX_GROUP_SEQUENCES, ceil(num_sequences / groups) if num_sequences else MAX_GROUP_SEQUENCES
    )
    while rows:
        for batches in (1, 4, 16):
            if rows % batches == 0 and rows // batches <= 512:
                yield Shape(rows // batches, batches, groups)
        rows //= 2


def parts(problem: Problem, layers: Division) -> list[Problem]:
    """Returns the problem of each stage: its layers, on a machine of its own."""
    setting = problem.setting
    return [
        replace(problem, setting=replace(setting, config=setting.config.part(part)))
        for part in layers
    ]


def plan_alike(problem: Problem, shape: Shape, layers: Division) -> list[StagePlan | None]:
    """Returns the plans of stages whose machines are all like the problem's."""
    plans: dict[ModelConfig, StagePlan | None] = {}  # middle stages are equal
    kinds = []
    for part in parts(problem, layers):
        kinds.append(replace(part.setting.config, first_layer=0))
        if kinds[-1] not in plans:
            plans[kinds[-1]] = stage_plan(part, shape)
    return [plans[kind] for kind in kinds]


def fastest(plans: Iterable[ChainPlan], placed: Division | None = None) -> ChainPlan | None:
    """Returns the plan with the division of layers to take; None if there is no plan.

    plans: of one shape; placed: the division of the placed weights.
    """

    def seconds(plan: ChainPlan) -> float:
        return plan.total_s * (1 if placed in (None, plan.layers) else MIN_MOVE_SPEEDUP)

    return min(plans, key=seconds, default=None)


def search_stages(
    problem: Problem,
    divisions: Sequence[Division],
    placed: Division | None = None,
    plan_all: Callable[[Shape, Division], Sequence[StagePlan | None]] | None = None,
    link: Link = LOOPBACK,
) -> ChainPlan | None:
    """Returns the plan of the highest throughput; None if nothing fits.

    divisions: divisions of the layers; the first that fits chooses the shape; placed: as for
    `fastest`; plan_all: returns the stages' plans for a shape, by default those for machines that
    are like the problem's.
    """
    plan_all = plan_all or partial(plan_alike, problem)
    hidden = int(problem.costs(problem.base).hidden_bytes(1, 1))

    def chain(shape: Shape, layers: Division) -> ChainPlan | None:
        plans = [plan for plan in plan_all(shape, layers) if plan is not None]
        if len(plans) < len(layers):
            return None
        return chain_plan(
            problem=problem,
            stages=plans,
            layers=layers,
            shape=shape,
            hidden_bytes=hidden,
            link=link,
        )

    for number, way in enumerate(divisions):
        best = _best_shape(problem, partial(chain, layers=way), len(way))
        if best is not None:
            others = (chain(best.shape, other) for other in divisions[number + 1 :])
            return fastest([best, *(plan for plan in others if plan is not None)], placed)
    return None


def _best_shape(
    problem: Problem, chain: Callable[[Shape], ChainPlan | None], stages: int
) -> ChainPlan | None:
    """Returns the plan of the highest throughput of all shapes; None if nothing fits."""
    best: ChainPlan | None = None
    for groups in groups_of(stages):
        own: ChainPlan | None = None
        worse = 0
        for shape in shapes(problem, groups):
            plan = chain(shape)
            if plan is None:
                continue
            if own is None or plan.throughput > own.throughput:
                own, worse = plan, 0
            else:
                worse += 1
            if worse == WORSE:
                break
        if own is not None and (best is None or own.throughput > best.throughput):
            best = own
    return best
