"""Products of few rows with packed kernel weights in the paper's format, which are never unpacked.

Along the depth k, the weights of a group of `GROUP_SIZE` columns are minimum[k] + scale[k] * code.
So with a middle code c, which makes sums small,

    sum over k of x[k] weight[k]  =  sum of (x[k] scale[k]) (code - c)
                                     +  sum of x[k] (minimum[k] + c scale[k])

The brackets on the left and the sum on the right are made once for all columns of a group. Then a
column costs no more than reading its codes: with AVX-512's dot products of bfloat16 pairs, a table
turns codes into bfloat16, and x * scale is rounded to it where unpacking would round the weights;
as fp32, nothing is rounded. A byte is read once for all of its codes, which are of columns a plane
length apart; both halves of an 8-bit code go through tables, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from flexgen_jax.cpu.jit.emit import F32, I16, I32, SECOND_CACHE, Array, Scalar, Value
from flexgen_jax.cpu.jit.instructions import LANES, bfloat16_halves
from flexgen_jax.cpu.jit.levels import Codes, middle_of, pairs_of_levels
from flexgen_jax.cpu.jit.operands import (
    PAIR,
    STEP,
    Operands,
    Sides,
    SidesByRows,
    add_products,
    for_each_number_of_rows,
    step_of_rows,
)
from flexgen_jax.cpu.jit.tiles import PaperWeights
from flexgen_jax.cpu.jit.vectors import bfloat16_words
from flexgen_jax.cpu.processor import Processor
from flexgen_jax.models.formats.storage import GROUP_SIZE

WIDE_SIDES: SidesByRows = ((4, 1), (4, 2), (2, 4))
SHORT_SIDES: SidesByRows = ((2, 1), (1, 2), (1, 2))
"""Rows of bytes, and rows of x, that are multiplied at a time, where x has one row, two, and more:
their sums take at most half of the registers, of 512 bits and of 256."""

MOST, MOST_BESIDE_AMX, MOST_OF_FLOATS, MOST_OF_SHORT_FLOATS = 32, 8, 16, 8
"""Rows that are multiplied so, at most. With more, it takes less time to unpack the weights than to
look at their codes again for every few rows."""

AHEAD = 1 << 15
"""About how many bytes ahead codes are prefetched: enough for memory, and no more than the second
cache keeps until they are used."""

FOLDED = 4096
"""Elements of x times scale that stay in the first cache."""


def max_folded_rows(unit: str, processor: Processor) -> int:
    """Returns the most rows for which a unit leaves kernel weights packed."""
    if unit == "fma":
        return MOST_OF_FLOATS if processor.has_wide_vectors else MOST_OF_SHORT_FLOATS
    if unit == "amx":
        return MOST_BESIDE_AMX if processor.multiplies_pairs else 0
    return MOST


def group_end(length: Value, first: Value, end: Value) -> Value:
    """Returns where the rows of bytes end whose codes share their groups with those of the first
    one."""
    k = length.k
    unit = (length % GROUP_SIZE).equals(0).select(k.index(GROUP_SIZE), PAIR)
    return ((first // unit + 1) * unit).minimum(end)


def ahead_of(depth: Value, wide: int) -> Value:
    """Returns the distance in bytes at which codes are prefetched: whole rows of bytes."""
    row_bytes = depth * wide
    return row_bytes * (row_bytes.k.index(AHEAD) // row_bytes).maximum(1)


def emit_paper_rows(
    operands: Operands, weights: PaperWeights, scalar: Scalar, limits: tuple[Value, Value]
) -> None:
    """Computes the columns whose codes are in a range of the rows of bytes. Its limits are
    multiples of `PAIR`; scalar: the type in which rows are multiplied."""
    emit = partial(_emit_folded, operands, weights, scalar, limits)
    for_each_number_of_rows(operands, WIDE_SIDES, SHORT_SIDES, emit)


@dataclass(frozen=True)
class _Folded:
    """Rows times scales of a group, some elements of them."""

    operands: Operands
    weights: PaperWeights
    left: Array
    """[turn][step][plane][row][STEP]."""
    sums: Array
    """fp32 [turn][plane][row][LANES], of what is the same for all codes."""
    sides: Sides

    @property
    def panels(self) -> int:
        """Planes times rows that are multiplied at a time."""
        return self.weights.planes * self.sides[1]

    def fold(self, turn: Value, first: Value, part: tuple[Value, Value]) -> None:
        """Multiplies `many` rows by the scales of the groups of a row of bytes. part: the first
        element, and the number of steps."""
        of, many, (top, steps), k = self.operands, self.sides[1], part, turn.k
        for plane in range(self.weights.planes):
            column = (self.weights.length * plane + first).minimum(of.columns - 1)
            at = turn * steps * (self.panels * STEP) + plane * many * STEP
            totals = [k.variable(k.filled(F32, LANES)) for _ in range(many)]
            with k.loop(steps) as step:
                element = top + step * STEP
                sides = self.weights.factors(column, element)
                scales, minima = (bfloat16_halves(side) for side in sides)
                middle = k.number(
                    F32, 0.0 if self.left.scalar == F32 else middle_of(self.weights.bits)
                )
                pairs = zip(scales, minima, strict=True)
                others = [k.fma(scale, middle, minimum) for scale, minimum in pairs]
                for n in range(many):
                    row = (turn * many + n).minimum(of.count - 1)
                    words = of.rows.at(row * of.depth + element).of(I32).load(0, LANES)
                    halves, total = bfloat16_halves(words), totals[n].get()
                    for half, other in zip(halves, others, strict=True):
                        total = k.fma(half, other, total)
                    totals[n].set(total)
                    even, odd = (x * scale for x, scale in zip(halves, scales, strict=True))
                    place = at + step * (self.panels * STEP) + n * STEP
                    self._store(place, even, odd)
            for n, own in enumerate(totals):
                self.sums.store((turn * self.panels + plane * many + n) * LANES, own.get())

    def _store(self, place: Value, even: Value, odd: Value) -> None:
        if self.left.scalar == F32:
            self.left.store(place, even)
            self.left.store(place + LANES, odd)
        else:
            self.left.at(place).of(I32).store(0, bfloat16_words(even, odd))

    def add_dots(
        self, place: tuple[Value, Value], steps: Value, lanes: Array, adds: Value, soon: Value
    ) -> None:
        """Adds the products of `many` rows and the codes in `wide` rows of bytes to sums.

        place: the turn, and where the codes begin; lanes: fp32 [plane][row][byte][LANES], replaced
        where `adds` is false; soon: codes to prefetch meanwhile.
        """
        (turn, begin), (wide, many), k = place, self.sides, steps.k
        codes, depth = self.weights.codes, self.operands.depth
        totals = [k.variable(k.filled(F32, LANES)) for _ in range(self.panels * wide)]
        with k.when(adds):
            for n, total in enumerate(totals):
                total.set(lanes.load(n * LANES, LANES))
        for panel in range(self.panels):
            other = self.sums.load((turn * self.panels + panel) * LANES, LANES)
            for total in totals[panel * wide : (panel + 1) * wide]:
                total += other
        left = self.left.at(turn * steps * (self.panels * STEP))
        with k.loop(steps) as step:
            columns = []
            for byte in range(wide):
                codes.prefetch(soon + depth * byte + step * STEP, SECOND_CACHE)
                stored = codes.load(begin + depth * byte + step * STEP, STEP).bits(I16)
                columns.append(self._levels(stored))
            for panel in range(self.panels):
                x = step_of_rows(left, step * (self.panels * STEP) + panel * STEP)
                for byte in range(wide):
                    total = totals[panel * wide + byte]
                    product = total.get()
                    for part, vector in enumerate(columns[byte][panel // many]):
                        product = add_products(product, vector, x[part if len(x) > 1 else 0])
                    total.set(product)
        for n, total in enumerate(totals):
            lanes.store(n * LANES, total.get())

    def _levels(self, stored: Value) -> list[list[Value]]:
        """Returns for each code of a step of bytes the vectors by which a step of x is
        multiplied."""
        levels, codes = [], Codes((), stored.k.index(0), self.weights.bits, "integers")
        for shift in range(0, 8, self.weights.bits):
            if self.left.scalar == F32:
                words, mask = stored.to(I32, is_signed=False), (1 << self.weights.bits) - 1
                levels.append([(words >> shift + byte & mask).to(F32) for byte in (0, 8)])
            else:
                levels.append(pairs_of_levels([stored], [shift], codes))
        return levels


def _emit_folded(
    of: Operands, weights: PaperWeights, scalar: Scalar, limits: tuple[Value, Value], sides: Sides
) -> None:
    """Multiplies `many` rows by the codes of `wide` rows of bytes at a time."""
    k, (wide, many), turns = of.k, sides, of.turns(sides[1])
    panels, height = weights.planes * many, of.depth.minimum(FOLDED // many)
    with k.workspace(
        (scalar, turns * height * panels),
        (F32, turns * (panels * LANES)),
        (F32, turns * (GROUP_SIZE * panels * LANES)),
    ) as (left, sums, lanes):
        folded, first = _Folded(of, weights, left, sums, sides), k.variable(limits[0])
        with k.while_(lambda: first.get() < limits[1]):
            stop = group_end(weights.length, first.get(), limits[1])
            with k.loop(of.depth, step=height) as top:
                steps = (of.depth - top).minimum(height) // STEP
                with k.loop(turns) as turn:
                    folded.fold(turn, first.get(), (top, steps))
                with k.loop(stop, first.get(), wide) as byte, k.loop(turns) as turn:
                    begin = byte * of.depth + top
                    soon = begin + ahead_of(of.depth, wide)
                    own = lanes.at(((byte - first.get()) * turns + turn * wide) * (panels * LANES))
                    folded.add_dots((turn, begin), steps, own, top > 0, soon)
            with k.loop(stop, first.get(), wide) as byte, k.loop(turns) as turn:
                own = lanes.at(((byte - first.get()) * turns + turn * wide) * (panels * LANES))
                for plane in range(weights.planes):
                    column = weights.length * plane + byte
                    at = plane * wide * many
                    some = [own.load((at + n) * LANES, LANES) for n in range(wide * many)]
                    with k.when(column < of.columns):
                        of.give(some, turn * many, column, sides)
            first.set(stop)
