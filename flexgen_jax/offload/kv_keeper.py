"""Keeps in a KV store what batches have computed, and brings back what it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from flexgen_jax.layers.attention import Block
from flexgen_jax.layers.quantization import assemble
from flexgen_jax.models.spec import ModelSpec
from flexgen_jax.models.tensor_spec import Formats
from flexgen_jax.models.weight_source import numpy_dtype
from flexgen_jax.offload.batch import arrays_of
from flexgen_jax.offload.disk.kv_store import (
    Draft,
    KVStore,
    PieceLayout,
    TokenArray,
)
from flexgen_jax.offload.kv_cache import BlockArrays, KVCache
from flexgen_jax.policy.plan import BlockPlan
from flexgen_jax.policy.policy import SCORE
from flexgen_jax.policy.running import LayerState, PromptPart, Running


def piece_layout(spec: ModelSpec, formats: Formats) -> PieceLayout:
    """Returns what a KV store keeps of each layer's KV blocks, as they are sealed."""
    layers = []
    for layer in spec.decoders:
        leaves = [x for leaf in layer.growing for x in formats.sealed(leaf, 1, 1).leaves]
        # Of one row and token: [1, ..., 1, element].
        shapes = [(*leaf.shape[1:-2], leaf.shape[-1]) for leaf in leaves]
        kinds = [numpy_dtype(leaf.kind) for leaf in leaves]
        layers.append(tuple(map(TokenArray, shapes, kinds)))
    return PieceLayout(tuple(layers))


@dataclass(eq=False)
class BatchTexts:
    """The tokens that a batch's rows have got, and the rows that are not finished."""

    left: set[int]
    made: list[np.ndarray] = field(default_factory=list)


class KVKeeper:
    """Stores the prefixes of a run when they are computed, and rows when they are finished.

    say: is told once if nothing can be stored any more.
    """

    def __init__(
        self, store: KVStore, plan: BlockPlan, cache: KVCache, say: Callable[[str], object]
    ) -> None:
        self._store, self._plan, self._cache, self._say = store, plan, cache, say
        self._is_packed = plan.formats.cache_bits < 16
        self._texts: dict[Running, BatchTexts] = {}
        self._has_failed = False
        # Of the prefix that is being brought back: its further layers, and the blocks of one.
        self._reading: Iterator[list[np.ndarray]] = iter(())
        self._restored: list[Block] = []

    def enter(self, running: Running) -> None:
        """Takes in a batch that generates."""
        given = arrays_of(running).given
        if running.is_prefix or given.head == SCORE or given.most is None:
            return
        # A row that fills up a batch has one token.
        self._texts[running] = BatchTexts({row for row, most in enumerate(given.most) if most > 1})
        running.closing.callback(self._texts.pop, running)

    def took(self, running: Running, ids: np.ndarray, left: Sequence[int]) -> None:
        """Takes note of tokens that rows have got, int32 [batch, 1], and stores those that are
        finished with it; left: the others."""
        texts = self._texts.get(running)
        if texts is None:
            return
        finished = texts.left.difference(left)
        texts.left.intersection_update(left)
        for row in sorted(finished):
            self._keep(running, row, [int(each[row, 0]) for each in texts.made])
        texts.made.append(ids)

    def shrink(self, running: Running, rows: Sequence[int], left: int) -> None:
        """Leaves a batch with these rows, the first of which are not finished."""
        texts = self._texts.get(running)
        if texts is not None:
            texts.left = set(range(left))
            texts.made = [ids[np.array(rows)] for ids in texts.made]

    def keep_prompt(self, made: PromptPart) -> None:
        """Stores a prefix when all of its layers are computed."""
        running, is_last = made.state.running, made.blocks.stop == len(made.state.homes)
        if running.is_prefix and is_last and made.state is running.growing[-1]:
            self._keep(running, 0, [])

    def restored(self, made: PromptPart) -> list[Block]:
        """Returns KV blocks of a stored prefix; its layers come one after the other."""
        state, given = made.state, arrays_of(made.state.running).given
        assert given.stored is not None, "it is stored"
        if not made.blocks.start:
            if state is state.running.growing[0]:
                self._reading = given.stored.read()
            padding = int(given.first_valid[0])
            self._restored = blocks_of(state, self._plan, next(self._reading), padding)
            if state is state.running.growing[-1]:
                given.stored.close()
        return self._restored[made.blocks.start : made.blocks.stop]

    def _keep(self, running: Running, row: int, made: Sequence[int]) -> None:
        """Stores what is cached of a row, which has got `made` after its prompt."""
        prompt = running.shape.prompt_len
        columns = prompt if running.is_prefix else running.growing[0].tokens
        # An open block is in full precision, and a batch's last step may have overwritten it.
        if self._is_packed or _has_lost_open_block(running):
            columns = sum(running.lengths[: running.sealed(columns)])
        if self._has_failed or columns < prompt:
            return  # of a batch's last tokens, nothing is cached
        ids = [*_ids_of(running, row), *made[: columns - prompt]]
        try:
            draft = self._store.draft(ids)
            if draft is not None:
                self._write(draft, running, row)
        except OSError as error:
            self._has_failed = True
            self._say(f"flexgen-jax: the KV store takes nothing more: {error}")

    def _write(self, draft: Draft, running: Running, row: int) -> None:
        try:
            for place, (start, stop) in enumerate(draft.spans):
                for number, layer in enumerate(self._plan.spec.decoders):
                    if layer.growing:
                        arrays = self._tokens_of(running, row, number, start, stop)
                        draft.write(place, number, arrays)
        except BaseException:
            self._store.drop(draft)
            raise
        self._store.finish(draft)

    def _tokens_of(
        self, running: Running, row: int, layer: int, start: int, stop: int
    ) -> list[np.ndarray]:
        """Returns what a layer keeps of some tokens of a row's sequence, its prefixes included."""
        given = arrays_of(running).given
        before, padding = given.tokens_before(row), int(given.first_valid[row])
        parts = []
        if start < before:
            prefix = running.prefixes_of(row)[-1]
            parts.append(self._tokens_of(prefix, 0, layer, start, min(stop, before)))
        if stop > before:
            columns = [max(start - before, 0) + padding, stop - before + padding]
            state = running.layers[layer]
            parts.append(_columns_of_row(self._cache, state, row, *columns))
        return [np.concatenate(leaf) for leaf in zip(*parts, strict=True)]


def _ids_of(running: Running, row: int) -> list[int]:
    """Returns the token ids of a row's prompt, prefixes included."""
    prefixes = running.prefixes_of(row)
    before = _ids_of(prefixes[-1], 0) if prefixes else []
    given = arrays_of(running).given
    return [*before, *given.ids[row, given.first_valid[row] :].tolist()]


def _columns_of_row(
    cache: KVCache, state: LayerState, row: int, start: int, stop: int
) -> list[np.ndarray]:
    """Returns what a layer keeps of a row's columns from `start` to before `stop`, all of which are
    cached: each stored leaf, [token, ...]. Waits for the disk."""
    parts: list[list[np.ndarray]] = []
    begin = 0
    for number, length in enumerate(state.running.lengths):
        first, last = max(start - begin, 0), min(stop - begin, length)
        if first < last:
            leaves = _leaves_of_row(cache, state, row, number)
            parts.append([np.moveaxis(leaf[..., first:last, :], -2, 0) for leaf in leaves])
        begin += length
    return [np.concatenate(leaf) for leaf in zip(*parts, strict=True)]


def _leaves_of_row(cache: KVCache, state: LayerState, row: int, number: int) -> list[np.ndarray]:
    """Returns the stored leaves of a row's block, wherever it is."""
    block: BlockArrays | None = state.payload.blocks.get(number)
    if block is None:
        return [view[row] for view in cache.read(state, number).views]
    if block.views:
        return [view[row] for view in block.views]
    return [_row_of(leaf, row) for leaf in jax.tree.leaves(block.arrays)]


def _row_of(leaf: jax.Array, row: int) -> np.ndarray:
    """Returns a row of an array, which on the device is taken there."""
    device = next(iter(leaf.devices()))
    if device.platform != "cpu" and leaf.sharding.memory_kind == "device":
        return np.asarray(leaf[row])
    row_of: np.ndarray = np.asarray(leaf)[row]
    return row_of


def _has_lost_open_block(running: Running) -> bool:
    """Returns whether the open blocks were given to a program that does not hand them back."""
    open_blocks = [state.payload.blocks.get(state.sealed) for state in running.growing]
    leaves = jax.tree.leaves([block.arrays for block in open_blocks if block is not None])
    return any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves)


def blocks_of(
    state: LayerState, plan: BlockPlan, stored: Sequence[np.ndarray], padding: int
) -> list[Block]:
    """Returns the KV blocks of a prefix's layer from what is stored of it, each [token, ...], after
    `padding` columns."""
    blocks, start = list[Block](), -padding
    for tokens in state.running.blocks.prompt:
        pieces = iter(_columns_of(array, start, tokens) for array in stored)
        storages = [plan.formats.sealed(leaf, 1, tokens) for leaf in state.layer.growing]
        blocks.append(
            tuple(assemble(storage, [next(pieces) for _ in storage.leaves]) for storage in storages)
        )
        start += tokens
    return blocks


def _columns_of(array: np.ndarray, start: int, tokens: int) -> jax.Array:
    """Returns [1, ..., token, element] of [token, ..., element], with zeros where `start` is below
    0."""
    part = array[max(start, 0) : max(start + tokens, 0)]
    columns = np.moveaxis(part, 0, -2)
    widths = [(0, 0)] * columns.ndim
    widths[-2] = (tokens - part.shape[0], 0)
    return jnp.asarray(np.pad(columns, widths)[None])
