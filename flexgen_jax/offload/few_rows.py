"""Products of few rows with a kernel by AVX-512's products of pairs of bfloat16, compiled by Numba.

They take as long as the kernel takes to come from memory. So each thread reads its part of it from
one end to the other: two cores of AMD's Zen 5 read one such stream each at 35 to 41 GB/s together,
and 22 to 28 where they take four rows of 4 KiB at a time, or sixteen, as tiles need them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.core import cgutils as untyped
from numba.extending import intrinsic

from flexgen_jax.offload import product_kernels
from flexgen_jax.offload.host_kernels import source_of
from flexgen_jax.offload.product_kernels import aligned
from flexgen_jax.offload.tile_products import DOT, dot
from flexgen_jax.offload.tiles import BYTE, FLOATS, PAIR, STEP, WORDS, N, Tiles, give_rows
from flexgen_jax.offload.vectors import FIRST_CACHE, LANES, arrays_of, filled

cgutils: Any = untyped

SOURCE = product_kernels.SOURCE + source_of(__file__)
"""See `host_kernels.SOURCE`."""

MOST = 8
"""Rows, whose elements are read again for each of the kernel's, from the caches."""

AHEAD = 1024
"""Elements of the kernel that are asked for before they are needed, since processors do not look
beyond a page."""


def _dots(_context, left, pitch, kernel, begin, depth, sums, at, many):
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values = arrays_of(context, builder, signature.args[:-1], arguments[:-1])
        _emit(many.literal_value, Tiles(builder), *values)
        return context.get_dummy_value()

    return types.void(left, N, kernel, N, N, sums, N, many), generate


def _emit(
    many: int,
    tiles: Tiles,
    left: Any,
    pitch: Any,
    kernel: Any,
    begin: Any,
    depth: Any,
    sums: Any,
    at: Any,
) -> None:
    builder = tiles.builder
    found = [cgutils.alloca_once_value(builder, filled(FLOATS, 0)) for _ in range(many)]
    for own in found:
        builder.store(filled(FLOATS, 0), own)
    with tiles.loop(builder.udiv(depth, tiles.index(STEP))) as (step, _):
        place = tiles.at(begin, (step, STEP))
        tiles.ask(tiles.place(kernel, tiles.at(place, AHEAD), BYTE), FIRST_CACHE)
        column = builder.load(tiles.place(kernel, place, WORDS), align=2)
        for row, own in enumerate(found):
            place = tiles.place(left, tiles.at((row, pitch), (step, STEP)), WORDS)
            words = builder.load(place, align=2)
            builder.store(dot(tiles, DOT, builder.load(own), column, words), own)
    for row, own in enumerate(found):
        total = tiles.sum_lanes(builder.load(own))
        builder.store(total, builder.gep(sums.data, [tiles.at(at, row * LANES)]))


dots: Any = intrinsic(prefer_literal=True)(_dots)
"""The products of `many` rows of left, `pitch` apart, and a row of the kernel, which has `depth`
elements from `begin` on, to sums, from `at` on and `LANES` apart; many: a compile-time constant."""


@njit(inline="always")
def multiply_few(rows, kernel, bias, out, shape, start, end):
    """`product_kernels.multiply_columns` for at most `MOST` rows and a kernel in 16 bits."""
    count, depth, columns = shape
    many = 1
    while many < count:
        many *= 2
    pitch = depth + STEP  # else lines of all rows would be in a few of the cache's sets
    left = aligned(many * pitch, np.uint16, 2)
    left[:] = 0
    for row in range(count):
        left[row * pitch : row * pitch + depth] = rows[row * depth : (row + 1) * depth]
    sums = np.zeros(PAIR * PAIR, np.float32)
    for first in range(start, end, PAIR):
        for column in range(PAIR):
            begin = (first + column) * depth
            at = column // LANES * LANES * LANES + column % LANES
            if many == 1:
                dots(left, pitch, kernel, begin, depth, sums, at, 1)
            elif many == 2:
                dots(left, pitch, kernel, begin, depth, sums, at, 2)
            elif many == 4:
                dots(left, pitch, kernel, begin, depth, sums, at, 4)
            else:
                dots(left, pitch, kernel, begin, depth, sums, at, 8)
        give_rows(sums, 1, bias, first, out, first, columns, count, False)
