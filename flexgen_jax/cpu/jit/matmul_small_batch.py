"""Products of up to `MOST` rows with plain kernel weights, by AVX-512's dot products of bfloat16
pairs or by products of fp32 vectors, compiled by Numba.

With so few rows, a product takes about as long as reading the kernel weights from memory. So they
are read as processors fetch best: each thread reads its part from one end to the other. One or two
rows are multiplied by one row of the kernel weights at a time. More rows are multiplied `SIDE` at a
time by `SIDE` rows of the kernel weights, of which `DEPTH` elements stay in the first cache while
all rows pass by; meanwhile the next ones are prefetched in their order. For packed kernel weights
see `matmul_packed`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils as untyped
from numba.extending import intrinsic

from flexgen_jax.cpu.jit import matmul_blocked
from flexgen_jax.cpu.jit.code_cache import called, source_of
from flexgen_jax.cpu.jit.llvm import FIRST_CACHE, INT, LANES, filled
from flexgen_jax.cpu.jit.matmul_blocked import aligned, by_rows
from flexgen_jax.cpu.jit.matmul_inner import begun, multiplied
from flexgen_jax.cpu.jit.packing import (
    BYTE,
    FLOATS,
    PAIR,
    STEP,
    WORDS,
    N,
    Tiles,
    emitted,
    give_rows,
    halves_of,
    is_wide,
    store_words,
)
from flexgen_jax.cpu.processor import has_wide_vectors

cgutils: Any = untyped

SOURCE = matmul_blocked.SOURCE + source_of(__file__)
"""A checksum of the code that these products are made from; see `decode_attention.SOURCE`."""

MOST = 64
SIDE = 4
"""Rows, and columns, multiplied at a time: their sums take half of the registers and, once their
lanes are added up, fill one."""

MOST_OF_FLOATS, SIDE_OF_FLOATS = 16, 4 if has_wide_vectors() else 2
"""The same where fp32 is multiplied: more rows are worth the tiles of `matmul_blocked`."""

DEPTH = 2048
"""Elements taken at a time: those of `SIDE` rows of the kernel weights and of `SIDE` other rows
together take 32 KiB."""

AHEAD = 1024
"""Distance in elements at which a row of the kernel weights is prefetched; processors do not look
beyond a page by themselves."""


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
    by,
    some,
    wide,
    many,
):
    kinds = (left, N, kernel, N, N, N, sums, N, types.boolean, N, N, N, wide, many)
    return types.void(*kinds), emitted(_emit, constants=2)


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
    slots = begun(tiles, places, adds)
    with tiles.loop(steps) as (step, _):
        if wide == 1:  # a loop would cost more than its body
            place = tiles.at(soon, (step, STEP))
            tiles.ask(tiles.place(kernel, place, BYTE), FIRST_CACHE)
        else:
            with tiles.loop(some) as (line, _):
                place = tiles.at(soon, (line, by), (step, STEP))
                tiles.ask(tiles.place(kernel, place, BYTE), FIRST_CACHE)
        columns = [
            loaded_step(tiles, kernel, place, is_wide(left))
            for place in (tiles.at(begin, (n, pitch), (step, STEP)) for n in range(wide))
        ]
        for row in range(many):
            place = tiles.at(first, (step, many * STEP), row * STEP)
            parts = loaded_step(tiles, left, place, is_wide(left))
            for own, column in zip(slots[row * wide :], columns, strict=False):
                total = builder.load(own)
                for one, other in zip(column, parts, strict=True):
                    total = multiplied(tiles, total, one, other)
                builder.store(total, own)
    for own, place in zip(slots, places, strict=True):
        builder.store(builder.load(own), place, align=4)


def loaded_step(tiles: Tiles, array: Any, at: Any, as_floats: bool) -> list[Any]:
    """Loads a step of a row: a vector of bfloat16 pairs, or its even and its odd elements as
    fp32, which an array of fp32 has one after the other."""
    kind = FLOATS if is_wide(array) else WORDS
    places = [tiles.place(array, tiles.at(at, part), kind) for part in range(0, STEP, LANES)]
    if is_wide(array):
        return [tiles.builder.load(place, align=2) for place in places]
    words = tiles.builder.load(places[0], align=2)
    return halves_of(tiles, words) if as_floats else [words]


def _totals(_context, sums, at, out, to, wide, many):
    return types.void(sums, N, out, N, wide, many), emitted(_emit_totals, constants=2)


def _emit_totals(tiles: Tiles, wide: int, many: int, sums: Any, at: Any, out: Any, to: Any) -> None:
    builder, count = tiles.builder, wide * many
    places = [tiles.place(sums, tiles.at(at, n * LANES), FLOATS) for n in range(count)]
    vectors = [builder.load(place, align=4) for place in places]
    total = _joined(tiles, vectors + [filled(FLOATS, 0)] * (LANES - count))
    for row in range(many):
        lanes = _lanes(range(row * wide, (row + 1) * wide))
        some = builder.shuffle_vector(total, total, lanes)
        builder.store(some, tiles.place(out, tiles.at(to, row * LANES), some.type), align=4)


def _lanes(numbers: Iterable[int]) -> Any:
    """Returns a mask for a vector shuffle."""
    chosen = list(numbers)
    return ir.Constant(ir.VectorType(INT, len(chosen)), chosen)


def _joined(tiles: Tiles, vectors: list[Any]) -> Any:
    """Returns a vector whose lane i is the sum of all lanes of the i-th of `LANES` vectors."""
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
        vector = tiles.builder.load(source, align=2)
        store_words(tiles, vector, left, tiles.at(first, (step, apart)))


def _laying(_context, rows, begin, steps, left, first, apart):
    return types.void(rows, N, N, left, N, N), emitted(_lay)


dots: Any = intrinsic(prefer_literal=True)(_dots)
"""Intrinsic: adds the products of `many` rows of left and `wide` rows of the kernel to sums, or
replaces sums by them where `adds` is false.

left: `steps` steps from `first` on, [step][row][32], bfloat16 as bits, or fp32 as `lay` makes it;
kernel: rows `pitch` apart from `begin` on;
sums: fp32 [row][column][lane] from `at` on. Meanwhile `some` rows of the kernel, `by` elements
apart from `soon` on (one row where `wide` is 1), are prefetched into the first cache. wide and many
are compile-time constants.
"""

totals: Any = intrinsic(prefer_literal=True)(_totals)
"""Intrinsic: adds up the lanes of the sums that `dots` makes, into [row][column] from `to` on, with
rows `LANES` apart."""

lay: Any = intrinsic(_laying)
"""Intrinsic: copies `steps` steps of a row, from `begin` on, to left, from `first` on and `apart`
elements from each other."""


def few_of(kind: Any, side: int) -> Any:
    """Returns the function that does what that of `matmul_blocked.columns_of` does, for at most
    `MOST` rows and 16-bit kernel weights; side: `SIDE` or `SIDE_OF_FLOATS`."""
    return by_rows(partial(_streams_of, kind), (1, 1), (1, 2), (side, side))


def _streams_of(kind: Any, wide: int, many: int) -> Any:
    """Returns the function that multiplies `many` rows by `wide` columns at a time: by one whole
    column, or by `DEPTH` elements of several."""

    @called
    def multiply(rows, kernel, _length, bias, out, shape, start, end):
        depth, turns = shape[1], -(-shape[0] // many)
        height = depth if wide == 1 else min(depth, DEPTH)
        left, lanes, sums = prepared(rows, shape, height, many, kind)
        for first in range(start, end, PAIR):
            for top in range(0, depth, height):
                after = first * depth + top + height
                if top + height >= depth:
                    after = (first + PAIR) * depth
                for column in range(0, PAIR, wide):
                    begin = (first + column) * depth + top
                    soon = begin + wide * depth if column + wide < PAIR else after
                    if wide == 1:
                        soon = begin + AHEAD
                    part = (top, min(height, depth - top) // STEP, column)
                    multiply_part(
                        left, kernel, begin, depth, lanes, part, turns, soon, wide, wide, many
                    )
            give_sums(lanes, sums, bias, out, shape, first, wide, many)

    return multiply


@njit(inline="always")
def prepared(rows, shape, height, many, kind):
    """Returns the rows in the layout of `dots`, and memory for the sums of `PAIR` columns.

    The three arrays: left, of type `kind`, with `height` elements of all rows before the next
    `height`; the lanes of the sums, fp32; and the sums as `give_rows` takes them, fp32.
    """
    count, depth, _ = shape
    turns = -(-count // many)
    left = aligned(turns * many * depth, kind)
    if count % many:
        left[:] = 0
    for row in range(count):
        for top in range(0, depth, height):
            steps = min(height, depth - top) // STEP
            first = (top * turns + row // many * steps * STEP) * many + row % many * STEP
            lay(rows, row * depth + top, steps, left, first, many * STEP)
    lanes = aligned(PAIR * turns * many * LANES, np.float32)
    return left, lanes, np.zeros(-(-count // PAIR) * PAIR * PAIR, np.float32)


@njit(inline="always")
def multiply_part(left, kernel, begin, pitch, lanes, part, turns, soon, ahead, wide, many):
    """Multiplies all rows by `wide` columns over some of their elements, by `dots`; meanwhile
    `ahead` rows of the kernel weights, `pitch` apart from `soon` on, are prefetched.

    part: the first element, the number of steps, and the first of these columns among `PAIR`.
    """
    top, steps, column = part
    for turn in range(turns):
        dots(
            left,
            (top * turns + turn * steps * STEP) * many,
            kernel,
            begin,
            pitch,
            steps,
            lanes,
            (column * turns + turn * wide) * many * LANES,
            top > 0,
            soon + turn * pitch,
            turns * pitch,
            (ahead - turn + turns - 1) // turns,
            wide,
            many,
        )


@njit(inline="always")
def give_sums(lanes, sums, bias, out, shape, first, wide, many):
    """Adds up the lanes of the sums of `PAIR` columns and writes the results of all rows to out."""
    count, _, columns = shape
    turns = -(-count // many)
    for column in range(0, PAIR, wide):
        inside = column // LANES * LANES * LANES + column % LANES
        for turn in range(turns):
            row = turn * many
            panel = row // PAIR * PAIR * PAIR + row % PAIR // LANES * PAIR * LANES
            to = panel + row % LANES * LANES + inside
            totals(lanes, (column * turns + turn * wide) * many * LANES, sums, to, wide, many)
    for row in range(0, count, PAIR):
        begin, some = row * columns + first, min(PAIR, count - row)
        give_rows(sums[row * PAIR :], 1, bias, first, out, begin, columns, some, False)
