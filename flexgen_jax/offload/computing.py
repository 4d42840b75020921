"""Computes steps: calls the compiled programs of a layer for a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from flexgen_jax.layers import programs
from flexgen_jax.offload.batch import BatchSource, Computed, Neighbours, arrays_of
from flexgen_jax.offload.device import Device
from flexgen_jax.offload.dispatch import Dispatch, hidden_of
from flexgen_jax.offload.end_steps import EndSteps
from flexgen_jax.offload.expert_steps import ExpertSteps, shared_weights
from flexgen_jax.offload.joined_steps import JoinedSteps
from flexgen_jax.offload.kv_cache import KVCache, LayerCache
from flexgen_jax.offload.token_steps import TokenSteps
from flexgen_jax.offload.weights import WeightStore
from flexgen_jax.policy.plan import BlockPlan
from flexgen_jax.schedule.backend import Inputs
from flexgen_jax.schedule.prefetch import state_of
from flexgen_jax.schedule.running import Running
from flexgen_jax.schedule.waves import Step


class Computing:
    """Dispatches the programs of steps."""

    def __init__(
        self,
        device: Device,
        weights: WeightStore,
        plan: BlockPlan,
        source: BatchSource,
        cache: KVCache,
        neighbours: Neighbours | None,
    ) -> None:
        self._device, self._plan = device, plan
        self._layers = device.spec.layers
        self._dispatch = Dispatch(device, plan, cache)
        self.ends = EndSteps(device, plan, source, neighbours)
        self._tokens = TokenSteps(self._dispatch, JoinedSteps(self._dispatch, weights, cache))
        self.experts = ExpertSteps(device, weights, plan)
        # The visit whose weights are unpacked, and these.
        self._unpacked: tuple[int, Any] = (-1, None)

    def enter(self, running: Running) -> None:
        """Admits a batch."""
        running.closing.callback(self._tokens.forget, running)

    def close(self) -> None:
        """Frees unpacked weights."""
        self._unpacked = (-1, None)

    def compute(self, step: Step, inputs: Inputs) -> Computed:
        """Dispatches a step."""
        shared: list[LayerCache] = [load.arriving for load in inputs.prefixes]
        weights: dict[str, Any] = {}
        for load in inputs.weights:
            weights.update(load.arriving)
        layer = self._layers[step.layer]
        if layer.kind == "embedding":
            computed = self.ends.embed(step, weights)
        elif layer.kind == "head":
            computed = self.ends.head(step, weights, hidden_of(inputs))
        else:
            computed = self._decoder(step, weights, inputs, shared)
        self._dispatch.watch(step, inputs.of_visit, computed.checks)
        arrays_of(step.batch).checks = computed.checks
        return computed

    def _decoder(
        self, step: Step, weights: dict[str, Any], inputs: Inputs, shared: Sequence[LayerCache]
    ) -> Computed:
        layer = self._layers[step.layer]
        all_weights = self._plain(step, weights) if self._plan.unpacks else weights
        weights = shared_weights(layer, all_weights)
        if not layer.attends:
            computed = self._mix(step, weights, inputs)
        elif step.token > 0:
            computed = self._tokens.decode(step, weights, inputs, shared)
        elif shared or step.batch.span(step.token).start:
            computed = self._prefill_chunk(step, weights, inputs, shared)
        else:
            computed = self._prefill(step, weights, hidden_of(inputs))
        if layer.experts is not None and not self._plan.only_caches(step.token, step.layer):
            self.experts.compute(step, weights, all_weights, computed, inputs.experts)
        return computed

    def _plain(self, step: Step, weights: Any) -> Any:
        """Returns a layer's unpacked weights; the first step of a visit unpacks them for all
        steps."""
        if self._unpacked[0] != step.visit:
            self._unpacked = (-1, None)  # the memory of the layer before is free for this one
            layer = self._layers[step.layer]
            unpack = self._device.programs.get(programs.unpack, layer=layer)
            self._unpacked = (step.visit, unpack(weights))
        return self._unpacked[1]

    def _prefill(self, step: Step, weights: Any, hidden: jax.Array) -> Computed:
        """Prefills prompts, or their first chunk."""
        running, arrays = step.batch, arrays_of(step.batch)
        program = self._dispatch.get(
            programs.prefill,
            step,
            cuts=self._cuts(step),
            only_last=running.only_last(step.layer),
            segments=arrays.segments,
            branches=arrays.given.branches,
        )
        hidden, blocks, checks = program(weights, hidden, arrays.checks, arrays.placed)
        return Computed(checks, hidden, blocks)

    def _cuts(self, step: Step) -> tuple[int, ...]:
        """Returns the token counts of the KV blocks that a prompt's step makes."""
        prompt_blocks = step.batch.prompt_blocks(step.token)
        return step.batch.lengths[prompt_blocks.start : prompt_blocks.stop]

    def _prefill_chunk(
        self, step: Step, weights: Any, inputs: Inputs, shared: Sequence[LayerCache]
    ) -> Computed:
        """Prefills a chunk of prompts. It attends to the blocks of earlier chunks one by one, so
        that all chunks use the same programs."""
        span, arrays = step.batch.span(step.token), arrays_of(step.batch)
        hidden, numbers = hidden_of(inputs), self._device.memories.numbers
        num_queries = 1 if step.batch.only_last(step.layer) else span.tokens
        project = self._dispatch.get(
            programs.project_chunk, step, tokens=span.tokens, asked=num_queries
        )
        query, partial, block = project(weights, hidden, numbers(span.start), arrays.placed)
        first = span.start + span.tokens - num_queries
        if inputs.cache is not None:
            cache: LayerCache = inputs.cache.arriving
            for start, length, earlier in zip(
                cache.here.starts, cache.here.lengths, cache.blocks, strict=True
            ):
                attend = self._dispatch.get(
                    programs.attend_chunk, step, asked=num_queries, tokens=length
                )
                position_arguments = (numbers(start), numbers(first), arrays.placed)
                partial = attend(partial, query, earlier, *position_arguments)
        partial = self._dispatch.to_prefixes(step, query, first, shared, partial)
        finish = self._dispatch.get(
            programs.finish_chunk, step, tokens=span.tokens, asked=num_queries
        )
        hidden, checks = finish(weights, hidden, arrays.checks, partial, *arrays.placed.chosen)
        return Computed(checks, hidden, (block,))

    def _mix(self, step: Step, weights: Any, inputs: Inputs) -> Computed:
        """Computes a step in a layer that does not attend."""
        span, arrays, layer = step.batch.span(step.token), arrays_of(step.batch), step.layer
        cache: LayerCache | None = None if inputs.cache is None else inputs.cache.arriving
        state = self._layers[layer].replaced
        is_prompt = step.token <= 0
        has_guesses = not is_prompt and span.tokens > 1
        program = self._dispatch.get(
            programs.mix,
            step,
            tokens=span.tokens,
            asked=1 if is_prompt and step.batch.only_last(layer) else span.tokens,
            blocks=() if cache is None else cache.here.lengths,
            tail=0 if cache is None else cache.here.tail,
            cuts=self._cuts(step) if is_prompt else (),
            donates=state_of(step).may_overwrite(step.token),
            has_guesses=has_guesses,
        )
        cached_argument = (
            (self._device.memories.numbers(step.batch.passes.cached),) if has_guesses else ()
        )
        hidden, new_arrays, replaced, checks = program(
            weights,
            hidden_of(inputs),
            () if cache is None else cache.blocks,
            self._first_state(step, state) if inputs.replaced is None else inputs.replaced.arriving,
            self._device.memories.numbers(span.start),
            arrays.checks,
            arrays.placed,
            *cached_argument,
        )
        if not is_prompt and cache is not None:
            self._dispatch.ask_for(step, new_arrays)
        return Computed(checks, hidden, new_arrays, replaced=replaced)

    def _first_state(self, step: Step, state: Sequence[Any]) -> tuple[jax.Array, ...]:
        """Return the layer's initial recurrent state: the shared prefix's final state, or zeros."""
        rows, dtype = arrays_of(step.batch).given.size, self._plan.dtype
        first = tuple(
            self._device.memories.constant(np.zeros(leaf.array_shape(rows), leaf.dtype or dtype))
            for leaf in state
        )
        for prefix, start, stop in step.batch.shared:  # a row's last one counts
            prefix_state = prefix.layers[step.layer - 1].slot.payload.arrays
            first = tuple(x.at[start:stop].set(y) for x, y in zip(first, prefix_state, strict=True))
        return first
