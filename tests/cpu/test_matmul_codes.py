"""Tests products of integers and the codes of packed kernel weights against NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flexgen_jax.cpu import matmul
from flexgen_jax.cpu.jit.paper_integers import BLOCK, DEPTH, ROWS
from flexgen_jax.layers.matmul_int8 import OUTLIER
from flexgen_jax.layers.quantization import QuantizedArray, quantize
from flexgen_jax.models.formats.storage import GROUP_SIZE
from tests.helpers.arrays import anew, levels, numbers
from tests.helpers.cases import covering
from tests.helpers.kernels import CPU
from tests.helpers.units import use_unit

TARGET = "flexgen_jax_multiply_rows"
FLOATS = np.float32


@pytest.fixture(autouse=True)
def by_bytes(monkeypatch: pytest.MonkeyPatch, always: None) -> None:
    use_unit("avx2", monkeypatch)


def multiply(x: jax.Array, kernel: jax.Array | QuantizedArray, bias: jax.Array | None) -> jax.Array:
    return CPU.matmul(x, kernel, bias, 8)


def single(x: jax.Array) -> np.ndarray:
    return np.asarray(x, np.float32)


def formula(x: jax.Array, kernel: QuantizedArray, bias: jax.Array) -> np.ndarray:
    """The product with x * scale rounded to 127 levels, as fp32, in blocks, less outliers."""
    left, middle = single(x), 1 << (kernel.storage.bits - 1)
    scales, minima = single(kernel.scale), single(kernel.minimum)
    each = np.repeat(scales, GROUP_SIZE, 0)[: kernel.shape[0]]
    least = np.repeat(minima, GROUP_SIZE, 0)[: kernel.shape[0]]
    wide = levels(kernel).astype(np.float64)
    codes = np.round((wide - least) / np.where(each > 0, each, 1))
    out = left.astype(np.float64) @ (least + middle * each.astype(np.float64)).T + single(bias)
    is_apart = ~(np.abs(left) < OUTLIER)
    for group in range(scales.shape[0]):
        columns = slice(group * GROUP_SIZE, (group + 1) * GROUP_SIZE)
        products = left * scales[group]
        rounded = np.where(is_apart, products, 0).astype(np.float64)
        kept = np.where(is_apart, FLOATS(0), products)
        for begin in range(0, left.shape[1], BLOCK):
            part = kept[:, begin : begin + BLOCK]
            step = np.abs(part).max(1, keepdims=True) * FLOATS(1 / 127)
            inverse = np.divide(FLOATS(1), step, out=np.zeros_like(step), where=step > 0)
            rounded[:, begin : begin + BLOCK] += np.rint(part * inverse).astype(np.float64) * step
        out[:, columns] += rounded @ (codes[columns] - middle).T
    return out


SHAPES = [
    (1, 32, 64, 0),
    (1, 2 * DEPTH + 96, 192, 5),
    (2, BLOCK + 32, 1088, 0),
    (3, 96, 704, 96),
    (5, DEPTH + BLOCK, 320, 3),
    (33, 320, 2048, 2),
    (ROWS + 6, DEPTH + 32, 576, 1),
    (2 * ROWS + 1, 128, 320, 0),
]
"""Rows, depth, columns, and outliers."""


@pytest.mark.few(1)
@pytest.mark.parametrize(("shape", "bits"), covering(SHAPES, [8, 4], together=1))
def test_product_is_the_formula(shape: tuple[int, ...], bits: int) -> None:
    rows, depth, columns, outliers = shape
    kernel, bias = quantize(numbers(columns, depth, seed=1), bits, 64, 0), numbers(columns, seed=2)
    places = np.random.default_rng(3).permutation(depth)[:outliers]
    x = numbers(rows, depth).at[::2, places].multiply(20)
    assert f"{TARGET}_{bits}_avx2" in anew(multiply).lower(x, kernel, bias).as_text()
    expected = formula(x, kernel, bias)
    found = single(anew(multiply)(x, kernel, bias))
    # Some elements halfway between two integers are rounded the other way.
    halfway = np.abs(single(x) * single(kernel.scale).max()).max() * (1 << (bits - 1)) / 127
    off, room = np.abs(found - expected), 2**-8 * np.abs(expected) + 2e-3
    assert (off <= room + halfway).all()
    assert np.mean(off > room) < 5e-3


@pytest.mark.few(1)
@pytest.mark.parametrize("bits", [8, 4])
def test_rounding_costs_little(bits: int) -> None:
    kernel = quantize(numbers(512, 1024, seed=1), bits, 64, 0)
    x, none = numbers(8, 1024), jnp.zeros(512)
    exact = single(x).astype(np.float64) @ levels(kernel).astype(np.float64).T
    off = single(anew(multiply)(x, kernel, none)) - exact
    assert 0 < np.sqrt(np.mean(off**2)) < 0.01 * np.std(exact)


@pytest.mark.slow
def test_outliers_cost_the_others_nothing() -> None:
    """Beside numbers a hundred times as large, the rest of a row keeps its precision."""
    kernel, x = quantize(numbers(256, 512, seed=1), 4, 64, 0), numbers(4, 512) / 4
    right, errors = levels(kernel).astype(np.float64).T, []
    for left in (x, x.at[:, 7].set(25)):
        exact = single(left).astype(np.float64) @ right
        off = single(anew(multiply)(left, kernel, None)) - exact
        errors.append(np.sqrt(np.mean(off**2)) / np.sqrt(np.mean(exact**2)))
    assert 0 < errors[0] < 0.02
    assert errors[1] < errors[0]


@pytest.mark.slow
def test_a_row_does_not_depend_on_others() -> None:
    x, kernel = numbers(ROWS + 8, 512) * 3, quantize(numbers(256, 512, seed=1), 4, 64, 0)
    together = single(anew(multiply)(x, kernel, None))
    for rows in (slice(4, 5), slice(5, 7), slice(ROWS + 1, ROWS + 4)):
        alone = single(anew(multiply)(x[rows], kernel, None))
        np.testing.assert_array_equal(together[rows], alone)


def test_nan_and_infinity_show_in_their_rows() -> None:
    x, kernel = numbers(9, 128), quantize(numbers(64, 128, seed=1), 4, 64, 0)
    x = x.at[3, 5].set(jnp.nan).at[7, 0].set(jnp.inf)
    found = single(anew(multiply)(x, kernel, None))
    assert not np.isfinite(found[[3, 7]]).any()
    assert np.isfinite(np.delete(found, (3, 7), axis=0)).all()


def test_nothing_but_zeros() -> None:
    kernel, bias = quantize(numbers(64, 64), 4, 64, 0), numbers(64, seed=2)
    found = single(anew(multiply)(jnp.zeros((5, 64), jnp.bfloat16), kernel, bias))
    np.testing.assert_array_equal(found, np.broadcast_to(single(bias), found.shape))


def test_plain_kernels_are_left_to_xla() -> None:
    x, kernel = numbers(3, 64), numbers(64, 64, seed=1)
    assert matmul.matmul_int8(x, kernel, None) is None
