"""Scales and offsets of kernel weights that are grouped along their input.

A weight is `scale * level + offset`, where levels are integers counted from a middle code, or
numbers of a table. `take` writes the scales and the offsets of one row of the kernel weights, fp32,
one for every `Grouping.unit` elements: groups are multiples of that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flexgen_jax.cpu.grouped import Grouping
from flexgen_jax.cpu.jit.emit import F32, I8, I16, I32, Array, Scalar, Value
from flexgen_jax.cpu.jit.handler import Call
from flexgen_jax.cpu.jit.instructions import LANES
from flexgen_jax.cpu.jit.levels import E4M3_UNIT, from_e4m3
from flexgen_jax.cpu.jit.vectors import from_bfloat16, from_float16

BLOCK = 8
"""Groups whose integers are scaled together."""

SUPER_BLOCK = 256
"""Elements that share a unit of integers."""


@dataclass(frozen=True)
class Factors:
    """The factors of kernel weights.

    A code is multiplied as a number counted from `middle`, less the code that stands for zero where
    there is no minimum.
    """

    of: Grouping
    leaves: Sequence[Array]
    """The kernel's leaves but the codes."""
    depth: Value
    middle: float
    level_unit: float = 1.0
    """What 1 of a level of floats stands for before it is scaled."""

    @classmethod
    def of_call(
        cls, of: Grouping, call: Call, first: int, middle: float, level_unit: float = 1.0
    ) -> Factors:
        """Returns the factors whose leaves are a call's arguments from number `first` on."""
        scalars: dict[str, Scalar] = {"uint8": I8, "int8": I8, "float32": F32}
        leaves = [
            call.argument(first + n).array(scalars.get(kind, I16))
            for n, kind in enumerate(of.kinds)
        ]
        return cls(of, leaves, call.argument(0).size(1), middle, level_unit)

    @property
    def groups(self) -> Value:
        """Groups of a row."""
        return self.depth // (self.of.unit * self.of.repeats)

    @property
    def is_direct(self) -> bool:
        """Whether `load` widens factors: those that are stored one by one."""
        return self.of.repeats == 1 and self.of.factors in ("unit", "floats", "small")

    def load(self, row: Value, group: Value, lanes: int) -> tuple[Value, Value]:
        """Returns the scales and offsets of neighbouring groups of a row."""
        of, leaves = self.of, self.leaves
        at = row * self.groups + group
        if of.factors == "unit":  # 8-bit integers in units of their row
            scale, units, minimum, others = leaves
            unit, other = (from_bfloat16(side.load(row)) for side in (units, others))
            step = scale.load(at, lanes).to(I32, is_signed=False).to(F32) * unit
            return step, minimum.load(at, lanes).to(F32) * other + step * self.middle
        if of.factors == "small":  # 8-bit floats in units of one number for all
            step = widened(leaves[0], at, "e4m3", lanes) * (leaves[1].load(0) * self.level_unit)
            return step, step * self.middle
        at = (row // of.rows * self.groups if of.rows else row.k.index(0)) + group
        step = widened(leaves[0], at, of.dtype, lanes) * self.level_unit
        offset = step * self.middle
        if of.has_minimum:
            offset = widened(leaves[1], at, of.dtype, lanes) + offset
        return step, offset

    def take(self, row: Value, scales: Array, offsets: Array) -> None:
        """Writes the factors of a row."""
        if self.of.factors == "zeros":
            self._take_zeros(row, scales, offsets)
        elif self.of.factors in ("unit", "floats", "small"):

            def write(group: Value, lanes: int) -> None:
                pair = self.load(row, group, lanes)
                self._store_repeated(group, pair, scales, offsets)

            for_each_group(self.groups, write, most=LANES if self.of.repeats == 1 else 1)
        else:
            self._take_blocks(row, scales, offsets)

    def _take_zeros(self, row: Value, scales: Array, offsets: Array) -> None:
        """Floats with zeros that are codes of as many bits as the weights', in planes."""
        of, (scale, zeros, *_) = self.of, self.leaves
        planes, mask = 8 // of.bits, (1 << of.bits) - 1
        each = (self.groups + (planes - 1)) // planes

        def write(group: Value, lanes: int) -> None:
            step = widened(scale, row * self.groups + group, of.dtype, lanes)
            byte = zeros.load(row * each + group % each).to(I32, is_signed=False)
            zero = (byte >> (group // each * of.bits).to(I32) & mask).to(F32)
            self._store_repeated(group, (step, (self.middle - zero) * step), scales, offsets)

        for_each_group(self.groups, write, most=1)

    def _store_repeated(
        self, group: Value, pair: tuple[Value, Value], scales: Array, offsets: Array
    ) -> None:
        for factor, array in zip(pair, (scales, offsets), strict=True):
            if self.of.repeats == 1:
                array.store(group, factor)
                continue
            with group.k.loop(self.of.repeats) as n:
                array.store(group * self.of.repeats + n, factor)

    def _take_blocks(self, row: Value, scales: Array, offsets: Array) -> None:
        """Integers in units of their block, and perhaps minima of the same format."""
        writers: dict[str, tuple[Callable[..., None], int, int]] = {
            "sixes": (_write_sixes, 2, 0),
            "signed_sixes": (_write_sixes, 2, 32),
            "fours": (_write_fours, 1, 0),
            "bytes": (_write_bytes, 1, 0),
        }
        write, num_leaves, center = writers[self.of.factors]
        has_minimum = self.of.factors in ("sixes", "fours")
        write(self.leaves[:num_leaves], row, self.groups, scales)
        if has_minimum:
            minima = self.leaves[num_leaves + 1 : 2 * num_leaves + 1]
            write(minima, row, self.groups, offsets)
        units, others = self.leaves[num_leaves], self.leaves[-1]
        blocks = self.groups // BLOCK
        sharing = SUPER_BLOCK // self.of.unit // BLOCK
        with row.k.loop(blocks) as block:
            index = (row * blocks + block) // sharing
            one, other = (from_float16(side.load(index)) for side in (units, others))
            step = (scales.load(block * BLOCK, BLOCK) - float(center)) * one
            offset = step * self.middle
            if has_minimum:
                offset = offset - offsets.load(block * BLOCK, BLOCK) * other
            scales.store(block * BLOCK, step)
            offsets.store(block * BLOCK, offset)


def for_each_group(count: Value, write: Callable[[Value, int], None], most: int = LANES) -> None:
    """Emits `write`, with a group and a number of lanes, for `most` groups at a time and then for
    each remaining group."""
    k, whole = count.k, count // most * most
    with k.loop(whole, step=most) as group:
        write(group, most)
    if most > 1:
        with k.loop(count, whole) as group:
            write(group, 1)


def widened(array: Array, at: Value, dtype: str, lanes: int) -> Value:
    """Loads floats as fp32; dtype: a float's, "e8m0" for exponents of powers of two, or "e4m3"."""
    stored = array.load(at, lanes)
    if dtype == "float32":
        return stored
    if dtype == "float16":
        return from_float16(stored)
    if dtype == "bfloat16":
        return from_bfloat16(stored)
    if dtype == "e4m3":
        return from_e4m3(stored.to(I16, is_signed=False) << 8) * E4M3_UNIT
    exponent = stored.to(I32, is_signed=False)
    return (exponent.equals(0).select(exponent | 1, exponent) << 23).bits(F32)


def _write_sixes(leaves: Sequence[Array], row: Value, count: Value, values: Array) -> None:
    """Codes of 6 bits: 4 bits in planes of two, and 2 bits in planes of four."""
    (low, high), each = leaves, count // 4

    def write(inside: Value, lanes: int) -> None:
        fours = [
            low.load(row * 2 * each + plane * each + inside, lanes).to(I32, is_signed=False)
            for plane in map(row.k.index, range(2))
        ]
        twos = high.load(row * each + inside, lanes).to(I32, is_signed=False)
        for plane in range(4):
            code = fours[plane % 2] >> plane // 2 * 4 & 15 | (twos >> plane * 2 & 3) << 4
            values.store(each * plane + inside, code.to(F32))

    for_each_group(each, write)


def _write_fours(leaves: Sequence[Array], row: Value, count: Value, values: Array) -> None:
    """Codes of 4 bits, in planes of two."""
    half = count // 2

    def write(inside: Value, lanes: int) -> None:
        stored = leaves[0].load(row * half + inside, lanes).to(I32, is_signed=False)
        for plane in range(2):
            values.store(half * plane + inside, (stored >> plane * 4 & 15).to(F32))

    for_each_group(half, write)


def _write_bytes(leaves: Sequence[Array], row: Value, count: Value, values: Array) -> None:
    """Signed bytes."""

    def write(group: Value, lanes: int) -> None:
        values.store(group, leaves[0].load(row * count + group, lanes).to(F32))

    for_each_group(count, write)
