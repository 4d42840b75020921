"""Products of up to `MOST` rows with a kernel by AVX-512's products of pairs of bfloat16, compiled
by Numba.

With so few they take about as long as the kernel takes to come from memory, so it is read as
processors fetch best: each thread takes its part from one end to the other. One or two rows are
multiplied by one row of the kernel at a time; more, `SIDE` at a time, by `SIDE` of the kernel's,
which are in the first cache while all pass by, as the next ones are fetched in their order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils as untyped
from numba.extending import intrinsic

from flexgen_jax.offload import product_kernels
from flexgen_jax.offload.host_kernels import source_of
from flexgen_jax.offload.product_kernels import aligned
from flexgen_jax.offload.tile_products import DOT, dot
from flexgen_jax.offload.tiles import BYTE, FLOATS, PAIR, STEP, WORDS, N, Tiles, emitted, give_rows
from flexgen_jax.offload.vectors import INT, LANES, SECOND_CACHE, arrays_of, filled

cgutils: Any = untyped

SOURCE = product_kernels.SOURCE + source_of(__file__)
"""See `host_kernels.SOURCE`."""

MOST = 64
SIDE = 4
"""Sums of its square are in half of the registers, and in one at the end."""
TWO = 2
"""Rows that wait for the kernel even if all their elements are read again for each of its own."""

DEPTH = 2048
"""Elements of `SIDE` rows of the kernel, and of as many to come, that are in the first cache."""

AHEAD = 1024
"""Elements of a row of the kernel that are asked for before they are needed, since processors do
not look beyond a page."""


def _dots(
    _context,
    left,
    first,
    kernel,
    begin,
    pitch,
    steps,
    sums,
    at,
    adds,
    soon,
    apart,
    some,
    wide,
    many,
):
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values = arrays_of(context, builder, signature.args[:-2], arguments[:-2])
        _emit(Tiles(builder), wide.literal_value, many.literal_value, *values)
        return context.get_dummy_value()

    kinds = (left, N, kernel, N, N, N, sums, N, types.boolean, N, N, N, wide, many)
    return types.void(*kinds), generate


def _emit(
    tiles: Tiles,
    wide: int,
    many: int,
    left: Any,
    first: Any,
    kernel: Any,
    begin: Any,
    pitch: Any,
    steps: Any,
    sums: Any,
    at: Any,
    adds: Any,
    soon: Any,
    by: Any,
    some: Any,
) -> None:
    builder = tiles.builder
    places = [tiles.place(sums, tiles.at(at, n * LANES), FLOATS) for n in range(wide * many)]
    found = [cgutils.alloca_once_value(builder, filled(FLOATS, 0)) for _ in places]
    with builder.if_else(adds) as (then, otherwise):
        with then:
            for own, place in zip(found, places, strict=True):
                builder.store(builder.load(place, align=4), own)
        with otherwise:
            for own in found:
                builder.store(filled(FLOATS, 0), own)
    with tiles.loop(steps) as (step, _):
        with tiles.loop(some) as (line, _):
            place = tiles.at(soon, (line, by), (step, STEP))
            tiles.ask(tiles.place(kernel, place, BYTE), SECOND_CACHE)
        columns = []
        for column in range(wide):
            place = tiles.at(begin, (column, pitch), (step, STEP))
            columns.append(builder.load(tiles.place(kernel, place, WORDS), align=2))
        for row in range(many):
            place = tiles.at(first, (step, many * STEP), row * STEP)
            words = builder.load(tiles.place(left, place, WORDS), align=2)
            for own, column in zip(found[row * wide :], columns, strict=False):
                builder.store(dot(tiles, DOT, builder.load(own), column, words), own)
    for own, place in zip(found, places, strict=True):
        builder.store(builder.load(own), place, align=4)


def _totals(_context, sums, at, out, to, wide, many):
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums, at, out, to = arrays_of(context, builder, signature.args[:-2], arguments[:-2])
        tiles, width = Tiles(builder), wide.literal_value
        count = width * many.literal_value
        places = [tiles.place(sums, tiles.at(at, n * LANES), FLOATS) for n in range(count)]
        vectors = [builder.load(place, align=4) for place in places]
        total = _joined(tiles, vectors + [filled(FLOATS, 0)] * (LANES - count))
        for row in range(many.literal_value):
            lanes = _lanes(range(row * width, (row + 1) * width))
            some = builder.shuffle_vector(total, total, lanes)
            builder.store(some, tiles.place(out, tiles.at(to, row * LANES), some.type), align=4)
        return context.get_dummy_value()

    return types.void(sums, N, out, N, wide, many), generate


def _lanes(numbers: Iterable[int]) -> Any:
    """A shuffle's."""
    chosen = list(numbers)
    return ir.Constant(ir.VectorType(INT, len(chosen)), chosen)


def _joined(tiles: Tiles, vectors: list[Any]) -> Any:
    """A vector whose lanes are the sums of the lanes of each of these, `LANES` of them."""
    half = LANES
    while half > 1:
        half //= 2
        blocks = range(0, LANES, 2 * half)
        low = [side + b + n for b in blocks for side in (0, LANES) for n in range(half)]
        masks = [_lanes(low), _lanes(n + half for n in low)]
        pairs = zip(vectors[:half], vectors[half:], strict=True)
        vectors = [
            tiles.builder.fadd(*(tiles.builder.shuffle_vector(*pair, mask) for mask in masks))
            for pair in pairs
        ]
    return vectors[0]


def _lay(
    tiles: Tiles, rows: Any, begin: Any, steps: Any, left: Any, first: Any, apart: Any
) -> None:
    with tiles.loop(steps) as (step, _):
        source = tiles.place(rows, tiles.at(begin, (step, STEP)), WORDS)
        target = tiles.place(left, tiles.at(first, (step, apart)), WORDS)
        tiles.builder.store(tiles.builder.load(source, align=2), target, align=2)


def _laying(_context, rows, begin, steps, left, first, apart):
    return types.void(rows, N, N, left, N, N), emitted(_lay)


dots: Any = intrinsic(prefer_literal=True)(_dots)
"""Adds to sums the products of `many` rows, of which left has `steps` steps from `first` on, [step]
[row][32], with `wide` of the kernel's, `pitch` apart from `begin` on; or puts them there.

sums: fp32 [row][column][lane] from `at` on. Meanwhile `some` rows of the kernel, `by` elements
apart from `soon` on, are brought to the second cache. wide, many: compile-time constants.
"""

totals: Any = intrinsic(prefer_literal=True)(_totals)
"""Adds up the lanes of such sums: [row][column] from `to` on, rows `LANES` apart."""

lay: Any = intrinsic(_laying)
"""Copies steps of a row from `begin` on to left, `apart` from each other from `first` on."""


@njit(inline="always")
def multiply_few(rows, kernel, bias, out, shape, start, end):
    """`product_kernels.multiply_columns` for at most `MOST` rows and a kernel in 16 bits."""
    if shape[0] <= TWO:
        multiply_streams(rows, kernel, bias, out, shape, start, end, shape[1], 1, TWO)
    else:
        multiply_streams(rows, kernel, bias, out, shape, start, end, DEPTH, SIDE, SIDE)


@njit(inline="always")
def multiply_streams(rows, kernel, bias, out, shape, start, end, most, wide, many):
    """The same of `many` rows and `wide` columns at a time, and of so many elements at most."""
    count, depth, columns = shape
    turns, height, panels = -(-count // many), min(depth, most), -(-count // PAIR)
    left = aligned(turns * many * depth, np.uint16, 2)
    left[:] = 0
    for row in range(count):
        for top in range(0, depth, height):
            steps = min(height, depth - top) // STEP
            first = (top * turns + row // many * steps * STEP) * many + row % many * STEP
            lay(rows, row * depth + top, steps, left, first, many * STEP)
    each = many * wide * LANES
    lanes = aligned(PAIR // wide * turns * each, np.float32, 4)
    sums = np.zeros(panels * PAIR * PAIR, np.float32)
    for first in range(start, end, PAIR):
        for top in range(0, depth, height):
            steps, after = min(height, depth - top) // STEP, first * depth + top + height
            if top + height >= depth:
                after = (first + PAIR) * depth
            for column in range(0, PAIR, wide):
                begin = (first + column) * depth + top
                soon = begin + wide * depth if column + wide < PAIR else after
                if wide == 1:
                    soon = begin + AHEAD
                for turn in range(turns):
                    dots(
                        left,
                        (top * turns + turn * steps * STEP) * many,
                        kernel,
                        begin,
                        depth,
                        steps,
                        lanes,
                        (column // wide * turns + turn) * each,
                        top > 0,
                        soon + turn * depth,
                        turns * depth,
                        (wide - turn + turns - 1) // turns,
                        wide,
                        many,
                    )
        for column in range(0, PAIR, wide):
            inside = column // LANES * LANES * LANES + column % LANES
            for turn in range(turns):
                row = turn * many
                panel = row // PAIR * PAIR * PAIR + row % PAIR // LANES * PAIR * LANES
                to = panel + row % LANES * LANES + inside
                totals(lanes, (column // wide * turns + turn) * each, sums, to, wide, many)
        for row in range(0, count, PAIR):
            begin, some = row * columns + first, min(PAIR, count - row)
            give_rows(sums[row * PAIR :], 1, bias, first, out, begin, columns, some, False)
