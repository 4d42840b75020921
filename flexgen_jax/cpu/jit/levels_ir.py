"""Emits loads of the codes of packed kernel weights, and what they stand for.

Integers are counted from the middle one, and an 8-bit float's levels are `E4M3_UNIT` times smaller
than its numbers: its sign, exponent and mantissa are put into a float16, which a processor widens
right where a number is below the least normal one, too.

    E4M3       s eeee mmm
    float16    s 0eeee mmm0000000     2^(15 - 7) = 2^8 times smaller
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from llvmlite import ir

from flexgen_jax.cpu.jit.llvm import FLOAT, INT, LANES, SECOND_CACHE, filled
from flexgen_jax.cpu.jit.packing import BYTE, FLOATS, HALVES, STEP, WORDS, Tiles
from flexgen_jax.cpu.processor import has_wide_vectors
from flexgen_jax.models.formats.format import WIDTHS, planes_of
from flexgen_jax.models.formats.levels import E2M1, NF4

INTEGERS, SMALL_FLOATS, QUANTILES, EIGHT_BIT_FLOATS = range(4)
"""What codes stand for: integers around the middle one, the tables of `models.formats.levels`, and
8-bit floats."""

LEVELS = {
    "integers": INTEGERS,
    "e2m1": SMALL_FLOATS,
    "nf4": QUANTILES,
    "e4m3": EIGHT_BIT_FLOATS,
}

TABLES: dict[int, Sequence[float]] = {SMALL_FLOATS: E2M1, QUANTILES: NF4}
"""The numbers that codes of 4 bits choose from."""

E4M3_UNIT = 2.0**8
"""An 8-bit float's number over its level."""

WHOLE_E2M1_UNIT, WHOLE_E2M1_ZERO = 0.5, 12
"""A 4-bit float's number over an integer that stands for it, less the integer that stands for 0."""

HALF_FLOATS = ir.VectorType(ir.HalfType(), LANES)

AHEAD = 1 << 12
"""About how many bytes ahead codes are prefetched."""

BYTES, CODES = ir.VectorType(BYTE, STEP), ir.VectorType(ir.IntType(16), STEP)


def middle_of(bits: int) -> int:
    """Returns a code in the middle of all."""
    return 1 << (bits - 1)


class Parts:
    """Emits loads of the bytes of a step of some columns' codes, each when it is first needed.

    arrays: of the parts of codes, `Format.widths` bits wide; column: the first one; plane: elements
    of a plane of the narrowest part; step: the number of a step in such a plane.

    With 6 bits, 4 + 2, a step of a plane of n/4 elements is of the elements j, j + n/4, j + n/2 and
    j + 3n/4: one load of the 2 bits serves all four, and each of two loads of the 4 bits two.
    """

    def __init__(
        self, tiles: Tiles, arrays: Sequence[Any], column: Any, plane: Any, step: Any, bits: int
    ) -> None:
        self._tiles, self._arrays, self._column = tiles, arrays, column
        self._plane, self._step, self._bits = plane, step, bits
        self._stored: dict[tuple[int, int, int], Any] = {}
        self._loads = loads_of(bits)

    @property
    def planes(self) -> list[int]:
        """The numbers of planes, those together that need the same bytes."""
        return sorted(range(planes_of(self._bits)), key=lambda number: number % self._loads[0])

    def bytes_of(self, column: int, number: int) -> list[Any]:
        """Returns bytes with each part of a plane's codes, as 16-bit words."""
        return [
            self._loaded(part, column, number % loads) for part, loads in enumerate(self._loads)
        ]

    def shifts_of(self, number: int) -> list[int]:
        """Returns where the parts of a plane's codes begin in these bytes."""
        widths = WIDTHS[self._bits]
        return [number // loads * width for width, loads in zip(widths, self._loads, strict=True)]

    def _loaded(self, part: int, column: int, load: int) -> Any:
        key = (part, column, load)
        if key not in self._stored:
            tiles, array = self._tiles, self._arrays[part]
            pitch = tiles.at((self._plane, self._loads[part]))
            place = tiles.at((tiles.at(self._column, column), pitch), (self._plane, load))
            place = tiles.at(place, (self._step, STEP))
            tiles.ask(tiles.place(array, tiles.at(place, AHEAD), BYTE), SECOND_CACHE)
            self._stored[key] = tiles.builder.load(tiles.place(array, place, HALVES), align=1)
        return self._stored[key]


def loads_of(bits: int) -> list[int]:
    """Returns for each part of codes how many bytes of a row belong to one of a plane of the
    narrowest part."""
    return [width // min(WIDTHS[bits]) for width in WIDTHS[bits]]


def levels_of(
    tiles: Tiles, stored: Sequence[Any], shifts: Sequence[Any], bits: int, kind: int
) -> list[Any]:
    """Returns the levels, fp32, of the even and of the odd ones of some codes.

    stored: bytes with each part of the codes, as 16-bit words; shifts: where the parts begin in a
    byte, as 32-bit integers.
    """
    if kind == EIGHT_BIT_FLOATS:
        return [small_floats(tiles, stored[0]), _widened(tiles, stored[0])]
    builder, codes, shift, levels = tiles.builder, stored[0], shifts[0], []
    if len(stored) > 1:
        codes, shift = joined_codes(tiles, stored, shifts, bits), ir.Constant(INT, 0)
    word, mask = builder.zext(codes, WORDS), filled(WORDS, (1 << bits) - 1)
    for byte in (0, 8):
        by = tiles.spread(builder.add(shift, ir.Constant(INT, byte)), LANES)
        code = builder.and_(builder.lshr(word, by), mask)
        if kind == INTEGERS:
            signed = builder.sub(code, filled(WORDS, middle_of(bits)))
            levels.append(builder.sitofp(signed, FLOATS))
        else:
            levels.append(_chosen(tiles, code, TABLES[kind]))
    return levels


def joined_codes(tiles: Tiles, stored: Sequence[Any], shifts: Sequence[Any], bits: int) -> Any:
    """Returns codes, one a byte, from the bytes with their parts; see `levels_of`."""
    builder, codes, at = tiles.builder, filled(HALVES, 0), 0
    for width, part, shift in zip(WIDTHS[bits], stored, shifts, strict=True):
        mask, by = (1 << width) - 1, builder.trunc(shift, HALVES.element)
        own = builder.lshr(part, tiles.spread(by, LANES))
        own = builder.and_(own, filled(HALVES, mask << 8 | mask))
        codes = builder.or_(codes, builder.shl(own, filled(HALVES, at)))
        at += width
    return codes


def whole_levels_of(
    tiles: Tiles, stored: Sequence[Any], shifts: Sequence[Any], bits: int, kind: int
) -> Any:
    """Returns unsigned bytes that stand for a step's codes: integers themselves, and in place of
    4-bit floats twice their number, counted from `WHOLE_E2M1_ZERO`. See `levels_of`."""
    codes = tiles.builder.bitcast(joined_codes(tiles, stored, shifts, bits), BYTES)
    if kind == INTEGERS:
        return codes
    whole = [round(number / WHOLE_E2M1_UNIT) + WHOLE_E2M1_ZERO for number in TABLES[kind]]
    table = ir.Constant(BYTES, whole * 2)  # for each half of a register
    return tiles.call("llvm.x86.avx2.pshuf.b", BYTES, table, codes)


def pairs_of_levels(
    tiles: Tiles, stored: Sequence[Any], shifts: Sequence[int], bits: int, kind: int
) -> list[Any]:
    """Returns vectors of bfloat16 whose sum are the levels of a step's codes: one for each part, or
    for each half of an integer of 8 bits. The arguments are those of `levels_of`."""
    codes = [tiles.builder.zext(tiles.builder.bitcast(part, BYTES), CODES) for part in stored]
    if kind == EIGHT_BIT_FLOATS:
        return [_narrowed(tiles, codes[0])]
    if kind != INTEGERS:
        return [_looked_up(tiles, _table_of(TABLES[kind]), codes[0], shifts[0])]
    widths = WIDTHS[bits]
    if bits == 8:
        widths, codes, shifts = (4, 4), codes * 2, (0, 4)
    sums, at = [], 0
    for width, part, shift in zip(widths, codes, shifts, strict=True):
        least = middle_of(bits) if at + width == bits else 0
        table = _table_of([(code << at) - least for code in range(1 << width)])
        sums.append(_looked_up(tiles, table, part, shift))
        at += width
    return sums


def _table_of(values: Sequence[float]) -> Any:
    """Returns a constant of numbers as bfloat16, as often as they fit: of an index, which is taken
    by its low 5 bits, no more count than there are numbers."""
    bits = np.array(values, ml_dtypes.bfloat16).view(np.uint16)
    return ir.Constant(CODES, [int(x) for x in np.resize(bits, STEP)])


def _looked_up(tiles: Tiles, table: Any, words: Any, shift: int) -> Any:
    """Returns what a table has for the bits of words from `shift` on."""
    indices = tiles.builder.lshr(words, filled(CODES, shift))
    levels = tiles.call("llvm.x86.avx512.permvar.hi.512", CODES, table, indices)
    return tiles.builder.bitcast(levels, WORDS)


def small_floats(tiles: Tiles, stored: Any) -> Any:
    """Returns the levels, fp32, of the 8-bit floats in the low bytes of 16-bit words."""
    return _widened(tiles, tiles.builder.shl(stored, filled(HALVES, 8)))


def _widened(tiles: Tiles, stored: Any) -> Any:
    """Returns the levels, fp32, of the 8-bit floats in the high bytes of 16-bit words."""
    builder = tiles.builder
    sign = builder.and_(stored, filled(HALVES, 0x8000))
    magnitude = builder.and_(builder.lshr(stored, filled(HALVES, 1)), filled(HALVES, 0x3F80))
    half = builder.bitcast(builder.or_(sign, magnitude), HALF_FLOATS)
    return builder.fpext(half, FLOATS)


def _narrowed(tiles: Tiles, codes: Any) -> Any:
    """Returns the levels of 8-bit floats as bfloat16, whose exponent is of 8 bits: numbers below
    the least normal one come out of a table."""
    builder, exponent = tiles.builder, 127 - 7 - 8
    low = builder.and_(codes, filled(CODES, 0x7F))
    normal = builder.add(builder.shl(low, filled(CODES, 4)), filled(CODES, exponent << 7))
    table = _table_of([mantissa * 2.0**-9 / E4M3_UNIT for mantissa in range(8)])
    small = builder.bitcast(_looked_up(tiles, table, codes, 0), CODES)
    is_small = builder.icmp_unsigned("<", low, filled(CODES, 8))
    sign = builder.shl(builder.and_(codes, filled(CODES, 0x80)), filled(CODES, 8))
    return builder.bitcast(builder.or_(sign, builder.select(is_small, small, normal)), WORDS)


def _chosen(tiles: Tiles, codes: Any, numbers: Sequence[float]) -> Any:
    """Returns a number of a table of 16 for each code. A register holds the table, or half of it:
    then the lowest three bits of a code choose in both halves, and the fourth one between them."""
    builder, table = tiles.builder, [float(number) for number in numbers]
    if has_wide_vectors():
        name = "llvm.x86.avx512.permvar.sf.512"
        return tiles.call(name, FLOATS, ir.Constant(FLOATS, table), codes)
    words, floats = ir.VectorType(INT, 8), ir.VectorType(FLOAT, 8)
    low, high = (ir.Constant(floats, part) for part in (table[:8], table[8:]))
    chosen = []
    for first in (0, 8):
        lanes = ir.Constant(words, list(range(first, first + 8)))
        code = builder.shuffle_vector(codes, codes, lanes)
        lower, upper = (
            tiles.call("llvm.x86.avx2.permps", floats, half, code) for half in (low, high)
        )
        bit = builder.and_(code, filled(words, 8))
        chosen.append(
            builder.select(builder.icmp_signed("!=", bit, filled(words, 0)), upper, lower)
        )
    return builder.shuffle_vector(*chosen, ir.Constant(WORDS, list(range(16))))
