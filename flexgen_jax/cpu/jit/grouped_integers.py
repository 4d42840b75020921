"""Products of rows, rounded to 8-bit integers, with kernel weights that are integers and grouped
along their input, or 4-bit floats.

A weight is `scale * code + offset`, with one of both for a step of 32 elements, or for half of it.
Each step of a row is rounded to x = unit * q with integers q of at most 127, so that

    sum over k of x[k] weight[k]  =  sum over steps of  scale * unit * (sum of q[k] code[k])
                                                        + offset * unit * (sum of q[k]).

The sums of products of integers are exact. A row's result depends on no other row.
"""

from __future__ import annotations

from functools import partial

from flexgen_jax.cpu.jit.emit import F32, I8, I32, Array, Function, Value
from flexgen_jax.cpu.jit.grouped_rows import (
    SHORT_SIDES,
    WIDE_SIDES,
    GroupedWeights,
    factor_of_step,
)
from flexgen_jax.cpu.jit.instructions import (
    LANES,
    add_pairs,
    add_products_of_bytes,
    dot_bytes,
    with_sign_of,
)
from flexgen_jax.cpu.jit.levels import whole_levels_of
from flexgen_jax.cpu.jit.operands import STEP, Operands, Sides, for_each_number_of_rows
from flexgen_jax.cpu.jit.vectors import from_bfloat16, padded, rounded_in_units
from flexgen_jax.layers.matmul_int8 import LEVELS

DOT_LANES = STEP // 4
"""Lanes of a step's products, four of them added up."""

SIGN = 0x80
"""The bit by which a byte around 128 differs from a signed one around 0."""


def middle_code(bits: int, by_fours: bool) -> int:
    """Returns what is subtracted from codes before they are multiplied: without products of four
    bytes, the sums of two have to fit into 16 bits."""
    return SIGN if bits == 8 and not by_fours else 0


def round_steps(
    rows: Array, integers: tuple[Array, int], units: Array, sums: Array, shape: tuple[Value, int]
) -> None:
    """Rounds neighbouring steps of a row. integers: where they go, and elements from one step to
    the next; units, sums: fp32, what an integer stands for, and the sums of the rounded elements;
    shape: the number of steps, and the elements that share one of both."""
    (target, apart), (steps, share) = integers, shape
    with steps.k.loop(steps) as step:
        unit, rounded = rounded_in_units(from_bfloat16(rows.load(step * STEP, STEP)), LEVELS)
        target.store(step * apart, rounded.to(I8))
        for number, first in enumerate(range(0, STEP, share)):
            total = rounded.shuffle(range(first, first + share)).reduce("add")
            units.store(step * (STEP // share) + number, unit)
            sums.store(step * (STEP // share) + number, total.to(F32) * unit)


def emit_grouped_integers(
    operands: Operands, weights: GroupedWeights, by_fours: bool, limits: tuple[Value, Value]
) -> None:
    """Computes few rows for a range of columns. by_fours: the processor adds up products of four
    bytes."""
    emit = partial(_emit_streams, operands, weights, by_fours, limits)
    for_each_number_of_rows(operands, WIDE_SIDES, SHORT_SIDES, emit)


def _emit_streams(
    of: Operands, weights: GroupedWeights, by_fours: bool, limits: tuple[Value, Value], sides: Sides
) -> None:
    k, (wide, many), pitch = of.k, sides, weights.pitch
    rows = of.turns(many) * many
    with k.workspace(
        *((I8, rows * of.depth), (F32, rows * pitch), (F32, rows * pitch)),
        *((F32, pitch * wide), (F32, pitch * wide), (F32, pitch * (wide * many))),
    ) as (left, units, sums, scales, offsets, scaled):
        left.fill(rows * of.depth)
        for array, count in ((units, rows), (sums, rows), (scales, wide), (offsets, wide)):
            array.fill(pitch * count)
        _round_rows(of, weights, (left, units, sums), many)
        with k.loop(limits[1], limits[0], step=wide) as column:
            for n in range(wide):
                weights.factors.take(column + n, scales.at(pitch * n), offsets.at(pitch * n))
            with k.loop(rows, step=many) as row:
                mine = left.at(row * of.depth), units.at(row * pitch), sums.at(row * pitch)
                factors = scales, offsets, scaled
                totals = _dots(k, weights, mine, factors, (column, sides, by_fours))
                of.give(totals, row, column, sides)


def _round_rows(
    of: Operands, weights: GroupedWeights, arrays: tuple[Array, Array, Array], many: int
) -> None:
    """Rounds all rows to [turn][step][plane][row][element of a step], since rows that lie a power
    of two apart share a bank of the first cache, from which processors load one number at a
    time."""
    (left, units, sums), codes, pitch = arrays, weights.codes, weights.pitch
    k, steps, planes, each = of.k, codes.plane // STEP, len(codes.planes), STEP // weights.unit
    with k.loop(of.count) as row:
        begin = row // many * many * of.depth + row % many * STEP
        for plane in range(planes):
            at = row * pitch + steps * (plane * each)
            round_steps(
                of.rows.at(row * of.depth + codes.plane * plane),
                (left.at(begin + plane * many * STEP), planes * many * STEP),
                units.at(at),
                sums.at(at),
                (steps, weights.unit),
            )


def _dots(
    k: Function,
    weights: GroupedWeights,
    rows: tuple[Array, Array, Array],
    factors: tuple[Array, Array, Array],
    how: tuple[Value, Sides, bool],
) -> list[Value]:
    """Returns the products of `many` rows with `wide` columns, lane by lane.

    rows: integers, units and sums; factors: scales and offsets of the columns, and room for
    [row][column][pitch]; how: the first column, columns and rows, and `by_fours`.
    """
    (left, units, sums), (scales, offsets, scaled), (column, (wide, many), by_fours) = (
        rows,
        factors,
        how,
    )
    codes, pitch, planes = weights.codes, weights.pitch, len(weights.codes.planes)
    pairs = [(line, n) for line in range(many) for n in range(wide)]
    totals = [k.variable(k.filled(F32, DOT_LANES)) for _ in pairs]
    rests = [k.variable(k.filled(F32, LANES)) for _ in pairs]
    with k.loop(pitch, step=LANES) as at:
        for own, (line, n) in enumerate(pairs):
            unit, x = (side.load(pitch * line + at, LANES) for side in (units, sums))
            scale, offset = (side.load(pitch * n + at, LANES) for side in (scales, offsets))
            scaled.store(pitch * own + at, scale * unit)
            rests[own].set(k.fma(x, offset, rests[own].get()))
    steps = codes.plane // STEP
    with k.loop(steps) as step:
        stored = codes.step([column + n for n in range(wide)], step)
        for plane in codes.planes:
            shifts, number = stored.shifts_of(plane), steps * plane + step
            whole = [whole_levels_of(stored.bytes_of(n, plane), shifts, codes) for n in range(wide)]
            for own, (line, n) in enumerate(pairs):
                at = step * (planes * many * STEP) + (plane * many + line) * STEP
                x = left.load(at, STEP)
                factor = factor_of_step(scaled.at(pitch * own), number, weights.unit, DOT_LANES)
                dot = _dot(whole[n], x, codes.bits, by_fours).to(F32)
                totals[own].set(k.fma(dot, factor, totals[own].get()))
    return [padded(total.get()) + rest.get() for total, rest in zip(totals, rests, strict=True)]


def _dot(codes: Value, x: Value, bits: int, by_fours: bool) -> Value:
    """Returns the products of 32 codes less `middle_code`, unsigned bytes, and 32 signed bytes,
    each four of them added up."""
    if by_fours:
        return dot_bytes(codes.k.filled(I32, DOT_LANES), codes, x)
    if bits == 8:
        signed = codes ^ -SIGN
        codes, x = (with_sign_of(side, signed) for side in (signed, x))
    return add_pairs(add_products_of_bytes(codes, x))
