"""Experts that the CPU computes where they lie: bytes, tokens, plans, and who decides."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flexgen_jax import LLM, Policy, SamplingParams
from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.families import read_config
from flexgen_jax.models.spec_of_config import model_spec
from flexgen_jax.models.tensor_spec import Formats
from flexgen_jax.policy.expert_rates import ExpertRates
from flexgen_jax.policy.hardware import HardwareProfile, KernelSizes, Rate
from flexgen_jax.policy.machines import known_machine
from flexgen_jax.policy.placement import place_weights
from flexgen_jax.policy.plan import BlockPlan
from flexgen_jax.policy.policy import PolicyError, Workload
from flexgen_jax.policy.shapes import BlockShape, Setting
from flexgen_jax.schedule.backend import Inputs
from flexgen_jax.schedule.loop import BlockLoop
from flexgen_jax.schedule.waves import Step
from flexgen_jax.search.fit import Budgets
from flexgen_jax.search.memory import Idle, peak_bytes, planned_ledger
from flexgen_jax.search.problem import Choices, Problem
from flexgen_jax.search.search import search
from flexgen_jax.search.simulate import simulate
from tests.helpers.models import assert_within_plan, prompts
from tests.helpers.numpy_llama import MIXTRAL, write
from tests.helpers.profiles import costs_of, machine

RAW = MIXTRAL | {"num_local_experts": 8}
NEW = 9
PARAMS = SamplingParams(max_tokens=NEW, ignore_eos=True)


def config() -> ModelConfig:
    return read_config(RAW)


def expert_bytes() -> int:
    tensors = [t for t in model_spec(config()).decoders[0].tensors if t.expert == 0]
    return sum(Formats("float32").weight(t).nbytes for t in tensors)


@pytest.mark.few(3)
@pytest.mark.parametrize("share", [0.0, 0.5, 0.7, 1.0])
@pytest.mark.parametrize("weights", [(0, 100), (0, 0)])
def test_copied_are_those_that_the_cpu_leaves(
    tmp_path: Path, share: float, weights: tuple[int, int]
) -> None:
    """In a decode step of one token, two experts are chosen, of which the CPU computes a share; all
    else of a layer is copied for every token."""
    model = write(tmp_path / "m", RAW)
    policy = Policy.from_percent(*weights, 100, 0, 100, 0, batch_size=1, host_experts=share)
    with LLM(
        tmp_path / "m", dtype="float32", policy=policy, offload_dir=tmp_path / "o", unified=False
    ) as llm:
        (found,) = llm.generate(prompt_token_ids=prompts()[1:2], sampling_params=PARAMS)
        report, spec = llm.report(), model_spec(llm.config)
    assert found.token_ids == model.greedy(prompts()[1], NEW)
    dense = sum(
        Formats("float32").weight(t).nbytes
        for layer in spec.layers
        for t in layer.large
        if t.expert is None
    )
    copied = 2 - round(2 * share)
    weight_rows = [row for row in report["breakdown"] if row["content"] == "weights"]
    moved = sum(
        row["bytes"]
        for row in weight_rows
        if (row["resource"], row["phase"]) == ("host_to_device", "decode")
    )
    steps = (NEW - 1) * len(spec.decoders)
    least = steps * copied * expert_bytes()
    assert least <= moved <= least + NEW * dense  # the first layers are copied ahead of a phase
    assert (report["busy_s"]["host_compute"] > 0) == (share > 0)
    assert_within_plan(report)


@pytest.mark.parametrize("weight_format", ["own", "paper"])
def test_packed_experts_are_computed_as_on_the_device(tmp_path: Path, weight_format: str) -> None:
    write(tmp_path / "m", RAW)
    found = []
    for share in (0.0, 1.0):
        policy = Policy.from_percent(
            *(0, 100, 100, 0, 100, 0),
            batch_size=2,
            weight_bits=4,
            weight_format=weight_format,
            host_experts=share,
        )
        with LLM(tmp_path / "m", dtype="float32", policy=policy, unified=False) as llm:
            results = llm.generate(prompt_token_ids=prompts()[1:3], sampling_params=PARAMS)
        found.append([result.token_ids for result in results])
    assert found[0] == found[1]


@pytest.mark.few(2)
@pytest.mark.parametrize("num_cached", [0, 1, 8, 24])
@pytest.mark.parametrize(("share", "weights", "batches"), [(0.0, (0, 100), 1), (0.5, (20, 30), 2)])
def test_cached_experts_are_copied_once(
    tmp_path: Path, num_cached: int, share: float, weights: tuple[int, int], batches: int
) -> None:
    """Least recently used ones leave: counted from the routing of one sequence."""
    model, asked = write(tmp_path / "m", RAW), prompts()[1 : 1 + batches]
    policy = Policy.from_percent(
        *(*weights, 100, 0, 100, 0),
        batch_size=1,
        num_batches=batches,
        host_experts=share,
        expert_cache_bytes=num_cached * expert_bytes(),
    )
    with LLM(
        tmp_path / "m", dtype="float32", policy=policy, offload_dir=tmp_path / "o", unified=False
    ) as llm:
        found = llm.generate(prompt_token_ids=asked, sampling_params=PARAMS)
        report = llm.report()
    for ids, result in zip(asked, found, strict=True):
        assert result.token_ids == model.greedy(ids, NEW)
    assert_within_plan(report)
    cached = report["cached_experts"]
    if share:
        assert num_cached == 0 or cached["misses"] > 0
        return
    recent: list[tuple[str, int]] = []
    hits = misses = 0
    for step in range(NEW - 1):
        for layer, tokens in model.routing.items():
            chosen = [(layer, number) for number in sorted(tokens[len(asked[0]) + step])]
            hits += sum(expert in recent for expert in chosen)
            misses += sum(expert not in recent for expert in chosen)
            there = [expert for expert in chosen if expert in recent]
            new = [expert for expert in chosen if expert not in recent]
            recent = [expert for expert in recent if expert not in there]
            recent = [*recent, *there, *new][-num_cached:] if num_cached else []
    assert cached == ({"hits": hits, "misses": misses} if num_cached else {"hits": 0, "misses": 0})
    if num_cached == 24:
        assert hits > misses


TWO_DEVICES = """
import sys
from pathlib import Path
import jax
from flexgen_jax import LLM, Policy, SamplingParams
from flexgen_jax.offload.tiers import Memories

Memories.cpu = property(lambda memories: jax.devices()[1])
folder, ids = Path(sys.argv[1]), [int(x) for x in sys.argv[2:]]
policy = Policy.from_percent(30, 40, 100, 0, 100, 0, batch_size=1, host_experts=1.0)
params = SamplingParams(max_tokens=9, ignore_eos=True)
with LLM(folder, dtype="float32", policy=policy, offload_dir=folder, unified=False) as llm:
    (found,) = llm.generate(prompt_token_ids=[ids], sampling_params=params)
print(*found.token_ids)
"""


def test_the_cpu_may_be_another_device(tmp_path: Path) -> None:
    """As next to a GPU, programs of the one take no arrays of the other."""
    model, ids = write(tmp_path / "m", RAW), prompts()[1]
    flags = "--xla_force_host_platform_device_count=2"
    ran = subprocess.run(
        [sys.executable, "-c", TWO_DEVICES, str(tmp_path / "m"), *map(str, ids)],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout.split() == [str(token) for token in model.greedy(ids, NEW)], ran.stderr


def test_an_expert_lies_in_one_tier() -> None:
    """Else neither place could compute it."""
    spec = model_spec(config())
    tiers = place_weights(spec, "float32", Policy.from_percent(45, 25, 100, 0, 100, 0))
    homes = {
        (layer.index, number): {tiers[t.key] for t in tensors if not t.is_small}
        for layer in spec.decoders
        for number, tensors in enumerate(layer.expert_tensors)
    }
    assert all(len(tiers) == 1 for tiers in homes.values())
    assert set.union(*homes.values()) == {"device", "host", "disk"}


def profile(product: float, read: float = 0.0, **changes: object) -> HardwareProfile:
    """Returns a machine whose CPU makes `product` FLOP/s next to the device; read: byte/s of its
    memory."""
    rates = {bits: Rate.constant(product) for bits in (16, 8, 4)}
    return machine(host_linear=rates, host_read=read, **changes)


def test_the_share_makes_both_take_equally_long() -> None:
    """Twice as fast as the copies, the CPU computes two thirds; not if handing over takes longer
    than that saves, or if nearly all experts are chosen."""
    layer = model_spec(config()).decoders[0]
    copy_s = expert_bytes() / 12e9  # the link of `machine`
    fast = profile(2 * 2 * layer.expert_size / copy_s)

    def share(hw: HardwareProfile, **shape: int) -> float:
        return costs_of(config(), "float32", Policy(**shape), hw).host_share()

    assert share(fast, batch_size=1) == pytest.approx(2 / 3, abs=1e-3)
    assert share(machine(), batch_size=1) == 0
    assert share(replace(fast, split_s=2 * copy_s), batch_size=1) == 0
    assert share(fast, batch_size=8) == 0
    # Two batches of a token copy 3.5 of eight experts once, and compute four.
    both = share(fast, batch_size=1, num_batches=2)
    assert both == pytest.approx(1 / (1 + 0.5 * 4 / 3.5), abs=1e-3)


@pytest.mark.parametrize(("share", "read"), [(0.5, 0.0), (1.0, 0.0), (0.5, 6e9)])
def test_simulated_steps_overlap_both_places(share: float, read: float) -> None:
    """A decode step takes as long as the copies, or as the CPU, which share its memory's rate."""
    policy = Policy.from_percent(0, 100, 100, 0, 100, 0, batch_size=1, host_experts=share)
    layer = model_spec(config()).decoders[0]
    host_s = 3e-6
    hw = profile(2 * layer.expert_size / host_s, read)
    costs = costs_of(config(), "float32", policy, hw)
    plan = costs.plan(BlockShape((1,), (16,), NEW))
    slow = replace(hw, host_to_device=Rate.constant(1e15))
    without_copies = simulate(costs_of(config(), "float32", policy, slow), plan)
    steps = 3 * (NEW - 1)
    count = round(2 * share)
    expected = count * host_s
    if read:
        expected = max(expected, 2 * expert_bytes() / read)
    assert without_copies.busy_s["host_compute"] == pytest.approx(steps * expected)
    all_copied = costs_of(config(), "float32", replace(policy, host_experts=0.0), hw)
    moved = simulate(all_copied, all_copied.plan(BlockShape((1,), (16,), NEW)))
    spared = moved.bytes["host_to_device"] - simulate(costs, plan).bytes["host_to_device"]
    hidden = 4 * layer.hidden_size
    assert spared == steps * (count * expert_bytes() - hidden)


@pytest.mark.parametrize("weights", [(50, 50), (70, 30), (50, 0)])
def test_peaks_hold_for_experts_that_all_lie_elsewhere(weights: tuple[int, int]) -> None:
    """A dry run chooses experts outside of the device, as many as a step can choose."""
    many = read_config(RAW | {"num_local_experts": 32})
    policy = Policy.from_percent(*weights, 100, 0, 100, 0, batch_size=1)
    shape = BlockShape((1,), (4,), 2000)  # its cache is largest while it decodes
    plan = BlockPlan(Setting(many, "float32", False, KernelSizes()), policy, shape)
    ledger = planned_ledger(plan)
    chosen: list[int] = []

    class Unlucky(Idle):
        def compute(self, step: Step, inputs: Inputs) -> None:
            if inputs.experts is not None:
                away, guessable = [*inputs.experts.away], [*inputs.experts.guessable]
                loads = inputs.experts.load(away[-2:], guessable[:2])
                chosen.append(len(loads.copied))

    BlockLoop(plan, Unlucky(), ledger, {0: 1, 1: 1, 1998: 1, 1999: 1}, across_skipped=False).run()
    assert set(chosen) == {2}
    planned = peak_bytes(plan)
    assert all(ledger.peak[tier] <= planned[tier] for tier in planned)


def test_peaks_count_a_cache_that_has_no_hits() -> None:
    policy = Policy.from_percent(0, 100, 100, 0, 100, 0, batch_size=1)
    cached = replace(policy, expert_cache_bytes=3 * expert_bytes())
    plain, full = (
        peak_bytes(costs_of(config(), "float32", each).plan(BlockShape((1,), (16,), NEW)))
        for each in (policy, cached)
    )
    assert full["device"] == plain["device"] + 3 * expert_bytes()
    assert full["host"] == plain["host"]


def test_a_machine_without_rates_of_the_cpu_can_be_simulated() -> None:
    """Its CPU multiplies as fast as it reads a KV cache; a search leaves it nothing to compute."""
    policy = Policy.from_percent(0, 100, 100, 0, 100, 0, batch_size=1, host_experts=1.0)
    hw = known_machine("t4-16gb")
    costs = costs_of(config(), "float16", policy, hw)
    layer = costs.spec.decoders[0]
    rate = 2 * hw.host_attention[16].at(1)
    assert costs.host_experts_s(layer, 1, 1, 0) == pytest.approx(2 * layer.expert_size / rate)
    assert simulate(costs, costs.plan(BlockShape((1,), (16,), NEW))).busy_s["host_compute"] > 0
    assert costs.host_share() == 0


def test_a_search_gives_the_cpu_its_share() -> None:
    """Where that is faster; the flag, and a policy of one's own, win."""
    layer, spec = model_spec(config()).decoders[0], model_spec(config())
    total = sum(Formats("float32").weight(t).nbytes for t in spec.tensors.values())
    copy_s = expert_bytes() / 12e9
    hw = profile(4 * layer.expert_size / copy_s)
    budgets = Budgets(device=int(0.75 * total), host=4 * total, disk=None)

    def found(hw: HardwareProfile, base: Policy) -> float | None:
        problem = Problem(
            setting=Setting(config(), "float32", hw.unified, hw.sizes),
            hw=hw,
            budgets=budgets,
            workload=Workload(16, NEW, 1),
            base=base,
            choices=Choices(),
        )
        return search(problem)[0].policy.host_experts

    assert found(hw, Policy()) == pytest.approx(2 / 3, abs=1e-3)
    assert found(machine(), Policy()) == 0
    assert found(hw, Policy(host_experts=0.25)) == 0.25


def test_a_search_caches_experts_if_some_are_popular() -> None:
    """Half of the device's experts make room where few experts get most tokens."""
    many = read_config(RAW | {"num_local_experts": 64, "intermediate_size": 256})
    spec = model_spec(many)
    total = sum(Formats("float32").weight(t).nbytes for t in spec.tensors.values())

    def cached(shares: tuple[float, ...]) -> int:
        hw = machine()
        problem = Problem(
            setting=Setting(many, "float32", False, hw.sizes, experts=ExpertRates(shares)),
            hw=hw,
            budgets=Budgets(device=int(0.5 * total), host=4 * total, disk=None),
            workload=Workload(16, 60, 1),
            choices=Choices(),
        )
        return search(problem)[0].policy.expert_cache_bytes

    assert cached((0.4,) * 4 + (0.4 / 60,) * 60) > 0
    assert cached((2 / 64,) * 64) == 0
    assert cached(()) == 0


@pytest.mark.parametrize("nbytes", [-1, 0.5, "4GB", True])
def test_impossible_caches(nbytes: object) -> None:
    with pytest.raises(PolicyError, match="expert_cache_bytes"):
        Policy(expert_cache_bytes=nbytes)  # type: ignore[arg-type]


@pytest.mark.parametrize("share", [-0.1, 1.5, "all", True])
def test_impossible_shares(share: object) -> None:
    with pytest.raises(PolicyError, match="host_experts"):
        Policy(host_experts=share)  # type: ignore[arg-type]


def test_policies_in_json_have_the_share() -> None:
    policy = Policy(host_experts=0.4)
    assert Policy.from_json(policy.to_json()) == policy
    assert Policy.from_json("{}").host_experts is None
