"""Decode attention over KV blocks in host memory, computed by the CPU (FlexGen, section 4.2).

Moving a KV block to the device costs as many bytes as its tokens hold; moving the query to the
block costs one token's worth. So the query comes here, and what goes back is as large as the query.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from flexgen_jax.cpu.jit.cache_format import CacheFormat
from flexgen_jax.cpu.jit.decode_attention import fold_kernel
from flexgen_jax.cpu.jit.prefill_attention import fold_together_kernel
from flexgen_jax.cpu.jit.top_tokens import choose_kernel, mix_kernel, score_kernel
from flexgen_jax.cpu.processor import core_count
from flexgen_jax.layers.attention import MASKED, Block, sides
from flexgen_jax.layers.quantization import Kept, QuantizedArray
from flexgen_jax.models.parts import AttentionSpec

MANY_HEADS, LINES = 32, 16
"""From so many query heads on that share keys and values, attention is computed as products of so
many rows, which are divided among the threads until there are so many."""

COPYING_CORES = 2
"""Cores for XLA's threads that copy between host and GPU."""

HostPartial = tuple[np.ndarray, np.ndarray]
"""A partial attention result like `layers.attention.Partial`, as NumPy arrays."""


class HostBlock(NamedTuple):
    """A KV block in host memory, and the index of its first token in the sequence."""

    start: int
    arrays: Block


class Candidates(NamedTuple):
    """Tokens that were ranked elsewhere, with their attention scores.

    scores: fp32 [batch, head, candidate], `MASKED` for a candidate that is not valid; tokens: int32
    [batch, head, candidate], indices in the sequence; lse: fp32 [batch, head, 1], the log-sum-exp
    of the scores of all tokens that were ranked.
    """

    scores: np.ndarray
    tokens: np.ndarray
    lse: np.ndarray


class _Prepared(NamedTuple):
    """A KV block in the form that the compute kernels take."""

    format: CacheFormat
    keys: tuple[np.ndarray, ...]
    """Three arrays, see `decode_attention.fold_kernel`."""
    values: tuple[np.ndarray, ...]
    tokens: int
    first: np.ndarray
    stop: int
    offset: int

    @classmethod
    def of(cls, block: HostBlock, first_valid: np.ndarray, position: int, group: int) -> _Prepared:
        """Prepares a block for a query at `position`; first_valid: int64 [row]."""
        key, value = sides(block.arrays)
        bits = key.storage.bits if isinstance(key, QuantizedArray) else 16
        return cls(
            format=CacheFormat(key.shape[3], str(key.dtype), bits),
            keys=_views(key, first_valid.size // group),
            values=_views(value, first_valid.size // group),
            tokens=key.shape[2],
            first=np.maximum(first_valid - block.start, 0),
            stop=min(key.shape[2], position - block.start),
            offset=block.start,
        )


class HostAttention:
    """Computes decode attention with the cores that the process may use.

    is_beside_gpu: leave some cores to copies to and from a GPU.
    """

    def __init__(self, is_beside_gpu: bool = False) -> None:
        self._threads = attending_cores(core_count(), is_beside_gpu)
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="flexgen-attention")

    def attend(
        self,
        query: np.ndarray,
        blocks: Sequence[HostBlock],
        position: int,
        first_valid: np.ndarray,
        spec: AttentionSpec,
    ) -> HostPartial:
        """Attends from one query token per sequence to some KV blocks.

        query: [batch, head, 1, head_dim], scaled; position: the query's index in the sequence (only
        tokens before it are valid); first_valid: int32 [batch], the first token that each sequence
        sees.
        """
        if spec.group >= MANY_HEADS and not any(_is_packed(block) for block in blocks):
            return self._attend_together(query, blocks, position, first_valid, spec)
        queries, first = _rows(query), np.repeat(first_valid.astype(np.int64), query.shape[1])
        prepared = [_Prepared.of(block, first, position, spec.group) for block in blocks]
        running, softcap = _nothing(queries), np.float32(spec.softcap or 0)
        folds = []
        for block in prepared:
            sides = [*block.keys, *block.values, block.first]
            sizes = (block.tokens, block.stop, spec.group)
            kernel = fold_kernel(block.format)
            folds.append(kernel.bind(queries, *sides, *running, *sizes, softcap))
        self._on_all_cores(folds, len(queries))
        return _partial(query, *running)

    def _attend_together(
        self,
        query: np.ndarray,
        blocks: Sequence[HostBlock],
        position: int,
        first_valid: np.ndarray,
        spec: AttentionSpec,
    ) -> HostPartial:
        """Computes `attend` where so many heads share keys and values that computing binds: as
        products of some heads, a line, with the tokens of a block."""
        together = heads_together(spec, len(query))
        queries, softcap = _rows(query), np.float32(spec.softcap or 0)
        lines, share = len(queries) // together, spec.group // together
        running = _nothing(queries)
        first = np.repeat(first_valid.astype(np.int64), lines // len(query))
        prepared = [_Prepared.of(block, first, position, share) for block in blocks]
        folds = []
        for block in prepared:
            sides = (block.keys[0], block.values[0], block.first)
            sizes = (together, block.tokens, block.stop, share)
            kernel = fold_together_kernel(block.format.size, block.format.dtype)
            folds.append(kernel.bind(queries, *sides, *running, *sizes, softcap))
        self._on_all_cores(folds, lines)
        return _partial(query, *running)

    def attend_top(
        self,
        query: np.ndarray,
        blocks: Sequence[HostBlock],
        position: int,
        first_valid: np.ndarray,
        spec: AttentionSpec,
        counts: np.ndarray,
        here: Candidates | None,
        there: Candidates | None,
    ) -> tuple[HostPartial, np.ndarray]:
        """Computes top-K sparse attention to the values of some blocks; see
        `layers.sparse_attention`.

        counts: int32 [batch], the number of tokens, over all blocks, that each head attends to;
        here: candidates from other blocks, if there are any; there: candidates from these blocks,
        or None to compute their scores from their keys. Further arguments as in `attend`.
        Returns the partial result, and int32 [batch, head]: how many of the candidates in `here`
        were chosen.
        """
        queries, first = _rows(query), np.repeat(first_valid.astype(np.int64), query.shape[1])
        prepared = [_Prepared.of(block, first, position, spec.group) for block in blocks]
        scores = _scores(len(queries), position, [x for x in (here, there) if x])
        peak, total, out = _nothing(queries)
        lse = there.lse.reshape(-1) if there else np.empty_like(peak)
        each = np.repeat(counts, query.shape[1])
        remaining = each.copy()
        chosen = np.empty((len(queries), int(counts.max()) + 1), np.int32)
        ranked, slots = (scores, scores.shape[1]), chosen.shape[1]
        scoring, adding = [], []
        for block in prepared:
            sizes, softcap = (block.tokens, block.stop), np.float32(spec.softcap or 0)
            if not there:
                begun = [queries, *block.keys, block.first, peak, total]
                numbers = (*sizes, spec.group, softcap, block.offset)
                scoring.append(score_kernel(block.format).bind(*begun, *ranked, *numbers))
            own = [each, remaining, *block.values, out]
            where = (*sizes, block.offset, spec.group)
            mix = mix_kernel(block.format)
            adding.append(mix.bind(*ranked, lse, chosen, slots, *own, *where))
        choose = choose_kernel().bind(*ranked, each, chosen, slots)

        def set_lse(begin: int, end: int) -> None:
            lse[begin:end] = _lse(peak[begin:end], total[begin:end])

        ranking = [] if there else [*scoring, set_lse]
        self._on_all_cores([*ranking, choose, *adding], len(queries))
        partial = (out.reshape(query.shape), lse.reshape(query.shape[:3]))
        return partial, remaining.reshape(query.shape[:2])

    def prepare(
        self,
        query: np.ndarray,
        blocks: Sequence[Block],
        spec: AttentionSpec,
        is_sparse: bool,
        is_ranked: bool,
    ) -> None:
        """Compiles the compute kernels for a query and blocks like these (of one sequence and one
        token), or loads them if an earlier process compiled them. is_ranked: the blocks' keys will
        be ranked elsewhere."""
        heads, first = query.shape[1], np.zeros(1, np.int32)
        there = [HostBlock(start, block) for start, block in enumerate(blocks)]
        where = (query, there, len(there), first, spec)
        if not is_sparse:
            self.attend(*where)
            return
        scores = np.zeros((1, heads, 1), np.float32)
        ranked = Candidates(scores, np.zeros((1, heads, 1), np.int32), scores)
        self.attend_top(*where, np.ones(1, np.int32), None, ranked if is_ranked else None)

    def _on_all_cores(self, steps: Sequence[Callable[[int, int], None]], rows: int) -> None:
        """Calls all steps with the limits of a range of rows, one range on each core."""

        def work(begin: int, end: int) -> None:
            for step in steps:
                step(begin, end)

        bounds = [rows * part // self._threads for part in range(self._threads + 1)]
        for done in [self._pool.submit(work, *pair) for pair in pairwise(bounds)]:
            done.result()

    def close(self) -> None:
        self._pool.shutdown()


def heads_together(spec: AttentionSpec, batch: int) -> int:
    """Returns how many query heads that share keys and values are computed together, so that all
    threads have some."""
    together, lines = spec.group, batch * spec.num_kv_heads
    while together % 2 == 0 and together > MANY_HEADS and lines * spec.group // together < LINES:
        together //= 2
    return together


def _is_packed(block: HostBlock) -> bool:
    return isinstance(block.arrays[0], QuantizedArray)


def attending_cores(cores: int, is_beside_gpu: bool) -> int:
    """Returns how many of `cores` cores attend: beside a GPU all but a quarter of them, and but
    `COPYING_CORES` of many."""
    return cores - (min(COPYING_CORES, cores // 4) if is_beside_gpu else 0)


def _rows(query: np.ndarray) -> np.ndarray:
    """Reshapes a query [batch, head, 1, head_dim] to fp32 [row, head_dim]."""
    return np.ascontiguousarray(query, np.float32).reshape(-1, query.shape[3])


def _nothing(queries: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the initial peak, total and out, before any block is folded in."""
    rows = len(queries)
    return np.full(rows, MASKED, np.float32), np.zeros(rows, np.float32), np.zeros_like(queries)


def _partial(
    query: np.ndarray, peak: np.ndarray, total: np.ndarray, out: np.ndarray
) -> HostPartial:
    """Returns the result of all blocks that were folded in."""
    out /= np.where(total == 0, 1, total)[:, None]
    return out.reshape(query.shape), _lse(peak, total).reshape(query.shape[:3])


def _lse(peak: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Returns each row's log-sum-exp, fp32 [row].

    A row without a valid token gets `MASKED`, which has no weight in a merge. NaN stays NaN.
    """
    lse = peak + np.log(np.where(total == 0, 1, total))
    return np.where(total == 0, MASKED, lse).astype(np.float32)


def _scores(rows: int, position: int, known: Sequence[Candidates]) -> np.ndarray:
    """Returns an array for the scores of all tokens, fp32 [row, token], with the known scores
    filled in and -inf elsewhere."""
    tokens = [scores_of_row.tokens.reshape(rows, -1) for scores_of_row in known]
    width = max([position, *(int(each.max()) + 1 for each in tokens)])
    scores = np.full((rows, width), -np.inf, np.float32)
    for scores_of_row, each in zip(known, tokens, strict=True):
        np.put_along_axis(scores, each, scores_of_row.scores.reshape(rows, -1), axis=1)
    return scores


def _views(kept: Kept, rows: int) -> tuple[np.ndarray, ...]:
    """Returns the arrays of a block's keys, or its values, as [row, token, ...]: three, the first
    one again for plain ones."""
    leaves = kept.leaves if isinstance(kept, QuantizedArray) else (kept,) * 3
    arrays = [np.asarray(leaf) for leaf in leaves]
    return tuple(array.reshape(rows, *array.shape[2:]) for array in arrays)
