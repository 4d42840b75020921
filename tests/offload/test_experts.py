"""A mixture of experts under offloading: with few sequences only the chosen ones are loaded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_jax import LLM, Policy, SamplingParams
from flexgen_jax.caches import read_cached
from flexgen_jax.engine.routing import TELLING, MeasuredRouting, planned_expert_rates
from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.families import read_config
from flexgen_jax.models.spec_of_config import model_spec
from flexgen_jax.models.tensor_spec import Formats
from flexgen_jax.models.weight_source import DummyWeights
from flexgen_jax.policy.expert_rates import ExpertRates
from flexgen_jax.policy.plan import BlockPlan
from flexgen_jax.policy.shapes import BlockShape, Setting
from flexgen_jax.search.memory import peak_bytes
from flexgen_jax.search.simulate import simulate
from flexgen_jax.search.simulated_steps import GUESSED
from tests.helpers.models import assert_within_plan, prompts
from tests.helpers.numpy_llama import MIXTRAL, write
from tests.helpers.profiles import costs_of

RAW = MIXTRAL | {"num_local_experts": 8}
NEW = 9
MANY = MIXTRAL | {"num_local_experts": 70, "intermediate_size": 16}
LONGEST = 24


def expert_bytes() -> int:
    spec = model_spec(read_config(RAW))
    tensors = [t for t in spec.decoders[0].tensors if t.expert == 0]
    return sum(Formats("float32").weight(t).nbytes for t in tensors)


@pytest.mark.few(2)
@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize(("rows", "batches"), [(1, 1), (2, 1), (1, 2)])
def test_bytes_are_read_as_the_routing_says(
    tmp_path: Path, rows: int, batches: int, unified: bool
) -> None:
    """Sequences of a visit share what they choose; all else of a layer is read once a token."""
    model = write(tmp_path / "m", RAW)
    asked = prompts()[1:3][: rows * batches]
    policy = Policy.from_percent(0, 0, 0, 100, 0, 100, batch_size=rows, num_batches=batches)
    params = SamplingParams(max_tokens=NEW, ignore_eos=True)
    with LLM(
        tmp_path / "m",
        dtype="float32",
        policy=policy,
        offload_dir=tmp_path / "o",
        unified=unified,
    ) as llm:
        found = llm.generate(prompt_token_ids=asked, sampling_params=params)
        report, spec = llm.report(), model_spec(llm.config)
    chosen: dict[tuple[str, int], frozenset[int]] = {}
    for ids, result in zip(asked, found, strict=True):
        assert result.token_ids == model.greedy(ids, NEW)
        for layer, tokens in model.routing.items():
            for step, experts in enumerate(tokens[len(ids) :]):  # the last token is not attended to
                chosen[layer, step] = chosen.get((layer, step), frozenset()) | experts
    dense = sum(
        Formats("float32").weight(t).nbytes
        for layer in spec.decoders
        for t in layer.large
        if t.expert is None
    )
    prompts_read = sum(Formats("float32").weight(t).nbytes for t in spec.tensors.values())
    prompts_read -= sum(t.size * 4 for t in spec.tensors.values() if t.is_small)
    decode_read = (NEW - 1) * dense + expert_bytes() * sum(map(len, chosen.values()))
    right, wrong = (report["guessed_experts"][kind] for kind in ("right", "wrong"))
    assert right > 0
    read = prompts_read + decode_read + wrong * expert_bytes()
    assert report["bytes"]["disk_read"] == read
    assert_within_plan(report)


def test_many_sequences_load_all_experts_ahead(tmp_path: Path) -> None:
    write(tmp_path / "m", RAW)
    policy = Policy.from_percent(0, 0, 0, 100, 0, 100, batch_size=8)
    params = SamplingParams(max_tokens=NEW, ignore_eos=True)
    with LLM(tmp_path / "m", dtype="float32", policy=policy, offload_dir=tmp_path / "o") as llm:
        llm.generate(prompt_token_ids=prompts()[:8], sampling_params=params)
        report, spec = llm.report(), model_spec(llm.config)
    layers = sum(Formats("float32").weight(t).nbytes for d in spec.decoders for t in d.large)
    assert not ExpertRates().few_are_chosen(spec.decoders[0], 8)
    assert report["bytes"]["disk_read"] >= NEW * layers


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_the_simulator_expects_experts_to_be_chosen_equally_often(rows: int) -> None:
    config = read_config(RAW)
    policy = Policy.from_percent(0, 0, 0, 100, 0, 100, batch_size=rows)
    costs = costs_of(config, "float32", policy, unified=True)
    plan = costs.plan(BlockShape((rows,), (16,), NEW))
    layer = costs.spec.decoders[0]
    spared = costs.layer_bytes(layer) - costs.decode_bytes(layer, rows)
    assert (spared > 0) == ExpertRates().few_are_chosen(layer, rows)
    read = simulate(costs, plan).bytes["disk_read"]
    whole = NEW * 3 * costs.layer_bytes(layer) + costs.end_bytes()
    chosen = round(ExpertRates().chosen(layer, rows))
    saved = (NEW - 1) * 3 * (8 - chosen) * expert_bytes()
    wrong = (NEW - 1) * 2 * (chosen - round(GUESSED * chosen)) * expert_bytes()
    assert read == whole - (saved - wrong if spared else 0)
    assert peak_bytes(plan)["host"] > 0


def test_expected_experts() -> None:
    """One token chooses two of eight; many choose all."""
    layer, evenly = model_spec(read_config(RAW)).decoders[0], ExpertRates()
    assert evenly.chosen(layer, 1) == pytest.approx(2)
    assert evenly.chosen(layer, 2) == pytest.approx(8 * (1 - 0.75**2))
    assert evenly.chosen(layer, 200) == pytest.approx(8)
    assert layer.active_size == layer.large_size - 6 * layer.expert_size


@given(st.lists(st.integers(0, 50), min_size=8, max_size=8).filter(any), st.integers(1, 40))
def test_expected_experts_by_measured_rates(counts: list[int], rows: int) -> None:
    """Each token chooses two of eight; an expert is not missed by all tokens."""
    layer = model_spec(read_config(RAW)).decoders[0]
    rates = ExpertRates.measured({1: counts, 2: counts[::-1]}, top=2)
    shares = np.minimum(2 * np.array(counts) / sum(counts), 1)
    assert rates.chosen(layer, rows) == pytest.approx(np.sum(1 - (1 - shares) ** rows))
    assert rates.chosen(layer, rows) <= ExpertRates().chosen(layer, rows) + 1e-6


def test_runs_count_choices_for_later_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts are those of the routing; the next start knows them, as does a plan for the folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("flexgen_jax.engine.routing.TELLING", 1)
    model = write(tmp_path / "m", RAW)
    policy = Policy.from_percent(0, 0, 0, 100, 0, 100, batch_size=1)
    params = SamplingParams(max_tokens=NEW, ignore_eos=True)
    options = {"dtype": "float32", "policy": policy, "offload_dir": tmp_path / "o"}
    ids, config = prompts()[1], read_config(RAW)
    with LLM(tmp_path / "m", **options) as llm:
        llm.generate(prompt_token_ids=[ids], sampling_params=params)
    model.greedy(ids, NEW)
    counts = [np.zeros(8, int) for _ in model.routing]
    for layer, tokens in enumerate(model.routing.values()):
        for experts in tokens[len(ids) :]:
            counts[layer][list(experts)] += 1
    (memory,) = (tmp_path / "cache" / "flexgen_jax" / "routing").iterdir()
    kept = read_cached(memory)
    assert [kept[str(layer)] for layer in range(1, 1 + len(counts))] == [
        *map(np.ndarray.tolist, counts)
    ]
    known = planned_expert_rates(tmp_path / "m", config, "float32")
    assert known.shares == ExpertRates.measured(dict(enumerate(counts)), top=2).shares
    with LLM(tmp_path / "m", **options) as llm:
        llm.generate(prompt_token_ids=[ids], sampling_params=params)
    assert planned_expert_rates(tmp_path / "m", config, "float32") == known
    assert read_cached(memory)["1"] == (2 * counts[0]).tolist()
    memory.write_text("{")
    assert planned_expert_rates(tmp_path / "m", config, "float32") == ExpertRates()


def test_few_choices_say_nothing_of_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = read_config(RAW)
    routing = MeasuredRouting(DummyWeights(config, 0), config, "float32")
    routing.observe({1: np.full(8, TELLING - 1)})
    assert MeasuredRouting(DummyWeights(config, 0), config, "float32").rates == ExpertRates()
    routing.observe({1: np.full(8, 1)})
    rates = MeasuredRouting(DummyWeights(config, 0), config, "float32").rates
    assert rates.shares == pytest.approx([2 / 8] * 8)


def peaks(config: ModelConfig, copies_ahead: bool) -> int:
    """Bytes of the device with weights on the host."""
    policy = Policy.from_percent(0, 100, 100, 0, 100, 0, batch_size=2, copies_ahead=copies_ahead)
    shape = BlockShape((2,), (LONGEST,), NEW)
    plan = BlockPlan(Setting(config, "float32", unified=False), policy, shape)
    return peak_bytes(plan)["device"]


@pytest.mark.parametrize("copies_ahead", [True, False])
def test_many_experts_are_loaded_together_or_alone(tmp_path: Path, copies_ahead: bool) -> None:
    """Of 70 experts, prompts load bundles of two, and a few tokens the chosen ones; without copies
    ahead there is one layer on the device."""
    model = write(tmp_path / "m", MANY)
    asked = prompts()[1:3]
    policy = Policy.from_percent(0, 0, 0, 100, 0, 100, batch_size=2, copies_ahead=copies_ahead)
    params = SamplingParams(max_tokens=NEW, ignore_eos=True)
    with LLM(
        tmp_path / "m",
        dtype="float32",
        policy=policy,
        offload_dir=tmp_path / "o",
        unified=False,
    ) as llm:
        found = llm.generate(prompt_token_ids=asked, sampling_params=params)
        report = llm.report()
    for ids, result in zip(asked, found, strict=True):
        assert result.token_ids == model.greedy(ids, NEW)
    assert report["guessed_experts"]["right"] > 0


def test_without_copies_ahead_a_layer_less_is_on_the_device() -> None:
    config = read_config(MANY)
    layer = model_spec(config).decoders[0]
    formats = Formats("float32")
    nbytes = sum(formats.weight(tensor).nbytes for tensor in layer.large)
    # At the peak without them, the embedding's table may be there beside the layer.
    assert 0.9 * nbytes < peaks(config, True) - peaks(config, False) <= nbytes
