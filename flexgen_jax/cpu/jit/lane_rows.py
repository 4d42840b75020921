"""Products with kernel weights whose codes lie in lanes, see `models/formats/lanes.py`.

A weight is `scale * code + offset`, with one of both for each lane. So products of a lane add up in
registers, and a block of lanes takes one multiply-add by a vector of scales and one by a vector of
offsets. Few rows multiply codes as they are stored, see `lane_multipliers`. For many rows the
weights are unpacked into the tiles of `many_rows`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from flexgen_jax.cpu.jit.emit import F32, I32, ITEM_BYTES, SECOND_CACHE, Array, Value
from flexgen_jax.cpu.jit.grouped_rows import GroupedColumns, GroupedWeights
from flexgen_jax.cpu.jit.instructions import LANES
from flexgen_jax.cpu.jit.lane_multipliers import (
    WORD,
    BlockOfRows,
    Digits,
    Lines,
    Multiplier,
    Place,
    Products,
    code_at,
    for_each_block,
    multiplier_of,
)
from flexgen_jax.cpu.jit.operands import (
    PAIR,
    STEP,
    Operands,
    Sides,
    SidesByRows,
    for_each_number_of_rows,
    store_step,
)
from flexgen_jax.cpu.jit.tiles import TILE
from flexgen_jax.cpu.jit.vectors import bfloat16_words, padded, transposed
from flexgen_jax.cpu.processor import Processor

WIDE_SIDES: SidesByRows = ((4, 1), (2, 2), (2, 4))
SHORT_SIDES: SidesByRows = ((2, 1), (1, 2), (1, 4))
"""Columns, and rows, that are multiplied at a time, where there is one row, two, and more: with
vectors of 512 bits, and of 256."""

MOST_OF_WIDE, MOST_OF_SHORT, MOST_OF_HALVES = 24, 16, 8
"""Rows that are multiplied so, at most: with more, unpacking the weights into tiles takes less
time. With vectors of 512 bits, of 256, and of 256 where codes of 8 bits are taken by halves."""

AHEAD = 8192
"""About how many bytes ahead codes are prefetched."""


@dataclass(frozen=True)
class LaneRows:
    """Rows in lanes, as they are multiplied."""

    left: Array
    """[row][block][line][lane][elements of a line]."""
    units: Array
    """fp32 [row][lane of a row], the unit of the elements."""
    sums: Array
    """fp32 [row][lane of a row], the sums of the elements."""
    depth: Value
    pitch: Value
    """Lanes of a row, rounded up to whole vectors."""
    apart: Value
    """Elements between the digits of all rows."""


def max_lane_rows(bits: int, processor: Processor) -> int:
    """Returns the most rows for which codes in lanes are not unpacked."""
    if processor.has_wide_vectors:
        return MOST_OF_WIDE
    return MOST_OF_HALVES if Digits(bits, 2, processor).takes_halves else MOST_OF_SHORT


def emit_lane_rows(
    operands: Operands,
    weights: GroupedWeights,
    digits: int,
    limits: tuple[Value, Value],
) -> None:
    """Computes few rows for a range of columns. digits: into how many rows are rounded, see
    `lane_multipliers`."""
    emit = partial(_emit_product, operands, weights, digits, limits)
    for_each_number_of_rows(operands, WIDE_SIDES, SHORT_SIDES, emit)


def _emit_product(
    of: Operands,
    weights: GroupedWeights,
    digits: int,
    limits: tuple[Value, Value],
    sides: Sides,
) -> None:
    k, (wide, many), pitch = of.k, sides, weights.pitch
    by = multiplier_of(weights.codes.bits, digits, many, k.processor)
    num_rows = of.turns(many) * many
    with k.workspace(
        *((by.scalar, num_rows * of.depth * by.digits), (F32, num_rows * pitch)),
        *((F32, num_rows * pitch), (F32, pitch * wide), (F32, pitch * wide)),
    ) as (left, units, sums, *factors):
        rows = LaneRows(left, units, sums, of.depth, pitch, num_rows * of.depth)
        product = LaneProduct(weights, rows, by, sides, (factors[0], factors[1]))
        left.fill(num_rows * of.depth * by.digits)
        for array in (units, sums):
            array.fill(num_rows * pitch)
        with k.loop(of.count) as row:
            product.lay_row(of.rows.at(row * of.depth), row)
        with k.loop(limits[1], limits[0], step=wide) as column:
            product.prepare(column)
            with k.loop(num_rows, step=many) as row:
                of.give(product.dots(column, row), row, column, sides)


@dataclass(frozen=True)
class LaneProduct:
    """A product of few rows."""

    weights: GroupedWeights
    rows: LaneRows
    by: Multiplier
    sides: Sides
    factors: tuple[Array, Array]
    """fp32 [column][pitch], scales and offsets of the columns that were prepared."""

    @property
    def native(self) -> int:
        """Lanes that are multiplied at a time."""
        return LANES if self.rows.depth.k.processor.has_wide_vectors else LANES // 2

    def for_each_block(self, emit: Callable[[Value, int], None]) -> None:
        """Emits code for the blocks of a row, by a block's first element and its lanes."""
        limits = self.rows.depth.k.index(0), self.rows.depth
        for_each_block(limits, self.weights.unit, self.weights.has_half_block, emit)

    def lay_row(self, elements: Array, row: Value) -> None:
        """Writes a row as it is multiplied."""
        unit, rows = self.weights.unit, self.rows
        left = rows.left.at(row * rows.depth)

        def lay_block(first: Value, lanes: int) -> None:
            with row.k.loop(lanes) as lane:
                own = elements.load(first + lane * unit, unit)
                place = Place(left.at(first), lane, lanes)
                at = row * rows.pitch + first // unit + lane
                for array, value in zip(
                    (rows.units, rows.sums), self.by.lay(own, place, rows.apart), strict=True
                ):
                    array.store(at, value)

        self.for_each_block(lay_block)

    def prepare(self, column: Value) -> None:
        """Widens the factors of columns, if they are not widened on the way."""
        if self.weights.factors.is_direct:
            return
        for n in range(self.sides[0]):
            places = [array.at(self.rows.pitch * n) for array in self.factors]
            self.weights.factors.take(column + n, *places)

    def dots(self, column: Value, row: Value) -> list[Value]:
        """Returns the products of rows with columns, lane by lane."""
        k, (wide, many) = column.k, self.sides
        every = [(line, n) for line in range(many) for n in range(wide)]
        parts = LANES // self.native
        zero = k.filled(F32, self.native)
        totals = {(place, part): k.variable(zero) for place in every for part in range(parts)}

        def add_block(first: Value, lanes: int) -> None:
            for part in range(max(1, lanes // self.native)):
                some = min(lanes, self.native)
                products = self._products(first, (lanes, part * some, some), column, row)
                group = first // self.weights.unit + part * some
                scales = [self._factors(n, column, group, some) for n in range(wide)]
                for line, n in every:
                    at = (row + line) * self.rows.pitch + group
                    product = products[line][n]
                    if self.by.has_units:
                        product = product * self.rows.units.load(at, some)
                    total = totals[(line, n), part]
                    added = total.get()
                    if some < self.native:
                        added = added.shuffle(range(some))
                    added = k.fma(product, scales[n][0], added)
                    added = k.fma(self.rows.sums.load(at, some), scales[n][1], added)
                    if some < self.native:
                        rest = total.get().shuffle(range(some, self.native))
                        added = added.joined(rest)
                    total.set(added)

        self.for_each_block(add_block)
        if parts == 1:
            return [totals[place, 0].get() for place in every]
        return [totals[place, 0].get().joined(totals[place, 1].get()) for place in every]

    def _products(
        self, first: Value, span: tuple[int, int, int], column: Value, row: Value
    ) -> Products:
        """Returns the products of some lanes of a block. span: the block's lanes, the first of
        these, and their number."""
        (lanes, begin, some), (wide, many) = span, self.sides
        codes, rows = self.weights.codes, self.rows
        lines = []
        for n in range(wide):
            at = ((column + n) * rows.depth + first) * codes.bits // 8
            if begin == 0:
                for line in range(self.weights.unit * codes.bits // 8 // WORD):
                    ahead = at + (AHEAD + line * lanes * WORD)
                    codes.arrays[0].prefetch(ahead, SECOND_CACHE)
            lines.append(Lines(codes.arrays[0].at(at + begin * WORD), some, lanes * WORD))
        width = WORD // ITEM_BYTES[str(self.by.scalar)]
        lefts = [
            rows.left.at((row + line) * rows.depth + first + begin * width) for line in range(many)
        ]
        return self.by.products(lines, lefts, BlockOfRows(self.weights.unit, lanes, rows.apart))

    def _factors(self, n: int, column: Value, group: Value, lanes: int) -> tuple[Value, Value]:
        """Returns scales and offsets of some lanes of a column."""
        if self.weights.factors.is_direct:
            return self.weights.factors.load(column + n, group, lanes)
        scales, offsets = (array.load(self.rows.pitch * n + group, lanes) for array in self.factors)
        return scales, offsets


@dataclass(frozen=True)
class LaneColumns(GroupedColumns):
    """Kernel weights whose codes lie in lanes, unpacked in registers."""

    def take(self, column: Value, top: Value, steps: Value, packed: Array) -> None:
        limits, weights = (top, top + steps * STEP), self.weights
        self.prepare(column)
        with column.k.loop(2) as tile:

            def take_block(first: Value, lanes: int) -> None:
                to = packed.at(tile * TILE + (first - top) * PAIR)
                self._take_block(column + tile * LANES, first, to, lanes)

            for_each_block(limits, weights.unit, weights.has_half_block, take_block)

    def _take_block(self, column: Value, first: Value, packed: Array, lanes: int) -> None:
        """Copies a block of `LANES` columns into tiles, from the block's first step on."""
        k, unit, codes = column.k, self.weights.unit, self.weights.codes
        pairs_of_line, lines = 8 // codes.bits * WORD // 2, unit * codes.bits // 8 // WORD
        row_bytes, factor = codes.plane * codes.bits // 8, first // unit
        with k.loop(lines) as line, k.loop(pairs_of_line) as number:
            columns = []
            for n in range(LANES):
                at = (column + n) * row_bytes + first * codes.bits // 8 + line * (lanes * WORD)
                codes.arrays[0].prefetch(at + row_bytes * LANES, SECOND_CACHE)
                stored = codes.arrays[0].at(at).of(I32).load(0, lanes)
                own = (column % PAIR + n) * self.weights.pitch + factor
                scale, offset = (x.load(own, lanes) for x in (self.scales, self.offsets))
                levels = [code_at(stored, number * 2 + side, codes.bits) for side in range(2)]
                even, odd = (k.fma(level.to(F32), scale, offset) for level in levels)
                columns.append(padded(bfloat16_words(even, odd)))
            word = line * pairs_of_line + number
            for lane, turned in enumerate(transposed(columns)[:lanes]):
                step, part = divmod(lane * unit, STEP)
                target = step * (2 * TILE) + word * STEP + part // 2 * STEP
                store_step(packed, target, turned)
