"""Products of many rows with a kernel on CPUs that have AMX, or AVX-512 with bfloat16, compiled by
Numba.

XLA's CPU backend reaches a tenth to a fifth of the 2.9 TFLOP/s a core that AMX can do. Here some
columns of the kernel at a time are turned into tiles that stay in the core's second cache, unpacked
on the way if need be, and the rows pass by, `PAIR` at a time, the next ones being fetched
meanwhile; results get their bias and are rounded on the way out, past the caches, in place of one
more pass in fp32.

A thread's own memory, 1 MiB of tiles and the sums of 512 columns of the result where depth is over
`DEPTH`, is less than the fp32 product that it replaces, which `workspace_bytes` counts.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from flexgen_jax.cpu.jit import llvm, matmul_inner, packing
from flexgen_jax.cpu.jit.decode_attention import source_of
from flexgen_jax.cpu.jit.matmul_inner import configure, multiply_tiles, release
from flexgen_jax.cpu.jit.packing import PAIR, STEP, give_rows, take_columns, take_rows
from flexgen_jax.models import storage

_FILES = (__file__, matmul_inner.__file__, packing.__file__, storage.__file__, llvm.__file__)
SOURCE = source_of(*_FILES)
"""See `host_kernels.SOURCE`."""

COLUMNS, DEPTH, CHUNK = 512, 1024, 256
"""Of the kernel's part that stays in the second cache, 1 MiB: columns of the result and elements
of their sums, or half and twice of them where there are not so many columns; and how many of these
are summed while a panel of the rows is in the first one."""

LINE = 64


@njit(inline="always")
def aligned(count, kind, width):
    """An array of so many elements of `width` bytes that begins with a cache line."""
    found = np.empty(count + LINE // width, kind)
    return found[(LINE - found.ctypes.data % LINE) % LINE // width :]


@njit(inline="always")
def add_panel(multiply, rows, where, part, panel, packed, pairs, sums, at, after, by_amx):
    """Adds a panel's product with a part of some columns, which is packed, to the sums from `at`
    on, by `multiply_tiles` or what has its arguments; meanwhile what comes next is fetched.

    where: the panel's first row, how many it has, and how far apart rows are; part: the first
    element, and steps in all and in a chunk; after: where the sums of the next panel begin.
    """
    row, count, pitch = where
    top, steps, chunk = part
    for step in range(0, steps, chunk):
        now = min(chunk, steps - step)
        take_rows(rows, row * pitch + top + step * STEP, pitch, count, now, panel)
        next_row, next_step, next_at = row, step + now, at
        if next_step == steps:
            next_row, next_step, next_at = row + PAIR, 0, after
        for pair in range(pairs):
            tile = (pair * steps + step) * PAIR * STEP
            to, adds = at + pair * PAIR * PAIR, top + step > 0
            soon = to + PAIR * PAIR if pair + 1 < pairs else next_at
            later = (next_row + pair * PAIR // pairs) * pitch + top + next_step * STEP
            multiply(
                panel, packed, tile, sums, to, soon, now, adds, count, rows, later, pitch, by_amx
            )


@njit(inline="always")
def multiply_columns(rows, kernel, length, bias, out, shape, start, end, bits, by_amx):
    """out = rows @ kernel.T + bias for the columns from start to end, which `PAIR` divides.

    rows: bfloat16 [count, depth] as bits; kernel, length: [columns, depth] as `take_columns` has
    it, `STEP` divides depth; bias: fp32 [columns]; out: [count, columns], bfloat16 or fp32; all
    flat. shape: count, depth and columns. bits: of the kernel, and by_amx: compile-time constants.
    """
    count, depth, columns = shape
    width = COLUMNS if end - start >= COLUMNS else COLUMNS // 2
    height = COLUMNS * DEPTH // width
    block, deep, pair_sums = width // PAIR, depth > height, PAIR * PAIR
    panels = -(-count // PAIR) if deep else 1
    packed = aligned(width * min(depth, height), np.uint16, 2)
    panel = aligned(PAIR * CHUNK, np.uint16, 2)
    sums = aligned(panels * block * pair_sums, np.float32, 4)
    panel[:] = 0
    is_aligned = out.ctypes.data % LINE == 0
    configure(by_amx)
    for first in range(start, end, width):
        pairs = min(width, end - first) // PAIR
        for top in range(0, depth, height):
            steps = min(height, depth - top) // STEP
            for pair in range(pairs):
                column, at = first + pair * PAIR, pair * steps * PAIR * STEP
                take_columns(kernel, column, top, depth, length, steps, packed, at, bits)
            for row in range(0, count, PAIR):
                some = min(PAIR, count - row)
                at = row // PAIR * block * pair_sums if deep else 0
                after = at + block * pair_sums if deep else 0
                part, where = (top, steps, CHUNK // STEP), (row, some, depth)
                add_panel(
                    multiply_tiles,
                    rows,
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
                if top + height >= depth:
                    begin = row * columns + first
                    give_rows(sums[at:], pairs, bias, first, out, begin, columns, some, is_aligned)
    release(by_amx)
