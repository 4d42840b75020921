"""A prompt's attention to itself, and a chunk's to one KV block, on the CPU, compiled by Numba.

XLA's CPU backend transposes queries, keys and values one by one and computes all products of
scores, half of them in vain, far below the machine's FLOP/s. Here a head's keys and values become
fp32 matrices on their way into the cache's layout, and its scores, of `ROWS` tokens at a time, stay
in the processor's first cache.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from flexgen_jax.cpu.jit import prefill_attention_ir
from flexgen_jax.cpu.jit.code_cache import source_of
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


@njit(inline="always")
def take_in_block(key, value, turned, plain, tokens, row, size, is_half):
    """Copies a KV head's keys and values in the cache's layout to fp32; see `take_in`."""
    wide, lone = plain.size // tokens, np.empty(size, np.float32)
    for token in range(tokens):
        at = (row * tokens + token) * size
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
    counted from the block's first one, none of which sees later ones; limits: as in `attend_rows`.
    Written are out, fp32, shaped like query, and lse, the log-sum-exp of the scores, fp32 [row,
    asked token].
    """
    (asked, tokens, heads, group), (start, end) = shape, where
    window, softcap, taken = np.int64(limits[0]), limits[1], np.int64(-1)
    room, wide = -(-tokens // COLUMNS) * COLUMNS, -(-size // COLUMNS) * COLUMNS
    turned, plain = np.zeros(size * room, np.float32), np.zeros(tokens * wide, np.float32)
    rows, mixed = np.zeros(ROWS * size, np.float32), np.empty(ROWS * wide, np.float32)
    scores, totals = np.empty(ROWS * room, np.float32), np.empty(ROWS, np.float32)
    peaks = np.empty(ROWS, np.float32)
    for row in range(start, end):
        if row // group != taken:
            taken = row // group
            take_in_block(key, value, turned, plain, tokens, taken, size, is_half)
        begin = np.int64(first[row // heads])
        for top in range(0, asked, ROWS):
            count, base = min(ROWS, asked - top), row * asked + top
            stop = min(tokens, lead + top + count)
            after = -(-stop // COLUMNS) * COLUMNS
            for i in range(count):
                widen(query, (base + i) * size, rows, i * size, size, is_half)
            lowest = min(first_in(begin, lead + top, window), stop) // COLUMNS * COLUMNS
            for column in range(lowest, stop, COLUMNS):
                multiply(rows, size, turned, column * size, COLUMNS, scores, column, room, size)
            for i in range(count):
                last, at = lead + top + i, i * room
                low, until = first_in(begin, last, window), min(tokens, last + 1)
                cap(scores, at + low, at + until, softcap)
                peaks[i], totals[i] = weigh(scores, at, low, until, after, np.float32(MASKED))
            for column in range(0, size, COLUMNS):
                multiply(scores, room, plain, column, wide, mixed, column, wide, stop)
            for i in range(count):
                to, share = (base + i) * size, np.float32(0)
                lse[base + i] = np.float32(MASKED)
                if totals[i] != 0:
                    share = np.float32(1) / totals[i]
                    lse[base + i] = peaks[i] + np.log(totals[i])
                for k in range(size):
                    out[to + k] = mixed[i * wide + k] * share
