"""Products of few rows, rounded to 8-bit integers, with kernel weights that are integers and
grouped along their input, or 4-bit floats, compiled by Numba.

A weight is `scale * code + offset`, with one of both for a step of 32 elements, or for half of it.
Each step of a row is rounded to x = unit * q with integers q of at most 127, so that

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
from flexgen_jax.cpu.jit.levels_ir import Parts, whole_levels_of
from flexgen_jax.cpu.jit.llvm import FLOAT, INT, LANES, filled
from flexgen_jax.cpu.jit.matmul_blocked import aligned, by_rows
from flexgen_jax.cpu.jit.matmul_codes_steps import (
    BYTES,
    INTS,
    SHORTS,
    SUMS,
    WIDE_MAGNITUDE,
    paired,
)
from flexgen_jax.cpu.jit.matmul_grouped import MORE, ONE, TWO, factor_of, padded_count
from flexgen_jax.cpu.jit.matmul_small_batch import give_sums
from flexgen_jax.cpu.jit.packing import FLOATS, PAIR, STEP, N, Tiles, emitted
from flexgen_jax.layers.matmul_int8 import LEVELS
from flexgen_jax.models.formats.format import WIDTHS, planes_of

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
    return SIGN if bits == 8 and not by_fours else 0


def _round(_context, rows, begin, steps, left, at, apart, units, sums, to, share):
    kinds = (rows, N, N, left, N, N, units, sums, N, share)
    return types.void(*kinds), emitted(_emit_rounding, constants=1)


def _emit_rounding(
    tiles: Tiles,
    share: int,
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
        for number, first in enumerate(range(0, STEP, share)):
            lanes = ir.Constant(ir.VectorType(INT, share), list(range(first, first + share)))
            some = builder.shuffle_vector(integers, integers, lanes)
            total = tiles.call(f"llvm.vector.reduce.add.v{share}i32", INT, some)
            index = tiles.at((step, STEP // share), to, number)
            builder.store(unit, builder.gep(units.data, [index]))
            total = builder.fmul(builder.sitofp(total, FLOAT), unit)
            builder.store(total, builder.gep(sums.data, [index]))


def _dots(
    _context,
    left,
    row,
    low,
    high,
    column,
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
    kind,
    share,
    fours,
    wide,
    many,
):
    kinds = (left, N, low, high, N, N, scales, offsets, units, sums, scaled, N, lanes, N)
    constants = (bits, kind, share, fours, wide, many)
    return types.void(*kinds, *constants), emitted(_emit_dots, constants=len(constants))


def _emit_dots(
    tiles: Tiles,
    bits: int,
    kind: int,
    share: int,
    fours: int,
    wide: int,
    many: int,
    left: Any,
    row: Any,
    low: Any,
    high: Any,
    column: Any,
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
            for one in range(wide):
                own = line * wide + one
                place = tiles.at((one, factors), (part, LANES))
                scale, offset = (
                    builder.load(tiles.place(side, place, FLOATS), align=4)
                    for side in (scales, offsets)
                )
                place = tiles.place(scaled, tiles.at((own, factors), (part, LANES)), FLOATS)
                builder.store(builder.fmul(scale, unit), place, align=4)
                rest = rests[own]
                builder.store(tiles.multiply_add(x, offset, builder.load(rest)), rest)
    arrays, planes = (low, high)[: len(WIDTHS[bits])], planes_of(bits)
    steps = builder.udiv(plane, tiles.index(STEP))
    begin = tiles.at((row, tiles.at((plane, planes))))
    with tiles.loop(steps) as (step, _):
        parts = Parts(tiles, arrays, column, plane, step, bits)
        for part in parts.planes:
            number = tiles.at((steps, part), step)
            shifts = [ir.Constant(INT, shift) for shift in parts.shifts_of(part)]
            stored = [parts.bytes_of(one, part) for one in range(wide)]
            codes = [whole_levels_of(tiles, own, shifts, bits, kind) for own in stored]
            for line in range(many):
                place = tiles.at(begin, (step, planes * many * STEP), (part * many + line) * STEP)
                x = builder.load(tiles.place(left, place, BYTES), align=1)
                for one in range(wide):
                    own = line * wide + one
                    factor = factor_of(
                        tiles, scaled, tiles.at((own, factors)), number, share, SUMS.count
                    )
                    dot = _dot(tiles, codes[one], x, bits, bool(fours))
                    total, dot = builder.load(totals[own]), builder.sitofp(dot, SUMS)
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
units, sums: fp32, from `to` on: what an integer stands for, and the sums of what is rounded, for
each `share` elements, which is a compile-time constant.
"""

dots: Any = intrinsic(prefer_literal=True)(_dots)
"""Intrinsic: the products of `many` rows of integers, from `row` on, with `wide` columns, lane by
lane; as `matmul_grouped.dots`, but for left: int8 [step][plane][row][element of a step], since rows
that lie a power of two apart share a bank of the first cache, from which processors load one number
at a time; units, sums: fp32 [row][factors], those of `round_steps`; scaled: room for fp32
[row][column][factors]. bits, kind, share, wide and many are compile-time constants, and `fours`:
whether the processor adds up products of four bytes.
"""


def multiplier_of(
    take: Any, middle: float, bits: int, levels: int, share: int, by_fours: bool
) -> Any:
    """Returns the function that does what `matmul_grouped.multiplier_of` says, with rounded
    rows."""
    streams_of = partial(_streams_of, take, middle, bits, levels, share, int(by_fours))
    return by_rows(streams_of, ONE, TWO, MORE)


def _streams_of(
    take: Any,
    middle: float,
    bits: int,
    levels: int,
    share: int,
    fours: int,
    wide: int,
    many: int,
) -> Any:
    """Returns the function that multiplies `many` rows by `wide` columns at a time."""
    planes, each = planes_of(bits), STEP // share

    @called
    def multiply(rows, kernel, plane, bias, out, shape, start, end):
        count, depth, _ = shape
        turns, factors, steps = -(-count // many), padded_count(depth, share), plane // STEP
        left = aligned(turns * many * depth, np.int8)
        left[:] = 0
        units = np.zeros(turns * many * factors, np.float32)
        sums = np.zeros(turns * many * factors, np.float32)
        for row in range(count):
            begin = row // many * many * depth + row % many * STEP
            for part in range(planes):
                round_steps(
                    rows,
                    row * depth + part * plane,
                    steps,
                    left,
                    begin + part * many * STEP,
                    planes * many * STEP,
                    units,
                    sums,
                    row * factors + part * steps * each,
                    share,
                )
        scales, offsets = aligned(wide * factors, np.float32), aligned(wide * factors, np.float32)
        scales[:] = 0
        offsets[:] = 0
        scaled = aligned(wide * many * factors, np.float32)
        lanes = aligned(PAIR * turns * many * LANES, np.float32)
        results = np.zeros(-(-count // PAIR) * PAIR * PAIR, np.float32)
        (low, high), (arrays, groups) = kernel
        for first in range(start, end, PAIR):
            for column in range(0, PAIR, wide):
                for n in range(wide):
                    take(arrays, first + column + n, groups, scales, offsets, n * factors, middle)
                for turn in range(turns):
                    dots(
                        left,
                        turn * many,
                        low,
                        high,
                        first + column,
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
                        levels,
                        share,
                        fours,
                        wide,
                        many,
                    )
            give_sums(lanes, results, bias, out, shape, first, wide, many)

    return multiply
