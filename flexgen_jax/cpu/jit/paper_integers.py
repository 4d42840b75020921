"""Products of 8-bit integers and the codes of packed kernel weights in the paper's format, by AVX2.

As in `paper_rows`, with a middle code c,

    sum over k of x[k] weight[k]  =  sum of (x[k] scale[k]) (code - c)
                                     +  sum of x[k] (minimum[k] + c scale[k])

Here x * scale is rounded to integers, of which `BLOCK` neighbours share a scale, and AVX2
multiplies them by codes of at most 4 bits as bytes; 8-bit codes are two such halves. The weights
are not rounded, nor is the sum on the right. Outliers of x (see `layers/matmul_int8.py`) are
multiplied one by one. No row's result depends on other rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from flexgen_jax.cpu.jit.emit import F32, I8, I16, I32, I64, SECOND_CACHE, Array, Value, Variable
from flexgen_jax.cpu.jit.instructions import (
    LANES,
    add_pairs,
    add_products_of_bytes,
    nearest_integers,
)
from flexgen_jax.cpu.jit.integer_rows import is_outlier
from flexgen_jax.cpu.jit.levels import middle_of
from flexgen_jax.cpu.jit.operands import (
    PAIR,
    STEP,
    Operands,
    Sides,
    SidesByRows,
    for_each_number_of_rows,
)
from flexgen_jax.cpu.jit.paper_rows import ahead_of, group_end
from flexgen_jax.cpu.jit.tiles import PaperWeights, give_rows
from flexgen_jax.cpu.jit.vectors import from_bfloat16, inverse_or_zero, lane_sum
from flexgen_jax.layers.matmul_int8 import LEVELS
from flexgen_jax.models.formats.storage import GROUP_SIZE

SIDES: SidesByRows = ((4, 1), (2, 2), (1, 4))
"""Rows of bytes, and rows of x, that are multiplied at a time, where x has one row, two, and more:
their sums take half of the registers."""

BLOCK = 128
"""Elements of x times scale that are rounded with one scale; sums of so many products, two in a
lane, fit into 16 bits."""

DEPTH, ROWS = 2048, 64
"""Elements of some rows that stay in the first cache as integers, and rows that stay in the second
one while all codes pass by."""

APART = GROUP_SIZE * PAIR
"""Sums of `PAIR` rows and the columns of a group, in the form that `give_rows` takes."""

NIBBLE = 4
SHORTS, INTS = STEP // 2, STEP // 4
"""Lanes of sums of two products, and of four."""


def emit_paper_integers(
    operands: Operands, weights: PaperWeights, limits: tuple[Value, Value]
) -> None:
    """Computes the columns whose codes are in a range of the rows of bytes. Its limits are
    multiples of `PAIR`."""
    emit = partial(_emit_blocks, operands, weights, limits)
    for_each_number_of_rows(operands, SIDES, SIDES, emit)


@dataclass(frozen=True)
class _Work:
    """Memory for `ROWS` rows and `DEPTH` elements."""

    operands: Operands
    weights: PaperWeights
    sides: Sides
    left: Array
    """int8 [step][plane][row][STEP]."""
    scales: Array
    """fp32 [block][plane][row]."""
    rests: Array
    """fp32 [plane][row], of what is the same for all codes."""
    step_sizes: Array
    """fp32 [plane][element], the scales of the groups."""
    middles: Array
    """fp32 [plane][element], what the middle code stands for."""
    rows: Array
    """bfloat16 [row, depth] as bits, with outliers as 0."""
    sums: Array

    @property
    def panels(self) -> int:
        """Planes times rows that are multiplied at a time."""
        return self.weights.planes * self.sides[1]

    def take_rows(self, above: Value, count: Value, padded: Value) -> Value:
        """Copies rows with outliers as 0; returns how many outliers there are."""
        of, k = self.operands, above.k
        number = k.variable(k.index(0))
        with k.loop(count * of.depth, step=LANES) as at:
            bits = of.rows.load(above * of.depth + at, LANES)
            is_apart = is_outlier(bits)
            self.rows.store(at, is_apart.select(k.filled(I16, LANES), bits))
            number += is_apart.to(I8, is_signed=False).reduce("add").to(I64)
        self.rows.at(count * of.depth).fill((padded - count) * of.depth)
        return number.get()

    def widen_sides(self, top: Value, size: Value, first: Value) -> None:
        """Writes `step_sizes` and `middles` for the groups of a row of bytes."""
        of, weights, k = self.operands, self.weights, top.k
        for plane in range(self.weights.planes):
            column = (weights.length * plane + first).minimum(of.columns - 1)
            group = column // GROUP_SIZE * of.depth + top
            with k.loop(size, step=LANES) as at:
                step, least = (
                    from_bfloat16(side.load(group + at, LANES))
                    for side in (weights.scale, weights.minimum)
                )
                self.step_sizes.store(size * plane + at, step)
                self.middles.store(size * plane + at, least + step * float(middle_of(weights.bits)))

    def fold(self, row: Value, top: Value, size: Value) -> None:
        """Rounds `many` rows times the scales of the groups in all planes."""
        many, k = self.sides[1], row.k
        for plane in range(self.weights.planes):
            for n in range(many):
                self.rests.store(plane * many + n, 0.0)
            with k.loop(size, step=BLOCK) as begin:
                x = self.rows.at(row * self.operands.depth + top + begin)
                self._round_block(x, size * plane + begin, (begin, size), plane)

    def _round_block(self, x: Array, at: Value, span: tuple[Value, Value], plane: int) -> None:
        """Rounds a block of `many` rows times the scales of a plane's groups. span: the block's
        first element, and the number of elements."""
        k, (begin, size), rows = at.k, span, range(self.sides[1])
        some, apart = (size - begin).minimum(BLOCK), self.operands.depth
        products = [k.stack(F32, BLOCK) for _ in rows]
        exact = [k.variable(k.filled(F32, INTS)) for _ in rows]
        largest = [k.variable(k.filled(I32, INTS)) for _ in rows]
        with k.loop(some, step=INTS) as n:
            sides = [side.load(at + n, INTS) for side in (self.middles, self.step_sizes)]
            for row in rows:
                element = from_bfloat16(x.load(apart * row + n, INTS))
                exact[row].set(k.fma(element, sides[0], exact[row].get()))
                product = element * sides[1]
                products[row].store(n, product)
                size_bits = product.bits(I32) & 0x7FFFFFFF
                largest[row].set(size_bits.maximum(largest[row].get()))
        for row in rows:
            panel = plane * self.sides[1] + row
            scale = largest[row].get().reduce("umax").bits(F32) * float(np.float32(1 / LEVELS))
            inverse, total = inverse_or_zero(scale), k.variable(k.filled(I32, INTS))
            with k.loop(some, step=STEP) as n:
                integers = nearest_integers(products[row].load(n, STEP) * inverse)
                self.left.store((begin + n) * self.panels + panel * STEP, integers.to(I8))
                for lane in range(0, STEP, INTS):
                    total += integers.shuffle(range(lane, lane + INTS))
            excess = total.get().reduce("add").to(F32) * scale
            self.scales.store(begin // BLOCK * self.panels + panel, scale)
            rest = lane_sum(exact[row].get()) - excess * float(middle_of(self.weights.bits))
            self.rests.store(panel, self.rests.load(panel) + rest)

    def add_dots(self, place: tuple[Value, Value], size: Value, to: Array, adds: Value) -> None:
        """Adds the products of `many` rows and the codes in `wide` rows of bytes to sums, or
        replaces them where `adds` is false. place: where the codes begin, and those to prefetch
        meanwhile; to: the sums of the first row and byte, with rows `LANES` and planes `APART`
        from each other."""
        k, (wide, many), steps = size.k, self.sides, size // STEP
        parts = max(self.weights.bits // NIBBLE, 1)
        totals = [k.variable(k.filled(F32, INTS)) for _ in range(self.panels * wide)]
        shorts = [k.variable(k.filled(I16, SHORTS)) for _ in range(len(totals) * parts)]
        with k.loop(steps, step=BLOCK // STEP) as block:
            for short in shorts:
                short.set(k.filled(I16, SHORTS))
            with k.loop((block + BLOCK // STEP).minimum(steps), block) as step:
                self._add_step(place, step, shorts)
            for n, total in enumerate(totals):
                at = block // (BLOCK // STEP) * self.panels + n // wide
                sums = [add_pairs(short.get()) for short in shorts[n * parts : (n + 1) * parts]]
                whole = sums[0] + (sums[1] << NIBBLE) if parts == 2 else sums[0]
                total.set(k.fma(whole.to(F32), self.scales.load(at), total.get()))
        for n, total in enumerate(totals):
            panel, byte = divmod(n, wide)
            plane, row = divmod(panel, many)
            own = to.at(plane * APART + row * LANES + byte)
            value = lane_sum(total.get()) + self.rests.load(panel)
            before = adds.select(own.load(0), 0.0)
            own.store(0, before + value)

    def _add_step(self, place: tuple[Value, Value], step: Value, shorts: list[Variable]) -> None:
        """Adds the products of a step."""
        (begin, soon), (wide, many), depth = place, self.sides, self.operands.depth
        parts, bits, codes = max(self.weights.bits // NIBBLE, 1), self.weights.bits, []
        for byte in range(wide):
            self.weights.codes.prefetch(soon + depth * byte + step * STEP, SECOND_CACHE)
            stored = self.weights.codes.load(begin + depth * byte + step * STEP, STEP).bits(I16)
            width = min(bits, NIBBLE)
            mask = ((1 << width) - 1) * 0x0101
            codes.append([(stored >> shift & mask).bits(I8) for shift in range(0, 8, width)])
        for panel in range(self.panels):
            x = self.left.load(step * (self.panels * STEP) + panel * STEP, STEP)
            for byte in range(wide):
                own = panel // many * parts
                for part in range(parts):
                    short = shorts[(panel * wide + byte) * parts + part]
                    short += add_products_of_bytes(codes[byte][own + part], x)

    def add_outliers(
        self, above: Value, count: Value, place: tuple[Value, Value], limits: tuple[Value, Value]
    ) -> None:
        """Adds the products of outliers and the weights whose codes are in a range of the rows of
        bytes. place: the first element, and how many."""
        of, (top, size), (first, stop), k = self.operands, place, limits, count.k
        bits = self.weights.bits
        with k.loop(count) as row, k.loop(size) as n:
            stored = of.rows.load((above + row) * of.depth + top + n)
            with k.when(is_outlier(stored)):
                x = from_bfloat16(stored)
                for plane in range(self.weights.planes):
                    step, middle = (
                        side.load(size * plane + n) for side in (self.step_sizes, self.middles)
                    )
                    sums = self.sums.at(sums_of_row(row, self.weights.planes) + plane * APART)
                    with k.loop(stop, first) as byte:
                        code = self.weights.codes.load(byte * of.depth + top + n)
                        code = code.to(I32, is_signed=False) >> bits * plane & (1 << bits) - 1
                        weight = middle + step * (code - middle_of(bits)).to(F32)
                        at = place_of_column(byte - first)
                        sums.store(at, sums.load(at) + x * weight)


def sums_of_row(row: Value, planes: int) -> Value:
    """Returns where the sums of a row begin: [pair of tiles][plane], then its place in a tile."""
    inside = row % PAIR // LANES * (PAIR * LANES) + row % LANES * LANES
    return row // PAIR * (planes * APART) + inside


def place_of_column(column: Value) -> Value:
    """Returns where the sums of a column of a group are, of one row."""
    pair = column // PAIR * (PAIR * PAIR)
    return pair + column % PAIR // LANES * (LANES * LANES) + column % LANES


def _emit_blocks(
    of: Operands, weights: PaperWeights, limits: tuple[Value, Value], sides: Sides
) -> None:
    """Multiplies `many` rows by the codes of `wide` rows of bytes at a time, `ROWS` rows by a
    group's codes, `DEPTH` elements of each."""
    k, many, planes = of.k, sides[1], weights.planes
    height, panels = of.depth.minimum(DEPTH), planes * many
    tall = (of.count.minimum(ROWS) + (many - 1)) // many * many
    sums_size = (tall + (PAIR - 1)) // PAIR * (planes * APART)
    with k.workspace(
        *((I8, height * panels), (F32, (height // STEP + BLOCK) * panels), (F32, panels)),
        *((F32, height * planes), (F32, height * planes)),
        *((I16, tall * of.depth), (F32, sums_size)),
    ) as arrays:
        work = _Work(of, weights, sides, *arrays)
        with k.loop(of.count, step=ROWS) as above:
            count, first = (of.count - above).minimum(ROWS), k.variable(limits[0])
            num_outliers = work.take_rows(above, count, tall)
            with k.while_(lambda: first.get() < limits[1]):
                stop = group_end(weights.length, first.get(), limits[1])
                span = first.get(), stop
                with k.loop(of.depth, step=height) as top:
                    _multiply(work, (above, count), (top, height), span)
                    with k.when(num_outliers > 0):
                        size = (of.depth - top).minimum(height)
                        work.add_outliers(above, count, (top, size), span)
                _give_planes(work, (above, count), span)
                first.set(stop)


def _multiply(
    work: _Work,
    rows: tuple[Value, Value],
    elements: tuple[Value, Value],
    span: tuple[Value, Value],
) -> None:
    """Multiplies rows by a span of the rows of bytes over some elements."""
    of, (wide, many), (top, height), k = work.operands, work.sides, elements, rows[0].k
    size = (of.depth - top).minimum(height)
    work.widen_sides(top, size, span[0])
    with k.loop(rows[1], step=many) as row:
        work.fold(row, top, size)
        base = work.sums.at(sums_of_row(row, work.weights.planes))
        with k.loop(span[1], span[0], wide) as byte:
            begin = byte * of.depth + top
            soon = begin + ahead_of(of.depth, wide)
            to = base.at(place_of_column(byte - span[0]))
            work.add_dots((begin, soon), size, to, top > 0)


def _give_planes(work: _Work, rows: tuple[Value, Value], span: tuple[Value, Value]) -> None:
    """Writes the results of rows for the columns whose codes are in a span of the rows of bytes."""
    of, (above, count), k = work.operands, rows, rows[0].k
    is_aligned = k.index(0).differs(0)
    with k.loop(count, step=PAIR) as row, k.loop(span[1], span[0], PAIR) as byte:
        for plane in range(work.weights.planes):
            column = work.weights.length * plane + byte
            at = row // PAIR * (work.weights.planes * APART) + plane * APART
            sums = work.sums.at(at + place_of_column(byte - span[0]))
            with k.when(column < of.columns):
                some = (count - row).minimum(PAIR)
                give_rows(of, sums, (above + row, column), (some, 1), is_aligned)
