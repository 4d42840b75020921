"""Products of many rows, rounded to 8-bit integers, with kernel weights whose codes are integers of
4 or 8 bits that are grouped along their input.

Rows are rounded as in `grouped_integers`. The codes of 16 columns are laid side by side, four
elements of a column in a word, so that a vector has 16 columns, or 8. The products of a step of 32
elements are added up in 32 bits if the processor sums four products at a time. Else they are added
up in 16 bits and widened once. Then they are multiplied with the scales of these columns. With
elements a0 .. a31 of column a, and so on, a step is

    a0 a1 a2 a3 b0 b1 b2 b3 ... h3 | i0 .. p3      16 columns, elements 0 to 3
    a4 a5 a6 a7 b4 b5 b6 b7 ... h7 | i4 .. p7      elements 4 to 7, and six more such lines
"""

from __future__ import annotations

from dataclasses import dataclass

from flexgen_jax.cpu.jit.emit import F32, I8, I16, I32, Array, Value
from flexgen_jax.cpu.jit.grouped_integers import round_steps
from flexgen_jax.cpu.jit.grouped_rows import GroupedWeights
from flexgen_jax.cpu.jit.instructions import LANES, add_pairs, add_products_of_bytes, dot_bytes
from flexgen_jax.cpu.jit.lane_multipliers import for_each_block
from flexgen_jax.cpu.jit.operands import PAIR, STEP, Operands, Sides
from flexgen_jax.cpu.jit.tiles import give_rows
from flexgen_jax.cpu.jit.vectors import padded, transposed

WIDE_SIDES, SHORT_SIDES = (16, 8), (8, 2)
"""Columns of a vector, and rows that are multiplied at a time: with vectors of 512 bits, and of
256."""

ROWS = 256
"""Rows for which codes are laid side by side once."""

BLOCK_STEPS = 16
"""Steps of bytes whose codes, as 16 KB, stay in the first cache while all rows pass by."""

WORD = 4
"""Elements of a column that lie together."""

HALVES = 2
LINE = STEP // WORD * LANES
"""Words of a step of one plane."""

LOW = 0x0F0F0F0F

APART = 36
"""Elements between rows that are no part of them, so that processors can load from two rows at
once: those that lie a power of two apart share a bank of the first cache."""


@dataclass(frozen=True)
class Work:
    """Memory for some rows and a pair of tiles of columns."""

    left: Array
    """int8, rows `pitch` apart."""
    units: Array
    """fp32 [row][factors], see `round_steps`."""
    sums: Array
    factor: tuple[Array, Array]
    """Scales and offsets of one column."""
    factors: tuple[Array, Array]
    """fp32 [step of a row][PAIR]."""
    laid: Array
    """Codes side by side: words, [step][plane][8][16]; codes in lanes have one plane."""
    totals: Array
    """fp32, as `give_rows` takes them."""
    pitch: Value
    by_fours: bool
    """Whether the processor adds up products of four bytes."""

    @property
    def sides(self) -> Sides:
        """Columns of a vector, and rows that are multiplied at a time."""
        has_wide_vectors = self.pitch.k.processor.has_wide_vectors
        return WIDE_SIDES if self.by_fours and has_wide_vectors else SHORT_SIDES


def emit_grouped_integer_tiles(
    operands: Operands, weights: GroupedWeights, by_fours: bool, limits: tuple[Value, Value]
) -> None:
    """Computes any number of rows for a range of columns. by_fours: the processor adds up products
    of four bytes."""
    k, of = operands.k, operands
    height, factors, pitch = of.count.round_up(PAIR).minimum(ROWS), weights.pitch, of.depth + APART
    with k.workspace(
        *((I8, height * pitch), (F32, height * factors), (F32, height * factors)),
        *((F32, factors),) * 2,
        *((F32, factors * PAIR),) * 2,
        *((I32, BLOCK_STEPS * HALVES * LINE), (F32, height * PAIR)),
    ) as (left, units, sums, scale, offset, scales, offsets, laid, totals):
        arrays = left, units, sums, (scale, offset), (scales, offsets), laid, totals
        work = Work(*arrays, pitch, by_fours)
        with k.loop(of.count, step=height) as top:
            some = (of.count - top).minimum(height)
            for array, size in ((left, pitch), (units, factors), (sums, factors)):
                array.fill(height * size)
            with k.loop(some) as row:
                round_steps(
                    of.rows.at((top + row) * of.depth),
                    (left.at(row * pitch), STEP),
                    units.at(row * factors),
                    sums.at(row * factors),
                    (of.depth // STEP, STEP),
                )
            with k.loop(limits[1], limits[0], step=PAIR) as first:
                _multiply(weights, work, first, some)
                with k.loop(some, step=PAIR) as row:
                    now, is_aligned = (some - row).minimum(PAIR), k.index(0).differs(0)
                    own = totals.at(row * PAIR)
                    give_rows(of, own, (top + row, first), (now, 1), is_aligned)


def _multiply(weights: GroupedWeights, work: Work, first: Value, count: Value) -> None:
    """Multiplies `count` rows by `PAIR` columns."""
    k, codes, pitch, planes = first.k, weights.codes, weights.pitch, len(weights.codes.planes)
    steps, block_steps = codes.plane // STEP, BLOCK_STEPS * HALVES // planes
    step_bytes = STEP * planes * codes.bits // 8
    row_bytes = steps * step_bytes
    with k.loop(PAIR) as column:
        weights.factors.take(first + column, *work.factor)
        with k.loop(steps * planes) as step:
            for source, target in zip(work.factor, work.factors, strict=True):
                target.store(step * PAIR + column, source.load(step))
    work.totals.fill(count.round_up(PAIR) * PAIR)
    with k.loop(PAIR, step=LANES) as side, k.loop(steps, step=block_steps) as block:
        taken = (steps - block).minimum(block_steps)
        lines = codes.arrays[0].at((first + side) * row_bytes + block * step_bytes)
        if codes.in_lanes:
            _lay_lanes(lines, row_bytes, weights, taken, work.laid)
        else:
            _lay(lines, row_bytes, taken, work.laid)
        with k.loop(count, step=work.sides[1]) as row:
            to = row // PAIR * (PAIR * PAIR) + row % PAIR // LANES * (PAIR * LANES)
            to = to + side * LANES + row % LANES * LANES
            rows = row, pitch
            _add_dots(work, planes, rows, (side, block), (taken, steps), work.totals.at(to))


def _lay(codes: Array, pitch: Value, steps: Value, laid: Array) -> None:
    """Lays the codes of 16 columns, `pitch` bytes apart, side by side."""
    k = steps.k
    with k.loop(LANES) as column, k.loop(steps) as step:
        words = codes.at(column * pitch + step * STEP).of(I32).load(0, STEP // WORD)
        for plane in range(HALVES):
            shifted = words >> 4 * plane & LOW
            for word in range(STEP // WORD):
                to = step * (HALVES * LINE) + plane * LINE + word * LANES + column
                laid.store(to, shifted.lane(word))


def _lay_lanes(
    lines: Array, pitch: Value, weights: GroupedWeights, steps: Value, laid: Array
) -> None:
    """Does what `_lay` does for codes in lanes, whose blocks are transposed."""
    k, bits = pitch.k, weights.codes.bits
    halves = 8 // bits

    def lay(first: Value, lanes: int) -> None:
        with k.loop(STEP // WORD // halves) as line:
            at = first * (STEP // halves) + line * (lanes * WORD)
            words = [lines.at(pitch * n + at).of(I32).load(0, lanes) for n in range(LANES)]
            for half in range(halves):
                parts = [own >> 4 * half & LOW for own in words] if bits == 4 else words
                for lane, turned in enumerate(transposed([padded(own) for own in parts])[:lanes]):
                    to = (first + lane) * LINE + (line * halves + half) * LANES
                    laid.store(to, turned)

    for_each_block((k.index(0), steps), 1, weights.has_half_block, lay)


def _add_dots(
    work: Work,
    planes: int,
    rows: tuple[Value, Value],
    place: tuple[Value, Value],
    steps: tuple[Value, Value],
    totals: Array,
) -> None:
    """Adds the products of some rows with 16 columns to totals, fp32 [row][16].

    planes: of codes; rows: the first one, and factors of a row; place: the first column among
    `PAIR`, and the first step of the laid codes in a plane; steps: those that are laid, and those
    of a plane.
    """
    (row, pitch), (side, top), (taken, plane_steps), k = rows, place, steps, totals.k
    wide, many = work.sides
    every = [(line, part) for line in range(many) for part in range(0, LANES, wide)]
    sums = [k.variable(totals.load(line * LANES + part, wide)) for line, part in every]
    with k.loop(taken) as step:
        for plane in range(planes):
            number = plane_steps * plane + top + step
            dots = _products(work, row, number, step * (planes * LINE) + plane * LINE)
            for own, (line, part) in enumerate(every):
                at = number * PAIR + side + part
                scale, offset = (array.load(at, wide) for array in work.factors)
                index = (row + line) * pitch + number
                dot = dots[line, part].to(F32)
                total = k.fma(offset, work.sums.load(index), sums[own].get())
                sums[own].set(k.fma(dot, scale * work.units.load(index), total))
    for own, (line, part) in enumerate(every):
        totals.store(line * LANES + part, sums[own].get())


def _products(
    work: Work, row: Value, number: Value, line_of: Value
) -> dict[tuple[int, int], Value]:
    """Returns the products of a step, int32, by row and first column. Added up in pairs, no sum
    leaves 16 bits: 16 products are of 15 and 127 at most."""
    wide, many = work.sides
    zero = row.k.filled(I32, wide) if work.by_fours else row.k.filled(I16, 2 * wide)
    totals = {(line, part): zero for line in range(many) for part in range(0, LANES, wide)}
    for word in range(STEP // WORD):
        for part in range(0, LANES, wide):
            codes = work.laid.load(line_of + word * LANES + part, wide).bits(I8)
            for line in range(many):
                place = work.left.at((row + line) * work.pitch + number * STEP + word * WORD)
                x = place.of(I32).load(0).spread(wide).bits(I8)
                before = totals[line, part]
                if work.by_fours:
                    totals[line, part] = dot_bytes(before, codes, x)
                else:
                    totals[line, part] = before + add_products_of_bytes(codes, x)
    if work.by_fours:
        return totals
    return {place: add_pairs(shorts) for place, shorts in totals.items()}
