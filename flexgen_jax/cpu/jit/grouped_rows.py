"""Products with kernel weights that are grouped along their input.

A weight is `scale * level + offset`, with one scale and one offset for each step of 32 elements, or
for half of it. So

    sum over k of x[k] weight[k]  =  sum over steps of  scale * (sum of x[k] level[k])
                                                        + offset * (sum of x[k])

Few rows multiply levels as they come out of a table, one step after the other, and nothing is
unpacked in memory; the sums of x in a step are made once for all columns. For many rows the weights
are unpacked into the tiles of `many_rows`.

A byte has the codes of elements that are far apart (see `models/formats/format.py`), such as half a
row, so one load serves several steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from flexgen_jax.cpu.jit.emit import F32, I16, I32, Array, Function, Scalar, Value
from flexgen_jax.cpu.jit.factors import Factors
from flexgen_jax.cpu.jit.instructions import LANES
from flexgen_jax.cpu.jit.levels import Codes, levels_of, loads_of, pairs_of_levels
from flexgen_jax.cpu.jit.operands import (
    PAIR,
    STEP,
    Operands,
    Sides,
    SidesByRows,
    add_products,
    for_each_number_of_rows,
    step_of_rows,
    store_step,
)
from flexgen_jax.cpu.jit.tiles import ColumnSource, load_lines
from flexgen_jax.cpu.jit.vectors import bfloat16_words, from_bfloat16
from flexgen_jax.models.formats.format import WIDTHS

WIDE_SIDES: SidesByRows = ((4, 1), (4, 2), (2, 4))
SHORT_SIDES: SidesByRows = ((1, 1), (1, 2), (1, 4))
"""Columns, and rows, that are multiplied at a time, where there is one row, two, and more: with
vectors of 512 bits, and of 256."""


@dataclass(frozen=True)
class GroupedWeights:
    """Kernel weights that are grouped along their input."""

    codes: Codes
    factors: Factors

    @property
    def unit(self) -> int:
        """Elements that share a scale."""
        return self.factors.of.unit

    @property
    def has_half_block(self) -> bool:
        """Whether a row of codes in lanes ends with a block of half of the lanes."""
        return self.factors.of.has_half_block

    @property
    def pitch(self) -> Value:
        """Factors of a row, rounded up to whole vectors."""
        return (self.factors.depth // self.unit).round_up(LANES)


def factor_of_step(factors: Array, step: Value, unit: int, lanes: int = LANES) -> Value:
    """Loads the factor of a step for all lanes, or its two factors for half of the lanes each:
    lanes are of neighbouring elements, in their order."""
    each = STEP // unit
    some = factors.load(step * each, each)
    return (
        some.spread(lanes) if each == 1 else some.shuffle([n * each // lanes for n in range(lanes)])
    )


def emit_grouped_rows(
    operands: Operands, weights: GroupedWeights, scalar: Scalar, limits: tuple[Value, Value]
) -> None:
    """Computes few rows for a range of columns. scalar: the type in which rows are multiplied."""
    emit = partial(_emit_streams, operands, weights, scalar, limits)
    for_each_number_of_rows(operands, WIDE_SIDES, SHORT_SIDES, emit)


def _emit_streams(
    of: Operands, weights: GroupedWeights, scalar: Scalar, limits: tuple[Value, Value], sides: Sides
) -> None:
    k, (wide, many), pitch = of.k, sides, weights.pitch
    rows = of.turns(many) * many
    with k.workspace(
        *((scalar, rows * of.depth), (F32, rows * pitch)), *((F32, pitch * wide),) * 2
    ) as (left, sums, scales, offsets):
        left.fill(rows * of.depth)
        sums.fill(rows * pitch)
        for array in (scales, offsets):
            array.fill(pitch * wide)
        with k.loop(of.count) as row, k.loop(of.depth // STEP) as step:
            at = row * of.depth + step * STEP
            store_step(left, at, of.rows.at(at).of(I32).load(0, LANES))
            _store_sums(of.rows.load(at, STEP), sums, row * pitch, step, weights.unit)
        with k.loop(limits[1], limits[0], step=wide) as column:
            for n in range(wide):
                weights.factors.take(column + n, scales.at(pitch * n), offsets.at(pitch * n))
            with k.loop(rows, step=many) as row:
                place = (left.at(row * of.depth), sums.at(row * pitch))
                totals = _dots(k, weights, place, (scales, offsets), column, sides)
                of.give(totals, row, column, sides)


def _store_sums(bits: Value, sums: Array, begin: Value, step: Value, unit: int) -> None:
    """Writes the sums of each `unit` elements of a step, one element after the other."""
    elements = from_bfloat16(bits)
    for number in range(STEP // unit):
        total = elements.lane(number * unit)
        for n in range(1, unit):
            total = total + elements.lane(number * unit + n)
        sums.store(begin + step * (STEP // unit) + number, total)


def _dots(
    k: Function,
    weights: GroupedWeights,
    rows: tuple[Array, Array],
    factors: tuple[Array, Array],
    column: Value,
    sides: Sides,
) -> list[Value]:
    """Returns the products of `many` rows with `wide` columns, lane by lane. rows: as they are
    multiplied, and the sums of their steps; factors: scales and offsets of the columns."""
    (wide, many), codes, pitch = sides, weights.codes, weights.pitch
    (left, sums), (scales, offsets), depth = rows, factors, weights.factors.depth
    totals = [k.variable(k.filled(F32, LANES)) for _ in range(wide * many)]
    steps = codes.plane // STEP
    with k.loop(steps) as step:
        stored = codes.step([column + n for n in range(wide)], step)
        for plane in codes.planes:
            number, shifts = steps * plane + step, stored.shifts_of(plane)
            levels, own = [], []
            for n in range(wide):
                some = stored.bytes_of(n, plane)
                take = levels_of if left.scalar == F32 else pairs_of_levels
                levels.append(take(some, shifts, codes))
                own.append(factor_of_step(scales.at(pitch * n), number, weights.unit))
            for line in range(many):
                x = step_of_rows(left, depth * line + codes.plane * plane + step * STEP)
                for n in range(wide):
                    product = k.filled(F32, LANES)
                    for part, vector in enumerate(levels[n]):
                        product = add_products(product, vector, x[part if len(x) > 1 else 0])
                    total = totals[line * wide + n]
                    total.set(k.fma(product, own[n], total.get()))
    with k.loop(pitch, step=LANES) as at:
        for line in range(many):
            summed = sums.load(pitch * line + at, LANES)
            for n in range(wide):
                total = totals[line * wide + n]
                total.set(k.fma(summed, offsets.load(pitch * n + at, LANES), total.get()))
    return [total.get() for total in totals]


@dataclass(frozen=True)
class GroupedColumns(ColumnSource):
    """Kernel weights that are grouped along their input, unpacked in registers."""

    weights: GroupedWeights
    scales: Array
    """fp32 [PAIR][pitch], of the columns that were prepared."""
    offsets: Array

    def prepare(self, column: Value) -> None:
        pitch = self.weights.pitch
        with column.k.loop(PAIR) as n:
            at = n * pitch
            self.weights.factors.take(column + n, self.scales.at(at), self.offsets.at(at))

    def load(self, column: Value, element: Value) -> list[Value]:
        codes, pitch, unit = self.weights.codes, self.weights.pitch, self.weights.unit
        plane, inside = element // codes.plane, element % codes.plane
        parts, shifts = [], []
        widths, loads = WIDTHS[codes.bits], loads_of(codes.bits)
        for array, width, count in zip(codes.arrays, widths, loads, strict=True):
            begin = column * (codes.plane * count) + codes.plane * (plane % count) + inside
            parts.append(load_lines(array, begin, codes.plane * count, STEP))
            shifts.append((plane // count * width).to(I32))
        lines, step = [], element // STEP
        for n in range(LANES):
            stored = [part[n].bits(I16) for part in parts]
            at = (column % PAIR + n) * pitch
            scale, offset = (
                factor_of_step(side.at(at), step, unit) for side in (self.scales, self.offsets)
            )
            levels = levels_of(stored, shifts, codes)
            lines.append(bfloat16_words(*(column.k.fma(x, scale, offset) for x in levels)))
        return lines
