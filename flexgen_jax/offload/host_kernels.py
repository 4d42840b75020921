"""Decode attention on the CPU over keys and values where they lie, compiled by Numba.

XLA's CPU backend reads a 16-bit cache at a third to a half of the memory's speed, since its loops
convert element by element; these loops read it at the memory's, in any format it is kept in.
A kernel folds one block into the running result of some rows (a sequence's head each):

    peak, total, out <- the largest score so far, the sum of exp(score - peak), and the sum of
                        exp(score - peak) * value

Rows are independent, so threads take ranges of them; the kernels hold no interpreter lock.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

# Sums may be taken in any order; NaN and infinity are respected.
MATH = {"reassoc", "nsz", "contract", "arcp"}

LOG2_E = np.float32(1.4426950408889634)
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
HALF_SCALE = np.float32(2.0**112)
"""What turns float16's exponent into float32's."""


def _as_float(_context: Any, _bits: Any) -> Any:
    """The float32 of these bits."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


as_float: Any = intrinsic(_as_float)


@njit(inline="always")
def widen(bits: Any, is_half: bool) -> Any:
    """bfloat16, or float16, as float32."""
    wide = np.uint32(bits)  # Numba would go on in 64 bits
    if is_half:
        sign = np.uint32(np.uint32(wide & np.uint32(0x8000)) << np.uint32(16))
        magnitude = np.uint32(np.uint32(wide & np.uint32(0x7FFF)) << np.uint32(13))
        return as_float(np.uint32(sign | magnitude)) * HALF_SCALE
    return as_float(np.uint32(wide << np.uint32(16)))


@njit(inline="always")
def code_of(byte: Any, shift: int, bits: int) -> Any:
    """One of the codes in a byte."""
    mask = np.uint32((1 << bits) - 1)
    return np.float32(np.int32(np.uint32(np.uint32(np.uint32(byte) >> np.uint32(shift)) & mask)))


@njit(inline="always")
def exp(x: Any) -> Any:
    """e^x for x <= 0, to 2 units in the last place; written out so that it vectorizes."""
    x = x if x > np.float32(-87.0) else np.float32(-87.0)
    whole = np.floor(x * LOG2_E + np.float32(0.5))
    x = x - whole * LN2_HIGH - whole * LN2_LOW
    series = np.float32(1.9875691500e-4)
    series = series * x + np.float32(1.3981999507e-3)
    series = series * x + np.float32(8.3334519073e-3)
    series = series * x + np.float32(4.1665795894e-2)
    series = series * x + np.float32(1.6666665459e-1)
    series = series * x + np.float32(5.0000001201e-1)
    series = series * x * x + x + np.float32(1.0)
    return series * as_float(np.uint32((np.int32(whole) + np.int32(127)) << np.int32(23)))


def dot(_kept: Any, _row: int, _token: int, _query: Any, *_format: Any) -> float:
    """A token's key times the query, whatever the key is kept in."""
    raise NotImplementedError("compiled only")


def add(_kept: Any, _row: int, _token: int, _weight: float, _out: Any, *_format: Any) -> None:
    """Adds a token's value times its weight to `out` [head_dim]."""
    raise NotImplementedError("compiled only")


@overload(dot, inline="always")
def _dot(kept, row, token, query, size, is_half, bits):
    if len(kept) == 3:
        return _dot_packed
    return _dot_16 if kept[0].dtype == types.uint16 else _dot_32


def _dot_32(kept, row, token, query, size, is_half, bits):
    score = np.float32(0)
    for i in range(size):
        score += kept[0][row, token, i] * query[i]
    return score


def _dot_16(kept, row, token, query, size, is_half, bits):
    score = np.float32(0)
    for i in range(size):
        score += widen(kept[0][row, token, i], is_half) * query[i]
    return score


def _dot_packed(kept, row, token, query, size, is_half, bits):
    packed, scale, minimum = kept
    length, group = packed.shape[2], size // scale.shape[2]
    step = min(length, group)
    score = np.float32(0)
    for start in range(0, size, step):  # pieces of one plane and one group
        codes, summed = np.float32(0), np.float32(0)
        plane, first = divmod(start, length)
        for i in range(step):
            code = code_of(packed[row, token, first + i], bits * plane, bits)
            codes += code * query[start + i]
            summed += query[start + i]
        score += widen(scale[row, token, start // group], is_half) * codes
        score += widen(minimum[row, token, start // group], is_half) * summed
    return score


@overload(add, inline="always")
def _add(kept, row, token, weight, out, size, is_half, bits):
    if len(kept) == 3:
        return _add_packed
    return _add_16 if kept[0].dtype == types.uint16 else _add_32


def _add_32(kept, row, token, weight, out, size, is_half, bits):
    for i in range(size):
        out[i] += weight * kept[0][row, token, i]


def _add_16(kept, row, token, weight, out, size, is_half, bits):
    for i in range(size):
        out[i] += weight * widen(kept[0][row, token, i], is_half)


def _add_packed(kept, row, token, weight, out, size, is_half, bits):
    packed, scale, minimum = kept
    length, group = packed.shape[2], size // scale.shape[2]
    step = min(length, group)
    for start in range(0, size, step):
        plane, first = divmod(start, length)
        slope = weight * widen(scale[row, token, start // group], is_half)
        low = weight * widen(minimum[row, token, start // group], is_half)
        for i in range(step):
            code = code_of(packed[row, token, first + i], bits * plane, bits)
            out[start + i] += slope * code + low


@lru_cache
def fold_for(size: int, is_half: bool, bits: int) -> Callable[..., None]:
    """The kernel for heads of this size, kept in float16 or not, packed in `bits` or not; known
    when it is compiled, that makes loops short and free of checks.

    fold(query, keys, values, first, stop, peak, total, out, start, end) folds a
    block into rows `start` to `end`. query: fp32 [row, head_dim], scaled; keys, values: the arrays
    they are kept in, each [row, token, ...]; first: int64 [row], the first valid token of each;
    stop: the first token that is not valid any more; peak, total: fp32 [row]; out: fp32 [row,
    head_dim].
    """

    def fold(query, keys, values, first, stop, peak, total, out, start, end):
        scores = np.empty(keys[0].shape[1], np.float32)
        for row in range(start, end):
            begin = first[row]
            if begin >= stop:
                continue
            highest, question, mixed = peak[row], query[row], out[row]
            for token in range(begin, stop):
                scores[token] = dot(keys, row, token, question, size, is_half, bits)
            for token in range(begin, stop):
                highest = scores[token] if scores[token] > highest else highest
            fade, summed = exp(peak[row] - highest), np.float32(0)
            for token in range(begin, stop):
                scores[token] = exp(scores[token] - highest)
            for token in range(begin, stop):
                summed += scores[token]
            for i in range(size):
                mixed[i] *= fade
            for token in range(begin, stop):
                add(values, row, token, scores[token], mixed, size, is_half, bits)
            peak[row], total[row] = highest, total[row] * fade + summed

    try:
        return njit(nogil=True, cache=True, fastmath=MATH)(fold)
    except RuntimeError:  # neither the package's folder nor the user's cache can be written to
        return njit(nogil=True, fastmath=MATH)(fold)
