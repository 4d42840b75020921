"""A discrete-event simulation of a run on the links and processors of a profile.

The loop is that of a real run (`loop.py`). This backend only counts the bytes of every transfer
and the time at which each would be done. Each of four links carries one transfer after the other,
except that two lanes of reads share the disk. The device computes one program after the other; on
a unified machine the CPU's attention is one of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

from flexgen_jax.policy.backend import Handle, Inputs, Part
from flexgen_jax.policy.clock import Clock, Loading
from flexgen_jax.policy.cost_model import Costs
from flexgen_jax.policy.loop import BlockLoop
from flexgen_jax.policy.memory import planned_ledger
from flexgen_jax.policy.placement import CacheKey
from flexgen_jax.policy.plan import BlockPlan, CachedPart, HiddenPart, Layout, WeightsPart
from flexgen_jax.policy.policy import Tier
from flexgen_jax.policy.schedule import Arrivals, Step

GUESSED = 0.8
"""Share of the chosen experts that the layer before guesses (Eliseev and Mazur 2023, "Fast
Inference of Mixture-of-Experts Language Models with Offloading", section 3.2)."""


@dataclass(frozen=True)
class Prediction:
    """Predicted time and traffic of one block of batches.

    prefill_s, decode_s: seconds; busy_s: seconds by resource; bytes: bytes by transfer; peak_bytes:
    by tier, of the tokens that were simulated.
    """

    prefill_s: float
    decode_s: float
    busy_s: dict[str, float]
    bytes: dict[str, int]
    peak_bytes: dict[Tier, int]

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.decode_s

    @property
    def binding(self) -> str:
        """The resource that is busy for the longest time."""
        return max(self.busy_s, key=lambda name: self.busy_s[name])


class Attended(NamedTuple):
    """The tokens of a layer's sealed blocks on the device and on the host, and whether the open
    block is on the host."""

    here: int
    there: int
    is_open_there: bool


class Texts(Arrivals, Protocol):
    """Batches of texts of different lengths."""

    def rows_left(self, step: Step) -> int:
        """Returns how many rows of a batch are not finished after its step in the head."""

    def shrink(self, batch: int, rows: int) -> None:
        """Leaves a batch with so many rows, among them those that are not finished."""


class Simulation:
    """A backend of `BlockLoop` with a clock; handles are loads under way, or times.

    page_cached: keys of tensors on disk that the operating system keeps in RAM after the first
    read; texts: which rows are finished when, if not all have the same length.
    """

    def __init__(
        self,
        costs: Costs,
        plan: BlockPlan,
        page_cached: frozenset[str],
        texts: Texts | None = None,
    ) -> None:
        self._costs, self._plan, self._page_cached = costs, plan, page_cached
        self._texts = texts
        self._layers, self._hw = costs.spec.layers, costs.hw
        self._clock = Clock(costs.hw, costs.policy.overlap, plan.unified)
        self._read_before: set[WeightsPart] = set()
        self._moved: dict[CacheKey, float] = {}
        self._projected: dict[Step, float] = {}
        self._attended: dict[tuple[int, int, int], Attended] = {}
        self._seconds: dict[int, float] = {}
        self._unpacked_for = -1
        self._phases, self._began = [0.0, 0.0], 0.0

    def prediction(self, peak: dict[Tier, int]) -> Prediction:
        """Returns what the clock counted, after the loop has ended."""
        self._end_step()
        prefill_s, decode_s = self._phases
        return Prediction(prefill_s, decode_s, self._clock.busy, self._clock.bytes, peak)

    def begin(self, step: Step, times: int) -> None:
        self._end_step()
        self._clock.weight = times
        self._clock.is_prefill = step.token <= 0

    def _end_step(self) -> None:
        clock = self._clock
        self._phases[not clock.is_prefill] += (clock.now - self._began) * clock.weight
        self._began = clock.now

    # Moving

    def allocate(self, layout: Layout) -> Handle:
        return None

    def free(self, buffer: Handle) -> None:
        pass

    def fetch(self, part: Part, buffers: Sequence[Handle]) -> Loading:
        if isinstance(part, CachedPart):
            return self._read_cache(part)
        if isinstance(part, WeightsPart):
            return self._read_weights(part)
        load = Loading(None, part.copied, passes_by=True)
        if buffers:
            seconds = self._hw.page_cache.seconds(part.nbytes)
            load.read = self._clock.read(part.nbytes, True, "page_cache", seconds)
        return load

    def _read_weights(self, part: WeightsPart) -> Loading:
        cached = direct = 0
        largest = copied = 1
        formats, tensors = self._plan.formats, self._costs.spec.tensors
        for key in part.keys:
            nbytes = formats.weight(tensors[key]).nbytes
            if self._plan.tiers[key] != "device":
                copied = max(copied, nbytes)
            if self._plan.tiers[key] == "disk":
                largest = max(largest, nbytes)
                cached += nbytes if key in self._page_cached else 0
                direct += nbytes if key not in self._page_cached else 0
        load = Loading(None, part.copied, float(copied))
        source = "page_cache" if part in self._read_before else "disk_read"
        self._read_before.add(part)
        for nbytes, how in ((direct, "disk_read"), (cached, source)):
            if nbytes:
                seconds = getattr(self._hw, how).seconds(nbytes, largest)
                load.read = self._clock.read(nbytes, False, how, seconds)
        return load

    def _read_cache(self, part: CachedPart) -> Loading:
        load = Loading(None, part.copied)
        if part.layouts:
            nbytes = [layout.nbytes for layout in part.layouts]
            seconds = sum(map(self._read_s, nbytes))
            load.read = self._clock.read(sum(nbytes), True, "disk_read", seconds)
        return load

    def _read_s(self, nbytes: int) -> float:
        """Returns the seconds of reading one KV block; there are few different sizes."""
        if nbytes not in self._seconds:
            self._seconds[nbytes] = self._hw.disk_read.seconds(nbytes)
        return self._seconds[nbytes]

    def again(self, load: Loading) -> Loading:
        return Loading(load.read, load.copied, load.size)

    def copy(self, load: Loading) -> None:
        clock = self._clock
        clock.finish_read(load.read)
        if load.passes_by:
            load.ready = clock.pass_by("host_to_device", load.copied)
        else:
            load.ready = clock.move("host_to_device", load.copied, 0.0, load.size)

    def drop(self, load: Loading, is_used: bool) -> None:
        pass

    def shrink(self, step: Step, rows: int) -> None:
        assert self._texts is not None, "rows are finished"
        self._texts.shrink(step.batch, rows)

    def shrink_cache(self, part: CachedPart, load: Handle) -> None:
        pass

    def leave(self, batch: int) -> None:
        pass

    def keep_hidden(self, part: HiddenPart, computed: float) -> None:
        if part.home != "device":
            self._clock.move("device_to_host", part.nbytes, computed)

    def write_hidden(self, part: HiddenPart) -> float:
        return self._clock.move("disk_write", part.nbytes)

    def keep_prompt(self, keys: Sequence[CacheKey], computed: float) -> None:
        for key in keys:
            self._to_home(key)

    def _to_home(self, key: CacheKey) -> None:
        """Moves a sealed block from the device to the memory of its home."""
        if self._plan.cache.homes[key] != "device":
            self._moved[key] = self._clock.move("device_to_host", self._plan.kv_bytes(key))

    def open_block(self, key: CacheKey, buffer: Handle | None) -> None:
        pass

    def append(self, key: CacheKey, computed: float) -> None:
        if self._plan.cache.homes[key] != "device":
            tokens = self._plan.block_tokens(key)
            self._clock.move("device_to_host", self._plan.open_kv_bytes(key) // tokens)

    def quantize(self, key: CacheKey) -> None:
        # Blocks are quantized on the device; one in pinned memory is first copied there.
        clock, costs, plan = self._clock, self._costs, self._plan
        is_away = plan.cache.homes[key] != "device"
        ready = clock.move("host_to_device", plan.open_kv_bytes(key) if is_away else 0)
        layer, rows = costs.spec.decoders[key.layer], plan.batches[key.batch].rows
        elements = costs.kv_elements(layer, rows, plan.block_tokens(key))
        clock.wait(clock.compute(costs.quantize_s(elements), ready))
        self._to_home(key)

    def write_blocks(self, keys: Sequence[CacheKey]) -> float:
        written = 0.0
        for key in keys:
            moved = self._moved.pop(key, 0.0)
            written = self._clock.move("disk_write", self._plan.kv_bytes(key), moved)
        return written

    def is_done(self, handle: Loading | float) -> bool:
        if isinstance(handle, Loading):
            return self._clock.read_done(handle.read)
        return handle <= self._clock.now

    def wait(self, write: float) -> None:
        self._clock.wait(write)

    # Computing

    def compute(self, step: Step, inputs: Inputs) -> float:
        clock, costs = self._clock, self._costs
        layer, rows = self._layers[step.layer], self._plan.batches[step.batch].rows
        ready = max((load.ready for load in inputs.weights), default=0.0)
        if costs.unpacks and layer.kind == "decoder" and step.visit != self._unpacked_for:
            self._unpacked_for = step.visit
            clock.compute(costs.unpack_s(layer), ready)
        if inputs.hidden is not None:
            ready = max(ready, inputs.hidden.ready)
        fixed = self._hw.step_s
        if not self._plan.unified:
            clock.now, fixed = clock.now + fixed, 0.0
        if layer.kind == "embedding":
            return clock.compute(fixed, ready)
        if layer.kind == "head":
            batch = self._plan.batches[step.batch]
            formed = rows * (batch.prompt_len if batch.scores_prompt else 1)
            return clock.compute(fixed + costs.head_s(formed), ready)
        if inputs.cache is not None:
            ready = max(ready, inputs.cache.ready)
        if step.token > 0:
            return self._decode(step, inputs, ready, fixed)
        span = self._plan.span(step.token, step.batch)
        only_last = self._plan.only_last(step.layer, step.batch)
        before = span.start if inputs.cache is not None else 0
        prefill = costs.prefill_s(layer, rows, span.tokens, only_last, before)
        asked = rows * (1 if only_last else span.tokens)
        return clock.compute(fixed + prefill + self._prefix_s(step, asked), ready)

    def _prefix_s(self, step: Step, tokens: int) -> float:
        """Returns the seconds of a step's attention to the prefix."""
        if self._plan.prefix_part(step) is None:
            return 0.0
        layer = self._layers[step.layer]
        return self._costs.prefix_s(layer, tokens, self._plan.shape.prefix)

    def _decode(self, step: Step, inputs: Inputs, ready: float, fixed: float) -> float:
        """Decodes; where blocks stay on the host, the query goes there and a result comes back."""
        clock, costs, layer = self._clock, self._costs, self._layers[step.layer]
        rows = self._plan.batches[step.batch].rows
        here, there, asks_host = self._tokens(step)
        routed_s = costs.experts_s(layer, rows) if inputs.experts is not None else 0.0
        linear = costs.linear_s(layer, rows) + self._prefix_s(step, rows) - routed_s
        if not asks_host:
            attention = costs.device_attention_s(layer, rows, here)
            routed = clock.compute(fixed + linear + attention, ready)
            return self._through_experts(inputs, routed, routed_s)
        project = costs.project_s(layer, rows)
        projected = self._projected.pop(step, None)
        if projected is None:
            projected = clock.compute(project, ready)
        on_device, on_host = costs.split_attention_s(layer, rows, here, there)
        if on_device:
            clock.compute(on_device, ready)
        if inputs.early is not None:
            later, hidden = inputs.early
            others = self._plan.batches[later.batch].rows
            self._projected[later] = clock.compute(costs.project_s(layer, others), hidden.ready)
        asked = costs.query_bytes(layer, rows)
        clock.host_compute(on_host, clock.pass_by("device_to_host", asked, projected))
        partial = rows * (layer.attention.query_size + layer.attention.num_heads) * 4
        back = clock.pass_by("host_to_device", partial)
        routed = clock.compute(fixed + linear - project + self._hw.split_s, back)
        return self._through_experts(inputs, routed, routed_s)

    def _through_experts(self, inputs: Inputs, routed: float, seconds: float) -> float:
        """Loads the experts that are chosen, once it is known which, and computes them."""
        if inputs.experts is None:
            return routed
        clock = self._clock
        clock.wait(routed)
        experts = inputs.experts
        right = round(GUESSED * experts.expected)
        wrong = range(experts.total - experts.expected + right, experts.total)
        loads = experts.load(range(experts.expected), [*range(right), *wrong])
        return clock.compute(seconds, max((load.ready for load in loads), default=routed))

    def _tokens(self, step: Step) -> tuple[int, int, bool]:
        """Returns the cached tokens on the device and on the host, and whether the host has
        blocks."""
        position = self._plan.span(step.token, step.batch).start
        sealed = self._plan.sealed(step.batch, position)
        where = (step.layer - 1, step.batch, sealed)
        if where not in self._attended:
            self._attended[where] = self._count(*where)
        here, there, is_open_there = self._attended[where]
        opened = position - here - there
        if is_open_there:
            return here, there + opened, True
        return here + opened, there, there > 0

    def _count(self, layer: int, batch: int, sealed: int) -> Attended:
        cache = self._plan.cache
        lengths, tokens = cache.lengths(batch), [0, 0]
        for block in range(sealed):
            tokens[cache.stays_on_host(CacheKey(layer, batch, block))] += lengths[block]
        opened = CacheKey(layer, batch, sealed)
        here, there = tokens
        return Attended(here, there, sealed < len(lengths) and cache.stays_on_host(opened))

    def finish(self, step: Step, computed: float) -> int | None:
        self._clock.wait(computed)
        if self._texts is None or self._layers[step.layer].kind != "head":
            return None
        return self._texts.rows_left(step)


def _sampled(count: int, sample: int | None) -> dict[int, int]:
    """Returns the tokens to simulate, and how many tokens each stands for; the prompt's is one."""
    rest = count - 1
    if sample is None or rest <= sample:
        return dict.fromkeys(range(count), 1)
    cuts = [1 + rest * i // sample for i in range(sample + 1)]
    return {0: 1} | {(low + high) // 2: high - low for low, high in pairwise(cuts)}


def simulate(
    costs: Costs,
    plan: BlockPlan,
    page_cached: frozenset[str] = frozenset(),
    sample: int | None = None,
) -> Prediction:
    """Predicts the time and traffic of a block of batches.

    page_cached: keys of tensors on disk that the operating system keeps in RAM after the first
        read.
    sample: number of decoding tokens to simulate, at even distances, or None for all. The others
        count like these, but KV blocks that fill up between them are not written.
    """
    simulation, ledger = Simulation(costs, plan, page_cached), planned_ledger(plan)
    BlockLoop(plan, simulation, ledger, _sampled(plan.shape.gen_len, sample)).run()
    return simulation.prediction(ledger.peak)


def simulate_texts(
    costs: Costs, plan: BlockPlan, texts: Texts, page_cached: frozenset[str]
) -> Prediction:
    """Predicts the time and traffic of a run of texts of different lengths.

    plan: without any batch; texts let theirs enter it.
    """
    simulation, ledger = Simulation(costs, plan, page_cached, texts), planned_ledger(plan)
    BlockLoop(plan, simulation, ledger, arrivals=texts).run()
    return simulation.prediction(ledger.peak)
