"""One token of the gated delta rule on the CPU, compiled by Numba and called by XLA.

XLA's CPU backend computes it well below the memory's speed, as many small products. This reads each
head's state twice, the second time from the core's cache, and writes it once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from flexgen_jax.cpu.jit import delta_step_ir, llvm
from flexgen_jax.cpu.jit.attention_entry import ALL, ARGUMENTS, CALLS, RESULTS, array_in, handler
from flexgen_jax.cpu.jit.code_cache import source_of
from flexgen_jax.cpu.jit.delta_step_ir import step_row
from flexgen_jax.cpu.jit.xla_calls import words

SOURCE = source_of(__file__, delta_step_ir.__file__, llvm.__file__)
"""A checksum of the code that the handler is made from; see `decode_attention.SOURCE`."""


@lru_cache  # XLA keeps no reference to a handler
def delta_handler(name: str, key_size: int, value_size: int) -> tuple[Any, ...]:
    """Returns the handler of one token for heads of these sizes, and the functions that its threads
    run.

    Its arguments, all fp32: value, [row, value_size], with a row for each value head of each
    sequence; query, key, [row / group, key_size], since a group's rows share them; fade, write,
    [row]; state, [row, key_size, value_size]. Results: what the state says of the query, of value's
    shape, and the new state, which may be the old one's memory.
    """
    return handler(name, _part(key_size, value_size))


def _part(key_size: int, value_size: int) -> Callable[..., int]:
    """Returns the function that computes a part of the rows."""
    source = SOURCE + CALLS

    def compute(shared, part):
        assert source
        arguments, results, parts = words(shared[ARGUMENTS]), words(shared[RESULTS]), shared[ALL]
        rows, shared_rows = words(words(arguments[0])[5])[0], words(words(arguments[1])[5])[0]
        group, square = rows // shared_rows, (rows * key_size * value_size,)
        value = array_in(words(arguments[0]), (rows * value_size,), np.float32)
        query = array_in(words(arguments[1]), (shared_rows * key_size,), np.float32)
        key = array_in(words(arguments[2]), (shared_rows * key_size,), np.float32)
        fade = array_in(words(arguments[3]), (rows,), np.float32)
        write = array_in(words(arguments[4]), (rows,), np.float32)
        state = array_in(words(arguments[5]), square, np.float32)
        out = array_in(words(results[0]), (rows * value_size,), np.float32)
        after = array_in(words(results[1]), square, np.float32)
        arrays = (value, query, key, state, out, after)
        for row in range(rows * part // parts, rows * (part + 1) // parts):
            step_row(arrays, row, row // group, fade[row], write[row], key_size, value_size)
        return 1

    return compute
