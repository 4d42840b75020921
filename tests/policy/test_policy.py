"""Policies, exact placement and computed peaks."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_jax.layers import programs
from flexgen_jax.layers.programs import Programs
from flexgen_jax.models.families import read_config
from flexgen_jax.models.shapes import known_shape
from flexgen_jax.models.spec_of_config import model_spec
from flexgen_jax.models.tensor_spec import Formats
from flexgen_jax.policy.placement import (
    PROGRAM_PAGES,
    page_cached,
    place_weights,
    realised,
    split,
)
from flexgen_jax.policy.plan import BlockPlan
from flexgen_jax.policy.policy import (
    GREEDY,
    SAMPLE,
    SCORE,
    TIERS,
    HeadUse,
    Placement,
    Policy,
    PolicyError,
    Tier,
    Workload,
    generated_blocks,
    prompt_blocks,
)
from flexgen_jax.policy.shapes import BlockShape, Setting
from flexgen_jax.schedule.admission import block_of
from flexgen_jax.schedule.loop import BlockLoop
from flexgen_jax.search.fit import Budgets, Fitter
from flexgen_jax.search.memory import Idle, peak_bytes, planned_ledger, workspace_bytes
from tests.helpers.blocks import plan_of
from tests.helpers.cases import examples
from tests.helpers.kernels import XLA_ON_CPU
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
    """The original FlexGen puts 8.3 % of OPT-30B on the GPU when asked for 20 %."""
    spec = model_spec(known_shape("facebook/opt-30b"))
    policy = Policy.from_percent(20, 80, 0, 100, 0, 100)
    tiers = place_weights(spec, "float16", policy)
    large = [t for t in spec.tensors.values() if not t.is_small]
    sizes = [t.nbytes("float16") for t in large]
    found = realised(sizes, [tiers[t.key] for t in large])
    assert found["device"] == pytest.approx(0.2, abs=max(sizes) / sum(sizes))
    assert found["disk"] == 0
    assert all(tiers[t.key] == "device" for t in spec.tensors.values() if t.is_small)


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
    """A head attends to the fraction of the tokens, rounded up, so never to none."""
    assert Policy(attention_sparsity=1e-12).attended(tokens) == min(tokens, 1)
    assert Policy(attention_sparsity=percent / 100).attended(tokens) == -(-percent * tokens // 100)


@pytest.mark.parametrize("text", ["", "[]", '{"wieghts": {}}', '{"weights": {"gpu": 1}}'])
def test_bad_policy_json(text: str) -> None:
    with pytest.raises(PolicyError):
        Policy.from_json(text)


@examples(15)
@given(weights=PERCENT, cache=PERCENT, hidden=PERCENT, unified=st.booleans())
def test_computed_peak_covers_what_is_placed(
    weights: tuple[int, int], cache: tuple[int, int], hidden: tuple[int, int], unified: bool
) -> None:
    config = read_config(BASE)
    policy = Policy.from_percent(*weights, *cache, *hidden, batch_size=4, num_batches=3)
    shape = BlockShape((4, 4, 4), (16, 32, 32), 40)
    peaks = peak_bytes(plan_of(policy, shape, unified))
    tiers = place_weights(model_spec(config), "float32", policy)
    states = [state for running in block_of(plan_of(policy, shape)) for state in running.layers]
    for tier in TIERS:
        placed = sum(
            t.nbytes("float32") for t in model_spec(config).tensors.values() if tiers[t.key] == tier
        )
        placed += sum(
            2 * 4 * 4 * config.hidden_size * tokens
            for state in states
            for block, (home, tokens) in enumerate(
                zip(state.homes, state.running.lengths, strict=True)
            )
            # The last block of what is generated is never full, and only full ones go to disk.
            if home == tier and (tier != "disk" or block + 1 < len(state.homes))
        )
        assert peaks[tier] >= placed


@given(spare=st.integers(0, 1200), disk=st.sampled_from([0, 50, 100]))
def test_the_page_cache_holds_as_much_of_every_layer_as_there_is_room_for(
    spare: int, disk: int
) -> None:
    spec = model_spec(known_shape("facebook/opt-125m"))
    tiers = place_weights(spec, "float16", Policy.from_percent(100 - disk, 0, 0, 0, 0, 0))
    found = page_cached(spec, Formats("float16"), tiers, spare * 10**6)
    on_disk = [
        (tensor.key, tensor.nbytes("float16"))
        for layer in spec.decoders
        for tensor in layer.large
        if tiers[tensor.key] == "disk"
    ]
    assert found <= {key for key, _ in on_disk}
    total, largest = sum(n for _, n in on_disk), max((n for _, n in on_disk), default=0)
    share = min(1.0, max(0, spare * 10**6 - PROGRAM_PAGES) / max(total, 1))
    cached = so_far = 0
    for key, nbytes in on_disk:
        so_far += nbytes
        cached += nbytes if key in found else 0
        assert abs(cached - share * so_far) <= largest
    if share in (0, 1):
        assert cached == share * total


HIDDEN, ROWS, PROMPT = 32, 4, 16


def peaks_of(*percent: int, shape: BlockShape | None = None, **options: Any) -> dict[Tier, int]:
    """Peak bytes in fp32, where host and device are apart."""
    policy = Policy.from_percent(*percent, **{"schedule": "zigzag", **options})
    shape = shape or BlockShape((ROWS,) * 5, (PROMPT,) * 5, 9)
    return peak_bytes(plan_of(policy, shape))


def test_of_hidden_states_away_from_the_device_two_are_on_it() -> None:
    """The one in use and the next one; without overlap the one in use. In the last layer there are
    also those of one token each that batches before them have left."""
    state, token = 4 * ROWS * PROMPT * HIDDEN, 4 * ROWS * HIDDEN
    shape = BlockShape((ROWS,) * 5, (PROMPT,) * 5, 1)
    for overlap, copies in ((True, 2), (False, 1)):
        here, there = (
            peaks_of(100, 0, 100, 0, device, 100 - device, shape=shape, overlap=overlap)
            for device in (100, 0)
        )
        assert there["host"] - here["host"] == 5 * state
        assert here["device"] - there["device"] == (5 - copies) * (state - token)


SHORT = BlockShape((ROWS,) * 5, (1,) * 5, 25)
"""Prompts of one token: memory is at its peak when the cache is."""


def test_of_kv_blocks_that_move_two_batches_are_on_the_device() -> None:
    """A layer's blocks of the batch in use and of the next; without overlap of the one in use."""
    layer = 2 * 4 * ROWS * (1 + 24) * HIDDEN
    for overlap, copies in ((True, 2), (False, 1)):
        options = {"overlap": overlap, "kv_block_tokens": 4, "shape": SHORT}
        here, there, away = (
            peaks_of(100, 0, device, 100 - device, 100, 0, attention=where, **options)
            for device, where in ((100, "device"), (0, "host"), (0, "device"))
        )
        assert away["device"] - there["device"] == copies * layer
        assert here["device"] - there["device"] == 3 * 5 * layer
        assert there["host"] == away["host"]


def test_open_blocks_of_a_quantized_cache_come_to_the_device_as_they_are() -> None:
    """In fp32, one of 4 tokens, to be quantized there; full ones are 8 bits an element, and a
    scale and a minimum of 16 for each head's 8."""
    options = {"kv_block_tokens": 4, "attention": "host", "shape": SHORT}
    plain, packed = (
        peaks_of(100, 0, 0, 100, 100, 0, cache_bits=bits, **options) for bits in (16, 8)
    )
    # While one of the batches' hidden states is on its way from a layer to the next.
    assert packed["device"] - plain["device"] == 2 * 4 * ROWS * 4 * HIDDEN
    elements = 3 * 5 * 2 * ROWS * HIDDEN
    # Of 24 new tokens, 4 are in a block that is never full; an open one is in fp32.
    assert plain["host"] == elements * (1 + 24) * 4
    assert packed["host"] == elements * ((1 + 20) * 1.5 + 4 * 4)


@pytest.mark.parametrize(("head", "tokens"), [(GREEDY, 1), (SAMPLE, 1), (SCORE, 200)])
def test_workspace_has_room_for_the_logits(head: HeadUse, tokens: int) -> None:
    """fp32, of one token of each sequence, or of 256 that are scored at a time; sampling sorts
    them, which takes eight copies, scoring three. A larger vocabulary takes nothing else."""

    def counted(vocabulary: int) -> int:
        config = read_config(BASE | {"vocab_size": vocabulary, "max_position_embeddings": 256})
        setting = Setting(config, "float32", unified=True)
        return workspace_bytes(setting, Formats("float32"), 8, tokens, head)

    rows = 256 if head == SCORE else 8
    copies = {GREEDY: 1, SAMPLE: 8, SCORE: 3}[head]
    assert counted(300_000) - counted(200_000) == 4 * copies * rows * 100_000


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("ffn", "rows", "tokens", "segments"),
    [
        (4096, 8, 128, ()),
        (64, 2, 512, ()),
        (64, 16, 512, ((4, 0), (8, 48), (4, 256))),
        (1024, 64, 128, ((60, 16), (4, 96))),
    ],
)
def test_workspace_has_room_for_xlas_temporaries(
    ffn: int, rows: int, tokens: int, segments: tuple[tuple[int, int], ...], dtype: str
) -> None:
    config = read_config(BASE | {"ffn_dim": ffn, "max_position_embeddings": 512})
    formats = Formats(dtype)
    layer = model_spec(config).decoders[0]
    program = Programs(config, formats, XLA_ON_CPU).get(
        programs.prefill, layer=layer, rows=rows, cuts=(tokens,), segments=segments
    )
    said = program.memory_analysis()
    counted = workspace_bytes(Setting(config, dtype, unified=True), formats, rows, tokens)
    assert said.temp_size_in_bytes <= counted


def buffers_of(plan: BlockPlan) -> int:
    """The most bytes of host buffers in a dry run."""
    return BlockLoop(plan, Idle(), planned_ledger(plan)).run()


@pytest.mark.parametrize(("overlap", "layers"), [(True, 3), (False, 1)])
def test_weights_from_disk_have_buffers_for_what_is_read_ahead(overlap: bool, layers: int) -> None:
    """The layer in use and two more, without overlap only that; and the tables of both ends."""
    config = read_config(BASE | {"num_hidden_layers": 5})
    policy = Policy.from_percent(0, 0, 100, 0, 100, 0, overlap=overlap)
    shape = BlockShape((ROWS,), (PROMPT,), 9)
    layer, ends = 4 * HIDDEN**2 + 2 * HIDDEN * 64, (96 + 98) * HIDDEN
    for unified in (True, False):
        found = buffers_of(plan_of(policy, shape, unified, config))
        assert found == 4 * (layers * layer + ends)


@pytest.mark.parametrize(("overlap", "batches"), [(True, 4), (False, 1)])
def test_kv_blocks_from_disk_have_buffers_for_what_is_read_ahead(
    overlap: bool, batches: int
) -> None:
    """What a batch's step reads: three steps ahead, and the one that is being computed. Beside
    these there are the open blocks, of 4 tokens; the last one is never full."""
    policy = Policy.from_percent(100, 0, 0, 0, 100, 0, kv_block_tokens=4, overlap=overlap)
    shape = BlockShape((ROWS,) * 5, (PROMPT,) * 5, 9)
    found = buffers_of(plan_of(policy, shape))
    token = 2 * 4 * ROWS * HIDDEN
    assert found == (batches * (PROMPT + 4) + 3 * 5 * 4) * token


def test_of_weights_away_from_the_device_a_layer_and_the_next_are_on_it() -> None:
    layer, ends = 4 * (4 * HIDDEN**2 + 2 * HIDDEN * 64), 4 * (96 + 98) * HIDDEN
    for overlap, layers in ((True, 2), (False, 1)):
        here, there = (
            peaks_of(device, 100 - device, 100, 0, 100, 0, overlap=overlap) for device in (100, 0)
        )
        assert there["host"] - here["host"] == 3 * layer + ends
        assert here["device"] - there["device"] == (3 - layers) * layer + ends


def test_pinned_open_blocks_are_buffers() -> None:
    """With a cache in RAM these are all there is, of every token that is generated but the last."""
    policy = Policy.from_percent(100, 0, 0, 100, 100, 0, kv_block_tokens=4)
    shape = BlockShape((ROWS,) * 5, (PROMPT,) * 5, 9)
    found = buffers_of(plan_of(policy, shape))
    assert found == 3 * 5 * 8 * 2 * 4 * ROWS * HIDDEN
    assert buffers_of(plan_of(policy, shape, True)) == 0


MIB = 1 << 20


def fitter_of(device: int, host: int) -> Fitter:
    """Eight sequences of OPT-125M, in so many MiB."""
    budgets = Budgets(device * MIB, host * MIB, 1 << 40)
    config = known_shape("facebook/opt-125m")
    return Fitter(Setting(config, "float16", unified=False), Workload(128, 32, 8), budgets)


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
