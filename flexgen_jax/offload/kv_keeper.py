"""Stores computed KV caches in a KV store, and loads stored ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flexgen_jax.layers.attention import Block
from flexgen_jax.layers.quantization import assemble
from flexgen_jax.models.spec import ModelSpec
from flexgen_jax.models.tensor_spec import Formats
from flexgen_jax.models.weight_source import numpy_dtype
from flexgen_jax.offload.batch import arrays_of, prompt_ids
from flexgen_jax.offload.disk.kv_pieces import KeptArray, PieceLayout
from flexgen_jax.offload.disk.kv_store import Draft, KVStore
from flexgen_jax.offload.kv_cache import BlockArrays, KVCache
from flexgen_jax.offload.replaced import ReplacedStore
from flexgen_jax.policy.plan import BlockPlan
from flexgen_jax.schedule.running import LayerState, PromptPart, ReplacedPart, Running

PREFIX_END = -1
"""The token of a prefix's last step, see `Running.tokens`."""


def piece_layout(spec: ModelSpec, formats: Formats) -> PieceLayout:
    """Returns the layout of each layer in a KV store: its KV blocks in sealed form, and its
    recurrent state."""
    layers = []
    for layer in spec.decoders:
        sealed = [x for leaf in layer.growing for x in formats.sealed(leaf, 1, 1).leaves]
        replaced = [x for leaf in layer.replaced for x in formats.plain(leaf, 1).leaves]
        # For one row, and one token of growing arrays: [1, ..., 1, element].
        growing = [(*leaf.shape[1:-2], leaf.shape[-1]) for leaf in sealed]
        growing_arrays = [
            KeptArray(s, numpy_dtype(x.kind)) for s, x in zip(growing, sealed, strict=True)
        ]
        growing_arrays += [
            KeptArray(x.shape[1:], numpy_dtype(x.kind), grows=False) for x in replaced
        ]
        layers.append(tuple(growing_arrays))
    return PieceLayout(tuple(layers))


@dataclass(eq=False)
class BatchTexts:
    """The tokens that a batch's rows have got, and the rows that are not finished."""

    left: set[int]
    made: list[np.ndarray] = field(default_factory=list)


class KVKeeper:
    """Stores the prefixes of a run when they are computed, and rows when they are finished.

    say: called once if storing is no longer possible.
    """

    def __init__(
        self,
        store: KVStore,
        plan: BlockPlan,
        cache: KVCache,
        replaced: ReplacedStore,
        say: Callable[[str], object],
    ) -> None:
        self._store, self._plan, self._say = store, plan, say
        self._cache, self._replaced = cache, replaced
        self._is_packed = plan.formats.cache_bits < 16
        self._texts: dict[Running, BatchTexts] = {}
        # How many KV caches and states of a prefix's layers are still to be computed.
        self._missing: dict[Running, int] = {}
        self._has_failed = False
        # Of the prefix that is being brought back: its further layers, and one.
        self._reading: Iterator[list[np.ndarray]] = iter(())
        self._layer: StoredLayer | None = None

    def enter(self, running: Running) -> None:
        """Admits a generating batch, or a prefix."""
        batch = arrays_of(running).given
        if running.is_prefix and not running.is_stored:
            state_parts = [
                state_part
                for x in running.layers
                for state_part in (x.homes, x.layer.replaced)
                if state_part
            ]
            self._missing[running] = len(state_parts)
            running.closing.callback(self._missing.pop, running)
        if running.is_prefix or not batch.chooses or batch.most is None:
            return
        # A row that fills up a batch has one token.
        self._texts[running] = BatchTexts(
            {row for row, max_length in enumerate(batch.most) if max_length > 1}
        )
        running.closing.callback(self._texts.pop, running)

    def took(self, running: Running, ids: np.ndarray, unfinished: Sequence[int]) -> None:
        """Takes note of tokens that rows have got, int32 [batch, 1], -1 for none, and stores those
        that are finished with it; unfinished: the others."""
        texts = self._texts.get(running)
        if texts is None:
            return
        finished = texts.left.difference(unfinished)
        texts.left.intersection_update(unfinished)
        for row in sorted(finished):
            new_ids = (int(step_ids[row, 0]) for step_ids in texts.made)
            self._keep(running, row, [token for token in new_ids if token >= 0])
        texts.made.append(ids)

    def shrink(self, running: Running, rows: Sequence[int], num_unfinished: int) -> None:
        """Reduces a batch to the given rows; unfinished rows come first."""
        texts = self._texts.get(running)
        if texts is not None:
            texts.left = set(range(num_unfinished))
            texts.made = [ids[np.array(rows)] for ids in texts.made]

    def keep_part(self, made: PromptPart | ReplacedPart) -> None:
        """Records a layer's cached arrays of a prompt; stores a prefix when it has all."""
        if isinstance(made, PromptPart):
            running, is_whole = made.state.running, made.blocks.stop == len(made.state.homes)
        else:
            running, is_whole = made.slot.running, made.slot.token == PREFIX_END
        if running not in self._missing or not is_whole:
            return
        self._missing[running] -= 1
        if not self._missing[running]:
            self._keep(running, 0, [])

    def restored_blocks(self, made: PromptPart) -> list[Block]:
        """Returns KV blocks of a stored prefix; its layers come in order."""
        stored = self._stored_layer(made.state)
        return stored.blocks[made.blocks.start : made.blocks.stop]

    def restored_state(self, made: ReplacedPart) -> tuple[jax.Array, ...]:
        """Returns what a layer of a stored prefix replaces with every token."""
        return self._stored_layer(made.slot.running.layers[made.layer - 1]).replaced

    def _stored_layer(self, state: LayerState) -> StoredLayer:
        """Returns the stored arrays of a layer: of the latest layer, or of the next layer."""
        if self._layer is None or self._layer.state is not state:
            batch, layers = arrays_of(state.running).given, state.running.layers
            assert batch.stored is not None, "it is stored"
            if state is layers[0]:
                self._reading = batch.stored.read()
            padding = int(batch.first_valid[0])
            self._layer = stored_layer(state, self._plan, next(self._reading), padding)
            if state is layers[-1]:
                batch.stored.close()
        return self._layer

    def _keep(self, running: Running, row: int, generated: Sequence[int]) -> None:
        """Stores the cache of a row with its `generated` tokens."""
        prompt = running.shape.prompt_len
        columns = cached = prompt if running.is_prefix else running.growing[0].tokens
        if self._is_packed and not running.is_prefix:  # an open block is in full precision
            columns = sum(running.lengths[: running.growing[0].sealed])
        # A state covers all tokens.
        is_useless = self._store.layout.has_ends and columns < cached
        if self._has_failed or is_useless or columns < prompt:
            return  # of a batch's last tokens, nothing is cached
        ids = [*prompt_ids(running, row), *generated[: columns - prompt]]
        try:
            while (draft := self._store.draft(ids)) is not None:
                self._write(draft, running, row)
                if not draft.is_partial:
                    break
                self._store.settle()
        except OSError as error:
            self._has_failed = True
            self._say(f"flexgen-jax: the KV store takes nothing more: {error}")

    def _write(self, draft: Draft, running: Running, row: int) -> None:
        try:
            for place, (start, stop) in enumerate(draft.spans):
                is_end = draft.parts[place].key.is_end
                for number, state in enumerate(running.layers):
                    arrays = list[np.ndarray]()
                    if state.homes:
                        arrays += self._tokens_of(running, row, number, start, stop)
                    if is_end and state.layer.replaced:
                        arrays += self._state_of_row(state, row)
                    draft.write(place, number, arrays)
        except BaseException:
            self._store.drop(draft)
            raise
        self._store.finish(draft)

    def _tokens_of(
        self, running: Running, row: int, layer: int, start: int, stop: int
    ) -> list[np.ndarray]:
        """Returns a layer's cached arrays for a range of a row's sequence, including prefixes."""
        batch = arrays_of(running).given
        before, padding = batch.tokens_before(row), int(batch.first_valid[row])
        pieces = []
        if start < before:
            prefix = running.prefixes_of(row)[-1]
            pieces.append(self._tokens_of(prefix, 0, layer, start, min(stop, before)))
        if stop > before:
            columns = [max(start - before, 0) + padding, stop - before + padding]
            state = running.layers[layer]
            pieces.append(_columns_of_row(self._cache, state, row, *columns))
        return [np.concatenate(leaf) for leaf in zip(*pieces, strict=True)]

    def _state_of_row(self, state: LayerState, row: int) -> list[np.ndarray]:
        """Returns what a layer replaces with every token, of a row. Waits for the disk."""
        arrays = state.slot.payload.arrays
        if arrays is None:
            return [view[row] for view in self._replaced.read(state.slot).views]
        return [_row_of(array, row) for array in arrays]


def _columns_of_row(
    cache: KVCache, state: LayerState, row: int, start: int, stop: int
) -> list[np.ndarray]:
    """Returns a layer's cached arrays of a row's columns `start` to `stop` (all cached): each
    stored leaf, [token, ...]. Waits for the disk."""
    columns: list[list[np.ndarray]] = []
    begin = 0
    for number, length in enumerate(state.running.lengths):
        first, last = max(start - begin, 0), min(stop - begin, length)
        if first < last:
            leaves = _leaves_of_row(cache, state, row, number)
            columns.append([np.moveaxis(leaf[..., first:last, :], -2, 0) for leaf in leaves])
        begin += length
    return [np.concatenate(leaf) for leaf in zip(*columns, strict=True)]


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


class StoredLayer(NamedTuple):
    """The stored arrays of a prefix's layer, in the batch's layout."""

    state: LayerState
    blocks: list[Block]
    replaced: tuple[jax.Array, ...]


def stored_layer(
    state: LayerState, plan: BlockPlan, stored: Sequence[np.ndarray], padding: int
) -> StoredLayer:
    """Returns the KV blocks of a prefix's layer, after `padding` columns, and what it replaces with
    every token. stored: as in `piece_layout`, growing arrays as [token, ...]."""
    blocks, start = list[Block](), -padding
    count = len(stored) - len(state.layer.replaced)
    for tokens in state.running.blocks.prompt if state.homes else ():
        pieces = iter(_columns_of(array, start, tokens) for array in stored[:count])
        storages = [plan.formats.sealed(leaf, 1, tokens) for leaf in state.layer.growing]
        blocks.append(
            tuple(assemble(storage, [next(pieces) for _ in storage.leaves]) for storage in storages)
        )
        start += tokens
    replaced = tuple(jnp.asarray(array[None]) for array in stored[count:])
    return StoredLayer(state, blocks, replaced)


def _columns_of(array: np.ndarray, start: int, tokens: int) -> jax.Array:
    """Returns [1, ..., token, element] of [token, ..., element], with zeros where `start` is below
    0."""
    part = array[max(start, 0) : max(start + tokens, 0)]
    columns = np.moveaxis(part, 0, -2)
    widths = [(0, 0)] * columns.ndim
    widths[-2] = (tokens - part.shape[0], 0)
    return jnp.asarray(np.pad(columns, widths)[None])
