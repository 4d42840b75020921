"""Products of 8-bit integers on CPUs that have AMX or AVX-512 for them, compiled by Numba.

They compute what `layers.matmul_int8` does, with the loops and the memory of `matmul_blocked`.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from flexgen_jax.cpu.jit import matmul_blocked, packing_int8
from flexgen_jax.cpu.jit.code_cache import source_of
from flexgen_jax.cpu.jit.matmul_blocked import COLUMNS, DEPTH, LINE, add_panel, aligned
from flexgen_jax.cpu.jit.matmul_inner import (
    configure,
    multiply_integers,
    multiply_tiles,
    release,
)
from flexgen_jax.cpu.jit.packing import PAIR, STEP, give_rows, take_columns
from flexgen_jax.cpu.jit.packing_int8 import (
    round_row,
    scale_sums,
    take_integers,
    take_outliers,
)
from flexgen_jax.layers import matmul_int8

SOURCE = matmul_blocked.SOURCE + source_of(__file__, packing_int8.__file__, matmul_int8.__file__)
"""A checksum of the code that these products are made from; see `decode_attention.SOURCE`."""

CHUNK = 512
"""Words of two integers that are summed while a panel is in the first cache.

This is twice the `CHUNK` of `matmul_blocked`, so that sums are loaded and stored half as often.
"""


@njit(inline="always")
def round_panel(x, shape, panel, codes, scale, totals, flags):
    """Rounds the `PAIR` rows of a panel of x, bfloat16 [count, depth], to codes, int8 [count,
    depth].

    Also writes the rows' scales, fp32 [count], and the sums of their codes to totals, int32
    [count], and flags the columns with outliers, uint8 [panel, depth].
    """
    count, depth = shape
    flags[panel * depth : (panel + 1) * depth] = 0
    for row in range(panel * PAIR, min((panel + 1) * PAIR, count)):
        scale[row] = round_row(x, row * depth, depth, codes, flags, panel * depth, totals, row)


@njit(inline="always")
def outlier_steps(flags):
    """Returns the steps of `STEP` elements of which at least one is flagged; int64 [step]."""
    steps = np.empty(flags.size // STEP, np.int64)
    count = 0
    for step in range(steps.size):
        if flags[step * STEP : (step + 1) * STEP].any():
            steps[count] = step
            count += 1
    return steps[:count]


@njit(inline="always")
def multiply_rounded(rows, kernel, length, bias, outliers, out, shape, start, end, bits, by_amx):
    """Computes out = rows @ kernel.T + bias for the columns from start to end, multiples of `PAIR`.

    rows: int8 [count, depth] as words of two, their scales, fp32 [count], and sums, int32 [count],
    and the scales of the kernel weights' columns, fp32 [columns]; outliers: the rows before
    rounding, bfloat16 [count, depth] as bits, and flags of their columns with outliers, uint8
    [depth]. kernel, length, bias, out, shape, bits, by_amx: as for
    `matmul_blocked.columns_of`, with depth a multiple of 2 * `STEP`. All arrays are flat.
    """
    codes, row_scale, totals, scale = rows
    x, flags = outliers
    count, depth, columns = shape
    words = depth // 2
    width = COLUMNS if end - start >= COLUMNS else COLUMNS // 2
    height = COLUMNS * DEPTH // width
    apart = outlier_steps(flags)
    block, pair_sums = width // PAIR, PAIR * PAIR
    deep = words > height or apart.size > 0
    panels = -(-count // PAIR) if deep else 1
    most = max(min(words, height), min(apart.size * STEP, CHUNK))
    packed = aligned(width * most, np.uint16)
    panel = aligned(PAIR * CHUNK, np.uint16)
    sums = aligned(panels * block * pair_sums, np.float32)
    panel[:] = 0
    is_aligned = out.ctypes.data % LINE == 0
    configure(by_amx)
    for first in range(start, end, width):
        pairs = min(width, end - first) // PAIR
        for top in range(0, words, height):
            steps = min(height, words - top) // STEP
            for pair in range(pairs):
                column, at = first + pair * PAIR, pair * steps * PAIR * STEP
                take_integers(
                    kernel, scale, column, 2 * top, depth, length, steps, packed, at, bits, by_amx
                )
            for row in range(0, count, PAIR):
                some = min(PAIR, count - row)
                at = row // PAIR * block * pair_sums if deep else 0
                after = at + block * pair_sums if deep else 0
                part, where = (top, steps, CHUNK // STEP), (row, some, words)
                add_panel(
                    multiply_integers,
                    codes,
                    where,
                    part,
                    panel,
                    packed,
                    pairs,
                    sums,
                    at,
                    after,
                    by_amx,
                )
                if top + height >= words:
                    scale_sums(sums, at, pairs, row_scale, totals, row, scale, first, some, by_amx)
                    if apart.size == 0:
                        begin = row * columns + first
                        give_rows(
                            sums[at:], pairs, bias, first, out, begin, columns, some, is_aligned
                        )
        for begin in range(0, apart.size, CHUNK // STEP):
            some_steps = apart[begin : begin + CHUNK // STEP]
            steps = some_steps.size
            for pair in range(pairs):
                for step in range(steps):
                    column, at = first + pair * PAIR, (pair * steps + step) * PAIR * STEP
                    top = some_steps[step] * STEP
                    take_columns(kernel, column, top, depth, length, 1, packed, at, bits)
            for row in range(0, count, PAIR):
                some = min(PAIR, count - row)
                for step in range(steps):
                    source = row * depth + some_steps[step] * STEP
                    take_outliers(x, source, depth, some, panel, step)
                for pair in range(pairs):
                    to = (row // PAIR * block + pair) * pair_sums
                    where = pair * steps * PAIR * STEP
                    multiply_tiles(
                        panel, packed, where, sums, to, to, steps, True, some, x, 0, 0, by_amx
                    )
        if apart.size > 0:
            for row in range(0, count, PAIR):
                at, begin = row // PAIR * block * pair_sums, row * columns + first
                some = min(PAIR, count - row)
                give_rows(sums[at:], pairs, bias, first, out, begin, columns, some, is_aligned)
    release(by_amx)
