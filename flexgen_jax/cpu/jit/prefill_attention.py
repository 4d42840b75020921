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
from flexgen_jax.cpu.jit.decode_attention import VECTOR_FILES, source_of
from flexgen_jax.cpu.jit.prefill_attention_ir import COLUMNS, ROWS, keep, multiply, widen
from flexgen_jax.cpu.jit.softmax_ir import weigh
from flexgen_jax.layers.attention import MASKED

SOURCE = source_of(__file__, prefill_attention_ir.__file__, *VECTOR_FILES)
"""A checksum of the code that prompt attention is made from; see `decode_attention.SOURCE`."""


@njit(inline="always")
def take_in(key, value, keys, values, turned, plain, shape, row, size, is_half):
    """Copies a head's keys and values into the cache's layout, and to fp32 for the products.

    turned: the keys transposed, in panels of `COLUMNS` tokens with `size` rows each; plain: the
    values, [token, size rounded up to a multiple of `COLUMNS`].
    """
    tokens, heads = shape
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
def attend_rows(query, key, value, first, keys, values, out, shape, start, end, size, is_half):
    """Computes attention for the rows (heads of sequences) from start to end. All arrays are flat.

    query (scaled), key, value: [batch, token, head, head_dim] as stored; first: int32 [batch], each
    sequence's first token that is not padding; shape: (tokens, heads). Written are keys and values,
    [row, token, head_dim], copies in the cache's layout, and out, fp32, shaped like query, 0 where
    there is padding.
    """
    tokens, heads = shape
    room, wide = -(-tokens // COLUMNS) * COLUMNS, -(-size // COLUMNS) * COLUMNS
    turned, plain = np.zeros(size * room, np.float32), np.zeros(tokens * wide, np.float32)
    asked, mixed = np.zeros(ROWS * size, np.float32), np.empty(ROWS * wide, np.float32)
    scores, totals = np.empty(ROWS * room, np.float32), np.empty(ROWS, np.float32)
    for row in range(start, end):
        take_in(key, value, keys, values, turned, plain, shape, row, size, is_half)
        base, apart = (row // heads * tokens * heads + row % heads) * size, heads * size
        begin = np.int64(first[row // heads])
        for top in range(0, tokens, ROWS):
            count = min(ROWS, tokens - top)
            stop, after = top + count, -(-(top + count) // COLUMNS) * COLUMNS
            for i in range(count):
                widen(query, base + (top + i) * apart, asked, i * size, size, is_half)
            for column in range(0, stop, COLUMNS):
                multiply(asked, size, turned, column * size, COLUMNS, scores, column, room, size)
            for i in range(count):
                _, totals[i] = weigh(
                    scores, i * room, begin, top + i + 1, after, np.float32(MASKED)
                )
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
    """Copies a head's keys and values in the cache's layout to fp32; see `take_in`."""
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
    query, key, value, first, out, lse, shape, start, end, size, is_half, is_causal
):
    """Computes attention to one KV block for the rows (heads of sequences) from start to end. All
    arrays are flat.

    query (scaled): [row, asked token, head_dim] as stored; key, value: [row, token, head_dim];
    first: int32 [batch], each sequence's first token in the block that is not padding; shape:
    (asked, tokens, heads). With is_causal, the queries are those of the block's last tokens, and
    see no later ones. Written are out, fp32, shaped like query, and lse, the log-sum-exp of the
    scores, fp32 [row, asked token].
    """
    asked, tokens, heads = shape
    room, wide = -(-tokens // COLUMNS) * COLUMNS, -(-size // COLUMNS) * COLUMNS
    turned, plain = np.zeros(size * room, np.float32), np.zeros(tokens * wide, np.float32)
    rows, mixed = np.zeros(ROWS * size, np.float32), np.empty(ROWS * wide, np.float32)
    scores, totals = np.empty(ROWS * room, np.float32), np.empty(ROWS, np.float32)
    peaks, later = np.empty(ROWS, np.float32), tokens - asked + 1
    for row in range(start, end):
        take_in_block(key, value, turned, plain, tokens, row, size, is_half)
        begin = np.int64(first[row // heads])
        for top in range(0, asked, ROWS):
            count, base = min(ROWS, asked - top), row * asked + top
            stop = min(tokens, later + top + count - 1) if is_causal else tokens
            after = -(-stop // COLUMNS) * COLUMNS
            for i in range(count):
                widen(query, (base + i) * size, rows, i * size, size, is_half)
            for column in range(0, stop, COLUMNS):
                multiply(rows, size, turned, column * size, COLUMNS, scores, column, room, size)
            for i in range(count):
                until = later + top + i if is_causal else tokens
                peaks[i], totals[i] = weigh(
                    scores, i * room, begin, until, after, np.float32(MASKED)
                )
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
