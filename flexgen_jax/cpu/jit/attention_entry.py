"""The foreign functions for attention that XLA's CPU backend calls, compiled by Numba.

`cpu/attention.py` registers them. The handlers for products (`matmul_entry`) are made with the
functions here too. A handler shares the rows of its first result, or a product's columns, among
XLA's threads.

XLA's structures are read as arrays of 8-byte words, by the layouts of `xla/ffi/api/c_api.h` 0.3, a
stable binary interface.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numba
import numpy as np
from llvmlite import binding
from numba import cfunc, njit, types
from numba.core import typing as untyped_typing

from flexgen_jax.cpu import targets
from flexgen_jax.cpu.jit import prefill_attention, xla_calls
from flexgen_jax.cpu.jit.code_cache import cached, source_of
from flexgen_jax.cpu.jit.decode_attention import SOURCE, fold_rows
from flexgen_jax.cpu.jit.prefill_attention import attend_block_rows, attend_rows
from flexgen_jax.cpu.jit.xla_calls import (
    address_in,
    address_of,
    call,
    fetch_add,
    pointer,
    room,
    run,
    run_part,
    words,
)
from flexgen_jax.cpu.processor import core_count
from flexgen_jax.layers.attention import MASKED

carray: Any = vars(numba)["carray"]
typing: Any = untyped_typing

CALLS = source_of(__file__, xla_calls.__file__, targets.__file__)
"""A checksum of the code that calls XLA; see `decode_attention.SOURCE`."""

METADATA = 1
API_VERSION = np.int64(targets.INTERFACE[1] << 32 | targets.INTERFACE[0])
PACKED = 6  # XLA's number for the type uint8
FAIL, SCHEDULE, THREADS = 6, 17, 18  # words of XLA_FFI_Api
RESOURCE_EXHAUSTED = 8
MESSAGE = np.frombuffer(b"a kernel of the CPU found no memory for what it works with\0", np.uint8)
PARTS = 4
"""Ranges of rows, or of columns, per thread; each range goes to whichever thread is free."""

CORES = "flexgen_cores"
"""What LLVM calls the number of cores, a word."""

NEXT, DONE, SUCCEEDED, HOLDERS, ALL, ARGUMENTS, RESULTS = range(7)
"""Indices of words in the task that the threads of a call share."""

FUNCTION: Any = types.intp(types.CPointer(types.intp))
PART: Any = types.intp(types.CPointer(types.intp), types.intp)
malloc: Any = types.ExternalFunction("malloc", typing.signature(types.intp, types.intp))
free: Any = types.ExternalFunction("free", typing.signature(types.void, types.intp))


@njit(inline="always")
def is_asked_for_version(frame):
    """Tells XLA the API version that this code is made for, if XLA asks for it, as it does before
    the first call; returns whether it asked."""
    if frame[1] == 0:
        return False
    extension = words(frame[1])
    if extension[1] & 0xFFFFFFFF != METADATA:
        return False
    words(extension[3])[3] = API_VERSION
    return True


@njit(inline="always")
def array_in(buffer, shape, kind):
    """Returns a buffer's content as an array of the given shape, whatever the buffer's own
    shape."""
    return carray(pointer(buffer[3]), shape, kind)


@njit(inline="always")
def leaf(buffer, rows, kind):
    """Returns a buffer [batch, head, token, element] as an array [row, token, element]."""
    sizes = words(buffer[5])
    return array_in(buffer, (rows, sizes[2], sizes[3]), kind)


@njit(inline="always")
def packed_side(arguments, at, rows):
    """Returns the three arrays of packed keys or values: codes, scale and minimum."""
    codes = leaf(words(arguments[at]), rows, np.uint8)
    scale = leaf(words(arguments[at + 1]), rows, np.uint16)
    minimum = leaf(words(arguments[at + 2]), rows, np.uint16)
    return codes, scale, minimum


@njit(inline="always")
def next_part(shared):
    """Takes the next part; returns its number, which is too large if no parts are left."""
    return fetch_add(address_in(shared) + 8 * NEXT, 1)


@njit(inline="always")
def finish_part(shared, succeeded):
    fetch_add(address_in(shared) + 8 * SUCCEEDED, succeeded)
    fetch_add(address_in(shared) + 8 * DONE, 1)


@njit(inline="always")
def let_go(shared):
    """Drops one hold on the task; the last one frees it, because a thread may start when the others
    are long done."""
    if fetch_add(address_in(shared) + 8 * HOLDERS, -1) == 1:
        free(address_in(shared))


@njit(inline="always")
def fail(api, sent):
    """Returns XLA's out-of-memory error; its arguments are written to `sent`."""
    sent[0], sent[1], sent[2], sent[3] = 32, 0, MESSAGE.ctypes.data, RESOURCE_EXHAUSTED
    return call(api[FAIL], address_in(sent))


@lru_cache  # XLA keeps no reference to a handler
def attention_handler(name: str, size: int, dtype: str, bits: int) -> tuple[Any, ...]:
    """Returns the handler of `attend_blocks` and the functions that its threads run.

    size: elements of a head; dtype: of plain blocks; bits: the width of packed blocks, or 16.

    Its arguments: query, fp32 [row, head_dim]; first, int32 [block, batch]; stop, int32 [block];
    softcap, fp32 [1], 0 for none; and for each block the arrays of its keys and then of its values,
    which have rows for groups of query heads. Results: fp32 [row, head_dim],
    and the log-sum-exp of the scores, fp32 [row].
    """
    return handler(name, _blocks_part(size, dtype, bits))


@lru_cache
def prompt_handler(name: str, size: int, dtype: str) -> tuple[Any, ...]:
    """Returns the handler of `attend_prompt` for heads of `size` elements, and the functions that
    its threads run.

    Its arguments: query, [batch, token, head, head_dim]; key, value, the same with KV heads; first,
    int32 [batch]; limits, fp32 [2], window and softcap, each 0 for none. Results: keys, values,
    [KV row, token, head_dim]; fp32 [batch, token, head, head_dim].
    """
    return handler(name, _prompt_part(size, dtype))


@lru_cache
def chunk_handler(name: str, size: int, dtype: str) -> tuple[Any, ...]:
    """Returns the handler of attention to one KV block with several tokens per sequence, for heads
    of `size` elements, and the functions that its threads run.

    Its arguments: query, [row, asked token, head_dim]; key, value, [KV row, token, head_dim];
    first, int32 [batch]; lead, int32 [1]; limits, fp32 [3], with the step from one query's token to
    the next. Results: fp32 [row, asked token, head_dim], log-sum-exp [row, asked token].
    """
    return handler(name, _chunk_part(size, dtype))


def handler(
    name: str, function: Callable[..., int], axis: int = 0, grain: int = 1, least: int = 1
) -> tuple[Any, ...]:
    """Returns three compiled functions: the handler that XLA calls, the one that its threads run,
    which LLVM knows by `name`, and the one that computes a part.

    function: computes a part: (task, part number) -> 1, or 0, as Numba has it, if it raises (the
    only reason is lack of memory). Parts are ranges of at least `grain` along an axis of the first
    result, and of at least `least` multiplications, if each of these takes an element of the first
    argument: to wake another thread takes longer than a few of them.
    """
    part = cached(partial(cfunc, PART), function)
    binding.add_symbol(f"{name}_part", part.address)
    work = cached(partial(cfunc, FUNCTION), _taking_parts(f"{name}_part"))
    binding.add_symbol(name, work.address)
    binding.add_symbol(CORES, ctypes.addressof(_cores()))
    calls = CALLS

    def handle(frame):
        assert calls
        if is_asked_for_version(frame):
            return 0
        api, context = words(frame[2]), frame[3]
        size = words(words(words(frame[14])[0])[5])[axis]
        most = max(size // grain, 1)
        if least > 1:
            asked = words(words(words(frame[9])[0])[5])
            most = max(min(most, size * asked[0] * asked[1] // least), 1)
        threads, sent = room(1), room(5)
        sent[0], sent[1], sent[2], sent[3] = 32, 0, context, address_in(threads)
        threads[0] = 1
        known = call(api[THREADS], address_in(sent)) == 0
        # XLA may have more threads than cores, see `engine/stages/worker.py`. Here they would take
        # each other's core, and the one that has nothing left would wait for the other.
        running = min(threads[0], words(address_of(CORES))[0], most)
        helpers = max(running - 1, 0) if known else 0
        task = malloc(64)
        if task == 0:
            return fail(api, sent)
        shared = words(task)
        shared[NEXT], shared[DONE], shared[SUCCEEDED], shared[HOLDERS] = 0, 0, 0, helpers + 2
        shared[ALL] = min(most, PARTS * (helpers + 1))
        shared[ARGUMENTS], shared[RESULTS] = frame[9], frame[14]
        for _ in range(helpers):
            sent[0], sent[1], sent[2], sent[3], sent[4] = 40, 0, context, address_of(name), task
            if call(api[SCHEDULE], address_in(sent)) != 0:
                fetch_add(task + 8 * HOLDERS, -1)
        run(name, shared)
        while fetch_add(task + 8 * DONE, 0) < shared[ALL]:
            pass
        failed = shared[SUCCEEDED] < shared[ALL]
        let_go(shared)
        return fail(api, sent) if failed else 0

    return cached(partial(cfunc, FUNCTION), handle), work, part


@lru_cache
def _cores() -> ctypes.c_int64:
    """Returns the number of cores in memory that stays where it is."""
    return ctypes.c_int64(core_count())


def _taking_parts(name: str) -> Callable[..., int]:
    """Returns the function that each thread runs: it takes parts until all are taken."""
    calls = CALLS

    def work(shared):
        assert calls
        part = next_part(shared)
        while part < shared[ALL]:
            finish_part(shared, run_part(name, shared, part))
            part = next_part(shared)
        let_go(shared)
        return 0

    return work


def _blocks_part(size: int, dtype: str, bits: int) -> Callable[..., int]:
    """Returns the function that computes decode attention for a part of the rows."""
    source, is_half = SOURCE + CALLS, dtype == "float16"
    stored = np.float32 if dtype == "float32" else np.uint16

    def compute(shared, part):
        assert source
        arguments, results, parts = words(shared[ARGUMENTS]), words(shared[RESULTS]), shared[ALL]
        asked, known = words(arguments[0]), words(arguments[1])
        rows, blocks, batch = words(asked[5])[0], words(known[5])[0], words(known[5])[1]
        start, end = rows * part // parts, rows * (part + 1) // parts
        query = array_in(asked, (rows, size), np.float32)
        first = array_in(known, (blocks, batch), np.int32)
        stop = array_in(words(arguments[2]), (blocks,), np.int32)
        out = array_in(words(results[0]), (rows, size), np.float32)[start:end]
        lse = array_in(words(results[1]), (rows,), np.float32)[start:end]
        out[:] = np.float32(0)
        peak = np.full(end - start, MASKED, np.float32)
        total = np.zeros(end - start, np.float32)
        state, heads, at = (peak, total, out), rows // batch, 4
        softcap = array_in(words(arguments[3]), (1,), np.float32)[0]
        kept = batch * words(words(arguments[at])[5])[1]
        how = (rows // kept, softcap)
        for block in range(blocks):
            last, begins = np.int64(stop[block]), first[block]
            buffer = words(arguments[at])
            is_packed = False
            if bits < 16:  # with 16 bits Numba leaves this branch out
                is_packed = buffer[2] & 0xFFFFFFFF == PACKED
                if is_packed:
                    keys = packed_side(arguments, at, kept)
                    values = packed_side(arguments, at + 3, kept)
                    at += 6
                    fold_rows(
                        keys,
                        values,
                        begins,
                        last,
                        heads,
                        start,
                        query,
                        state,
                        how,
                        size,
                        is_half,
                        bits,
                    )
            if not is_packed:
                plain = (leaf(buffer, kept, stored),)
                mixed = (leaf(words(arguments[at + 1]), kept, stored),)
                at += 2
                fold_rows(
                    plain, mixed, begins, last, heads, start, query, state, how, size, is_half, 16
                )
        for i in range(end - start):
            lse[i] = np.float32(MASKED)
            if total[i] != 0:
                out[i] /= total[i]
                lse[i] = peak[i] + np.log(total[i])
        return 1

    return compute


def _prompt_part(size: int, dtype: str) -> Callable[..., int]:
    """Returns the function that computes prompt attention for a part of the KV rows."""
    source, is_half = prefill_attention.SOURCE + CALLS, dtype == "float16"
    stored = np.float32 if dtype == "float32" else np.uint16

    def compute(shared, part):
        assert source
        arguments, results, parts = words(shared[ARGUMENTS]), words(shared[RESULTS]), shared[ALL]
        sizes, kept = words(words(arguments[0])[5]), words(words(arguments[1])[5])
        shape, rows = (sizes[1], sizes[2], kept[2]), sizes[0] * kept[2]
        asked, all_ = (sizes[0] * sizes[2] * sizes[1] * size,), (rows * sizes[1] * size,)
        query = array_in(words(arguments[0]), asked, stored)
        key = array_in(words(arguments[1]), all_, stored)
        value = array_in(words(arguments[2]), all_, stored)
        first = array_in(words(arguments[3]), (sizes[0],), np.int32)
        limits = array_in(words(arguments[4]), (2,), np.float32)
        keys = array_in(words(results[0]), all_, stored)
        values = array_in(words(results[1]), all_, stored)
        out = array_in(words(results[2]), asked, np.float32)
        start, end = rows * part // parts, rows * (part + 1) // parts
        where = (start, end)
        attend_rows(
            query, key, value, first, keys, values, out, shape, limits, where, size, is_half
        )
        return 1

    return compute


def _chunk_part(size: int, dtype: str) -> Callable[..., int]:
    """Returns the function that computes a chunk's attention to a block for a part of the rows."""
    source, is_half = prefill_attention.SOURCE + CALLS, dtype == "float16"
    stored = np.float32 if dtype == "float32" else np.uint16

    def compute(shared, part):
        assert source
        arguments, results, parts = words(shared[ARGUMENTS]), words(shared[RESULTS]), shared[ALL]
        asked, kept = words(words(arguments[0])[5]), words(words(arguments[1])[5])
        batch, rows = words(words(arguments[3])[5])[0], asked[0]
        shape = (asked[1], kept[1], rows // batch, rows // kept[0])
        query = array_in(words(arguments[0]), (rows * asked[1] * size,), stored)
        key = array_in(words(arguments[1]), (kept[0] * kept[1] * size,), stored)
        value = array_in(words(arguments[2]), (kept[0] * kept[1] * size,), stored)
        first = array_in(words(arguments[3]), (batch,), np.int32)
        lead = np.int64(array_in(words(arguments[4]), (1,), np.int32)[0])
        limits = array_in(words(arguments[5]), (3,), np.float32)
        out = array_in(words(results[0]), (rows * asked[1] * size,), np.float32)
        lse = array_in(words(results[1]), (rows * asked[1],), np.float32)
        start, end = rows * part // parts, rows * (part + 1) // parts
        where = (start, end)
        attend_block_rows(
            query, key, value, first, out, lse, shape, lead, limits, where, size, is_half
        )
        return 1

    return compute
