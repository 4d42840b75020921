"""Layer math against NumPy written from the formulas."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_jax.cpu import attention
from flexgen_jax.cpu.backend import CPU_TUNING
from flexgen_jax.layers import programs
from flexgen_jax.layers.attention import attend, causal_attention, merge
from flexgen_jax.layers.decoder import DecoderLayer
from flexgen_jax.layers.embedding import Embedding, Head
from flexgen_jax.layers.kernels import Kernels
from flexgen_jax.layers.matmul import matmul, matmul_by_heads
from flexgen_jax.layers.programs import Programs, table
from flexgen_jax.layers.rotary import Rows
from flexgen_jax.layers.sampling import keep_top, sample
from flexgen_jax.layers.tuning import PLAIN, Tuning
from flexgen_jax.models.families import read_config
from flexgen_jax.models.shapes import known_shape
from flexgen_jax.models.spec_of_config import model_spec
from flexgen_jax.models.tensor_spec import Formats
from flexgen_jax.policy.hardware import KernelSizes
from tests.helpers.cases import covering, examples
from tests.helpers.kernels import CPU, XLA, XLA_ON_CPU
from tests.helpers.models import BASE, VARIANTS

RNG = np.random.default_rng(0)


def segments_with(rows: int, skipped: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Segments of so many rows together, as many for each, the last the rest."""
    each = rows // max(1, len(skipped))
    rest = rows - each * (len(skipped) - 1)
    return tuple((each if n < len(skipped) - 1 else rest, n_) for n, n_ in enumerate(skipped))


def softmax(x: np.ndarray) -> np.ndarray:
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


@examples(15)
@given(
    cuts=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    valid=st.data(),
    scale=st.sampled_from([0.0, 1.0, 30.0]),
)
def test_merged_blocks_are_attention_over_all_keys(
    cuts: list[int], valid: st.DataObject, scale: float
) -> None:
    batch, heads, dim, tokens = 2, 3, 4, sum(cuts)
    mask = valid.draw(hnp.arrays(bool, (batch, tokens)))
    mask[:, valid.draw(st.integers(0, tokens - 1))] = True  # at least one key is valid
    query, key, value = (
        normal(batch, heads, 1, dim) * scale,
        *(normal(batch, heads, tokens, dim) for _ in range(2)),
    )
    scores = np.where(mask[:, None, None], query @ key.swapaxes(2, 3), -np.inf)
    partials, start = [], 0
    for cut in cuts:
        part = slice(start, start + cut)
        partials.append(attend(query, key[:, :, part], value[:, :, part], mask[:, part]))
        start += cut
    np.testing.assert_allclose(merge(partials)[0], softmax(scores) @ value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 5, 16])
def test_causal_attention(tokens: int) -> None:
    query, key, value = (normal(2, 3, tokens, 4) for _ in range(3))
    first_valid = np.array([0, tokens // 2], np.int32)
    scores = query @ key.swapaxes(2, 3)
    at = np.arange(tokens)
    causal = at[:, None] >= at[None, :]
    found = np.asarray(causal_attention(query, key, value, first_valid, at_once=6))
    for row, first in enumerate(first_valid):
        mask = causal & (at >= first)[None, :]
        expected = softmax(np.where(mask, scores[row], -1e30)) @ value[row]
        np.testing.assert_allclose(found[row][:, first:], expected[:, first:], rtol=1e-4, atol=1e-5)
    assert np.isfinite(found).all()


def test_causal_attention_in_parts_is_the_same() -> None:
    """With this number of heads and tokens, scores are computed for some heads at a time."""
    heads, tokens = 20, 1024
    at_once = KernelSizes().scored_heads(heads, tokens)
    assert at_once < heads
    query, key, value = (normal(1, heads, tokens, 2) for _ in range(3))
    none = np.zeros(1, np.int32)
    whole = np.asarray(causal_attention(query, key, value, none, at_once))
    for head in (0, heads - 1):
        one = slice(head, head + 1)
        part = causal_attention(query[:, one], key[:, one], value[:, one], none, 1)
        np.testing.assert_allclose(whole[:, one], part, rtol=1e-5, atol=1e-6)


PASSED = np.array([3, 0], np.int32)
"""Checks of a batch that has gone through three layers, all finite."""


@pytest.mark.parametrize("rows", [1, 2, 7, 64, 65])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("tuning", [PLAIN, CPU_TUNING])
def test_products(rows: int, dtype: np.dtype, tuning: Tuning) -> None:
    x, kernel = jnp.asarray(normal(rows, 8), dtype), jnp.asarray(normal(5, 8), dtype)
    expected = np.asarray(x, np.float32) @ np.asarray(kernel, np.float32).T
    found = matmul(x, kernel, tuning=tuning)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16])
@pytest.mark.parametrize("is_inverse", [False, True])
@pytest.mark.parametrize("tuning", [PLAIN, CPU_TUNING])
def test_products_by_heads(rows: int, dtype: np.dtype, is_inverse: bool, tuning: Tuning) -> None:
    """Of four heads, with the last 10 of the 22 features of each, as a program computes them."""
    x = jnp.asarray(normal(rows, 4, 10 if is_inverse else 16), dtype)
    kernel = jnp.asarray(normal(4 * 22, 16), dtype)
    part = np.asarray(kernel, np.float32).reshape(4, 22, 16)[:, 12:]
    equation = "shf,hfr->shr" if is_inverse else "shr,hfr->shf"
    product = partial(matmul_by_heads, features=(12, 10), is_inverse=is_inverse, tuning=tuning)
    out = jax.jit(product)(x, kernel)
    expected = np.einsum(equation, np.asarray(x, np.float32), part)
    assert out.dtype == dtype
    np.testing.assert_allclose(
        np.asarray(out, np.float32), expected, rtol=2 * float(jnp.finfo(dtype).eps), atol=1e-5
    )


@pytest.mark.parametrize("grouped", [1, 4])
def test_a_cache_that_stays_narrow(grouped: int) -> None:
    """Weights of values are rounded to the cache's dtype, and nothing else is."""
    query = jnp.asarray(normal(2, 3 * grouped, 1, 8), jnp.float16)
    key, value = (jnp.asarray(normal(2, 3, 5, 8), jnp.float16) for _ in range(2))
    valid = jnp.ones((2, 5), bool)
    narrow, lse = attend(query, key, value, valid, Tuning(keeps_cache_narrow=True))
    wide, wide_lse = attend(query, key, value, valid)
    np.testing.assert_allclose(lse, wide_lse, rtol=1e-5)
    np.testing.assert_allclose(narrow, wide, rtol=0, atol=2**-9)


@pytest.mark.parametrize("variant", VARIANTS)
def test_spec_is_what_the_modules_declare(variant: str) -> None:
    config = read_config(BASE | VARIANTS[variant])
    ids, rows = jnp.zeros((1, 2), jnp.int32), Rows.of(np.zeros(1), 2)
    hidden = jnp.zeros((1, 2, config.hidden_size))
    key = jax.random.key(0)
    declared = [
        jax.eval_shape(lambda: Embedding(config, XLA).init(key, ids, jnp.int32(0), rows)),
        jax.eval_shape(
            lambda: DecoderLayer(config, config.kinds[0], XLA).init(
                key, hidden, rows, method="prefill"
            )
        ),
        jax.eval_shape(lambda: Head(config, XLA).init(key, hidden)),
    ]
    spec = model_spec(config)
    layers = (spec.embedding, spec.decoders[0], spec.head)
    for variables, layer in zip(declared, layers, strict=True):
        leaves = jax.tree_util.tree_flatten_with_path(variables.get("params", {}))[0]
        shapes = {".".join(k.key for k in path): leaf.shape for path, leaf in leaves}
        assert shapes == {tensor.path: tensor.shape for tensor in layer.tensors}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("batch", "segments", "kind"),
    covering(
        [20, 16],
        [(), (0, 13), (0, 3, 1, 30)],
        [("float32", 16), ("float32", 4), ("bfloat16", 16), ("float16", 16)],
        together=1,
    ),
)
def test_sequences_prefilled_in_groups_are_as_alone(
    batch: int, segments: tuple[int, ...], kind: tuple[str, int]
) -> None:
    """In groups that take all tokens, and in segments whose rows leave out some or all padding.

    segments: tokens that are left out of each; it has as many rows as others, the last the rest.
    """
    dtype, cache_bits = kind
    config, tokens = read_config(BASE | {"max_position_embeddings": 160}), 128
    how = segments_with(batch, segments)
    assert XLA.sizes.prefill_sequences(batch, tokens, 16) == 8
    formats, close = Formats(dtype, 16, cache_bits), 2e-4 if dtype == "float32" else 5e-2
    of_model, cuts = Programs(config, formats, XLA), (100, 28)
    layer = model_spec(config).decoders[0]
    weights = {t.path: jnp.asarray(normal(*t.shape) / 4, dtype) for t in layer.tensors}
    hidden = jnp.asarray(normal(batch, tokens, config.hidden_size), dtype)
    first = np.arange(batch, dtype=np.int32) * 3
    start = 0
    for count, skipped in how:  # rows have no less padding than is left out of their segment
        first[start : start + count] += skipped
        start += count
    rows = Rows.of(first, tokens)
    prefill = of_model.get(programs.prefill, layer=layer, rows=batch, cuts=cuts, segments=how)
    whole, blocks, checks = prefill(weights, hidden, PASSED, rows)
    assert checks.tolist() == [4, 0] and whole.shape == hidden.shape
    shapes = [side.shape for block in blocks for side in block]
    assert shapes == [leaf.array_shape(batch, n) for n in (100, 28) for leaf in layer.growing]
    for row in range(batch):
        one = slice(row, row + 1)
        its_rows = Rows.of(first[one], tokens)
        of_one = of_model.get(programs.prefill, layer=layer, rows=1, cuts=cuts)
        alone, parts, _ = of_one(weights, hidden[one], PASSED, its_rows)
        sides = (np.asarray(x[:, first[row] :], np.float32) for x in (whole[one], alone))
        np.testing.assert_allclose(*sides, close, close)
        for start, block, part in zip((0, 100), blocks, parts, strict=True):
            valid = slice(max(0, first[row] - start), None)
            for leaves in zip(jax.tree.leaves(block), jax.tree.leaves(part), strict=True):
                leaf, mine = (
                    np.asarray(x[at, :, valid]) for x, at in zip(leaves, (row, 0), strict=True)
                )
                if leaf.dtype == dtype:
                    pair = (x.astype(np.float32) for x in (leaf, mine))
                    np.testing.assert_allclose(*pair, close, close)
                else:  # codes, scales and minima: a few may differ because of rounding
                    assert leaf.size == 0 or np.mean(leaf == mine) > 0.99
    last = of_model.get(
        programs.prefill, layer=layer, rows=batch, cuts=cuts, only_last=True, segments=how
    )
    ends = (
        np.asarray(x[:, -1], np.float32) for x in (last(weights, hidden, PASSED, rows)[0], whole)
    )
    np.testing.assert_allclose(*ends, close, close)
    for row in (0, batch - 1):
        spoilt = hidden.at[row, tokens - 1, 0].set(np.nan)
        checks = prefill(weights, spoilt, PASSED, rows)[2]
        assert checks.tolist() == [4, 4]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("variant", "kind"),
    covering(
        ["base", "350m"],
        [("xla", "float32", 16), ("inline", "float32", 16), ("inline", "bfloat16", 4)],
        together=1,
    ),
)
def test_the_last_token_alone_is_as_among_all(
    variant: str,
    kind: tuple[str, str, int],
    always: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    where, dtype, cache_bits = kind
    kernels: Kernels = XLA if where == "xla" else CPU
    for name in ("MIN_KERNEL_ELEMENTS", "FEW_OF_A_PROMPT"):
        monkeypatch.setattr(attention, name, 0)
    wide = {"hidden_size": 128, "word_embed_proj_dim": 128, "max_position_embeddings": 160}
    config = read_config(BASE | VARIANTS[variant] | wide)
    batch, tokens, cuts = 33, 128, (64, 64)
    of_model = Programs(config, Formats(dtype, 16, cache_bits), kernels)
    close = 2e-4 if dtype == "float32" else 5e-2
    layer = model_spec(config).decoders[0]
    weights = {t.path: jnp.asarray(normal(*t.shape) / 8, dtype) for t in layer.tensors}
    hidden = jnp.asarray(normal(batch, tokens, config.hidden_size), dtype)
    rows = Rows.of(np.arange(batch) * 3, tokens)
    of_all, alone = (
        of_model.get(programs.prefill, layer=layer, rows=batch, cuts=cuts, only_last=only_last)
        for only_last in (False, True)
    )
    whole, blocks, _ = of_all(weights, hidden, PASSED, rows)
    last, others, checks = alone(weights, hidden, PASSED, rows)
    assert checks.tolist() == [4, 0] and last.shape == (batch, 1, config.hidden_size)
    sides = (np.asarray(x, np.float32) for x in (last, whole[:, -1:]))
    np.testing.assert_allclose(*sides, close, close)
    for leaf, other in zip(jax.tree.leaves(blocks), jax.tree.leaves(others), strict=True):
        sides = (np.asarray(x, np.float32) for x in (leaf, other))
        np.testing.assert_allclose(*sides, close, close)
    spoilt = hidden.at[5, tokens - 2, 0].set(np.nan)
    assert alone(weights, spoilt, PASSED, rows)[2].tolist() == [4, 4]
    assert alone(weights, spoilt, np.array([3, 2], np.int32), rows)[2].tolist() == [4, 2]


def test_a_decode_step_appends_in_place() -> None:
    """Without a copy of the tail, whose memory comes back as the result's."""
    config = known_shape("facebook/opt-125m")
    layer, rows, length = model_spec(config).decoders[0], 4, 32
    tail = 2 * 4 * rows * length * config.hidden_size
    of_model = Programs(config, Formats("float32"), XLA)
    plain, appending = (
        of_model.get(
            programs.decode, layer=layer, rows=rows, blocks=(64,), tail=length, appends=appends
        )
        for appends in (False, True)
    )
    found = appending.memory_analysis()
    assert found.alias_size_in_bytes == tail
    assert found.temp_size_in_bytes <= plain.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (2, 150), (4, 128)])
def test_scores_are_log_probabilities(batch: int, tokens: int, dtype: str) -> None:
    """The cases are one position, a group of positions and a rest, and several groups."""
    config = read_config(BASE)
    layer = model_spec(config).head
    weights = {t.path: jnp.asarray(normal(*t.shape), dtype) for t in layer.tensors}
    hidden = jnp.asarray(normal(batch, tokens, config.hidden_size), dtype)
    targets = RNG.integers(0, config.vocab_size, (batch, tokens)).astype(np.int32)
    program = Programs(config, Formats(dtype), XLA).get(
        programs.score, rows=batch, tokens=tokens, scored=tokens
    )
    (found, is_greedy), checks = program(weights, hidden, PASSED, targets)
    known = {path: np.asarray(x, np.float64) for path, x in weights.items()}
    x = np.asarray(hidden, np.float64)
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + config.norm.eps)
    x = x * known["norm.scale"] + known["norm.bias"]
    probability = softmax(np.asarray(jnp.asarray(x, dtype), np.float64) @ known["tokens"].T)
    expected = np.log(np.take_along_axis(probability, targets[..., None], -1)[..., 0])
    close = 1e-4 if dtype == "float32" else 0.1
    assert checks.tolist() == [4, 0] and found.shape == (batch, tokens)
    np.testing.assert_allclose(found, expected, close, close)
    if dtype == "float32":
        np.testing.assert_array_equal(is_greedy, probability.argmax(-1) == targets)


# XLA treats subnormal numbers as zero, so they would tie with zero.
LOGIT = st.floats(-5, 5, width=32, allow_subnormal=False)


@examples(20)
@given(
    logits=hnp.arrays(np.float32, (12,), elements=LOGIT, unique=True),
    top_k=st.integers(0, 12),
    top_p=st.floats(0.05, 1.0),
)
def test_keep_top(logits: np.ndarray, top_k: int, top_p: float) -> None:
    found = keep_top(
        logits[None],
        np.array([top_k], np.int32),
        np.array([top_p], np.float32),
        np.zeros(1, np.float32),
    )
    kept = set(np.flatnonzero(np.isfinite(np.asarray(found)[0])))
    order = np.argsort(-logits)
    allowed = order[:top_k] if top_k else order
    chances = softmax(logits[allowed].astype(np.float64))
    before = np.cumsum(chances) - chances
    # A token within rounding of the limit may fall on either side of it.
    surely = set(allowed[(before < top_p - 1e-4) | (top_p >= 1)]) | {order[0]}
    maybe = set(allowed[(before < top_p + 1e-4) | (top_p >= 1)]) | {order[0]}
    assert surely <= kept <= maybe


def test_sample_follows_the_distribution_and_the_row_alone() -> None:
    logits = np.log(np.array([0.1, 0.2, 0.7], np.float32))
    rows = 4000
    keys = RNG.integers(0, 2**32, (rows, 2), dtype=np.uint32)

    def draw(count: int) -> np.ndarray:
        ones = np.ones(count, np.float32)
        none, start = np.zeros(count, np.int32), np.full(count, 2, np.int32)
        arguments = (ones, none, ones, 0 * ones, keys[:count], start, np.int32(1))
        return np.asarray(sample(np.tile(logits, (count, 1)), *arguments))

    drawn = draw(rows)
    np.testing.assert_allclose(np.bincount(drawn) / rows, [0.1, 0.2, 0.7], atol=0.03)
    np.testing.assert_array_equal(drawn[:5], draw(5))


@pytest.mark.cpu_device
def test_programs_that_are_dropped_give_their_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has some hundred mappings, of which a process may have 65,530, if XLA optimizes it."""
    optimized = {"xla_backend_optimization_level": 3, "xla_cpu_parallel_codegen_split_count": 32}
    monkeypatch.setattr(type(XLA_ON_CPU), "compiler_options", lambda *_: optimized)

    def mappings() -> int:
        return len(Path("/proc/self/maps").read_text().splitlines())

    table.compiled.cache_clear()
    gc.collect()
    before = mappings()
    found = Programs(read_config(BASE), Formats("float32"), XLA_ON_CPU)
    for rows in (1, 2, 3):
        layer = model_spec(read_config(BASE)).decoders[0]
        found.get(programs.prefill, layer=layer, rows=rows, cuts=(16,))
    made = mappings() - before
    assert 3 * 20 < made < 3 * 400
    table.compiled.cache_clear()
    gc.collect()
    assert mappings() - before < made / 4
