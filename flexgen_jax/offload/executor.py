"""Runs the model: one loop walks a schedule's steps over one block of batches.

Everything that is prefetched is derived from the steps to come. Without overlap, the look-ahead is
zero and the loop waits after every step; nothing else differs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from flexgen_jax.errors import UserError
from flexgen_jax.layers.decoder import KVBlock
from flexgen_jax.layers.quantization import Kept
from flexgen_jax.models.spec import LayerKind, LayerSpec
from flexgen_jax.offload.activations import Activations
from flexgen_jax.offload.allocator import trim_heap
from flexgen_jax.offload.context import Runtime
from flexgen_jax.offload.kv_cache import KVCache, Moving, Split
from flexgen_jax.offload.prefetch import Stream
from flexgen_jax.offload.split_attention import Moment, Question, attend_split
from flexgen_jax.offload.weights import WeightStore
from flexgen_jax.policy.placement import CachePlan, place_activations
from flexgen_jax.policy.policy import GREEDY, SAMPLE, SCORE, Ahead, Head, Policy
from flexgen_jax.policy.schedule import LookAhead, Step

TRIM_S = 10.0
"""Seconds between trims of the heap, which take a while."""


class NonFiniteError(UserError, ArithmeticError):
    """A layer produced NaN or infinity; the message names the layer."""


@dataclass(frozen=True)
class Batch:
    """The input of one batch.

    ids: int32 [batch, token], left-padded; first_valid: int32 [batch], the index of each sequence's
    first real token; sampling: the arguments of `layers.sampling.sample` except the logits and the
    token, or () for greedy decoding; targets: int32 [batch, token] to score the prompt against,
    instead of generating; forced: int32 [batch, generated token] to score and to continue with.
    """

    ids: np.ndarray
    first_valid: np.ndarray
    sampling: tuple[np.ndarray, ...] = ()
    targets: np.ndarray | None = None
    forced: np.ndarray | None = None

    @property
    def size(self) -> int:
        return int(self.ids.shape[0])

    @property
    def head(self) -> Head:
        if self.targets is not None or self.forced is not None:
            return SCORE
        return SAMPLE if self.sampling else GREEDY

    @property
    def prompt_len(self) -> int:
        return int(self.ids.shape[1])


@dataclass
class Computed:
    """A dispatched step, and the results to hand on when it is done.

    finite: bool, whether all results are finite; result: KV blocks, ids or log-probabilities.
    """

    step: Step
    finite: jax.Array
    result: Any = None


OnResult = Callable[[Step, np.ndarray], bool]
"""Receives a step and the head's result for it (ids [batch, 1] or log-probabilities [batch,
token]); returns whether the batch is done."""


class BlockRun:
    """One block of batches passing through the model."""

    def __init__(
        self,
        runtime: Runtime,
        weights: WeightStore,
        policy: Policy,
        batches: Sequence[Batch],
        tokens: int,
        plan: CachePlan,
        on_result: OnResult,
        on_step: Callable[[Step], object],
    ) -> None:
        self._runtime = runtime
        self._weights = weights
        self._layers = runtime.spec.layers
        self._policy = policy
        self._batches = batches
        self._on_result = on_result
        self._on_step = on_step
        self._tokens = tokens
        self._plan = plan
        self._trimmed_at = time.monotonic()
        self._cache = KVCache(runtime, plan, [batch.size for batch in batches])
        self._projected: dict[Step, tuple[jax.Array, KVBlock]] = {}
        waiting = place_activations(len(self._layers) - 1, len(batches), policy)
        self._activations = Activations(runtime, waiting)
        self._ids: dict[int, Any] = {}
        self._finished: set[int] = set()
        self._depth = Ahead.of(policy)
        stream = (runtime.memories, runtime.pool, runtime.ledger)
        self._weight_loads: Stream[tuple[int, int], dict[str, Kept]] = Stream(
            lambda key: weights.start(self._layers[key[1]]), *stream
        )
        self._kv_loads: Stream[Step, Moving] = Stream(
            lambda step: self._cache.start((step.layer - 1, step.batch)), *stream
        )
        self._hidden_loads: Stream[Step, jax.Array] = Stream(
            lambda step: self._activations.start(step.batch), *stream
        )

    def run(self) -> None:
        """Computes the steps of all tokens, until every batch is done."""
        shape = (self._tokens, len(self._layers), len(self._batches))
        ahead = LookAhead(self._policy.order.steps(*shape))
        try:
            before: Computed | None = None
            self._runtime.metrics.enter("prefill")
            self._read_ahead(ahead, -1)
            for step in ahead:
                self._runtime.metrics.enter("decode" if step.token else "prefill")
                self._trim_now_and_then()
                self._copy_ahead(step, ahead)
                computed = self._compute(step, ahead)
                self._release_weights(step, ahead)
                if before is not None:
                    self._retire(before, ahead)
                before = computed
                if not self._policy.overlap:
                    self._retire(computed, ahead)
                    before = None
                self._read_ahead(ahead, step.visit)
            if before is not None:
                self._retire(before, ahead)
        finally:
            self._close()

    def _trim_now_and_then(self) -> None:
        """Returns the free parts of the heap to the system at most every `TRIM_S` seconds. The heap
        does not shrink by itself, because the cache's open blocks lie between temporaries."""
        if time.monotonic() - self._trimmed_at > TRIM_S:
            trim_heap()
            self._trimmed_at = time.monotonic()

    def _read_ahead(self, ahead: LookAhead, visit: int) -> None:
        """Starts prefetching from disk for the layers and batches that come next."""
        # Embedding and head are read once per block: while they compute, the disk goes on with what
        # follows.
        visits = ahead.visits(visit, self._depth.weight_reads, self._is_decoder)
        visits = [step for step in ahead.steps(1) if step.visit == visit] + visits
        self._weight_loads.prefetch([(step.visit, step.layer) for step in visits])
        steps = ahead.steps(self._depth.cache_reads, self._is_decoder)
        self._kv_loads.prefetch([step for step in steps if self._is_cached(step)])
        steps = ahead.steps(self._depth.hidden_reads)
        self._hidden_loads.prefetch([step for step in steps if self._is_waiting(step)])

    def _copy_ahead(self, step: Step, ahead: LookAhead) -> None:
        """Starts the copies to the device that must be under way before this step computes."""
        visits = ahead.visits(step.visit, self._depth.weight_copies)
        self._weight_loads.copy([(next_.visit, next_.layer) for next_ in visits])
        steps = ahead.steps(self._depth.cache_copies)
        self._kv_loads.copy(steps)
        self._hidden_loads.copy(steps)

    def _is_cached(self, step: Step) -> bool:
        """Returns whether the step attends to a KV cache that is complete by now."""
        if step.token == 0 or not self._is_decoder(step):
            return False
        if self._policy.order.prefills_first and not self._cache.has_all_prompts:
            return False  # read buffers must not come on top of what prompts still hold
        expected = self._batches[step.batch].prompt_len + step.token - 1
        return self._cache.tokens((step.layer - 1, step.batch)) == expected

    def _is_waiting(self, step: Step) -> bool:
        """Returns whether the step's input has been handed over by now."""
        return self._activations.is_ready(step.token, step.layer - 1, step.batch)

    def _is_decoder(self, step: Step) -> bool:
        return self._kind(step) == "decoder"

    def _kind(self, step: Step) -> LayerKind:
        return self._layers[step.layer].kind

    def _layer(self, step: Step) -> LayerSpec:
        return self._layers[step.layer]

    def _compute(self, step: Step, ahead: LookAhead) -> Computed:
        """Dispatches one layer for one batch, and hands on the results that need no waiting."""
        kind = self._kind(step)
        weights = self._weight_loads.take((step.visit, step.layer))
        if kind == "embedding":
            computed, hidden = self._embed(step, weights)
        elif kind == "head":
            computed, hidden = self._head(step, weights), None
        elif step.token == 0:
            computed, hidden = self._prefill(step, weights)
        else:
            computed, hidden = self._decode(step, weights, ahead)
        self._watch(step, weights, computed.finite)
        self._weight_loads.used((step.visit, step.layer), computed.finite)
        if kind != "embedding":
            self._hidden_loads.used(step, computed.finite)
            self._hidden_loads.release(step)
        if hidden is not None:
            self._activations.put(step.token, step.layer, step.batch, hidden)
        return computed

    def _watch(self, step: Step, weights: Any, result: Any, part: str = "") -> None:
        """Counts the device as busy with a step, from when its weights are there until `result`,
        which is already enqueued, is computed."""
        what = f"{self._layer(step).name}{part}, token {step.token}, batch {step.batch}"
        operation = self._runtime.metrics.queue("compute", "layers", what)
        self._runtime.watcher.follow(operation, weights, result)

    def _embed(self, step: Step, weights: Any) -> tuple[Computed, jax.Array]:
        batch = self._batches[step.batch]
        ids = batch.ids if step.token == 0 else self._ids[step.batch]
        start = 0 if step.token == 0 else batch.prompt_len + step.token - 1
        program = self._runtime.programs.embed(batch.size, ids.shape[1])
        hidden, finite = program(weights, ids, np.int32(start), batch.first_valid)
        return Computed(step, finite), hidden

    def _prefill(self, step: Step, weights: Any) -> tuple[Computed, jax.Array]:
        batch = self._batches[step.batch]
        hidden = self._hidden_loads.take(step)
        # The head needs the last token only, unless it scores the prompt.
        only_last = self._layers[step.layer + 1].kind == "head" and batch.targets is None
        cuts = self._plan.prompt[step.batch]
        program = self._runtime.programs.prefill(self._layer(step), batch.size, cuts, only_last)
        hidden, blocks, finite = program(weights, hidden, batch.first_valid)
        return Computed(step, finite, blocks), hidden

    def _decode(self, step: Step, weights: Any, ahead: LookAhead) -> tuple[Computed, jax.Array]:
        batch, programs = self._batches[step.batch], self._runtime.programs
        hidden = self._hidden_loads.take(step)
        moved = self._kv_loads.take(step)
        split: Split = self._kv_loads.staying(step)
        position = batch.prompt_len + step.token - 1
        room = sum(self._plan.lengths(step.batch)[: split.sealed + 1])
        at = Moment.of(self._policy, position, batch.first_valid, room)
        if split.blocks:
            query, new = self._project(step, weights)
            question = Question(self._runtime, self._layer(step), query, at)
            following = ahead.steps(1) if self._policy.overlap else []
            partials = attend_split(
                question, moved, split, lambda: self._project_early(step, following, weights)
            )
            program = programs.finish(self._layer(step), batch.size, len(partials))
            hidden, finite = program(weights, hidden, query, new, partials)
        else:
            *sealed, tail = moved.blocks
            here = split.here
            program = programs.decode(
                self._layer(step), batch.size, here.lengths, here.tail, at.most
            )
            hidden, new, finite = program(weights, hidden, tuple(sealed), tail, *at.arguments)
        self._kv_loads.used(step, finite)
        self._kv_loads.release(step)
        return Computed(step, finite, new), hidden

    def _project(self, step: Step, weights: Any) -> tuple[jax.Array, KVBlock]:
        """Returns the step's query and new KV, which may have been computed already while the CPU
        attended for the step before."""
        if step in self._projected:
            return self._projected.pop(step)
        program = self._runtime.programs.project(self._layer(step), self._batches[step.batch].size)
        found: tuple[jax.Array, KVBlock] = program(weights, self._hidden_loads.take(step))
        self._watch(step, weights, found[0], " (projection)")
        return found

    def _project_early(self, step: Step, following: list[Step], weights: Any) -> None:
        """Dispatches the next batch's projection to the device, while the CPU attends for this
        batch."""
        for later in following:
            if later.visit == step.visit and self._is_waiting(later):
                self._projected[later] = self._project(later, weights)

    def _head(self, step: Step, weights: Any) -> Computed:
        batch = self._batches[step.batch]
        hidden = self._hidden_loads.take(step)
        programs = self._runtime.programs
        if batch.targets is not None:
            program = programs.score(batch.size, batch.prompt_len)
            result, finite = program(weights, hidden, batch.targets)
            self._ids[step.batch] = batch.targets[:, -1:]  # for a step that may still be dispatched
            return Computed(step, finite, result)
        if batch.forced is not None:
            target = batch.forced[:, step.token : step.token + 1]
            program = programs.score(batch.size, 1)
            result, finite = program(weights, hidden, target)
            self._ids[step.batch] = target
            return Computed(step, finite, result)
        program = programs.head(batch.size, not batch.sampling)
        sampling = (*batch.sampling, np.int32(step.token)) if batch.sampling else ()
        ids, finite = program(weights, hidden, *sampling)
        self._ids[step.batch] = ids
        return Computed(step, finite, ids)

    def _release_weights(self, step: Step, ahead: LookAhead) -> None:
        """Frees the layer's weights after its last batch."""
        following = ahead.steps(1)
        if not following or following[0].visit != step.visit:
            self._weight_loads.release((step.visit, step.layer))

    def _retire(self, computed: Computed, ahead: LookAhead) -> None:
        """Waits for a step and stores its results. Called one step behind, so that the device stays
        busy."""
        step = computed.step
        computed.finite.block_until_ready()
        self._on_step(step)
        if not bool(computed.finite):
            raise NonFiniteError(
                f"{self._layer(step).name} produced NaN or infinity at token {step.token} of batch "
                f"{step.batch}; try --dtype float32, and check the checkpoint"
            )
        kind = self._kind(step)
        if kind != "head":
            self._activations.settle(step.token, step.layer, step.batch)
        if kind == "embedding":
            return
        if kind == "head":
            if self._on_result(step, np.asarray(computed.result)):
                self._finished.add(step.batch)
                ahead.drop(lambda later: later.batch in self._finished)
        elif step.token < self._tokens - 1 and step.batch not in self._finished:
            where = (step.layer - 1, step.batch)
            put = self._cache.put_prompt if step.token == 0 else self._cache.put_token
            put(where, computed.result)

    def _close(self) -> None:
        """Releases everything, also after an error or Ctrl-C, and even if one part of it fails."""
        with ExitStack() as parts:
            if self._runtime.folder is not None:
                parts.callback(self._runtime.folder.clear_scratch)
            parts.callback(self._runtime.pool.trim)
            parts.callback(self._weights.end_block)
            parts.callback(self._cache.close)
            parts.callback(self._activations.close)
            for stream in (self._hidden_loads, self._kv_loads, self._weight_loads):
                parts.callback(stream.close)
