"""Products with kernel weights whose codes lie in lanes, see `models/formats/lanes.py`.

A weight is `scale * code + offset`, with one of both for each lane. So products of a lane add up in
registers, and a block of lanes takes one multiply-add by a vector of scales and one by a vector of
offsets.

Few rows multiply codes as they are stored: as pairs of bfloat16 where the processor has their dot
products; else as bytes, by rows that are rounded lane by lane to x = unit * (256 high + low), two
8-bit digits, which keep what bfloat16 has; or to one digit (LLM.int8(), section 3.1). Sums of
integers are exact, so a row's result depends on no other row. For many rows the weights are
unpacked into the tiles of `many_rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from flexgen_jax.cpu.jit.emit import (
    F32,
    I8,
    I16,
    I32,
    ITEM_BYTES,
    SECOND_CACHE,
    Array,
    Scalar,
    Value,
)
from flexgen_jax.cpu.jit.grouped_rows import GroupedWeights
from flexgen_jax.cpu.jit.instructions import (
    LANES,
    add_pairs,
    add_products_of_bytes,
    dot_bytes,
    dot_pairs,
    lookup_words,
    nearest_integers,
)
from flexgen_jax.cpu.jit.operands import (
    PAIR,
    STEP,
    Operands,
    Sides,
    for_each_number_of_rows,
    store_step,
)
from flexgen_jax.cpu.jit.tiles import TILE, ColumnSource
from flexgen_jax.cpu.jit.vectors import bfloat16_words, from_bfloat16, padded, transposed
from flexgen_jax.cpu.processor import Processor
from flexgen_jax.layers.matmul_int8 import LEVELS

WIDE_SIDES: tuple[Sides, Sides, Sides] = ((4, 1), (2, 2), (2, 4))
SHORT_SIDES: tuple[Sides, Sides, Sides] = ((2, 1), (1, 2), (1, 4))
"""Columns, and rows, that are multiplied at a time, where there is one row, two, and more: with
vectors of 512 bits, and of 256."""

MOST_OF_WIDE, MOST_OF_SHORT, MOST_OF_HALVES = 24, 16, 8
"""Rows that are multiplied so, at most: with more, unpacking the weights into tiles takes less
time. With vectors of 512 bits, of 256, and of 256 where codes of 8 bits are taken by halves."""

AHEAD = 8192
"""About how many bytes ahead codes are prefetched."""

WORD = 4
"""Bytes of a lane in a line of codes."""

DIGIT = 8
"""Bits of a digit."""


@dataclass(frozen=True)
class Lines:
    """Lines of a block's codes, of some of its lanes."""

    codes: Array
    """From the first line's first lane on."""
    lanes: int
    pitch: int
    """Bytes from one line to the next."""

    def load(self, line: int) -> Value:
        return self.codes.load(line * self.pitch, WORD * self.lanes)


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


@dataclass(frozen=True)
class Place:
    """A lane of a row, where it is written."""

    left: Array
    """The row's block."""
    lane: Value
    """Its number in the block."""
    lanes: int
    """Lanes of the block."""


class Multiplier:
    """How codes of 4 or 8 bits are multiplied by rows.

    scalar: type of the rows' elements; digits: numbers that stand for an element; has_units:
    whether elements are counted in units of their lane.
    """

    scalar: Scalar = I8
    digits = 1
    has_units = True

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def lay(self, elements: Value, place: Place, apart: Value) -> tuple[Value, Value]:
        """Writes a lane, bfloat16 as bits; returns its unit and the sum of its elements."""
        raise NotImplementedError

    def products(self, lines: Sequence[Lines], lefts: Sequence[Array], of: BlockOfRows) -> Products:
        """Returns for each row and column the sums of the products of each lane, fp32. lefts: the
        rows' elements, from the first of these lanes on."""
        raise NotImplementedError


Products = list[list[Value]]


@dataclass(frozen=True)
class BlockOfRows:
    """The layout of rows in a block."""

    unit: int
    """Elements of a lane."""
    lanes: int
    """Lanes of the block."""
    apart: Value
    """Elements between digits."""


class Digits(Multiplier):
    """Products of bytes: rows are rounded to one 8-bit digit, or to two."""

    def __init__(self, bits: int, digits: int, processor: Processor) -> None:
        super().__init__(bits)
        self.digits = digits
        # Either int32 sums of four products, or int16 sums of two. For the latter, codes are taken
        # by halves, so that the products of a lane, of 15 and 128 at most, stay below 2^15.
        self._has_fours = processor.has_all({"avx512vnni", "avx512vl"})

    @property
    def takes_halves(self) -> bool:
        """Whether 8-bit codes are multiplied by halves."""
        return self.bits == 8 and not self._has_fours

    @property
    def _parts(self) -> int:
        """Sums for each digit."""
        return 2 if self.takes_halves else 1

    def lay(self, elements: Value, place: Place, apart: Value) -> tuple[Value, Value]:
        wide, one = from_bfloat16(elements), elements.k.number(F32, 1.0)
        largest = LEVELS << DIGIT * (self.digits - 1)
        # As integers, so that NaN is the largest, and the unit and all sums are NaN.
        top = (wide.bits(I32) & 0x7FFFFFFF).reduce("umax").bits(F32)
        unit = top * float(np.float32(1 / largest))
        rest = nearest_integers(wide * (one / unit.equals(0.0).select(one, unit)))
        total = rest.reduce("add").to(F32) * unit
        for digit in range(self.digits):  # the highest first
            is_last = digit == self.digits - 1
            own = rest if is_last else (rest + (1 << DIGIT - 1)).shifted_right(DIGIT)
            rest, words = rest - (own << DIGIT), own.to(I8).bits(I32)
            to = place.left.at(apart * digit + place.lane * WORD)
            for line in range(elements.lanes // WORD):
                to.at(line * place.lanes * WORD).of(I32).store(0, words.lane(line))
        return unit, total

    def products(self, lines: Sequence[Lines], lefts: Sequence[Array], of: BlockOfRows) -> Products:
        k, lanes, halves = of.apart.k, lines[0].lanes, 8 // self.bits
        zero = k.filled(I32, lanes) if self._has_fours else k.filled(I16, 2 * lanes)
        every = [(row, column) for row in range(len(lefts)) for column in range(len(lines))]
        sums = {place: [[zero] * self._parts for _ in range(self.digits)] for place in every}
        for line in range(of.unit * self.bits // 8 // WORD):
            codes = [self._codes(own.load(line)) for own in lines]
            for half in range(halves):
                at = (line * halves + half) * of.lanes * WORD
                for row, left in enumerate(lefts):
                    for digit in range(self.digits):
                        x = left.at(of.apart * digit).load(at, WORD * lanes)
                        for column, own in enumerate(codes):
                            totals = sums[row, column][digit]
                            for part in range(self._parts):
                                code = own[half if self.bits == 4 else part]
                                totals[part] = self._added(totals[part], code, x)
        columns = range(len(lines))
        return [[self._combined(sums[row, n]) for n in columns] for row in range(len(lefts))]

    def _codes(self, stored: Value) -> list[Value]:
        """Returns the low and the high halves of bytes, or bytes as they are."""
        if self.bits == 8 and self._has_fours:
            return [stored]
        return [(stored.bits(I16) >> shift & 0x0F0F).bits(I8) for shift in (0, 4)]

    def _added(self, total: Value, codes: Value, x: Value) -> Value:
        if self._has_fours:
            return dot_bytes(total, codes, x)
        return total + add_products_of_bytes(codes, x)

    def _combined(self, digits: Sequence[Sequence[Value]]) -> Value:
        """Returns the sums of lanes from those of digits, and of halves of codes."""
        wide = []
        for parts in digits:
            sums = parts if self._has_fours else [add_pairs(part) for part in parts]
            wide.append(sums[0] + (sums[1] << 4) if len(sums) == 2 else sums[0])
        whole = (wide[0] << DIGIT) + wide[1] if len(wide) == 2 else wide[0]
        return whole.to(F32)


class Pairs(Multiplier):
    """Dot products of bfloat16 pairs; halves of bytes choose from tables."""

    scalar = I16
    has_units = False

    def lay(self, elements: Value, place: Place, apart: Value) -> tuple[Value, Value]:
        wide = from_bfloat16(elements)
        total = wide.lane(0)
        for element in range(1, elements.lanes):
            total = total + wide.lane(element)
        to = place.left.at(place.lane * 2)
        for number, pair in enumerate(self._pairs(elements.lanes)):
            for side, element in enumerate(pair):
                to.store(number * place.lanes * 2 + side, elements.lane(element))
        return elements.k.number(F32, 1.0), total

    def _pairs(self, unit: int) -> list[tuple[int, int]]:
        """Returns the elements that are multiplied together, in the order of their products: codes
        that begin at the same bit of the two halves of a word."""
        places = range(4) if self.bits == 4 else range(2)
        pairs = []
        for line in range(unit * self.bits // 8 // WORD):
            for place in places:
                if self.bits == 4:
                    first = 8 * line + 4 * (place % 2) + place // 2
                else:
                    first = 4 * line + place
                pairs.append((first, first + 2))
        return pairs

    def products(self, lines: Sequence[Lines], lefts: Sequence[Array], of: BlockOfRows) -> Products:
        k, lanes = of.apart.k, lines[0].lanes
        chains = 2 if len(lefts) == 1 else 1
        zero = k.filled(F32, lanes)
        sums = [[[zero] * chains for _ in lines] for _ in lefts]
        nibbles, each = range(4), 4 if self.bits == 4 else 2
        for line in range(of.unit * self.bits // 8 // WORD):
            words = [own.load(line).bits(I16) for own in lines]
            for nibble in nibbles:
                table = self._table(nibble)
                levels = [lookup_words(k, table, own >> 4 * nibble).bits(I32) for own in words]
                number = line * each + (nibble if self.bits == 4 else nibble // 2)
                for row, left in enumerate(lefts):
                    x = left.load(number * of.lanes * 2, 2 * lanes).bits(I32)
                    for column, level in enumerate(levels):
                        totals = sums[row][column]
                        chain = nibble % chains
                        totals[chain] = dot_pairs(totals[chain], level, x)
        return [[sum(own[1:], own[0]) for own in of_row] for of_row in sums]

    def _table(self, nibble: int) -> list[int]:
        """Returns bfloat16 numbers of 4 bits, as bits: those of the upper half of 8-bit codes are
        16 times as large."""
        scale = 16 if self.bits == 8 and nibble % 2 else 1
        numbers = np.arange(16, dtype=np.float32) * scale
        return [int(x) >> 16 for x in numbers.view(np.uint32)] * 2


class Floats(Multiplier):
    """Products of fp32: for more than two rows and codes of 8 bits these take less time than bytes
    where there are no sums of four products."""

    scalar = F32
    has_units = False

    def lay(self, elements: Value, place: Place, apart: Value) -> tuple[Value, Value]:
        wide = from_bfloat16(elements)
        total = wide.lane(0)
        for element in range(elements.lanes):
            place.left.at(place.lane).store(element * place.lanes, wide.lane(element))
            total = total + wide.lane(element) if element else total
        return elements.k.number(F32, 1.0), total

    def products(self, lines: Sequence[Lines], lefts: Sequence[Array], of: BlockOfRows) -> Products:
        k, each = of.apart.k, 8 // self.bits * WORD
        sums = [[k.filled(F32, lines[0].lanes)] * len(lines) for _ in lefts]
        for line in range(of.unit // each):
            words = [own.load(line).bits(I32) for own in lines]
            for element in range(each):
                codes = [code_of(own, element, self.bits).to(F32) for own in words]
                for row, left in enumerate(lefts):
                    x = left.load((line * each + element) * of.lanes, lines[0].lanes)
                    for column, code in enumerate(codes):
                        sums[row][column] = k.fma(code, x, sums[row][column])
        return sums


def code_of(words: Value, element: int, bits: int) -> Value:
    """Returns the codes of an element of a line, from its words."""
    half, byte = divmod(element, WORD)
    return words >> 8 * byte + bits * half & (1 << bits) - 1


def code_at(words: Value, element: Value, bits: int) -> Value:
    """Does what `code_of` does for an element that is known when the kernel runs."""
    shift = (element % WORD * 8 + element // WORD * bits).to(I32)
    return words >> shift.spread(words.lanes) & (1 << bits) - 1


def multiplier_of(bits: int, unit: str, processor: Processor, how: tuple[int, int]) -> Multiplier:
    """Returns how a unit multiplies codes. how: digits of rows that are rounded, and rows that are
    multiplied at a time."""
    digits, many = how
    if digits == 2 and unit in ("avx512", "amx") and processor.multiplies_pairs:
        return Pairs(bits)
    by = Digits(bits, digits, processor)
    return Floats(bits) if by.takes_halves and many > 2 and digits == 2 else by


def max_lane_rows(bits: int, processor: Processor) -> int:
    """Returns the most rows for which codes in lanes are not unpacked."""
    if processor.has_wide_vectors:
        return MOST_OF_WIDE
    return MOST_OF_HALVES if Digits(bits, 2, processor).takes_halves else MOST_OF_SHORT


def emit_lane_rows(
    operands: Operands,
    weights: GroupedWeights,
    unit: str,
    digits: int,
    limits: tuple[Value, Value],
) -> None:
    """Computes few rows for a range of columns. digits: of rows that are rounded: 1, or 2 where
    there is no better way to multiply bfloat16."""
    sides = WIDE_SIDES if operands.k.processor.has_wide_vectors else SHORT_SIDES
    emit = partial(_emit_product, operands, weights, (unit, digits), limits)
    for_each_number_of_rows(operands, sides, emit)


def _emit_product(
    of: Operands,
    weights: GroupedWeights,
    how: tuple[str, int],
    limits: tuple[Value, Value],
    sides: Sides,
) -> None:
    k, (wide, many), pitch, (unit, digits) = of.k, sides, weights.pitch, how
    by = multiplier_of(weights.codes.bits, unit, k.processor, (digits, many))
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
        k, unit, depth = self.rows.depth.k, self.weights.unit, self.rows.depth
        whole = depth // (LANES * unit) * (LANES * unit)
        with k.loop(whole, step=LANES * unit) as first:
            emit(first, LANES)
        if self.weights.has_half_block:
            emit(whole, LANES // 2)

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
        width = {1: WORD, 2: 2, 4: 1}[ITEM_BYTES[str(self.by.scalar)]]
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
class LaneColumns(ColumnSource):
    """Kernel weights whose codes lie in lanes, unpacked in registers."""

    weights: GroupedWeights
    scales: Array
    """fp32 [PAIR][pitch], of the columns that were prepared."""
    offsets: Array

    def prepare(self, column: Value) -> None:
        pitch = self.weights.pitch
        with column.k.loop(PAIR) as n:
            at = n * pitch
            self.weights.factors.take(column + n, self.scales.at(at), self.offsets.at(at))

    def take(self, column: Value, top: Value, steps: Value, packed: Array) -> None:
        k, unit = column.k, self.weights.unit
        self.prepare(column)
        end = top + steps * STEP
        whole = top + steps * STEP // (LANES * unit) * (LANES * unit)
        with k.loop(2) as tile:
            to = packed.at(tile * TILE)
            with k.loop(whole, top, LANES * unit) as first:
                self._take_block(column + tile * LANES, first, to.at((first - top) * PAIR), LANES)
            if not self.weights.has_half_block:
                return
            with k.when(whole < end):
                to = to.at((whole - top) * PAIR)
                self._take_block(column + tile * LANES, whole, to, LANES // 2)

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
