"""The codes of packed kernel weights, and the levels that they stand for.

Integers are counted from the middle one, and an 8-bit float's levels are `E4M3_UNIT` times smaller
than its numbers: its sign, exponent and mantissa are put into a float16, which a processor widens
right where a number is below the least normal one, too.

    E4M3       s eeee mmm
    float16    s 0eeee mmm0000000     2^(15 - 7) = 2^8 times smaller
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

from flexgen_jax.cpu.jit.emit import F32, I8, I16, I32, SECOND_CACHE, Array, Function, Value
from flexgen_jax.cpu.jit.instructions import LANES, lookup_bytes, lookup_floats, lookup_words
from flexgen_jax.cpu.jit.operands import STEP
from flexgen_jax.cpu.jit.vectors import from_float16
from flexgen_jax.models.formats.format import WIDTHS, planes_of
from flexgen_jax.models.formats.levels import E2M1, NF4

TABLES: dict[str, Sequence[float]] = {"e2m1": E2M1, "nf4": NF4}
"""The numbers that codes of 4 bits choose from."""

E4M3_UNIT = 2.0**8
"""An 8-bit float's number over its level."""

WHOLE_E2M1_UNIT, WHOLE_E2M1_ZERO = 0.5, 12
"""A 4-bit float's number over an integer that stands for it, less the integer that stands for 0."""

AHEAD = 1 << 12
"""About how many bytes ahead codes are prefetched."""

WORDS_IN_TABLE = 32


def middle_of(bits: int) -> int:
    """Returns a code in the middle of all."""
    return 1 << (bits - 1)


def loads_of(bits: int) -> list[int]:
    """Returns for each part of codes how many bytes of a row belong to one of a plane of the
    narrowest part."""
    return [width // min(WIDTHS[bits]) for width in WIDTHS[bits]]


@dataclass(frozen=True)
class Codes:
    """The codes of kernel weights that are grouped along their input.

    With 6 bits, 4 + 2, a step of a plane of n/4 elements is of the elements j, j + n/4, j + n/2 and
    j + 3n/4: one load of the 2 bits serves all four, and each of two loads of the 4 bits two.
    """

    arrays: Sequence[Array]
    """Of the parts of codes, `Format.widths` bits wide."""
    plane: Value
    """Elements of a plane of the narrowest part."""
    bits: int
    levels: str
    in_lanes: bool = False
    """Whether codes lie in lanes, as one plane."""

    @property
    def planes(self) -> list[int]:
        """The numbers of planes, those together that need the same bytes."""
        if self.in_lanes:
            return [0]
        first = loads_of(self.bits)[0]
        return sorted(range(planes_of(self.bits)), key=lambda number: number % first)

    def step(self, columns: Sequence[Value], step: Value) -> CodesOfStep:
        """Returns the bytes of a step of some columns."""
        return CodesOfStep(self, columns, step)


@dataclass
class CodesOfStep:
    """The bytes of a step of some columns' codes; each is loaded when it is first needed."""

    codes: Codes
    columns: Sequence[Value]
    step: Value
    _loaded: dict[tuple[int, int, int], Value] = field(default_factory=dict)

    def bytes_of(self, column: int, plane: int) -> list[Value]:
        """Returns bytes with each part of a plane's codes, as 16-bit words."""
        loads = loads_of(self.codes.bits)
        return [self._bytes(part, column, plane % count) for part, count in enumerate(loads)]

    def shifts_of(self, plane: int) -> list[int]:
        """Returns where the parts of a plane's codes begin in these bytes."""
        widths, loads = WIDTHS[self.codes.bits], loads_of(self.codes.bits)
        return [plane // count * width for width, count in zip(widths, loads, strict=True)]

    def _bytes(self, part: int, column: int, load: int) -> Value:
        key = (part, column, load)
        if key not in self._loaded:
            of = self.codes
            pitch = of.plane * loads_of(of.bits)[part]
            place = self.columns[column] * pitch + of.plane * load + self.step * STEP
            of.arrays[part].prefetch(place + AHEAD, SECOND_CACHE)
            self._loaded[key] = of.arrays[part].load(place, STEP).bits(I16)
        return self._loaded[key]


def levels_of(stored: Sequence[Value], shifts: Sequence[Value | int], codes: Codes) -> list[Value]:
    """Returns the levels, fp32, of the even and of the odd ones of a step's codes.

    stored: bytes with each part of the codes, as 16-bit words; shifts: where the parts begin in a
    byte, as 32-bit integers.
    """
    if codes.levels == "e4m3":
        return [from_e4m3(stored[0] << 8), from_e4m3(stored[0])]
    words, shift, levels, k = stored[0], shifts[0], [], stored[0].k
    if len(stored) > 1:
        words, shift = joined_codes(stored, shifts, codes.bits), 0
    wide = words.to(I32, is_signed=False)
    for byte in (0, 8):
        code = wide >> shift + byte & (1 << codes.bits) - 1
        if codes.levels == "integers":
            levels.append((code - middle_of(codes.bits)).to(F32))
        else:
            levels.append(lookup_floats(k, TABLES[codes.levels], code))
    return levels


def joined_codes(stored: Sequence[Value], shifts: Sequence[Value | int], bits: int) -> Value:
    """Returns codes, one a byte, from the bytes with their parts; see `levels_of`."""
    joined, at = stored[0].k.filled(I16, LANES), 0
    for width, words, shift in zip(WIDTHS[bits], stored, shifts, strict=True):
        by = shift.to(I16) if isinstance(shift, Value) else shift
        mask = (1 << width) - 1
        joined = joined | (words >> by & (mask << 8 | mask)) << at
        at += width
    return joined


def whole_levels_of(stored: Sequence[Value], shifts: Sequence[Value | int], codes: Codes) -> Value:
    """Returns unsigned bytes that stand for a step's codes: integers themselves, and in place of
    4-bit floats twice their number, counted from `WHOLE_E2M1_ZERO`. See `levels_of`."""
    joined = joined_codes(stored, shifts, codes.bits).bits(I8)
    if codes.levels == "integers":
        return joined
    whole = [round(x / WHOLE_E2M1_UNIT) + WHOLE_E2M1_ZERO for x in TABLES[codes.levels]]
    return lookup_bytes(joined.k, whole, joined)


def pairs_of_levels(stored: Sequence[Value], shifts: Sequence[int], codes: Codes) -> list[Value]:
    """Returns vectors of bfloat16 whose sum are the levels of a step's codes: one for each part, or
    for each half of an integer of 8 bits. The arguments are those of `levels_of`."""
    k, parts = stored[0].k, [words.bits(I8).to(I16, is_signed=False) for words in stored]
    if codes.levels == "e4m3":
        return [_narrowed(k, parts[0])]
    if codes.levels != "integers":
        return [_looked_up(k, TABLES[codes.levels], parts[0], shifts[0])]
    widths: tuple[int, ...] = WIDTHS[codes.bits]
    if codes.bits == 8:
        widths, parts, shifts = (4, 4), parts * 2, (0, 4)
    sums, at = [], 0
    for width, words, shift in zip(widths, parts, shifts, strict=True):
        least = middle_of(codes.bits) if at + width == codes.bits else 0
        table = [float((code << at) - least) for code in range(1 << width)]
        sums.append(_looked_up(k, table, words, shift))
        at += width
    return sums


def _looked_up(k: Function, table: Sequence[float], words: Value, shift: int) -> Value:
    """Returns a table's bfloat16 for the bits of words from `shift` on, two in a word of 32 bits.
    Bits of an index above the table's size do not matter: it is repeated."""
    bits = np.resize(np.array(table, ml_dtypes.bfloat16).view(np.uint16), WORDS_IN_TABLE)
    return lookup_words(k, [int(x) for x in bits], words >> shift).bits(I32)


def from_e4m3(words: Value) -> Value:
    """Returns the levels, fp32, of the 8-bit floats in the high bytes of 16-bit words."""
    return from_float16(words & 0x8000 | words >> 1 & 0x3F80)


def _narrowed(k: Function, codes: Value) -> Value:
    """Returns the levels of 8-bit floats as bfloat16, whose exponent is of 8 bits: numbers below
    the least normal one come out of a table."""
    exponent, low = 127 - 7 - 8, codes & 0x7F
    normal = (low << 4) + (exponent << 7)
    table = [mantissa * 2.0**-9 / E4M3_UNIT for mantissa in range(8)]
    small = _looked_up(k, table, codes, 0).bits(I16)
    is_normal = low.exceeds(7)
    return ((codes & 0x80) << 8 | is_normal.select(normal, small)).bits(I32)
