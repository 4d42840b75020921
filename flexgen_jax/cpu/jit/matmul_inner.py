"""Products of the tiles of `packing`, as LLVM instructions, by one of three units of the processor:
Intel's AMX, whose registers hold tiles; AVX-512, whose registers hold rows of tiles; or products of
fp32 vectors, where the tiles are fp32.

    configure(by_amx), release(by_amx)
        called before and after all else, in each thread
    multiply_tiles(
            panel, packed, at, sums, to, soon, steps, adds, count, rows, later, pitch, by_amx)
        sums, fp32 [2][2][16][16] from `to` on, = panel @ packed (from `at` on), added to sums if
        `adds`, for at least `count` rows of the panel. Meanwhile the sums from `soon` on, which
        come next, are prefetched into the core's first cache, and `AHEAD` of the rows from `later`
        on, which are taken next, into its second
    multiply_integers(...)
        does what `multiply_tiles` does for int8, with two of them in place of a bfloat16, and int32
        sums in place of fp32. With AVX-512, `packed` holds the integers plus `UNSIGNED`, as uint8

by_amx is a compile-time constant; the type of the tiles decides between the other two.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils as untyped
from numba.extending import intrinsic

from flexgen_jax.cpu.jit.llvm import FIRST_CACHE, INT, LANES, SECOND_CACHE, arrays_of, filled
from flexgen_jax.cpu.jit.packing import (
    BYTE,
    FLOATS,
    PAIR,
    STEP,
    TILE,
    WORDS,
    N,
    Tiles,
    emitted,
    halves_of,
    is_wide,
)
from flexgen_jax.cpu.processor import has_wide_vectors, multiplies_pairs

cgutils: Any = untyped

AHEAD = 4
LINES = 8
"""Cache lines of sums that are prefetched in a step: in eight steps all of a pair's."""
UNSIGNED = 128

SUMS, LEFT, RIGHT = (0, 1, 2, 3), (4, 5), (6, 7)
"""Numbers of AMX's registers; the register of sums [i][j] is 2 i + j."""
SQUARE = LANES * LANES

ROWS = 8
"""Rows multiplied at a time by AVX-512: their sums, for 32 columns, take half of its registers."""
ROWS_OF_FLOATS, TILES_OF_FLOATS = (8, 2), (4, 1)
"""Rows and tiles of columns multiplied at a time as fp32: with vectors of 512 bits, and of 256, of
which there are half as many."""
DOT, DOT_INTEGERS = "avx512bf16.dpbf16ps.512", "avx512.vpdpbusd.512"


def _set_up(tiles: Tiles) -> None:
    shape = [1, 0] + 14 * [0] + 8 * [64, 0] + 16 * [0] + 8 * [16] + 8 * [0]
    kind = ir.ArrayType(BYTE, len(shape))
    place = cgutils.alloca_once_value(tiles.builder, ir.Constant(kind, shape))
    _do(tiles, "ldtilecfg", tiles.builder.bitcast(place, BYTE.as_pointer()))


def _do(tiles: Tiles, name: str, *arguments: Any) -> None:
    """Emits an instruction of AMX, whose registers are given as numbers."""
    values = (ir.Constant(BYTE, x) if isinstance(x, int) else x for x in arguments)
    tiles.call(f"llvm.x86.{name}", ir.VoidType(), *values)


def _load(tiles: Tiles, register: int, array: Any, index: Any) -> None:
    _do(tiles, "tileloadd64", register, tiles.place(array, index, BYTE), tiles.index(64))


class TiledProduct(NamedTuple):
    """The arguments of `multiply_tiles`."""

    panel: Any
    packed: Any
    at: Any
    sums: Any
    to: Any
    soon: Any
    steps: Any
    adds: Any
    count: Any
    rows: Any
    later: Any
    pitch: Any

    def fetch_row(self, tiles: Tiles, row: Any, step: Any) -> None:
        place = tiles.at(self.later, (self.pitch, row), (step, STEP))
        tiles.ask(tiles.place(self.rows, place, BYTE), SECOND_CACHE)

    def fetch_sums(self, tiles: Tiles, line: Any) -> None:
        place = tiles.at(self.soon, (line, LANES))
        tiles.ask(tiles.place(self.sums, place, BYTE), FIRST_CACHE)


def _by_amx(tiles: Tiles, instruction: str, lines: int, of: TiledProduct) -> None:
    places = [tiles.at(of.to, register * SQUARE) for register in SUMS]
    with tiles.builder.if_else(of.adds) as (then, otherwise):
        with then:
            for register, place in zip(SUMS, places, strict=True):
                _load(tiles, register, of.sums, place)
        with otherwise:
            for register in SUMS:
                _do(tiles, "tilezero", register)
    with tiles.loop(of.steps) as (step, _):
        left = tiles.at((step, 2 * TILE))
        right = tiles.at(of.at, left)
        for row in range(AHEAD):
            of.fetch_row(tiles, row, step)
        for line in range(lines):
            of.fetch_sums(tiles, tiles.at((step, lines), line))
        for j in range(2):
            _load(tiles, RIGHT[j], of.packed, tiles.at(right, j * TILE))
        for i in range(2):
            _load(tiles, LEFT[i], of.panel, tiles.at(left, i * TILE))
            for j in range(2):
                _do(tiles, instruction, SUMS[2 * i + j], LEFT[i], RIGHT[j])
    for register, place in zip(SUMS, places, strict=True):
        _do(tiles, "tilestored64", register, tiles.place(of.sums, place, BYTE), tiles.index(64))


def _by_vectors(tiles: Tiles, instruction: str, lines: int, of: TiledProduct) -> None:
    """Emits a product by AVX-512, `ROWS` rows at a time, whose sums stay in registers."""
    builder, kind = tiles.builder, FLOATS if instruction == DOT else WORDS
    groups = builder.udiv(tiles.at(of.count, ROWS - 1), tiles.index(ROWS))
    in_tile, some = tiles.index(LANES // ROWS), lines // (PAIR // ROWS)
    with tiles.loop(groups) as (group, _):
        first = tiles.at(of.to, (builder.udiv(group, in_tile), 2 * SQUARE))
        first = tiles.at(first, (builder.urem(group, in_tile), ROWS * LANES))
        offsets = [j * SQUARE + row * LANES for row in range(ROWS) for j in range(2)]
        places = [tiles.place(of.sums, tiles.at(first, offset), kind) for offset in offsets]
        sums = begun(tiles, places, of.adds)
        with tiles.loop(of.steps) as (step, _):
            of.fetch_row(tiles, group, step)
            for line in range(some):
                of.fetch_sums(tiles, tiles.at((step, lines), (group, some), line))
            left = tiles.at((step, 2 * TILE), (group, ROWS * STEP))
            right = tiles.at(of.at, (step, 2 * TILE))
            for word in range(LANES):
                _add_word(tiles, instruction, of, word, left, right, sums)
        for own, place in zip(sums, places, strict=True):
            builder.store(builder.load(own), place, align=4)


def _by_floats(tiles: Tiles, lines: int, of: TiledProduct) -> None:
    """Emits a product of fp32, some rows and columns at a time, whose sums stay in registers."""
    builder = tiles.builder
    many, wide = ROWS_OF_FLOATS if has_wide_vectors() else TILES_OF_FLOATS
    groups = builder.udiv(tiles.at(of.count, many - 1), tiles.index(many))
    in_tile, some = tiles.index(LANES // many), lines * many // PAIR
    with tiles.loop(groups) as (group, _):
        first = tiles.at(of.to, (builder.udiv(group, in_tile), 2 * SQUARE))
        first = tiles.at(first, (builder.urem(group, in_tile), many * LANES))
        for tile in range(0, 2, wide):
            offsets = [
                j * SQUARE + row * LANES for row in range(many) for j in range(tile, tile + wide)
            ]
            places = [tiles.place(of.sums, tiles.at(first, offset), FLOATS) for offset in offsets]
            sums = begun(tiles, places, of.adds)
            with tiles.loop(of.steps) as (step, _):
                if tile == 0:
                    of.fetch_row(tiles, group, step)
                    for line in range(some):
                        of.fetch_sums(tiles, tiles.at((step, lines), (group, some), line))
                left = tiles.at((step, 2 * TILE), (group, many * STEP))
                right = tiles.at(of.at, (step, 2 * TILE), tile * TILE)
                for element in range(STEP):
                    _add_element(tiles, of, element, left, right, sums, wide)
            for own, place in zip(sums, places, strict=True):
                builder.store(builder.load(own), place, align=4)


def _add_element(
    tiles: Tiles, of: TiledProduct, element: int, left: Any, right: Any, slots: list[Any], wide: int
) -> None:
    """Adds the products of one element of each of these rows with those of all columns."""
    builder, inside = tiles.builder, element // 2 + element % 2 * LANES
    offsets = [j * TILE + element * LANES for j in range(wide)]
    places = [tiles.place(of.packed, tiles.at(right, offset), FLOATS) for offset in offsets]
    columns = [builder.load(place, align=4) for place in places]
    for row in range(len(slots) // wide):
        place = builder.gep(of.panel.data, [tiles.at(left, row * STEP + inside)])
        spread = tiles.spread(builder.load(place), LANES)
        for own, column in zip(slots[wide * row :], columns, strict=False):
            builder.store(added(tiles, builder.load(own), column, spread), own)


def added(tiles: Tiles, total: Any, one: Any, other: Any) -> Any:
    """Adds to each lane of total the product of the fp32 in that lane."""
    return tiles.call(f"llvm.fma.v{LANES}f32", total.type, one, other, total)


def multiplied(tiles: Tiles, total: Any, one: Any, other: Any) -> Any:
    """Adds to each lane of total the products of what two vectors have there: fp32, or a word of
    two bfloat16."""
    if one.type == FLOATS:
        return added(tiles, total, one, other)
    return dot(tiles, DOT, total, one, other)


def begun(tiles: Tiles, places: list[Any], adds: Any) -> list[Any]:
    """Returns stack variables, which become registers, for the sums: the values at `places` if the
    product is added to them, else 0."""
    builder, nothing = tiles.builder, filled(places[0].type.pointee, 0)
    slots = [cgutils.alloca_once_value(builder, nothing) for _ in places]
    with builder.if_else(adds) as (then, otherwise):
        with then:
            for own, place in zip(slots, places, strict=True):
                builder.store(builder.load(place, align=4), own)
        with otherwise:
            for own in slots:
                builder.store(nothing, own)
    return slots


def _add_word(
    tiles: Tiles,
    instruction: str,
    of: TiledProduct,
    word: int,
    left: Any,
    right: Any,
    slots: list[Any],
) -> None:
    """Adds the products of one word of each of these rows with the words of all columns."""
    builder = tiles.builder
    offsets = [j * TILE + word * STEP for j in range(2)]
    places = [tiles.place(of.packed, tiles.at(right, offset), WORDS) for offset in offsets]
    columns = [builder.load(place, align=2) for place in places]
    for row in range(ROWS):
        place = tiles.place(of.panel, tiles.at(left, row * STEP + 2 * word), INT)
        spread = tiles.spread(builder.load(place, align=2), LANES)
        for own, column in zip(slots[2 * row :], columns, strict=False):
            builder.store(dot(tiles, instruction, builder.load(own), column, spread), own)


def dot(tiles: Tiles, instruction: str, total: Any, *sides: Any) -> Any:
    """Adds to each lane of total the products of the elements in that lane's word."""
    if instruction == DOT and not multiplies_pairs():
        for one, other in zip(*(halves_of(tiles, side) for side in sides), strict=True):
            total = added(tiles, total, one, other)
        return total
    return tiles.call(f"llvm.x86.{instruction}", total.type, total, *sides)


def _multiplying(on_tiles: str, on_vectors: str, lines: int) -> Any:
    def multiply(
        _context, panel, packed, at, sums, to, soon, steps, adds, count, rows, later, pitch, by_amx
    ):
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            tiles = Tiles(builder)
            of = TiledProduct(*arrays_of(context, builder, signature.args[:-1], arguments[:-1]))
            if is_wide(of.panel):
                _by_floats(tiles, lines, of)
            elif by_amx.literal_value:
                _by_amx(tiles, on_tiles, lines, of)
            else:
                _by_vectors(tiles, on_vectors, lines, of)
            return context.get_dummy_value()

        kinds = (panel, packed, N, sums, N, N, N, types.boolean, N, rows, N, N, by_amx)
        return types.void(*kinds), generate

    return multiply


def _around(emit: Any) -> Any:
    """Returns an intrinsic that does nothing unless AMX is used."""

    def around(_context, by_amx):
        def nothing(_tiles: Any, _by_amx: Any) -> None:
            pass

        def something(tiles: Tiles, _by_amx: Any) -> None:
            emit(tiles)

        return types.void(by_amx), emitted(something if by_amx.literal_value else nothing)

    return around


configure: Any = intrinsic(prefer_literal=True)(_around(_set_up))
release: Any = intrinsic(prefer_literal=True)(_around(lambda tiles: _do(tiles, "tilerelease")))
multiply_tiles: Any = intrinsic(prefer_literal=True)(_multiplying("tdpbf16ps", DOT, LINES))
multiply_integers: Any = intrinsic(prefer_literal=True)(_multiplying("tdpbssd", DOT_INTEGERS, 4))
