"""Products of up to `MOST` rows with plain kernel weights, by AVX-512's dot products of bfloat16
pairs or by products of fp32 vectors.

With so few rows, a product takes about as long as reading the kernel weights from memory. So they
are read as processors fetch best: each thread reads its part from one end to the other. One or two
rows are multiplied by one row of the kernel weights at a time. More rows are multiplied `SIDE` at a
time by `SIDE` rows of the kernel weights, of which `DEPTH` elements stay in the first cache while
all rows pass by; meanwhile the next ones are prefetched in their order.
"""

from __future__ import annotations

from functools import partial

from flexgen_jax.cpu.jit.emit import F32, FIRST_CACHE, I32, Array, Scalar, Value
from flexgen_jax.cpu.jit.instructions import LANES
from flexgen_jax.cpu.jit.operands import (
    PAIR,
    STEP,
    Operands,
    Sides,
    add_products,
    for_each_number_of_rows,
    step_as,
    step_of_rows,
    store_step,
)

MOST, MOST_OF_FLOATS = 64, 16
"""Rows that are multiplied so, at most; where fp32 is multiplied, more are worth `many_rows`."""

SIDE, SIDE_OF_SHORT_FLOATS = 4, 2
"""Rows, and columns, multiplied at a time: their sums take half of the registers and, once their
lanes are added up, fill one. The second is for fp32 in vectors of 256 bits."""

DEPTH = 2048
"""Elements taken at a time: those of `SIDE` rows of the kernel weights and of `SIDE` other rows
together take 32 KiB."""

AHEAD = 1024
"""Distance in elements at which a row of the kernel weights is prefetched; processors do not look
beyond a page by themselves."""


def emit_few_rows(
    operands: Operands, kernel: Array, scalar: Scalar, limits: tuple[Value, Value]
) -> None:
    """Computes a range of columns. kernel: bfloat16 [columns, depth], as bits; scalar: the type in
    which rows are multiplied."""
    short_side = SIDE_OF_SHORT_FLOATS if scalar == F32 else SIDE
    wide, short = (((1, 1), (1, 2), (side, side)) for side in (SIDE, short_side))
    emit = partial(_emit_streams, operands, kernel, scalar, limits)
    for_each_number_of_rows(operands, wide, short, emit)


def _emit_streams(
    of: Operands, kernel: Array, scalar: Scalar, limits: tuple[Value, Value], sides: Sides
) -> None:
    """Multiplies by one whole column, or by `DEPTH` elements of several columns, at a time."""
    k, (wide, many), turns = of.k, sides, of.turns(sides[1])
    height = of.depth if wide == 1 else of.depth.minimum(DEPTH)
    with k.workspace((scalar, turns * many * of.depth), (F32, turns * (PAIR * many * LANES))) as (
        left,
        lanes,
    ):
        _lay_rows(of, left, turns * many, height, many)
        with k.loop(limits[1], limits[0], step=PAIR) as first:
            with k.loop(of.depth, step=height) as top:
                is_last = top + height >= of.depth
                after = first * of.depth + top + height
                after = is_last.select((first + PAIR) * of.depth, after)
                steps = (of.depth - top).minimum(height) // STEP
                with k.loop(PAIR, step=wide) as column:
                    begin = (first + column) * of.depth + top
                    is_inside = column + wide < PAIR
                    soon = is_inside.select(begin + of.depth * wide, after)
                    soon = begin + AHEAD if wide == 1 else soon
                    with k.loop(turns) as turn:
                        _add_dots(
                            left=left.at((top * turns + turn * steps * STEP) * many),
                            columns=(kernel.at(begin), of.depth),
                            lanes=lanes.at((column * turns + turn * wide) * (many * LANES)),
                            adds=top > 0,
                            steps=steps,
                            prefetched=(kernel.at(soon), turn, turns),
                            sides=sides,
                        )
            with k.loop(PAIR, step=wide) as column, k.loop(turns) as turn:
                own = lanes.at((column * turns + turn * wide) * (many * LANES))
                sums = [own.load(n * LANES, LANES) for n in range(wide * many)]
                of.give(sums, turn * many, first + column, sides)


def _lay_rows(of: Operands, left: Array, rows: Value, height: Value, many: int) -> None:
    """Copies the rows in the order in which they are multiplied: `height` elements of all rows
    before the next ones, and of those a step of `many` rows; with zeros for missing rows."""
    k = of.k
    left.fill(rows * of.depth)
    with k.loop(of.count) as row, k.loop(of.depth, step=height) as top:
        steps = (of.depth - top).minimum(height) // STEP
        first = (top * (rows // many) + row // many * steps * STEP) * many + row % many * STEP
        with k.loop(steps) as step:
            words = of.rows.at(row * of.depth + top + step * STEP).of(I32).load(0, LANES)
            store_step(left, first + step * (many * STEP), words)


def _add_dots(
    *,
    left: Array,
    columns: tuple[Array, Value],
    lanes: Array,
    adds: Value,
    steps: Value,
    prefetched: tuple[Array, Value, Value],
    sides: Sides,
) -> None:
    """Adds the products of `many` rows and `wide` columns over some steps to sums, lane by lane.

    left: [step][row][STEP]; columns: the kernel weights, and elements between columns; lanes: fp32
    [row][column][LANES], replaced where `adds` is false; prefetched: kernel weights to prefetch
    meanwhile, and this turn of all turns, which share them.
    """
    k, (kernel, pitch), (wide, many) = adds.k, columns, sides
    soon, turn, turns = prefetched
    totals = [k.variable(k.filled(F32, LANES)) for _ in range(wide * many)]
    with k.when(adds):
        for n, total in enumerate(totals):
            total.set(lanes.load(n * LANES, LANES))
    with k.loop(steps) as step:
        if wide == 1:  # a loop would cost more than its body
            soon.prefetch(turn * pitch + step * STEP, FIRST_CACHE)
        else:
            with k.loop(k.index(wide), turn, turns) as line:
                soon.prefetch(line * pitch + step * STEP, FIRST_CACHE)
        loaded = []
        for n in range(wide):
            words = kernel.at(pitch * n + step * STEP).of(I32).load(0, LANES)
            loaded.append(step_as(left.scalar, words))
        for row in range(many):
            x = step_of_rows(left, step * (many * STEP) + row * STEP)
            for column, weights in enumerate(loaded):
                total = totals[row * wide + column]
                product = total.get()
                for one, other in zip(weights, x, strict=True):
                    product = add_products(product, one, other)
                total.set(product)
    for n, total in enumerate(totals):
        lanes.store(n * LANES, total.get())
