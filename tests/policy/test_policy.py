"""Policies, exact placement and computed peaks."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_jax.models.families import known_shape, read_config
from flexgen_jax.models.spec import model_spec
from flexgen_jax.policy.fit import Budgets, Fitter
from flexgen_jax.policy.hardware import KernelSizes
from flexgen_jax.policy.memory import BlockShape, peak_bytes, plan_cache
from flexgen_jax.policy.placement import place_weights, realised, split
from flexgen_jax.policy.policy import (
    TIERS,
    Placement,
    Policy,
    PolicyError,
    Workload,
    generated_blocks,
    prompt_blocks,
)
from tests.helpers.models import BASE

PERCENT = st.integers(0, 100).flatmap(lambda d: st.tuples(st.just(d), st.integers(0, 100 - d)))


@given(
    sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=60),
    percent=PERCENT,
)
def test_split_is_within_one_tensor_everywhere(sizes: list[int], percent: tuple[int, int]) -> None:
    placement = Placement(percent[0] / 100, percent[1] / 100)
    tiers = split(sizes, placement)
    for tier in TIERS:
        got = 0
        for count, (size, at) in enumerate(zip(sizes, tiers, strict=True), 1):
            got += size if at == tier else 0
            wanted = placement.fraction(tier) * sum(sizes[:count])
            assert abs(got - wanted) <= max(sizes[:count]) + 1e-6
        if placement.fraction(tier) == 0:
            assert got == 0


def test_opt_30b_split_is_exact() -> None:
    """The original puts 8.3 % of OPT-30B on the GPU when asked for 20."""
    spec = model_spec(known_shape("facebook/opt-30b"))
    policy = Policy.from_percent(20, 80, 0, 100, 0, 100)
    tiers = place_weights(spec, "float16", policy)
    large = [t for t in spec.tensors.values() if not t.is_small]
    sizes = [t.nbytes("float16") for t in large]
    found = realised(sizes, [tiers[t.key] for t in large])
    assert found["device"] == pytest.approx(0.2, abs=max(sizes) / sum(sizes))
    assert found["disk"] == 0
    assert all(tiers[t.key] == "device" for t in spec.tensors.values() if t.is_small)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("125m", 0.125), ("350m", 0.331), ("1.3b", 1.316), ("30b", 29.97), ("175b", 175.2)],
)
def test_known_shapes_have_the_published_sizes(name: str, billions: float) -> None:
    assert model_spec(known_shape(f"facebook/opt-{name}")).num_parameters / 1e9 == pytest.approx(
        billions, rel=0.01
    )


@given(prompt=st.integers(1, 300), gen=st.integers(1, 300), size=st.integers(1, 40))
def test_blocks_hold_all_cached_tokens(prompt: int, gen: int, size: int) -> None:
    assert sum(prompt_blocks(prompt, size)) == prompt
    assert sum(generated_blocks(gen, size)) == gen - 1
    assert all(0 < n <= size for n in generated_blocks(gen, size))


@given(weights=PERCENT, cache=PERCENT, batch=st.integers(1, 9))
def test_policy_json_round_trip(
    weights: tuple[int, int], cache: tuple[int, int], batch: int
) -> None:
    policy = Policy.from_percent(*weights, *cache, 0, 100, batch_size=batch, schedule="row")
    assert Policy.from_json(policy.to_json()) == policy
    assert policy.percent[:4] == pytest.approx((*weights, *cache))


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ((60, 50, 0, 0, 0, 0), "weights"),
        ((0, 0, -1, 0, 0, 0), "cache"),
        ((0, 0, 0, 0, 0, 101), "activations"),
    ],
)
def test_impossible_percentages_name_the_part(numbers: tuple[float, ...], said: str) -> None:
    with pytest.raises(PolicyError, match=said):
        Policy.from_percent(*numbers)


@pytest.mark.parametrize(
    ("field", "value"),
    [("weight_bits", 3), ("cache_bits", 32), ("matmul_bits", 4), ("schedule", "column")],
)
def test_impossible_choices_name_the_field_and_what_there_is(field: str, value: Any) -> None:
    with pytest.raises(PolicyError, match=rf"{field} must be one of \(.*(16|zigzag)"):
        Policy(**{field: value})


@pytest.mark.parametrize("fraction", [0, -0.1, 1.5, float("nan"), "0.1", True])
def test_impossible_sparsity_names_the_field(fraction: object) -> None:
    with pytest.raises(PolicyError, match="attention_sparsity"):
        Policy(attention_sparsity=fraction)  # type: ignore[arg-type]


@given(st.integers(1, 100), st.integers(0, 5000))
def test_attended_tokens(percent: int, tokens: int) -> None:
    """The fraction, rounded up in whole numbers; never none."""
    assert Policy(attention_sparsity=1e-12).attended(tokens) == min(tokens, 1)
    assert Policy(attention_sparsity=percent / 100).attended(tokens) == -(-percent * tokens // 100)


@pytest.mark.parametrize("text", ["", "[]", '{"wieghts": {}}', '{"weights": {"gpu": 1}}'])
def test_bad_policy_json(text: str) -> None:
    with pytest.raises(PolicyError):
        Policy.from_json(text)


@settings(max_examples=30, deadline=None)
@given(weights=PERCENT, cache=PERCENT, hidden=PERCENT, unified=st.booleans())
def test_computed_peak_covers_what_is_placed(
    weights: tuple[int, int], cache: tuple[int, int], hidden: tuple[int, int], unified: bool
) -> None:
    config = read_config(BASE)
    policy = Policy.from_percent(*weights, *cache, *hidden, batch_size=4, num_batches=3)
    shape = BlockShape((4, 4, 4), (16, 32, 32), 40)
    peaks = peak_bytes(config, "float32", policy, shape, unified, KernelSizes())
    tiers = place_weights(model_spec(config), "float32", policy)
    plan = plan_cache(config, policy, shape)
    for tier in TIERS:
        placed = sum(
            t.nbytes("float32") for t in model_spec(config).tensors.values() if tiers[t.key] == tier
        )
        placed += sum(
            2 * 4 * 4 * config.hidden_size * plan.lengths(key.batch)[key.block]
            for key, home in plan.homes.items()
            # The last block of what is generated is never full, and only full ones go to disk.
            if home == tier and (tier != "disk" or key.block + 1 < len(plan.lengths(key.batch)))
        )
        assert peaks[tier] >= placed


MIB = 1 << 20


def fitter_of(device: int, host: int) -> Fitter:
    """Eight sequences of OPT-125M, in so many MiB."""
    budgets = Budgets(device * MIB, host * MIB, 1 << 40)
    config = known_shape("facebook/opt-125m")
    return Fitter(config, "float16", Workload(128, 32, 8), budgets, False, KernelSizes())


@pytest.mark.parametrize(
    ("device", "host", "tiers"),
    [
        (200, 200, {"device", "host", "disk"}),
        (260, 200, {"device", "host", "disk"}),
        (200, 1000, {"device", "host"}),
        (300, 1000, {"device", "host"}),
        (3000, 1000, {"device"}),
    ],
)
def test_fill_fastest_leaves_no_room_in_faster_tiers(
    device: int, host: int, tiers: set[str]
) -> None:
    """It fits, and with another hundredth of anything in a faster tier it does not."""
    fitter = fitter_of(device, host)
    found = fitter.fill_fastest(Policy(batch_size=8))
    assert found is not None
    assert fitter.fits(found)
    parts = {name: getattr(found, name) for name in ("weights", "cache", "activations")}
    assert {t for part in parts.values() for t in TIERS if part.fraction(t) > 0} == tiers
    for name, part in parts.items():
        for source, target in combinations(reversed(TIERS), 2):
            if part.fraction(source) > 0:
                share = {tier: part.fraction(tier) for tier in TIERS}
                share[source], share[target] = share[source] - 0.01, share[target] + 0.01
                more = Placement(round(share["device"], 2), round(share["host"], 2))
                assert not fitter.fits(replace(found, **{name: more}))


@pytest.mark.parametrize(("device", "host"), [(20, 1000), (40, 4000), (200, 100)])
def test_what_fits_nowhere_is_said(device: int, host: int) -> None:
    fitter = fitter_of(device, host)
    assert fitter.largest_batches(Policy(batch_size=8)) is None
    assert "no plan fits" in fitter.advice(Policy(batch_size=8))
