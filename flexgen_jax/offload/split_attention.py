"""Decode attention for a step whose KV cache is partly on the host, where the CPU attends to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from flexgen_jax.cpu import Candidates
from flexgen_jax.layers import programs
from flexgen_jax.layers.attention import Block, sides
from flexgen_jax.layers.quantization import Kept
from flexgen_jax.layers.sparse_attention import Ranked
from flexgen_jax.models.spec import LayerSpec
from flexgen_jax.offload.batch import Moment
from flexgen_jax.offload.device import Device
from flexgen_jax.offload.kv_cache import LayerCache
from flexgen_jax.schedule.passes import BlocksAt


class Question(NamedTuple):
    """A batch's query to a layer's KV cache.

    room: for sparse attention, how many tokens the compiled programs have room for, else 0.
    """

    device: Device
    layer: LayerSpec
    query: jax.Array
    at: Moment
    room: int

    @property
    def rows(self) -> int:
        return int(self.query.shape[0])

    def attend(self, blocks: tuple[Block, ...], at: BlocksAt) -> Any:
        program = self._program(programs.attend, at, tokens=self.query.shape[2])
        return self._watched(program(self.query, blocks, *self._where(at)))

    def rank(self, keys: tuple[Kept, ...], at: BlocksAt) -> Ranked:
        program = self._program(programs.rank_tokens, at, room=self.room)
        ranked: Ranked = self._watched(program(self.query, keys, *self._where(at)))
        self.device.memories.ask(ranked, "attention", "ranked tokens")
        return ranked

    def attend_ranked(
        self, values: tuple[Kept, ...], at: BlocksAt, ranked: Ranked, counts: jax.Array
    ) -> Any:
        program = self._program(programs.attend_ranked, at, room=self.room)
        return self._watched(program(values, ranked, counts))

    def _program(self, kind: Any, at: BlocksAt, **shape: int) -> Any:
        return self.device.programs.get(
            kind, layer=self.layer, rows=self.rows, blocks=at.lengths, tail=at.tail, **shape
        )

    def _where(self, at: BlocksAt) -> tuple[Any, ...]:
        return (self.device.memories.numbers(at.starts), *self.at.where)

    def _watched(self, result: Any) -> Any:
        """Counts the device as busy until the result, which is already enqueued, is computed."""
        self.device.watch("attention", "attention on the device", self.query, result)
        return result


def attend_split(
    question: Question, cache: LayerCache, meanwhile: Callable[[], object]
) -> list[Any]:
    """Returns the partial results of the host and of the device, as far as they have blocks, for
    the program `finish`.

    meanwhile: called when the device has its work and before the CPU's begins.
    """
    device, moment, attention = question.device, question.at, question.layer.attention
    host_arguments = (
        cache.on_host,
        moment.position,
        moment.first_seen(attention.window),
        attention,
    )
    if moment.counts is None:
        partials = [question.attend(cache.blocks, cache.here)] if cache.blocks else []
        meanwhile()
        if not cache.on_host:
            return partials
        return [
            device.on_host(device.host_attention.attend, question.query, *host_arguments),
            *partials,
        ]
    # Which tokens are attended to is known only when the scores of both places are.
    ranked = [
        question.rank(keys, place) if keys else None
        for keys, place in (
            (tuple(sides(block)[0] for block in cache.blocks), cache.here),
            (cache.keys, cache.there),
        )
    ]
    meanwhile()
    ranked_arguments = [
        _candidates(ranked_part, place) if ranked_part else None
        for ranked_part, place in zip(ranked, (cache.here, cache.there), strict=True)
    ]
    attend_top = device.host_attention.attend_top
    counts = moment.counts[attention.window]
    host_partial, num_remaining = device.on_host(
        attend_top, question.query, *host_arguments, counts, *ranked_arguments
    )
    if ranked[0] is None:
        return [host_partial]
    values = tuple(sides(block)[1] for block in cache.blocks)
    return [host_partial, question.attend_ranked(values, cache.here, ranked[0], num_remaining)]


def _candidates(ranked: Ranked, at: BlocksAt) -> Candidates:
    """Waits for ranked tokens on their way to the host; adds their indices in the sequence."""
    scores, tokens, lse = (np.asarray(x) for x in ranked)
    lengths = (*at.lengths, at.tail) if at.tail else at.lengths
    spans = zip(at.starts, lengths, strict=True)
    indices = np.concatenate([np.arange(start, start + length) for start, length in spans])
    return Candidates(scores, indices.astype(np.int32)[tokens], lse)
