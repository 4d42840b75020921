"""Scales and offsets of kernel weights that are grouped along their input, compiled by Numba.

A weight is `scale * level + offset`, where levels are integers around a middle, or numbers of a
table. Each function writes the scales and the offsets of one row of a kernel, fp32, one for every
`STEP` elements or for half as many: groups are multiples of that. `LANES` groups at a time are
widened as vectors. Those that are left are widened with some before them again, or one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from flexgen_jax.cpu.jit.grouped_factors_ir import (
    BLOCK,
    scaling_of,
    widen_floats_of,
    widen_four,
    widen_signed,
    widen_six,
    widen_units,
)
from flexgen_jax.cpu.jit.llvm import LANES
from flexgen_jax.cpu.jit.packing import single

SUPER = 256
"""Elements that share a unit of integers."""


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
    "e4m3": from_small_float,
}


@njit(inline="always")
def six_bits(low, high, row, count, index):
    """Returns a code of 6 bits: a row's `count` codes are kept as 4 bits in planes of two, and 2
    bits in planes of four."""
    each = count // 4
    plane, inside = index // each, index % each
    lower = low[row * 2 * each + plane % 2 * each + inside] >> (plane // 2 * 4) & 15
    upper = high[row * each + inside] >> (plane * 2) & 3
    return np.float32(lower | upper << 4)


def factors_of(
    kind: str, bits: int, dtype: str, repeats: int, rows: int, has_minimum: bool, unit: float
) -> Any:
    """Returns the function that writes a row's scales and offsets.

    Its arguments: the kernel's leaves but the codes, flat; the row; how many groups a row has;
    scales and offsets, fp32, and where they begin; the middle code, less the code that stands for
    zero where there is no minimum: what is multiplied is a code less the middle one. repeats:
    groups have this many times `STEP` elements. rows: that share their scales, 0 if all do. bits:
    of zeros. dtype: of floats. unit: what 1 of a level of floats stands for before it is scaled.
    """
    makers: dict[str, Callable[[], Any]] = {
        "unit": _of_units,
        "floats": lambda: _of_floats(dtype, repeats, rows, has_minimum, unit),
        "zeros": lambda: _with_zeros(bits, dtype, repeats),
        "small": lambda: _of_small_floats(unit),
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


def _of_floats(dtype: str, repeats: int, rows: int, has_minimum: bool, unit: float) -> Any:
    """Scales, and perhaps minima, which some rows share."""
    widen, widen_all = WIDEN[dtype], widen_floats_of(dtype, has_minimum)
    last, sharing, factor = int(has_minimum), rows or 1 << 62, np.float32(unit)

    @njit(inline="always")
    def take(leaves, row, count, scales, offsets, at, middle):
        scale, minimum, begin = leaves[0], leaves[last], row // sharing * count
        whole = count // LANES if repeats == 1 else 0
        widen_all(scale, minimum, begin, whole, factor, middle, scales, offsets, at)
        for group in range(whole * LANES, count):
            step = widen(scale[begin + group]) * factor
            offset = middle * step
            if has_minimum:
                offset += widen(minimum[begin + group])
            for n in range(repeats):
                scales[at + group * repeats + n] = step
                offsets[at + group * repeats + n] = offset

    return take


def _with_zeros(bits: int, dtype: str, repeats: int) -> Any:
    """Floats with zeros that are codes of as many bits as the weights', in planes."""
    widen, planes, mask = WIDEN[dtype], 8 // bits, (1 << bits) - 1

    @njit(inline="always")
    def take(leaves, row, count, scales, offsets, at, middle):
        each = (count + planes - 1) // planes
        for group in range(count):
            step = widen(leaves[0][row * count + group])
            byte = leaves[1][row * each + group % each]
            zero = np.float32(byte >> (bits * (group // each)) & mask)
            for n in range(repeats):
                scales[at + group * repeats + n] = step
                offsets[at + group * repeats + n] = (middle - zero) * step

    return take


def _of_small_floats(unit: float) -> Any:
    """8-bit floats in units of one number for all."""
    widen, widen_all, factor = WIDEN["e4m3"], widen_floats_of("e4m3", False), np.float32(unit)

    @njit(inline="always")
    def take(leaves, row, count, scales, offsets, at, middle):
        scale, begin, whole = leaves[0], row * count, count // LANES
        own = from_float32(leaves[1][0]) * factor
        widen_all(scale, scale, begin, whole, own, middle, scales, offsets, at)
        for group in range(whole * LANES, count):
            step = widen(scale[begin + group]) * own
            scales[at + group], offsets[at + group] = step, middle * step

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
            scale_block(scales, offsets, at + block * BLOCK, units, others, unit, middle)

    return take


def _sixes_from(leaf: int) -> Any:
    """Codes of 6 bits, in two leaves."""
    upper_leaf = leaf + 1

    @njit(inline="always")
    def widen(leaves, row, count, values, at):
        low, high, each = leaves[leaf], leaves[upper_leaf], count // 4
        if each < LANES:
            for group in range(count):
                values[at + group] = six_bits(low, high, row, count, group)
            return
        for begin in range(0, each, LANES):
            inside = min(begin, each - LANES)
            lower, upper = row * 2 * each + inside, row * each + inside
            widen_six(low, lower, high, upper, each, values, at + inside)

    return widen


def _fours_from(leaf: int) -> Any:
    """Codes of 4 bits, in planes of two."""

    @njit(inline="always")
    def widen(leaves, row, count, values, at):
        codes, half = leaves[leaf], count // 2
        if half < LANES:
            for group in range(count):
                code = codes[row * half + group % half] >> (group // half * 4) & 15
                values[at + group] = np.float32(code)
            return
        for begin in range(0, half, LANES):
            inside = min(begin, half - LANES)
            widen_four(codes, row * half + inside, half, values, at + inside)

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
