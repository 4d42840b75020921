"""Scales and offsets of kernel weights that are grouped along their input, compiled by Numba.

A weight is `scale * level + offset`, where levels are integers around a middle, or numbers of a
table. Each function writes the scales and the offsets of one row of a kernel, fp32, one for every
`STEP` elements or for half as many: groups are multiples of that. `LANES` groups at a time are
widened as vectors, and those that are left one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from flexgen_jax.cpu.jit.levels_ir import E4M3_UNIT, small_floats
from flexgen_jax.cpu.jit.llvm import FLOAT, LANES, filled
from flexgen_jax.cpu.jit.packing import BYTE, FLOATS, HALVES, WORDS, N, Tiles, emitted, single

BLOCK, SUPER = 8, 256
"""Groups whose integers are scaled together, and elements that share a unit of them."""

EIGHT = ir.VectorType(FLOAT, BLOCK)


@njit(inline="always")
def from_float16(bits):
    """Widens a float16, given as bits; there are no infinities among scales."""
    magnitude = np.uint32(bits) & np.uint32(0x7FFF)
    normal = np.uint32((magnitude << np.uint32(13)) + np.uint32(112 << 23)).view(np.float32)
    small = np.float32(magnitude) * np.float32(2.0**-24)
    value = normal if magnitude >= 0x400 else small
    return -value if np.uint32(bits) & np.uint32(0x8000) else value


@njit(inline="always")
def from_float32(bits):
    return np.uint32(bits).view(np.float32)


@njit(inline="always")
def from_power(exponent):
    """Widens a power of two, given as its exponent; 0 stands for the least of fp32's."""
    bits = max(np.uint32(exponent), np.uint32(1))
    return np.uint32(bits << np.uint32(23)).view(np.float32)


@njit(inline="always")
def from_small_float(code):
    """Widens an 8-bit float (E4M3)."""
    exponent, mantissa = np.uint32(code) >> np.uint32(3) & np.uint32(15), np.uint32(code) & 7
    normal = np.uint32((exponent + 120 << 23) + (mantissa << 20)).view(np.float32)
    value = normal if exponent else np.float32(mantissa) * np.float32(2.0**-9)
    return -value if np.uint32(code) & np.uint32(0x80) else value


WIDEN: dict[str, Any] = {
    "bfloat16": single,
    "float16": from_float16,
    "float32": from_float32,
    "e8m0": from_power,
}


def _floats(tiles: Tiles, array: Any, at: Any, dtype: str) -> Any:
    """Loads `LANES` floats as fp32."""
    builder = tiles.builder
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


def _emit_powers(tiles: Tiles, scale: Any, begin: Any, vectors: Any, scales: Any, to: Any) -> None:
    builder = tiles.builder
    with tiles.loop(vectors) as (vector, _):
        bits = _bytes(tiles, scale, tiles.at(begin, (vector, LANES)))
        is_zero = builder.icmp_signed("==", bits, filled(WORDS, 0))
        bits = builder.select(is_zero, filled(WORDS, 1), bits)
        step = builder.bitcast(builder.shl(bits, filled(WORDS, 23)), FLOATS)
        _stored(tiles, step, scales, tiles.at(to, (vector, LANES)))


def _emit_six(
    tiles: Tiles, low: Any, lower: Any, high: Any, upper: Any, plane: Any, values: Any, to: Any
) -> None:
    builder = tiles.builder
    halves = tiles.at((builder.udiv(plane, tiles.index(2)), 4))
    shifts = [
        tiles.spread(builder.trunc(by, WORDS.element), LANES)
        for by in (halves, tiles.at((plane, 2)))
    ]
    stored = [_bytes(tiles, low, lower), _bytes(tiles, high, upper)]
    first, second = (builder.lshr(x, by) for x, by in zip(stored, shifts, strict=True))
    first, second = builder.and_(first, filled(WORDS, 15)), builder.and_(second, filled(WORDS, 3))
    codes = builder.or_(first, builder.shl(second, filled(WORDS, 4)))
    _stored(tiles, builder.sitofp(codes, FLOATS), values, to)


def _emit_nibbles(tiles: Tiles, codes: Any, begin: Any, plane: Any, values: Any, to: Any) -> None:
    builder = tiles.builder
    by = tiles.spread(builder.trunc(tiles.at((plane, 4)), WORDS.element), LANES)
    codes = builder.and_(builder.lshr(_bytes(tiles, codes, begin), by), filled(WORDS, 15))
    _stored(tiles, builder.sitofp(codes, FLOATS), values, to)


def _emit_signed(tiles: Tiles, codes: Any, begin: Any, vectors: Any, values: Any, to: Any) -> None:
    with tiles.loop(vectors) as (vector, _):
        signed = _bytes(tiles, codes, tiles.at(begin, (vector, LANES)), is_signed=True)
        numbers = tiles.builder.sitofp(signed, FLOATS)
        _stored(tiles, numbers, values, tiles.at(to, (vector, LANES)))


def _emit_small(
    tiles: Tiles, codes: Any, begin: Any, vectors: Any, factor: Any, scales: Any, to: Any
) -> None:
    builder, factor = tiles.builder, tiles.spread(factor, LANES)
    with tiles.loop(vectors) as (vector, _):
        place = tiles.place(codes, tiles.at(begin, (vector, LANES)), ir.VectorType(BYTE, LANES))
        levels = small_floats(tiles, builder.zext(builder.load(place, align=1), HALVES))
        numbers = builder.fmul(levels, filled(FLOATS, E4M3_UNIT))
        _stored(tiles, builder.fmul(numbers, factor), scales, tiles.at(to, (vector, LANES)))


def _units(_context, scale, minimum, begin, vectors, one, other, middle, scales, offsets, to):
    single = types.float32
    kinds = (scale, minimum, N, N, single, single, single, scales, offsets, N)
    return types.void(*kinds), emitted(_emit_units)


def _powers(_context, scale, begin, vectors, scales, to):
    return types.void(scale, N, N, scales, N), emitted(_emit_powers)


def _six(_context, low, lower, high, upper, plane, values, to):
    return types.void(low, N, high, N, N, values, N), emitted(_emit_six)


def _nibbles(_context, codes, begin, plane, values, to):
    return types.void(codes, N, N, values, N), emitted(_emit_nibbles)


def _signed(_context, codes, begin, vectors, values, to):
    return types.void(codes, N, N, values, N), emitted(_emit_signed)


def _small(_context, codes, begin, vectors, factor, scales, to):
    return types.void(codes, N, N, types.float32, scales, N), emitted(_emit_small)


widen_units: Any = intrinsic(_units)
"""Intrinsic: scales and offsets of `vectors` vectors of groups, from the byte `begin` on."""

widen_powers: Any = intrinsic(_powers)
"""Intrinsic: powers of two as scales."""

widen_six: Any = intrinsic(_six)
"""Intrinsic: `LANES` codes of 6 bits of a plane, as fp32; see `six_bits`."""

widen_four: Any = intrinsic(_nibbles)
"""Intrinsic: `LANES` codes of 4 bits of a plane, as fp32."""

widen_signed: Any = intrinsic(_signed)
"""Intrinsic: `vectors` vectors of signed bytes, as fp32."""

widen_small: Any = intrinsic(_small)
"""Intrinsic: `vectors` vectors of 8-bit floats as scales, times a factor."""


def scaling_of(center: int, has_minimum: bool) -> Any:
    """Returns the intrinsic by which a block's scales, and minima, which are integers, become
    scales and offsets. center: what is subtracted from scales."""

    def emit(
        tiles: Tiles, scales: Any, offsets: Any, at: Any, one: Any, other: Any, middle: Any
    ) -> None:
        builder = tiles.builder
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

    def scaled(_context, scales, offsets, at, one, other, middle):
        single = types.float32
        return types.void(scales, offsets, N, single, single, single), emitted(emit)

    return intrinsic(scaled)


def widen_floats_of(dtype: str) -> Any:
    """Returns the intrinsic that widens `vectors` vectors of scales, and of minima."""

    def emit(
        tiles: Tiles,
        scale: Any,
        minimum: Any,
        begin: Any,
        vectors: Any,
        factor: Any,
        middle: Any,
        scales: Any,
        offsets: Any,
        to: Any,
    ) -> None:
        builder = tiles.builder
        factor, middle = (tiles.spread(x, LANES) for x in (factor, middle))
        with tiles.loop(vectors) as (vector, _):
            at, target = tiles.at(begin, (vector, LANES)), tiles.at(to, (vector, LANES))
            step = _floats(tiles, scale, at, dtype)
            _stored(tiles, step, scales, target)
            least = builder.fmul(_floats(tiles, minimum, at, dtype), factor)
            _stored(tiles, builder.fadd(least, builder.fmul(middle, step)), offsets, target)

    def floats(_context, scale, minimum, begin, vectors, factor, middle, scales, offsets, to):
        single = types.float32
        kinds = (scale, minimum, N, N, single, single, scales, offsets, N)
        return types.void(*kinds), emitted(emit)

    return intrinsic(floats)


@njit(inline="always")
def six_bits(low, high, row, count, index):
    """Returns a code of 6 bits: a row's `count` codes are kept as 4 bits in planes of two, and 2
    bits in planes of four."""
    each = count // 4
    plane, inside = index // each, index % each
    lower = low[row * 2 * each + plane % 2 * each + inside] >> (plane // 2 * 4) & 15
    upper = high[row * each + inside] >> (plane * 2) & 3
    return np.float32(lower | upper << 4)


def factors_of(kind: str, dtype: str, repeats: int, rows: int, has_minimum: bool) -> Any:
    """Returns the function that writes a row's scales and offsets.

    Its arguments: the kernel's leaves but the codes, flat; the row; how many groups a row has;
    scales and offsets, fp32, and where they begin; the middle code, less the code that stands for
    zero where there is no minimum: what is multiplied is a code less the middle one. repeats:
    groups have this many times `STEP` elements. rows: that share their scales, 0 if all do. dtype:
    of floats.
    """
    makers: dict[str, Callable[[], Any]] = {
        "unit": _of_units,
        "floats": lambda: _of_floats(dtype, repeats, has_minimum),
        "blocks": lambda: _of_blocks(dtype, repeats, rows),
        "powers": _of_powers,
        "zeros": lambda: _with_zeros(dtype, repeats),
        "small": _of_small_floats,
        "sixes": lambda: _in_blocks(_sixes_from, 2, SUPER // 32, 0, True),
        "signed_sixes": lambda: _in_blocks(_sixes_from, 2, SUPER // 16, 32, False),
        "fours": lambda: _in_blocks(_fours_from, 1, SUPER // 16, 0, True),
        "bytes": lambda: _in_blocks(_signed_from, 1, SUPER // 16, 0, False),
    }
    return makers[kind]()


def _of_units() -> Any:
    """8-bit scales and minima in units of their row."""

    @njit(inline="always")
    def take(leaves, row, count, scales, offsets, at, middle):
        scale, units, minimum, others = leaves
        one, other = single(units[row]), single(others[row])
        whole = count // LANES
        widen_units(scale, minimum, row * count, whole, one, other, middle, scales, offsets, at)
        for group in range(whole * LANES, count):
            step = np.float32(scale[row * count + group]) * one
            least = np.float32(np.int8(minimum[row * count + group])) * other
            scales[at + group] = step
            offsets[at + group] = least + middle * step

    return take


def _of_floats(dtype: str, repeats: int, has_minimum: bool) -> Any:
    """Scales, and perhaps minima, of 16 or 32 bits."""
    widen, widen_all = WIDEN[dtype], widen_floats_of(dtype)
    last, factor = int(has_minimum), np.float32(has_minimum)

    @njit(inline="always")
    def take(leaves, row, count, scales, offsets, at, middle):
        scale, minimum = leaves[0], leaves[last]
        whole = count // LANES if repeats == 1 else 0
        widen_all(scale, minimum, row * count, whole, factor, middle, scales, offsets, at)
        for group in range(whole * LANES, count):
            step = widen(scale[row * count + group])
            offset = middle * step + factor * widen(minimum[row * count + group])
            for n in range(repeats):
                scales[at + group * repeats + n] = step
                offsets[at + group * repeats + n] = offset

    return take


def _of_blocks(dtype: str, repeats: int, rows: int) -> Any:
    """Scales that blocks of rows share, of 8-bit floats."""
    widen, sharing, unit = WIDEN[dtype], rows or 1 << 62, np.float32(E4M3_UNIT)

    @njit(inline="always")
    def take(leaves, row, count, scales, offsets, at, middle):
        begin = row // sharing * count
        for group in range(count):
            step = widen(leaves[0][begin + group]) * unit
            for n in range(repeats):
                scales[at + group * repeats + n] = step

    return take


def _of_powers() -> Any:
    """Exponents of powers of two."""

    @njit(inline="always")
    def take(leaves, row, count, scales, offsets, at, middle):
        whole = count // LANES
        widen_powers(leaves[0], row * count, whole, scales, at)
        for group in range(whole * LANES, count):
            scales[at + group] = from_power(leaves[0][row * count + group])

    return take


def _with_zeros(dtype: str, repeats: int) -> Any:
    """Floats with zeros of 4 bits, in planes of two."""
    widen = WIDEN[dtype]

    @njit(inline="always")
    def take(leaves, row, count, scales, offsets, at, middle):
        half = (count + 1) // 2
        for group in range(count):
            step = widen(leaves[0][row * count + group])
            byte = leaves[1][row * half + group % half]
            zero = np.float32(byte >> (4 * (group // half)) & 15)
            for n in range(repeats):
                scales[at + group * repeats + n] = step
                offsets[at + group * repeats + n] = (middle - zero) * step

    return take


def _of_small_floats() -> Any:
    """8-bit floats in units of one number for all."""

    @njit(inline="always")
    def take(leaves, row, count, scales, offsets, at, middle):
        whole, unit = count // LANES, from_float32(leaves[1][0])
        widen_small(leaves[0], row * count, whole, unit, scales, at)
        for group in range(whole * LANES, count):
            scales[at + group] = from_small_float(leaves[0][row * count + group]) * unit

    return take


def _in_blocks(
    widen_from: Callable[[int], Any], parts: int, groups: int, center: int, has_minimum: bool
) -> Any:
    """Integers in units of blocks of `groups` groups, less a center, and perhaps minima likewise.

    widen_from: returns the function that writes a row's integers as fp32, from the leaf of this
    number on; parts: how many leaves they have.
    """
    widen_scale, widen_minimum = widen_from(0), widen_from(parts + 1 if has_minimum else 0)
    scale_block, sharing = scaling_of(center, has_minimum), groups // BLOCK
    first, last = parts, 2 * parts + 1 if has_minimum else parts

    @njit(inline="always")
    def take(leaves, row, count, scales, offsets, at, middle):
        widen_scale(leaves, row, count, scales, at)
        if has_minimum:
            widen_minimum(leaves, row, count, offsets, at)
        units, others, blocks = leaves[first], leaves[last], count // BLOCK
        for block in range(blocks):
            unit = (row * blocks + block) // sharing
            one, other = from_float16(units[unit]), from_float16(others[unit])
            scale_block(scales, offsets, at + block * BLOCK, one, other, middle)

    return take


def _sixes_from(leaf: int) -> Any:
    """Codes of 6 bits, in two leaves."""
    upper_leaf = leaf + 1

    @njit(inline="always")
    def widen(leaves, row, count, values, at):
        low, high, each = leaves[leaf], leaves[upper_leaf], count // 4
        whole = each // LANES
        for plane in range(4):
            for vector in range(whole):
                inside = vector * LANES
                lower = (row * 2 + plane % 2) * each + inside
                upper, to = row * each + inside, at + plane * each + inside
                widen_six(low, lower, high, upper, plane, values, to)
            for inside in range(whole * LANES, each):
                group = plane * each + inside
                values[at + group] = six_bits(low, high, row, count, group)

    return widen


def _fours_from(leaf: int) -> Any:
    """Codes of 4 bits, in planes of two."""

    @njit(inline="always")
    def widen(leaves, row, count, values, at):
        codes, half = leaves[leaf], count // 2
        whole = half // LANES
        for plane in range(2):
            to = at + plane * half
            for vector in range(whole):
                inside = vector * LANES
                widen_four(codes, row * half + inside, plane, values, to + inside)
            for inside in range(whole * LANES, half):
                code = codes[row * half + inside] >> (plane * 4) & 15
                values[to + inside] = np.float32(code)

    return widen


def _signed_from(leaf: int) -> Any:
    """Signed bytes."""

    @njit(inline="always")
    def widen(leaves, row, count, values, at):
        whole = count // LANES
        widen_signed(leaves[leaf], row * count, whole, values, at)
        for group in range(whole * LANES, count):
            values[at + group] = np.float32(np.int8(leaves[leaf][row * count + group]))

    return widen
