"""Products of tiles (`tiles`), as LLVM instructions, by one of two units of the processor: Intel's
AMX, whose registers hold tiles, or AVX-512's, whose hold rows of them.

    configure(by_amx), release(by_amx)
        around all else, in each thread
    multiply_tiles(
            panel, packed, at, sums, to, soon, steps, adds, count, rows, later, pitch, by_amx)
        sums, fp32 [2][2][16][16] = panel, `count` rows of it at least, @ packed, or plus that;
        meanwhile the sums from `soon` on, which come next, are brought to the core's first cache,
        and `AHEAD` rows from `later` on, which are to be taken next, to its second
    multiply_integers(...)
        the same of int8, two of them in the place of a bfloat16; sums are int32 in that of fp32.
        AVX-512's takes those of `packed` plus `UNSIGNED`, as uint8
    add_integers(panel, begin, lines) -> int32
        the sum of 64 * lines int8 from `begin` on, which counts two; by AVX-512

by_amx: a compile-time constant.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils as untyped
from numba.extending import intrinsic

from flexgen_jax.offload.tiles import (
    BYTE,
    FLOATS,
    PAIR,
    STEP,
    TILE,
    WORDS,
    N,
    Tiles,
    emitted,
)
from flexgen_jax.offload.vectors import FIRST_CACHE, INT, LANES, SECOND_CACHE, arrays_of, filled

cgutils: Any = untyped

AHEAD = 4
LINES = 8
"""Of sums, that are fetched in a step: in eight steps all of a pair."""
UNSIGNED = 128

SUMS, LEFT, RIGHT = (0, 1, 2, 3), (4, 5), (6, 7)
"""AMX's registers; that of sums [i][j] is 2 i + j."""
SQUARE = LANES * LANES

ROWS = 8
"""Whose sums, for 32 columns, are in half of AVX-512's registers."""
DOT, DOT_INTEGERS = "avx512bf16.dpbf16ps.512", "avx512.vpdpbusd.512"


def _set_up(tiles: Tiles) -> None:
    shape = [1, 0] + 14 * [0] + 8 * [64, 0] + 16 * [0] + 8 * [16] + 8 * [0]
    kind = ir.ArrayType(BYTE, len(shape))
    place = cgutils.alloca_once_value(tiles.builder, ir.Constant(kind, shape))
    _do(tiles, "ldtilecfg", tiles.builder.bitcast(place, BYTE.as_pointer()))


def _do(tiles: Tiles, name: str, *arguments: Any) -> None:
    """An instruction of AMX, whose registers are numbers."""
    found = (ir.Constant(BYTE, x) if isinstance(x, int) else x for x in arguments)
    tiles.call(f"llvm.x86.{name}", ir.VoidType(), *found)


def _load(tiles: Tiles, register: int, array: Any, index: Any) -> None:
    _do(tiles, "tileloadd64", register, tiles.place(array, index, BYTE), tiles.index(64))


def _by_amx(
    instruction: str,
    lines: int,
    tiles: Tiles,
    panel: Any,
    packed: Any,
    at: Any,
    sums: Any,
    to: Any,
    soon: Any,
    steps: Any,
    adds: Any,
    _count: Any,
    rows: Any,
    later: Any,
    pitch: Any,
) -> None:
    places = [tiles.at(to, register * SQUARE) for register in SUMS]
    with tiles.builder.if_else(adds) as (then, otherwise):
        with then:
            for register, place in zip(SUMS, places, strict=True):
                _load(tiles, register, sums, place)
        with otherwise:
            for register in SUMS:
                _do(tiles, "tilezero", register)
    with tiles.loop(steps) as (step, _):
        left = tiles.at((step, 2 * TILE))
        right = tiles.at(at, left)
        for row in range(AHEAD):
            _fetch_row(tiles, rows, later, pitch, row, step)
        _fetch_sums(tiles, sums, soon, step, lines, range(lines))
        for j in range(2):
            _load(tiles, RIGHT[j], packed, tiles.at(right, j * TILE))
        for i in range(2):
            _load(tiles, LEFT[i], panel, tiles.at(left, i * TILE))
            for j in range(2):
                _do(tiles, instruction, SUMS[2 * i + j], LEFT[i], RIGHT[j])
    for register, place in zip(SUMS, places, strict=True):
        _do(tiles, "tilestored64", register, tiles.place(sums, place, BYTE), tiles.index(64))


def _fetch_row(tiles: Tiles, rows: Any, later: Any, pitch: Any, row: Any, step: Any) -> None:
    wanted = tiles.place(rows, tiles.at(later, (pitch, row), (step, STEP)), BYTE)
    tiles.ask(wanted, SECOND_CACHE)


def _fetch_sums(tiles: Tiles, sums: Any, soon: Any, step: Any, lines: int, some: Any) -> None:
    """Some of so many lines a step."""
    for line in some:
        wanted = tiles.at(soon, (step, lines * LANES), (line, LANES))
        tiles.ask(tiles.place(sums, wanted, BYTE), FIRST_CACHE)


def _by_vectors(
    instruction: str,
    lines: int,
    tiles: Tiles,
    panel: Any,
    packed: Any,
    at: Any,
    sums: Any,
    to: Any,
    soon: Any,
    steps: Any,
    adds: Any,
    count: Any,
    rows: Any,
    later: Any,
    pitch: Any,
) -> None:
    """`ROWS` rows at a time, whose sums stay in registers."""
    builder, kind = tiles.builder, FLOATS if instruction == DOT else WORDS
    groups = builder.udiv(tiles.at(count, ROWS - 1), tiles.index(ROWS))
    of_tile = tiles.index(LANES // ROWS)
    with tiles.loop(groups) as (group, _):
        first = tiles.at(to, (builder.udiv(group, of_tile), 2 * SQUARE))
        first = tiles.at(first, (builder.urem(group, of_tile), ROWS * LANES))
        offsets = [j * SQUARE + row * LANES for row in range(ROWS) for j in range(2)]
        places = [tiles.place(sums, tiles.at(first, offset), kind) for offset in offsets]
        found = [cgutils.alloca_once_value(builder, filled(kind, 0)) for _ in places]
        with builder.if_else(adds) as (then, otherwise):
            with then:
                for own, place in zip(found, places, strict=True):
                    builder.store(builder.load(place, align=4), own)
            with otherwise:
                for own in found:
                    builder.store(filled(kind, 0), own)
        with tiles.loop(steps) as (step, _):
            _fetch_row(tiles, rows, later, pitch, group, step)
            each = lines // (PAIR // ROWS)
            some = [tiles.at((group, each), line) for line in range(each)]
            _fetch_sums(tiles, sums, soon, step, lines, some)
            left = tiles.at((step, 2 * TILE), (group, ROWS * STEP))
            right = tiles.at(at, (step, 2 * TILE))
            for word in range(LANES):
                columns = [
                    builder.load(
                        tiles.place(packed, tiles.at(right, j * TILE + word * STEP), WORDS), align=2
                    )
                    for j in range(2)
                ]
                for row in range(ROWS):
                    place = tiles.place(panel, tiles.at(left, row * STEP + 2 * word), INT)
                    spread = tiles.spread(builder.load(place, align=2), LANES)
                    for own, column in zip(found[2 * row : 2 * row + 2], columns, strict=True):
                        total = _dot(tiles, instruction, builder.load(own), column, spread)
                        builder.store(total, own)
        for own, place in zip(found, places, strict=True):
            builder.store(builder.load(own), place, align=4)


def _dot(tiles: Tiles, instruction: str, total: Any, *sides: Any) -> Any:
    """Plus, of each word, the product of what is in it."""
    return tiles.call(f"llvm.x86.{instruction}", total.type, total, *sides)


def _add(tiles: Tiles, panel: Any, begin: Any, lines: Any) -> Any:
    builder = tiles.builder
    total = cgutils.alloca_once_value(builder, filled(WORDS, 0))
    builder.store(filled(WORDS, 0), total)
    with tiles.loop(lines) as (line, _):
        place = tiles.place(panel, tiles.at(begin, (line, 2 * LANES)), WORDS)
        ones, codes = filled(WORDS, 0x01010101), builder.load(place, align=2)
        builder.store(_dot(tiles, DOT_INTEGERS, builder.load(total), ones, codes), total)
    return tiles.call(f"llvm.vector.reduce.add.v{LANES}i32", INT, builder.load(total))


def _multiplying(on_tiles: str, on_vectors: str, lines: int) -> Any:
    def multiply(
        _context, panel, packed, at, sums, to, soon, steps, adds, count, rows, later, pitch, by_amx
    ):
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            ways = partial(_by_vectors, on_vectors), partial(_by_amx, on_tiles)
            values = arrays_of(context, builder, signature.args[:-1], arguments[:-1])
            ways[by_amx.literal_value](lines, Tiles(builder), *values)
            return context.get_dummy_value()

        kinds = (panel, packed, N, sums, N, N, N, types.boolean, N, rows, N, N, by_amx)
        return types.void(*kinds), generate

    return multiply


def _around(emit: Any) -> Any:
    """What has nothing to do but with AMX."""

    def around(_context, by_amx):
        def nothing(_tiles: Any, _by_amx: Any) -> None:
            pass

        def something(tiles: Tiles, _by_amx: Any) -> None:
            emit(tiles)

        return types.void(by_amx), emitted(something if by_amx.literal_value else nothing)

    return around


def _sum(_context, panel, begin, lines):
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _add(Tiles(builder), *arrays_of(context, builder, signature.args, arguments))

    return types.int32(panel, N, N), generate


configure: Any = intrinsic(prefer_literal=True)(_around(_set_up))
release: Any = intrinsic(prefer_literal=True)(_around(lambda tiles: _do(tiles, "tilerelease")))
multiply_tiles: Any = intrinsic(prefer_literal=True)(_multiplying("tdpbf16ps", DOT, LINES))
multiply_integers: Any = intrinsic(prefer_literal=True)(_multiplying("tdpbssd", DOT_INTEGERS, 4))
add_integers: Any = intrinsic(_sum)
