"""Policy search: plans fit, are no worse than plans made by hand, and agree with the paper."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from math import prod
from pathlib import Path

import pytest

from flexgen_jax.models.shapes import known_shape
from flexgen_jax.policy.drafts import DraftRates
from flexgen_jax.policy.hardware import PROFILE_VERSION, HardwareProfile, ProfileError, Rate
from flexgen_jax.policy.machines import MACHINES, known_machine, read_profile
from flexgen_jax.policy.policy import GREEDY, SCORE, Policy, Workload
from flexgen_jax.policy.shapes import Setting
from flexgen_jax.search.candidates import candidates, frontier
from flexgen_jax.search.fit import Budgets
from flexgen_jax.search.problem import Choices, Problem
from flexgen_jax.search.search import evaluate, search
from flexgen_jax.search.simulate import simulate

sys.path.append(str(Path(__file__).parent.parent.parent / "scripts" / "benchmarks"))
import compare_paper

GB = 10**9


def problem(model: str = "facebook/opt-6.7b", **changes: object) -> Problem:
    hw = known_machine("t4-16gb")
    values: dict[str, object] = {
        "setting": Setting(known_shape(model), "float16", unified=False),
        "hw": hw,
        "budgets": Budgets(hw.device_memory, hw.host_memory, hw.disk_space),
        "workload": Workload(256, 16, 64),
    }
    return Problem(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(MACHINES))
def test_profiles_survive_json(name: str, tmp_path: Path) -> None:
    profile = known_machine(name)
    (tmp_path / "p.json").write_text(profile.to_json())
    assert read_profile(tmp_path / "p.json") == profile == read_profile(name)


SHEETS = {
    "t4-16gb": (65e12, 320e9, 15.8e9),
    "rtx3060-12gb": (51e12, 360e9, 31.5e9),
    "rtx3090-24gb": (142e12, 936e9, 31.5e9),
    "rtx4090-24gb": (165e12, 1008e9, 31.5e9),
    "a5000-24gb": (111e12, 768e9, 31.5e9),
    "l4-24gb": (121e12, 300e9, 31.5e9),
    "a100-80gb": (312e12, 2039e9, 31.5e9),
    "h100-80gb": (989e12, 3350e9, 63e9),
    "h200-141gb": (990e12, 4800e9, 63e9),
}
"""FLOP/s of dense fp16 products, byte/s of the memory and of the bus, from NVIDIA's data sheets."""


@pytest.mark.parametrize("name", sorted(SHEETS))
def test_known_machines_stay_within_their_data_sheets(name: str) -> None:
    """Nothing is taken to be faster, and large products reach a quarter of what is printed."""
    hw, (flops, memory, bus) = known_machine(name), SHEETS[name]
    peak = max(speed for _, speed in hw.linear[16].points)
    assert 0.25 * flops < peak <= flops or (name == "t4-16gb" and peak == 21.24e12)
    assert hw.prefill_attention.at(512) <= flops
    assert 2 * hw.device_attention[16].at(1e9) <= memory
    for bits in (8, 4):  # each weight is read once at least
        assert hw.linear[bits].at(1) <= 2 * memory / (bits / 8)
        assert hw.linear[bits].at(8) >= hw.linear[bits].at(1)
    assert hw.host_to_device.at(1e9) <= bus and hw.device_to_host.at(1e9) <= bus
    assert hw.disk_write.at(1e9) <= hw.disk_read.at(1e9) <= hw.page_cache.at(1e9) <= bus


def test_every_known_machine_with_a_gpu_has_a_data_sheet() -> None:
    assert {*SHEETS} == {name for name in MACHINES if not known_machine(name).unified}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[]", "JSON object"),
        ('{"version": 99}', "version 99"),
        (f'{{"version": {PROFILE_VERSION}}}', "'name' is missing"),
    ],
)
def test_bad_profiles_are_named(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ProfileError, match=r"p\.json.*" + said):
        read_profile(tmp_path / "p.json")
    with pytest.raises(ProfileError, match="t4-16gb"):
        read_profile(tmp_path / "none.json")


def test_profile_with_bad_rates() -> None:
    text = known_machine("t4-16gb").to_json()
    with pytest.raises(ProfileError, match="positive"):
        HardwareProfile.from_json(text.replace("12890000000.0", "-1.0"))


def test_rates_between_and_beyond_points() -> None:
    rate = Rate(((1.0, 10.0), (100.0, 1000.0)))
    assert [rate.at(x) for x in (0.1, 1, 10, 100, 1e6)] == pytest.approx([10, 10, 100, 1000, 1000])
    assert rate.seconds(0.0) == 0.0


def test_what_fits_stays_on_the_device() -> None:
    plan = search(problem("facebook/opt-1.3b"))[0]
    assert plan.policy.percent == (100, 0, 100, 0, 100, 0)
    assert plan.num_sequences == 64


@pytest.mark.few(1)
@pytest.mark.parametrize("model", ["facebook/opt-6.7b", "facebook/opt-66b"])
@pytest.mark.parametrize("device", [6, 16])
def test_chosen_plans_fit_and_beat_plain_ones(model: str, device: int) -> None:
    asked = problem(model, budgets=Budgets(device * GB, 30 * GB, 500 * GB))
    plans = search(asked)
    for plan in plans:
        assert not asked.budgets.shortfalls(asked.peak(plan.policy))
    plain = [
        Policy.from_percent(*percent, batch_size=size, num_batches=count, attention="host")
        for percent in ((0, 0, 0, 100, 100, 0), (0, 50, 0, 100, 100, 0), (0, 100, 0, 100, 100, 0))
        for size, count in ((1, 1), (8, 1), (8, 8), (16, 4))
    ]
    fitting = [p for p in plain if not asked.budgets.shortfalls(asked.peak(p))]
    assert fitting
    for policy in fitting:
        assert plans[0].throughput >= 0.97 * evaluate(asked, policy).throughput


@pytest.mark.parametrize("head", [SCORE, GREEDY])
def test_runs_without_a_cache_are_planned(head: str) -> None:
    asked = problem("facebook/opt-1.3b", workload=Workload(256, 1, 8, head))  # type: ignore[arg-type]
    assert search(asked)[0].policy.percent[:2] == (100, 0)


@pytest.mark.slow
def test_limits_are_kept() -> None:
    free = problem("facebook/opt-30b", workload=Workload(256, 16, 0))
    fastest = search(free)[0]
    limited = search(replace(free, max_latency=0.5 * fastest.latency_s))
    assert limited
    assert all(plan.latency_s <= 0.5 * fastest.latency_s for plan in limited)
    assert limited[0].throughput <= 1.01 * fastest.throughput
    enough = search(replace(free, min_throughput=0.5 * fastest.throughput))
    assert enough[0].throughput >= 0.5 * fastest.throughput
    assert enough[0].latency_s < fastest.latency_s
    assert search(replace(free, max_latency=0.001)) == []


@pytest.mark.parametrize("gen_len", [33, 36, 70])
def test_what_is_written_is_what_the_loop_writes(gen_len: int) -> None:
    """With every token simulated; a prediction leaves out most, and with them sealed blocks."""
    policy = Policy.from_percent(100, 0, 0, 0, 0, 0, batch_size=4, num_batches=2)
    asked = problem("facebook/opt-125m", workload=Workload(16, gen_len, 8))
    found = simulate(asked.costs(policy), asked.plan(policy), frozenset(), 10**6)
    assert evaluate(asked, policy).written == pytest.approx(found.bytes["disk_write"])


@pytest.mark.slow
def test_no_more_is_written_to_the_disk_than_allowed() -> None:
    """A plan that keeps KV cache on disk gives way to one that writes less, down to nothing."""
    free = problem("facebook/opt-30b", budgets=Budgets(14 * GB, 40 * GB, 900 * GB))
    fastest = search(free)[0]
    assert fastest.written_a_day > 1e12
    for share in (0.3, 0.0):
        limit = int(share * fastest.written_a_day)
        plans = search(replace(free, write_limit=limit))
        assert plans and all(plan.written_a_day <= limit for plan in plans)
        assert plans[0].throughput < fastest.throughput


@pytest.mark.slow
def test_compression_is_chosen_only_where_allowed() -> None:
    asked = problem("facebook/opt-175b", workload=Workload(512, 32, 0))
    allowed = replace(asked, choices=Choices((16, 4), (16, 4)))
    plain, packed = search(asked)[0], search(allowed)[0]
    assert (plain.policy.weight_bits, plain.policy.cache_bits) == (16, 16)
    assert 4 in (packed.policy.weight_bits, packed.policy.cache_bits)
    assert packed.throughput > plain.throughput


@pytest.mark.slow
def test_a_plan_holds_over_the_disks_range() -> None:
    """Of the plans for its slowest, usual and fastest rate, the one best in geometric mean."""
    hw = replace(known_machine("t4-16gb"), disk_range=(0.25, 2.0))
    asked = problem("facebook/opt-30b", hw=hw, budgets=Budgets(4 * GB, 24 * GB, 900 * GB))
    at = [replace(asked, hw=replace(hw.with_disk(f), disk_range=(1, 1))) for f in (0.25, 1, 2)]

    def score(policy: Policy) -> float:
        return prod(evaluate(one, policy).throughput for one in at)

    singles = [search(one)[0].policy for one in at]
    chosen = search(asked)[0]
    assert score(chosen.policy) >= max(map(score, singles)) * (1 - 1e-9)
    assert chosen.throughput == evaluate(at[1], chosen.policy).throughput


@pytest.mark.slow
def test_a_small_block_is_enough_where_the_number_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also over a range of disk rates: of plans nearly as fast as the best, the smallest."""
    hw = replace(known_machine("t4-16gb"), disk_range=(0.5, 1.5))
    found = []
    for slack in (0.0, 0.5):
        monkeypatch.setattr("flexgen_jax.search.search.SMALLER_GROUP_LOSS", slack)
        plans = search(problem("facebook/opt-6.7b", hw=hw, workload=Workload(256, 16, 0)))
        found.append(plans[0])
        near = [p for p in plans if p.throughput > 0.6 * plans[0].throughput]
        if slack:
            assert plans[0].block_sequences <= min(plan.block_sequences for plan in near)
    fastest, smallest = found
    assert smallest.block_sequences < fastest.block_sequences


def test_near_the_best_batches_the_best_ones_are_found() -> None:
    """With fewer programs to solve."""
    asked = problem("facebook/opt-30b", workload=Workload(256, 16, 0))
    everywhere = candidates(asked)
    near = candidates(asked, centre=everywhere[0].policy)
    assert near[0] == everywhere[0]
    assert 0 < len(near) < 0.8 * len(everywhere)


def test_frontier_rises() -> None:
    points = frontier(problem("facebook/opt-30b", workload=Workload(256, 16, 0)))
    assert len(points) > 3
    for before, after in pairwise(points):
        assert after.solution.total_s >= before.solution.total_s
        assert after.throughput > before.throughput


@pytest.mark.few(6)
@pytest.mark.parametrize("row", compare_paper.ROWS, ids=lambda r: f"{r.table}-{r.model}-{r.batch}")
def test_rows_of_the_paper(row: compare_paper.Row) -> None:
    assert abs(row.error) < (0.25 if row.is_host_only else 0.35)


@pytest.mark.slow
def test_table_21_is_ranked_as_measured() -> None:
    assert compare_paper.rank_correlation("30b") >= 0.9
    assert compare_paper.rank_correlation("175b") >= 0.9


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("model", "bits"),
    [
        pytest.param("30b", (16,)),
        pytest.param("6.7b", (16, 4), marks=pytest.mark.slow),
        pytest.param("30b", (16, 4), marks=pytest.mark.slow),
        pytest.param("6.7b", (16,), marks=pytest.mark.slow),
        pytest.param("175b", (16,), marks=pytest.mark.slow),
        pytest.param("175b", (16, 4), marks=pytest.mark.slow),
    ],
)
def test_the_chosen_plan_is_no_worse_than_the_papers(model: str, bits: tuple[int, ...]) -> None:
    best = search(compare_paper.problem(model, 512, 0, bits))[0]
    for row in compare_paper.ROWS:
        if row.model == model and row.prompt == 512 and set(row.bits) <= set(bits):
            assert best.throughput >= row.predicted


def test_one_sequence_more_is_one_block_more() -> None:
    """A last block of one sequence moves all the weights again."""
    policy = Policy.from_percent(0, 50, 0, 100, 0, 100, batch_size=64, attention="host")
    seconds = [
        evaluate(problem("facebook/opt-30b", workload=Workload(128, 8, count)), policy).total_s
        for count in (64, 65, 128)
    ]
    assert seconds[1] > 1.5 * seconds[0]
    assert seconds[2] == pytest.approx(2 * seconds[0])


def test_scoring_counts_the_prompts_tokens() -> None:
    policy = Policy(batch_size=8)
    scored, generated = (
        evaluate(problem("facebook/opt-125m", workload=Workload(256, 1, 8, head)), policy)
        for head in (SCORE, GREEDY)
    )
    assert scored.total_s > 1.1 * generated.total_s
    assert scored.throughput == pytest.approx(8 * 256 / scored.total_s)


@pytest.mark.few(1)
@pytest.mark.parametrize("bits", [16, 4])
def test_kv_blocks_are_smaller_where_open_ones_fill_the_memory(bits: int) -> None:
    """Every sequence has an open block in RAM; a shorter one makes room for more sequences."""
    machine = known_machine("generic-cpu")
    asked = problem(
        "facebook/opt-1.3b",
        hw=machine,
        setting=Setting(known_shape("facebook/opt-1.3b"), "float16", unified=True),
        budgets=Budgets(None, None, 60 * GB, shared=GB),
        workload=Workload(128, 32, 0),
        choices=Choices((bits,), (bits,), ("device",), kv_block_tokens=(32, 8)),
    )
    best = search(asked)[0]
    plain = search(replace(asked, choices=replace(asked.choices, kv_block_tokens=(32,))))[0]
    assert (best.policy.kv_block_tokens, plain.policy.kv_block_tokens) == (8, 32)
    assert best.throughput > 1.02 * plain.throughput
    assert not asked.budgets.shortfalls(asked.peak(best.policy))
    roomy = replace(asked, budgets=Budgets(None, None, 60 * GB, shared=100 * GB))
    assert search(replace(roomy, workload=Workload(128, 32, 64)))[0].policy.kv_block_tokens == 32


def test_a_policys_kv_blocks_are_the_largest_that_are_tried() -> None:
    assert Choices.keeping(Policy(kv_block_tokens=12)).kv_block_tokens == (12, 6, 3, 1)
    assert Choices.keeping(Policy(kv_block_tokens=2)).kv_block_tokens == (2, 1)
    assert Choices.keeping(Policy()) == Choices()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("model", "sequences", "accepted", "is_worth"),
    [
        ("facebook/opt-30b", 1, 0.6, True),  # the weights come from the host
        ("facebook/opt-30b", 64, 0.2, False),  # a large batch does more for a pass
        ("facebook/opt-30b", 4, 0.0, False),
    ],
)
def test_tokens_are_guessed_where_that_pays(
    model: str, sequences: int, accepted: float, is_worth: bool
) -> None:
    base = Policy(batch_size=1, num_batches=8, draft_tokens=8)
    rates = DraftRates("lookup", accepted)
    asked = problem(
        setting=Setting(known_shape(model), "float16", unified=False, drafts=rates),
        workload=Workload(256, 64, sequences),
        base=base,
        choices=Choices.keeping(base),
    )
    best = search(asked)[0]
    plain = search(replace(asked, choices=replace(asked.choices, draft_tokens=(0,))))[0]
    assert (best.policy.draft_tokens > 0) == is_worth
    assert best.throughput >= plain.throughput
    if is_worth:
        assert 1.3 < best.throughput / plain.throughput < rates.tokens_a_pass(8)


def test_a_draft_takes_memory_and_time() -> None:
    hw = known_machine("t4-16gb")
    policy = Policy(batch_size=1, num_batches=2, draft_tokens=4)
    rates = DraftRates("self-4bit", 0.8, token_s=0.1, device_bytes=10**9, token_bytes=1000)
    setting = Setting(known_shape("facebook/opt-1.3b"), "float16", unified=False)
    workload = Workload(128, 41, 2)
    free = problem(setting=setting, workload=workload, base=policy)
    taking = replace(free, setting=replace(setting, drafts=rates))
    memory = taking.peak(policy)["device"] - free.peak(policy)["device"]
    assert memory == 10**9 + 2 * (128 + 41) * 1000
    found = rates.tokens_a_pass(4)
    quick = replace(free, setting=replace(setting, drafts=replace(rates, token_s=0.0)))
    seconds = evaluate(taking, policy).decode_s - evaluate(quick, policy).decode_s
    assert seconds == pytest.approx(2 * 40 / found * 4 * 0.1, rel=0.05)  # of each of two texts
    assert hw.device_memory > memory
