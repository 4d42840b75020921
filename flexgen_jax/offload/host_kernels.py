"""Decode attention on the CPU over keys and values where they lie, compiled by Numba.

XLA's CPU backend reads a 16-bit cache at a third to a half of the memory's speed, since its loops
convert element by element; these loops read it at the memory's, in any format it is kept in.

A row is a sequence's head. Rows are independent, so threads take ranges of them, `start` to `end`;
the kernels hold no interpreter lock. In all of them

    query: fp32 [row, head_dim], scaled; keys, values: the arrays that a block is kept in, each
    [row, token, ...]; first: int64 [row], the first of a block's tokens that is valid; stop: the
    first one that is not valid any more.
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


def compiled(function: Callable[..., None]) -> Callable[..., None]:
    try:
        return njit(nogil=True, cache=True, fastmath=MATH)(function)
    except RuntimeError:  # neither the package's folder nor the user's cache can be written to
        return njit(nogil=True, fastmath=MATH)(function)


@lru_cache
def fold_for(size: int, is_half: bool, bits: int) -> Callable[..., None]:
    """The kernel for heads of this size, kept in float16 or not, packed in `bits` or not; known
    when it is compiled, that makes loops short and free of checks.

    fold(query, keys, values, first, stop, peak, total, out, start, end) folds a block into a
    running result: peak, fp32 [row], the largest score so far; total, fp32 [row], the sum of
    exp(score - peak); out, fp32 [row, head_dim], the sum of exp(score - peak) * value.
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

    return compiled(fold)


@lru_cache
def score_for(size: int, is_half: bool, bits: int) -> Callable[..., None]:
    """score(query, keys, first, stop, offset, scores, peak, total, start, end) writes the scores
    of a block's valid tokens to scores, fp32 [row, token of the sequence], where the block begins
    at `offset`, and brings peak and total, as in `fold`, up to date."""

    def score(query, keys, first, stop, offset, scores, peak, total, start, end):
        for row in range(start, end):
            begin = first[row]
            if begin >= stop:
                continue
            highest, question, found = peak[row], query[row], scores[row, offset : offset + stop]
            for token in range(begin, stop):
                found[token] = dot(keys, row, token, question, size, is_half, bits)
            for token in range(begin, stop):
                highest = found[token] if found[token] > highest else highest
            summed = total[row] * exp(peak[row] - highest)
            for token in range(begin, stop):
                summed += exp(found[token] - highest)
            peak[row], total[row] = highest, summed

    return compiled(score)


@lru_cache
def add_for(size: int, is_half: bool, bits: int) -> Callable[..., None]:
    """add_chosen(scores, lse, chosen, counts, left, values, stop, offset, out, start, end) adds to
    out, fp32 [row, head_dim], the values of a block's chosen tokens, times exp(score - lse).

    scores: fp32 [row, token of the sequence]; lse: fp32 [row]; chosen: int32 [row, slot], tokens
    of the sequence, and counts: int32 [row], how many; left: int32 [row], minus the block's own.
    """

    def add_chosen(scores, lse, chosen, counts, left, values, stop, offset, out, start, end):
        for row in range(start, end):
            mixed = out[row]
            for slot in range(counts[row]):
                token = chosen[row, slot] - offset
                if 0 <= token < stop:
                    weight = exp(scores[row, offset + token] - lse[row])
                    add(values, row, token, weight, mixed, size, is_half, bits)
                    left[row] -= 1

    return compiled(add_chosen)


@lru_cache
def choose_top() -> Callable[..., None]:
    """choose(scores, counts, chosen, start, end) writes to chosen, int32 [row, slot], the `counts`
    [row] tokens with the highest scores, in rising order; of equal scores those that come first.

    scores: fp32 [row, token], with at least that many above minus infinity.
    """

    def choose(scores, counts, chosen, start, end):
        tokens = scores.shape[1]
        keys = np.empty(tokens, np.int32)
        for row in range(start, end):
            count = np.int32(counts[row])
            if count == 0:
                continue
            bits = scores[row].view(np.int32)
            # As integers in the order of the floats; below zero, all but the sign is inverted.
            low, high = np.int32(2147483647), np.int32(-2147483648)
            for i in range(tokens):
                key = bits[i] ^ ((bits[i] >> np.int32(31)) & np.int32(2147483647))
                key += np.int32(key == -1)  # minus zero is equal to zero
                keys[i] = key
                low, high = min(low, key), max(high, key)
            # The largest bound that so many keys reach, by bisection: counting is fast.
            reached = np.int32(tokens)
            while low < high and reached != count:
                middle = np.int32(np.int64(high) - (np.int64(high) - np.int64(low)) // 2)
                reaching = np.int32(0)
                for i in range(tokens):
                    reaching += np.int32(keys[i] >= middle)
                if reaching >= count:
                    low, reached = middle, reaching
                else:
                    high = middle - np.int32(1)
            spare = reached - count  # so many of the keys at the bound, the last ones, stay out
            equal = np.int32(0)
            for i in range(tokens):
                equal += np.int32(keys[i] == low)
            slot = 0
            for i in range(tokens):
                equal -= np.int32(keys[i] == low)
                if keys[i] > low or (keys[i] == low and equal >= spare):
                    chosen[row, slot] = i
                    slot += 1

    return compiled(choose)
