"""Tests products of 8-bit integers, by XLA and in tiles, against NumPy."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from flexgen_jax import LLM, Policy, SamplingParams
from flexgen_jax.cpu import matmul
from flexgen_jax.cpu.jit.integer_rows import CHUNK_STEPS
from flexgen_jax.cpu.jit.many_rows import COLUMNS, DEPTH
from flexgen_jax.layers import programs
from flexgen_jax.layers.matmul_int8 import (
    OUTLIER,
    OUTLIER_BITS,
    column_scale,
    round_kernel,
    round_rows,
)
from flexgen_jax.layers.quantization import QuantizedArray, dequantize, quantize, quantize_as
from flexgen_jax.layers.rotary import Rows
from flexgen_jax.models.families import read_config
from flexgen_jax.models.loading import shipped_model
from flexgen_jax.models.shapes import known_shape
from flexgen_jax.models.spec_of_config import model_spec
from flexgen_jax.models.tensor_spec import Formats
from flexgen_jax.policy.shapes import Setting
from flexgen_jax.search.memory import workspace_bytes
from tests.helpers.arrays import anew, levels, numbers
from tests.helpers.cases import covering
from tests.helpers.kernels import CPU, XLA_ON_CPU
from tests.helpers.models import BASE, PLACEMENTS, prompts, run_greedy
from tests.helpers.numpy_opt import NumpyOpt
from tests.helpers.numpy_quantization import int8_product
from tests.helpers.units import FOR_INTEGERS, need, use_unit

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
TARGET = "flexgen_jax_multiply_integers"
IN_TILES = partial(CPU.matmul, bits=8)
BY_EACH = pytest.mark.parametrize("multiply", ["XLA", "amx", "avx512"], indirect=True)


@pytest.fixture
def multiply(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, always: None
) -> Callable[..., jax.Array]:
    """Returns a function that multiplies by XLA, or in tiles by a unit of the processor, at any
    size."""
    if request.param == "XLA":
        return partial(XLA_ON_CPU.matmul, bits=8)
    use_unit(request.param, monkeypatch)
    return IN_TILES


def with_outliers(x: jax.Array, count: int) -> jax.Array:
    """Makes `count` features of every other row large, as they are in large models."""
    columns = np.random.default_rng(3).permutation(x.shape[1])[:count]
    large = jnp.where(jnp.arange(x.shape[0])[:, None] % 2, 1, 40).astype(x.dtype)
    return x.at[:, columns].multiply(large)


def single(x: Any) -> np.ndarray:
    return np.asarray(jnp.asarray(x).astype(jnp.float32))


def extremes(kernel: QuantizedArray) -> np.ndarray:
    """Returns the largest magnitude of each group's levels, repeated for each of its rows."""
    low, step = single(kernel.minimum), single(kernel.scale)
    high = low + (2**kernel.storage.bits - 1) * step
    return np.repeat(np.maximum(np.abs(low), np.abs(high)).max(1), 64)[: kernel.shape[0]]


@given(st.lists(st.floats(-8, 8, width=16), min_size=3, max_size=3), st.integers(0, 99))
@settings(deadline=None)
def test_rows_are_rounded_to_their_own_levels(some: list[float], seed: int) -> None:
    x = np.random.default_rng(seed).normal(size=(2, 64)).astype(np.float32)
    x[0, :3] = some
    codes, scale = (np.asarray(y) for y in round_rows(jnp.asarray(x)))
    kept = np.where(np.abs(x) < OUTLIER, x, 0)
    np.testing.assert_allclose(scale, np.abs(kept).max(1) / 127, rtol=1e-6)
    assert (np.abs(codes * scale[:, None] - kept) <= 0.5001 * scale[:, None]).all()
    assert codes.dtype == np.int8


def test_the_threshold_as_a_bfloat16() -> None:
    assert jnp.asarray(OUTLIER, jnp.bfloat16).view(jnp.uint16) == OUTLIER_BITS


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_kernels_use_their_levels(bits: int) -> None:
    """No weight is cut off, and the weights that share a scale use all of its levels, or nearly
    all."""
    plain = numbers(192, 48, seed=1)
    kernel = plain if bits == 16 else quantize(plain, bits, 64, 0)
    scale = np.asarray(column_scale(kernel))
    wide = single(plain) if bits == 16 else levels(kernel)
    assert (np.abs(wide) <= 127.001 * scale[:, None]).all()
    codes = np.abs(np.asarray(round_kernel(kernel, column_scale(kernel)), np.int32))
    each = 1 if bits == 16 else 64
    assert (codes.reshape(192 // each, -1).max(1) >= (127 if bits == 16 else 120)).all()


SHAPES = [
    (1, 64, 64, 0),
    (40, 384, 320, 1),
    (33, 64 * CHUNK_STEPS + 128, COLUMNS + 64, 70),
    (70, 4 * DEPTH + 192, 64, 0),
    (70, 4 * DEPTH + 192, 64, 32 * CHUNK_STEPS + 64),
    (129, 2 * DEPTH + 640, 8 * COLUMNS + 64, 0),
    (129, 2 * DEPTH + 640, 8 * COLUMNS + 64, 70),
]


@pytest.mark.few(1)
@BY_EACH
@pytest.mark.parametrize(("shape", "bits"), covering(SHAPES, [16, 8, 4], together=1))
def test_product_is_the_formula(multiply: Any, shape: tuple[int, ...], bits: int) -> None:
    """Of rows, depth, columns and outliers."""
    rows, depth, columns, outliers = shape
    plain, bias = numbers(columns, depth, seed=1), numbers(columns, seed=2)
    x = with_outliers(numbers(rows, depth), outliers)
    kernel = plain if bits == 16 else quantize(plain, bits, 64, 0)
    target = f"{TARGET}_{bits}_{matmul.tile_unit('int8')}"
    assert (target in anew(multiply).lower(x, kernel, bias).as_text()) == (multiply is IN_TILES)
    found = anew(multiply)(x, kernel, bias)
    assert found.dtype == jnp.bfloat16
    rounded_kernel = wide = single(plain) if bits == 16 else single(dequantize(kernel))
    if bits < 16 and multiply is IN_TILES:  # takes the levels as they are unpacked
        wide = levels(kernel)
    largest = None if bits == 16 else extremes(kernel)
    expected = int8_product(single(x), wide, largest, rounded_kernel) + single(bias)
    # fp32 rounds some numbers halfway between two integers the other way.
    kept = np.abs(single(x))
    halfway = 2 * kept[kept < OUTLIER].max() * np.abs(wide).max() / 127
    np.testing.assert_allclose(single(found), expected, rtol=2**-8, atol=4 * halfway)
    assert np.mean(np.abs(single(found) - expected)) < halfway / 4 + 2**-9 * np.abs(expected).mean()


@BY_EACH
def test_outliers_cost_the_others_nothing(multiply: Any) -> None:
    """Beside numbers a hundred times as large, the rest of a row keeps its precision."""
    x, kernel = numbers(64, 512) / 4, numbers(256, 512, seed=1)
    large = x.at[:, 7].set(25)
    errors = []
    for left in (x, large):
        exact = single(left).astype(np.float64) @ single(kernel).T.astype(np.float64)
        off = single(anew(multiply)(left, kernel, None)) - exact
        errors.append(np.sqrt(np.mean(off**2)) / np.sqrt(np.mean(exact**2)))
    assert 0 < errors[0] < 0.02
    assert errors[1] < errors[0]


@BY_EACH
def test_a_row_does_not_depend_on_others(multiply: Any) -> None:
    x, kernel = with_outliers(numbers(70, 512), 40), numbers(256, 512, seed=1)
    together = single(anew(multiply)(x, kernel, None))
    alone = single(anew(multiply)(x[4:5], kernel, None))
    np.testing.assert_allclose(together[4:5], alone, rtol=2**-7, atol=1e-2)


@BY_EACH
def test_nan_and_infinity_show_in_their_rows(multiply: Any) -> None:
    x, kernel = numbers(40, 128), numbers(64, 128, seed=1)
    x = x.at[3, 5].set(jnp.nan).at[7, 0].set(jnp.inf)
    found = single(anew(multiply)(x, kernel, None))
    assert np.isnan(found[3]).all()
    assert np.isinf(found[7]).all()
    assert np.isfinite(np.delete(found, (3, 7), axis=0)).all()
    broken = single(anew(multiply)(numbers(40, 128), kernel.at[9, 0].set(jnp.inf), None))
    assert not np.isfinite(broken[:, 9]).any()
    assert np.isfinite(np.delete(broken, 9, axis=1)).all()


@BY_EACH
def test_nothing_but_zeros(multiply: Any) -> None:
    x, kernel, bias = jnp.zeros((5, 64), jnp.bfloat16), numbers(64, 64), numbers(64, seed=2)
    for left, right in ((x, kernel), (numbers(5, 64), kernel * 0)):
        found = single(anew(multiply)(left, right, bias))
        np.testing.assert_array_equal(found, np.broadcast_to(single(bias), found.shape))


@pytest.mark.few(2)
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("kernels", [XLA_ON_CPU, CPU], ids=["XLA", "tiles"])
@pytest.mark.parametrize("bits", [16, 4])
def test_a_layer_is_near_that_of_16_bits(kernels: Any, bits: int) -> None:
    if kernels is CPU:
        need(*FOR_INTEGERS)
    sizes = {"hidden_size": 128, "ffn_dim": 256, "word_embed_proj_dim": 128}
    config = read_config({**BASE, **sizes})
    hidden, first = numbers(6, 20, config.hidden_size), np.zeros(6, np.int32)
    outs = []
    for matmul_bits in (16, 8):
        formats = Formats("bfloat16", bits, matmul_bits=matmul_bits, weight_format="paper")
        weights = {}
        for seed, tensor in enumerate(model_spec(config).decoders[0].tensors):
            plain, storage = numbers(*tensor.shape, seed=seed) / 4, formats.weight(tensor)
            weights[tensor.path] = plain if storage.bits == 16 else quantize_as(plain, storage)
        program = programs.Programs(config, formats, kernels).get(
            programs.prefill, layer=model_spec(config).decoders[0], rows=6, cuts=(20,)
        )
        has_tiles = [target in program.as_text() for target in (TARGET, "multiply_rows")]
        assert has_tiles == [kernels is CPU and matmul_bits == n for n in (8, 16)]
        outs.append(single(program(weights, hidden, np.zeros(2, np.int32), Rows.of(first, 20))[0]))
    off = outs[1] - outs[0]
    assert 0 < np.sqrt(np.mean(off**2)) < 0.05 * np.std(outs[0])


@pytest.mark.parametrize("bits", [16, 4])
def test_memory_is_what_the_plan_counts(bits: int) -> None:
    """XLA's own products stay within the planned memory; they take more than products in tiles."""
    config, formats = known_shape("facebook/opt-125m"), Formats("bfloat16", bits, matmul_bits=8)
    program = programs.Programs(config, formats, XLA_ON_CPU).get(
        programs.prefill, layer=model_spec(config).decoders[0], rows=16, cuts=(128,)
    )
    found = program.memory_analysis()
    assert found.temp_size_in_bytes + found.output_size_in_bytes <= workspace_bytes(
        Setting(config, "bfloat16", unified=True), formats, 16, 128
    )


class IntegerOpt(NumpyOpt):
    """A NumPy OPT whose layers multiply 8-bit integers."""

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        if ".layers." not in name:
            return super().linear(x, name)
        found = int8_product(x, self.tensors[f"{name}.weight"])
        bias = self.tensors.get(f"{name}.bias")
        return found if bias is None else found + bias


def test_scores_are_those_of_the_formula(checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint()
    config = json.loads((folder / "config.json").read_text())
    model = IntegerOpt(config, load_file(folder / "model.safetensors"))
    plain = NumpyOpt(config, load_file(folder / "model.safetensors"))
    with LLM(folder, dtype="float32", matmul_bits=8) as llm:
        scores = llm.score(prompt_token_ids=prompts())
    ours, formula, exact = (
        np.concatenate(found)
        for found in (
            [score.logprobs for score in scores],
            [model.logprobs(ids) for ids in prompts()],
            [plain.logprobs(ids) for ids in prompts()],
        )
    )
    off, loss = np.abs(ours - formula).mean(), np.abs(formula - exact).mean()
    assert off < loss / 4  # fp32 rounds some numbers the other way
    assert loss > 0.002


@pytest.fixture(scope="module")
def resident(checkpoint: Callable[[str], Path]) -> list[list[int]]:
    policy = Policy(batch_size=2, kv_block_tokens=8, matmul_bits=8, weight_bits=4, cache_bits=4)
    return run_greedy(checkpoint(), GREEDY, policy)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("percent", "schedule"), covering(PLACEMENTS[2:], ["zigzag", "row"], together=1)
)
def test_tokens_are_equal_everywhere(
    checkpoint: Callable[[str], Path],
    resident: list[list[int]],
    tmp_path: Path,
    percent: tuple[int, ...],
    schedule: Any,
) -> None:
    policy = Policy.from_percent(
        *percent,
        batch_size=2,
        num_batches=4,
        schedule=schedule,
        kv_block_tokens=8,
        matmul_bits=8,
        weight_bits=4,
        cache_bits=4,
    )
    assert run_greedy(checkpoint(), GREEDY, policy, offload_dir=tmp_path) == resident


@pytest.mark.slow
def test_the_shipped_model_hardly_notices() -> None:
    """The likelihood of its held-out text changes by less than 1 %."""
    text = (shipped_model() / "heldout.txt").read_text(encoding="utf-8")[:6000]
    pieces = [text[i : i + 300] for i in range(0, len(text), 300)]
    means = []
    for bits in (16, 8):
        with LLM(matmul_bits=bits, dtype="bfloat16") as llm:
            scores = llm.score(pieces)
        means.append(np.mean([x for score in scores for x in score.logprobs]))
    assert means[0] != means[1]
    assert abs(means[1] - means[0]) < 0.01


def test_texts_of_other_products_are_others(checkpoint: Callable[[str], Path]) -> None:
    prints = set()
    for bits in (16, 8):
        with LLM(checkpoint(), matmul_bits=bits) as llm:
            prints.add(llm.fingerprint)
    assert len(prints) == 2
