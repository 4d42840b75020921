"""Products of many rows with kernel weights, by the units of `matmul_inner`, compiled by Numba.

XLA's CPU backend reaches only a part of what these units can do. Here some columns of the kernel
weights at a time are turned into tiles that stay in the core's second cache, unpacked on the way if
need be. The rows pass by, `PAIR` at a time, while the next ones are prefetched. Results get their
bias and are rounded on the way out, past the caches, which saves one more pass in fp32.

A thread's own memory is 1 MiB of tiles and, where depth is over `DEPTH`, the sums of 512 columns of
the result. That is less than the fp32 product that it replaces, which `workspace_bytes` counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from flexgen_jax.cpu import processor
from flexgen_jax.cpu.jit import llvm, matmul_inner, packing
from flexgen_jax.cpu.jit.code_cache import called, source_of
from flexgen_jax.cpu.jit.matmul_inner import configure, multiply_tiles, release
from flexgen_jax.cpu.jit.packing import PAIR, STEP, give_rows, take_rows
from flexgen_jax.models.formats import storage

_PARTS = (matmul_inner, packing, storage, llvm, processor)
_FILES = (__file__, *(str(part.__file__) for part in _PARTS))
SOURCE = source_of(*_FILES)
"""A checksum of the code that these products are made from; see `decode_attention.SOURCE`."""

COLUMNS, DEPTH, CHUNK = 512, 1024, 256
"""Sizes of the part of the kernel weights that stays in the second cache, 1 MiB: columns of the
result, and elements of their sums (half of the one and twice of the other where there are fewer
columns); and how many elements are summed while a panel of the rows is in the first cache."""

LINE = 64


@njit(inline="always")
def aligned(count, kind):
    """Returns an array of at least `count` elements that begins with a cache line."""
    memory = np.empty(count + LINE, kind)
    return memory[(LINE - memory.ctypes.data % LINE) % LINE // memory.itemsize :]


@njit(inline="always")
def add_panel(multiply, rows, where, part, panel, packed, pairs, sums, at, after, by_amx):
    """Adds the product of a panel of rows and a packed part of some columns to the sums from `at`
    on.

    multiply: `multiply_tiles` or a function with its arguments, which also prefetches what comes
    next; where: the panel's first row, how many rows it has, and how far apart they are; part: the
    first element, the steps in all, and the steps in a chunk; after: where the sums of the next
    panel begin.
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


def by_rows(streams_of: Callable[[int, int], Any], *sizes: tuple[int, int]) -> Any:
    """Returns the function that multiplies one row, two, or more; its arguments are those of
    `columns_of`.

    sizes: the columns and the rows that are multiplied at a time, for each of the three;
    streams_of: makes the function for so many.
    """
    one, two, more = (streams_of(*size) for size in sizes)

    @called
    def multiply(rows, kernel, length, bias, out, shape, start, end):
        if shape[0] == 1:
            one(rows, kernel, length, bias, out, shape, start, end)
        elif shape[0] == 2:
            two(rows, kernel, length, bias, out, shape, start, end)
        else:
            more(rows, kernel, length, bias, out, shape, start, end)

    return multiply


def columns_of(take: Any, bits: int, by_amx: bool, kind: Any) -> Any:
    """Returns the function that computes out = rows @ kernel.T + bias for the columns from start to
    end, multiples of `PAIR`.

    take: `packing.take_columns` or a function with its arguments; bits: of the kernel weights;
    kind: type of the tiles, np.float32 for the unit of fp32 vectors, else np.uint16.

    The function's arguments: rows, bfloat16 [count, depth] as bits; kernel, length: kernel weights
    [columns, depth], as `take` takes them, with depth a multiple of `STEP`; bias: fp32 [columns];
    out: [count, columns], bfloat16 or fp32. All arrays are flat. shape: (count, depth, columns).
    """

    @called
    def multiply(rows, kernel, length, bias, out, shape, start, end):
        count, depth, columns = shape
        item = np.empty(0, kind).itemsize
        width = COLUMNS if end - start >= COLUMNS and item == 2 else COLUMNS // 2
        height = COLUMNS * DEPTH * 2 // item // width // (item // 2)
        chunk = CHUNK * 2 // item // STEP
        block, deep, pair_sums = width // PAIR, depth > height, PAIR * PAIR
        panels = -(-count // PAIR) if deep else 1
        packed = aligned(width * min(depth, height), kind)
        panel = aligned(PAIR * STEP * chunk, kind)
        sums = aligned(panels * block * pair_sums, np.float32)
        panel[:] = 0
        is_aligned = out.ctypes.data % LINE == 0
        configure(by_amx)
        for first in range(start, end, width):
            pairs = min(width, end - first) // PAIR
            for top in range(0, depth, height):
                steps = min(height, depth - top) // STEP
                for pair in range(pairs):
                    column, at = first + pair * PAIR, pair * steps * PAIR * STEP
                    take(kernel, column, top, depth, length, steps, packed, at, bits)
                for row in range(0, count, PAIR):
                    some = min(PAIR, count - row)
                    at = row // PAIR * block * pair_sums if deep else 0
                    after = at + block * pair_sums if deep else 0
                    part, where = (top, steps, chunk), (row, some, depth)
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
                        give_rows(
                            sums[at:], pairs, bias, first, out, begin, columns, some, is_aligned
                        )
        release(by_amx)

    return multiply
