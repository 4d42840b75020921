"""Products of many rows, rounded to 8-bit integers, with kernel weights of 4 bits that are grouped
along their input, for AVX2, compiled by Numba.

Rows are rounded as in `matmul_grouped_int8`. The codes of 16 columns are laid side by side, four
elements of a column in a word, so that a vector has 8 columns: products of one step of 32 elements
are added up in 16 bits, widened once, and multiplied with the scales of 8 columns at a time. With
elements a0 .. a31 of column a, and so on, a step is

    a0 a1 a2 a3 b0 b1 b2 b3 ... h3 | i0 .. p3      16 columns, elements 0 to 3
    a4 a5 a6 a7 b4 b5 b6 b7 ... h7 | i4 .. p7      elements 4 to 7, and six more such lines
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.core import cgutils as untyped
from numba.extending import intrinsic

from flexgen_jax.cpu.jit.code_cache import called, source_of
from flexgen_jax.cpu.jit.llvm import INT, LANES
from flexgen_jax.cpu.jit.matmul_blocked import aligned
from flexgen_jax.cpu.jit.matmul_codes_steps import BYTES, INTS, SHORTS, SUMS, paired
from flexgen_jax.cpu.jit.matmul_grouped import padded_count
from flexgen_jax.cpu.jit.matmul_grouped_int8 import round_steps
from flexgen_jax.cpu.jit.packing import PAIR, STEP, N, Tiles, emitted, give_rows

cgutils: Any = untyped

SOURCE = source_of(__file__)
"""A checksum of the code that these products are made from; see `decode_attention.SOURCE`."""

MANY = 2
"""Rows that are multiplied at a time."""

ROWS = 256
"""Rows for which codes are laid side by side once."""

BLOCK = 16
"""Steps of bytes whose codes, as 16 KB, stay in the first cache while all rows pass by."""

WORD = 4
"""Elements of a column that lie together."""

PLANES = 2
LINE = STEP // WORD * LANES
"""Words of a step of one plane."""

LOW = np.uint32(0x0F0F0F0F)

APART = 36
"""Elements between rows that are no part of them, so that processors can load from two rows at
once: those that lie a power of two apart share a bank of the first cache."""


def _dots(
    _context,
    left,
    row,
    pitch,
    units,
    sums,
    factors,
    codes,
    scales,
    offsets,
    side,
    top,
    steps,
    of,
    totals,
    to,
    many,
):
    kinds = (left, N, N, units, sums, N, codes, scales, offsets, N, N, N, N, totals, N, many)
    return types.void(*kinds), emitted(_emit_dots, constants=1)


def _emit_dots(
    tiles: Tiles,
    many: int,
    left: Any,
    row: Any,
    pitch: Any,
    units: Any,
    sums: Any,
    factors: Any,
    codes: Any,
    scales: Any,
    offsets: Any,
    side: Any,
    top: Any,
    steps: Any,
    of: Any,
    totals: Any,
    to: Any,
) -> None:
    builder, halves = tiles.builder, range(LANES // SUMS.count)
    sides = [(line, half) for line in range(many) for half in halves]
    places = [
        tiles.place(totals, tiles.at(to, line * LANES + half * SUMS.count), SUMS)
        for line, half in sides
    ]
    kept = [cgutils.alloca_once(builder, SUMS) for _ in sides]
    for own, place in zip(kept, places, strict=True):
        builder.store(builder.load(place, align=4), own)
    with tiles.loop(steps) as (step, _):
        for plane in range(PLANES):
            number = tiles.at((of, plane), top, step)
            line_of = tiles.at((step, PLANES * LINE), plane * LINE)
            shorts = _products(tiles, many, left, row, pitch, number, codes, line_of)
            for half in halves:
                place = tiles.at((number, PAIR), side, half * SUMS.count)
                scale, offset = (
                    builder.load(tiles.place(array, place, SUMS), align=4)
                    for array in (scales, offsets)
                )
                for line in range(many):
                    index = tiles.at((tiles.at(row, line), factors), number)
                    unit, x = (
                        tiles.spread(builder.load(builder.gep(array.data, [index])), SUMS.count)
                        for array in (units, sums)
                    )
                    own = kept[sides.index((line, half))]
                    dot = builder.sitofp(paired(tiles, shorts[line, half]), SUMS)
                    total = tiles.multiply_add(x, offset, builder.load(own))
                    total = tiles.multiply_add(dot, builder.fmul(scale, unit), total)
                    builder.store(total, own)
    for own, place in zip(kept, places, strict=True):
        builder.store(builder.load(own), place, align=4)


def _products(
    tiles: Tiles,
    many: int,
    left: Any,
    row: Any,
    pitch: Any,
    number: Any,
    codes: Any,
    line_of: Any,
) -> dict[tuple[int, int], Any]:
    """Returns the products of a step, two elements of a column added up in each lane, by row and
    half of the columns. No sum leaves 16 bits: 16 products are of 15 and 127 at most."""
    builder, total = tiles.builder, dict[tuple[int, int], Any]()
    for word in range(STEP // WORD):
        place = tiles.at(line_of, word * LANES)
        columns = [
            builder.load(tiles.place(codes, tiles.at(place, half * SUMS.count), BYTES), align=4)
            for half in range(LANES // SUMS.count)
        ]
        for line in range(many):
            place = tiles.at((tiles.at(row, line), pitch), (number, STEP), word * WORD)
            one = builder.load(tiles.place(left, place, INT), align=4)
            x = builder.bitcast(tiles.spread(one, INTS.count), BYTES)
            for half, column in enumerate(columns):
                dot = tiles.call("llvm.x86.avx2.pmadd.ub.sw", SHORTS, column, x)
                before = total.get((line, half))
                total[line, half] = dot if before is None else builder.add(before, dot)
    return total


dots: Any = intrinsic(prefer_literal=True)(_dots)
"""Intrinsic: adds the products of `many` rows of integers, from `row` on, with 16 columns to
totals, fp32 [row][16], from `to` on.

left: int8, rows `pitch` apart; units, sums: fp32, rows `factors` apart, those of `round_steps`;
codes: words, [step][plane][8][16], of `steps` steps; top: the first of these in a plane, which has
`of` steps; scales, offsets: fp32 [step of a row][32], of which `side` is the first column's. many
is a compile-time constant.
"""


def multiplier_of(take: Any, middle: float) -> Any:
    """Returns the function that does what `matmul_grouped.multiplier_of` says, for any number of
    rows."""

    @called
    def multiply(rows, kernel, plane, bias, out, shape, start, end):
        count, depth, columns = shape
        (codes, _), (arrays, groups) = kernel
        steps, factors, pitch = plane // STEP, padded_count(depth), depth + APART
        height = min(ROWS, -(-count // PAIR) * PAIR)
        left = aligned(height * pitch, np.int8)
        units = np.zeros(height * factors, np.float32)
        sums = np.zeros(height * factors, np.float32)
        scale, offset = aligned(factors, np.float32), aligned(factors, np.float32)
        scales = aligned(factors * PAIR, np.float32)
        offsets = aligned(factors * PAIR, np.float32)
        laid = aligned(BLOCK * PLANES * LINE, np.uint32)
        totals = aligned(height * PAIR, np.float32)
        stored = codes.view(np.uint32)
        for top in range(0, count, height):
            some = min(height, count - top)
            padded = -(-some // MANY) * MANY
            left[some * pitch : padded * pitch] = 0
            units[some * factors :] = 0
            sums[some * factors :] = 0
            for row in range(some):
                begin, to = row * pitch, row * factors
                round_steps(
                    rows,
                    (top + row) * depth,
                    depth // STEP,
                    left,
                    begin,
                    STEP,
                    units,
                    sums,
                    to,
                    STEP,
                )
            for first in range(start, end, PAIR):
                for column in range(PAIR):
                    take(arrays, first + column, groups, scale, offset, 0, middle)
                    for n in range(depth // STEP):
                        scales[n * PAIR + column] = scale[n]
                        offsets[n * PAIR + column] = offset[n]
                totals[:] = 0
                for side in range(0, PAIR, LANES):
                    for block in range(0, steps, BLOCK):
                        taken = min(BLOCK, steps - block)
                        lay(stored, (first + side) * plane + block * STEP, plane, taken, laid)
                        for row in range(0, padded, MANY):
                            to = row // PAIR * PAIR * PAIR + row % PAIR // LANES * PAIR * LANES
                            to += side * LANES + row % LANES * LANES
                            dots(
                                left,
                                row,
                                pitch,
                                units,
                                sums,
                                factors,
                                laid,
                                scales,
                                offsets,
                                side,
                                block,
                                taken,
                                steps,
                                totals,
                                to,
                                MANY,
                            )
                for row in range(0, some, PAIR):
                    begin = (top + row) * columns + first
                    now = min(PAIR, some - row)
                    give_rows(totals[row * PAIR :], 1, bias, first, out, begin, columns, now, False)

    return multiply


@njit(inline="always")
def lay(codes, begin, pitch, steps, laid):
    """Lays the codes of 16 columns side by side, for `dots`: steps of bytes from the byte `begin`
    on, of columns `pitch` bytes apart."""
    for column in range(LANES):
        source = (begin + column * pitch) // WORD
        for step in range(steps):
            for word in range(STEP // WORD):
                both = codes[source + step * (STEP // WORD) + word]
                to = step * PLANES * LINE + word * LANES + column
                laid[to] = both & LOW
                laid[to + LINE] = both >> np.uint32(4) & LOW
