"""The cost model against the paper's formulas, and the linear program against brute force."""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf, isclose
from typing import Any

import numpy as np
import pytest

from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.families import read_config
from flexgen_jax.models.shapes import known_shape
from flexgen_jax.models.spec_of_config import model_spec
from flexgen_jax.policy.hardware import TRANSFERS, Rate
from flexgen_jax.policy.policy import GREEDY, SCORE, TIERS, Policy, Workload
from flexgen_jax.policy.shapes import BlockShape
from flexgen_jax.search.cost_model import FRACTIONS, LinearTerm, block_terms, fractions_of
from flexgen_jax.search.fit import Budgets
from flexgen_jax.search.linear_program import memory_terms, solve
from flexgen_jax.search.memory import peak_bytes
from tests.helpers.models import BASE
from tests.helpers.profiles import costs_of, machine

POLICY = Policy.from_percent(20, 30, 10, 60, 25, 50, batch_size=48, num_batches=3, attention="host")


def test_layers_may_multiply_integers_but_the_head_does_not() -> None:
    config = known_shape("facebook/opt-30b")
    layer = model_spec(config).decoders[0]
    measured = machine(linear_int8={4: Rate.constant(50e12)})
    for bits, times in ((4, 2.5), (16, 1.0)):  # 16 bits were not measured with integers
        plain, integers = (
            costs_of(config, "float16", replace(POLICY, weight_bits=bits, matmul_bits=n), measured)
            for n in (16, 8)
        )
        assert plain.linear_s(layer, 96) == pytest.approx(times * integers.linear_s(layer, 96))
        prefills = plain.prefill_s(layer, 4, 64), integers.prefill_s(layer, 4, 64)
        assert prefills[0] > prefills[1] if times > 1 else prefills[0] == prefills[1]
        assert plain.head_s(96) == integers.head_s(96)


def test_sparse_attention_on_the_device_has_the_keys_moved_to_it() -> None:
    config, rows, here, there = known_shape("facebook/opt-30b"), 4, 100, 300
    policy = replace(POLICY, attention="device", attention_sparsity=0.1)
    costs = costs_of(config, "float16", policy, machine())
    layer = model_spec(config).decoders[0]
    keys = rows * there * config.hidden_size
    scores = rows * layer.attention.num_heads * there
    device = costs.device_attention_s(layer, rows, here) + keys / 100e9 + scores / 1e9
    assert costs.split_attention_s(layer, rows, here, there) == pytest.approx(
        (device, 0.1 * keys / 10e9)
    )
    on_host = costs_of(config, "float16", replace(policy, attention="host"), machine())
    found = on_host.split_attention_s(layer, rows, 0, there)
    assert found == pytest.approx((0, 1.1 * keys / 10e9 + scores / 1e9))


def test_terms_are_those_of_appendix_a3() -> None:
    """The expected terms are the paper's, which leaves out embedding and head (3 % here)."""
    config, hw = known_shape("facebook/opt-30b"), machine()
    layer = model_spec(config).decoders[0]
    h1, h2, s, n, bls = config.hidden_size, layer.mlp_width, 512, 32, 48 * 3
    terms = block_terms(costs_of(config, "float16", POLICY, hw), Workload(s, n, bls))
    f = fractions_of(POLICY)
    weights = 8 * h1**2 + 4 * h1 * h2
    away_w, away_c, away_h = f["wc"] + f["wd"], f["cc"] + f["cd"], f["hc"] + f["hd"]
    prefill = {
        "host_to_device": (away_w * weights + 2 * away_h * s * h1 * bls) / 12e9,
        "device_to_host": (4 * away_c * (s + 1) * h1 * bls + 2 * away_h * s * h1 * bls) / 10e9,
        "disk_read": (f["wd"] * weights + 2 * f["hd"] * s * h1 * bls) / 2e9,
        "disk_write": (4 * f["cd"] * bls * (s + 1) * h1 + 2 * f["hd"] * s * h1 * bls) / 1e9,
        "compute": bls * (8 * s * h1**2 + 4 * s * h1 * h2) / 20e12 + 4 * bls * s**2 * h1 / 10e12,
    }
    # The paper counts an element of keys and values as two operations.
    cpu = 4 * away_c * bls * (s + n / 2) * h1 / (2 * 10e9)
    gpu = bls * (8 * h1**2 + 4 * h1 * h2) / 20e12 + 4 * f["cg"] * bls * (s + n / 2) * h1 / 200e9
    decode = {
        "host_to_device": (away_w * weights + 2 * away_h * h1 * bls) / 12e9,
        # The paper's 2 hd h1 bls of hidden states stay in RAM here.
        "disk_read": (4 * f["cd"] * bls * (s + n / 2) * h1 + f["wd"] * weights) / 2e9,
        "disk_write": 4 * f["cd"] * bls * h1 / 1e9,
        "compute": gpu,
        "host_compute": cpu + gpu / 3,  # of three batches, two are computed beside the CPU
    }
    for ours, theirs in ((terms.prefill, prefill), (terms.decode, decode)):
        for name, seconds in theirs.items():
            assert ours[name].at(f) == pytest.approx(seconds, rel=0.05), name


def test_the_last_layer_makes_keys_and_values_of_a_prompt_and_one_token_more() -> None:
    config, rate = known_shape("facebook/opt-30b"), 20e12
    hw = replace(machine(), device_attention={16: Rate.constant(inf)})
    costs = costs_of(config, "float16", POLICY, hw)
    h1, rows, tokens = config.hidden_size, 8, 256
    kept, rest = 2 * 2 * h1**2 * rows * tokens, 2 * 10 * h1**2 * rows
    layer = model_spec(config).decoders[-1]
    last = costs.prefill_s(layer, rows, tokens, only_last=True)
    assert last == pytest.approx((kept + rest) / rate)
    mean = (47 * costs.prefill_s(layer, rows, tokens) + last) / 48
    assert costs.mean_prefill_s(rows, tokens, scores_prompts=False) == pytest.approx(mean)
    whole = costs.prefill_s(layer, rows, tokens)
    assert costs.mean_prefill_s(rows, tokens, scores_prompts=True) == pytest.approx(whole)


def test_no_overlap_is_the_sum() -> None:
    config = known_shape("facebook/opt-1.3b")
    serial = Policy.from_percent(0, 50, 0, 50, 0, 50, overlap=False)
    costs = costs_of(config, "float16", serial, machine())
    terms = block_terms(costs, Workload(128, 16, 8)).prefill
    at = fractions_of(serial)
    parts = [terms[link].at(at) for link in ("host_to_device", "device_to_host", "disk_read")]
    parts.append(terms["disk_write"].at(at))
    assert terms["compute"].at(at) == pytest.approx(
        costs.mean_prefill_s(8, 128, scores_prompts=False) + sum(parts)
    )


def test_the_head_has_all_tokens_of_prompts_that_are_scored() -> None:
    """Otherwise one of each; and both ends are a step with its fixed seconds for every batch."""
    config, hw = known_shape("facebook/opt-1.3b"), machine(step_s=0.001)
    costs = costs_of(config, "float16", Policy(batch_size=4, num_batches=3), hw)
    for head, tokens in ((SCORE, 64), (GREEDY, 1)):
        terms = block_terms(costs, Workload(64, 1, 12, head))
        formed = 2 * 4 * tokens * 50272 * 2048 / 20e12
        assert terms.ends == pytest.approx(3 * (formed + 2 * 0.001))


def test_row_by_row_every_batch_has_the_weights_moved_again() -> None:
    """From the host and, but for those of the two ends, from disk."""
    config, batches = known_shape("facebook/opt-1.3b"), 5
    layer = 2 * 12 * 2048**2
    ends = 2 * (2 * 50272 + 2050) * 2048 / 24  # of each layer; a shared table comes twice
    for schedule, times in (("zigzag", 1), ("row", batches)):
        policy = Policy.from_percent(
            *(0, 50, 100, 0, 100, 0), batch_size=4, num_batches=batches, schedule=schedule
        )
        costs, at = costs_of(config, "float16", policy, machine()), fractions_of(policy)
        terms = block_terms(costs, Workload(64, 8, 20))
        first, later = (
            {name: t.at(at) for name, t in p.items()} for p in (terms.prefill, terms.decode)
        )
        moved = times * (layer + ends) / 12e9
        assert (first["host_to_device"], later["host_to_device"]) == pytest.approx((moved, moved))
        read = [(times * layer + once) / 2 / 2e9 for once in (ends, 0)]
        assert [first["disk_read"], later["disk_read"]] == pytest.approx(read)


def test_transfers_take_longer_beside_computing_where_that_was_measured() -> None:
    config, slowed = known_shape("facebook/opt-1.3b"), {"disk_read": 3.0}
    for overlap, times in ((True, 3), (False, 1)):
        policy = Policy.from_percent(0, 50, 0, 50, 0, 50, overlap=overlap)
        alone, beside = (
            block_terms(costs_of(config, "float16", policy, hw), Workload(128, 16, 8))
            for hw in (machine(), machine(slowed=slowed))
        )
        at = fractions_of(policy)
        for phase in ("prefill", "decode"):
            before, after = getattr(alone, phase), getattr(beside, phase)
            for link in TRANSFERS:
                longer = times if link == "disk_read" else 1
                assert after[link].at(at) == pytest.approx(longer * before[link].at(at)), link


@pytest.mark.parametrize("attention", ["host", "device"])
def test_the_cpu_attends_to_what_is_left_on_the_host(attention: Any) -> None:
    """To the prompt and half of the new tokens, on average; to nothing that is moved."""
    config = known_shape("facebook/opt-1.3b")
    policy = Policy.from_percent(
        *(100, 0, 40, 60, 100, 0), batch_size=4, num_batches=3, attention=attention
    )
    fast, slow = (
        block_terms(costs_of(config, "float16", policy, hw), Workload(64, 8, 12))
        for hw in (machine(host_attention={16: Rate.constant(r)}) for r in (inf, 1e9))
    )
    at, elements = fractions_of(policy), 3 * 2 * 4 * (64 + 8 / 2) * 2048
    longer = 0.6 * elements / 1e9 if attention == "host" else 0.0
    for name, term in slow.decode.items():
        added = longer if name == "host_compute" else 0.0
        assert term.at(at) == pytest.approx(fast.decode[name].at(at) + added), name


def random_model(rng: random.Random) -> ModelConfig:
    heads = rng.choice((4, 8, 16))
    hidden = heads * rng.choice((32, 64))
    return read_config(
        {
            **BASE,
            "hidden_size": hidden,
            "word_embed_proj_dim": hidden,
            "ffn_dim": rng.choice((2, 4)) * hidden,
            "num_attention_heads": heads,
            "num_hidden_layers": rng.randint(2, 24),
            "vocab_size": rng.choice((100, 10_000)),
            "max_position_embeddings": 2048,
        }
    )


GRID = [
    (device / 10, host / 10, (10 - device - host) / 10)
    for device in range(11)
    for host in range(11 - device)
]


def on_grid(term: LinearTerm) -> np.ndarray:
    """Returns a term's values at every combination of placements in steps of 10 %."""
    points = np.array(GRID)
    parts = [
        points @ np.array([term.factors.get(name, 0.0) for name in FRACTIONS[i : i + 3]])
        for i in (0, 3, 6)
    ]
    weights, cache, hidden = parts
    return term.constant + weights[:, None, None] + cache[None, :, None] + hidden[None, None, :]


@pytest.mark.few(50)
@pytest.mark.parametrize("seed", range(200))
def test_linear_program_is_never_worse_than_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    config, unified = random_model(rng), rng.random() < 0.3
    policy = Policy(
        batch_size=rng.choice((1, 4, 16)),
        num_batches=rng.choice((1, 2, 5)),
        attention=rng.choice(("host", "device")),
        schedule=rng.choice(("zigzag", "row")),
        weight_bits=rng.choice((16, 4)),
        cache_bits=rng.choice((16, 4)),
        attention_sparsity=rng.choice((1.0, 0.2)),
        overlap=rng.random() < 0.9,
    )
    hw = machine(rng, drag={"host_to_device": rng.random(), "disk_read": rng.random()})
    workload = Workload(rng.choice((16, 200)), rng.choice((1, 8, 64)), 10**6)
    costs = costs_of(config, "float16", policy, hw, unified)
    terms, memory = block_terms(costs, workload), memory_terms(costs, workload)
    everything = [memory[tier].at(dict.fromkeys(FRACTIONS, 1.0)) for tier in TIERS]
    budgets = Budgets(
        *(int(rng.uniform(0.3, 1.2) * most) for most in everything),
        shared=int(rng.uniform(0.3, 1.0) * sum(everything[:2])) if unified else None,
    )
    fits = np.full((len(GRID),) * 3, True)
    for tier in TIERS:
        fits &= on_grid(memory[tier]) <= budgets.allowed(tier)
    if budgets.shared is not None:
        fits &= on_grid(memory["device"] + memory["host"]) <= budgets.shared
    longest = [
        np.max([on_grid(term) for term in phase.values()], axis=0)
        for phase in (terms.prefill, terms.decode)
    ]
    times = np.where(fits, terms.total_s(*longest), np.inf)
    found = solve(terms, memory, budgets)
    if found is None:
        assert not fits.any()
        return
    # The preference for faster tiers may cost a millionth for each of nine fractions.
    assert found.total_s <= times.min() * (1 + 1e-4)
    for letter in "wch":
        assert isclose(
            sum(v for k, v in found.fractions.items() if k[0] == letter), 1, abs_tol=1e-6
        )
    for tier in TIERS:
        assert memory[tier].at(found.fractions) <= budgets.allowed(tier) * (1 + 1e-6) + 1
    if budgets.shared is not None:
        both = memory["device"] + memory["host"]
        assert both.at(found.fractions) <= budgets.shared * (1 + 1e-6) + 1


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"attention": "device"}, {"cache_bits": 4}], ids=["host", "device", "packed"]
)
@pytest.mark.parametrize("prompt", [512, 32])
@pytest.mark.parametrize("percent", [(100, 0, 100, 0, 100, 0), (0, 100, 0, 100, 0, 100), (0,) * 6])
def test_memory_terms_are_near_the_exact_peaks(
    percent: tuple[int, ...], prompt: int, options: dict[str, Any], unified: bool
) -> None:
    """After a short prompt, half of the cache is in open blocks."""
    config, workload = known_shape("facebook/opt-6.7b"), Workload(prompt, 33, 64)
    options = {"attention": "host", **options}
    policy = Policy.from_percent(*percent, batch_size=16, num_batches=4, **options)
    costs = costs_of(config, "float16", policy, unified=unified)
    exact = peak_bytes(costs.plan(BlockShape.of(policy, workload)))
    for tier, term in memory_terms(costs, workload).items():
        linear = term.at(fractions_of(policy))
        assert linear == pytest.approx(exact[tier], rel=0.1, abs=0.02 * sum(exact.values())), tier


def test_what_moves_for_attention_takes_the_same_memory_in_both() -> None:
    """A layer's keys and values of the batch in use and of the next one, fp16."""
    config, workload, found = known_shape("facebook/opt-6.7b"), Workload(1, 545, 64), []
    for attention in ("device", "host"):
        policy = Policy.from_percent(
            *(100, 0, 0, 100, 100, 0), batch_size=16, num_batches=4, attention=attention
        )
        costs = costs_of(config, "float16", policy, machine())
        shape = BlockShape.of(policy, workload)
        exact = peak_bytes(costs.plan(shape))
        linear = memory_terms(costs, workload)["device"].at(fractions_of(policy))
        found.append(np.array([exact["device"], linear]))
    moved = 2 * 2 * 16 * (1 + 544) * 4096 * 2
    np.testing.assert_allclose(found[0] - found[1], moved, rtol=1e-6)
