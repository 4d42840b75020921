"""How codes in lanes are multiplied by rows, see `lane_rows`.

Rows are laid out as codes are, [block][line][lane][elements of a line]. They are rounded lane by
lane to x = unit * (256 high + low): two 8-bit digits, which are as exact as bfloat16, or to one
(LLM.int8(), section 3.1). Sums of integers are exact, so a row's result depends on no other row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flexgen_jax.cpu.jit.emit import F32, I8, I16, I32, Array, Scalar, Value
from flexgen_jax.cpu.jit.instructions import (
    LANES,
    add_pairs,
    add_products_of_bytes,
    dot_bytes,
)
from flexgen_jax.cpu.jit.vectors import from_bfloat16, rounded_in_units
from flexgen_jax.cpu.processor import Processor
from flexgen_jax.layers.matmul_int8 import LEVELS

WORD = 4
"""Bytes of a lane in a line of codes."""

DIGIT = 8
"""Bits of a digit."""


@dataclass(frozen=True)
class Lines:
    """Lines of a block's codes, of some of its lanes."""

    codes: Array
    """From the first line's first lane on."""
    lanes: int
    pitch: int
    """Bytes from one line to the next."""

    def load(self, line: int) -> Value:
        return self.codes.load(line * self.pitch, WORD * self.lanes)


@dataclass(frozen=True)
class Place:
    """A lane of a row, where it is written."""

    left: Array
    """The row's block."""
    lane: Value
    """Its number in the block."""
    lanes: int
    """Lanes of the block."""


def for_each_block(
    limits: tuple[Value, Value], unit: int, has_half_block: bool, emit: Callable[[Value, int], None]
) -> None:
    """Emits code for the blocks of lanes from a block's begin on, by a block's begin and its lanes.
    unit: counts of `limits` in a lane; has_half_block: whether a row ends with half a block."""
    (begin, end), k, size = limits, limits[0].k, LANES * unit
    whole = begin + (end - begin) // size * size
    with k.loop(whole, begin, size) as first:
        emit(first, LANES)
    if has_half_block:
        with k.when(whole < end):
            emit(whole, LANES // 2)


class Multiplier:
    """How codes of 4 or 8 bits are multiplied by rows.

    scalar: type of the rows' elements; digits: numbers that stand for an element; has_units:
    whether elements are counted in units of their lane.
    """

    scalar: Scalar = I8
    digits = 1
    has_units = True

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def lay(self, elements: Value, place: Place, apart: Value) -> tuple[Value, Value]:
        """Writes a lane, bfloat16 as bits; returns its unit and the sum of its elements."""
        raise NotImplementedError

    def products(self, lines: Sequence[Lines], lefts: Sequence[Array], of: BlockOfRows) -> Products:
        """Returns for each row and column the sums of the products of each lane, fp32. lefts: the
        rows' elements, from the first of these lanes on."""
        raise NotImplementedError


Products = list[list[Value]]


@dataclass(frozen=True)
class BlockOfRows:
    """The layout of rows in a block."""

    unit: int
    """Elements of a lane."""
    lanes: int
    """Lanes of the block."""
    apart: Value
    """Elements between digits."""


class Digits(Multiplier):
    """Products of bytes: rows are rounded to one 8-bit digit, or to two."""

    def __init__(self, bits: int, digits: int, processor: Processor) -> None:
        super().__init__(bits)
        self.digits = digits
        # Either int32 sums of four products, or int16 sums of two. For the latter, codes are taken
        # by halves, so that the products of a lane, of 15 and 128 at most, stay below 2^15.
        self._has_fours = processor.has_all({"avx512vnni", "avx512vl"})

    @property
    def takes_halves(self) -> bool:
        """Whether 8-bit codes are multiplied by halves."""
        return self.bits == 8 and not self._has_fours

    @property
    def _parts(self) -> int:
        """Sums for each digit."""
        return 2 if self.takes_halves else 1

    def lay(self, elements: Value, place: Place, apart: Value) -> tuple[Value, Value]:
        largest = LEVELS << DIGIT * (self.digits - 1)
        unit, rest = rounded_in_units(from_bfloat16(elements), largest)
        total = rest.reduce("add").to(F32) * unit
        for digit in range(self.digits):  # the highest first
            is_last = digit == self.digits - 1
            own = rest if is_last else (rest + (1 << DIGIT - 1)).shifted_right(DIGIT)
            rest, words = rest - (own << DIGIT), own.to(I8).bits(I32)
            to = place.left.at(apart * digit + place.lane * WORD)
            for line in range(elements.lanes // WORD):
                to.at(line * place.lanes * WORD).of(I32).store(0, words.lane(line))
        return unit, total

    def products(self, lines: Sequence[Lines], lefts: Sequence[Array], of: BlockOfRows) -> Products:
        k, lanes, halves = of.apart.k, lines[0].lanes, 8 // self.bits
        zero = k.filled(I32, lanes) if self._has_fours else k.filled(I16, 2 * lanes)
        every = [(row, column) for row in range(len(lefts)) for column in range(len(lines))]
        sums = {place: [[zero] * self._parts for _ in range(self.digits)] for place in every}
        for line in range(of.unit * self.bits // 8 // WORD):
            codes = [self._codes(own.load(line)) for own in lines]
            for half in range(halves):
                at = (line * halves + half) * of.lanes * WORD
                for row, left in enumerate(lefts):
                    for digit in range(self.digits):
                        x = left.at(of.apart * digit).load(at, WORD * lanes)
                        for column, own in enumerate(codes):
                            totals = sums[row, column][digit]
                            for part in range(self._parts):
                                code = own[half if self.bits == 4 else part]
                                totals[part] = self._added(totals[part], code, x)
        columns = range(len(lines))
        return [[self._combined(sums[row, n]) for n in columns] for row in range(len(lefts))]

    def _codes(self, stored: Value) -> list[Value]:
        """Returns the low and the high halves of bytes, or bytes as they are."""
        if self.bits == 8 and self._has_fours:
            return [stored]
        return [(stored.bits(I16) >> shift & 0x0F0F).bits(I8) for shift in (0, 4)]

    def _added(self, total: Value, codes: Value, x: Value) -> Value:
        if self._has_fours:
            return dot_bytes(total, codes, x)
        return total + add_products_of_bytes(codes, x)

    def _combined(self, digits: Sequence[Sequence[Value]]) -> Value:
        """Returns the sums of lanes from those of digits, and of halves of codes."""
        wide = []
        for parts in digits:
            sums = parts if self._has_fours else [add_pairs(part) for part in parts]
            wide.append(sums[0] + (sums[1] << 4) if len(sums) == 2 else sums[0])
        whole = (wide[0] << DIGIT) + wide[1] if len(wide) == 2 else wide[0]
        return whole.to(F32)


class Floats(Multiplier):
    """Products of fp32: for more than two rows and codes of 8 bits these take less time than bytes
    where there are no sums of four products."""

    scalar = F32
    has_units = False

    def lay(self, elements: Value, place: Place, apart: Value) -> tuple[Value, Value]:
        wide = from_bfloat16(elements)
        total = wide.lane(0)
        for element in range(elements.lanes):
            place.left.at(place.lane).store(element * place.lanes, wide.lane(element))
            total = total + wide.lane(element) if element else total
        return elements.k.number(F32, 1.0), total

    def products(self, lines: Sequence[Lines], lefts: Sequence[Array], of: BlockOfRows) -> Products:
        k, each = of.apart.k, 8 // self.bits * WORD
        sums = [[k.filled(F32, lines[0].lanes)] * len(lines) for _ in lefts]
        for line in range(of.unit // each):
            words = [own.load(line).bits(I32) for own in lines]
            for element in range(each):
                codes = [code_of(own, element, self.bits).to(F32) for own in words]
                for row, left in enumerate(lefts):
                    x = left.load((line * each + element) * of.lanes, lines[0].lanes)
                    for column, code in enumerate(codes):
                        sums[row][column] = k.fma(code, x, sums[row][column])
        return sums


def code_of(words: Value, element: int, bits: int) -> Value:
    """Returns the codes of an element of a line, from its words."""
    half, byte = divmod(element, WORD)
    return words >> 8 * byte + bits * half & (1 << bits) - 1


def code_at(words: Value, element: Value, bits: int) -> Value:
    """Does what `code_of` does for an element that is known when the kernel runs."""
    shift = (element % WORD * 8 + element // WORD * bits).to(I32)
    return words >> shift.spread(words.lanes) & (1 << bits) - 1


def multiplier_of(bits: int, digits: int, many: int, processor: Processor) -> Multiplier:
    """Returns how codes are multiplied. digits: of the rows; many: rows that are multiplied at a
    time."""
    by = Digits(bits, digits, processor)
    return Floats(bits) if by.takes_halves and many > 2 and digits == 2 else by
