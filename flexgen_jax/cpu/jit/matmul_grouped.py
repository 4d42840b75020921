"""Products with kernel weights that are grouped along their input, compiled by Numba.

A weight is `scale * level + offset`, with one scale and one offset for each step of 32 elements. So

    sum over k of x[k] weight[k]  =  sum over steps of  scale * (sum of x[k] level[k])
                                                        + offset * (sum of x[k])

Few rows multiply levels as they come out of a table, one step after the other, and nothing is
unpacked in memory; the sums of x in a step are made once for all columns. For many rows the weights
are unpacked into the tiles of `matmul_blocked`.

A byte has the codes of elements half a row apart (see `models/formats/format.py`), so one load
serves two steps.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils as untyped
from numba.extending import intrinsic

from flexgen_jax.cpu.jit import grouped_factors, matmul_packed
from flexgen_jax.cpu.jit.code_cache import called, source_of
from flexgen_jax.cpu.jit.levels_ir import levels_of, pairs_of_levels
from flexgen_jax.cpu.jit.llvm import INT, LANES, SECOND_CACHE, arrays_of, filled
from flexgen_jax.cpu.jit.matmul_blocked import aligned, by_rows
from flexgen_jax.cpu.jit.matmul_inner import added, multiplied
from flexgen_jax.cpu.jit.matmul_small_batch import give_sums, lay, loaded_step
from flexgen_jax.cpu.jit.packing import (
    BYTE,
    FLOATS,
    HALVES,
    PAIR,
    STEP,
    N,
    PlainKernel,
    Tiles,
    emitted,
    is_wide,
    joined_words,
    single,
    store_columns,
)
from flexgen_jax.cpu.processor import has_wide_vectors

cgutils: Any = untyped

SOURCE = matmul_packed.SOURCE + source_of(__file__, grouped_factors.__file__)
"""A checksum of the code that these products are made from; see `decode_attention.SOURCE`."""

ONE, TWO, MORE = ((4, 1), (4, 2), (2, 4)) if has_wide_vectors() else ((1, 1), (1, 2), (1, 4))
"""Columns, and rows of x, that are multiplied at a time, where x has one row, two, and more."""

AHEAD = 1 << 12
"""About how many bytes ahead codes are prefetched."""


def _dots(
    _context,
    left,
    row,
    pitch,
    codes,
    begin,
    apart,
    plane,
    scales,
    offsets,
    sums,
    factors,
    lanes,
    at,
    bits,
    kind,
    wide,
    many,
):
    kinds = (left, N, N, codes, N, N, N, scales, offsets, sums, N, lanes, N, bits, kind, wide, many)
    return types.void(*kinds), emitted(_emit_dots, constants=4)


def _emit_dots(
    tiles: Tiles,
    bits: int,
    kind: int,
    wide: int,
    many: int,
    left: Any,
    row: Any,
    pitch: Any,
    codes: Any,
    begin: Any,
    apart: Any,
    plane: Any,
    scales: Any,
    offsets: Any,
    sums: Any,
    factors: Any,
    lanes: Any,
    at: Any,
) -> None:
    builder, floats = tiles.builder, is_wide(left)
    totals = [cgutils.alloca_once_value(builder, filled(FLOATS, 0)) for _ in range(wide * many)]
    for total in totals:
        builder.store(filled(FLOATS, 0), total)
    steps = builder.udiv(plane, tiles.index(STEP))
    with tiles.loop(steps) as (step, _):
        columns = []
        for column in range(wide):
            where = tiles.at(begin, (column, apart), (step, STEP))
            tiles.ask(tiles.place(codes, tiles.at(where, AHEAD), BYTE), SECOND_CACHE)
            if floats:
                stored = builder.load(tiles.place(codes, where, HALVES), align=1)
                shifts = [ir.Constant(INT, shift) for shift in range(0, 8, bits)]
                columns.append([levels_of(tiles, stored, shift, bits, kind) for shift in shifts])
            else:
                columns.append(pairs_of_levels(tiles, codes, where, bits, kind))
        for part in range(8 // bits):
            number = tiles.at((steps, part), step)
            own = [
                tiles.spread(
                    builder.load(builder.gep(scales.data, [tiles.at((column, factors), number)])),
                    LANES,
                )
                for column in range(wide)
            ]
            for line in range(many):
                place = tiles.at((tiles.at(row, line), pitch), (plane, part), (step, STEP))
                x = loaded_step(tiles, left, place, floats)
                for column in range(wide):
                    product = filled(FLOATS, 0)
                    vectors = columns[column][part]
                    for n, vector in enumerate(vectors):
                        product = multiplied(tiles, product, vector, x[n if floats else 0])
                    total = totals[line * wide + column]
                    builder.store(added(tiles, builder.load(total), product, own[column]), total)
    with tiles.loop(builder.udiv(factors, tiles.index(LANES))) as (part, _):
        for line in range(many):
            place = tiles.at((tiles.at(row, line), factors), (part, LANES))
            x = builder.load(tiles.place(sums, place, FLOATS), align=4)
            for column in range(wide):
                place = tiles.at((column, factors), (part, LANES))
                offset = builder.load(tiles.place(offsets, place, FLOATS), align=4)
                total = totals[line * wide + column]
                builder.store(added(tiles, builder.load(total), x, offset), total)
    for number, total in enumerate(totals):
        place = tiles.place(lanes, tiles.at(at, number * LANES), FLOATS)
        builder.store(builder.load(total), place, align=4)


class GroupedKernel(PlainKernel):
    """Emits loads of rows of kernel weights that are grouped along their input, unpacked on the way
    in registers.

    begin: of the bytes of the first step; pitch: of a row's bytes; scales, offsets: fp32 [row,
    factors] from the step `first` on; shift: of the plane's codes in a byte.
    """

    def __init__(
        self,
        tiles: Tiles,
        codes: Any,
        begin: Any,
        pitch: Any,
        sides: list[Any],
        factors: Any,
        first: Any,
        shift: Any,
        bits: int,
        kind: int,
    ) -> None:
        super().__init__(tiles, codes, begin, pitch)
        self._sides, self._factors, self._first = sides, factors, first
        self._shift, self._bits, self._kind = shift, bits, kind

    def rows(self, tile: Any, step: Any) -> list[Any]:
        tiles, builder, rows = self._tiles, self._tiles.builder, []
        shift = builder.trunc(self._shift, INT)
        for number, stored in enumerate(self._loaded(tile, step, HALVES, 1)):
            where = tiles.at((tiles.at((tile, LANES), number), self._factors), self._first, step)
            scale, offset = (
                tiles.spread(builder.load(builder.gep(side.data, [where])), LANES)
                for side in self._sides
            )
            levels = levels_of(tiles, stored, shift, self._bits, self._kind)
            halves = [added(tiles, offset, level, scale) for level in levels]
            rows.append(joined_words(tiles, halves))
        return rows


def _columns(
    _context,
    codes,
    begin,
    pitch,
    scales,
    offsets,
    factors,
    first,
    shift,
    steps,
    packed,
    at,
    bits,
    kind,
):
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        tiles = Tiles(builder)
        bits, kind = (x.literal_value for x in signature.args[-2:])
        values = arrays_of(context, builder, signature.args[:-2], arguments[:-2])
        codes, begin, pitch, scales, offsets, factors, first, shift, steps, packed, at = values
        sides = [scales, offsets]
        kernel = GroupedKernel(tiles, codes, begin, pitch, sides, factors, first, shift, bits, kind)
        store_columns(tiles, kernel, steps, packed, at)
        return context.get_dummy_value()

    kinds = (codes, N, N, scales, offsets, N, N, N, N, packed, N, bits, kind)
    return types.void(*kinds), generate


dots: Any = intrinsic(prefer_literal=True)(_dots)
"""Intrinsic: the products of `many` rows from `row` on with `wide` columns, lane by lane.

left: [row][element], `pitch` elements a row, bfloat16 or fp32 as `lay` makes them; codes: rows of
bytes `apart` apart from `begin` on, with `plane` elements in a plane; scales, offsets: fp32
[column][factors]; sums: fp32 [row][factors], of each step of the rows; lanes: fp32 [row][column]
[lane], from `at` on. bits, kind, wide and many are compile-time constants.
"""

take_grouped_columns: Any = intrinsic(prefer_literal=True)(_columns)
"""Intrinsic: does what `packing.take_columns` does, for `steps` steps of one plane; see
`GroupedKernel`."""


@njit(inline="always")
def padded_count(depth):
    """Returns the number of steps of a row, rounded up to whole vectors."""
    return -(-depth // (STEP * LANES)) * LANES


@njit(inline="always")
def step_sums(rows, shape, height, factors):
    """Returns the sums of each step of the rows, bfloat16 as bits: fp32 [height][factors], with
    zeros beyond."""
    count, depth, _ = shape
    sums = np.zeros(height * factors, np.float32)
    for row in range(count):
        for step in range(depth // STEP):
            total = np.float32(0)
            for n in range(STEP):
                total += single(rows[row * depth + step * STEP + n])
            sums[row * factors + step] = total
    return sums


def multiplier_of(take: Any, middle: float, bits: int, levels: int, kind: Any) -> Any:
    """Returns the function that does what that of `matmul_blocked.columns_of` does for few rows.

    Its arguments: rows; kernel: the codes, with leaves and how many groups a row has, for `take`;
    elements of a plane; bias, out, shape, start, end. take: writes a row's scales and offsets, see
    `grouped_factors.factors_of`; levels: what codes stand for; kind: type of the rows.
    """
    return by_rows(partial(_streams_of, take, middle, bits, levels, kind), ONE, TWO, MORE)


def _streams_of(
    take: Any, middle: float, bits: int, levels: int, kind: Any, wide: int, many: int
) -> Any:
    """Returns the function that multiplies `many` rows by `wide` columns at a time."""

    @called
    def multiply(rows, kernel, plane, bias, out, shape, start, end):
        count, depth, _ = shape
        turns, factors, pitch = -(-count // many), padded_count(depth), depth * bits // 8
        left = aligned(turns * many * depth, kind)
        left[:] = 0
        for row in range(count):
            lay(rows, row * depth, depth // STEP, left, row * depth, STEP)
        sums = step_sums(rows, shape, turns * many, factors)
        scales, offsets = aligned(wide * factors, np.float32), aligned(wide * factors, np.float32)
        scales[:] = 0
        offsets[:] = 0
        lanes = aligned(PAIR * turns * many * LANES, np.float32)
        results = np.zeros(-(-count // PAIR) * PAIR * PAIR, np.float32)
        codes, (arrays, groups) = kernel
        for first in range(start, end, PAIR):
            for column in range(0, PAIR, wide):
                for n in range(wide):
                    take(arrays, first + column + n, groups, scales, offsets, n * factors, middle)
                for turn in range(turns):
                    dots(
                        left,
                        turn * many,
                        depth,
                        codes,
                        (first + column) * pitch,
                        pitch,
                        plane,
                        scales,
                        offsets,
                        sums,
                        factors,
                        lanes,
                        (column * turns + turn * wide) * many * LANES,
                        bits,
                        levels,
                        wide,
                        many,
                    )
            give_sums(lanes, results, bias, out, shape, first, wide, many)

    return multiply


def taker_of(take: Any, middle: float, bits: int, levels: int) -> Any:
    """Returns what that of `matmul_blocked.columns_of` takes columns by."""

    @njit(inline="always")
    def take_columns(kernel, column, top, depth, plane, steps, packed, at, _bits):
        codes, leaves, scales, offsets = kernel
        arrays, groups = leaves
        factors, pitch = padded_count(depth), depth * bits // 8
        for n in range(PAIR):
            take(arrays, column + n, groups, scales, offsets, n * factors, middle)
        done = 0
        while done < steps:  # plane by plane
            element = top + done * STEP
            number = element // plane
            some = min(steps - done, ((number + 1) * plane - element) // STEP)
            take_grouped_columns(
                codes,
                column * pitch + element - number * plane,
                pitch,
                scales,
                offsets,
                factors,
                element // STEP,
                number * bits,
                some,
                packed,
                at + done * 2 * LANES * STEP,
                bits,
                levels,
            )
            done += some

    return take_columns
