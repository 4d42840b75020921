"""Products of many rows, rounded to 8-bit integers, on processors with AMX or AVX-512 for them.

They compute `layers.matmul_int8` (LLM.int8(), sections 3.1 and 3.2) with the loops and the memory
of `many_rows`, which sees two integers as one number of 16 bits. Steps with an outlier in some row
are multiplied again in bfloat16, for the outliers only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flexgen_jax.cpu.jit.emit import F32, I8, I16, I32, I64, LINE_BYTES, Array, Function, Value
from flexgen_jax.cpu.jit.handler import Call
from flexgen_jax.cpu.jit.instructions import LANES, nearest_integers
from flexgen_jax.cpu.jit.many_rows import ColumnTile, TileSizes
from flexgen_jax.cpu.jit.operands import PAIR, STEP, Operands
from flexgen_jax.cpu.jit.tiles import (
    PAIR_SUMS,
    SQUARE,
    TILE,
    ColumnSource,
    PanelStep,
    PaperWeights,
    PlainColumns,
    TileUnit,
    give_rows,
    load_lines,
)
from flexgen_jax.cpu.jit.vectors import from_bfloat16, inverse_or_zero
from flexgen_jax.layers.matmul_int8 import LEVELS, OUTLIER_BITS
from flexgen_jax.models.formats.storage import GROUP_SIZE

WORD = 4
"""Integers in a word of a tile: consecutive elements of a row or column."""

CHUNK_STEPS = 512 // STEP
"""Steps that are summed while a panel is in the first cache: twice as many as in `many_rows`, so
that sums are loaded and stored half as often."""

MAGNITUDE = 0x7FFF
"""Bits of a bfloat16 that hold its magnitude, without the sign."""


def is_outlier(bits: Value) -> Value:
    """Returns which elements of a vector of bfloat16, given as bits, are outliers."""
    return (bits & MAGNITUDE).exceeds(OUTLIER_BITS - 1)


def emit_rounding(k: Function, call: Call) -> None:
    """Emits `layers.matmul_int8.round_rows` for a range of the panels, of `PAIR` rows each."""
    x, flags, codes = call.argument(0), call.result(0), call.result(1)
    count, depth = x.size(0), x.size(1)
    begin, end = call.limits(flags.size(0))
    with k.loop(end, begin) as panel:
        own = flags.array(I8).at(panel * depth)
        own.fill(depth)
        with k.loop(((panel + 1) * PAIR).minimum(count), panel * PAIR) as row:
            lines = x.array(I16).at(row * depth), codes.array(I8).at(row * depth)
            scale, total = _round_row(k, lines, own, depth)
            call.result(2).array(F32).store(row, scale)
            call.result(3).array(I32).store(row, total)


def _round_row(
    k: Function, lines: tuple[Array, Array], flags: Array, depth: Value
) -> tuple[Value, Value]:
    """Rounds a row to integers, flags its outliers, and returns scale and sum of the integers."""
    (source, target), wide = lines, 2 * LANES
    largest = k.variable(k.filled(I16, wide))
    with k.loop(depth, step=wide) as at:
        bits = source.load(at, wide)
        is_apart = is_outlier(bits)
        size = is_apart.select(k.filled(I16, wide), bits & MAGNITUDE)
        largest.set(size.maximum(largest.get()))
        flags.store(at, flags.load(at, wide) | is_apart.to(I8, is_signed=False))
    top = from_bfloat16(largest.get().reduce("umax"))
    scale = top * float(np.float32(1 / LEVELS))
    inverse, total = inverse_or_zero(scale), k.variable(k.filled(I32, LANES))
    with k.loop(depth, step=LANES) as at:
        bits = source.load(at, LANES)
        bits = is_outlier(bits).select(k.filled(I16, LANES), bits)
        integers = nearest_integers(from_bfloat16(bits) * inverse)
        target.store(at, integers.to(I8))
        total += integers
    return scale, total.get().reduce("add")


@dataclass(frozen=True)
class IntegerColumns(ColumnSource):
    """Kernel weights rounded to integers, four in a word."""

    scales: Array
    """fp32 [column]."""
    addend: int
    """Added to each integer, so that it is a uint8 where the unit needs one."""

    elements = WORD * LANES

    def quarters(self, elements: Value) -> list[Value]:
        """Divides bfloat16 elements into four vectors of fp32: every fourth one, from each of the
        first four on."""
        count = elements.lanes
        return [from_bfloat16(elements.shuffle(range(n, count, WORD))) for n in range(WORD)]

    def join(self, quarters: list[Value]) -> Value:
        """Rounds four vectors and joins them as the bytes of a vector of words."""
        words = quarters[0].k.filled(I32, LANES)
        for byte, quarter in enumerate(quarters):
            words = words | (nearest_integers(quarter) & 0xFF) << 8 * byte
        return words ^ self.addend * 0x01010101


@dataclass(frozen=True)
class PlainIntegers(IntegerColumns):
    """Kernel weights of bfloat16."""

    plain: PlainColumns

    def load(self, column: Value, element: Value) -> list[Value]:
        of, lines = self.plain, []
        stored = load_lines(of.array, column * of.depth + element, of.depth, self.elements)
        for n, line in enumerate(stored):
            inverse = inverse_or_zero(self.scales.load(column + n))
            lines.append(self.join([quarter * inverse for quarter in self.quarters(line)]))
        return lines


@dataclass(frozen=True)
class PaperIntegers(IntegerColumns):
    """Packed kernel weights in the paper's format, by way of the levels of their codes. The scale
    of the first of `PAIR` columns serves all of them."""

    weights: PaperWeights

    def load(self, column: Value, element: Value) -> list[Value]:
        of = self.weights
        inverse = inverse_or_zero(self.scales.load(column // PAIR * PAIR))
        group = column // GROUP_SIZE * of.depth + element
        sides = (self.quarters(side.load(group, self.elements)) for side in (of.scale, of.minimum))
        scales, minima = ([quarter * inverse for quarter in side] for side in sides)
        at, shift = of.place(column, element)
        lines = []
        for stored in load_lines(of.codes, at, of.depth, self.elements):
            words, quarters = stored.bits(I32), []
            for n in range(WORD):
                code = words >> (shift + 8 * n).spread(LANES) & (1 << of.bits) - 1
                quarters.append(code.to(F32) * scales[n] + minima[n])
            lines.append(self.join(quarters))
        return lines


@dataclass(frozen=True)
class RoundedRows:
    """Rows rounded to integers."""

    codes: Array
    """int8 [count, depth], as words of two."""
    scale: Array
    """fp32 [count]."""
    total: Array
    """int32 [count], sums of the integers."""
    outliers: Array
    """The rows before rounding, bfloat16 [count, depth] as bits."""
    flags: Array
    """uint8 [depth]: which elements are outliers in some row."""


@dataclass(frozen=True)
class IntegerProduct:
    """A product of rounded rows."""

    operands: Operands
    rows: RoundedRows
    integers: IntegerColumns
    plain: ColumnSource
    """The kernel weights in bfloat16, for outliers."""
    unit: type[TileUnit]

    def emit(self, limits: tuple[Value, Value]) -> None:
        """Computes a range of columns; its limits are multiples of `PAIR`."""
        of, k = self.operands, self.operands.k
        words, sizes, steps = of.depth // 2, TileSizes.of(limits, 2), of.depth // STEP
        with k.workspace((I64, steps)) as (outlier_steps,):
            num_outliers = _outlier_steps(k, self.rows.flags, steps, outlier_steps)
            is_deep = (words > sizes.height) | (num_outliers > 0)
            panels = is_deep.select(of.turns(PAIR), k.index(1))
            height = words.minimum(sizes.height)
            height = height.maximum((num_outliers * STEP).minimum(CHUNK_STEPS * STEP))
            with k.workspace(
                (I16, sizes.width * height),
                (I16, PAIR * CHUNK_STEPS * STEP),
                (F32, panels * sizes.panel_sums),
            ) as (packed, panel, sums):
                panel.fill(k.index(PAIR * CHUNK_STEPS * STEP))
                unit = self.unit(k, has_integers=True)
                rows = self.rows.codes
                tile = ColumnTile(unit, packed, panel, sums, CHUNK_STEPS, rows, words, sizes)
                apart = is_deep.select(sizes.panel_sums, 0)
                with k.loop(limits[1], limits[0], sizes.width) as first:
                    pairs = (limits[1] - first).minimum(sizes.width) // PAIR
                    self._multiply(tile, (first, pairs), (outlier_steps, num_outliers), apart)
                unit.release()

    def _multiply(
        self,
        tile: ColumnTile,
        columns: tuple[Value, Value],
        outliers: tuple[Array, Value],
        apart: Value,
    ) -> None:
        """Multiplies all rows by some columns: the first one, and pairs of them."""
        of, k, (first, pairs) = self.operands, self.operands.k, columns
        is_aligned = (of.out.address() % LINE_BYTES).equals(0)

        def give(row: Value, own: Array) -> None:
            some = (of.count - row).minimum(PAIR)
            give_rows(of, own, (row, first), (some, pairs), is_aligned)

        def finish(row: Value, own: Array) -> None:
            self._scale_sums(own, (row, first), pairs)
            with k.when(outliers[1].equals(0)):
                give(row, own)

        tile.multiply(self.integers, first, (of.count, pairs), apart, finish)
        with k.when(outliers[1] > 0):
            self._add_outliers(tile, columns, outliers, apart)
            with k.loop(of.count, step=PAIR) as row:
                give(row, tile.sums.at(row // PAIR * apart))

    def _scale_sums(self, sums: Array, place: tuple[Value, Value], pairs: Value) -> None:
        """Turns int32 sums of a panel into fp32 in place: subtracts what weights taken as uint8 add
        to them, and multiplies by the scales of row and column."""
        k, (first_row, first_column) = pairs.k, place
        with k.loop((self.operands.count - first_row).minimum(PAIR)) as n:
            line = sums.at(n // LANES * (2 * SQUARE) + n % LANES * LANES)
            scale = self.rows.scale.load(first_row + n)
            excess = self.rows.total.load(first_row + n) * self.integers.addend
            with k.loop(pairs) as pair:
                for j in range(2):
                    at = pair * PAIR_SUMS + j * SQUARE
                    whole = line.of(I32).load(at, LANES) - excess.spread(LANES)
                    scales = self.integers.scales.load(
                        first_column + pair * PAIR + j * LANES, LANES
                    )
                    line.store(at, whole.to(F32) * (scales * scale))

    def _add_outliers(
        self,
        tile: ColumnTile,
        columns: tuple[Value, Value],
        outliers: tuple[Array, Value],
        apart: Value,
    ) -> None:
        """Adds the products of outliers. outliers: the steps that have some, and their number."""
        of, k, (first, pairs), (places, number) = self.operands, apart.k, columns, outliers
        unit = tile.unit.for_pairs()
        with k.loop(number, step=CHUNK_STEPS) as begin:
            steps = (number - begin).minimum(CHUNK_STEPS)
            with k.loop(pairs) as pair, k.loop(steps) as step:
                packed = tile.packed.at((pair * steps + step) * (PAIR * STEP))
                top = places.load(begin + step) * STEP
                self.plain.take(first + pair * PAIR, top, k.index(1), packed)
            with k.loop(of.count, step=PAIR) as row:
                some = (of.count - row).minimum(PAIR)
                with k.loop(steps) as step, k.loop(some) as n:
                    source = (row + n) * of.depth + places.load(begin + step) * STEP
                    bits = self.rows.outliers.load(source, STEP)
                    kept = is_outlier(bits).select(bits, k.filled(I16, STEP))
                    tile.panel.store(n * STEP + step * (2 * TILE), kept)
                with k.loop(pairs) as pair:
                    sums = tile.sums.at(row // PAIR * apart + pair * PAIR_SUMS)
                    unit.multiply(
                        PanelStep(
                            panel=tile.panel,
                            packed=tile.packed.at(pair * steps * (PAIR * STEP)),
                            sums=sums,
                            adds=k.index(0).equals(0),
                            steps=steps,
                            count=some,
                            next_sums=sums,
                            next_rows=self.rows.outliers,
                            pitch=k.index(0),
                        )
                    )


def _outlier_steps(k: Function, flags: Array, steps: Value, places: Array) -> Value:
    """Writes the steps of `STEP` elements with a flag to places; returns their number."""
    count = k.variable(k.index(0))
    with k.loop(steps) as step:
        places.store(count.get(), step)
        is_flagged = flags.load(step * STEP, STEP).reduce("or").differs(0)
        count += is_flagged.to(I64, is_signed=False)
    return count.get()
