"""The handlers of products. `cpu/matmul.py` registers them with XLA."""

from __future__ import annotations

from functools import lru_cache, partial

from flexgen_jax.cpu.grouped import Grouping, Rounding
from flexgen_jax.cpu.jit.emit import F32, I8, I16, I32, Function, Scalar, Value
from flexgen_jax.cpu.jit.factors import Factors
from flexgen_jax.cpu.jit.few_rows import MOST, MOST_OF_FLOATS, emit_few_rows
from flexgen_jax.cpu.jit.grouped_integer_tiles import emit_grouped_integer_tiles
from flexgen_jax.cpu.jit.grouped_integers import emit_grouped_integers, middle_code
from flexgen_jax.cpu.jit.grouped_rows import GroupedColumns, GroupedWeights, emit_grouped_rows
from flexgen_jax.cpu.jit.handler import Call, Division, compiled_handler
from flexgen_jax.cpu.jit.integer_rows import (
    IntegerColumns,
    IntegerProduct,
    PaperIntegers,
    PlainIntegers,
    RoundedRows,
    emit_rounding,
)
from flexgen_jax.cpu.jit.lane_rows import LaneColumns, emit_lane_rows, max_lane_rows
from flexgen_jax.cpu.jit.levels import (
    E4M3_UNIT,
    WHOLE_E2M1_UNIT,
    WHOLE_E2M1_ZERO,
    Codes,
    middle_of,
)
from flexgen_jax.cpu.jit.many_rows import emit_many_rows
from flexgen_jax.cpu.jit.operands import PAIR, Operands
from flexgen_jax.cpu.jit.paper_integers import emit_paper_integers
from flexgen_jax.cpu.jit.paper_rows import emit_paper_rows, max_folded_rows
from flexgen_jax.cpu.jit.tiles import (
    UNITS,
    UNSIGNED,
    ColumnSource,
    PaperColumns,
    PaperWeights,
    PlainColumns,
)
from flexgen_jax.models.formats.format import WIDTHS, planes_of

MOST_GROUPED = 15
"""The most rows for which kernel weights that are grouped along their input stay packed: beyond,
unpacking them into tiles takes less time."""

FEW_OF_TILES = 32
"""Rows up to which laying the codes of many columns side by side is not worth it."""

BY_COLUMNS = Division(axis=1, grain=4 * PAIR, min_products=1 << 19)
"""With fewer columns, preparing the rows is not worth it; fewer multiplications take less time than
waking a thread."""

BY_COLUMNS_OF_INTEGERS = Division(axis=1, grain=4 * PAIR)


def _scalar_of(unit: str) -> Scalar:
    """Returns the type in which a unit multiplies."""
    return F32 if unit == "fma" else I16


@lru_cache
def product_handler(name: str, bits: int, is_wide: bool, unit: str) -> int:
    """Returns the handler of products with kernel weights of `bits` bits.

    Its arguments: rows, bfloat16 [row, depth]; bias, fp32 [column]; kernel weights, [column,
    depth], or the three arrays of packed ones. Result: [row, column], fp32 if `is_wide`, else
    bfloat16.
    """
    emit = _emit_plain if bits == 16 else partial(_emit_paper, bits)
    return compiled_handler(name, partial(emit, is_wide, unit), BY_COLUMNS)


def _emit_plain(is_wide: bool, unit: str, k: Function, call: Call) -> None:
    operands, kernel = Operands.of(call, is_wide), call.argument(2).array(I16)
    limits = call.limits(operands.columns, PAIR)
    most = 0 if unit == "amx" else MOST_OF_FLOATS if unit == "fma" else MOST
    if most:
        with k.when(operands.count <= most):
            emit_few_rows(operands, kernel, _scalar_of(unit), limits)
            k.give(k.index(1))
    emit_many_rows(operands, PlainColumns(kernel, operands.depth), UNITS[unit], limits)


def _paper_weights(call: Call, first: int, bits: int) -> PaperWeights:
    codes, scale, minimum = (call.argument(first + n) for n in range(3))
    sides = (scale.array(I16), minimum.array(I16))
    return PaperWeights(codes.array(I8), *sides, codes.size(0), codes.size(1), bits)


def _emit_paper(bits: int, is_wide: bool, unit: str, k: Function, call: Call) -> None:
    operands, weights = Operands.of(call, is_wide), _paper_weights(call, 2, bits)
    byte_limits = call.limits(weights.length, PAIR)
    if unit == "avx2":
        emit_paper_integers(operands, weights, byte_limits)
        return
    folded = max_folded_rows(unit, k.processor)
    if folded:
        with k.when(operands.count <= folded):
            emit_paper_rows(operands, weights, _scalar_of(unit), byte_limits)
            k.give(k.index(1))
    limits = call.limits(operands.columns, PAIR)
    emit_many_rows(operands, PaperColumns(weights), UNITS[unit], limits)


@lru_cache
def grouped_handler(name: str, of: Grouping, is_wide: bool, unit: str, rounding: Rounding) -> int:
    """Returns the handler of products with kernel weights that are grouped along their input.

    Its arguments: rows, bfloat16 [row, depth]; bias, fp32 [column]; the leaves of the kernel.
    Result: [row, column], fp32 if `is_wide`, else bfloat16. rounding: how rows are rounded to 8-bit
    integers.
    """
    emit = partial(_emit_grouped, of, is_wide, unit, rounding)
    return compiled_handler(name, emit, BY_COLUMNS)


def _emit_grouped(
    of: Grouping, is_wide: bool, unit: str, rounding: Rounding, k: Function, call: Call
) -> None:
    operands = Operands.of(call, is_wide)
    limits, count = call.limits(operands.columns, PAIR), operands.count
    plain = _grouped_weights(of, call, operands.depth)
    if of.in_lanes:
        _emit_lanes(operands, plain, unit, rounding, limits)
        return
    if rounding:
        by_fours, has_tiles = rounding == "fours", of.has_integer_tiles(rounding)
        rounded = _weights_for_integers(of, call, operands.depth, by_fours)
        with k.when(count <= (FEW_OF_TILES if has_tiles else MOST)):
            emit_grouped_integers(operands, rounded, by_fours, limits)
            k.give(k.index(1))
        if has_tiles:
            emit_grouped_integer_tiles(operands, rounded, by_fours, limits)
            return
    else:
        folded = min(max_folded_rows(unit, k.processor), MOST_GROUPED)
        if folded:
            with k.when(count <= folded):
                emit_grouped_rows(operands, plain, _scalar_of(unit), limits)
                k.give(k.index(1))
    _emit_unpacked(operands, plain, GroupedColumns, unit, limits)


def _emit_lanes(
    operands: Operands,
    weights: GroupedWeights,
    unit: str,
    rounding: Rounding,
    limits: tuple[Value, Value],
) -> None:
    k, has_tiles = operands.k, weights.factors.of.has_integer_tiles(rounding)
    few = max_lane_rows(weights.codes.bits, k.processor)
    few = FEW_OF_TILES if has_tiles else MOST if rounding else few
    with k.when(operands.count <= few):
        emit_lane_rows(operands, weights, 1 if rounding else 2, limits)
        k.give(k.index(1))
    if has_tiles:
        emit_grouped_integer_tiles(operands, weights, rounding == "fours", limits)
        return
    _emit_unpacked(operands, weights, LaneColumns, unit, limits)


def _emit_unpacked(
    operands: Operands,
    weights: GroupedWeights,
    columns: type[GroupedColumns],
    unit: str,
    limits: tuple[Value, Value],
) -> None:
    """Computes many rows, with room for the factors of `PAIR` columns."""
    size = weights.pitch * PAIR
    with operands.k.workspace((F32, size), (F32, size)) as (scales, offsets):
        scales.fill(size)
        offsets.fill(size)
        emit_many_rows(operands, columns(weights, scales, offsets), UNITS[unit], limits)


def _codes_of(of: Grouping, call: Call, depth: Value) -> Codes:
    """Returns the codes of kernel weights, which are a call's arguments from number 2 on."""
    arrays = [call.argument(2 + part).array(I8) for part in range(len(WIDTHS[of.bits]))]
    plane = depth if of.in_lanes else depth // planes_of(of.bits)
    return Codes(arrays, plane, of.bits, of.levels, of.in_lanes)


def _grouped_weights(of: Grouping, call: Call, depth: Value) -> GroupedWeights:
    """Returns kernel weights whose levels are floats."""
    is_counted = of.levels == "integers" and not of.in_lanes  # from the middle code
    middle = float(middle_of(of.bits) if is_counted else 0) - of.center
    unit = E4M3_UNIT if of.levels == "e4m3" else 1.0
    factors = Factors.of_call(of, call, 2 + len(WIDTHS[of.bits]), middle, unit)
    return GroupedWeights(_codes_of(of, call, depth), factors)


def _weights_for_integers(of: Grouping, call: Call, depth: Value, by_fours: bool) -> GroupedWeights:
    """Returns kernel weights whose levels are integers."""
    is_float = of.levels == "e2m1"
    center, unit = (WHOLE_E2M1_ZERO, WHOLE_E2M1_UNIT) if is_float else (of.center, 1.0)
    middle = float(middle_code(of.bits, by_fours) - center)
    factors = Factors.of_call(of, call, 2 + len(WIDTHS[of.bits]), middle, unit)
    return GroupedWeights(_codes_of(of, call, depth), factors)


@lru_cache
def rounding_handler(name: str) -> int:
    """Returns the handler of `layers.matmul_int8.round_rows`.

    Its argument: bfloat16 [row, depth]. Results: flags of outliers, uint8 [panel, depth], where a
    panel is `PAIR` rows; codes, int8 [row, depth]; their scales, fp32 [row]; their sums, int32
    [row].
    """
    return compiled_handler(name, emit_rounding)


@lru_cache
def int8_handler(name: str, bits: int, unit: str) -> int:
    """Returns the handler of products of 8-bit integers.

    Its arguments: rows, int8 [row, depth], their scales, fp32 [row], and sums, int32 [row]; the
    kernel weights' scales, fp32 [column]; bias, fp32 [column]; the rows before rounding, bfloat16
    [row, depth], and flags of the elements with outliers, uint8 [depth]; the kernel weights.
    Result: bfloat16 [row, column].
    """
    return compiled_handler(name, partial(_emit_integers, bits, unit), BY_COLUMNS_OF_INTEGERS)


FIRST_WEIGHT = 7
"""Number of the argument with which the kernel weights of `int8_handler` begin."""


def _emit_integers(bits: int, unit: str, k: Function, call: Call) -> None:
    codes, scale, total, scales, bias, outliers, flags = (
        call.argument(n) for n in range(FIRST_WEIGHT)
    )
    count, depth, columns = codes.size(0), codes.size(1), scales.size(0)
    out = call.result(0).array(I16)
    operands = Operands(outliers.array(I16), bias.array(F32), out, count, depth, columns)
    rows = RoundedRows(
        codes.array(I16),
        scale.array(F32),
        total.array(I32),
        outliers.array(I16),
        flags.array(I8),
    )
    own, addend = scales.array(F32), 0 if unit == "amx" else UNSIGNED
    plain: ColumnSource
    integers: IntegerColumns
    if bits == 16:
        plain = PlainColumns(call.argument(FIRST_WEIGHT).array(I16), depth)
        integers = PlainIntegers(own, addend, plain)
    else:
        weights = _paper_weights(call, FIRST_WEIGHT, bits)
        plain, integers = PaperColumns(weights), PaperIntegers(own, addend, weights)
    product = IntegerProduct(operands, rows, integers, plain, UNITS[unit])
    product.emit(call.limits(columns, PAIR))
