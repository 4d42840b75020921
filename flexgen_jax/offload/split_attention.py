"""Decode attention for a step whose KV cache is partly on the host, where the CPU attends to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from flexgen_jax.cpu import Candidates
from flexgen_jax.layers.decoder import KVBlock
from flexgen_jax.layers.quantization import Kept
from flexgen_jax.layers.sparse_attention import Ranked
from flexgen_jax.models.spec import LayerSpec
from flexgen_jax.offload.device import Device
from flexgen_jax.offload.kv_cache import LayerCache
from flexgen_jax.policy.placement import Part
from flexgen_jax.policy.policy import Policy


class Moment(NamedTuple):
    """The place of a decode step in its sequences.

    position: int32, the new token's index; first_valid: int32 [batch], each sequence's first valid
    token. For sparse attention, counts: int32 [batch], how many earlier tokens each head attends
    to, and most: how many the compiled programs have room for; for dense attention these are None
    and 0.
    """

    position: np.int32
    first_valid: np.ndarray
    counts: np.ndarray | None = None
    most: int = 0

    @classmethod
    def of(cls, policy: Policy, position: int, first_valid: np.ndarray, room: int) -> Moment:
        """Returns the moment of the token at `position`; room: how many tokens the cache's blocks,
        with the open one, can hold."""
        if not policy.is_sparse:
            return cls(np.int32(position), first_valid)
        counts = np.array([policy.attended(position - int(first)) for first in first_valid])
        most = policy.attended(room)
        return cls(np.int32(position), first_valid, counts.astype(np.int32), most)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of `Programs.decode` that this moment gives."""
        dense = (self.position, self.first_valid)
        return dense if self.counts is None else (*dense, self.counts)


class Question(NamedTuple):
    """A batch's query to a layer's KV cache."""

    device: Device
    layer: LayerSpec
    query: jax.Array
    at: Moment

    @property
    def rows(self) -> int:
        return int(self.query.shape[0])

    def attend(self, blocks: tuple[KVBlock, ...], part: Part) -> Any:
        program = self.device.programs.attend(self.layer, self.rows, part.lengths, part.tail)
        return self._watched(program(self.query, blocks, _starts(part), *self.at[:2]))

    def rank(self, keys: tuple[Kept, ...], part: Part) -> Ranked:
        shape = (self.layer, self.rows, part.lengths, part.tail, self.at.most)
        program = self.device.programs.rank(*shape)
        found: Ranked = self._watched(program(self.query, keys, _starts(part), *self.at[:2]))
        return found

    def attend_ranked(
        self, values: tuple[Kept, ...], part: Part, ranked: Ranked, counts: jax.Array
    ) -> Any:
        shape = (self.layer, self.rows, part.lengths, part.tail, self.at.most)
        program = self.device.programs.attend_ranked(*shape)
        return self._watched(program(values, ranked, counts))

    def _watched(self, result: Any) -> Any:
        """Counts the device as busy until the result, which is already enqueued, is computed."""
        self.device.watch("attention", "attention on the device", self.query, result)
        return result


def attend_split(
    question: Question, cache: LayerCache, meanwhile: Callable[[], object]
) -> list[Any]:
    """Returns the partial results of the host and, if it has blocks, of the device, for
    `Programs.finish`.

    meanwhile: called when the device has its work and before the CPU's begins.
    """
    device, at = question.device, question.at
    where = (cache.on_host, int(at.position), at.first_valid)
    if at.counts is None:
        here = [question.attend(cache.blocks, cache.here)] if cache.blocks else []
        meanwhile()
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
        _candidates(device, found, part) if found else None
        for found, part in zip(ranked, (cache.here, cache.there), strict=True)
    ]
    attend_top = device.host_attention.attend_top
    there, left = device.on_host(attend_top, question.query, *where, at.counts, *known)
    if ranked[0] is None:
        return [there]
    values = tuple(value for _, value in cache.blocks)
    return [there, question.attend_ranked(values, cache.here, ranked[0], left)]


def _starts(part: Part) -> np.ndarray:
    return np.array(part.starts, np.int32)


def _candidates(device: Device, ranked: Ranked, part: Part) -> Candidates:
    """Brings ranked tokens to the host, with their indices in the sequence."""
    scores, tokens, lse = (
        np.asarray(x) for x in device.memories.to_host(ranked, "attention", "ranked tokens")
    )
    lengths = (*part.lengths, part.tail) if part.tail else part.lengths
    spans = zip(part.starts, lengths, strict=True)
    indices = np.concatenate([np.arange(start, start + length) for start, length in spans])
    return Candidates(scores, indices.astype(np.int32)[tokens], lse)
