"""Decodes in layers that attend: one token per sequence, or several tokens including drafts; on the
device, or in two places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from flexgen_jax.layers import programs
from flexgen_jax.layers.attention import Block
from flexgen_jax.offload.batch import Computed, arrays_of
from flexgen_jax.offload.dispatch import Dispatch, hidden_of
from flexgen_jax.offload.joined_steps import JoinedSteps
from flexgen_jax.offload.kv_cache import LayerCache
from flexgen_jax.offload.prefetch import Load
from flexgen_jax.offload.split_attention import Question, attend_split
from flexgen_jax.schedule.backend import Inputs
from flexgen_jax.schedule.running import Running
from flexgen_jax.schedule.waves import Step


class TokenSteps:
    """Dispatches decode steps."""

    def __init__(self, dispatch: Dispatch, joined: JoinedSteps) -> None:
        self._dispatch, self._device, self._plan = dispatch, dispatch.device, dispatch.plan
        self._joined = joined
        self._layers = self._device.spec.layers
        # A step whose query and new KV are computed already, and these.
        self._projected: tuple[Step, tuple[jax.Array, Block]] | None = None

    def forget(self, running: Running) -> None:
        """Forgets a batch that ends."""
        self._joined.forget(running)
        if self._projected is not None and self._projected[0].batch is running:
            self._projected = None

    def decode(
        self, step: Step, weights: Any, inputs: Inputs, shared: Sequence[LayerCache]
    ) -> Computed:
        joined_result = self._joined.take(step, inputs)
        if joined_result is not None:
            return joined_result
        cache: LayerCache = inputs.cache.arriving
        running, policy, room = step.batch, self._plan.policy, 0
        if policy.is_sparse:
            room = policy.attended(sum(running.lengths[: cache.sealed + 1]))
        if cache.on_host or shared:
            return self._decode_split(step, weights, inputs, room, shared)
        state, device_cache = running.layers[step.layer - 1], cache.here
        appends, (*sealed, opened) = state.appends(cache.sealed), cache.blocks
        program = self._dispatch.get(
            programs.decode,
            step,
            blocks=device_cache.lengths,
            tail=device_cache.tail,
            room=room,
            appends=appends,
            tokens=step.batch.span(step.token).tokens,
        )
        arrays = arrays_of(running)
        position_arguments = arrays.moments[step.token].arguments(
            self._layers[step.layer].attention.window
        )
        hidden, new_arrays, checks = program(
            weights, hidden_of(inputs), tuple(sealed), opened, arrays.checks, *position_arguments
        )
        if not appends:
            self._dispatch.ask_for(step, new_arrays)
        return Computed(checks, hidden, new_arrays, is_appended=appends)

    def _decode_split(
        self, step: Step, weights: Any, inputs: Inputs, room: int, shared: Sequence[LayerCache]
    ) -> Computed:
        """Decodes with a cache that is partly on the host, where the CPU attends to it, or with
        prefixes."""
        arrays, hidden, early_query = arrays_of(step.batch), hidden_of(inputs), inputs.early
        cache: LayerCache = inputs.cache.arriving
        query, new_arrays = self._project(step, weights, inputs.of_visit, hidden)
        self._dispatch.ask_for(step, new_arrays)
        question = Question(
            device=self._device,
            layer=self._layers[step.layer],
            query=query,
            at=arrays.moments[step.token],
            room=room,
        )
        start = step.batch.span(step.token).start
        to_prefixes = self._dispatch.to_prefixes(step, query, start, shared) if shared else None
        partials = attend_split(
            question, cache, lambda: self._project_early(early_query, weights, inputs.of_visit)
        )
        partials += [] if to_prefixes is None else [to_prefixes]
        tokens = step.batch.span(step.token).tokens
        program = self._dispatch.get(programs.finish, step, places=len(partials), tokens=tokens)
        attended = (query, new_arrays, partials)
        hidden, checks = program(weights, hidden, arrays.checks, *attended, *arrays.placed.chosen)
        return Computed(checks, hidden, new_arrays)

    def _project(
        self, step: Step, weights: Any, loads: Sequence[Load[Any]], hidden: jax.Array
    ) -> tuple[jax.Array, Block]:
        """Returns the step's query and new KV, which may have been computed already while the CPU
        attended for the step before."""
        known, self._projected = self._projected, None
        if known is not None and known[0] == step:
            return known[1]
        position_arguments = arrays_of(step.batch).moments[step.token].where
        projected: tuple[jax.Array, Block]
        tokens = step.batch.span(step.token).tokens
        project = self._dispatch.get(programs.project, step, tokens=tokens)
        projected = project(weights, hidden, *position_arguments)
        self._device.memories.ask(projected[0], "attention", "queries")
        self._dispatch.watch(step, loads, projected[0], " (projection)")
        return projected

    def _project_early(
        self,
        early: tuple[Step, Load[Any]] | None,
        weights: Any,
        loads: Sequence[Load[Any]],
    ) -> None:
        """Dispatches the next batch's projection to the device, while the CPU attends for this
        batch."""
        if early is not None:
            step, load = early
            (hidden,) = load.arriving
            self._projected = (step, self._project(step, weights, loads, hidden))
