"""Products with kernel weights that are grouped along their input, against NumPy on the numbers
that they stand for."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from flexgen_jax.cpu import matmul
from flexgen_jax.cpu.backend import CpuKernels
from flexgen_jax.cpu.grouped import Rounding, grouping_of
from flexgen_jax.layers.quantization import QuantizedArray, assemble, dequantize
from flexgen_jax.models.formats.decoding import decoded, leaves_in_lanes
from flexgen_jax.models.formats.format import Factor, Format, affine, centered
from flexgen_jax.models.formats.known import own
from flexgen_jax.models.formats.lanes import in_lanes
from flexgen_jax.models.formats.storage import Storage
from flexgen_jax.policy.hardware import KernelSizes
from tests.helpers.arrays import anew, numbers
from tests.helpers.cases import covering
from tests.helpers.packed import FORMATS, random_kernel
from tests.helpers.units import need

TARGET = "flexgen_jax_multiply_grouped"

CPU = CpuKernels(KernelSizes())

ROUNDED = [name for name, kind in FORMATS.items() if kind.levels in ("integers", "e2m1")]
"""Formats whose codes are multiplied by integers, too."""


def wide(kernel: QuantizedArray) -> np.ndarray:
    """The numbers that a kernel stands for, not rounded to bfloat16."""
    storage = Storage(kernel.shape, "float32", kernel.storage.format)
    return np.asarray(dequantize(assemble(storage, kernel.leaves)), np.float64)


@pytest.mark.few(2)
@pytest.mark.usefixtures("unit")
@pytest.mark.parametrize(
    ("name", "rows", "shape"),
    covering([*FORMATS], [1, 2, 5, 40], [(96, 512), (160, 1280)], together=1),
)
def test_product_is_the_formula(name: str, rows: int, shape: tuple[int, int]) -> None:
    assert_product_is_the_formula(random_kernel(shape, FORMATS[name]), rows)


def assert_product_is_the_formula(kernel: QuantizedArray, rows: int) -> None:
    shape = kernel.shape
    x, bias = numbers(rows, shape[1]), jnp.asarray(numbers(shape[0], seed=1), jnp.float32)
    assert TARGET in anew(CPU.matmul).lower(x, kernel, bias).as_text()
    right = np.asarray(x, np.float64) @ wide(kernel).T + np.asarray(bias, np.float64)
    found = np.asarray(anew(CPU.matmul)(x, kernel, bias), np.float64)
    # Results have 8 bits, and weights in tiles and quantiles have, too.
    np.testing.assert_allclose(found, right, rtol=2**-8, atol=2**-6 * np.abs(right).std())


@pytest.mark.few(1)
@pytest.mark.usefixtures("unit")
@pytest.mark.parametrize("rows", [1, 40])
def test_every_8_bit_float_is_its_number(rows: int) -> None:
    """A row of x has a single 1, so a result is one weight."""
    packing = Format(8, Factor("float32", 128, rows=128), levels="e4m3")
    codes = np.tile(np.arange(256, dtype=np.uint8)[:, None], (1, 1024))
    scale = jnp.ones((2, 8), jnp.float32)
    kernel = assemble(Storage((256, 1024), "bfloat16", packing), [jnp.asarray(codes), scale])
    numbers = codes[:, 0].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    x = jnp.eye(rows, 1024, 3, jnp.bfloat16)
    assert TARGET in anew(CPU.matmul).lower(x, kernel, None).as_text()
    found = np.asarray(anew(CPU.matmul)(x, kernel, None), np.float32)
    is_number = ~np.isnan(numbers)
    assert (found[:, is_number] == numbers[is_number]).all()


def rounded(x: jax.Array, share: int = 32) -> np.ndarray:
    """Rows with every `share` elements rounded to 127 levels of either sign."""
    steps = np.asarray(x, np.float32).reshape(x.shape[0], -1, share)
    unit = np.abs(steps).max(2, keepdims=True) * np.float32(1 / 127)
    inverse = np.float32(1) / np.where(unit == 0, np.float32(1), unit)
    return (np.rint(steps * inverse).astype(np.float64) * unit).reshape(x.shape)


@pytest.mark.few(1)
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("by_fours", [True, False], ids=["fours", "pairs"])
@pytest.mark.parametrize(
    ("name", "rows"),
    covering(ROUNDED, [1, 2, 5, 40]),
)
def test_rows_are_rounded_step_by_step(
    monkeypatch: pytest.MonkeyPatch, name: str, rows: int, by_fours: bool
) -> None:
    """Where that is faster than products of fp32, which is patched here; sums are exact."""
    need("avx512" if by_fours else "fma")
    rounding = "fours" if by_fours else "pairs"
    assert_product_of_rounded_rows(
        monkeypatch, random_kernel((96, 1024), FORMATS[name]), rows, rounding
    )


@pytest.mark.few(2)
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    ("name", "rows", "rounding"),
    covering(
        [name for name in ROUNDED if (FORMATS[name].bits, FORMATS[name].levels) == (4, "integers")],
        [33, 64, 301],
        ["pairs", "fours"],
    ),
)
def test_many_rows_are_rounded(
    monkeypatch: pytest.MonkeyPatch, name: str, rows: int, rounding: str
) -> None:
    """Columns are laid side by side in several blocks, the last of which is short."""
    need("avx512" if rounding == "fours" else "fma")
    kernel = random_kernel((160, 1280), FORMATS[name])
    assert_product_of_rounded_rows(monkeypatch, kernel, rows, rounding)


def assert_product_of_rounded_rows(
    monkeypatch: pytest.MonkeyPatch, kernel: QuantizedArray, rows: int, rounding: str
) -> None:
    """A product of rows that are rounded in this way is the formula's, one of zeros included."""
    monkeypatch.setattr(matmul, "tile_unit", lambda kind="bf16": "fma")
    monkeypatch.setattr(matmul, "_rounding", lambda: rounding)
    monkeypatch.setattr(matmul, "_gains_by_rounding_steps", lambda rows, kernel: True)
    columns, depth = kernel.shape
    x = numbers(rows, depth).at[0, 32:64].set(0)
    bias = jnp.asarray(numbers(columns, seed=1), jnp.float32)
    multiply = anew(partial(CPU.matmul, bits=8))
    assert f"_by_{rounding}" in multiply.lower(x, kernel, bias).as_text()
    order = kernel.leaf("order") if kernel.storage.packing.has_order else np.arange(depth)
    left = np.zeros((rows, depth))
    left[:, order] = rounded(x[:, order])
    right = left @ wide(kernel).T + np.asarray(bias, np.float64)
    found = np.asarray(multiply(x, kernel, bias), np.float64)
    np.testing.assert_allclose(found, right, rtol=2**-8, atol=4e-3 * right.std())


@pytest.mark.few(1)
@pytest.mark.parametrize("rounding", ["fours", "pairs"])
@pytest.mark.parametrize("rows", [3, 40])
def test_a_rounded_row_that_is_not_finite_is_seen(
    monkeypatch: pytest.MonkeyPatch, rounding: str, rows: int
) -> None:
    need("avx512" if rounding == "fours" else "fma")
    monkeypatch.setattr(matmul, "tile_unit", lambda kind="bf16": "fma")
    monkeypatch.setattr(matmul, "_rounding", lambda: rounding)
    kernel = random_kernel((512, 1024), FORMATS["own"])
    x = numbers(rows, 1024).at[1, 40].set(jnp.nan).at[2, 40].set(jnp.inf)
    product = np.asarray(jax.jit(partial(CPU.matmul, bits=8))(x, kernel, None), np.float32)
    finite = [row for row in range(rows) if row not in (1, 2)]
    assert np.isfinite(product[finite]).all()
    assert not np.isfinite(product[1:3]).any()


@pytest.mark.slow
@pytest.mark.usefixtures("unit")
def test_logits_are_not_rounded() -> None:
    kernel, x = random_kernel((320, 256), FORMATS["own"]), numbers(2, 256)
    found = anew(CPU.logits)(x, kernel)
    assert found.dtype == jnp.float32
    right = np.asarray(x, np.float64) @ wide(kernel).T
    np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-5 * np.abs(right).std())


@pytest.mark.parametrize(
    ("packing", "shape"),
    [
        (own(4), (96, 96)),  # planes would begin within a group
        (centered(4, 8, "float16"), (96, 512)),  # groups shorter than half of a step
        (affine(5, 32, dtype="float16"), (96, 480)),  # planes of one bit would begin within a step
        (Format(8, Factor("float32", 128, rows=128), levels="e5m2"), (256, 512)),
        (Format(8, Factor("float32", 128, rows=128), levels="e4m3"), (96, 448)),  # a short group
    ],
)
def test_other_formats_are_left_to_xla(packing: Format, shape: tuple[int, int]) -> None:
    kernel = random_kernel(shape, packing)
    assert grouping_of(kernel.storage) is None
    x = numbers(3, shape[1])
    assert TARGET not in anew(CPU.matmul).lower(x, kernel, None).as_text()
    found = np.asarray(jax.jit(CPU.matmul)(x, kernel, None), np.float64)
    right = np.asarray(x, np.float64) @ wide(kernel).T
    np.testing.assert_allclose(found, right, rtol=2**-6, atol=2**-6 * np.abs(right).std())


def test_small_kernels_are_left_to_xla() -> None:
    kernel = random_kernel((96, 512), own(4))
    assert kernel.shape[0] * kernel.shape[1] < matmul.FEW_PACKED
    assert TARGET not in anew(CPU.matmul).lower(numbers(1, 512), kernel, None).as_text()


IN_LANES = [
    name
    for name, kind in FORMATS.items()
    if in_lanes(Storage((32, 1280), "bfloat16", kind)).packing.in_lanes
]
"""Formats whose codes may lie in lanes."""


def with_lanes(kernel: QuantizedArray) -> QuantizedArray:
    """Returns a kernel with its codes in lanes."""
    storage = in_lanes(kernel.storage)
    leaves = leaves_in_lanes([np.asarray(leaf) for leaf in kernel.leaves], storage)
    return assemble(storage, [jnp.asarray(leaf) for leaf in leaves])


@pytest.mark.parametrize("depth", [256, 512, 1280])
@pytest.mark.parametrize("name", IN_LANES)
def test_codes_in_lanes_are_the_same_numbers(name: str, depth: int) -> None:
    kernel = random_kernel((32, depth), FORMATS[name])
    laned = with_lanes(kernel)
    assert laned.storage.packing.in_lanes
    assert laned.storage.nbytes == kernel.storage.nbytes
    np.testing.assert_array_equal(dequantize(laned), dequantize(kernel))
    both = [decoded([*map(np.asarray, of.leaves)], of.storage) for of in (laned, kernel)]
    np.testing.assert_array_equal(*both)


@pytest.mark.few(2)
@pytest.mark.usefixtures("unit")
@pytest.mark.parametrize(
    ("name", "rows", "shape"),
    covering([*IN_LANES], [1, 2, 5, 40], [(96, 512), (160, 1280)], together=1),
)
def test_products_with_lanes_are_the_formula(name: str, rows: int, shape: tuple[int, int]) -> None:
    assert_product_is_the_formula(with_lanes(random_kernel(shape, FORMATS[name])), rows)


@pytest.mark.few(1)
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("rounding", ["fours", "pairs"])
@pytest.mark.parametrize(("name", "rows"), covering(IN_LANES, [1, 2, 5, 33, 70]))
def test_rows_are_rounded_lane_by_lane(
    monkeypatch: pytest.MonkeyPatch, name: str, rows: int, rounding: Rounding
) -> None:
    need("avx512" if rounding == "fours" else "fma")
    kernel = with_lanes(random_kernel((96, 1280), FORMATS[name]))
    grouping = grouping_of(kernel.storage)
    assert grouping is not None
    monkeypatch.setattr(matmul, "tile_unit", lambda kind="bf16": "fma")
    monkeypatch.setattr(matmul, "_rounding", lambda: rounding)
    x = numbers(rows, 1280)
    found = np.asarray(anew(matmul.matmul_int8)(x, kernel, None), np.float64)
    weights = wide(kernel)
    if kernel.storage.packing.has_order:  # rows are rounded in the stored order
        order = np.asarray(kernel.leaf("order"))
        x, weights = x[:, order], weights[:, order]
    right = rounded(x, grouping.unit) @ weights.T
    is_unpacked = rows > 64 and not grouping.has_integer_tiles(rounding)
    expected = np.asarray(x, np.float64) @ weights.T if is_unpacked else right
    # Weights in tiles are rounded to bfloat16.
    room = (2**-6 if is_unpacked else 2**-8) * np.abs(right).std()
    np.testing.assert_allclose(found, expected, rtol=2**-7, atol=room)
