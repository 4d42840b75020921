"""Products with kernel weights that are grouped along their input, compiled by Numba.

A weight is `scale * level + offset`, with one scale and one offset for each step of 32 elements, or
for half of it. So

    sum over k of x[k] weight[k]  =  sum over steps of  scale * (sum of x[k] level[k])
                                                        + offset * (sum of x[k])

Few rows multiply levels as they come out of a table, one step after the other, and nothing is
unpacked in memory; the sums of x in a step are made once for all columns. For many rows the weights
are unpacked into the tiles of `matmul_blocked`.

A byte has the codes of elements that are far apart (see `models/formats/format.py`), such as half a
row, so one load serves several steps.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils as untyped
from numba.extending import intrinsic

from flexgen_jax.cpu.jit import grouped_factors, grouped_factors_ir, matmul_packed
from flexgen_jax.cpu.jit.code_cache import called, source_of
from flexgen_jax.cpu.jit.levels_ir import (
    Parts,
    levels_of,
    loads_of,
    pairs_of_levels,
)
from flexgen_jax.cpu.jit.llvm import FLOAT, INT, LANES, arrays_of, filled
from flexgen_jax.cpu.jit.matmul_blocked import aligned, by_rows
from flexgen_jax.cpu.jit.matmul_inner import added, multiplied
from flexgen_jax.cpu.jit.matmul_small_batch import give_sums, lay, loaded_step
from flexgen_jax.cpu.jit.packing import (
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
from flexgen_jax.models.formats.format import WIDTHS

cgutils: Any = untyped

_FILES = (__file__, grouped_factors.__file__, grouped_factors_ir.__file__)
SOURCE = matmul_packed.SOURCE + source_of(*_FILES)
"""A checksum of the code that these products are made from; see `decode_attention.SOURCE`."""

ONE, TWO, MORE = ((4, 1), (4, 2), (2, 4)) if has_wide_vectors() else ((1, 1), (1, 2), (1, 4))
"""Columns, and rows of x, that are multiplied at a time, where x has one row, two, and more."""


def _dots(
    _context,
    left,
    row,
    pitch,
    low,
    high,
    column,
    plane,
    scales,
    offsets,
    sums,
    factors,
    lanes,
    at,
    bits,
    kind,
    unit,
    wide,
    many,
):
    kinds = (left, N, N, low, high, N, N, scales, offsets, sums, N, lanes, N)
    constants = (bits, kind, unit, wide, many)
    return types.void(*kinds, *constants), emitted(_emit_dots, constants=len(constants))


def _emit_dots(
    tiles: Tiles,
    bits: int,
    kind: int,
    unit: int,
    wide: int,
    many: int,
    left: Any,
    row: Any,
    pitch: Any,
    low: Any,
    high: Any,
    column: Any,
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
    arrays = (low, high)[: len(WIDTHS[bits])]
    steps = builder.udiv(plane, tiles.index(STEP))
    with tiles.loop(steps) as (step, _):
        parts = Parts(tiles, arrays, column, plane, step, bits)
        for part in parts.planes:
            number, shifts = tiles.at((steps, part), step), parts.shifts_of(part)
            levels, own = [], []
            for one in range(wide):
                stored = parts.bytes_of(one, part)
                if floats:
                    by = [ir.Constant(INT, shift) for shift in shifts]
                    levels.append(levels_of(tiles, stored, by, bits, kind))
                else:
                    levels.append(pairs_of_levels(tiles, stored, shifts, bits, kind))
                own.append(factor_of(tiles, scales, tiles.at((one, factors)), number, unit))
            for line in range(many):
                place = tiles.at((tiles.at(row, line), pitch), (plane, part), (step, STEP))
                x = loaded_step(tiles, left, place, floats)
                for one in range(wide):
                    product = filled(FLOATS, 0)
                    for n, vector in enumerate(levels[one]):
                        product = multiplied(tiles, product, vector, x[n if floats else 0])
                    total = totals[line * wide + one]
                    builder.store(added(tiles, builder.load(total), product, own[one]), total)
    with tiles.loop(builder.udiv(factors, tiles.index(LANES))) as (part, _):
        for line in range(many):
            place = tiles.at((tiles.at(row, line), factors), (part, LANES))
            x = builder.load(tiles.place(sums, place, FLOATS), align=4)
            for one in range(wide):
                place = tiles.at((one, factors), (part, LANES))
                offset = builder.load(tiles.place(offsets, place, FLOATS), align=4)
                total = totals[line * wide + one]
                builder.store(added(tiles, builder.load(total), x, offset), total)
    for number, total in enumerate(totals):
        place = tiles.place(lanes, tiles.at(at, number * LANES), FLOATS)
        builder.store(builder.load(total), place, align=4)


def factor_of(
    tiles: Tiles, array: Any, begin: Any, step: Any, unit: int, count: int = LANES
) -> Any:
    """Loads the factor of a step for `count` lanes, or its two factors for half of them each: lanes
    are of some elements each, in their order."""
    builder, each = tiles.builder, STEP // unit
    place = tiles.place(array, tiles.at(begin, (step, each)), ir.VectorType(FLOAT, each))
    pair = builder.load(place, align=4)
    lanes = [lane * each // count for lane in range(count)]
    return builder.shuffle_vector(pair, pair, ir.Constant(ir.VectorType(INT, count), lanes))


class GroupedKernel(PlainKernel):
    """Emits loads of rows of kernel weights that are grouped along their input, unpacked on the way
    in registers.

    parts: arrays of the parts of codes, where the first step begins in each of them, a row's bytes,
    and where its codes begin in a byte; scales, offsets: fp32 [row, factors] from the step `first`
    on.
    """

    def __init__(
        self,
        tiles: Tiles,
        parts: list[tuple[Any, Any, Any, Any]],
        sides: list[Any],
        factors: Any,
        first: Any,
        bits: int,
        kind: int,
        unit: int,
    ) -> None:
        array, begin, pitch, _ = parts[0]
        super().__init__(tiles, array, begin, pitch)
        self._parts = [PlainKernel(tiles, array, begin, pitch) for array, begin, pitch, _ in parts]
        self._shifts = [tiles.builder.trunc(shift, INT) for *_, shift in parts]
        self._sides, self._factors, self._first = sides, factors, first
        self._bits, self._kind, self._unit = bits, kind, unit

    def rows(self, tile: Any, step: Any) -> list[Any]:
        tiles, rows = self._tiles, []
        loaded = [part.loaded(tile, step, HALVES, 1) for part in self._parts]
        number = tiles.at(self._first, step)
        for row, stored in enumerate(zip(*loaded, strict=True)):
            begin = tiles.at((tiles.at((tile, LANES), row), self._factors))
            scale, offset = (
                factor_of(tiles, side, begin, number, self._unit) for side in self._sides
            )
            levels = levels_of(tiles, stored, self._shifts, self._bits, self._kind)
            rows.append(joined_words(tiles, [added(tiles, offset, x, scale) for x in levels]))
        return rows


def _columns(
    _context,
    low,
    high,
    column,
    plane,
    number,
    inside,
    scales,
    offsets,
    factors,
    first,
    steps,
    packed,
    at,
    bits,
    kind,
    unit,
):
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        tiles = Tiles(builder)
        bits, kind, unit = (x.literal_value for x in signature.args[-3:])
        values = arrays_of(context, builder, signature.args[:-3], arguments[:-3])
        low, high, column, plane, number, inside, *rest = values
        scales, offsets, factors, first, steps, packed, at = rest
        parts = []
        for array, width, loads in zip((low, high), WIDTHS[bits], loads_of(bits), strict=False):
            pitch, load = tiles.at((plane, loads)), builder.urem(number, tiles.index(loads))
            begin = tiles.at((column, pitch), (plane, load), inside)
            shift = tiles.at((builder.udiv(number, tiles.index(loads)), width))
            parts.append((array, begin, pitch, shift))
        sides = [scales, offsets]
        kernel = GroupedKernel(tiles, parts, sides, factors, first, bits, kind, unit)
        store_columns(tiles, kernel, steps, packed, at)
        return context.get_dummy_value()

    kinds = (low, high, N, N, N, N, scales, offsets, N, N, N, packed, N, bits, kind, unit)
    return types.void(*kinds), generate


dots: Any = intrinsic(prefer_literal=True)(_dots)
"""Intrinsic: the products of `many` rows from `row` on with `wide` columns, lane by lane.

left: [row][element], `pitch` elements a row, bfloat16 or fp32 as `lay` makes them; low, high: the
parts of codes, with `plane` elements in a plane, where codes of one part do not look at high;
scales, offsets: fp32 [column][factors], one for each `unit` elements; sums: fp32 [row][factors], of
as many elements of the rows; lanes: fp32 [row][column][lane], from `at` on. bits, kind, unit, wide
and many are compile-time constants.
"""

take_grouped_columns: Any = intrinsic(prefer_literal=True)(_columns)
"""Intrinsic: does what `packing.take_columns` does, for `steps` steps of the plane `number`, from
its element `inside` on; see `GroupedKernel`."""


@njit(inline="always")
def padded_count(depth, unit=STEP):
    """Returns the number of factors of a row, rounded up to whole vectors."""
    return -(-depth // (unit * LANES)) * LANES


@njit(inline="always")
def sums_of(rows, shape, height, factors, unit):
    """Returns the sums of each `unit` elements of the rows, bfloat16 as bits: fp32 [height]
    [factors], with zeros beyond."""
    count, depth, _ = shape
    sums = np.zeros(height * factors, np.float32)
    for row in range(count):
        for number in range(depth // unit):
            total = np.float32(0)
            for n in range(unit):
                total += single(rows[row * depth + number * unit + n])
            sums[row * factors + number] = total
    return sums


def multiplier_of(take: Any, middle: float, bits: int, levels: int, unit: int, kind: Any) -> Any:
    """Returns the function that does what that of `matmul_blocked.columns_of` does for few rows.

    Its arguments: rows; kernel: the parts of codes, and for `take` leaves and how many groups a row
    has; elements of a plane; bias, out, shape, start, end. take: writes a row's scales and offsets,
    see `grouped_factors.factors_of`; levels: what codes stand for; unit: elements that share a
    scale; kind: type of the rows.
    """
    return by_rows(partial(_streams_of, take, middle, bits, levels, unit, kind), ONE, TWO, MORE)


def _streams_of(
    take: Any, middle: float, bits: int, levels: int, unit: int, kind: Any, wide: int, many: int
) -> Any:
    """Returns the function that multiplies `many` rows by `wide` columns at a time."""

    @called
    def multiply(rows, kernel, plane, bias, out, shape, start, end):
        count, depth, _ = shape
        turns, factors = -(-count // many), padded_count(depth, unit)
        left = aligned(turns * many * depth, kind)
        left[:] = 0
        for row in range(count):
            lay(rows, row * depth, depth // STEP, left, row * depth, STEP)
        sums = sums_of(rows, shape, turns * many, factors, unit)
        scales, offsets = aligned(wide * factors, np.float32), aligned(wide * factors, np.float32)
        scales[:] = 0
        offsets[:] = 0
        lanes = aligned(PAIR * turns * many * LANES, np.float32)
        results = np.zeros(-(-count // PAIR) * PAIR * PAIR, np.float32)
        (low, high), (arrays, groups) = kernel
        for first in range(start, end, PAIR):
            for column in range(0, PAIR, wide):
                for n in range(wide):
                    take(arrays, first + column + n, groups, scales, offsets, n * factors, middle)
                for turn in range(turns):
                    dots(
                        left,
                        turn * many,
                        depth,
                        low,
                        high,
                        first + column,
                        plane,
                        scales,
                        offsets,
                        sums,
                        factors,
                        lanes,
                        (column * turns + turn * wide) * many * LANES,
                        bits,
                        levels,
                        unit,
                        wide,
                        many,
                    )
            give_sums(lanes, results, bias, out, shape, first, wide, many)

    return multiply


def taker_of(take: Any, middle: float, bits: int, levels: int, unit: int) -> Any:
    """Returns what that of `matmul_blocked.columns_of` takes columns by."""

    @njit(inline="always")
    def take_columns(kernel, column, top, depth, plane, steps, packed, at, _bits):
        (low, high), (arrays, groups), scales, offsets = kernel
        factors = padded_count(depth, unit)
        for n in range(PAIR):
            take(arrays, column + n, groups, scales, offsets, n * factors, middle)
        done = 0
        while done < steps:  # plane by plane
            element = top + done * STEP
            number = element // plane
            some = min(steps - done, ((number + 1) * plane - element) // STEP)
            take_grouped_columns(
                low,
                high,
                column,
                plane,
                number,
                element - number * plane,
                scales,
                offsets,
                factors,
                element // STEP,
                some,
                packed,
                at + done * 2 * LANES * STEP,
                bits,
                levels,
                unit,
            )
            done += some

    return take_columns
