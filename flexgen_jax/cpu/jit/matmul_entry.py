"""The foreign functions for products that XLA's CPU backend calls, compiled by Numba.

`cpu/matmul.py` registers them; `attention_entry` explains how they are called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numba import njit

from flexgen_jax.cpu.grouped import Grouping, Rounding
from flexgen_jax.cpu.jit import (
    matmul_codes,
    matmul_grouped,
    matmul_grouped_int8,
    matmul_grouped_tiles,
    matmul_int8,
    matmul_packed,
    matmul_small_batch,
)
from flexgen_jax.cpu.jit.attention_entry import ALL, ARGUMENTS, CALLS, RESULTS, array_in, handler
from flexgen_jax.cpu.jit.code_cache import bound
from flexgen_jax.cpu.jit.grouped_factors import factors_of
from flexgen_jax.cpu.jit.levels_ir import (
    E4M3_UNIT,
    EIGHT_BIT_FLOATS,
    INTEGERS,
    LEVELS,
    SMALL_FLOATS,
    WHOLE_E2M1_UNIT,
    WHOLE_E2M1_ZERO,
)
from flexgen_jax.cpu.jit.matmul_blocked import columns_of
from flexgen_jax.cpu.jit.matmul_codes import codes_of
from flexgen_jax.cpu.jit.matmul_grouped import multiplier_of, padded_count, taker_of
from flexgen_jax.cpu.jit.matmul_int8 import multiply_rounded, round_panel
from flexgen_jax.cpu.jit.matmul_packed import most_folded, packed_of
from flexgen_jax.cpu.jit.matmul_small_batch import (
    MOST,
    MOST_OF_FLOATS,
    SIDE,
    SIDE_OF_FLOATS,
    few_of,
)
from flexgen_jax.cpu.jit.packing import PAIR, take_columns
from flexgen_jax.cpu.jit.xla_calls import words
from flexgen_jax.models.formats.format import WIDTHS, planes_of

MOST_GROUPED = 15
"""The most rows for which kernel weights that are grouped along their input stay packed: beyond,
unpacking them into tiles takes less time."""

FEW_OF_TILES = 32
"""Rows up to which laying the codes of many columns side by side is not worth it."""

FEWEST = 4 * PAIR
"""The least number of columns in a part of a product; with fewer, preparing the rows is not worth
it."""

LEAST = 1 << 19
"""The least number of multiplications in a part: they take about as long as to wake a thread."""


@njit(inline="always")
def packed_kernel(arguments, at):
    """Returns the three arrays of packed kernel weights, flat: codes, scale and minimum."""
    stored, grouped = words(words(arguments[at])[5]), words(words(arguments[at + 1])[5])
    codes = array_in(words(arguments[at]), (stored[0] * stored[1],), np.uint8)
    size = (grouped[0] * grouped[1],)
    scale = array_in(words(arguments[at + 1]), size, np.uint16)
    return codes, scale, array_in(words(arguments[at + 2]), size, np.uint16)


@njit(inline="always")
def operands(arguments):
    """Returns the rows and the bias of a product, flat, its rows, depth and columns, and the number
    of rows in which its kernel weights are stored."""
    rows, columns = words(words(arguments[0])[5]), words(words(arguments[1])[5])[0]
    left = array_in(words(arguments[0]), (rows[0] * rows[1],), np.uint16)
    bias = array_in(words(arguments[1]), (columns,), np.float32)
    return left, bias, (rows[0], rows[1], columns), words(words(arguments[2])[5])[0]


@njit(inline="always")
def limits(count, part, parts):
    """Returns where a part of `count` rows begins and ends, both multiples of `PAIR`."""
    pairs = count // PAIR
    return pairs * part // parts * PAIR, pairs * (part + 1) // parts * PAIR


@lru_cache
def product_handler(name: str, bits: int, is_wide: bool, unit: str) -> tuple[Any, ...]:
    """Returns the handler of products with kernel weights of `bits` bits, and the functions that
    its threads run.

    Its arguments: rows, bfloat16 [row, depth]; bias, fp32 [column]; kernel weights, [column,
    depth], or the three arrays of packed ones. Result: [row, column], fp32 if `is_wide`, else
    bfloat16.
    """
    part = bound(_product_part(bits, is_wide, unit), name, _product_helpers(bits, unit))
    return handler(name, part, axis=1, grain=FEWEST, least=LEAST)


@lru_cache
def rounding_handler(name: str) -> tuple[Any, ...]:
    """Returns the handler of `layers.matmul_int8.round_rows`, and the functions that its threads
    run.

    Its argument: bfloat16 [row, depth]. Results: flags of outliers, uint8 [panel, depth], where a
    panel is `PAIR` rows; codes, int8 [row, depth]; their scales, fp32 [row]; their sums, int32
    [row].
    """
    return handler(name, _rounding_part())


@lru_cache
def int8_handler(name: str, bits: int, by_amx: bool) -> tuple[Any, ...]:
    """Returns the handler of products of 8-bit integers, and the functions that its threads run.

    Its arguments: rows, int8 [row, depth], their scales, fp32 [row], and sums, int32 [row]; the
    kernel weights' scales, fp32 [column]; bias, fp32 [column]; the rows before rounding, bfloat16
    [row, depth], and flags of the elements with outliers, uint8 [depth]; the kernel weights.
    Result: bfloat16 [row, column].
    """
    return handler(name, _int8_part(bits, by_amx), axis=1, grain=FEWEST)


def stored_as(unit: str) -> Any:
    """Returns the type of the tiles that a unit multiplies."""
    return np.float32 if unit == "fma" else np.uint16


# What the functions below call: each variant has its own, see `bound`.
multiply_few: Any = None
multiply_packed: Any = None
multiply_codes: Any = None
multiply_tiles: Any = None
multiply_columns: Any = None
leaves_in: Any = None


def _product_helpers(bits: int, unit: str) -> dict[str, Any]:
    """Returns the functions that `_product_part` calls, by their names there."""
    if unit == "avx2":
        return {"multiply_codes": codes_of(bits)}
    kind, side = stored_as(unit), SIDE_OF_FLOATS if unit == "fma" else SIDE
    return {
        "multiply_few": few_of(kind, side) if bits == 16 else None,
        "multiply_packed": packed_of(bits, kind) if bits < 16 else None,
        "multiply_columns": columns_of(take_columns, bits, unit == "amx", kind),
    }


def _product_part(bits: int, is_wide: bool, unit: str) -> Callable[..., int]:
    """Returns the function that computes a part of a product's columns."""
    if unit == "avx2":
        return _codes_part(bits)
    source = matmul_small_batch.SOURCE + matmul_packed.SOURCE + CALLS
    stored = np.float32 if is_wide else np.uint16
    by_amx, most = unit == "amx", MOST_OF_FLOATS if unit == "fma" else MOST
    folded = most_folded(unit)

    def compute(shared, part):
        assert source
        arguments, results, parts = words(shared[ARGUMENTS]), words(shared[RESULTS]), shared[ALL]
        left, bias, shape, length = operands(arguments)
        count, depth, columns = shape
        if bits == 16:  # Numba compiles only one branch
            kernel: Any = (array_in(words(arguments[2]), (columns * depth,), np.uint16),)
        else:
            kernel = packed_kernel(arguments, 2)
        out = array_in(words(results[0]), (count * columns,), stored)
        is_folded = bits < 16 and count <= folded
        start, end = limits(length if is_folded else columns, part, parts)
        if bits == 16:
            if not by_amx and count <= most:
                multiply_few(left, kernel[0], length, bias, out, shape, start, end)
                return 1
        elif is_folded:
            multiply_packed(left, kernel, length, bias, out, shape, start, end)
            return 1
        multiply_columns(left, kernel, length, bias, out, shape, start, end)
        return 1

    return compute


@lru_cache
def grouped_handler(
    name: str, of: Grouping, is_wide: bool, unit: str, rounding: Rounding
) -> tuple[Any, ...]:
    """Returns the handler of products with kernel weights that are grouped along their input, and
    the functions that its threads run.

    Its arguments: rows, bfloat16 [row, depth]; bias, fp32 [column]; the leaves of the kernel.
    Result: [row, column], fp32 if `is_wide`, else bfloat16. rounding: how rows are rounded to 8-bit
    integers.
    """
    helpers = _grouped_helpers(of, unit, rounding)
    part = bound(_grouped_part(of, is_wide, unit, rounding), name, helpers)
    return handler(name, part, axis=1, grain=FEWEST, least=LEAST)


def _grouped_helpers(of: Grouping, unit: str, rounding: Rounding) -> dict[str, Any]:
    """Returns the functions that `_grouped_part` calls, by their names there."""
    bits, levels, kind = of.bits, LEVELS[of.levels], stored_as(unit)
    code = np.float32(1 << (bits - 1)) if levels == INTEGERS else np.float32(0)
    middle: Any = np.float32(code - of.center)
    take = _taker_of(of, E4M3_UNIT if levels == EIGHT_BIT_FLOATS else 1.0)
    if rounding:
        by_fours, center = rounding == "fours", of.center
        rounded = take
        if levels == SMALL_FLOATS:
            rounded, center = _taker_of(of, WHOLE_E2M1_UNIT), WHOLE_E2M1_ZERO
        own: Any = np.float32(matmul_grouped_int8.middle_code(bits, by_fours) - center)
        few = matmul_grouped_int8.multiplier_of(rounded, own, bits, levels, of.unit, by_fours)
        tiles = matmul_grouped_tiles.multiplier_of(take, own)
    else:
        few = tiles = multiplier_of(take, middle, bits, levels, of.unit, kind)
    return {
        "multiply_few": few,
        "multiply_tiles": tiles,
        "multiply_columns": columns_of(
            taker_of(take, middle, bits, levels, of.unit), bits, unit == "amx", kind
        ),
        "leaves_in": _leaves_in(of.kinds, 2 + len(WIDTHS[bits])),
    }


def _taker_of(of: Grouping, unit: float) -> Any:
    """Returns the function that writes a row's scales and offsets; see `factors_of`."""
    return factors_of(
        kind=of.factors,
        bits=of.bits,
        dtype=of.dtype,
        repeats=of.repeats,
        rows=of.rows,
        has_minimum=of.has_minimum,
        unit=unit,
    )


def _grouped_part(of: Grouping, is_wide: bool, unit: str, rounding: Rounding) -> Callable[..., int]:
    """Returns the function that computes a part of a product's columns."""
    source = matmul_grouped.SOURCE + matmul_grouped_int8.SOURCE + CALLS
    source += matmul_grouped_tiles.SOURCE
    stored = np.float32 if is_wide else np.uint16
    bits = of.bits
    has_tiles, folded = rounding == "tiles", min(most_folded(unit), MOST_GROUPED)
    if rounding:
        folded = FEW_OF_TILES if has_tiles else MOST
    planes, low_planes, own, repeats = planes_of(bits), 8 // WIDTHS[bits][0], of.unit, of.repeats
    last = 1 + len(WIDTHS[bits])

    def compute(shared, part):
        assert source
        arguments, results, parts = words(shared[ARGUMENTS]), words(shared[RESULTS]), shared[ALL]
        rows, columns = words(words(arguments[0])[5]), words(words(arguments[1])[5])[0]
        count, depth = rows[0], rows[1]
        shape, plane = (count, depth, columns), depth // planes
        left = array_in(words(arguments[0]), (count * depth,), np.uint16)
        bias = array_in(words(arguments[1]), (columns,), np.float32)
        low = array_in(words(arguments[2]), (columns * depth // low_planes,), np.uint8)
        codes = (low, array_in(words(arguments[last]), (columns * plane,), np.uint8))
        out = array_in(words(results[0]), (count * columns,), stored)
        groups = depth // own // repeats
        leaves = (leaves_in(arguments), groups)
        start, end = limits(columns, part, parts)
        if count <= folded:
            multiply_few(left, (codes, leaves), plane, bias, out, shape, start, end)
            return 1
        if has_tiles:
            multiply_tiles(left, (codes, leaves), plane, bias, out, shape, start, end)
            return 1
        size = PAIR * padded_count(depth, own)
        kernel = (codes, leaves, np.zeros(size, np.float32), np.zeros(size, np.float32))
        multiply_columns(left, kernel, plane, bias, out, shape, start, end)
        return 1

    return compute


def _leaves_in(kinds: Sequence[str], at: int) -> Any:
    """Returns the function that views a kernel's leaves beside the codes, flat, as a tuple: the
    arguments of a call from number `at` on, whose dtypes are `kinds`."""
    if not kinds:

        @njit(inline="always")
        def nothing(_arguments):
            return ()

        return nothing
    own = {1: np.uint8, 2: np.uint16, 4: np.uint32}[np.dtype(kinds[0]).itemsize]
    others, view = _leaves_in(kinds[1:], at + 1), _viewed

    @njit(inline="always")
    def leaves(arguments):
        return (view(arguments, at, own), *others(arguments))

    return leaves


@njit(inline="always")
def _viewed(arguments, at, kind):
    shape = words(words(arguments[at])[5])
    return array_in(words(arguments[at]), (shape[0] * shape[1],), kind)


def _codes_part(bits: int) -> Callable[..., int]:
    """Returns the function that multiplies integers by a part of packed kernel weights' codes."""
    source = matmul_codes.SOURCE + CALLS

    def compute(shared, part):
        assert source
        arguments, results, parts = words(shared[ARGUMENTS]), words(shared[RESULTS]), shared[ALL]
        left, bias, shape, length = operands(arguments)
        kernel, (start, end) = packed_kernel(arguments, 2), limits(length, part, parts)
        out = array_in(words(results[0]), (shape[0] * shape[2],), np.uint16)
        multiply_codes(left, kernel, length, bias, out, shape, start, end)
        return 1

    return compute


def _rounding_part() -> Callable[..., int]:
    """Returns the function that rounds a part of the panels of rows to integers."""
    source = matmul_int8.SOURCE + CALLS

    def compute(shared, part):
        assert source
        arguments, results, parts = words(shared[ARGUMENTS]), words(shared[RESULTS]), shared[ALL]
        rows, panels = words(words(arguments[0])[5]), words(words(results[0])[5])[0]
        count, depth = rows[0], rows[1]
        x = array_in(words(arguments[0]), (count * depth,), np.uint16)
        flags = array_in(words(results[0]), (panels * depth,), np.uint8)
        codes = array_in(words(results[1]), (count * depth,), np.int8)
        scale = array_in(words(results[2]), (count,), np.float32)
        totals = array_in(words(results[3]), (count,), np.int32)
        for panel in range(panels * part // parts, panels * (part + 1) // parts):
            round_panel(x, (count, depth), panel, codes, scale, totals, flags)
        return 1

    return compute


def _int8_part(bits: int, by_amx: bool) -> Callable[..., int]:
    """Returns the function that computes a part of the columns of a product of 8-bit integers."""
    source = matmul_int8.SOURCE + CALLS

    def compute(shared, part):
        assert source
        arguments, results, parts = words(shared[ARGUMENTS]), words(shared[RESULTS]), shared[ALL]
        rows, columns = words(words(arguments[0])[5]), words(words(arguments[3])[5])[0]
        count, depth, length = rows[0], rows[1], words(words(arguments[7])[5])[0]
        codes = array_in(words(arguments[0]), (count * depth // 2,), np.uint16)
        row_scale = array_in(words(arguments[1]), (count,), np.float32)
        totals = array_in(words(arguments[2]), (count,), np.int32)
        scale = array_in(words(arguments[3]), (columns,), np.float32)
        bias = array_in(words(arguments[4]), (columns,), np.float32)
        x = array_in(words(arguments[5]), (count * depth,), np.uint16)
        flags = array_in(words(arguments[6]), (depth,), np.uint8)
        if bits == 16:  # Numba compiles only one branch
            kernel: Any = (array_in(words(arguments[7]), (columns * depth,), np.uint16),)
        else:
            kernel = packed_kernel(arguments, 7)
        out = array_in(words(results[0]), (count * columns,), np.uint16)
        shape, (start, end) = (count, depth, columns), limits(columns, part, parts)
        left, outliers = (codes, row_scale, totals, scale), (x, flags)
        multiply_rounded(left, kernel, length, bias, outliers, out, shape, start, end, bits, by_amx)
        return 1

    return compute
