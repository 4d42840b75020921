"""Products of few rows with packed kernel weights that are never unpacked, compiled by Numba.

Along the depth k, the weights of a group of `GROUP_SIZE` columns are minimum[k] + scale[k] * code.
So with a middle code c, which makes sums small,

    sum over k of x[k] weight[k]  =  sum of (x[k] scale[k]) (code - c)
                                     +  sum of x[k] (minimum[k] + c scale[k])

`fold` makes the brackets on the left and the sum on the right once for all columns of a group. Then
a column costs no more than reading its codes: with AVX-512's dot products of bfloat16 pairs, a
table turns codes into bfloat16, and x * scale is rounded to it where unpacking would round the
weights; as fp32, nothing is rounded. A byte is read once for all of its codes, which are of columns
a plane length apart; both halves of an 8-bit code go through tables, too.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numba import njit, types
from numba.core import cgutils as untyped
from numba.extending import intrinsic

from flexgen_jax.cpu.jit import levels_ir, matmul_small_batch
from flexgen_jax.cpu.jit.code_cache import called, source_of
from flexgen_jax.cpu.jit.levels_ir import INTEGERS, middle_of, pairs_of_levels
from flexgen_jax.cpu.jit.llvm import LANES, SECOND_CACHE, filled
from flexgen_jax.cpu.jit.matmul_blocked import aligned, by_rows
from flexgen_jax.cpu.jit.matmul_inner import added, begun, multiplied
from flexgen_jax.cpu.jit.matmul_small_batch import loaded_step, totals
from flexgen_jax.cpu.jit.packing import (
    BYTE,
    FLOATS,
    HALVES,
    PAIR,
    STEP,
    WORDS,
    N,
    Tiles,
    emitted,
    give_rows,
    halves_of,
    is_wide,
    joined_words,
    store_parts,
)
from flexgen_jax.cpu.processor import has_wide_vectors, multiplies_pairs
from flexgen_jax.models.formats.storage import GROUP_SIZE

cgutils: Any = untyped

SOURCE = matmul_small_batch.SOURCE + source_of(__file__, levels_ir.__file__)
"""A checksum of the code that these products are made from; see `decode_attention.SOURCE`."""

ONE, TWO, MORE = ((4, 1), (4, 2), (2, 4)) if has_wide_vectors() else ((2, 1), (1, 2), (1, 2))
"""Rows of bytes, and rows of x, that are multiplied at a time, where x has one row, two, and more:
their sums take at most half of the registers."""

MOST, MOST_BESIDE_AMX, MOST_OF_FLOATS = 32, 8, 16 if has_wide_vectors() else 8
"""Rows that are multiplied so, at most. With more, it takes less time to unpack the weights than to
look at their codes again for every few rows."""

AHEAD = 1 << 15
"""About how many bytes ahead codes are prefetched: enough for memory, and no more than the second
cache keeps until they are used."""

FOLDED = 4096
"""Elements of x times scale that stay in the first cache."""


def most_folded(unit: str) -> int:
    """Returns the most rows for which a unit leaves kernel weights packed."""
    if unit == "fma":
        return MOST_OF_FLOATS
    if unit == "amx":
        return MOST_BESIDE_AMX if multiplies_pairs() else 0
    return MOST


def _fold(
    _context,
    rows,
    row,
    last,
    top,
    pitch,
    scale,
    least,
    group,
    steps,
    left,
    at,
    sums,
    to,
    bits,
    many,
):
    kinds = (rows, N, N, N, N, scale, least, N, N, left, N, sums, N, bits, many)
    return types.void(*kinds), emitted(_emit_fold, constants=2)


def _emit_fold(
    tiles: Tiles,
    bits: int,
    many: int,
    rows: Any,
    row: Any,
    last: Any,
    top: Any,
    pitch: Any,
    scale: Any,
    least: Any,
    group: Any,
    steps: Any,
    left: Any,
    at: Any,
    sums: Any,
    to: Any,
) -> None:
    builder = tiles.builder
    middle = filled(FLOATS, 0 if is_wide(left) else middle_of(bits))
    slots = [cgutils.alloca_once_value(builder, filled(FLOATS, 0)) for _ in range(many)]
    begins = []
    for own in range(many):
        builder.store(filled(FLOATS, 0), slots[own])
        index = tiles.at(row, own)
        there = builder.icmp_signed("<", index, last)
        begins.append(tiles.at((builder.select(there, index, last), pitch), top))
    with tiles.loop(steps) as (step, _):
        inside = tiles.at(group, (step, STEP))
        scales, minima = (
            halves_of(tiles, builder.load(tiles.place(side, inside, WORDS), align=2))
            for side in (scale, least)
        )
        others = [added(tiles, z, s, middle) for s, z in zip(scales, minima, strict=True)]
        for own, begin in enumerate(begins):
            words = builder.load(tiles.place(rows, tiles.at(begin, (step, STEP)), WORDS), align=2)
            parts = halves_of(tiles, words)
            total = builder.load(slots[own])
            for part, other in zip(parts, others, strict=True):
                total = added(tiles, total, part, other)
            builder.store(total, slots[own])
            products = [builder.fmul(x, s) for x, s in zip(parts, scales, strict=True)]
            place = tiles.at(at, (step, 8 // bits * many * STEP), own * STEP)
            parts = products if is_wide(left) else [joined_words(tiles, products)]
            store_parts(tiles, parts, left, place)
    for own, total in enumerate(slots):
        target = tiles.place(sums, tiles.at(to, own * LANES), FLOATS)
        builder.store(builder.load(total), target, align=4)


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
    others,
    of,
    soon,
    bits,
    wide,
    many,
):
    kinds = (left, N, kernel, N, N, N, sums, N, types.boolean, others, N, N, bits, wide, many)
    return types.void(*kinds), emitted(_emit_dots, constants=3)


def _emit_dots(
    tiles: Tiles,
    bits: int,
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
    others: Any,
    of: Any,
    soon: Any,
) -> None:
    builder, panels = tiles.builder, 8 // bits * many
    places = [tiles.place(sums, tiles.at(at, n * LANES), FLOATS) for n in range(panels * wide)]
    slots = begun(tiles, places, adds)
    for panel in range(panels):
        other = builder.load(tiles.place(others, tiles.at(of, panel * LANES), FLOATS), align=4)
        for own in slots[panel * wide : (panel + 1) * wide]:
            builder.store(builder.fadd(builder.load(own), other), own)
    with tiles.loop(steps) as (step, _):
        columns = []
        for byte in range(wide):
            ahead = tiles.at(soon, (byte, pitch), (step, STEP))
            tiles.ask(tiles.place(kernel, ahead, BYTE), SECOND_CACHE)
            where = tiles.at(begin, (byte, pitch), (step, STEP))
            columns.append(_codes(tiles, kernel, where, bits, is_wide(left)))
        for panel in range(panels):
            inside = tiles.at(first, (step, panels * STEP), panel * STEP)
            parts = loaded_step(tiles, left, inside, is_wide(left))
            for own, column in zip(slots[panel * wide :], columns, strict=False):
                total = builder.load(own)
                for code, part in column[panel // many]:
                    total = multiplied(tiles, total, code, parts[part])
                builder.store(total, own)
    for own, place in zip(slots, places, strict=True):
        builder.store(builder.load(own), place, align=4)


def _codes(
    tiles: Tiles, kernel: Any, at: Any, bits: int, as_floats: bool
) -> list[list[tuple[Any, int]]]:
    """Loads a step of bytes; returns, for each column that they have codes of, vectors of codes,
    and which part of a step of the rows each of them is multiplied by."""
    if as_floats:
        return [
            [(tiles.builder.sitofp(half, FLOATS), number) for number, half in enumerate(halves)]
            for halves in _codes_in(tiles, kernel, at, bits)
        ]
    stored = tiles.builder.load(tiles.place(kernel, at, HALVES), align=1)
    return [
        [(vector, 0) for vector in pairs_of_levels(tiles, [stored], [shift], bits, INTEGERS)]
        for shift in range(0, 8, bits)
    ]


def _codes_in(tiles: Tiles, kernel: Any, at: Any, bits: int) -> list[list[Any]]:
    """Loads a step of bytes; returns for each of their codes those at even places, and those at odd
    ones, as words."""
    builder = tiles.builder
    stored = builder.load(tiles.place(kernel, at, HALVES), align=1)
    word, levels = builder.zext(stored, WORDS), filled(WORDS, (1 << bits) - 1)
    shifts = ([filled(WORDS, shift + n) for n in (0, 8)] for shift in range(0, 8, bits))
    return [[builder.and_(builder.lshr(word, by), levels) for by in pair] for pair in shifts]


fold: Any = intrinsic(prefer_literal=True)(_fold)
"""Intrinsic: multiplies `many` rows by the scales of a group.

rows: bfloat16 [row, element] as bits, with rows `pitch` elements apart, of which those from `row`
on are taken, and `last` in place of the rows after it; `steps` steps of each from element `top` on.
scale, least: the group's begin at `group`. Products go to left, from `at` on, [step][plane][row]
[32], of which this is one plane: bfloat16, or fp32 with a step's even elements before its odd ones.
Sums of the rows' elements times what is the same for all codes go to sums, fp32 [row][lane], from
`to` on. bits and many are compile-time constants.
"""

dots: Any = intrinsic(prefer_literal=True)(_dots)
"""Intrinsic: adds the products of `many` rows and the codes in `wide` rows of bytes to sums, or
replaces sums by them where `adds` is false; adds `others`, too.

left: `steps` steps as `fold` makes them, from `first` on; kernel: rows of bytes `pitch` apart from
`begin` on; sums: fp32 [plane][row][byte][lane] from `at` on; others: fp32 [plane][row][lane] from
`of` on. Meanwhile the bytes from `soon` on are prefetched into the second cache. bits, wide and
many are compile-time constants.
"""


def packed_of(bits: int, kind: Any) -> Any:
    """Returns the function that does for few rows what that of `matmul_blocked.columns_of` does,
    for the columns whose codes are in the rows of bytes from start to end, multiples of `PAIR`
    below `length`."""
    return by_rows(partial(_folded_of, bits, kind), ONE, TWO, MORE)


def _folded_of(bits: int, kind: Any, wide: int, many: int) -> Any:
    """Returns the function that multiplies `many` rows by the codes of `wide` rows of bytes at a
    time."""

    @called
    def multiply(rows, kernel, length, bias, out, shape, start, end):
        codes, scale, least = kernel
        count, depth, columns = shape
        planes, turns, height = 8 // bits, -(-count // many), min(depth, FOLDED // many)
        unit = GROUP_SIZE if length % GROUP_SIZE == 0 else PAIR
        ahead = wide * depth * max(1, AHEAD // (wide * depth))
        panels = planes * many
        left = aligned(turns * panels * height, kind)
        others = aligned(turns * panels * LANES, np.float32)
        lanes = aligned(GROUP_SIZE * turns * panels * LANES, np.float32)
        sums = np.zeros(-(-count // PAIR) * PAIR * PAIR, np.float32)
        first = start
        while first < end:
            stop = min((first // unit + 1) * unit, end)
            for top in range(0, depth, height):
                steps = min(height, depth - top) // STEP
                for turn in range(turns):
                    for plane in range(planes):
                        group = min(plane * length + first, columns - 1) // GROUP_SIZE
                        at = (turn * steps * panels + plane * many) * STEP
                        to = (turn * panels + plane * many) * LANES
                        fold(
                            rows,
                            turn * many,
                            count - 1,
                            top,
                            depth,
                            scale,
                            least,
                            group * depth + top,
                            steps,
                            left,
                            at,
                            others,
                            to,
                            bits,
                            many,
                        )
                for byte in range(first, stop, wide):
                    begin = byte * depth + top
                    for turn in range(turns):
                        dots(
                            left,
                            turn * steps * panels * STEP,
                            codes,
                            begin,
                            depth,
                            steps,
                            lanes,
                            ((byte - first) * turns + turn * wide) * panels * LANES,
                            top > 0,
                            others,
                            turn * panels * LANES,
                            begin + ahead,
                            bits,
                            wide,
                            many,
                        )
            for plane in range(planes):
                for byte in range(first, stop, PAIR):
                    column = plane * length + byte
                    if column < columns:
                        at = (byte - first) * turns * panels
                        give_plane(
                            lanes,
                            at * LANES,
                            plane,
                            sums,
                            bias,
                            out,
                            shape,
                            column,
                            planes,
                            wide,
                            many,
                        )
            first = stop

    return multiply


@njit(inline="always")
def give_plane(lanes, at, plane, sums, bias, out, shape, first, planes, wide, many):
    """Adds up the lanes of the sums of a plane's `PAIR` columns and writes the results of all rows
    to out."""
    count, _, columns = shape
    turns = -(-count // many)
    for column in range(0, PAIR, wide):
        inside = column // LANES * LANES * LANES + column % LANES
        for turn in range(turns):
            row = turn * many
            panel = row // PAIR * PAIR * PAIR + row % PAIR // LANES * PAIR * LANES
            to = panel + row % LANES * LANES + inside
            begin = ((column * turns + turn * wide) * planes + plane * wide) * many * LANES
            totals(lanes, at + begin, sums, to, wide, many)
    for row in range(0, count, PAIR):
        begin, some = row * columns + first, min(PAIR, count - row)
        give_rows(sums[row * PAIR :], 1, bias, first, out, begin, columns, some, False)
