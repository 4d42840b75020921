"""Group-wise quantization against NumPy written from the formula (FlexGen, section 5)."""

from __future__ import annotations

from functools import partial

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_jax.layers.attention import attend
from flexgen_jax.layers.matmul import matmul
from flexgen_jax.layers.quantization import (
    QuantizedArray,
    assemble,
    dequantize,
    quantize,
    take_rows,
)
from flexgen_jax.layers.tuning import Tuning
from flexgen_jax.models.formats.storage import Storage, kv_storage
from tests.helpers.cases import covering, examples
from tests.helpers.numpy_quantization import quantized
from tests.helpers.packed import FORMATS, random_kernel

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
RNG = np.random.default_rng(0)


def unpacked(q: QuantizedArray) -> np.ndarray:
    """Returns the codes of an array: plane after plane along the grouped axis."""
    packed, bits, axis = np.asarray(q.packed), q.storage.bits, q.storage.axis
    planes = [(packed >> (bits * i)) & (2**bits - 1) for i in range(8 // bits)]
    return np.take(np.concatenate(planes, axis=axis), range(q.shape[axis]), axis=axis)


KINDS = ["random", "constant", "zero", "huge", "overflowing", "tiny", "negative", "one outlier"]


def special(kind: str, shape: tuple[int, ...]) -> np.ndarray:
    x = RNG.normal(size=shape)
    return {
        "random": x,
        "constant": np.full(shape, 0.3),
        "zero": np.zeros(shape),
        "huge": x * 1e4,
        "overflowing": x * 1e38,
        "tiny": x * 1e-6,
        "negative": -np.abs(x) - 5,
        "one outlier": np.where(np.arange(x.size).reshape(shape) == 7, 500.0, x),
    }[kind]


@pytest.mark.parametrize(
    ("dtype", "group", "axis", "bits"),
    covering([*DTYPES], [16, 32, 64, 128], [0, 1, -1], [8, 4, 2]),
)
def test_equal_to_the_formula(dtype: str, group: int, axis: int, bits: int) -> None:
    """Codes, scales and minima of all kinds of numbers equal the formula's."""
    shape = (130, 128, 2) if group > 32 else (33, 48, 34)
    for kind in KINDS:
        with np.errstate(over="ignore"):
            x = special(kind, shape).astype(DTYPES[dtype])
        found = quantize(jnp.asarray(x), bits, group, axis)
        codes, scale, minimum = quantized(x, bits, group, axis)
        np.testing.assert_array_equal(np.asarray(found.minimum), minimum, kind)
        np.testing.assert_array_equal(np.asarray(found.scale), scale, kind)
        np.testing.assert_array_equal(unpacked(found), codes, kind)
        back = dequantize(found)
        assert back.shape == shape
        assert back.dtype == dtype
        assert np.isfinite(np.asarray(back, np.float32)).all()


@examples(6)
@given(
    x=hnp.arrays(
        np.float32,
        hnp.array_shapes(min_dims=1, max_dims=3, max_side=40),
        elements=st.floats(-(2.0**100), 2.0**100, width=32),
    ),
    bits=st.sampled_from([2, 4, 8]),
    group=st.integers(1, 70),
    data=st.data(),
)
def test_error_is_at_most_half_a_step(
    x: np.ndarray, bits: int, group: int, data: st.DataObject
) -> None:
    axis = data.draw(st.integers(0, x.ndim - 1))
    q = quantize(jnp.asarray(x), bits, group, axis)
    step = np.repeat(np.asarray(q.scale, np.float64), group, axis=axis)
    step = np.take(step, range(x.shape[axis]), axis=axis)
    error = np.abs(np.asarray(dequantize(q), np.float64) - x)
    # The fp32 result itself is rounded, and scales below fp32's normal numbers become zero.
    rounding = 1e-6 * np.abs(x) + 255 * np.finfo(np.float32).tiny
    assert (error <= 0.5 * step * (1 + 1e-5) + rounding).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_become_the_largest_numbers(dtype: str) -> None:
    x = np.array([[np.inf, 1.0, -np.inf, 0.0]], DTYPES[dtype])
    back = np.asarray(dequantize(quantize(jnp.asarray(x), 8, 4)), np.float32)
    assert np.isfinite(back).all()
    assert back[0, 0] > 6e4 and back[0, 2] < -6e4


@pytest.mark.parametrize("bad", [{"bits": 3}, {"group_size": 0}, {"axis": 2}])
def test_nonsense_is_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"must be one of|cannot group"):
        quantize(jnp.ones((4, 4)), **bad)


def test_bytes() -> None:
    q = quantize(jnp.ones((256, 512), jnp.bfloat16), axis=0)
    assert q.nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(q))
    assert q.nbytes / (256 * 512 * 2) == pytest.approx(0.28125)
    for head_dim in (64, 80, 128):  # of OPT-1.3B, 2.7B and 6.7B
        storage = kv_storage((4, 32, 128, head_dim), "bfloat16", 4)
        assert storage.nbytes <= 0.29 * 2 * 4 * 32 * 128 * head_dim


def test_planes_are_whole_groups_where_that_costs_little() -> None:
    vocabulary = quantize(jnp.ones((50272 // 8, 4)), 4, 64, 0)  # 98.2 groups
    assert vocabulary.packed.shape[0] % 64 == 0
    assert vocabulary.packed.size <= 1.02 * 50272 // 8 * 4 / 2
    assert quantize(jnp.ones((2, 64)), 4, 64).packed.shape == (2, 32)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("size", [(70, 33), (128, 64)])
def test_dense_with_a_quantized_kernel(bits: int, rows: int, size: tuple[int, int]) -> None:
    kernel = RNG.normal(size=size).astype(np.float32)
    x = RNG.normal(size=(2, rows, size[1])).astype(np.float32)
    bias = RNG.normal(size=size[0]).astype(np.float32)
    q = quantize(jnp.asarray(kernel), bits, 64, 0)
    expected = x @ np.asarray(dequantize(q)).T + bias
    np.testing.assert_allclose(matmul(jnp.asarray(x), q, jnp.asarray(bias)), expected, 2e-5, 2e-5)


@pytest.mark.parametrize(("rows", "dtype"), [(1, "float16"), (1, "bfloat16"), (8, "float16")])
@pytest.mark.parametrize(
    "name", ["own", "own-8", "Q6_K", "gptq", "act-order", "fp8", "MXFP4", "nf4"]
)
def test_few_rows_are_added_up(name: str, rows: int, dtype: str) -> None:
    """By weights that are grouped along their input, in their stored order."""
    rng = np.random.default_rng(0)
    kernel = random_kernel((48, 512), FORMATS[name])
    kernel = assemble(Storage(kernel.shape, dtype, FORMATS[name]), kernel.leaves)
    x = jnp.asarray(rng.standard_normal((rows, 512)).astype(dtype))
    bias = jnp.asarray(rng.standard_normal(48).astype(dtype))
    added = jax.jit(partial(matmul, tuning=Tuning(added_rows=rows)))(x, kernel, bias)
    numbers = np.asarray(dequantize(kernel), np.float64)
    wide = np.asarray(x, np.float64)
    error = np.abs(np.asarray(added) - wide @ numbers.T - np.asarray(bias, np.float64))
    assert (error <= 1e-5 * (np.abs(wide) @ np.abs(numbers).T) + 1e-5).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("head_dim", [5, 64])
def test_attention_to_a_quantized_block(bits: int, head_dim: int) -> None:
    shape = (2, 3, 7, head_dim)
    key, value = (RNG.normal(size=shape).astype(np.float32) for _ in range(2))
    query = RNG.normal(size=(2, 3, 1, head_dim)).astype(np.float32)
    valid = np.ones((2, 7), bool)
    valid[0, :3] = False
    storage = kv_storage(shape, "float32", bits)
    packed = [quantize(jnp.asarray(x), bits, storage.group_size) for x in (key, value)]
    found, found_lse = attend(jnp.asarray(query), *packed, jnp.asarray(valid))
    wide = [np.asarray(dequantize(q)) for q in packed]
    scores = np.where(valid[:, None, None], query @ wide[0].swapaxes(2, 3), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = weights / weights.sum(-1, keepdims=True) @ wide[1]
    np.testing.assert_allclose(found, expected, 1e-4, 1e-4)
    lse = scores.max(-1) + np.log(weights.sum(-1))
    np.testing.assert_allclose(found_lse, lse, 1e-5, 1e-5)


def test_rows_are_taken_without_unpacking_the_rest() -> None:
    table = quantize(jnp.asarray(RNG.normal(size=(100, 6)), jnp.float32), 4, 16, 0)
    rows = np.array([[0, 99, 31], [64, 64, 5]])
    found = take_rows(table, jnp.asarray(rows))
    np.testing.assert_array_equal(found, np.asarray(dequantize(table))[rows])
