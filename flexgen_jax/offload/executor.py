"""Runs the model: the backend that carries out the loop over batches with arrays."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import jax
import numpy as np

from flexgen_jax.errors import UserError
from flexgen_jax.layers.decoder import KVBlock
from flexgen_jax.layers.rotary import Branches, Rows
from flexgen_jax.layers.sampling import Choice
from flexgen_jax.models.parts import AttentionSpec
from flexgen_jax.offload.activations import Activations
from flexgen_jax.offload.allocator import trim_heap
from flexgen_jax.offload.device import Device
from flexgen_jax.offload.disk.folder import OffloadFolder
from flexgen_jax.offload.kv_cache import KVCache, LayerCache, take_rows_of
from flexgen_jax.offload.prefetch import Load, Write
from flexgen_jax.offload.split_attention import Moment, Question, attend_split
from flexgen_jax.offload.tiers import HostBuffer
from flexgen_jax.offload.weights import WeightStore
from flexgen_jax.policy.arrivals import Planned
from flexgen_jax.policy.backend import ChosenExperts, Inputs, Part
from flexgen_jax.policy.ledger import Ledger
from flexgen_jax.policy.loop import BlockLoop
from flexgen_jax.policy.placement import CacheKey
from flexgen_jax.policy.plan import BlockPlan, CachedPart, HiddenPart, Layout, WeightsPart
from flexgen_jax.policy.policy import GREEDY, SAMPLE, SCORE, Head, Tier
from flexgen_jax.policy.schedule import PREFIX, Arrivals, Step
from flexgen_jax.policy.segments import Segment
from flexgen_jax.policy.stages import Slots, StageLoop

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
    instead of generating; forced: int32 [batch, generated token] to score and to continue with;
    most: int32 [batch], the tokens of each prompt and the most that follow; logprobs: how many
    tokens are returned with log-probabilities beside the chosen one, None without any; branches:
    what each row ends with, whose tokens alone are scored then.
    """

    ids: np.ndarray
    first_valid: np.ndarray
    sampling: tuple[np.ndarray, ...] = ()
    targets: np.ndarray | None = None
    forced: np.ndarray | None = None
    most: np.ndarray | None = None
    logprobs: int | None = None
    branches: Branches | None = None

    @property
    def size(self) -> int:
        return int(self.ids.shape[0])

    def taken(self, rows: Sequence[int]) -> Batch:
        """Returns the batch with these rows of it."""
        index = np.array(rows)
        return Batch(
            self.ids[index],
            self.first_valid[index],
            tuple(x[index] for x in self.sampling),
            None if self.targets is None else self.targets[index],
            None if self.forced is None else self.forced[index],
            None if self.most is None else self.most[index],
            self.logprobs,
            self.branches,
        )

    @property
    def head(self) -> Head:
        if self.targets is not None or self.forced is not None:
            return SCORE
        return SAMPLE if self.sampling else GREEDY

    @property
    def prompt_len(self) -> int:
        return int(self.ids.shape[1])

    @property
    def padding(self) -> list[int]:
        """How many tokens before each row's prompt need not be computed. A row that is padding, of
        one token, counts as the one before it."""
        found: list[int] = []
        most = np.full(self.size, 2) if self.most is None else self.most
        ends = 1 + (0 if self.branches is None else self.branches.total)
        for first, tokens in zip(self.first_valid.tolist(), most.tolist(), strict=True):
            is_padding = tokens == 1 and found
            found.append(found[-1] if is_padding else min(first, self.prompt_len - ends))
        return found


@dataclass
class Computed:
    """What a dispatched step will have computed.

    checks: see `Programs`; hidden: the layer's output; result: KV blocks, ids or log-probabilities;
    appended: whether the result is an open block that has the new token already.
    """

    checks: jax.Array
    hidden: jax.Array | None = None
    result: Any = None
    appended: bool = False


OnResult = Callable[[Step, Any], Sequence[int] | None]
"""Receives a step and the head's result for it: ids [batch, 1], these with `log_probabilities`, or
of what is scored the log-probabilities and whether they are greedy choices, both [batch, token].
Returns the rows that need more tokens, None for all."""


class Source(Arrivals, Protocol):
    """The batches of a run."""

    @property
    def batches(self) -> Mapping[int, Batch]:
        """Those that are there, by number."""

    def keep(self, batch: int, rows: Sequence[int]) -> None:
        """Leaves a batch with these rows, in this order."""

    def adjusted(self, batch: int) -> tuple[np.ndarray, ...]:
        """Returns what a batch's next tokens are chosen by: arguments of `layers.sampling.adjust`,
        or ()."""

    def allowed(self, batch: int) -> np.ndarray | None:
        """Returns which tokens may come next in a batch, see `layers.sampling.only_allowed`; None
        if all may."""


class AllThere(Planned):
    """The batches of a plan, as a source; see `Source`."""

    def __init__(self, plan: BlockPlan, batches: Mapping[int, Batch]) -> None:
        super().__init__(plan)
        self._batches = dict(batches)

    @property
    def batches(self) -> Mapping[int, Batch]:
        return self._batches

    def adjusted(self, batch: int) -> tuple[np.ndarray, ...]:
        return ()

    def allowed(self, batch: int) -> np.ndarray | None:
        return None

    def keep(self, batch: int, rows: Sequence[int]) -> None:
        self._batches[batch] = self._batches[batch].taken(rows)


class Neighbours(Protocol):
    """The other stages of a model, seen from one of them; see `policy.stages`."""

    @property
    def slots(self) -> Slots:
        """What this stage is told to compute."""

    def ids(self, step: Step) -> np.ndarray:
        """Returns the tokens that the last stage chose before a step, int32 [batch, 1]."""

    def receive(self, step: Step, rows: int, tokens: int) -> jax.Array:
        """Returns the hidden states of a step from the stage before, [batch, token, hidden]; waits
        for them."""

    def send(self, step: Step, hidden: jax.Array) -> None:
        """Hands a step's hidden states to the stage after this one."""


class BlockRun:
    """Batches passing through the model: a backend of `BlockLoop`.

    peaks: those that the batches stay within, None for no limit; neighbours: None unless this run
    is a stage. guessed: how many experts were loaded by a guess, and then chosen or not.
    """

    def __init__(
        self,
        device: Device,
        weights: WeightStore,
        plan: BlockPlan,
        source: Source,
        ledger: Ledger,
        folder: OffloadFolder | None,
        on_result: OnResult,
        on_step: Callable[[Step], object] = lambda step: None,
        peaks: Mapping[Tier, int] | None = None,
        neighbours: Neighbours | None = None,
    ) -> None:
        self._device, self._weights, self._plan = device, weights, plan
        self._neighbours = neighbours
        self._layers = device.spec.layers
        self._source, self._batches = source, source.batches
        self._left: dict[int, Sequence[int]] = {}
        self._rows: dict[int, np.ndarray] = {}
        self._ledger, self._peaks = ledger, peaks
        self._layer_programs = device.layer_programs(plan)
        self._unpacked: tuple[int, Any] = (-1, None)
        self._folder = folder
        self._on_result = on_result
        self._on_step = on_step
        self._cache = KVCache(plan, device, folder)
        self._activations = Activations(device.memories, folder)
        self._placed: dict[int, Rows] = {}
        self._segments: dict[int, tuple[Segment, ...]] = {}
        self._sampling: dict[int, tuple[jax.Array, ...]] = {}
        self._ids: dict[int, Any] = {}
        self._checks: dict[int, jax.Array] = {}
        self._moments: dict[tuple[int, int], Moment] = {}
        self._projected: tuple[Step, tuple[jax.Array, KVBlock]] | None = None
        self._trimmed_at = time.monotonic()
        self.guessed: dict[str, int] = {}

    def run(self) -> Iterator[None]:
        """Computes the steps of all batches, one at a time."""
        try:
            how = (self._plan, self, self._ledger)
            if self._neighbours is None:
                loop = BlockLoop(*how, arrivals=self._source, peaks=self._peaks)
            else:
                loop = StageLoop(*how, self._neighbours.slots)
            yield from loop.steps()
            self.guessed = {"right": loop.guessed_right, "wrong": loop.guessed_wrong}
        finally:
            with ExitStack() as parts:
                if self._folder is not None:
                    parts.callback(self._folder.clear_scratch)
                parts.callback(self._cache.close)
                parts.callback(self._activations.close)
                self._unpacked = (-1, None)

    def begin(self, step: Step, times: int) -> None:
        self._device.metrics.enter("decode" if step.token > 0 else "prefill")
        # The heap does not shrink by itself, because the cache's open blocks lie between
        # temporaries.
        if time.monotonic() - self._trimmed_at > TRIM_S:
            trim_heap()
            self._trimmed_at = time.monotonic()

    # Moving

    def allocate(self, layout: Layout) -> HostBuffer:
        return self._device.memories.buffer(layout)

    def free(self, buffer: HostBuffer) -> None:
        """Whoever has the buffer lets it go."""

    def leave(self, batch: int) -> None:
        self._cache.leave(batch)
        self._activations.leave(batch)
        by_batch: tuple[dict[int, Any], ...]
        by_batch = (self._placed, self._sampling, self._ids, self._checks, self._left)
        for known in (*by_batch, self._rows, self._segments):
            known.pop(batch, None)
        for moment in [moment for moment in self._moments if moment[0] == batch]:
            del self._moments[moment]
        if self._projected is not None and self._projected[0].batch == batch:
            self._projected = None

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

    def keep_prompt(self, keys: Sequence[CacheKey], computed: Computed) -> None:
        for key, arrays in zip(keys, computed.result, strict=True):
            self._cache.keep(key, arrays)

    def open_block(self, key: CacheKey, buffer: HostBuffer | None) -> None:
        self._cache.open(key, buffer)

    def append(self, key: CacheKey, computed: Computed) -> None:
        store = self._cache.replace if computed.appended else self._cache.append
        store(key, computed.result)

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
        prefix = self._plan.prefix_part(step)
        for load in inputs.weights[: -1 if prefix else None]:
            weights.update(load.arriving)
        shared: LayerCache | None = inputs.weights[-1].arriving if prefix else None
        kind = self._layers[step.layer].kind
        if kind == "embedding":
            computed = self._embed(step, weights)
        elif kind == "head" and not self._plan.config.has_head:
            assert self._neighbours is not None, "another stage has the head"
            self._neighbours.send(step, inputs.hidden.arriving)
            computed = Computed(self._checks[step.batch])
        elif kind == "head":
            computed = self._head(step, weights, inputs.hidden.arriving)
        else:
            weights = self._plain(step, weights) if self._plan.unpacks else weights
            weights, experts = split_experts(weights)
            if step.token > 0:
                computed = self._decode(step, weights, inputs, shared)
            elif prefix or self._plan.span(step.token, step.batch).start:
                computed = self._prefill_chunk(step, weights, inputs, shared)
            else:
                computed = self._prefill(step, weights, inputs.hidden.arriving)
            if self._layers[step.layer].experts is not None:
                self._through_experts(step, weights, experts, computed, inputs.experts)
        self._watch(step, inputs.weights, computed.checks)
        self._checks[step.batch] = computed.checks
        return computed

    def _through_experts(
        self,
        step: Step,
        weights: Any,
        experts: dict[int, dict[str, Any]],
        computed: Computed,
        chosen: ChosenExperts | None,
    ) -> None:
        """Computes a layer's experts one after the other, each for the tokens that chose it.

        experts: those that are there; the chosen ones of the others are loaded, if `chosen` says
        how.
        """
        if self._plan.only_caches(step.token, step.layer):
            return
        programs, layer, hidden = self._layer_programs, self._layers[step.layer], computed.hidden
        assert hidden is not None, "attention gives hidden states"
        rows, tokens, _ = hidden.shape
        *routed, out = programs.route(layer, rows, tokens)(weights, hidden)
        asked = set(experts)
        if chosen is not None:
            guessed = self._guess(step, hidden) if chosen.guesses else set()
            asked = set(np.unique(np.asarray(routed[1])).tolist())
            for load in chosen.load(asked, guessed):
                for number, mine in split_experts(load.arriving)[1].items():
                    experts.setdefault(number, {}).update(mine)
        expert, numbers = programs.expert(layer, rows * tokens), self._device.memories.numbers
        for number in sorted(asked):
            out = expert(experts[number], *routed, numbers(number), out)
        combine = programs.combine(rows, tokens)
        computed.hidden, computed.checks = combine(hidden, computed.checks, out)

    def _guess(self, step: Step, hidden: jax.Array) -> set[int]:
        """Returns the experts that the next layer would choose for a step's hidden states: most of
        those that it will."""
        layer = self._layers[step.layer + 1]
        program = self._layer_programs.guess(layer, hidden.shape[0])
        found = program(self._weights.routing(layer), hidden)
        return set(np.unique(np.asarray(found)).tolist())

    def _watch(self, step: Step, loads: Sequence[Load[Any]], result: Any, part: str = "") -> None:
        """Counts the device as busy from when what it waits for has arrived until the result."""
        if self._device.metrics.is_timed:
            what = f"{self._layers[step.layer].name}{part}"
            what += f", token {step.token}, batch {step.batch}"
            arrivals = [load.arrival for load in loads if load.arrival is not None]
            self._device.watch("layers", what, arrivals, result)

    def _embed(self, step: Step, weights: Any) -> Computed:
        batch, span = self._batches[step.batch], self._plan.span(step.token, step.batch)
        if not span.start:
            self._put_constants(step.batch)
            self._segments[step.batch] = self._plan.segments(step.batch, batch.padding)
        if self._plan.config.has_embedding:
            program = self._device.programs.embed(batch.size, span.tokens, batch.branches)
            start, ids = self._device.memories.numbers(span.start), self._ids_of(step)
            hidden, checks = program(weights, ids, start, self._placed[step.batch])
        else:
            assert self._neighbours is not None, "another stage has the embedding"
            hidden = self._neighbours.receive(step, batch.size, span.tokens)
            checks = self._device.memories.numbers((1, 0))
        if 0 < step.token + 1 < self._plan.batches[step.batch].gen_len:
            # Uploaded a token ahead, because it would have to wait behind weights.
            self._moments[step.batch, step.token + 1] = self._next(step)
            self._moments.pop((step.batch, step.token - 1), None)
        return Computed(checks, hidden)

    def _ids_of(self, step: Step) -> np.ndarray | jax.Array:
        """Returns the tokens that a step embeds, int32 [batch, token]."""
        if step.token > 0:
            if self._neighbours is not None:
                return self._neighbours.ids(step)
            chosen: jax.Array = self._ids[step.batch]
            return chosen
        span = self._plan.span(step.token, step.batch)
        return self._batches[step.batch].ids[:, span.start : span.start + span.tokens]

    def _put_constants(self, batch: int) -> None:
        constant, given = self._device.memories.constant, self._batches[batch]
        before = 0 if batch == PREFIX else self._plan.shape.prefix
        rows = Rows.of(given.first_valid, given.prompt_len, before, given.most)
        self._placed[batch] = jax.tree.map(constant, rows)
        self._sampling[batch] = tuple(map(constant, given.sampling))

    def shrink(self, step: Step, rows: int) -> None:
        number, left = step.batch, self._left[step.batch]
        others = (row for row in range(self._batches[number].size) if row not in left)
        chosen = [*left, *islice(others, rows - len(left))]
        self._source.keep(number, chosen)
        self._rows[number] = np.array(chosen, np.int32)
        self._left[number] = range(len(left))
        self._put_constants(number)
        self._ids[number] = take_rows_of(self._ids[number], self._rows[number])
        self._moments[number, step.token] = self._next(step._replace(token=step.token - 1))

    def shrink_cache(self, part: CachedPart, load: Load[LayerCache]) -> None:
        self._cache.shrink(part, load, self._rows[part.batch])

    def _plain(self, step: Step, weights: Any) -> Any:
        """Returns a layer's weights unpacked, which the first step of a visit does for the
        others."""
        if self._unpacked[0] != step.visit:
            self._unpacked = (-1, None)  # the memory of the layer before is free for this one
            unpack = self._device.programs.unpack(self._layers[step.layer])
            self._unpacked = (step.visit, unpack(weights))
        return self._unpacked[1]

    def _prefill(self, step: Step, weights: Any, hidden: jax.Array) -> Computed:
        """Prefills prompts, or their first chunk."""
        batch, made = self._batches[step.batch], self._plan.prompt_blocks(step.token, step.batch)
        cuts = self._plan.cache.prompt[step.batch][made.start : made.stop]
        only_last = self._plan.only_last(step.layer, step.batch)
        layer = self._layers[step.layer]
        segments = self._segments[step.batch]
        how = (cuts, only_last, segments, batch.branches)
        program = self._layer_programs.prefill(layer, batch.size, *how)
        before, placed = self._checks[step.batch], self._placed[step.batch]
        hidden, blocks, checks = program(weights, hidden, before, placed)
        return Computed(checks, hidden, blocks)

    def _prefill_chunk(
        self, step: Step, weights: Any, inputs: Inputs, shared: LayerCache | None
    ) -> Computed:
        """Prefills a chunk of prompts that attends to the blocks of those before it, one after the
        other, so that the programs are the same for every chunk."""
        programs, layer = self._layer_programs, self._layers[step.layer]
        rows, span = self._batches[step.batch].size, self._plan.span(step.token, step.batch)
        hidden, placed = inputs.hidden.arriving, self._placed[step.batch]
        asked = 1 if self._plan.only_last(step.layer, step.batch) else span.tokens
        numbers, shape = self._device.memories.numbers, (rows, span.tokens, asked)
        project = programs.project_chunk(layer, *shape)
        query, partial, block = project(weights, hidden, numbers(span.start), placed)
        if inputs.cache is not None:
            cache: LayerCache = inputs.cache.arriving
            first = numbers(span.start + span.tokens - asked)
            for start, length, earlier in zip(
                cache.here.starts, cache.here.lengths, cache.blocks, strict=True
            ):
                attend = programs.attend_chunk(layer, rows, asked, length)
                partial = attend(partial, query, earlier, numbers(start), first, placed)
        partials = [partial, *self._to_prefix(step, query, shared)]
        finish = programs.finish_chunk(layer, *shape, len(partials))
        hidden, checks = finish(weights, hidden, self._checks[step.batch], partials)
        return Computed(checks, hidden, (block,))

    def _to_prefix(self, step: Step, query: jax.Array, shared: LayerCache | None) -> list[Any]:
        """Returns the partial result of attention to the prefix, if there is one."""
        if shared is None:
            return []
        rows, _, asked, _ = query.shape
        blocks = shared.here.lengths
        attend = self._device.programs.attend_prefix(self._layers[step.layer], rows, asked, blocks)
        return [attend(query, shared.blocks)]

    def _next(self, step: Step) -> Moment:
        """Returns the place of the token after a step's, which all layers share."""
        batch, memories = self._batches[step.batch], self._device.memories
        if batch.sampling:
            memories.numbers(step.token + 1)  # for `_head`
        position = batch.prompt_len + step.token
        where = (memories.numbers(position), self._placed[step.batch])
        if not self._plan.policy.is_sparse:
            return Moment(position, batch.first_valid, where)
        windows = {layer.attention.window: layer.attention for layer in self._plan.spec.decoders}
        counts = {window: self._counts(batch, position, a) for window, a in windows.items()}
        there = {window: memories.constant(found) for window, found in counts.items()}
        return Moment(position, batch.first_valid, where, counts, there)

    def _counts(self, batch: Batch, position: int, attention: AttentionSpec) -> np.ndarray:
        """Returns how many earlier tokens each sequence attends to, int32 [batch]."""
        seen = (attention.seen(position - int(first)) for first in batch.first_valid)
        return np.array([self._plan.policy.attended(count) for count in seen], np.int32)

    def _decode(
        self, step: Step, weights: Any, inputs: Inputs, shared: LayerCache | None
    ) -> Computed:
        cache: LayerCache = inputs.cache.arriving
        policy, most = self._plan.policy, 0
        if policy.is_sparse:
            most = policy.attended(sum(self._plan.cache.lengths(step.batch)[: cache.sealed + 1]))
        if cache.on_host or shared is not None:
            return self._decode_split(step, weights, inputs, most, shared)
        key = CacheKey(step.layer - 1, step.batch, cache.sealed)
        appends, here, (*sealed, opened) = self._plan.appends(key), cache.here, cache.blocks
        shape = (self._batches[step.batch].size, here.lengths, here.tail, most, appends)
        program = self._layer_programs.decode(self._layers[step.layer], *shape)
        args = (inputs.hidden.arriving, tuple(sealed), opened, self._checks[step.batch])
        moment = self._moments[step.batch, step.token]
        where = moment.arguments(self._layers[step.layer].attention.window)
        hidden, new, checks = program(weights, *args, *where)
        if not appends:
            self._ask_for(step, cache, new)
        return Computed(checks, hidden, new, appends)

    def _decode_split(
        self, step: Step, weights: Any, inputs: Inputs, most: int, shared: LayerCache | None
    ) -> Computed:
        """Decodes with a cache that is partly on the host, where the CPU attends to it, or with a
        prefix."""
        layer, hidden, early = self._layers[step.layer], inputs.hidden.arriving, inputs.early
        cache: LayerCache = inputs.cache.arriving
        query, new = self._project(step, weights, inputs.weights, hidden)
        self._ask_for(step, cache, new)
        question = Question(self._device, layer, query, self._moments[step.batch, step.token], most)
        to_prefix = self._to_prefix(step, query, shared)
        partials = to_prefix + attend_split(
            question, cache, lambda: self._project_early(early, weights, inputs.weights)
        )
        size = self._batches[step.batch].size
        program = self._layer_programs.finish(layer, size, len(partials))
        args = (hidden, self._checks[step.batch], query, new, partials)
        hidden, checks = program(weights, *args)
        return Computed(checks, hidden, new)

    def _ask_for(self, step: Step, cache: LayerCache, new: KVBlock) -> None:
        """Starts moving a token's keys and values to the open block, unless it is the last token,
        to which nothing will attend."""
        if step.token + 1 < self._plan.batches[step.batch].gen_len:
            self._cache.ask(CacheKey(step.layer - 1, step.batch, cache.sealed), new)

    def _project(
        self, step: Step, weights: Any, loads: Sequence[Load[Any]], hidden: jax.Array
    ) -> tuple[jax.Array, KVBlock]:
        """Returns the step's query and new KV, which may have been computed already while the CPU
        attended for the step before."""
        known, self._projected = self._projected, None
        if known is not None and known[0] == step:
            return known[1]
        size = self._batches[step.batch].size
        program = self._layer_programs.project(self._layers[step.layer], size)
        where = self._moments[step.batch, step.token].where
        found: tuple[jax.Array, KVBlock] = program(weights, hidden, *where)
        self._device.memories.ask(found[0], "attention", "queries")
        self._watch(step, loads, found[0], " (projection)")
        return found

    def _project_early(
        self,
        early: tuple[Step, Load[jax.Array]] | None,
        weights: Any,
        loads: Sequence[Load[Any]],
    ) -> None:
        """Dispatches the next batch's projection to the device, while the CPU attends for this
        batch."""
        if early is not None:
            step, hidden = early
            self._projected = (step, self._project(step, weights, loads, hidden.arriving))

    def _head(self, step: Step, weights: Any, hidden: jax.Array) -> Computed:
        batch, programs = self._batches[step.batch], self._device.programs
        args = (weights, hidden, self._checks[step.batch])
        if batch.targets is not None or batch.forced is not None:
            if batch.targets is not None:
                target = batch.targets
            else:
                assert batch.forced is not None
                target = batch.forced[:, step.token : step.token + 1]
            shape = (batch.size, hidden.shape[1], target.shape[1])
            result, checks = programs.score(*shape)(*args, target)
            self._ids[step.batch] = target[:, -1:]  # for a step that may still be dispatched
        else:
            sampling = self._sampling[step.batch]
            if sampling:
                sampling = (*sampling, self._device.memories.numbers(step.token))
            # By now all of the batch's tokens before this one are known here.
            adjusted = self._source.adjusted(step.batch)
            most = adjusted[0].shape[1] if adjusted else 0
            allowed = self._source.allowed(step.batch)
            choice = Choice(not sampling, most, batch.logprobs, allowed is not None)
            masks = () if allowed is None else (allowed,)
            result, checks = programs.head(batch.size, choice)(*args, *sampling, *adjusted, *masks)
            self._ids[step.batch] = result if batch.logprobs is None else result[0]
        for found in jax.tree.leaves((result, checks)):
            found.copy_to_host_async()
        return Computed(checks, result=result)

    def finish(self, step: Step, computed: Computed) -> int | None:
        computed.checks.block_until_ready()
        self._on_step(step)
        is_head = self._layers[step.layer].kind == "head"
        if not is_head and not self._plan.only_caches(step.token, step.layer):
            return None
        _, first = np.asarray(computed.checks)
        if first:
            token = max(step.token, 0)
            raise NonFiniteError(
                f"{self._layers[first - 1].name} produced NaN or infinity at token {token} of "
                f"batch {step.batch}; try --dtype float32, and check the checkpoint"
            )
        if not is_head or not self._plan.config.has_head:
            return None
        left = self._on_result(step, jax.tree.map(np.asarray, computed.result))
        if left is None:
            return None
        self._left[step.batch] = left
        return len(left)


def split_experts(weights: Mapping[str, Any]) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """Divides a layer's tensors, by path, into those of the layer and those of each expert, by path
    within it."""
    others: dict[str, Any] = {}
    experts: dict[int, dict[str, Any]] = {}
    for path, kept in weights.items():
        if path.startswith("experts."):
            _, number, own = path.split(".", 2)
            experts.setdefault(int(number), {})[own] = kept
        else:
            others[path] = kept
    return others, experts
