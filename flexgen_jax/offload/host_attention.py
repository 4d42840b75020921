"""Decode attention over the KV blocks in host memory, on the CPU (FlexGen, section 4.2).

Moving a block to the device costs as many bytes as it has tokens; moving the query to the block
costs one. So the query comes here, and what goes back is as large as the query.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from flexgen_jax.layers.attention import MASKED
from flexgen_jax.layers.decoder import KVBlock
from flexgen_jax.layers.quantization import Kept, QuantizedArray

HostPartial = tuple[np.ndarray, np.ndarray]
"""As `layers.attention.Partial`, in NumPy."""


class HostBlock(NamedTuple):
    """A block in host memory, and the index of its first token."""

    start: int
    arrays: KVBlock


class HostAttention:
    """Attends with all cores that the process may use."""

    def __init__(self) -> None:
        count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        self._threads = count or 1
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="flexgen-attention")

    def attend(
        self,
        query: np.ndarray,
        blocks: Sequence[HostBlock],
        position: int,
        first_valid: np.ndarray,
    ) -> HostPartial:
        """One query token a sequence against some blocks.

        query: [batch, head, 1, head_dim], scaled; position: the query's index, before which the
        blocks' tokens are valid; first_valid: int32 [batch], each sequence's first valid token.
        """
        batch, heads, _, head_dim = query.shape
        rows = batch * heads
        queries = np.ascontiguousarray(query, np.float32).reshape(rows, head_dim)
        first = np.repeat(first_valid.astype(np.int64), heads)
        peak = np.full(rows, MASKED, np.float32)
        total, out = np.zeros(rows, np.float32), np.zeros((rows, head_dim), np.float32)

        folds = [_prepared(block, first, position) for block in blocks]

        def work(part: int) -> None:
            bounds = (rows * part // self._threads, rows * (part + 1) // self._threads)
            for fold, arguments in folds:
                fold(queries, *arguments, peak, total, out, *bounds)

        for done in [self._pool.submit(work, part) for part in range(self._threads)]:
            done.result()
        # A row without a valid token keeps the masked score, which weighs nothing in a merge.
        safe = np.where(total > 0, total, 1)
        lse = np.where(total > 0, peak + np.log(safe), MASKED).astype(np.float32)
        out /= safe[:, None]
        return out.reshape(batch, heads, 1, head_dim), lse.reshape(batch, heads, 1)

    def close(self) -> None:
        self._pool.shutdown()


def _prepared(
    block: HostBlock, first: np.ndarray, position: int
) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """The kernel for a block, and its arguments between the query and the running result."""
    # Numba takes half a second to import, and not every run attends here.
    from flexgen_jax.offload.host_kernels import fold_for

    key, value = block.arrays
    bits = key.storage.bits if isinstance(key, QuantizedArray) else 16
    sides = (_views(key, first.size), _views(value, first.size))
    begin = np.maximum(first - block.start, 0)
    stop = min(key.shape[2], position - block.start)
    return fold_for(key.shape[3], str(key.dtype) == "float16", bits), (*sides, begin, stop)


def _views(kept: Kept, rows: int) -> tuple[np.ndarray, ...]:
    """The arrays that a side of a block is kept in, [row, token, ...], 16-bit floats as bits."""
    leaves = [kept.packed, kept.scale, kept.minimum] if isinstance(kept, QuantizedArray) else [kept]
    views = []
    for leaf in leaves:
        array = np.asarray(leaf)
        array = array.view(np.uint16) if array.dtype.itemsize == 2 else array
        views.append(array.reshape(rows, *array.shape[2:]))
    return tuple(views)
