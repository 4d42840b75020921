"""Matrix products on the CPU, called from inside XLA's programs.

If the processor has a unit for them, they take over products of many rows, products of any number
of rows with packed kernel weights, and, by vectors, products of few rows. Each function returns
None if XLA's own code should be used.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from flexgen_jax.cpu.grouped import Grouping, Rounding, grouping_of
from flexgen_jax.cpu.jit.few_rows import MOST
from flexgen_jax.cpu.jit.operands import PAIR
from flexgen_jax.cpu.jit.product_handlers import (
    grouped_handler,
    int8_handler,
    product_handler,
    rounding_handler,
)
from flexgen_jax.cpu.processor import host, tile_unit
from flexgen_jax.cpu.targets import register
from flexgen_jax.layers.matmul_int8 import column_scale
from flexgen_jax.layers.quantization import Kept, QuantizedArray
from flexgen_jax.models.formats.known import paper

FEW_PRODUCTS = 1 << 28
"""Below this many multiplications, XLA's own product is fast enough."""

FEW_PACKED = 1 << 18
"""Below this many elements, XLA unpacks packed kernel weights fast enough."""

FEW_READ = 1 << 20
"""Below this many elements, XLA reads plain kernel weights fast enough."""

PAPERS = tuple(paper(bits) for bits in (2, 4, 8))
"""Formats of kernel weights that are grouped along their output."""

FEW_ROWS = MOST
"""Up to this many rows, a product takes little longer than reading its kernel weights."""

FEW_ROUNDED = 8
"""Up to this many rows, weights in the paper's format are not rounded to integers: that would take
longer than the product does without. AVX2 multiplies by their codes, and rounds rows only."""

FEW_STEPS = 8
"""Up to this many rows, steps of rows are rounded for codes that do not lie in lanes, where the
processor multiplies pairs of bfloat16."""

MOST_ROUNDED = 16 if host().has_wide_vectors else 64
"""Up to this many rows, products of integers with the codes of weights that are grouped along their
input take less time than those of fp32, unless there are tiles of integers."""


def matmul(x: jax.Array, kernel: Kept, bias: jax.Array | None, dtype: Any) -> jax.Array | None:
    """Computes `x @ kernel.T + bias` in `dtype`, x's own or fp32, or returns None; see
    `layers.kernels.Kernels.matmul`."""
    unit = _unit_for(x, kernel)
    return _multiplied(x, kernel, bias, dtype, unit) if unit else None


def _multiplied(
    x: jax.Array,
    kernel: Kept,
    bias: jax.Array | None,
    dtype: Any,
    unit: str,
    rounding: Rounding = "",
) -> jax.Array | None:
    target = _target_for(kernel, dtype == jnp.float32, unit, rounding)
    if target is None:
        return None
    rows, columns = x.reshape(-1, x.shape[-1]), kernel.shape[0]
    added = jnp.zeros(columns, jnp.float32) if bias is None else bias.astype(jnp.float32)
    out = jax.ShapeDtypeStruct((rows.shape[0], columns), dtype)
    leaves = jax.tree.leaves(kernel)
    if isinstance(kernel, QuantizedArray) and kernel.storage.packing.has_order:
        rows, leaves = jnp.take(rows, kernel.leaf("order"), axis=1), leaves[:-1]
    product: jax.Array = jax.ffi.ffi_call(target, out)(rows, added, *leaves)
    return product.reshape(*x.shape[:-1], columns)


def matmul_int8(x: jax.Array, kernel: Kept, bias: jax.Array | None) -> jax.Array | None:
    """Computes `x @ kernel.T + bias` by products of 8-bit integers, in x's dtype, or returns
    None."""
    if _rounds_steps(kernel):
        return _multiplied_in_steps(x, kernel, bias)
    unit = _unit_for_integers(x, kernel)
    if unit == "avx2":
        return _multiplied(x, kernel, bias, x.dtype, unit)
    target = _int8_target(_bits(kernel), unit) if unit else None
    rounding = _rounding_target() if target else None
    if target is None or rounding is None:
        return None
    rows = x.reshape(-1, x.shape[-1])
    count, columns = rows.shape[0], kernel.shape[0]
    added = jnp.zeros(columns, jnp.float32) if bias is None else bias.astype(jnp.float32)
    flags, *rounded = _rounded(rounding, rows)
    out = jax.ShapeDtypeStruct((count, columns), x.dtype)
    arguments = (*rounded, column_scale(kernel), added, rows, flags.max(axis=0))
    call = jax.ffi.ffi_call(target, out)
    product: jax.Array = call(*arguments, *jax.tree.leaves(kernel))
    return product.reshape(*x.shape[:-1], columns)


def _multiplied_in_steps(x: jax.Array, kernel: Kept, bias: jax.Array | None) -> jax.Array | None:
    unit = _unit_for(x, kernel)
    return _multiplied(x, kernel, bias, x.dtype, unit, _rounding()) if unit else None


def _rounding() -> Rounding:
    """Returns how rows are rounded for kernels that are grouped along their input."""
    return "fours" if host().multiplies_bytes else "pairs"


def multiplies(x: jax.Array, kernel: Kept) -> bool:
    """Returns whether a product is computed here, and not by XLA's own code."""
    unit = _unit_for(x, kernel)
    return unit is not None and _target_for(kernel, False, unit) is not None


def _rounds_steps(kernel: Kept) -> bool:
    """Returns whether rows are rounded step by step, for the codes of a kernel that is grouped
    along its input."""
    grouping = _grouping(kernel)
    return grouping is not None and grouping.levels in ("integers", "e2m1")


def _target_for(kernel: Kept, is_wide: bool, unit: str, rounding: Rounding = "") -> str | None:
    """Returns the name of the code that multiplies by a kernel's format, None if there is none;
    rounding: how few rows are rounded to integers."""
    grouping = _grouping(kernel)
    if grouping is not None:
        return _grouped_target(grouping, is_wide, unit, rounding)
    return _target(_bits(kernel), is_wide, unit)


def _grouping(kernel: Kept) -> Grouping | None:
    """Returns a kernel's format as the generated code knows it, None if it does not."""
    return grouping_of(kernel.storage) if isinstance(kernel, QuantizedArray) else None


def _bits(kernel: Kept) -> int:
    return kernel.storage.bits if isinstance(kernel, QuantizedArray) else 16


def gains_by_rounding(x: jax.Array, kernel: Kept) -> bool:
    """Returns whether a product of 8-bit integers takes less time than one of x's dtype."""
    few = FEW_ROWS
    if isinstance(kernel, QuantizedArray):
        if _rounds_steps(kernel):
            return _gains_by_rounding_steps(x.size // x.shape[-1], kernel)
        if not _is_papers(kernel):
            return False
        few = 0 if tile_unit("int8") == "avx2" else FEW_ROUNDED
    return x.size // x.shape[-1] > few


def _gains_by_rounding_steps(rows: int, kernel: Kept) -> bool:
    """Does what `gains_by_rounding` does for kernels that are grouped along their input. With
    vectors of 512 bits and no products of four bytes, many rows are multiplied faster in fp32."""
    grouping, rounding = _grouping(kernel), _rounding()
    if grouping is None or tile_unit() == "amx":
        return False
    has_fast_tiles = rounding == "fours" or not host().has_wide_vectors
    if has_fast_tiles and grouping.has_integer_tiles(rounding):
        return True
    is_fast = grouping.in_lanes or tile_unit() == "fma"
    return rows <= (MOST_ROUNDED if is_fast else FEW_STEPS)


def _rounded(target: str, rows: jax.Array) -> list[jax.Array]:
    """Rounds rows, bfloat16 [row, depth], to int8, as `layers.matmul_int8.round_rows` does.

    Returns four arrays: flags of the columns with outliers, uint8 [rows / 32 rounded up, depth];
    the codes, int8 [row, depth]; the rows' scales, fp32 [row]; the sums of the rows' codes, int32
    [row].
    """
    count, depth = rows.shape
    kinds = (
        jax.ShapeDtypeStruct((-(-count // PAIR), depth), jnp.uint8),
        jax.ShapeDtypeStruct((count, depth), jnp.int8),
        jax.ShapeDtypeStruct((count,), jnp.float32),
        jax.ShapeDtypeStruct((count,), jnp.int32),
    )
    return list(jax.ffi.ffi_call(target, kinds)(rows))


def _unit_for_integers(x: jax.Array, kernel: Kept) -> str | None:
    """Returns the unit that takes a product of 8-bit integers, or None if XLA should compute it.

    Plain kernel weights count as large too, because XLA would round them in memory.
    """
    unit, is_packed = tile_unit("int8"), isinstance(kernel, QuantizedArray)
    if is_packed and not _is_papers(kernel):
        return None
    fits, size = _fit_tiles(x, kernel), kernel.shape[0] * kernel.shape[1]
    if unit == "avx2":  # nothing is made of the whole matrix
        return unit if fits and is_packed and size >= FEW_PACKED else None
    return unit if fits and kernel.shape[1] % (2 * PAIR) == 0 and size >= FEW_READ else None


def _unit_for(x: jax.Array, kernel: Kept) -> str | None:
    """Returns the unit that takes a product in tiles, or None if none can or XLA is faster."""
    columns, depth = kernel.shape
    if isinstance(kernel, QuantizedArray):  # XLA unpacks these in memory
        is_faster = columns * depth >= FEW_PACKED
    else:
        rows = x.size // depth
        is_faster = rows > FEW_ROWS and rows * columns * depth >= FEW_PRODUCTS
        if tile_unit() in ("avx512", "fma") and rows <= FEW_ROWS:  # memory speed is the limit
            is_faster = columns * depth >= FEW_READ
    return tile_unit() if _fit_tiles(x, kernel) and is_faster else None


def _fit_tiles(x: jax.Array, kernel: Kept) -> bool:
    kinds = {jnp.dtype(x.dtype), jnp.dtype(kernel.dtype)}
    fits = kinds == {jnp.dtype(jnp.bfloat16)} and not any(n % PAIR for n in kernel.shape)
    if not isinstance(kernel, QuantizedArray) or _grouping(kernel) is not None:
        return fits
    return fits and _is_papers(kernel) and kernel.storage.plane_length % PAIR == 0


def _is_papers(kernel: Kept) -> bool:
    """Returns whether packed kernel weights are grouped along their output, as in the paper."""
    return isinstance(kernel, QuantizedArray) and kernel.storage.format in PAPERS


@lru_cache
def _target(bits: int, is_wide: bool, unit: str) -> str | None:
    name = f"flexgen_jax_multiply_rows_{bits}{'_wide' * is_wide}_{unit}"
    return register(name, lambda: product_handler(name, bits, is_wide, unit))


@lru_cache
def _grouped_target(grouping: Grouping, is_wide: bool, unit: str, rounding: Rounding) -> str | None:
    name = f"flexgen_jax_multiply_grouped_{grouping.name}{'_wide' * is_wide}_{unit}"
    name += f"_by_{rounding}" if rounding else ""
    return register(name, lambda: grouped_handler(name, grouping, is_wide, unit, rounding))


@lru_cache
def _int8_target(bits: int, unit: str) -> str | None:
    name = f"flexgen_jax_multiply_integers_{bits}_{unit}"
    return register(name, lambda: int8_handler(name, bits, unit))


@lru_cache
def _rounding_target() -> str | None:
    name = "flexgen_jax_round_rows"
    return register(name, lambda: rounding_handler(name))
