"""Computes a model's ends: the embedding, and the head, which chooses or scores tokens."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from flexgen_jax.errors import MachineError
from flexgen_jax.layers import programs
from flexgen_jax.layers.rotary import Rows
from flexgen_jax.layers.sampling import Choice
from flexgen_jax.models.parts import AttentionSpec, Pooling
from flexgen_jax.offload.batch import (
    Batch,
    BatchArrays,
    BatchSource,
    Computed,
    HeadResult,
    Moment,
    Neighbours,
    arrays_of,
)
from flexgen_jax.offload.device import Device
from flexgen_jax.offload.kv_cache import take_rows_of
from flexgen_jax.policy.plan import BlockPlan
from flexgen_jax.schedule.running import Running
from flexgen_jax.schedule.waves import Step


class NonFiniteError(MachineError, ArithmeticError):
    """A layer produced NaN or infinity; the message names the layer."""


class EndSteps:
    """Dispatches the steps of the embedding and the head."""

    def __init__(
        self, device: Device, plan: BlockPlan, source: BatchSource, neighbours: Neighbours | None
    ) -> None:
        self._device, self._plan, self._source = device, plan, source
        self._neighbours = neighbours
        self._layers = device.spec.layers

    def embed(self, step: Step, weights: Any) -> Computed:
        arrays, span = arrays_of(step.batch), step.batch.span(step.token)
        batch, memories = arrays.given, self._device.memories
        if not span.start:
            self._put_constants(step.batch)
            arrays.segments = self._plan.segments(step.batch.shape, batch.padding)
        if self._plan.config.has_embedding:
            program = self._device.programs.get(
                programs.embed, rows=batch.size, tokens=span.tokens, branches=batch.branches
            )
            start = memories.numbers(span.start)
            hidden, checks = program(weights, self._ids_of(step), start, arrays.placed)
        else:
            assert self._neighbours is not None, "another stage has the embedding"
            hidden = self._neighbours.receive(step, batch.size, span.tokens)
            checks = memories.numbers((1, 0))
        if 0 < step.token + 1 < step.batch.shape.gen_len:
            # Uploaded a token ahead, because it would have to wait behind weights.
            arrays.moments[step.token + 1] = self._next(step.batch, step.token)
            arrays.moments.pop(step.token - 1, None)
        return Computed(checks, hidden)

    def _ids_of(self, step: Step) -> np.ndarray | jax.Array:
        """Returns the tokens that a step embeds, int32 [batch, token]."""
        arrays = arrays_of(step.batch)
        if step.token > 0:
            if self._neighbours is not None:
                return self._neighbours.ids(step)
            if arrays.texts is not None:
                return arrays.texts.pass_ids
            token_ids: jax.Array = arrays.ids
            return token_ids
        start, tokens = step.batch.span(step.token)
        return arrays.given.ids[:, start : start + tokens]

    def _put_constants(self, running: Running) -> None:
        constant, arrays = self._device.memories.constant, arrays_of(running)
        batch = arrays.given
        adapters = batch.adapters
        if self._plan.config.adapter_names and adapters is None:
            adapters = np.full(batch.size, -1, np.int32)
        rows = Rows.of(
            first_valid=batch.first_valid,
            tokens=batch.prompt_len,
            before=batch.before,
            longest=batch.most,
            adapters=adapters,
        )
        arrays.rows = jax.tree.map(constant, rows)
        arrays.sampling = tuple(map(constant, batch.sampling))
        if arrays.texts is not None:
            arrays.texts.draws = tuple(map(constant, arrays.texts.of_pass()))

    def shrink(self, step: Step) -> None:
        """Leaves a batch with the rows that its `BatchArrays` say, before a step in the
        embedding."""
        arrays = arrays_of(step.batch)
        self._put_constants(step.batch)
        assert arrays.taken is not None, "rows were chosen"
        arrays.ids = take_rows_of(arrays.ids, arrays.taken)
        arrays.moments[step.token] = self._next(step.batch, step.token - 1)

    def _next(self, running: Running, token: int) -> Moment:
        """Returns the place of the token after a token, which all layers share."""
        batch, memories = arrays_of(running).given, self._device.memories
        if batch.sampling:
            memories.numbers(token + 1)  # for `head`
        position = running.span(token + 1).start
        position_arguments = (memories.numbers(position), arrays_of(running).placed)
        if not self._plan.policy.is_sparse:
            return Moment(position, batch.first_valid, position_arguments)
        attending = [layer.attention for layer in self._plan.spec.decoders if layer.attends]
        windows = {attention.window: attention for attention in attending}
        counts = {w: self._counts(batch, position, a) for w, a in windows.items()}
        first_seen = {window: memories.constant(count) for window, count in counts.items()}
        return Moment(position, batch.first_valid, position_arguments, counts, first_seen)

    def _counts(self, batch: Batch, position: int, attention: AttentionSpec) -> np.ndarray:
        """Returns how many earlier tokens each sequence attends to, int32 [batch]."""
        seen = (attention.seen(position - int(first)) for first in batch.first_valid)
        return np.array([self._plan.policy.attended(count) for count in seen], np.int32)

    def head(self, step: Step, weights: Any, hidden: jax.Array) -> Computed:
        arrays = arrays_of(step.batch)
        if not self._plan.config.has_head:
            assert self._neighbours is not None, "another stage has the head"
            self._neighbours.send(step, hidden)
            return Computed(arrays.checks)
        batch, result, checks = arrays.given, HeadResult(), arrays.checks
        is_prompt = step.token == 0
        if batch.forced is not None or (batch.targets is not None and is_prompt):
            scores, checks = self._score(step, batch, (weights, hidden, checks))
            result = result._replace(scores=scores)
        if batch.pooling is not None and is_prompt:
            pooled, checks = self._pool(batch, batch.pooling, (weights, hidden, checks))
            result = result._replace(pooled=pooled)
        if batch.chooses:
            last_hidden = hidden[:, -1:] if is_prompt and batch.needs_prompt else hidden
            chosen, checks = self._choose(step, arrays, (weights, last_hidden, checks))
            result = result._replace(ids=arrays.ids, logprobs=chosen)
        for array in jax.tree.leaves((result, checks)):
            array.copy_to_host_async()
        return Computed(checks, result=result)

    def _score(self, step: Step, batch: Batch, arguments: tuple[Any, ...]) -> tuple[Any, Any]:
        """Scores the tokens that are given."""
        target = batch.targets
        if target is None:
            assert batch.forced is not None, "something is scored"
            target = batch.forced[:, step.token : step.token + 1]
        program = self._device.programs.get(
            programs.score,
            rows=batch.size,
            tokens=arguments[1].shape[1],
            scored=target.shape[1],
            top=batch.prompt_logprobs,
        )
        result, checks = program(*arguments, target)
        arrays_of(step.batch).ids = target[:, -1:]  # for a step that may still be dispatched
        return result, checks

    def _pool(self, batch: Batch, pooling: Pooling, arguments: tuple[Any, ...]) -> tuple[Any, Any]:
        """Makes vectors of the prompts."""
        program = self._device.programs.get(
            programs.pool, rows=batch.size, tokens=arguments[1].shape[1], pooling=pooling
        )
        pooled, checks = program(*arguments, batch.first_valid)
        return pooled, checks

    def _choose(
        self, step: Step, arrays: BatchArrays, arguments: tuple[Any, ...]
    ) -> tuple[Any, Any]:
        """Chooses the next tokens, which `arrays.ids` has then; returns their log-probabilities."""
        sampling, batch = arrays.sampling, arrays.given
        texts = arrays.texts if step.token > 0 else None
        place = step.token
        # By now all of the batch's tokens before this one are known here.
        if texts is None:
            adjusted = self._source.adjusted(step.batch)
            allowed = self._source.allowed(step.batch)
        else:
            if sampling:
                draw_arguments = texts.draws if texts.computed > 1 else sampling[:-1]
                sampling, place = (*draw_arguments, self._device.memories.constant(texts.places)), 0
            adjusted = tuple(map(texts.spread, self._source.adjusted(step.batch, texts.guesses)))
            allowed = self._source.allowed(step.batch, texts.guesses)
            allowed = None if allowed is None else texts.spread(allowed)
        if sampling:
            sampling = (*sampling, self._device.memories.numbers(place))
        choice = Choice(
            not sampling,
            adjusted[0].shape[1] if adjusted else 0,
            batch.logprobs,
            allowed is not None,
        )
        masks = () if allowed is None else (allowed,)
        tokens = 1 if texts is None else texts.computed
        program = self._device.programs.get(
            programs.head, rows=batch.size, choice=choice, tokens=tokens
        )
        result, checks = program(*arguments, *sampling, *adjusted, *masks)
        if batch.logprobs is None:
            arrays.ids = result
            return None, checks
        arrays.ids, *logprobs = result
        return tuple(logprobs), checks

    def check(self, step: Step, computed: Computed) -> None:
        """Raises `NonFiniteError` if a layer's results were not finite, once a batch's last layer
        of a token is computed."""
        is_last = self._layers[step.layer].kind == "head"
        if not is_last and not self._plan.only_caches(step.token, step.layer):
            return
        _, first = np.asarray(computed.checks)
        if first:
            token = max(step.token, 0)
            raise NonFiniteError(
                f"{self._layers[first - 1].name} produced NaN or infinity at token {token} of "
                f"batch {step.batch.number}; try --dtype float32, and check the checkpoint"
            )
