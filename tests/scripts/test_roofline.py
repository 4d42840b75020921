"""The roofline against numbers worked out by hand."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flexgen_jax.models.shapes import known_shape
from flexgen_jax.models.spec_of_config import model_spec
from flexgen_jax.policy.hardware import Rate
from flexgen_jax.policy.machines import known_machine
from flexgen_jax.policy.policy import SCORE, Policy, Workload
from flexgen_jax.policy.shapes import Setting
from flexgen_jax.search.fit import Budgets
from flexgen_jax.search.problem import Problem
from flexgen_jax.search.search import evaluate

sys.path.append(str(Path(__file__).parent.parent.parent / "scripts" / "benchmarks"))
from roofline import Seconds, binding, bound_s, roofline

CONFIG = known_shape("facebook/opt-1.3b")
SETTING = Setting(CONFIG, "bfloat16", unified=False)
HIDDEN, LAYERS = 2048, 24
LAYER = 12 * HIDDEN**2 * 2
"""Bytes of a decoder layer's matrices."""
ENDS = (50272 * HIDDEN) * 2 + 2050 * HIDDEN * 2
"""Bytes of the table that embedding and head share, and of the position table."""
MACHINE = replace(
    known_machine("t4-16gb"),
    linear={16: Rate(((1.0, 1e11), (64.0, 2e12), (512.0, 1e12)))},
    disk_read=Rate(((1e6, 1e9), (1e8, 2e9))),
    host_to_device=Rate.constant(1e10),
    host_attention={16: Rate(((1e6, 3e10), (1e8, 1e10)))},  # 20 GB/s of bf16
    device_attention={16: Rate.constant(5e9)},
)
WORK = Workload(100, 11, 40)


def bound(*percent: float, unified: bool = False, **options: object) -> Seconds:
    policy = Policy.from_percent(*percent, **{"batch_size": 10, "num_batches": 2, **options})
    machine = replace(MACHINE, unified=unified)
    return roofline(SETTING, policy, WORK, machine)


def test_compute_is_two_flops_a_parameter_and_token() -> None:
    found = bound(100, 0, 100, 0, 100, 0)
    layers, head = LAYERS * 12 * HIDDEN**2, 50272 * HIDDEN
    skipped = 99 * 10 * HIDDEN**2  # the last layer makes only keys and values of 99 of 100 tokens
    prompt = 100 * layers - skipped
    assert found["prefill"]["compute"] == pytest.approx(2 * 40 * (prompt + head) / 2e12)
    assert found["decode"]["compute"] == pytest.approx(2 * 40 * 10 * (layers + head) / 2e12)
    flops = 2e12 * sum(phase["compute"] for phase in found.values())
    usual = 2 * 40 * (110 * model_spec(CONFIG).num_parameters - skipped)
    assert flops == pytest.approx(usual, rel=0.1)
    scored = roofline(
        SETTING,
        Policy.from_percent(100, 0, 100, 0, 100, 0, batch_size=10, num_batches=2),
        replace(WORK, gen_len=1, head=SCORE),
        MACHINE,
    )
    assert scored["prefill"]["compute"] == pytest.approx(2 * 40 * 100 * (layers + head) / 2e12)


def test_products_of_integers_have_their_own_roof() -> None:
    faster = replace(MACHINE, linear_int8={16: Rate.constant(5e12)})
    policy = Policy.from_percent(100, 0, 100, 0, 100, 0, batch_size=10, num_batches=2)
    plain, integers = (
        roofline(SETTING, replace(policy, matmul_bits=bits), WORK, faster)["prefill"]
        for bits in (16, 8)
    )
    assert plain["compute"] == pytest.approx(2.5 * integers["compute"])
    assert {**plain, "compute": 0} == {**integers, "compute": 0}


def test_disk_reads_weights_once_a_step_of_each_block_and_the_cache_once_a_step() -> None:
    first, later = 2 * (LAYERS * LAYER + ENDS), 2 * 10 * LAYERS * LAYER  # two blocks
    cache = 40 * LAYERS * 4 * HIDDEN * sum(range(100, 110))
    found = bound(50, 0, 0, 75, 100, 0)
    # No generated token is in a full block of 32 yet, so none is on disk.
    full = 40 * LAYERS * 4 * HIDDEN * 10 * 100
    assert found["prefill"]["disk_read"] == pytest.approx(0.5 * first / 2e9, rel=1e-3)
    assert found["decode"]["disk_read"] == pytest.approx((0.5 * later + 0.25 * full) / 2e9, 1e-3)
    assert found["prefill"]["host_to_device"] == pytest.approx(0.5 * first / 1e10, rel=1e-3)
    assert found["decode"]["host_to_device"] == pytest.approx(0.5 * later / 1e10, rel=1e-3)
    moved = bound(50, 0, 0, 75, 100, 0, attention="device")["decode"]
    assert moved["host_to_device"] == pytest.approx((0.5 * later + cache) / 1e10, rel=1e-3)
    assert moved["memory"] == 0


def test_memory_of_a_unified_machine_gives_weights_and_cache_once_a_step() -> None:
    first, later = 2 * (LAYERS * LAYER + ENDS), 2 * 10 * LAYERS * LAYER
    cache = 40 * LAYERS * 4 * HIDDEN * sum(range(100, 110))
    found = bound(25, 25, 100, 0, 100, 0, unified=True)
    assert found["prefill"]["memory"] == pytest.approx(0.5 * first / 2e10, rel=1e-3)
    assert found["decode"]["memory"] == pytest.approx((0.5 * later + cache) / 2e10, rel=1e-3)
    assert found["prefill"]["host_to_device"] == found["decode"]["host_to_device"] == 0
    sparse = bound(25, 25, 100, 0, 100, 0, unified=True, attention_sparsity=0.1)["decode"]
    assert sparse["memory"] == pytest.approx((0.5 * later + 0.55 * cache) / 2e10, rel=1e-3)


def test_memory_of_a_unified_machine_is_as_fast_as_the_faster_way_to_read_it() -> None:
    machine = replace(MACHINE, device_attention={16: Rate.constant(4e10)})
    policy = Policy(batch_size=10)
    slow, fast = (
        roofline(SETTING, policy, WORK, replace(hw, unified=True))["decode"]["memory"]
        for hw in (MACHINE, machine)
    )
    assert slow == pytest.approx(4 * fast)
    away = Policy.from_percent(0, 100, 0, 100, 0, 100)
    apart = [roofline(SETTING, away, WORK, hw) for hw in (MACHINE, machine)]
    assert apart[0] == apart[1]
    assert apart[0]["decode"]["memory"] > 0


def test_full_blocks_of_generated_tokens_come_from_disk_too() -> None:
    policy = Policy.from_percent(100, 0, 0, 0, 100, 0, batch_size=10, kv_block_tokens=4)
    found = roofline(SETTING, policy, WORK, MACHINE)
    tokens = sum(100 + new // 4 * 4 for new in range(10))
    expected = 40 * LAYERS * 4 * HIDDEN * tokens / 2e9
    assert found["decode"]["disk_read"] == pytest.approx(expected, rel=1e-3)


def test_each_phase_is_bound_by_its_slowest_resource() -> None:
    seconds = {"prefill": {"compute": 3.0, "memory": 1.0}, "decode": {"compute": 2, "memory": 4.0}}
    assert bound_s(seconds) == 7.0
    assert binding(seconds) == "memory"


@pytest.mark.parametrize("machine", ["t4-16gb", "h200-141gb", "generic-cpu"])
@pytest.mark.parametrize("percent", [(100, 0, 100, 0, 100, 0), (0, 50, 0, 50, 0, 50)])
def test_no_prediction_beats_the_bound(machine: str, percent: tuple[float, ...]) -> None:
    hw = known_machine(machine)
    policy = Policy.from_percent(*percent, batch_size=8, num_batches=5)
    least = roofline(SETTING, policy, WORK, hw)
    budgets = Budgets(device=None, host=None, disk=None, shared=None)
    problem = Problem(replace(SETTING, unified=hw.unified), hw, budgets, WORK)
    assert bound_s(least) <= evaluate(problem, policy).total_s
