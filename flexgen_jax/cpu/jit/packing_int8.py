"""Matrices of 8-bit integers as tiles, as LLVM instructions.

The other parts of a product are those of `packing`, which sees two integers as one 16-bit word.

    take_integers(kernel, scales, column, top, pitch, length, steps, packed, at, bits, by_amx)
        does what `packing.take_columns` does, with the weights rounded to integers by their
        columns' `scales`, fp32 [column], in the form that `matmul_inner.multiply_integers` takes.
        With packed kernel weights the scale of the first of these columns serves all of them. top,
        pitch: in elements; a step has twice as many elements as one of `packing`
    round_row(x, begin, size, codes, flags, at, totals, row) -> scale
        rounds `size` elements of x, bfloat16 as bits, from `begin` on, to integers of the returned
        scale, written to codes, int8, from `begin` on; writes their sum to totals[row], int32; sets
        flags, uint8, from `at` on, where outliers are
    take_outliers(x, begin, pitch, count, panel, step)
        does what `packing.take_rows` does for one step, with elements that are not outliers as 0
    scale_sums(sums, at, pairs, rows, totals, row, columns, first, count, by_amx)
        turns `count` rows of int32 sums, [pair][2][2][16][16] from `at` on, into fp32 in place:
        subtracts what weights taken as uint8 add to them (by the rows' totals, int32, from `row`
        on), and multiplies by the rows' scales in `rows`, from `row` on, and the columns' scales in
        `columns`, from `first` on, both fp32
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils as untyped
from numba.extending import intrinsic

from flexgen_jax.cpu.jit.llvm import FLOAT, INT, LANES, arrays_of, filled
from flexgen_jax.cpu.jit.matmul_inner import UNSIGNED
from flexgen_jax.cpu.jit.packing import (
    BYTE,
    FLOATS,
    HALVES,
    PAIR,
    STEP,
    WORDS,
    N,
    PackedKernel,
    PlainKernel,
    Tiles,
    emitted,
    packed_place,
    store_columns,
)
from flexgen_jax.layers.matmul_int8 import LEVELS, OUTLIER_BITS

cgutils: Any = untyped

BYTES = 4
"""Bytes in a word of a tile: consecutive elements of a row or column."""

LINE = 2 * LANES
LINES = ir.VectorType(ir.IntType(16), LINE)
MAGNITUDE = 0x7FFF
"""Bits of a bfloat16 that hold its magnitude, without the sign."""


class Integers(PlainKernel):
    """Emits loads of rows of kernel weights as integers, `BYTES` of them in a word."""

    ELEMENTS = 2 * STEP

    added = 0
    """Added to each integer, so that it becomes a uint8 where the instruction needs one."""

    def _quarters(self, place: Any) -> list[Any]:
        """Loads 64 bfloat16 elements as four vectors of fp32: every fourth element, from each of
        the first four on."""
        builder = self._tiles.builder
        second = builder.gep(place, [ir.Constant(INT, 1)])
        halves = [builder.load(x, align=2) for x in (place, second)]
        quarters = []
        for start in range(BYTES):
            chosen = ir.Constant(WORDS, list(range(start, BYTES * LANES, BYTES)))
            words = builder.zext(builder.shuffle_vector(*halves, chosen), WORDS)
            quarters.append(builder.bitcast(builder.shl(words, filled(WORDS, 16)), FLOATS))
        return quarters

    def _joined(self, quarters: list[Any]) -> Any:
        """Rounds four vectors and joins them as the bytes of a vector of words."""
        builder, joined = self._tiles.builder, filled(WORDS, 0)
        for byte, quarter in enumerate(quarters):
            bits = _nearest(self._tiles, quarter)
            if byte < BYTES - 1:
                bits = builder.and_(bits, filled(WORDS, 0xFF))
            joined = builder.or_(joined, builder.shl(bits, filled(WORDS, 8 * byte)))
        return builder.xor(joined, filled(WORDS, self.added * 0x01010101))


class PlainIntegers(Integers):
    """Emits loads of rows of bfloat16 kernel weights as integers.

    scales: a pointer to the scale of the first of these rows; fp32, one per row.
    """

    def __init__(self, tiles: Tiles, matrix: Any, begin: Any, pitch: Any, scales: Any) -> None:
        super().__init__(tiles, matrix, begin, pitch)
        self._scales = scales

    def rows(self, tile: Any, step: Any) -> list[Any]:
        tiles, builder, vectors = self._tiles, self._tiles.builder, []
        first = builder.gep(self._scales, [tiles.at((tile, LANES))])
        for row, place in enumerate(self._places(tile, step, LINES)):
            scale = builder.load(builder.gep(first, [tiles.index(row)]))
            inverse = tiles.spread(inverse_of(tiles, scale), LANES)
            quarters = self._quarters(place)
            vectors.append(self._joined([builder.fmul(x, inverse) for x in quarters]))
        return vectors


class PackedIntegers(Integers, PackedKernel):
    """Emits loads of rows of packed kernel weights as integers, by way of the levels of their
    codes.

    place: see `packing.packed_place`; scale: the one scale of all of these rows.
    """

    def __init__(self, place: tuple[Any, ...], scale: Any) -> None:
        super().__init__(*place)
        self._inverse = self._tiles.spread(inverse_of(self._tiles, scale), LANES)

    def rows(self, tile: Any, step: Any) -> list[Any]:
        tiles, builder = self._tiles, self._tiles.builder
        group = tiles.at(self._group, (step, self.ELEMENTS))
        sides = (self._quarters(tiles.place(side, group, LINES)) for side in self._sides)
        scales, minima = ([builder.fmul(x, self._inverse) for x in side] for side in sides)
        shift = builder.trunc(self._shift, INT)
        shifts = [
            tiles.spread(builder.add(shift, ir.Constant(INT, 8 * n)), LANES) for n in range(BYTES)
        ]
        levels = filled(WORDS, (1 << self._bits) - 1)
        vectors = []
        for word in self.loaded(tile, step, WORDS, 1):
            codes = [builder.and_(builder.lshr(word, by), levels) for by in shifts]
            wide = [builder.sitofp(code, FLOATS) for code in codes]
            vectors.append(self._joined(list(map(tiles.multiply_add, wide, scales, minima))))
        return vectors


def _nearest(tiles: Tiles, floats: Any) -> Any:
    """Rounds fp32 to the nearest integers, ties to even."""
    mask = ir.Constant(ir.IntType(LANES), -1)
    how = ir.Constant(INT, 4)  # rounding mode: as set in the processor
    name = "llvm.x86.avx512.mask.cvtps2dq.512"
    return tiles.call(name, WORDS, floats, filled(WORDS, 0), mask, how)


def inverse_of(tiles: Tiles, scale: Any) -> Any:
    """Returns 1 / scale, or 0 if the scale is 0."""
    builder = tiles.builder
    is_zero = builder.fcmp_ordered("==", scale, ir.Constant(FLOAT, 0.0))
    inverse = builder.fdiv(ir.Constant(FLOAT, 1.0), scale)
    return builder.select(is_zero, ir.Constant(FLOAT, 0.0), inverse)


def _round_row(
    tiles: Tiles,
    x: Any,
    begin: Any,
    size: Any,
    codes: Any,
    flags: Any,
    at: Any,
    totals: Any,
    row: Any,
) -> Any:
    builder = tiles.builder
    count = builder.udiv(size, tiles.index(LINE))
    largest = cgutils.alloca_once_value(builder, filled(LINES, 0))
    with tiles.loop(count) as (line, _):
        bits = builder.load(tiles.place(x, tiles.at(begin, (line, LINE)), LINES), align=2)
        is_apart = _is_outlier(tiles, bits)
        kept = builder.and_(bits, filled(LINES, MAGNITUDE))
        kept = builder.select(is_apart, filled(LINES, 0), kept)
        before = builder.load(largest)
        is_larger = builder.icmp_unsigned(">", kept, before)
        builder.store(builder.select(is_larger, kept, before), largest)
        flagged = ir.VectorType(BYTE, LINE)
        place = tiles.place(flags, tiles.at(at, (line, LINE)), flagged)
        mask = builder.or_(builder.load(place, align=1), builder.zext(is_apart, flagged))
        builder.store(mask, place, align=1)
    name = f"llvm.vector.reduce.umax.v{LINE}i16"
    top = builder.zext(tiles.call(name, ir.IntType(16), builder.load(largest)), INT)
    top = builder.bitcast(builder.shl(top, ir.Constant(INT, 16)), FLOAT)
    scale = builder.fmul(top, ir.Constant(FLOAT, float(np.float32(1 / LEVELS))))
    inverse = tiles.spread(inverse_of(tiles, scale), LANES)
    bytes_ = ir.VectorType(BYTE, LANES)
    total = cgutils.alloca_once_value(builder, filled(WORDS, 0))
    builder.store(filled(WORDS, 0), total)
    with tiles.loop(builder.udiv(size, tiles.index(LANES))) as (part, _):
        source = tiles.at(begin, (part, LANES))
        bits = builder.load(tiles.place(x, source, HALVES), align=2)
        bits = builder.select(_is_outlier(tiles, bits), filled(HALVES, 0), bits)
        wide = builder.shl(builder.zext(bits, WORDS), filled(WORDS, 16))
        mask = _nearest(tiles, builder.fmul(builder.bitcast(wide, FLOATS), inverse))
        builder.store(builder.trunc(mask, bytes_), tiles.place(codes, source, bytes_), align=1)
        builder.store(builder.add(builder.load(total), mask), total)
    added = tiles.call(f"llvm.vector.reduce.add.v{LANES}i32", INT, builder.load(total))
    builder.store(added, builder.gep(totals.data, [row]))
    return scale


def _take_outliers(
    tiles: Tiles, x: Any, begin: Any, pitch: Any, count: Any, panel: Any, step: Any
) -> None:
    builder = tiles.builder
    with tiles.loop(count) as (row, _):
        bits = builder.load(tiles.place(x, tiles.at(begin, (row, pitch)), LINES), align=2)
        kept = builder.select(_is_outlier(tiles, bits), bits, filled(LINES, 0))
        target = tiles.at((row, STEP), (step, PAIR * STEP))
        builder.store(kept, tiles.place(panel, target, LINES), align=2)


def _is_outlier(tiles: Tiles, bits: Any) -> Any:
    """Returns which elements of a vector of bfloat16, given as bits, are outliers."""
    builder, kind = tiles.builder, bits.type
    size = builder.and_(bits, filled(kind, MAGNITUDE))
    return builder.icmp_unsigned(">=", size, filled(kind, OUTLIER_BITS))


def _scale_sums(
    tiles: Tiles,
    by_amx: bool,
    sums: Any,
    at: Any,
    pairs: Any,
    rows: Any,
    totals: Any,
    row: Any,
    columns: Any,
    first: Any,
    count: Any,
) -> None:
    builder, lanes = tiles.builder, tiles.index(LANES)
    with tiles.loop(count) as (line, _):
        inside = tiles.at(at, (builder.udiv(line, lanes), 2 * LANES * LANES))
        inside = tiles.at(inside, (builder.urem(line, lanes), LANES))
        own, total = (
            tiles.spread(builder.load(builder.gep(x.data, [builder.add(row, line)])), LANES)
            for x in (rows, totals)
        )
        excess = builder.mul(total, filled(WORDS, UNSIGNED))
        with tiles.loop(pairs) as (pair, _):
            for j in range(2):
                source = tiles.at(inside, (pair, PAIR * PAIR), j * LANES * LANES)
                words = builder.load(tiles.place(sums, source, WORDS), align=4)
                if not by_amx:
                    words = builder.sub(words, excess)
                column = tiles.at(first, (pair, PAIR), j * LANES)
                scales = builder.load(tiles.place(columns, column, FLOATS), align=4)
                wide = builder.fmul(builder.sitofp(words, FLOATS), builder.fmul(own, scales))
                builder.store(wide, tiles.place(sums, source, FLOATS), align=4)


def _take(_context, kernel, scales, column, top, pitch, length, steps, packed, at, bits, by_amx):
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        arrays = cgutils.unpack_tuple(builder, arguments[0])
        arrays = arrays_of(context, builder, signature.args[0], arrays)
        tiles, bits = Tiles(builder), signature.args[-2].literal_value
        rest = arrays_of(context, builder, signature.args[1:-2], arguments[1:-2])
        scales, column, top, pitch, length, steps, packed, at = rest
        own = builder.gep(scales.data, [column])
        if bits == 16:
            integers: Any = PlainIntegers(
                tiles, arrays[0], tiles.at((column, pitch), top), pitch, own
            )
        else:
            place = packed_place(tiles, arrays, column, top, pitch, length, bits)
            integers = PackedIntegers(place, builder.load(own))
        integers.added = 0 if by_amx.literal_value else UNSIGNED
        store_columns(tiles, integers, steps, packed, at)
        return context.get_dummy_value()

    return types.void(kernel, scales, N, N, N, N, N, packed, N, bits, by_amx), generate


def _round(_context, x, begin, size, codes, flags, at, totals, row):
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _round_row(Tiles(builder), *arrays_of(context, builder, signature.args, arguments))

    return types.float32(x, N, N, codes, flags, N, totals, N), generate


def _apart(_context, x, begin, pitch, count, panel, step):
    return types.void(x, N, N, N, panel, N), emitted(_take_outliers)


def _scale(_context, sums, at, pairs, rows, totals, row, columns, first, count, by_amx):
    kinds = (sums, N, N, rows, totals, N, columns, N, N, by_amx)
    return types.void(*kinds), emitted(_scale_sums, constants=1)


take_integers: Any = intrinsic(prefer_literal=True)(_take)
round_row: Any = intrinsic(_round)
take_outliers: Any = intrinsic(_apart)
scale_sums: Any = intrinsic(prefer_literal=True)(_scale)
