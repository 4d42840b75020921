"""Products of few rows, rounded to 8-bit integers, with kernel weights of 4 or 8 bits that are
grouped along their input, compiled by Numba.

A weight is `scale * code + offset`. Each step of 32 elements of a row is rounded to x = unit * q
with integers q of at most 127, so that

    sum over k of x[k] weight[k]  =  sum over steps of  scale * unit * (sum of q[k] code[k])
                                                        + offset * unit * (sum of q[k]).

The sums of products of integers are exact. A row's result depends on no other row.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils as untyped
from numba.extending import intrinsic

from flexgen_jax.cpu.jit import matmul_codes_steps
from flexgen_jax.cpu.jit.code_cache import called, source_of
from flexgen_jax.cpu.jit.llvm import FLOAT, INT, LANES, SECOND_CACHE, filled
from flexgen_jax.cpu.jit.matmul_blocked import aligned, by_rows
from flexgen_jax.cpu.jit.matmul_codes_steps import (
    BYTES,
    INTS,
    SHORTS,
    SUMS,
    WIDE_MAGNITUDE,
    codes_of_step,
    paired,
)
from flexgen_jax.cpu.jit.matmul_grouped import AHEAD, MORE, ONE, TWO, padded_count
from flexgen_jax.cpu.jit.matmul_small_batch import give_sums
from flexgen_jax.cpu.jit.packing import BYTE, FLOATS, PAIR, STEP, N, Tiles, emitted
from flexgen_jax.layers.matmul_int8 import LEVELS

cgutils: Any = untyped

SOURCE = source_of(__file__, matmul_codes_steps.__file__)
"""A checksum of the code that these products are made from; see `decode_attention.SOURCE`."""

ROW = ir.VectorType(FLOAT, STEP)
ROW_BITS, ROW_HALVES = ir.VectorType(INT, STEP), ir.VectorType(ir.IntType(16), STEP)

SIGN = 0x80
"""The bit by which a byte around 128 differs from a signed one around 0."""


def middle_code(bits: int, by_fours: bool) -> int:
    """Returns what is subtracted from codes before they are multiplied: without products of four
    bytes, the sums of two have to fit into 16 bits."""
    return 0 if bits == 4 or by_fours else SIGN


def _round(_context, rows, begin, steps, left, at, apart, units, sums, to):
    return types.void(rows, N, N, left, N, N, units, sums, N), emitted(_emit_rounding)


def _emit_rounding(
    tiles: Tiles,
    rows: Any,
    begin: Any,
    steps: Any,
    left: Any,
    at: Any,
    apart: Any,
    units: Any,
    sums: Any,
    to: Any,
) -> None:
    builder = tiles.builder
    with tiles.loop(steps) as (step, _):
        halves = builder.load(tiles.place(rows, tiles.at(begin, (step, STEP)), ROW_HALVES), align=2)
        bits = builder.shl(builder.zext(halves, ROW_BITS), filled(ROW_BITS, 16))
        magnitudes = builder.and_(bits, filled(ROW_BITS, WIDE_MAGNITUDE))
        # As integers, so that NaN is the largest, and the unit and all sums are NaN.
        top = builder.bitcast(
            tiles.call(f"llvm.vector.reduce.umax.v{STEP}i32", INT, magnitudes), FLOAT
        )
        unit = builder.fmul(top, ir.Constant(FLOAT, float(np.float32(1 / LEVELS))))
        is_zero = builder.fcmp_ordered("==", unit, ir.Constant(FLOAT, 0.0))
        one = ir.Constant(FLOAT, 1.0)
        inverse = builder.fdiv(one, builder.select(is_zero, one, unit))
        products = builder.fmul(builder.bitcast(bits, ROW), tiles.spread(inverse, STEP))
        nearest = tiles.call(f"llvm.rint.v{STEP}f32", ROW, products)
        integers = builder.fptosi(nearest, ROW_BITS)
        place = tiles.place(left, tiles.at(at, (step, apart)), BYTES)
        builder.store(builder.trunc(integers, BYTES), place, align=1)
        total = tiles.call(f"llvm.vector.reduce.add.v{STEP}i32", INT, integers)
        index = tiles.at(to, step)
        builder.store(unit, builder.gep(units.data, [index]))
        total = builder.fmul(builder.sitofp(total, FLOAT), unit)
        builder.store(total, builder.gep(sums.data, [index]))


def _dots(
    _context,
    left,
    row,
    pitch,
    codes,
    begin,
    apart,
    plane,
    scales,
    offsets,
    units,
    sums,
    scaled,
    factors,
    lanes,
    at,
    bits,
    fours,
    wide,
    many,
):
    kinds = (left, N, N, codes, N, N, N, scales, offsets, units, sums, scaled, N, lanes, N)
    return types.void(*kinds, bits, fours, wide, many), emitted(_emit_dots, constants=4)


def _emit_dots(
    tiles: Tiles,
    bits: int,
    fours: int,
    wide: int,
    many: int,
    left: Any,
    row: Any,
    pitch: Any,
    codes: Any,
    begin: Any,
    apart: Any,
    plane: Any,
    scales: Any,
    offsets: Any,
    units: Any,
    sums: Any,
    scaled: Any,
    factors: Any,
    lanes: Any,
    at: Any,
) -> None:
    builder = tiles.builder
    totals, rests = (
        [cgutils.alloca_once_value(builder, filled(kind, 0)) for _ in range(wide * many)]
        for kind in (SUMS, FLOATS)
    )
    for total in (*totals, *rests):
        builder.store(filled(total.type.pointee, 0), total)
    with tiles.loop(builder.udiv(factors, tiles.index(LANES))) as (part, _):
        for line in range(many):
            place = tiles.at((tiles.at(row, line), factors), (part, LANES))
            unit, x = (
                builder.load(tiles.place(side, place, FLOATS), align=4) for side in (units, sums)
            )
            for column in range(wide):
                own = line * wide + column
                place = tiles.at((column, factors), (part, LANES))
                scale, offset = (
                    builder.load(tiles.place(side, place, FLOATS), align=4)
                    for side in (scales, offsets)
                )
                place = tiles.place(scaled, tiles.at((own, factors), (part, LANES)), FLOATS)
                builder.store(builder.fmul(scale, unit), place, align=4)
                rest = rests[own]
                builder.store(tiles.multiply_add(x, offset, builder.load(rest)), rest)
    steps = builder.udiv(plane, tiles.index(STEP))
    with tiles.loop(steps) as (step, _):
        columns = []
        for column in range(wide):
            where = tiles.at(begin, (column, apart), (step, STEP))
            tiles.ask(tiles.place(codes, tiles.at(where, AHEAD), BYTE), SECOND_CACHE)
            columns.append(codes_of_step(tiles, codes, where, bits))
        for part in range(8 // bits):
            number = tiles.at((steps, part), step)
            for line in range(many):
                place = tiles.at((row, pitch), (step, 8 // bits * many * STEP))
                place = tiles.at(place, (part * many + line) * STEP)
                x = builder.load(tiles.place(left, place, BYTES), align=1)
                for column in range(wide):
                    own = line * wide + column
                    index = tiles.at((own, factors), number)
                    factor = builder.load(builder.gep(scaled.data, [index]))
                    dot = _dot(tiles, columns[column][part], x, bits, bool(fours))
                    total = builder.load(totals[own])
                    factor = tiles.spread(factor, SUMS.count)
                    dot = builder.sitofp(dot, SUMS)
                    builder.store(tiles.multiply_add(dot, factor, total), totals[own])
    every = ir.Constant(ir.VectorType(INT, LANES), list(range(LANES)))
    for number, (total, rest) in enumerate(zip(totals, rests, strict=True)):
        wider = builder.shuffle_vector(builder.load(total), filled(SUMS, 0), every)
        place = tiles.place(lanes, tiles.at(at, number * LANES), FLOATS)
        builder.store(builder.fadd(wider, builder.load(rest)), place, align=4)


def _dot(tiles: Tiles, codes: Any, x: Any, bits: int, by_fours: bool) -> Any:
    """Returns the products of 32 codes less `middle_code`, unsigned bytes, and 32 signed bytes,
    each four of them added up."""
    builder = tiles.builder
    if by_fours:
        name, pairs = "llvm.x86.avx512.vpdpbusd.256", (builder.bitcast(v, INTS) for v in (codes, x))
        return tiles.call(name, INTS, filled(INTS, 0), *pairs)
    if bits == 8:
        signed = builder.xor(codes, filled(BYTES, SIGN))
        codes, x = (
            tiles.call("llvm.x86.avx2.psign.b", BYTES, side, signed) for side in (signed, x)
        )
    return paired(tiles, tiles.call("llvm.x86.avx2.pmadd.ub.sw", SHORTS, codes, x))


round_steps: Any = intrinsic(prefer_literal=True)(_round)
"""Intrinsic: rounds `steps` steps of a row to integers.

rows: bfloat16 as bits, from `begin` on; left: int8, from `at` on, steps `apart` elements apart;
units, sums: fp32, from `to` on: what an integer stands for, and the sums of what is rounded.
"""

dots: Any = intrinsic(prefer_literal=True)(_dots)
"""Intrinsic: the products of `many` rows of integers, from `row` on, with `wide` columns, lane by
lane; as `matmul_grouped.dots`, but for left: int8 [step][plane][row][element of a step], since rows
that lie a power of two apart share a bank of the first cache, from which processors load one number
at a time; units, sums: fp32 [row][factors], those of `round_steps`; scaled: room for fp32
[row][column][factors]. bits, wide and many are compile-time constants, and `fours`: whether the
processor adds up products of four bytes.
"""


def multiplier_of(take: Any, middle: float, bits: int, by_fours: bool) -> Any:
    """Returns the function that does what `matmul_grouped.multiplier_of` says, with rounded
    rows."""
    return by_rows(partial(_streams_of, take, middle, bits, int(by_fours)), ONE, TWO, MORE)


def _streams_of(take: Any, middle: float, bits: int, fours: int, wide: int, many: int) -> Any:
    """Returns the function that multiplies `many` rows by `wide` columns at a time."""

    @called
    def multiply(rows, kernel, plane, bias, out, shape, start, end):
        count, depth, _ = shape
        turns, factors, pitch = -(-count // many), padded_count(depth), depth * bits // 8
        left = aligned(turns * many * depth, np.int8)
        left[:] = 0
        units = np.zeros(turns * many * factors, np.float32)
        sums = np.zeros(turns * many * factors, np.float32)
        planes, steps = 8 // bits, pitch // STEP
        for row in range(count):
            begin = row // many * many * depth + row % many * STEP
            for part in range(planes):
                round_steps(
                    rows,
                    row * depth + part * pitch,
                    steps,
                    left,
                    begin + part * many * STEP,
                    planes * many * STEP,
                    units,
                    sums,
                    row * factors + part * steps,
                )
        scales, offsets = aligned(wide * factors, np.float32), aligned(wide * factors, np.float32)
        scales[:] = 0
        offsets[:] = 0
        scaled = aligned(wide * many * factors, np.float32)
        lanes = aligned(PAIR * turns * many * LANES, np.float32)
        results = np.zeros(-(-count // PAIR) * PAIR * PAIR, np.float32)
        (codes, _), (arrays, groups) = kernel
        for first in range(start, end, PAIR):
            for column in range(0, PAIR, wide):
                for n in range(wide):
                    take(arrays, first + column + n, groups, scales, offsets, n * factors, middle)
                for turn in range(turns):
                    dots(
                        left,
                        turn * many,
                        depth,
                        codes,
                        (first + column) * pitch,
                        pitch,
                        plane,
                        scales,
                        offsets,
                        units,
                        sums,
                        scaled,
                        factors,
                        lanes,
                        (column * turns + turn * wide) * many * LANES,
                        bits,
                        fours,
                        wide,
                        many,
                    )
            give_sums(lanes, results, bias, out, shape, first, wide, many)

    return multiply
