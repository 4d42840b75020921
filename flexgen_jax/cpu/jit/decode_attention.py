"""Decode attention on the CPU over keys and values where they lie, compiled by Numba.

XLA's CPU backend reads a 16-bit cache well below the memory's speed, because its loops convert
element by element. These loops read the cache at the memory's speed, in any format it is kept in.

A row is one query head of one sequence. Rows are independent, so each thread takes a range of them,
`start` to `end`. The compute kernels release the interpreter lock. In all of them

    query: fp32 [row, head_dim], scaled; keys, values: the arrays that a block is kept in, each
    [row / group, token, ...], since `group` consecutive query heads share one; first: int64 [row],
    the first valid token of the block; stop: the end of the valid tokens, the same for all rows;
    softcap: as in `AttentionSpec`, 0 for none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numba import njit

from flexgen_jax.cpu.jit import decode_attention_ir, llvm, softmax_ir
from flexgen_jax.cpu.jit.code_cache import MATH, compiled, source_of
from flexgen_jax.cpu.jit.decode_attention_ir import add_row, add_some, score_row
from flexgen_jax.cpu.jit.llvm import LANES
from flexgen_jax.cpu.jit.softmax_ir import exp, weigh
from flexgen_jax.layers.attention import MASKED
from flexgen_jax.models.formats import storage

VECTOR_FILES = (decode_attention_ir.__file__, softmax_ir.__file__, storage.__file__, llvm.__file__)
SOURCE = source_of(__file__, *VECTOR_FILES)
"""A checksum of the code that the compute kernels are made from, see `source_of`."""

LEAST = np.float32(MASKED / 2)
"""Tokens that are not valid have scores below this."""


@njit(inline="always")
def cap(scores, start, stop, softcap):
    """Bounds the scores from start to stop: softcap * tanh(score / softcap)."""
    if softcap > 0:
        for i in range(start, stop):
            power = exp(np.float32(-2) * np.abs(scores[i]) / softcap)
            bounded = softcap * (np.float32(1) - power) / (np.float32(1) + power)
            scores[i] = bounded if scores[i] > 0 else -bounded


@njit(inline="always")
def fold_rows(keys, values, first, stop, heads, start, query, state, how, size, is_half, bits):
    """Folds a KV block into a running result, for the rows from `start` on.

    state: peak, total and out as in `fold_for`, with one entry per row taken; first: [row / heads],
    one entry for every `heads` rows; how: group and softcap.
    """
    (peak, total, out), (group, softcap) = state, how
    scores = np.empty(keys[0].shape[1] + LANES, np.float32)
    room = -(-stop // LANES) * LANES
    for i in range(peak.size):
        row = start + i
        begin = np.int64(first[row // heads])
        if begin >= stop:
            continue
        question, mixed, kept = query[row], out[i], row // group
        score_row(keys, kept, begin, stop, question, scores, size, is_half, bits)
        cap(scores, begin, stop, softcap)
        highest, summed = weigh(scores, 0, begin, stop, room, peak[i])
        fade = exp(peak[i] - highest)
        for k in range(size):
            mixed[k] *= fade
        add_row(values, kept, begin, stop, scores, mixed, size, is_half, bits)
        peak[i], total[i] = highest, total[i] * fade + summed


@lru_cache
def fold_for(size: int, is_half: bool, bits: int) -> Callable[..., None]:
    """Returns the compute kernel `fold` for heads of `size` elements.

    is_half: whether the cache is kept in float16; bits: the width of a packed cache, or 16. As
    compile-time constants they make the loops short and free of checks.

    fold(query, keys, values, first, stop, peak, total, out, group, softcap, start, end) folds a
    block into a running result: peak, fp32 [row], the largest score so far; total, fp32 [row], the
    sum of exp(score - peak); out, fp32 [row, head_dim], the sum of exp(score - peak) * value.
    """

    source = SOURCE

    def fold(query, keys, values, first, stop, peak, total, out, group, softcap, start, end):
        assert source
        state = (peak[start:end], total[start:end], out[start:end])
        how = (group, softcap)
        fold_rows(keys, values, first, stop, 1, start, query, state, how, size, is_half, bits)

    return compiled(fold)


@lru_cache
def score_for(size: int, is_half: bool, bits: int) -> Callable[..., None]:
    """Returns the compute kernel `score`, with the constants of `fold_for`.

    score(query, keys, first, stop, offset, scores, peak, total, group, softcap, start, end) writes
    the scores of a block's valid tokens to scores, fp32 [row, token of the sequence], where the
    block begins at token `offset`, and updates peak and total as `fold` does.
    """

    source = SOURCE

    def score(query, keys, first, stop, offset, scores, peak, total, group, softcap, start, end):
        assert source
        for row in range(start, end):
            begin = first[row]
            if begin >= stop:
                continue
            highest, question, scored = peak[row], query[row], scores[row, offset : offset + stop]
            score_row(keys, row // group, begin, stop, question, scored, size, is_half, bits)
            cap(scored, begin, stop, softcap)
            highest = max(highest, largest(scored[begin:stop]))
            summed = total[row] * exp(peak[row] - highest)
            for token in range(begin, stop):
                summed += exp(scored[token] - highest)
            peak[row], total[row] = highest, summed

    return compiled(score)


@lru_cache
def add_for(size: int, is_half: bool, bits: int) -> Callable[..., None]:
    """Returns the compute kernel `add_chosen`, with the constants of `fold_for`.

    add_chosen(scores, lse, chosen, counts, left, values, stop, offset, out, group, start, end) adds
    the values of a block's chosen tokens, times exp(score - lse), to out, fp32 [row, head_dim].

    scores: fp32 [row, token of the sequence]; lse: fp32 [row]; chosen: int32 [row, slot], indices
    of tokens in the sequence, rising; counts: int32 [row], how many slots are used; left: int32
    [row], reduced by the number of chosen tokens in this block.
    """

    source = SOURCE

    def add_chosen(scores, lse, chosen, counts, left, values, stop, offset, out, group, start, end):
        assert source
        weights = np.empty(chosen.shape[1], np.float32)
        for row in range(start, end):
            tokens = chosen[row, : counts[row]]
            first = np.searchsorted(tokens, offset)
            last = np.searchsorted(tokens, offset + stop)
            for slot in range(first, last):
                weights[slot] = exp(scores[row, tokens[slot]] - lse[row])
            mixed, kept = out[row], row // group
            add_some(values, kept, first, last, weights, mixed, tokens, offset, size, is_half, bits)
            left[row] -= last - first

    return compiled(add_chosen)


@njit(nogil=True, fastmath=MATH | {"nnan"})
def largest(scores: Any) -> Any:
    """Returns the largest score.

    It compiles to vector code because it ignores NaN, which shows in the sum of the weights
    instead.
    """
    most = np.float32(-np.inf)
    for i in range(scores.size):
        most = scores[i] if scores[i] > most else most
    return most


@njit(nogil=True, inline="always")
def reaching(scores: Any, bound: Any) -> Any:
    """Counts the scores that are at least the bound."""
    count = np.int32(0)
    for i in range(scores.size):
        count += np.int32(scores[i] >= bound)
    return count


@njit(nogil=True, fastmath=MATH)
def write_down(scores: Any, bound: Any, count: int, chosen: Any) -> Any:
    """Writes to `chosen` the tokens above the bound and the first of those at it, `count` at most.

    Returns how many were written. There are no branches, because they would be unpredictable.
    """
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
    """Returns the compute kernel `choose`, which finds each row's highest scores.

    choose(scores, counts, chosen, start, end) writes to chosen, int32 [row, slot], the counts[row]
    tokens with the highest scores, in rising order of tokens; of equal scores it takes the first.
    `chosen` needs one more slot than tokens, whose content is meaningless afterwards.

    scores: fp32 [row, token]; at least counts[row] of them are valid, that is, above `LEAST`. Where
    scores are NaN, counts[row] may become smaller.
    """

    def choose(scores, counts, chosen, start, end):
        for row in range(start, end):
            count, row_scores = counts[row], scores[row]
            high = largest(row_scores)
            if count == 0 or reaching(row_scores, high) >= count:
                counts[row] = write_down(row_scores, high, count, chosen[row])
                continue
            # Finds a bound that enough scores reach, then the largest such bound: counting is fast.
            low, step, reached = high, np.float32(1), np.int32(0)
            while reached < count and low > LEAST:
                high, low, step = low, low - step, step + step
                reached = reaching(row_scores, low)
            middle = np.float32(0.5) * low + np.float32(0.5) * high
            while reached != count and low < middle < high:
                reached = reaching(row_scores, middle)
                low, high = (middle, high) if reached >= count else (low, middle)
                middle = np.float32(0.5) * low + np.float32(0.5) * high
            counts[row] = write_down(row_scores, low, count, chosen[row])

    return compiled(choose)
