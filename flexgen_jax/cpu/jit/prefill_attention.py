"""A prompt's attention to itself, and a chunk's to one KV block, on the CPU, compiled by Numba.

XLA's CPU backend transposes queries, keys and values one by one and computes all products of
scores, half of them in vain, far below the machine's FLOP/s. Here a head's keys and values become
fp32 matrices on their way into the cache's layout, and its scores, of `ROWS` tokens at a time, stay
in the processor's first cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numba import njit

from flexgen_jax.cpu.jit import prefill_attention_ir
from flexgen_jax.cpu.jit.code_cache import compiled, source_of
from flexgen_jax.cpu.jit.decode_attention import SOURCE as DECODE_SOURCE
from flexgen_jax.cpu.jit.decode_attention import cap
from flexgen_jax.cpu.jit.prefill_attention_ir import COLUMNS, ROWS, keep, multiply, widen
from flexgen_jax.cpu.jit.softmax_ir import weigh
from flexgen_jax.layers.attention import MASKED

SOURCE = DECODE_SOURCE + source_of(__file__, prefill_attention_ir.__file__)
"""A checksum of the code that prompt attention is made from; see `decode_attention.SOURCE`."""


@njit(inline="always")
def take_in(key, value, keys, values, turned, plain, shape, row, size, is_half):
    """Copies a KV head's keys and values into the cache's layout, and to fp32 for the products.

    turned: the keys transposed, in panels of `COLUMNS` tokens with `size` rows each; plain: the
    values, [token, size rounded up to a multiple of `COLUMNS`].
    """
    tokens, _, heads = shape
    wide, lone = plain.size // tokens, np.empty(size, np.float32)
    for token in range(tokens):
        begin = ((row // heads * tokens + token) * heads + row % heads) * size
        at = (row * tokens + token) * size
        keep(key, begin, keys, at, size, is_half)
        keep(value, begin, values, at, size, is_half)
        widen(value, begin, plain, token * wide, size, is_half)
        widen(key, begin, lone, 0, size, is_half)
        panel = token // COLUMNS * size * COLUMNS + token % COLUMNS
        for i in range(size):
            turned[panel + i * COLUMNS] = lone[i]


@njit(inline="always")
def first_in(begin, last, window):
    """Returns the first token that the token `last` sees."""
    return max(begin, last + 1 - window) if window > 0 else begin


@njit(inline="always")
def attend_rows(query, key, value, first, keys, values, out, shape, limits, where, size, is_half):
    """Computes attention for the KV rows (KV heads of sequences) of a range, `where`. All arrays
    are flat.

    query (scaled): [batch, token, head, head_dim] as stored; key, value: the same with KV heads;
    first: int32 [batch], each sequence's first token that is not padding; shape: (tokens, heads, KV
    heads); limits: window and softcap, each 0 for none. Written are keys and values, [KV row,
    token, head_dim], copies in the cache's layout, and out, fp32, shaped like query, 0 where there
    is padding.
    """
    (tokens, heads, kv_heads), (start, end) = shape, where
    window, softcap, group = np.int64(limits[0]), limits[1], heads // kv_heads
    room, wide = -(-tokens // COLUMNS) * COLUMNS, -(-size // COLUMNS) * COLUMNS
    turned, plain = np.zeros(size * room, np.float32), np.zeros(tokens * wide, np.float32)
    asked, mixed = np.zeros(ROWS * size, np.float32), np.empty(ROWS * wide, np.float32)
    scores, totals = np.empty(ROWS * room, np.float32), np.empty(ROWS, np.float32)
    for each in range(start * group, end * group):
        row = each // group
        if each % group == 0:
            take_in(key, value, keys, values, turned, plain, shape, row, size, is_half)
        sequence, apart = row // kv_heads, heads * size
        base = (sequence * tokens * heads + row % kv_heads * group + each % group) * size
        begin = np.int64(first[sequence])
        for top in range(0, tokens, ROWS):
            count = min(ROWS, tokens - top)
            stop, after = top + count, -(-(top + count) // COLUMNS) * COLUMNS
            for i in range(count):
                widen(query, base + (top + i) * apart, asked, i * size, size, is_half)
            lowest = min(first_in(begin, top, window), stop) // COLUMNS * COLUMNS
            for column in range(lowest, stop, COLUMNS):
                multiply(asked, size, turned, column * size, COLUMNS, scores, column, room, size)
            for i in range(count):
                low, until, at = first_in(begin, top + i, window), top + i + 1, i * room
                cap(scores, at + low, at + until, softcap)
                _, totals[i] = weigh(scores, at, low, until, after, np.float32(MASKED))
            for column in range(0, size, COLUMNS):
                multiply(scores, room, plain, column, wide, mixed, column, wide, stop)
            for i in range(count):
                to, share = base + (top + i) * apart, np.float32(0)
                if totals[i] != 0:
                    share = np.float32(1) / totals[i]
                for k in range(size):
                    out[to + k] = mixed[i * wide + k] * share


def tokens_at_once(size):
    """Returns how many tokens' keys and values stay in the second cache in fp32, for heads of
    `size` elements: a multiple of `COLUMNS`."""
    return max(4, (1 << 15) // size // COLUMNS) * COLUMNS


at_once = njit(tokens_at_once)


@njit(inline="always")
def take_in_block(key, value, turned, plain, base, count, size, is_half):
    """Copies `count` tokens' keys and values, from token `base` of all rows' on, to fp32; see
    `take_in`."""
    wide, lone = -(-size // COLUMNS) * COLUMNS, np.empty(size, np.float32)
    for token in range(count):
        at = (base + token) * size
        widen(value, at, plain, token * wide, size, is_half)
        widen(key, at, lone, 0, size, is_half)
        panel = token // COLUMNS * size * COLUMNS + token % COLUMNS
        for i in range(size):
            turned[panel + i * COLUMNS] = lone[i]


@njit(inline="always")
def attend_block_rows(
    query, key, value, first, out, lse, shape, lead, limits, where, size, is_half
):
    """Computes attention to one KV block for the rows (heads of sequences) of a range, `where`. All
    arrays are flat.

    query (scaled): [row, asked token, head_dim] as stored; key, value: [KV row, token, head_dim];
    first: int32 [batch], each sequence's first token in the block that is not padding; shape:
    (asked, tokens, heads, query heads of a KV head); lead: the index of the first query's token,
    counted from the block's first one, none of which sees later ones; limits: window and softcap as
    in `attend_rows`, and the step from one query's token to the next, 0 if all are of one token.
    Written are out, fp32, shaped like query, and lse, the log-sum-exp of the scores, fp32 [row,
    asked token].

    The rows of a KV row go through some of its tokens after the other, as in FlashAttention (Dao
    2023, section 3.1): `out` and `lse` hold the sums and the largest score of the tokens so far.
    """
    asked, (start, end) = shape[0], where
    out[start * asked * size : end * asked * size] = np.float32(0)
    lse[start * asked : end * asked] = np.float32(MASKED)
    totals = np.zeros((end - start) * asked, np.float32)
    sums = (out, lse, totals, start)
    fold_block(query, key, value, first, sums, shape, lead, limits, where, size, is_half)
    for i in range(start * asked, end * asked):
        total = totals[i - start * asked]
        if total != 0:
            share = np.float32(1) / total
            lse[i] += np.log(total)
            for k in range(size):
                out[i * size + k] *= share


@njit(inline="always")
def fold_block(query, key, value, first, sums, shape, lead, limits, where, size, is_half):
    """Adds a block to the sums of the rows of a range, `where`; see `attend_block_rows`.

    sums: the weighted sums of values, the largest scores, the sums of weights, and the row with
    which the latter begin.
    """
    (asked, tokens, heads, group), (start, end) = shape, where
    wide, room = -(-size // COLUMNS) * COLUMNS, at_once(size)
    turned, plain = np.zeros(size * room, np.float32), np.zeros(room * wide, np.float32)
    for kept in range(start // group, -(-end // group)):
        mine = (max(start, kept * group), min(end, (kept + 1) * group))
        for base in range(0, tokens, room):
            count = min(room, tokens - base)
            take_in_block(key, value, turned, plain, kept * tokens + base, count, size, is_half)
            sides, span, each = (turned, plain), (base, count, lead), (asked, heads)
            fold_rows_in(query, sides, first, sums, span, each, limits, mine, size, is_half)


@njit(inline="always")
def fold_rows_in(query, sides, first, sums, span, shape, limits, mine, size, is_half):
    """Adds some tokens of a KV row to the sums of its rows, `mine`; see `attend_block_rows`.

    sides: the tokens' keys and values; span: the first of them, their number, and the index of the
    first query's token.
    """
    (turned, plain), (out, lse, totals, start) = sides, sums
    (base, count, lead), (asked, heads) = span, shape
    window, softcap, step = np.int64(limits[0]), limits[1], np.int64(limits[2])
    room, wide = at_once(size), -(-size // COLUMNS) * COLUMNS
    rows, mixed = np.zeros(ROWS * size, np.float32), np.empty(ROWS * wide, np.float32)
    scores = np.empty(ROWS * room, np.float32)
    for row in range(mine[0], mine[1]):
        begin = np.int64(first[row // heads]) - base
        for top in range(0, asked, ROWS):
            height, at = min(ROWS, asked - top), row * asked + top
            latest = lead + (top + height - 1) * step - base
            stop = min(count, latest + 1)
            lowest = max(first_in(begin, lead + top * step - base, window), 0)
            if lowest >= stop:
                continue
            lowest, after = lowest // COLUMNS * COLUMNS, -(-stop // COLUMNS) * COLUMNS
            for i in range(height):
                widen(query, (at + i) * size, rows, i * size, size, is_half)
            for column in range(lowest, stop, COLUMNS):
                multiply(rows, size, turned, column * size, COLUMNS, scores, column, room, size)
            for i in range(height):
                last, line = lead + (top + i) * step - base, i * room
                low, until = max(first_in(begin, last, window), 0), min(count, last + 1)
                cap(scores, line + low, line + until, softcap)
                peak = lse[at + i]
                highest, summed = weigh(scores, line, low, until, after, peak)
                share, each = np.exp(peak - highest), at + i - start * asked
                lse[at + i] = highest
                totals[each] = totals[each] * share + summed
                if share != 1:
                    for k in range((at + i) * size, (at + i + 1) * size):
                        out[k] *= share
            for column in range(0, size, COLUMNS):
                multiply(scores, room, plain, column, wide, mixed, column, wide, stop)
            for i in range(height):
                to, taken = (at + i) * size, i * wide
                for k in range(size):
                    out[to + k] += mixed[taken + k]


@lru_cache
def fold_together_for(size: int, is_half: bool) -> Callable[..., None]:
    """Returns the compute kernel `fold_together` of decode attention in which many heads share keys
    and values; see `decode_attention.fold_for`.

    fold_together(query, key, value, first, stop, peak, total, out, shape, softcap, start, end)
    folds a block into a running result. All arrays are flat; shape: heads in a line, tokens of the
    block, lines that share keys and values; first, start, end: of lines.
    """
    source = SOURCE

    def fold_together(query, key, value, first, stop, peak, total, out, shape, softcap, start, end):
        assert source
        together, tokens, lines = shape
        sums, limits = (out, peak, total, 0), (np.float32(0), softcap, np.float32(0))
        shape = (together, tokens, 1, lines)
        where, last = (start, end), stop - 1
        fold_block(query, key, value, first, sums, shape, last, limits, where, size, is_half)

    return compiled(fold_together)
