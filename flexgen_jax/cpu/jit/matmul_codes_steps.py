"""What `matmul_codes` does with registers: rounding rows, and products of bytes with codes."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils as untyped
from numba.extending import intrinsic

from flexgen_jax.cpu.jit.levels_ir import middle_of
from flexgen_jax.cpu.jit.llvm import FLOAT, INT, LANES, SECOND_CACHE, filled
from flexgen_jax.cpu.jit.packing import BYTE, PAIR, STEP, N, Tiles, emitted
from flexgen_jax.cpu.jit.packing_int8 import inverse_of
from flexgen_jax.layers.matmul_int8 import LEVELS
from flexgen_jax.models.formats.storage import GROUP_SIZE

cgutils: Any = untyped

BLOCK = 128
"""Elements of x times scale that are rounded with one scale; sums of so many products, two in a
lane, fit into 16 bits."""

DEPTH, ROWS = 2048, 64
"""Elements of some rows that stay in the first cache as integers, and rows that stay in the second
one while all codes pass by."""

APART = GROUP_SIZE * PAIR
"""Sums of `PAIR` rows and the columns of a group, in the form that `give_rows` takes."""

NIBBLE = 4

WIDE_MAGNITUDE = 0x7FFFFFFF
"""Bits of an fp32 that hold its magnitude, without the sign."""

BYTES, SHORTS = ir.VectorType(BYTE, STEP), ir.VectorType(ir.IntType(16), STEP // 2)

INTS, SUMS = ir.VectorType(INT, STEP // 4), ir.VectorType(FLOAT, STEP // 4)


def _round_rows(
    _context,
    x,
    begin,
    apart,
    scales,
    others,
    of,
    size,
    left,
    at,
    steps,
    to,
    rests,
    panel,
    bits,
    many,
):
    kinds = (x, N, N, scales, others, N, N, left, N, steps, N, rests, N, bits, many)
    return types.void(*kinds), emitted(_emit_rounding, constants=2)


def _emit_rounding(
    tiles: Tiles,
    bits: int,
    many: int,
    x: Any,
    begin: Any,
    apart: Any,
    scales: Any,
    others: Any,
    of: Any,
    size: Any,
    left: Any,
    at: Any,
    steps: Any,
    to: Any,
    rests: Any,
    panel: Any,
) -> None:
    builder, width = tiles.builder, SUMS.count
    kept, exact, largest, totals = (
        [cgutils.alloca_once(builder, kind) for _ in range(many)]
        for kind in (ir.ArrayType(SUMS, BLOCK // width), SUMS, INTS, INTS)
    )
    for place in (*exact, *largest, *totals):
        builder.store(filled(place.type.pointee, 0), place)
    with tiles.loop(builder.udiv(size, tiles.index(width))) as (part, _):
        inside = tiles.at((part, width))
        scale, other = (
            builder.load(tiles.place(side, tiles.at(of, inside), SUMS), align=4)
            for side in (scales, others)
        )
        for own in range(many):
            element = _widened(tiles, x, tiles.at(begin, (apart, own), inside))
            total = tiles.multiply_add(element, other, builder.load(exact[own]))
            builder.store(total, exact[own])
            product = builder.fmul(element, scale)
            builder.store(product, builder.gep(kept[own], [tiles.index(0), part]))
            magnitude = builder.and_(builder.bitcast(product, INTS), filled(INTS, WIDE_MAGNITUDE))
            before = builder.load(largest[own])
            is_larger = builder.icmp_signed(">", magnitude, before)
            builder.store(builder.select(is_larger, magnitude, before), largest[own])
    of_rows = [_scale_of(tiles, builder.load(place)) for place in largest]
    inverses = [tiles.spread(inverse_of(tiles, scale), width) for scale in of_rows]
    with tiles.loop(builder.udiv(size, tiles.index(STEP))) as (step, _):
        for own in range(many):
            parts = []
            for part in range(STEP // width):
                index = tiles.at((step, STEP // width), part)
                product = builder.load(builder.gep(kept[own], [tiles.index(0), index]))
                nearest = builder.fmul(product, inverses[own])
                parts.append(tiles.call("llvm.x86.avx.cvt.ps2dq.256", INTS, nearest))
                builder.store(builder.add(builder.load(totals[own]), parts[-1]), totals[own])
            place = tiles.at(at, (step, 8 // bits * many * STEP), own * STEP)
            builder.store(_as_bytes(tiles, parts), tiles.place(left, place, BYTES), align=1)
    for own, scale in enumerate(of_rows):
        added = tiles.call("llvm.vector.reduce.add.v8i32", INT, builder.load(totals[own]))
        excess = builder.fmul(builder.sitofp(added, FLOAT), scale)
        excess = builder.fmul(excess, ir.Constant(FLOAT, middle_of(bits)))
        rest = builder.fsub(tiles.sum_lanes(builder.load(exact[own])), excess)
        builder.store(scale, builder.gep(steps.data, [tiles.at(to, own)]))
        place = builder.gep(rests.data, [tiles.at(panel, own)])
        builder.store(builder.fadd(builder.load(place), rest), place)


def _widened(tiles: Tiles, array: Any, index: Any) -> Any:
    """Loads bfloat16 elements as fp32, in their order."""
    builder = tiles.builder
    kind = ir.VectorType(ir.IntType(16), INTS.count)
    halves = builder.load(tiles.place(array, index, kind), align=2)
    wide = builder.shl(builder.zext(halves, INTS), filled(INTS, 16))
    return builder.bitcast(wide, SUMS)


def _scale_of(tiles: Tiles, largest: Any) -> Any:
    """Returns the scale of integers with which the largest of some magnitudes, given as bits,
    becomes the largest integer."""
    builder = tiles.builder
    top = tiles.call("llvm.vector.reduce.umax.v8i32", INT, largest)
    level = ir.Constant(FLOAT, float(np.float32(1 / LEVELS)))
    return builder.fmul(builder.bitcast(top, FLOAT), level)


def _as_bytes(tiles: Tiles, parts: list[Any]) -> Any:
    """Joins four vectors of integers that fit into bytes as one of bytes, in their order."""
    builder = tiles.builder
    shorts = [tiles.call("llvm.x86.avx2.packssdw", SHORTS, *parts[n : n + 2]) for n in (0, 2)]
    mixed = builder.bitcast(tiles.call("llvm.x86.avx2.packsswb", BYTES, *shorts), INTS)
    order = ir.Constant(INTS, [0, 4, 1, 5, 2, 6, 3, 7])  # each half has parts of all four
    return builder.bitcast(builder.shuffle_vector(mixed, mixed, order), BYTES)


def _dots(
    _context,
    left,
    codes,
    begin,
    pitch,
    steps,
    scales,
    rests,
    sums,
    to,
    apart,
    adds,
    soon,
    bits,
    wide,
    many,
):
    kinds = (left, codes, N, N, N, scales, rests, sums, N, N, types.boolean, N, bits, wide, many)
    return types.void(*kinds), emitted(_emit_dots, constants=3)


def _emit_dots(
    tiles: Tiles,
    bits: int,
    wide: int,
    many: int,
    left: Any,
    codes: Any,
    begin: Any,
    pitch: Any,
    steps: Any,
    scales: Any,
    rests: Any,
    sums: Any,
    to: Any,
    apart: Any,
    adds: Any,
    soon: Any,
) -> None:
    builder, planes = tiles.builder, 8 // bits
    panels, parts = planes * many, max(bits // NIBBLE, 1)
    totals = [cgutils.alloca_once(builder, SUMS) for _ in range(panels * wide)]
    shorts = [cgutils.alloca_once(builder, SHORTS) for _ in range(panels * wide * parts)]
    for total in totals:
        builder.store(filled(SUMS, 0), total)
    most = tiles.index(BLOCK // STEP)
    with tiles.loop(builder.udiv(tiles.at(steps, BLOCK // STEP - 1), most)) as (block, _):
        for short in shorts:
            builder.store(filled(SHORTS, 0), short)
        done = builder.mul(block, most)
        rest = builder.sub(steps, done)
        some = builder.select(builder.icmp_signed("<", rest, most), rest, most)
        with tiles.loop(some) as (inside, _):
            step = builder.add(done, inside)
            halves = []
            for byte in range(wide):
                ahead = tiles.at(soon, (byte, pitch), (step, STEP))
                tiles.ask(tiles.place(codes, ahead, BYTE), SECOND_CACHE)
                where = tiles.at(begin, (byte, pitch), (step, STEP))
                halves.append(_codes_of_step(tiles, codes, where, min(bits, NIBBLE)))
            for panel in range(panels):
                place = tiles.at((step, panels * STEP), panel * STEP)
                x = builder.load(tiles.place(left, place, BYTES), align=1)
                for byte in range(wide):
                    own = (panel // many) * parts
                    for part in range(parts):
                        short = shorts[(panel * wide + byte) * parts + part]
                        name = "llvm.x86.avx2.pmadd.ub.sw"
                        products = tiles.call(name, SHORTS, halves[byte][own + part], x)
                        builder.store(builder.add(builder.load(short), products), short)
        for number, total in enumerate(totals):
            at = tiles.at((block, panels), number // wide)
            scale = tiles.spread(builder.load(builder.gep(scales.data, [at])), SUMS.count)
            of_part = shorts[number * parts : (number + 1) * parts]
            wide_sums = [paired(tiles, builder.load(short)) for short in of_part]
            if parts == 2:
                high = builder.shl(wide_sums[1], filled(INTS, NIBBLE))
                wide_sums = [builder.add(wide_sums[0], high)]
            floats = builder.sitofp(wide_sums[0], SUMS)
            builder.store(tiles.multiply_add(floats, scale, builder.load(total)), total)
    for number, total in enumerate(totals):
        panel, byte = divmod(number, wide)
        plane, row = divmod(panel, many)
        rest = builder.load(builder.gep(rests.data, [tiles.index(panel)]))
        value = builder.fadd(tiles.sum_lanes(builder.load(total)), rest)
        place = builder.gep(sums.data, [tiles.at(to, (plane, apart), row * LANES + byte)])
        before = builder.select(adds, builder.load(place), ir.Constant(FLOAT, 0.0))
        builder.store(builder.fadd(before, value), place)


def _codes_of_step(tiles: Tiles, codes: Any, at: Any, bits: int) -> list[Any]:
    """Loads a step of bytes; returns the codes of `bits` bits in them, as bytes, lowest first."""
    builder = tiles.builder
    stored = builder.load(tiles.place(codes, at, SHORTS), align=1)
    levels = filled(SHORTS, ((1 << bits) - 1) * 0x0101)
    shifted = [builder.lshr(stored, filled(SHORTS, shift)) for shift in range(0, 8, bits)]
    return [
        builder.bitcast(builder.and_(shifted_codes, levels), BYTES) for shifted_codes in shifted
    ]


def paired(tiles: Tiles, shorts: Any) -> Any:
    """Adds up pairs of neighbouring lanes."""
    return tiles.call("llvm.x86.avx2.pmadd.wd", INTS, shorts, filled(SHORTS, 1))


round_rows: Any = intrinsic(prefer_literal=True)(_round_rows)
"""Intrinsic: rounds a block of `many` rows times scales to integers.

x: bfloat16 as bits, with rows `apart` elements apart, of which `size` from `begin` on are taken;
scales, others: fp32, from `of` on. The integers go to left, int8 [step][plane][row][32], of which
this is one plane, from `at` on; their scales go to steps, fp32, from `to` on. What is the same for
all codes, the elements times `others` less the middle code times the integers, is added to rests,
fp32, from `panel` on. bits and many are compile-time constants.
"""

dots: Any = intrinsic(prefer_literal=True)(_dots)
"""Intrinsic: adds the products of `many` rows and the codes in `wide` rows of bytes to sums, or
replaces sums by them where `adds` is false.

left: int8 [step][plane][row][32]; codes: rows of bytes `pitch` apart from `begin` on; scales: fp32
[block][plane][row]; rests: fp32 [plane][row], to be added; sums: fp32 from `to` on, with rows
`LANES` and planes `apart` from each other. Meanwhile the bytes from `soon` on are prefetched into
the second cache. bits, wide and many are compile-time constants.
"""
