"""The simulator against the bytes of real runs, and against results worked out without it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import inf
from pathlib import Path

import pytest

from flexgen_jax import LLM, Policy, SamplingParams
from flexgen_jax.models.shapes import known_shape
from flexgen_jax.policy.hardware import Rate
from flexgen_jax.policy.policy import SCORE, Workload
from flexgen_jax.policy.shapes import BlockShape
from flexgen_jax.schedule.admission import block_of
from flexgen_jax.search.clock import Clock
from flexgen_jax.search.cost_model import FRACTIONS, block_terms, fractions_of
from flexgen_jax.search.costs import Costs
from flexgen_jax.search.simulate import Prediction, simulate
from tests.helpers.cases import covering
from tests.helpers.models import PLACEMENTS
from tests.helpers.profiles import costs_of, machine

OPTIONS = (
    {},
    {"attention": "device"},
    {"schedule": "row"},
    {"overlap": False},
    {"copies_ahead": False},
    {"weight_bits": 4, "cache_bits": 4},
)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("where", "how"),
    covering(
        [*((x, 2) for x in PLACEMENTS), ((0,) * 6, 6)],
        [*product(OPTIONS, [True, False])],
        together=1,
    ),
)
def test_bytes_are_those_of_a_run(
    checkpoint: Callable[[], Path],
    tmp_path: Path,
    where: tuple[tuple[int, ...], int],
    how: tuple[dict[str, object], bool],
) -> None:
    """The simulator counts the bytes that the executor counts.

    Six batches are more than may stay in RAM until they are written.
    """
    (percent, num_batches), (options, unified) = where, how
    changes = {"attention": "host", "num_batches": num_batches, **options}
    policy = Policy.from_percent(*percent, batch_size=2, kv_block_tokens=4, **changes)
    tokens = 10
    with LLM(
        checkpoint(), dtype="float32", policy=policy, offload_dir=tmp_path, unified=unified
    ) as llm:
        llm.generate(
            prompt_token_ids=[[5] * 16] * (2 * num_batches),
            sampling_params=SamplingParams(max_tokens=tokens, ignore_eos=True),
        )
        report = llm.report()
        config = llm.config
    costs = costs_of(config, "float32", policy, unified=unified)
    shape = BlockShape((2,) * num_batches, (report["prompt_len"],) * num_batches, tokens)
    predicted = simulate(costs, costs.plan(shape)).bytes
    for link, nbytes in report["bytes"].items():
        assert predicted[link] == pytest.approx(nbytes, rel=0.02), link


def test_bytes_of_scoring_are_those_of_a_run(
    checkpoint: Callable[[], Path], tmp_path: Path
) -> None:
    """When prompts are scored, the last layer's hidden states of all tokens go to disk, too."""
    policy = Policy.from_percent(0, 100, 0, 0, 0, 0, batch_size=2, num_batches=2)
    with LLM(
        checkpoint(), dtype="float32", policy=policy, offload_dir=tmp_path, unified=False
    ) as llm:
        llm.score(prompt_token_ids=[[5] * 16] * 4)
        report, config = llm.report(), llm.config
    costs = costs_of(config, "float32", policy, machine())
    shape = BlockShape((2, 2), (report["prompt_len"],) * 2, 1, SCORE)
    predicted = simulate(costs, costs.plan(shape)).bytes
    for link, nbytes in report["bytes"].items():
        assert predicted[link] == pytest.approx(nbytes, rel=0.02), link
    states = 2 * costs.hidden_bytes(2, report["prompt_len"]) * (config.num_layers + 1)
    assert report["bytes"]["disk_write"] == states


def run(policy: Policy, hw_changes: dict[str, object], gen: int = 6) -> tuple[Prediction, Costs]:
    config = known_shape("facebook/opt-1.3b")
    costs = costs_of(config, "float16", policy, machine(**hw_changes))
    rows = (policy.batch_size,) * policy.num_batches
    plan = costs.plan(BlockShape(rows, (128,) * len(rows), gen))
    return simulate(costs, plan), costs


@pytest.mark.parametrize(
    ("percent", "slow"),
    [
        ((0, 100, 100, 0, 100, 0), "host_to_device"),
        ((0, 0, 100, 0, 100, 0), "disk_read"),
        ((100, 0, 0, 100, 100, 0), "host_compute"),
    ],
)
def test_the_slowest_resource_decides(percent: tuple[int, ...], slow: str) -> None:
    changes: dict[str, object] = {"host_to_device": Rate.constant(1e9)}
    if slow == "disk_read":
        changes = {"disk_read": Rate.constant(1e8)}
    if slow == "host_compute":
        changes = {"host_attention": {16: Rate.constant(1e7)}}
    policy = Policy.from_percent(*percent, batch_size=4, num_batches=4, attention="host")
    found, _ = run(policy, changes)
    assert found.binding == slow
    assert found.busy_s[slow] <= found.total_s * (1 + 1e-9)
    assert found.total_s == pytest.approx(found.busy_s[slow], rel=0.1)


def test_kv_blocks_are_read_at_the_rate_of_their_size() -> None:
    """A block's keys and values are 0.52 MB for 16 tokens of a prompt, 0.13 MB for 4 new ones."""
    rate = Rate(((6e4, 1e8), (1e6, 1e9)))
    options = {"batch_size": 4, "num_batches": 2, "kv_block_tokens": 4, "attention": "host"}
    policy = Policy.from_percent(100, 0, 0, 0, 100, 0, **options)
    found, costs = run(policy, {"disk_read": rate}, gen=11)
    large, small = (2 * 4 * 2048 * tokens * 2 for tokens in (16, 4))
    seconds = sum(
        8 * large / rate.at(large) + before // 4 * small / rate.at(small) for before in range(10)
    )
    assert found.busy_s["disk_read"] == pytest.approx(24 * 2 * seconds, rel=1e-6)
    term = block_terms(costs, Workload(128, 11, 8)).decode["disk_read"]
    planned = 24 * 10 * term.at({**dict.fromkeys(FRACTIONS, 0.0), "cd": 1.0})
    assert planned == pytest.approx(found.busy_s["disk_read"], rel=0.1)


def test_a_run_on_the_device_takes_what_its_steps_take() -> None:
    """By phase: 2 FLOPs a parameter and token, attention to the prompt and to all tokens before."""
    rows, prompt, hidden = 4, 128, 2048
    policy = Policy.from_percent(100, 0, 100, 0, 100, 0, batch_size=rows, num_batches=3)
    found, _ = run(policy, {})
    head = 2 * rows * 50272 * hidden / 20e12
    layer = 24 * rows * hidden**2 / 20e12
    scores = 4 * rows * prompt**2 * hidden / 10e12
    # The last layer makes keys and values of all tokens, and goes on with one of each sequence.
    last = (2 * 2 * prompt + 20) * rows * hidden**2 / 20e12 + 2 * rows * prompt * hidden / 100e9
    assert found.prefill_s == pytest.approx(
        3 * (23 * (prompt * layer + scores) + last + head), 0.01
    )
    attended = [2 * rows * before * hidden / 100e9 for before in range(prompt, prompt + 5)]
    decode_s = sum(3 * (24 * (layer + seconds) + head) for seconds in attended)
    assert found.decode_s == pytest.approx(decode_s, 0.01)
    assert found.busy_s["compute"] == pytest.approx(found.total_s)


def test_what_moves_for_the_cpu_to_attend() -> None:
    """There queries, and keys and values but for the last token's; back an fp32 result and its
    log-sum-exp."""
    policy = Policy.from_percent(
        *(100, 0, 0, 100, 100, 0), batch_size=4, num_batches=3, attention="host"
    )
    found, _ = run(policy, {}, gen=6)
    steps = 24 * 3 * 5
    assert found.bytes["host_to_device"] == steps * 4 * 32 * (64 + 1) * 4
    token = 24 * 3 * 4 * 2048 * 2
    assert found.bytes["device_to_host"] == (5 + 2 * (128 + 4)) * token
    assert found.bytes["disk_read"] == found.bytes["disk_write"] == 0


def test_a_step_whose_blocks_are_all_on_the_device_asks_nothing_of_the_cpu() -> None:
    policy = Policy.from_percent(
        *(100, 0, 90, 10, 100, 0), batch_size=4, num_batches=3, attention="host"
    )
    found, costs = run(policy, {}, gen=40)
    batches = block_of(costs.plan(BlockShape((4,) * 3, (128,) * 3, 40)))
    asked = sum(
        "host" in state.homes[: 2 + before // 32]
        for running in batches
        for state in running.layers
        for before in range(39)  # new tokens in the cache; the prompt is one block
    )
    assert 0 < asked < 24 * 3 * 39
    assert found.bytes["host_to_device"] == asked * 4 * 32 * (64 + 1) * 4


@pytest.mark.parametrize(("gen", "sample"), [(2, 1), (11, 3), (11, 9), (11, 10), (40, 7)])
def test_sampled_tokens_stand_for_all(gen: int, sample: int) -> None:
    """Exactly, where every token takes as long."""
    policy = Policy.from_percent(100, 0, 100, 0, 100, 0, batch_size=4, num_batches=2)
    hw = machine(device_attention={16: Rate.constant(inf)})
    costs = costs_of(known_shape("facebook/opt-125m"), "float16", policy, hw)
    shape = BlockShape((4, 4), (16, 16), gen)
    plan = costs.plan(shape)
    whole, part = simulate(costs, plan), simulate(costs, plan, sample=sample)
    assert part.busy_s["compute"] == pytest.approx(whole.busy_s["compute"])


def test_two_lanes_share_the_disk() -> None:
    """Each reads one thing after the other, and alone as soon as the other is empty."""
    clock = Clock(machine(), overlap=True, unified=False)
    lanes = ((False, 0.25), (False, 1.25), (True, 1.5))
    entries = [clock.read(1, lane, "disk_read", seconds) for lane, seconds in lanes]
    for now, done in ((0.4, 0), (0.5, 1), (2.9, 1), (3.0, 3)):
        clock.wait(now + 1e-6)
        assert sum(map(clock.read_done, entries)) == done
    clock.finish_read(clock.read(1, True, "disk_read", 0.25))
    assert clock.now == pytest.approx(3.25, abs=1e-5)
    assert clock.busy["disk_read"] == pytest.approx(3.25)


def test_what_the_page_cache_holds_comes_from_disk_once() -> None:
    """The decoder layers' bytes come from disk once; the tables of the ends do anyway."""
    rates = {"disk_read": Rate.constant(1e9), "page_cache": Rate.constant(8e9)}
    config, policy = known_shape("facebook/opt-125m"), Policy.from_percent(0, 0, 100, 0, 100, 0)
    costs = costs_of(config, "float16", policy, machine(**rates))
    layers = 12 * 2 * 12 * 768**2
    ends = 2 * (50272 + 2050) * 768  # of the table that both ends share, one copy
    decoder = [t.key for layer in costs.spec.decoders for t in layer.large]
    for cached, share in ((decoder, 1.0), ([k for k in decoder if ".mlp." in k], 2 / 3), ([], 0.0)):
        plan = costs.plan(BlockShape((8,), (16,), 5))
        found = simulate(costs, plan, frozenset(cached))
        assert found.bytes["disk_read"] == 5 * layers + ends
        again = share / 8e9 + (1 - share) / 1e9
        seconds = (layers + ends) / 1e9 + 4 * layers * again
        assert found.busy_s["disk_read"] == pytest.approx(seconds)


def test_overlap_never_costs_time_and_the_sum_is_a_bound() -> None:
    for percent in PLACEMENTS:
        flags = {"batch_size": 4, "num_batches": 3, "attention": "host"}
        with_overlap, _ = run(Policy.from_percent(*percent, **flags), {})
        without, _ = run(Policy.from_percent(*percent, **flags, overlap=False), {})
        assert with_overlap.total_s <= without.total_s * (1 + 1e-9)
        assert without.total_s <= sum(without.busy_s.values()) * (1 + 1e-9)


def test_sampled_tokens_stand_for_the_others() -> None:
    policy = Policy.from_percent(20, 30, 0, 60, 100, 0, batch_size=4, num_batches=3)
    config = known_shape("facebook/opt-1.3b")
    costs = costs_of(config, "float16", policy, machine())
    shape = BlockShape((4,) * 3, (128,) * 3, 40)
    plan = costs.plan(shape)
    whole, part = simulate(costs, plan), simulate(costs, plan, sample=4)
    assert part.total_s == pytest.approx(whole.total_s, rel=0.05)
    for name, seconds in whole.busy_s.items():
        assert part.busy_s[name] == pytest.approx(seconds, rel=0.1, abs=0.02 * whole.total_s)


@pytest.mark.parametrize("percent", PLACEMENTS)
def test_the_cost_model_agrees(percent: tuple[int, ...]) -> None:
    """The cost model is within 25 % of the simulator: it has no start-up, and no waiting between
    batches."""
    policy = Policy.from_percent(*percent, batch_size=8, num_batches=4, attention="host")
    config = known_shape("facebook/opt-6.7b")
    costs = costs_of(config, "float16", policy, machine())
    shape = BlockShape((8,) * 4, (256,) * 4, 32)
    terms = block_terms(costs, Workload(256, 32, 32))
    estimated = sum(terms.estimate(fractions_of(policy)))
    assert estimated == pytest.approx(simulate(costs, costs.plan(shape)).total_s, rel=0.25)


def test_a_decode_steps_hidden_states_stay_in_ram() -> None:
    """A prompt's hidden states are written to disk and read back, those of one token never.

    The last layer makes hidden states of only one token of a prompt.
    """
    policy = Policy.from_percent(100, 0, 100, 0, 0, 0, batch_size=4, num_batches=8)
    short, costs = run(policy, {}, gen=1)
    long, _ = run(policy, {}, gen=9)
    written = costs.setting.config.num_layers  # every layer but the last one and the head writes
    assert short.bytes["disk_write"] == written * 8 * costs.hidden_bytes(4, 128)
    assert 0 < short.bytes["disk_read"] <= short.bytes["disk_write"]
    for link in ("disk_read", "disk_write"):
        assert long.bytes[link] == short.bytes[link]


def test_a_copy_of_weights_has_the_rate_of_its_size() -> None:
    """Wherever they come from; each tensor is a copy of its own."""
    slow_when_small = Rate(((1.0, 1e6), (1e6, 1e9)))
    for percent in ((0, 100, 100, 0, 100, 0), (0, 0, 100, 0, 100, 0)):
        policy = Policy.from_percent(*percent, batch_size=4, num_batches=2)
        found, costs = run(policy, {"host_to_device": slow_when_small}, gen=2)
        tensors = [
            costs.formats.weight(t).nbytes for t in costs.spec.tensors.values() if t.is_small < 1
        ]
        assert min(tensors) > 1e6
        assert found.busy_s["host_to_device"] == pytest.approx(found.bytes["host_to_device"] / 1e9)
