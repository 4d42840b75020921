"""Products of 8-bit integers and the codes of packed kernel weights, by AVX2, compiled by Numba.

As in `matmul_packed`, with a middle code c,

    sum over k of x[k] weight[k]  =  sum of (x[k] scale[k]) (code - c)
                                     +  sum of x[k] (minimum[k] + c scale[k])

Here x * scale is rounded to integers, of which `BLOCK` neighbours share a scale, and AVX2
multiplies them by codes of at most 4 bits as bytes; 8-bit codes are two such halves. The weights
are not rounded, nor is the sum on the right. Outliers of x (see `layers/matmul_int8.py`) are
multiplied one by one. No row's result depends on other rows.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numba import njit

from flexgen_jax.cpu.jit import matmul_codes_steps, matmul_packed, packing_int8
from flexgen_jax.cpu.jit.code_cache import called, source_of
from flexgen_jax.cpu.jit.llvm import LANES
from flexgen_jax.cpu.jit.matmul_blocked import aligned, by_rows
from flexgen_jax.cpu.jit.matmul_codes_steps import APART, BLOCK, DEPTH, ROWS, dots, round_rows
from flexgen_jax.cpu.jit.matmul_packed import AHEAD
from flexgen_jax.cpu.jit.packing import PAIR, STEP, give_rows, single
from flexgen_jax.cpu.jit.packing_int8 import MAGNITUDE
from flexgen_jax.layers import matmul_int8
from flexgen_jax.layers.matmul_int8 import OUTLIER_BITS
from flexgen_jax.models.formats.storage import GROUP_SIZE

SOURCE = matmul_packed.SOURCE + source_of(
    __file__, matmul_codes_steps.__file__, packing_int8.__file__, matmul_int8.__file__
)
"""A checksum of the code that these products are made from; see `decode_attention.SOURCE`."""

ONE, TWO, MORE = (4, 1), (2, 2), (1, 4)
"""Rows of bytes, and rows of x, that are multiplied at a time, where x has one row, two, and more:
their sums take half of the registers."""


def codes_of(bits: int) -> Any:
    """Returns the function that does with integers what that of `matmul_packed.packed_of` does, for
    any number of rows."""
    return by_rows(partial(_blocks_of, bits), ONE, TWO, MORE)


def _blocks_of(bits: int, wide: int, many: int) -> Any:
    """Returns the function that multiplies `many` rows by the codes of `wide` rows of bytes at a
    time, `ROWS` rows by a group's codes, `DEPTH` elements of each."""

    @called
    def multiply(rows, kernel, length, bias, out, shape, start, end):
        depth, planes = shape[1], 8 // bits
        height, panels = min(depth, DEPTH), planes * many
        unit = GROUP_SIZE if length % GROUP_SIZE == 0 else PAIR
        ahead = wide * depth * max(1, AHEAD // (wide * depth))
        left = aligned(panels * height, np.int8)
        scales = np.empty(-(-height // BLOCK) * panels, np.float32)
        rests = np.empty(panels, np.float32)
        sides = aligned(planes * height, np.float32), aligned(planes * height, np.float32)
        tall = -(-min(ROWS, shape[0]) // many) * many
        x = aligned(tall * depth, np.uint16)
        sums = np.zeros(-(-tall // PAIR) * planes * APART, np.float32)
        for above in range(0, shape[0], ROWS):
            count, first = min(ROWS, shape[0] - above), start
            outliers = take_rows_apart(rows, above, count, depth, x)
            while first < end:
                stop = min((first // unit + 1) * unit, end)
                for top in range(0, depth, height):
                    size = min(height, depth - top)
                    widen_sides(kernel, length, shape, top, size, first, sides, bits)
                    for row in range(0, count, many):
                        part = (row, top, size, depth)
                        fold(x, part, sides, left, scales, rests, bits, many)
                        base = row // PAIR * planes * APART + inside_tile(row)
                        for byte in range(first, stop, wide):
                            begin = byte * depth + top
                            dots(
                                left,
                                kernel[0],
                                begin,
                                depth,
                                size // STEP,
                                scales,
                                rests,
                                sums,
                                base + inside(byte - first),
                                APART,
                                top > 0,
                                begin + ahead,
                                bits,
                                wide,
                                many,
                            )
                    add_outliers(
                        outliers, kernel[0], sides, (top, size, depth), first, stop, sums, bits
                    )
                give_planes(sums, bias, out, shape, length, above, count, first, stop, planes)
                first = stop

    return multiply


@njit(inline="always")
def take_rows_apart(rows, above, count, depth, x):
    """Copies `count` rows from `above` on to x, with outliers as 0; returns the outliers' rows,
    from `above` on, their places, and themselves."""
    number = 0
    for index in range(count * depth):
        bits = rows[above * depth + index]
        is_apart = (bits & MAGNITUDE) >= OUTLIER_BITS
        number += is_apart
        x[index] = np.uint16(0) if is_apart else bits
    x[count * depth :] = 0
    where, values = np.empty((number, 2), np.int64), np.empty(number, np.float32)
    taken = 0
    for index in range(count * depth if number else 0):
        bits = rows[above * depth + index]
        if (bits & MAGNITUDE) >= OUTLIER_BITS:
            where[taken, 0], where[taken, 1] = index // depth, index % depth
            values[taken] = single(bits)
            taken += 1
    return where, values


@njit(inline="always")
def widen_sides(kernel, length, shape, top, size, first, sides, bits):
    """Writes the scales of the groups in all planes to sides[0], and what the middle code stands
    for to sides[1], both fp32 [plane, element]; first: the first row of bytes."""
    _, scale, least = kernel
    _, depth, columns = shape
    middle = np.float32(1 << (bits - 1))
    for plane in range(8 // bits):
        group = min(plane * length + first, columns - 1) // GROUP_SIZE * depth + top
        for place in range(size):
            step = single(scale[group + place])
            sides[0][plane * size + place] = step
            sides[1][plane * size + place] = single(least[group + place]) + middle * step


@njit(inline="always")
def fold(x, part, sides, left, scales, rests, bits, many):
    """Rounds `many` rows times the scales of the groups in all planes.

    part: the first row, the first element, how many, and how many a row has.
    """
    row, top, size, depth = part
    panels = 8 // bits * many
    rests[:] = 0
    for panel in range(0, panels, many):
        for step in range(0, size, BLOCK):
            round_rows(
                x,
                row * depth + top + step,
                depth,
                sides[0],
                sides[1],
                panel // many * size + step,
                min(BLOCK, size - step),
                left,
                step * panels + panel * STEP,
                scales,
                step // BLOCK * panels + panel,
                rests,
                panel,
                bits,
                many,
            )


@njit(inline="always")
def inside_tile(row):
    """Returns where the sums of a row of a pair of tiles begin."""
    return row % PAIR // LANES * PAIR * LANES + row % LANES * LANES


@njit(inline="always")
def inside(column):
    """Returns where the sums of a column of a group are, of one row."""
    return column // PAIR * PAIR * PAIR + column % PAIR // LANES * LANES * LANES + column % LANES


@njit(inline="always")
def add_outliers(outliers, codes, sides, part, first, stop, sums, bits):
    """Adds the products of outliers and the weights whose codes are in the rows of bytes from first
    to stop; part: the first element, how many, and how many a row has."""
    (where, values), (top, size, depth) = outliers, part
    planes, levels, middle = 8 // bits, (1 << bits) - 1, 1 << (bits - 1)
    for number in range(values.size):
        row, place = where[number]
        if top <= place < top + size:
            for plane in range(planes):
                at = plane * size + place - top
                step, other = sides[0][at], sides[1][at]
                to = (row // PAIR * planes + plane) * APART + inside_tile(row)
                for byte in range(first, stop):
                    code = codes[byte * depth + place] >> (bits * plane) & levels
                    weight = other + step * np.float32(code - middle)
                    sums[to + inside(byte - first)] += values[number] * weight


@njit(inline="always")
def give_planes(sums, bias, out, shape, length, above, count, first, stop, planes):
    """Writes the results of `count` rows from `above` on to out, for the columns whose codes are in
    the rows of bytes from first to stop."""
    columns = shape[2]
    for row in range(0, count, PAIR):
        for plane in range(planes):
            for byte in range(first, stop, PAIR):
                column = plane * length + byte
                if column < columns:
                    at = (row // PAIR * planes + plane) * APART + inside(byte - first)
                    begin, some = (above + row) * columns + column, min(PAIR, count - row)
                    give_rows(sums[at:], 1, bias, column, out, begin, columns, some, False)
