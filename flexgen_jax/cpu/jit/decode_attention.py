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

import zlib
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit

from flexgen_jax.cpu.jit import decode_attention_ir, llvm, softmax_ir
from flexgen_jax.cpu.jit.decode_attention_ir import add_row, add_some, score_row
from flexgen_jax.cpu.jit.llvm import FLAGS, LANES
from flexgen_jax.cpu.jit.softmax_ir import exp, weigh
from flexgen_jax.layers.attention import MASKED
from flexgen_jax.models import storage

MATH = set(FLAGS)


def source_of(*files: str | None) -> int:
    """A number for the content of files, not 0."""
    return zlib.crc32(b"".join(Path(str(file)).read_bytes() for file in files)) | 1


VECTOR_FILES = (decode_attention_ir.__file__, softmax_ir.__file__, storage.__file__, llvm.__file__)
SOURCE = source_of(__file__, *VECTOR_FILES)
"""Of the code that kernels are made from, whose changes Numba's cache might not notice; what a
kernel closes over is part of the cache's key."""

LEAST = np.float32(MASKED / 2)
"""Scores below are those of tokens that are not valid."""


@njit(inline="always")
def fold_rows(keys, values, first, stop, heads, start, query, state, size, is_half, bits):
    """Folds a block into a running result: the rows of `state`, which begin at row `start`, as
    `fold_for` has it: peak, total and out. first: of every `heads` rows."""
    peak, total, out = state
    scores = np.empty(keys[0].shape[1] + LANES, np.float32)
    room = -(-stop // LANES) * LANES
    for i in range(peak.size):
        row = start + i
        begin = np.int64(first[row // heads])
        if begin >= stop:
            continue
        question, mixed = query[row], out[i]
        score_row(keys, row, begin, stop, question, scores, size, is_half, bits)
        highest, summed = weigh(scores, 0, begin, stop, room, peak[i])
        fade = exp(peak[i] - highest)
        for k in range(size):
            mixed[k] *= fade
        add_row(values, row, begin, stop, scores, mixed, size, is_half, bits)
        peak[i], total[i] = highest, total[i] * fade + summed


def cached(make: Callable[..., Any], function: Callable[..., Any]) -> Any:
    """What one of Numba's decorators makes of a function, kept on disk where that is possible."""
    try:
        return make(cache=True, fastmath=MATH)(function)
    except RuntimeError:  # neither the package's folder nor the user's cache can be written to
        return make(fastmath=MATH)(function)


def compiled(function: Callable[..., None]) -> Callable[..., None]:
    found: Callable[..., None] = cached(partial(njit, nogil=True), function)
    return found


@lru_cache
def fold_for(size: int, is_half: bool, bits: int) -> Callable[..., None]:
    """The kernel for heads of this size, kept in float16 or not, packed in `bits` or not; known
    when it is compiled, that makes loops short and free of checks.

    fold(query, keys, values, first, stop, peak, total, out, start, end) folds a block into a
    running result: peak, fp32 [row], the largest score so far; total, fp32 [row], the sum of
    exp(score - peak); out, fp32 [row, head_dim], the sum of exp(score - peak) * value.
    """

    source = SOURCE

    def fold(query, keys, values, first, stop, peak, total, out, start, end):
        assert source
        state = (peak[start:end], total[start:end], out[start:end])
        fold_rows(keys, values, first, stop, 1, start, query, state, size, is_half, bits)

    return compiled(fold)


@lru_cache
def score_for(size: int, is_half: bool, bits: int) -> Callable[..., None]:
    """score(query, keys, first, stop, offset, scores, peak, total, start, end) writes the scores
    of a block's valid tokens to scores, fp32 [row, token of the sequence], where the block begins
    at `offset`, and brings peak and total, as in `fold`, up to date."""

    source = SOURCE

    def score(query, keys, first, stop, offset, scores, peak, total, start, end):
        assert source
        for row in range(start, end):
            begin = first[row]
            if begin >= stop:
                continue
            highest, question, found = peak[row], query[row], scores[row, offset : offset + stop]
            score_row(keys, row, begin, stop, question, found, size, is_half, bits)
            highest = max(highest, largest(found[begin:stop]))
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

    source = SOURCE

    def add_chosen(scores, lse, chosen, counts, left, values, stop, offset, out, start, end):
        assert source
        weights = np.empty(chosen.shape[1], np.float32)
        for row in range(start, end):
            tokens = chosen[row, : counts[row]]
            first = np.searchsorted(tokens, offset)
            last = np.searchsorted(tokens, offset + stop)
            for slot in range(first, last):
                weights[slot] = exp(scores[row, tokens[slot]] - lse[row])
            mixed = out[row]
            add_some(values, row, first, last, weights, mixed, tokens, offset, size, is_half, bits)
            left[row] -= last - first

    return compiled(add_chosen)


@njit(nogil=True, fastmath=MATH | {"nnan"})
def largest(scores: Any) -> Any:
    """Of some numbers; vectorized, because it need not mind NaN, which shows in the sum."""
    found = np.float32(-np.inf)
    for i in range(scores.size):
        found = scores[i] if scores[i] > found else found
    return found


@njit(nogil=True, inline="always")
def reaching(scores: Any, bound: Any) -> Any:
    """How many scores are at least the bound."""
    count = np.int32(0)
    for i in range(scores.size):
        count += np.int32(scores[i] >= bound)
    return count


@njit(nogil=True, fastmath=MATH)
def write_down(scores: Any, bound: Any, count: int, chosen: Any) -> Any:
    """The tokens above the bound, and the first of those at the bound; returns how many, at most
    `count`. Without branches, which nobody could predict."""
    above, slot = reaching(scores, np.nextafter(bound, np.float32(np.inf))), np.int64(0)
    if reaching(scores, bound) == count:
        for i in range(scores.size):
            chosen[slot] = i
            slot += np.int64(scores[i] >= bound)
        return slot
    equal = np.int64(count) - above
    for i in range(scores.size):
        is_equal = np.int64(scores[i] == bound)
        chosen[slot] = i
        is_chosen = np.int64(scores[i] > bound) | (is_equal & np.int64(equal > 0))
        slot += is_chosen & np.int64(slot < count)
        equal -= is_equal
    return slot


@lru_cache
def choose_top() -> Callable[..., None]:
    """choose(scores, counts, chosen, start, end) writes to chosen, int32 [row, slot], the `counts`
    [row] tokens with the highest scores, in rising order; of equal scores those that come first.
    There is room for one slot more, whose content then means nothing.

    scores: fp32 [row, token]; at least that many are valid, which is above `LEAST`. Where they are
    not all numbers, `counts` may become less.
    """

    def choose(scores, counts, chosen, start, end):
        for row in range(start, end):
            count, found = counts[row], scores[row]
            high = largest(found)
            if count == 0 or reaching(found, high) >= count:
                counts[row] = write_down(found, high, count, chosen[row])
                continue
            # A bound that enough scores reach, and then the largest one: counting is fast.
            low, step, reached = high, np.float32(1), np.int32(0)
            while reached < count and low > LEAST:
                high, low, step = low, low - step, step + step
                reached = reaching(found, low)
            middle = np.float32(0.5) * low + np.float32(0.5) * high
            while reached != count and low < middle < high:
                reached = reaching(found, middle)
                low, high = (middle, high) if reached >= count else (low, middle)
                middle = np.float32(0.5) * low + np.float32(0.5) * high
            counts[row] = write_down(found, low, count, chosen[row])

    return compiled(choose)
