"""Decode attention for a step whose KV cache is partly on the host, where the CPU attends to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from flexgen_jax.cpu import Candidates
from flexgen_jax.layers.decoder import KVBlock
from flexgen_jax.layers.quantization import Kept
from flexgen_jax.layers.rotary import Rows
from flexgen_jax.layers.sparse_attention import Ranked
from flexgen_jax.models.spec import LayerSpec
from flexgen_jax.offload.device import Device
from flexgen_jax.offload.kv_cache import LayerCache
from flexgen_jax.policy.placement import Part


class Moment(NamedTuple):
    """The place of a token in a batch's sequences.

    position: the new token's index; first_valid: int32 [batch], each sequence's first valid token;
    where: position and rows as arrays on the device; counts, counts_there: for sparse attention,
    int32 [batch], how many earlier tokens each head attends to, by the layers' window, here and on
    the device.
    """

    position: int
    first_valid: np.ndarray
    where: tuple[jax.Array, Rows]
    counts: Mapping[int | None, np.ndarray] | None = None
    counts_there: Mapping[int | None, jax.Array] | None = None

    def arguments(self, window: int | None) -> tuple[Any, ...]:
        """Returns the last arguments of `Programs.decode` for a layer with this window."""
        if self.counts_there is None:
            return self.where
        return (*self.where, self.counts_there[window])

    def first_seen(self, window: int | None) -> np.ndarray:
        """Returns the first token that the new one sees, int32 [batch]."""
        if window is None:
            return self.first_valid
        seen: np.ndarray = np.maximum(self.first_valid, np.int32(self.position + 1 - window))
        return seen


class Question(NamedTuple):
    """A batch's query to a layer's KV cache.

    most: for sparse attention, how many tokens the compiled programs have room for, else 0.
    """

    device: Device
    layer: LayerSpec
    query: jax.Array
    at: Moment
    most: int

    @property
    def rows(self) -> int:
        return int(self.query.shape[0])

    def attend(self, blocks: tuple[KVBlock, ...], part: Part) -> Any:
        program = self.device.programs.attend(self.layer, self.rows, part.lengths, part.tail)
        return self._watched(program(self.query, blocks, *self._where(part)))

    def rank(self, keys: tuple[Kept, ...], part: Part) -> Ranked:
        shape = (self.layer, self.rows, part.lengths, part.tail, self.most)
        program = self.device.programs.rank(*shape)
        found: Ranked = self._watched(program(self.query, keys, *self._where(part)))
        self.device.memories.ask(found, "attention", "ranked tokens")
        return found

    def attend_ranked(
        self, values: tuple[Kept, ...], part: Part, ranked: Ranked, counts: jax.Array
    ) -> Any:
        shape = (self.layer, self.rows, part.lengths, part.tail, self.most)
        program = self.device.programs.attend_ranked(*shape)
        return self._watched(program(values, ranked, counts))

    def _where(self, part: Part) -> tuple[Any, ...]:
        return (self.device.memories.numbers(part.starts), *self.at.where)

    def _watched(self, result: Any) -> Any:
        """Counts the device as busy until the result, which is already enqueued, is computed."""
        self.device.watch("attention", "attention on the device", self.query, result)
        return result


def attend_split(
    question: Question, cache: LayerCache, meanwhile: Callable[[], object]
) -> list[Any]:
    """Returns the partial results of the host and of the device, as far as they have blocks, for
    `Programs.finish`.

    meanwhile: called when the device has its work and before the CPU's begins.
    """
    device, at, attention = question.device, question.at, question.layer.attention
    where = (cache.on_host, at.position, at.first_seen(attention.window), attention)
    if at.counts is None:
        here = [question.attend(cache.blocks, cache.here)] if cache.blocks else []
        meanwhile()
        if not cache.on_host:
            return here
        return [device.on_host(device.host_attention.attend, question.query, *where), *here]
    # Which tokens are attended to is known only when the scores of both places are.
    ranked = [
        question.rank(keys, part) if keys else None
        for keys, part in (
            (tuple(key for key, _ in cache.blocks), cache.here),
            (cache.keys, cache.there),
        )
    ]
    meanwhile()
    known = [
        _candidates(found, part) if found else None
        for found, part in zip(ranked, (cache.here, cache.there), strict=True)
    ]
    attend_top = device.host_attention.attend_top
    counts = at.counts[attention.window]
    there, left = device.on_host(attend_top, question.query, *where, counts, *known)
    if ranked[0] is None:
        return [there]
    values = tuple(value for _, value in cache.blocks)
    return [there, question.attend_ranked(values, cache.here, ranked[0], left)]


def _candidates(ranked: Ranked, part: Part) -> Candidates:
    """Waits for ranked tokens on their way to the host; adds their indices in the sequence."""
    scores, tokens, lse = (np.asarray(x) for x in ranked)
    lengths = (*part.lengths, part.tail) if part.tail else part.lengths
    spans = zip(part.starts, lengths, strict=True)
    indices = np.concatenate([np.arange(start, start + length) for start, length in spans])
    return Candidates(scores, indices.astype(np.int32)[tokens], lse)
