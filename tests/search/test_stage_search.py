"""Plans for stages: each within its memory, and together as fast as the slowest lets them be."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from flexgen_jax.models.shapes import known_shape
from flexgen_jax.policy.machines import known_machine
from flexgen_jax.policy.policy import Policy, Workload
from flexgen_jax.policy.shapes import Setting
from flexgen_jax.schedule.stages import Division, divisions, groups_of
from flexgen_jax.search.fit import Budgets
from flexgen_jax.search.problem import Problem
from flexgen_jax.search.search import search
from flexgen_jax.search.stage_search import (
    LOOPBACK,
    ChainPlan,
    Link,
    Shape,
    StagePlan,
    chain_plan,
    fastest,
    parts,
    search_stages,
    stage_plan,
)

T4 = known_machine("t4-16gb")
BUDGETS = Budgets(T4.device_memory, T4.host_memory, T4.disk_space, None)


def problem(model: str, sequences: int, gen_len: int = 32) -> Problem:
    work = Workload(512, gen_len, sequences)
    setting = Setting(known_shape(model), "float16", unified=False)
    return Problem(setting, T4, BUDGETS, work, base=Policy())


def ways(asked: Problem, stages: int) -> list[Division]:
    return divisions(asked.costs(asked.base).spec, stages)


def test_the_slowest_stage_decides() -> None:
    asked = problem("facebook/opt-1.3b", 64, gen_len=5)
    stages = [StagePlan(Policy(), 2.0, s, {"device": 0, "host": 0, "disk": 0}) for s in (0.1, 0.3)]
    layers = ways(asked, 2)[0]
    found = chain_plan(asked, stages, layers, Shape(4, 4, 4), 4096, LOOPBACK)
    # Four groups of 16; a slot until the second stage has its first.
    assert found.prefill_s == pytest.approx((4 + 1) * 2.0)
    assert found.decode_s == pytest.approx(4 * 4 * 0.3)
    assert found.throughput == pytest.approx(64 * 5 / found.total_s)
    assert found.decode_throughput == pytest.approx(64 * 4 / found.decode_s)
    slow = chain_plan(asked, stages, layers, Shape(4, 4, 4), 10**9, Link(2.0, 1e9))
    assert slow.decode_s == pytest.approx(4 * 4 * (2 + 16))
    # A stage in the middle waits for the shift, and the next shift for what it then computes.
    all_three = ([*stages, stages[0]], ways(asked, 3)[0])
    three = chain_plan(asked, *all_three, Shape(4, 4, 4), 10**9, Link(2.0, 1e9))
    assert three.decode_s == pytest.approx(4 * 4 * (0.3 + 2 + 16))


def test_few_groups_leave_slots_empty() -> None:
    asked = problem("facebook/opt-1.3b", 4, gen_len=3)
    stages = [StagePlan(Policy(), 1.0, 1.0, {}) for _ in range(4)]
    found = chain_plan(asked, stages, ways(asked, 4)[0], Shape(4, 1, 5), 1, Link(0, 1e9))
    assert found.decode_s == pytest.approx(8)


@pytest.mark.parametrize("memory", [15 << 30, 1 << 30])
def test_each_stage_keeps_its_budgets(memory: int) -> None:
    asked = problem("facebook/opt-1.3b", 64)
    asked = replace(asked, budgets=replace(BUDGETS, device=memory))
    for groups, part in product(groups_of(2), parts(asked, ways(asked, 2)[0])):
        found = stage_plan(part, Shape(4, 1, groups))
        assert found is not None
        assert found.policy.num_batches == groups
        assert not asked.budgets.shortfalls(found.peak_bytes)
        assert found.peak_bytes == part.peak(found.policy)
        assert (found.policy.weights.device == 1) == (memory > 2 << 30)


def test_what_does_not_fit_has_no_plan() -> None:
    asked = problem("facebook/opt-1.3b", 64)
    tiny = Budgets(1 << 20, 1 << 20, 1 << 20, None)
    assert search_stages(replace(asked, budgets=tiny), ways(asked, 2)) is None


def test_layers_are_divided_for_what_takes_longest() -> None:
    """Long prompts want equal numbers of layers, new tokens fewer where the head is."""
    for prompt_len, gen_len, division in ((512, 2, 6), (8, 64, 7)):
        workload = Workload(prompt_len, gen_len, 64)
        asked = replace(problem("facebook/opt-125m", 64), workload=workload)
        found = search_stages(asked, ways(asked, 2))
        assert found is not None
        assert found.layers == (range(division), range(division, 12))
        assert len(found.stages) == 2


def test_the_division_that_weights_have_is_kept_for_a_little() -> None:
    asked = problem("facebook/opt-125m", 64)
    first, second = ways(asked, 2)[:2]

    def plan(seconds: float, layers: Division) -> ChainPlan:
        stages = [StagePlan(Policy(), seconds, 0.0, {}) for _ in layers]
        return chain_plan(asked, stages, layers, Shape(4, 4, 4), 1, Link(0, 1e9))

    for seconds, layers in ((0.97, first), (0.9, second)):
        plans = [plan(1.0, first), plan(seconds, second)]
        free, found = fastest(plans), fastest(plans, first)
        assert free is not None and found is not None
        assert free.layers == second
        assert found.layers == layers
    assert fastest([]) is None


def test_half_the_layers_near_is_worth_more_than_twice_the_devices() -> None:
    """FlexGen, table 3: decoding gains more than the number of devices."""
    asked = replace(problem("facebook/opt-1.3b", 32), budgets=replace(BUDGETS, device=2 << 30))
    one = search(asked)[0]
    two = search_stages(asked, ways(asked, 2))
    assert two is not None
    assert [stage.policy.weights.device for stage in two.stages] == [1, 1]
    assert one.policy.weights.device < 1
    alone = 32 * 31 / one.decode_s
    assert two.decode_throughput > 2 * alone
