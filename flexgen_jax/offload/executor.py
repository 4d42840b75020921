"""Runs the model: the backend that carries out the loop over batches with arrays.

Transfers are here and in `kv_cache.py` and `replaced.py`; compute is in `computing.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from typing import Any

import jax
import numpy as np

from flexgen_jax.offload.allocator import trim_heap
from flexgen_jax.offload.batch import (
    BatchArrays,
    BatchSource,
    Computed,
    Neighbours,
    OnResult,
    arrays_of,
)
from flexgen_jax.offload.computing import Computing
from flexgen_jax.offload.device import Device
from flexgen_jax.offload.disk.folder import OffloadFolder
from flexgen_jax.offload.disk.kv_store import KVStore
from flexgen_jax.offload.kv_cache import KVCache, take_rows_of
from flexgen_jax.offload.kv_keeper import KVKeeper
from flexgen_jax.offload.prefetch import Load, Write
from flexgen_jax.offload.replaced import ReplacedStore
from flexgen_jax.offload.results import Results
from flexgen_jax.offload.speculation import Acceptance, DraftedText, DraftedTexts, Drafter, Pace
from flexgen_jax.offload.tiers import HostBuffer
from flexgen_jax.offload.weights import WeightStore
from flexgen_jax.policy.parts import Layout, WeightsPart
from flexgen_jax.policy.plan import BlockPlan
from flexgen_jax.policy.policy import Tier
from flexgen_jax.schedule.backend import Inputs, Part
from flexgen_jax.schedule.ledger import Ledger
from flexgen_jax.schedule.loop import BlockLoop
from flexgen_jax.schedule.passes import Begun
from flexgen_jax.schedule.running import (
    CachedPart,
    LayerState,
    PromptPart,
    ReplacedPart,
    Running,
    SealedPart,
)
from flexgen_jax.schedule.stages import StageLoop
from flexgen_jax.schedule.waves import Step

TRIM_S = 10.0
"""Seconds between trims of the heap, which take a while."""


class BlockRun:
    """Batches passing through the model: a backend of `BlockLoop`.

    peaks: those that the batches stay within, None for no limit; neighbours: None unless this run
    is a stage; drafter: guesses tokens, if the policy asks for it. guessed: how many experts were
    loaded by a guess, and then chosen or not; cached_experts: of the device's cache of experts;
    chosen_experts: how often each was chosen, see
    `ExpertSteps`; acceptance: of guessed tokens.
    """

    def __init__(
        self,
        device: Device,
        weights: WeightStore,
        plan: BlockPlan,
        source: BatchSource,
        ledger: Ledger,
        folder: OffloadFolder | None,
        on_result: OnResult,
        on_step: Callable[[Step], object] = lambda step: None,
        peaks: Mapping[Tier, int] | None = None,
        neighbours: Neighbours | None = None,
        kv_store: KVStore | None = None,
        say: Callable[[str], object] = lambda said: None,
        drafter: Drafter | None = None,
    ) -> None:
        self._drafter = drafter
        self._device, self._weights, self._plan = device, weights, plan
        self._source, self._neighbours = source, neighbours
        self._ledger, self._peaks = ledger, peaks
        self._folder = folder
        self._on_step = on_step
        self._cache = KVCache(plan, device, folder)
        self._replaced = ReplacedStore(device.memories, folder)
        self._computing = Computing(
            device=device,
            weights=weights,
            plan=plan,
            source=source,
            cache=self._cache,
            neighbours=neighbours,
        )
        self._keeper: KVKeeper | None = None
        if kv_store is not None:
            self._keeper = KVKeeper(kv_store, plan, self._cache, self._replaced, say)
        self._trimmed_at = time.monotonic()
        self._results = Results(on_result, self._keeper)
        self.chosen_experts = self._computing.experts.chosen
        self.guessed: dict[str, int] = {}
        self.cached_experts: dict[str, int] = {}
        self.acceptance = Acceptance()
        self._pace = Pace(plan.policy.draft_tokens, self.acceptance)

    def run(self) -> Iterator[None]:
        """Computes the steps of all batches, one at a time."""
        try:
            loop = self._loop()
            yield from loop.steps()
            self.guessed, self.cached_experts = loop.guessed, loop.cached_experts
        finally:
            with ExitStack() as stack:
                if self._folder is not None:
                    stack.callback(self._folder.clear_scratch)
                stack.callback(self._computing.close)

    def _loop(self) -> BlockLoop:
        if self._neighbours is not None:
            return StageLoop(self._plan, self, self._ledger, self._neighbours.slots)
        return BlockLoop(
            plan=self._plan,
            backend=self,
            ledger=self._ledger,
            arrivals=self._source,
            peaks=self._peaks,
            keeps_last=self._keeper is not None,
        )

    def begin(self, step: Step, times: int) -> Begun:
        if step.batch.payload is None:
            self._enter(step.batch)
        self._device.metrics.enter("decode" if step.token > 0 else "prefill")
        # The heap does not shrink by itself, because the cache's open blocks lie between
        # temporaries.
        if time.monotonic() - self._trimmed_at > TRIM_S:
            trim_heap()
            self._trimmed_at = time.monotonic()
        texts = arrays_of(step.batch).texts
        if texts is None or step.token <= 0 or step.layer:
            return Begun()
        return texts.begin_pass()

    def _enter(self, running: Running) -> None:
        """Admits a batch; its arrays are freed when it closes."""
        running.payload = BatchArrays(self._source.given(running))
        running.closing.callback(_forget, running)
        if self._drafter is not None and not running.is_prefix and self._plan.policy.draft_tokens:
            _begin_texts(running, self._drafter, self._plan.policy.pass_tokens, self._pace)
        self._cache.enter(running)
        self._replaced.enter(running)
        self._computing.enter(running)
        if self._keeper is not None:
            self._keeper.enter(running)

    # Moving

    def allocate(self, layout: Layout) -> HostBuffer:
        return self._device.memories.buffer(layout)

    def fetch(
        self, part: Part, buffers: Sequence[HostBuffer], like: Load[Any] | None = None
    ) -> Load[Any]:
        if like is not None:
            return like.again()
        match part:
            case WeightsPart():
                return self._weights.fetch(part, buffers)
            case CachedPart():
                return self._cache.fetch(part, buffers)
            case ReplacedPart():
                return self._replaced.fetch(part, buffers)

    def copy(self, load: Load[Any]) -> None:
        load.copy(self._device.memories)

    def wait_read(self, load: Load[Any]) -> None:
        load.wait_read()

    def detach(self, load: Load[Any]) -> None:
        load.detach()

    def drop(self, load: Load[Any], is_used: bool) -> None:
        load.drop(is_used)

    def keep(self, made: ReplacedPart | PromptPart | LayerState, computed: Computed | None) -> None:
        if computed is None:
            assert not isinstance(made, LayerState), "a prefix has no tokens after it"
            self._restore(made)
            return
        match made:
            case ReplacedPart() if made.slot.content == "cache":
                self._replaced.keep(made, computed.replaced)
                computed.replaced = ()
                if self._keeper is not None:
                    self._keeper.keep_part(made)
            case ReplacedPart():
                assert computed.hidden is not None, "the head has no hidden states"
                self._replaced.keep(made, (computed.hidden,))
                computed.hidden = None
            case PromptPart():
                self._cache.keep(made, computed.result)
                if self._keeper is not None:
                    self._keeper.keep_part(made)
            case LayerState():
                store = self._cache.replace if computed.is_appended else self._cache.append
                store(made, computed.result)

    def _restore(self, made: ReplacedPart | PromptPart) -> None:
        """Loads the cached arrays of a stored prefix's layer."""
        assert self._keeper is not None, "it is stored"
        running = made.slot.running if isinstance(made, ReplacedPart) else made.state.running
        if running.payload is None:
            self._enter(running)
        if isinstance(made, ReplacedPart):
            self._replaced.keep(made, self._keeper.restored_state(made))
        else:
            self._cache.keep(made, self._keeper.restored_blocks(made))

    def open_block(self, state: LayerState, buffer: HostBuffer | None) -> None:
        self._cache.open(state, buffer)

    def quantize(self, state: LayerState, block: int) -> None:
        self._cache.quantize(state, block)

    def write(self, part: ReplacedPart | SealedPart) -> Write:
        if isinstance(part, SealedPart):
            return self._cache.write(part)
        return self._replaced.write(part)

    def is_done(self, handle: Load[Any] | Write) -> bool:
        return handle.is_done()

    def wait(self, write: Write) -> None:
        write.wait()

    # Computing

    def compute(self, step: Step, inputs: Inputs) -> Computed:
        return self._computing.compute(step, inputs)

    def finish(self, step: Step, computed: Computed) -> int | None:
        computed.checks.block_until_ready()
        self._on_step(step)
        self._computing.ends.check(step, computed)
        if step.layer <= self._plan.spec.last_decoder or not self._plan.config.has_head:
            return None
        result = jax.tree.map(np.asarray, computed.result)
        unfinished_rows = self._results.hand_on(step, result)
        return None if unfinished_rows is None else len(unfinished_rows)

    def shrink(self, step: Step, rows: int) -> None:
        arrays = arrays_of(step.batch)
        unfinished_rows = arrays.left
        finished_rows = (row for row in range(arrays.given.size) if row not in unfinished_rows)
        kept_rows = [*unfinished_rows, *islice(finished_rows, rows - len(unfinished_rows))]
        self._source.keep(step.batch, kept_rows)
        arrays.given = self._source.given(step.batch)
        arrays.taken = np.array(kept_rows, np.int32)
        if arrays.texts is not None:
            arrays.texts.shrink(kept_rows)
        if self._keeper is not None:
            self._keeper.shrink(step.batch, kept_rows, len(unfinished_rows))
        arrays.left = range(len(unfinished_rows))
        self._computing.ends.shrink(step)

    def shrink_state(
        self, state: LayerState, cache: Load[Any] | None, replaced: Load[Any] | None
    ) -> None:
        rows = arrays_of(state.running).taken
        assert rows is not None, "the batch has shrunk"
        if cache is not None:
            self._cache.shrink(state, cache, rows)
        if replaced is not None:
            replaced.put(take_rows_of(replaced.arriving, rows))


def _begin_texts(running: Running, drafter: Drafter, pass_tokens: int, pace: Pace) -> None:
    """Has tokens of a batch's texts be guessed."""
    arrays = arrays_of(running)
    arrays.texts = DraftedTexts(
        pass_tokens=pass_tokens,
        pace=pace,
        rows=[DraftedText(drafter.begin()) for _ in range(arrays.given.size)],
        sampling=arrays.given.sampling,
    )
    running.closing.callback(arrays.texts.close)


def _forget(running: Running) -> None:
    running.payload = None
