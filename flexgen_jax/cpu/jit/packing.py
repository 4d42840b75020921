"""Matrices of bfloat16 as tiles, for the products of `matmul_inner`, as LLVM instructions.

A tile is 16 rows of 64 bytes. In the left operand it holds 16 rows of 32 elements, in the right one
32 rows of 16 elements with rows interleaved in pairs, and in the product 16 x 16 fp32. All arrays
are flat; matrices of 16-bit floats are given as bits; `PAIR` rows or columns, two tiles, go
together.

    take_rows(rows, begin, pitch, count, steps, panel)
        copies `count` rows of 32 * steps elements, at most `PAIR` rows, into the tiles of a panel,
        [step][2][16][32]; into a panel of fp32, elements at even indices before those at odd ones
    take_columns(kernel, column, top, pitch, length, steps, packed, at, bits)
        copies `PAIR` rows of the kernel weights, from row `column` and element `top` on, into tiles
        for the right operand; into tiles of fp32, rows are not interleaved. kernel: a tuple, of the
        matrix or, with less than 16 bits, of packed codes, scales and minima, grouped along its
        rows, of which a plane has `length` (see `layers/quantization.py`); bits is a compile-time
        constant
    give_rows(sums, pairs, bias, first, out, begin, pitch, count, is_aligned)
        writes `count` rows of sums, [pair][2][2][16][16], plus bias, fp32, to out, rounded if out
        is bfloat16; past the caches if out begins with a cache line
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils as untyped
from numba.extending import intrinsic

from flexgen_jax.cpu.jit.llvm import (
    FLOAT,
    INT,
    LANES,
    SECOND_CACHE,
    Vectors,
    arrays_of,
    filled,
)
from flexgen_jax.models.formats.storage import GROUP_SIZE

cgutils: Any = untyped

PAIR, STEP = 32, 32
"""Rows or columns of two tiles, and elements in a row of a tile."""
TILE = 16 * STEP

BYTE, INDEX = ir.IntType(8), ir.IntType(64)
FLOATS, WORDS = ir.VectorType(FLOAT, LANES), ir.VectorType(INT, LANES)
HALVES = ir.VectorType(ir.IntType(16), LANES)
UPPER = 0xFFFF0000


class Tiles(Vectors):
    """Emits instructions on rows of 64 bytes."""

    def index(self, value: int) -> Any:
        return ir.Constant(INDEX, value)

    def place(self, array: Any, index: Any, kind: Any) -> Any:
        return self.builder.bitcast(self.builder.gep(array.data, [index]), kind.as_pointer())

    def at(self, *parts: Any) -> Any:
        """Returns a sum of indices, in which a pair stands for its product."""
        total = self.index(0)
        for part in parts:
            if isinstance(part, tuple):
                one, other = (self.index(x) if isinstance(x, int) else x for x in part)
                part = self.builder.mul(one, other)
            total = self.builder.add(total, self.index(part) if isinstance(part, int) else part)
        return total

    def loop(self, count: Any) -> Any:
        count = self.index(count) if isinstance(count, int) else count
        return cgutils.for_range_slice(self.builder, self.index(0), count, self.index(1), INDEX)


def emitted(emit: Any, constants: int = 0) -> Any:
    """Returns Numba's code generator for an intrinsic without a result. emit: takes the values of
    the last `constants` arguments, which are known when it is compiled, before the others."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        count = len(arguments) - constants
        known = [kind.literal_value for kind in signature.args[count:]]
        values = arrays_of(context, builder, signature.args[:count], arguments[:count])
        emit(Tiles(builder), *known, *values)
        return context.get_dummy_value()

    return generate


def _take_rows(
    tiles: Tiles, rows: Any, begin: Any, pitch: Any, count: Any, steps: Any, panel: Any
) -> None:
    builder = tiles.builder
    with tiles.loop(count) as (row, _), tiles.loop(steps) as (step, _):
        source = tiles.at(begin, (row, pitch), (step, STEP))
        words = builder.load(tiles.place(rows, source, WORDS), align=2)
        store_words(tiles, words, panel, tiles.at((row, STEP), (step, 2 * TILE)))


def halves_of(tiles: Tiles, words: Any) -> list[Any]:
    """Returns the elements at even and at odd indices of a vector of bfloat16, as fp32."""
    builder = tiles.builder
    even = builder.shl(words, filled(WORDS, 16))
    odd = builder.and_(words, filled(WORDS, UPPER))
    return [builder.bitcast(half, FLOATS) for half in (even, odd)]


def is_wide(array: Any) -> bool:
    """Returns whether an array's elements are fp32."""
    return bool(array.data.type.pointee == FLOAT)


def store_words(tiles: Tiles, words: Any, array: Any, at: Any) -> None:
    """Stores a vector of bfloat16 from an element on; in an array of fp32, its even elements and
    then its odd ones."""
    store_parts(tiles, halves_of(tiles, words) if is_wide(array) else [words], array, at)


def joined_words(tiles: Tiles, halves: list[Any]) -> Any:
    """Rounds fp32 at even and at odd indices to the nearest bfloat16, ties away from zero, as
    `layers.quantization` does; returns them in their order, two in a word. NaN of bfloat16 stays
    NaN."""
    builder = tiles.builder
    low, high = (builder.add(builder.bitcast(x, WORDS), filled(WORDS, 0x8000)) for x in halves)
    low, high = builder.lshr(low, filled(WORDS, 16)), builder.and_(high, filled(WORDS, UPPER))
    return builder.or_(low, high)


def store_parts(tiles: Tiles, parts: list[Any], array: Any, at: Any) -> None:
    """Stores vectors of words or fp32 one after the other, from an element on."""
    for number, part in enumerate(parts):
        place = tiles.place(array, tiles.at(at, number * LANES), part.type)
        tiles.builder.store(part, place, align=2)


def _turned(tiles: Tiles, rows: list[Any]) -> list[Any]:
    """Transposes a square of words, given by rows, by exchanging ever larger squares in it."""
    for step in (1, 2, 4, 8):
        lanes = range(LANES)
        low = [j + LANES - step if j & step else j for j in lanes]
        high = [j + LANES if j & step else j + step for j in lanes]
        for i in (i for i in lanes if not i & step):
            pair = rows[i], rows[i + step]
            for row, chosen in ((i, low), (i + step, high)):
                mask = ir.Constant(WORDS, chosen)
                rows[row] = tiles.builder.shuffle_vector(*pair, mask)
    return rows


class PlainKernel:
    """Emits loads of rows of unpacked kernel weights, `pitch` apart from the element at `begin`
    on."""

    ELEMENTS, ROWS = STEP, LANES
    """Elements of a row in one step, and rows loaded at a time."""

    def __init__(self, tiles: Tiles, matrix: Any, begin: Any, pitch: Any) -> None:
        self._tiles, self._matrix, self._begin, self._pitch = tiles, matrix, begin, pitch

    def rows(self, tile: Any, step: Any) -> list[Any]:
        """Returns the step's elements of a tile's rows, one vector per row, two elements in a
        word."""
        return self.loaded(tile, step, WORDS, 2)

    def loaded(self, tile: Any, step: Any, kind: Any, align: int) -> list[Any]:
        """Loads the step's elements of a tile's rows as vectors of type `kind`."""
        return [
            self._tiles.builder.load(place, align=align) for place in self._places(tile, step, kind)
        ]

    def _places(self, tile: Any, step: Any, kind: Any) -> list[Any]:
        """Returns pointers to the step's elements in a tile's rows, and prefetches those of the
        next rows into the second cache: processors see no pattern in that many rows."""
        tiles = self._tiles
        row = (tiles.at((tile, self.ROWS)), self._pitch)
        first = tiles.at(self._begin, row, (step, self.ELEMENTS))
        indices = [tiles.at(first, (self._pitch, row)) for row in range(2 * self.ROWS)]
        for index in indices[self.ROWS :]:
            tiles.ask(tiles.place(self._matrix, index, BYTE), SECOND_CACHE)
        return [tiles.place(self._matrix, index, kind) for index in indices[: self.ROWS]]


class PackedKernel(PlainKernel):
    """Emits loads of rows of packed kernel weights, unpacked on the way in registers.

    sides: scales and minima, which for these rows begin at `group`; shift: the position in bits of
    these rows' codes in a byte.
    """

    def __init__(
        self,
        tiles: Tiles,
        codes: Any,
        begin: Any,
        pitch: Any,
        sides: list[Any],
        group: Any,
        shift: Any,
        bits: int,
    ) -> None:
        super().__init__(tiles, codes, begin, pitch)
        self._sides, self._group, self._shift, self._bits = sides, group, shift, bits

    def rows(self, tile: Any, step: Any) -> list[Any]:
        tiles, builder = self._tiles, self._tiles.builder
        group = tiles.at(self._group, (step, STEP))
        scales, minima = (self._halves(side, group) for side in self._sides)
        shift = builder.trunc(self._shift, INT)
        shifts = [tiles.spread(builder.add(shift, ir.Constant(INT, n)), LANES) for n in (0, 8)]
        levels = filled(WORDS, (1 << self._bits) - 1)
        vectors = []
        for stored in self.loaded(tile, step, HALVES, 1):
            word = builder.zext(stored, WORDS)
            halves = []
            for by, scale, minimum in zip(shifts, scales, minima, strict=True):
                code = builder.and_(builder.lshr(word, by), levels)
                halves.append(tiles.multiply_add(builder.sitofp(code, FLOATS), scale, minimum))
            vectors.append(joined_words(tiles, halves))
        return vectors

    def _halves(self, array: Any, index: Any) -> list[Any]:
        """Returns the bfloat16 elements at even and at odd indices, as fp32."""
        place = self._tiles.place(array, index, WORDS)
        return halves_of(self._tiles, self._tiles.builder.load(place, align=2))


def store_columns(tiles: Tiles, kernel: PlainKernel, steps: Any, packed: Any, at: Any) -> None:
    # Goes step by step within a tile: cache lines of packed rows hold two steps' elements.
    with tiles.loop(2) as (tile, _), tiles.loop(steps) as (step, _):
        target = tiles.at(at, (step, 2 * TILE), (tile, TILE))
        for row, vector in enumerate(_turned(tiles, kernel.rows(tile, step))):
            store_words(tiles, vector, packed, tiles.at(target, row * STEP))


def _rounded(tiles: Tiles, floats: Any) -> Any:
    """Rounds fp32 to the bits of the nearest bfloat16, ties to even; NaN stays NaN."""
    builder = tiles.builder
    bits = builder.bitcast(floats, WORDS)
    upper = builder.lshr(bits, filled(WORDS, 16))
    odd = builder.and_(upper, filled(WORDS, 1))
    nearest = builder.add(builder.add(bits, filled(WORDS, 0x7FFF)), odd)
    is_nan = builder.fcmp_unordered("uno", floats, floats)
    quiet = builder.or_(upper, filled(WORDS, 0x40))
    chosen = builder.select(is_nan, quiet, builder.lshr(nearest, filled(WORDS, 16)))
    return builder.trunc(chosen, HALVES)


def _give_rows(
    tiles: Tiles,
    sums: Any,
    pairs: Any,
    bias: Any,
    first: Any,
    out: Any,
    begin: Any,
    pitch: Any,
    count: Any,
    is_aligned: Any,
) -> None:
    builder, lanes = tiles.builder, tiles.index(LANES)
    past = builder.module.add_metadata([ir.Constant(INT, 1)])
    all_ = ir.Constant(ir.VectorType(INT, PAIR), list(range(PAIR)))
    with tiles.loop(count) as (row, _):
        inside = tiles.at((builder.udiv(row, lanes), 2 * LANES * LANES))
        inside = tiles.at(inside, (builder.urem(row, lanes), LANES))
        with tiles.loop(pairs) as (pair, _):
            halves = []
            for j in range(2):
                source = tiles.at(inside, (pair, PAIR * PAIR), j * LANES * LANES)
                vector = builder.load(tiles.place(sums, source, FLOATS), align=4)
                added = tiles.at(first, (pair, PAIR), j * LANES)
                added = builder.load(tiles.place(bias, added, FLOATS), align=4)
                vector = builder.fadd(vector, added)
                halves.append(vector if is_wide(out) else _rounded(tiles, vector))
            line = builder.shuffle_vector(*halves, all_)
            target = tiles.at(begin, (row, pitch), (pair, PAIR))
            place = tiles.place(out, target, line.type)
            with builder.if_else(is_aligned) as (then, otherwise):
                with then:
                    builder.store(line, place, align=64).set_metadata("nontemporal", past)
                with otherwise:
                    builder.store(line, place, align=2)


N = types.intp


def _rows(_context, rows, begin, pitch, count, steps, panel):
    return types.void(rows, N, N, N, N, panel), emitted(_take_rows)


def packed_place(
    tiles: Tiles, arrays: Any, column: Any, top: Any, pitch: Any, length: Any, bits: int
) -> tuple[Any, ...]:
    """Returns the arguments of a `PackedKernel` that begins at this column and element."""
    builder, (codes, *sides) = tiles.builder, arrays
    plane, row = builder.udiv(column, length), builder.urem(column, length)
    group = builder.udiv(column, tiles.index(GROUP_SIZE))
    begin, group = (tiles.at((line, pitch), top) for line in (row, group))
    return tiles, codes, begin, pitch, sides, group, tiles.at((plane, bits)), bits


def _columns(_context, kernel, column, top, pitch, length, steps, packed, at, bits):
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        arrays = cgutils.unpack_tuple(builder, arguments[0])
        arrays = arrays_of(context, builder, signature.args[0], arrays)
        tiles, bits = Tiles(builder), signature.args[-1].literal_value
        rest = arrays_of(context, builder, signature.args[1:-1], arguments[1:-1])
        column, top, pitch, length, steps, packed, at = rest
        if bits == 16:
            kernel = PlainKernel(tiles, arrays[0], tiles.at((column, pitch), top), pitch)
        else:
            kernel = PackedKernel(*packed_place(tiles, arrays, column, top, pitch, length, bits))
        store_columns(tiles, kernel, steps, packed, at)
        return context.get_dummy_value()

    return types.void(kernel, N, N, N, N, N, packed, N, bits), generate


def _give(_context, sums, pairs, bias, first, out, begin, pitch, count, is_aligned):
    kinds = (sums, N, bias, N, out, N, N, N, types.boolean)
    return types.void(*kinds), emitted(_give_rows)


take_rows: Any = intrinsic(_rows)
take_columns: Any = intrinsic(prefer_literal=True)(_columns)
give_rows: Any = intrinsic(_give)


@njit(inline="always")
def single(bits):
    """Returns a bfloat16, given as bits, as fp32."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)
