"""Emits what `grouped_factors` widens, `LANES` groups at a time."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from flexgen_jax.cpu.jit.levels_ir import E4M3_UNIT, small_floats
from flexgen_jax.cpu.jit.llvm import FLOAT, LANES, filled
from flexgen_jax.cpu.jit.packing import BYTE, FLOATS, HALVES, WORDS, N, Tiles, emitted

BLOCK = 8
"""Groups whose integers are scaled together."""

EIGHT = ir.VectorType(FLOAT, BLOCK)


def _floats(tiles: Tiles, array: Any, at: Any, dtype: str) -> Any:
    """Loads `LANES` floats as fp32; dtype: a float's, "e8m0" for exponents of powers of two, or
    "e4m3"."""
    builder = tiles.builder
    if dtype == "e8m0":
        bits = _bytes(tiles, array, at)
        is_zero = builder.icmp_signed("==", bits, filled(WORDS, 0))
        bits = builder.select(is_zero, filled(WORDS, 1), bits)
        return builder.bitcast(builder.shl(bits, filled(WORDS, 23)), FLOATS)
    if dtype == "e4m3":
        stored = builder.load(tiles.place(array, at, ir.VectorType(BYTE, LANES)), align=1)
        levels = small_floats(tiles, builder.zext(stored, HALVES))
        return builder.fmul(levels, filled(FLOATS, E4M3_UNIT))
    if dtype == "float32":
        return builder.load(tiles.place(array, at, FLOATS), align=1)
    if dtype == "float16":
        kind = ir.VectorType(ir.HalfType(), LANES)
        return builder.fpext(builder.load(tiles.place(array, at, kind), align=1), FLOATS)
    words = builder.zext(builder.load(tiles.place(array, at, HALVES), align=1), WORDS)
    return builder.bitcast(builder.shl(words, filled(WORDS, 16)), FLOATS)


def _bytes(tiles: Tiles, array: Any, at: Any, is_signed: bool = False) -> Any:
    """Loads `LANES` bytes as words."""
    builder = tiles.builder
    stored = builder.load(tiles.place(array, at, ir.VectorType(BYTE, LANES)), align=1)
    return builder.sext(stored, WORDS) if is_signed else builder.zext(stored, WORDS)


def _stored(tiles: Tiles, values: Any, array: Any, at: Any) -> None:
    tiles.builder.store(values, tiles.place(array, at, values.type), align=4)


def _emit_units(
    tiles: Tiles,
    scale: Any,
    minimum: Any,
    begin: Any,
    vectors: Any,
    one: Any,
    other: Any,
    middle: Any,
    scales: Any,
    offsets: Any,
    to: Any,
) -> None:
    builder = tiles.builder
    one, other, middle = (tiles.spread(x, LANES) for x in (one, other, middle))
    with tiles.loop(vectors) as (vector, _):
        at, target = tiles.at(begin, (vector, LANES)), tiles.at(to, (vector, LANES))
        step = builder.fmul(builder.sitofp(_bytes(tiles, scale, at), FLOATS), one)
        least = builder.sitofp(_bytes(tiles, minimum, at, is_signed=True), FLOATS)
        _stored(tiles, step, scales, target)
        offset = builder.fadd(builder.fmul(least, other), builder.fmul(middle, step))
        _stored(tiles, offset, offsets, target)


def _emit_six(
    tiles: Tiles, low: Any, lower: Any, high: Any, upper: Any, each: Any, values: Any, to: Any
) -> None:
    builder = tiles.builder
    four = [_bytes(tiles, low, tiles.at(lower, (each, plane))) for plane in range(2)]
    two = _bytes(tiles, high, upper)
    for plane in range(4):
        first = builder.lshr(four[plane % 2], filled(WORDS, plane // 2 * 4))
        second = builder.lshr(two, filled(WORDS, plane * 2))
        second = builder.shl(builder.and_(second, filled(WORDS, 3)), filled(WORDS, 4))
        codes = builder.or_(builder.and_(first, filled(WORDS, 15)), second)
        _stored(tiles, builder.sitofp(codes, FLOATS), values, tiles.at(to, (each, plane)))


def _emit_four(tiles: Tiles, codes: Any, begin: Any, each: Any, values: Any, to: Any) -> None:
    builder, stored = tiles.builder, _bytes(tiles, codes, begin)
    for plane in range(2):
        own = builder.and_(builder.lshr(stored, filled(WORDS, plane * 4)), filled(WORDS, 15))
        _stored(tiles, builder.sitofp(own, FLOATS), values, tiles.at(to, (each, plane)))


def _emit_signed(tiles: Tiles, codes: Any, begin: Any, vectors: Any, values: Any, to: Any) -> None:
    with tiles.loop(vectors) as (vector, _):
        signed = _bytes(tiles, codes, tiles.at(begin, (vector, LANES)), is_signed=True)
        numbers = tiles.builder.sitofp(signed, FLOATS)
        _stored(tiles, numbers, values, tiles.at(to, (vector, LANES)))


def _units(_context, scale, minimum, begin, vectors, one, other, middle, scales, offsets, to):
    single = types.float32
    kinds = (scale, minimum, N, N, single, single, single, scales, offsets, N)
    return types.void(*kinds), emitted(_emit_units)


def _six(_context, low, lower, high, upper, each, values, to):
    return types.void(low, N, high, N, N, values, N), emitted(_emit_six)


def _four(_context, codes, begin, each, values, to):
    return types.void(codes, N, N, values, N), emitted(_emit_four)


def _signed(_context, codes, begin, vectors, values, to):
    return types.void(codes, N, N, values, N), emitted(_emit_signed)


widen_units: Any = intrinsic(_units)
"""Intrinsic: scales and offsets of `vectors` vectors of groups, from the byte `begin` on."""

widen_six: Any = intrinsic(_six)
"""Intrinsic: `LANES` codes of 6 bits of each of four planes, as fp32, `each` apart: their low 4
bits from the byte `lower` on, and `each` bytes after it, and their high 2 bits from `upper` on."""

widen_four: Any = intrinsic(_four)
"""Intrinsic: `LANES` codes of 4 bits of each of two planes, as fp32, `each` apart."""

widen_signed: Any = intrinsic(_signed)
"""Intrinsic: `vectors` vectors of signed bytes, as fp32."""


def scaling_of(center: int, has_minimum: bool) -> Any:
    """Returns the intrinsic by which a block's scales, and minima, which are integers, become
    scales and offsets. center: what is subtracted from scales.

    Its arguments: scales, offsets, and where the block begins; units and others, float16 as bits,
    and where theirs are; the middle code.
    """

    def emit(
        tiles: Tiles,
        scales: Any,
        offsets: Any,
        at: Any,
        units: Any,
        others: Any,
        unit: Any,
        middle: Any,
    ) -> None:
        builder, half = tiles.builder, ir.HalfType()
        one, other = (
            builder.fpext(builder.load(tiles.place(array, unit, half), align=2), FLOAT)
            for array in (units, others)
        )
        one, other, middle = (tiles.spread(x, BLOCK) for x in (one, other, middle))
        step, least = (
            builder.load(tiles.place(array, at, EIGHT), align=4) for array in (scales, offsets)
        )
        step = builder.fmul(builder.fsub(step, filled(EIGHT, center)), one)
        _stored(tiles, step, scales, at)
        offset = builder.fmul(middle, step)
        if has_minimum:
            offset = builder.fsub(offset, builder.fmul(least, other))
        _stored(tiles, offset, offsets, at)

    def scaled(_context, scales, offsets, at, units, others, unit, middle):
        kinds = (scales, offsets, N, units, others, N, types.float32)
        return types.void(*kinds), emitted(emit)

    return intrinsic(scaled)


def widen_floats_of(dtype: str, has_minimum: bool) -> Any:
    """Returns the intrinsic that widens `vectors` vectors of scales, which it multiplies by `unit`,
    and of minima, to scales and offsets. dtype: see `_floats`."""

    def emit(
        tiles: Tiles,
        scale: Any,
        minimum: Any,
        begin: Any,
        vectors: Any,
        unit: Any,
        middle: Any,
        scales: Any,
        offsets: Any,
        to: Any,
    ) -> None:
        builder = tiles.builder
        unit, middle = (tiles.spread(x, LANES) for x in (unit, middle))
        with tiles.loop(vectors) as (vector, _):
            at, target = tiles.at(begin, (vector, LANES)), tiles.at(to, (vector, LANES))
            step = builder.fmul(_floats(tiles, scale, at, dtype), unit)
            _stored(tiles, step, scales, target)
            offset = builder.fmul(middle, step)
            if has_minimum:
                offset = builder.fadd(_floats(tiles, minimum, at, dtype), offset)
            _stored(tiles, offset, offsets, target)

    def floats(_context, scale, minimum, begin, vectors, unit, middle, scales, offsets, to):
        single = types.float32
        kinds = (scale, minimum, N, N, single, single, scales, offsets, N)
        return types.void(*kinds), emitted(emit)

    return intrinsic(floats)
