"""Runs the model: the backend that carries out a block's loop with arrays."""

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
from flexgen_jax.offload.activations import Activations
from flexgen_jax.offload.allocator import trim_heap
from flexgen_jax.offload.device import Device
from flexgen_jax.offload.disk.folder import OffloadFolder
from flexgen_jax.offload.kv_cache import KVCache, LayerCache
from flexgen_jax.offload.prefetch import Load, Write
from flexgen_jax.offload.split_attention import Moment, Question, attend_split
from flexgen_jax.offload.tiers import HostBuffer
from flexgen_jax.offload.weights import WeightStore
from flexgen_jax.policy.backend import Inputs, Part
from flexgen_jax.policy.ledger import Ledger
from flexgen_jax.policy.loop import BlockLoop
from flexgen_jax.policy.placement import CacheKey
from flexgen_jax.policy.plan import BlockPlan, CachedPart, HiddenPart, Layout, WeightsPart
from flexgen_jax.policy.policy import GREEDY, SAMPLE, SCORE, Head
from flexgen_jax.policy.schedule import Step

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
    """What a dispatched step will have computed.

    finite: bool, whether all results are finite; hidden: the layer's output; result: KV blocks,
    ids or log-probabilities.
    """

    finite: jax.Array
    hidden: jax.Array | None = None
    result: Any = None


OnResult = Callable[[Step, np.ndarray], bool]
"""Receives a step and the head's result for it (ids [batch, 1] or log-probabilities [batch,
token]); returns whether the batch is done."""


class BlockRun:
    """One block of batches passing through the model: a backend of `BlockLoop`."""

    def __init__(
        self,
        device: Device,
        weights: WeightStore,
        plan: BlockPlan,
        batches: Sequence[Batch],
        ledger: Ledger,
        folder: OffloadFolder | None,
        on_result: OnResult,
        on_step: Callable[[Step], object] = lambda step: None,
        buffer_limit: int | None = None,
    ) -> None:
        self._device, self._weights, self._plan = device, weights, plan
        self._layers = device.spec.layers
        self._batches = batches
        self._ledger, self._buffer_limit = ledger, buffer_limit
        self._folder = folder
        self._on_result = on_result
        self._on_step = on_step
        self._cache = KVCache(plan, device, folder)
        self._activations = Activations(device.memories, folder)
        self._ids: dict[int, Any] = {}
        self._projected: tuple[Step, tuple[jax.Array, KVBlock]] | None = None
        self._trimmed_at = time.monotonic()

    def run(self) -> None:
        """Computes the steps of all tokens, until every batch is done."""
        try:
            loop = BlockLoop(self._plan, self, self._ledger, buffer_limit=self._buffer_limit)
            loop.run()
        finally:
            with ExitStack() as parts:
                if self._folder is not None:
                    parts.callback(self._folder.clear_scratch)
                parts.callback(self._cache.close)
                parts.callback(self._activations.close)

    def begin(self, step: Step, times: int) -> None:
        self._device.metrics.enter("decode" if step.token else "prefill")
        # The heap does not shrink by itself, because the cache's open blocks lie between
        # temporaries.
        if time.monotonic() - self._trimmed_at > TRIM_S:
            trim_heap()
            self._trimmed_at = time.monotonic()

    # Moving

    def allocate(self, layout: Layout) -> HostBuffer:
        return self._device.memories.buffer(layout)

    def fetch(self, part: Part, buffers: Sequence[HostBuffer]) -> Load[Any]:
        match part:
            case WeightsPart():
                return self._weights.fetch(part, buffers)
            case CachedPart():
                return self._cache.fetch(part, buffers)
            case HiddenPart():
                return self._activations.fetch(part, buffers)

    def again(self, load: Load[Any]) -> Load[Any]:
        return load.again()

    def copy(self, load: Load[Any]) -> None:
        load.copy(self._device.memories)

    def drop(self, load: Load[Any], is_used: bool) -> None:
        load.drop(is_used)

    def keep_hidden(self, part: HiddenPart, computed: Computed) -> None:
        assert computed.hidden is not None, "the head has no hidden states"
        self._activations.keep(part, computed.hidden)
        computed.hidden = None

    def write_hidden(self, part: HiddenPart) -> Write:
        return self._activations.write(part)

    def keep_prompt(self, layer: int, batch: int, computed: Computed) -> None:
        for block, arrays in enumerate(computed.result):
            self._cache.keep(CacheKey(layer, batch, block), arrays)

    def open_block(self, key: CacheKey, buffer: HostBuffer | None) -> None:
        self._cache.open(key, buffer)

    def append(self, key: CacheKey, computed: Computed) -> None:
        self._cache.append(key, computed.result)

    def quantize(self, key: CacheKey) -> None:
        self._cache.quantize(key)

    def write_blocks(self, keys: Sequence[CacheKey]) -> Write:
        return self._cache.write(keys)

    def is_done(self, handle: Load[Any] | Write) -> bool:
        return handle.is_done()

    def wait(self, write: Write) -> None:
        write.wait()

    # Computing

    def compute(self, step: Step, inputs: Inputs) -> Computed:
        weights: dict[str, Any] = {}
        for load in inputs.weights:
            weights.update(load.arriving)
        kind = self._layers[step.layer].kind
        if kind == "embedding":
            computed = self._embed(step, weights)
        elif kind == "head":
            computed = self._head(step, weights, inputs.hidden.arriving)
        elif step.token == 0:
            computed = self._prefill(step, weights, inputs.hidden.arriving)
        else:
            computed = self._decode(step, weights, inputs)
        self._watch(step, weights, computed.finite)
        return computed

    def _watch(self, step: Step, weights: Any, result: Any, part: str = "") -> None:
        name = self._layers[step.layer].name
        what = f"{name}{part}, token {step.token}, batch {step.batch}"
        self._device.watch("layers", what, weights, result)

    def _embed(self, step: Step, weights: Any) -> Computed:
        batch = self._batches[step.batch]
        ids = batch.ids if step.token == 0 else self._ids[step.batch]
        start = 0 if step.token == 0 else batch.prompt_len + step.token - 1
        program = self._device.programs.embed(batch.size, ids.shape[1])
        hidden, finite = program(weights, ids, np.int32(start), batch.first_valid)
        return Computed(finite, hidden)

    def _prefill(self, step: Step, weights: Any, hidden: jax.Array) -> Computed:
        batch = self._batches[step.batch]
        cuts = self._plan.cache.prompt[step.batch]
        only_last = self._plan.only_last(step.layer, step.batch)
        layer = self._layers[step.layer]
        program = self._device.programs.prefill(layer, batch.size, cuts, only_last)
        hidden, blocks, finite = program(weights, hidden, batch.first_valid)
        return Computed(finite, hidden, blocks)

    def _decode(self, step: Step, weights: Any, inputs: Inputs) -> Computed:
        batch, programs = self._batches[step.batch], self._device.programs
        layer, hidden = self._layers[step.layer], inputs.hidden.arriving
        cache: LayerCache = inputs.cache.arriving
        position = batch.prompt_len + step.token - 1
        room = sum(self._plan.cache.lengths(step.batch)[: cache.sealed + 1])
        at = Moment.of(self._plan.policy, position, batch.first_valid, room)
        if cache.on_host:
            query, new = self._project(step, weights, hidden)
            question = Question(self._device, layer, query, at)
            early = inputs.early
            partials = attend_split(question, cache, lambda: self._project_early(early, weights))
            program = programs.finish(layer, batch.size, len(partials))
            hidden, finite = program(weights, hidden, query, new, partials)
        else:
            *sealed, opened = cache.blocks
            here = cache.here
            program = programs.decode(layer, batch.size, here.lengths, here.tail, at.most)
            hidden, new, finite = program(weights, hidden, tuple(sealed), opened, *at.arguments)
        return Computed(finite, hidden, new)

    def _project(self, step: Step, weights: Any, hidden: jax.Array) -> tuple[jax.Array, KVBlock]:
        """Returns the step's query and new KV, which may have been computed already while the CPU
        attended for the step before."""
        known, self._projected = self._projected, None
        if known is not None and known[0] == step:
            return known[1]
        size = self._batches[step.batch].size
        program = self._device.programs.project(self._layers[step.layer], size)
        found: tuple[jax.Array, KVBlock] = program(weights, hidden)
        self._watch(step, weights, found[0], " (projection)")
        return found

    def _project_early(self, early: tuple[Step, Load[jax.Array]] | None, weights: Any) -> None:
        """Dispatches the next batch's projection to the device, while the CPU attends for this
        batch."""
        if early is not None:
            step, hidden = early
            self._projected = (step, self._project(step, weights, hidden.arriving))

    def _head(self, step: Step, weights: Any, hidden: jax.Array) -> Computed:
        batch, programs = self._batches[step.batch], self._device.programs
        if batch.targets is not None:
            program = programs.score(batch.size, batch.prompt_len)
            result, finite = program(weights, hidden, batch.targets)
            self._ids[step.batch] = batch.targets[:, -1:]  # for a step that may still be dispatched
            return Computed(finite, result=result)
        if batch.forced is not None:
            target = batch.forced[:, step.token : step.token + 1]
            program = programs.score(batch.size, 1)
            result, finite = program(weights, hidden, target)
            self._ids[step.batch] = target
            return Computed(finite, result=result)
        program = programs.head(batch.size, not batch.sampling)
        sampling = (*batch.sampling, np.int32(step.token)) if batch.sampling else ()
        ids, finite = program(weights, hidden, *sampling)
        self._ids[step.batch] = ids
        return Computed(finite, result=ids)

    def finish(self, step: Step, computed: Computed) -> bool:
        computed.finite.block_until_ready()
        self._on_step(step)
        if not bool(computed.finite):
            raise NonFiniteError(
                f"{self._layers[step.layer].name} produced NaN or infinity at token {step.token} "
                f"of batch {step.batch}; try --dtype float32, and check the checkpoint"
            )
        if self._layers[step.layer].kind != "head":
            return False
        return self._on_result(step, np.asarray(computed.result))
