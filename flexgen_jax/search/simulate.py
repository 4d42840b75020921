"""A discrete-event simulation of a run on the links and processors of a profile.

The loop is that of a real run (`loop.py`). This backend only counts the bytes of every transfer and
the time at which each would be done. Each of four links carries one transfer at a time, except that
two lanes of reads share the disk. The device computes one program at a time; on a unified machine,
CPU attention is such a program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Protocol

from flexgen_jax.policy.parts import Layout, WeightsPart
from flexgen_jax.policy.plan import BlockPlan
from flexgen_jax.policy.policy import Tier
from flexgen_jax.schedule.backend import Inputs, Part
from flexgen_jax.schedule.loop import BlockLoop
from flexgen_jax.schedule.passes import Begun, Handle
from flexgen_jax.schedule.running import (
    CachedPart,
    LayerState,
    PromptPart,
    ReplacedPart,
    Running,
    SealedPart,
)
from flexgen_jax.schedule.waves import Arrivals, Step
from flexgen_jax.search.clock import Clock, Loading
from flexgen_jax.search.costs import Costs
from flexgen_jax.search.memory import planned_ledger
from flexgen_jax.search.simulated_steps import SimulatedSteps


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


class SimulatedTexts(Arrivals, Protocol):
    """Batches of texts of different lengths."""

    def rows_left(self, step: Step) -> int:
        """Returns how many rows of a batch are not finished after its step in the head."""

    def shrink(self, batch: Running, rows: int) -> None:
        """Shrinks a batch to `rows` rows, including the unfinished ones."""


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
        texts: SimulatedTexts | None = None,
    ) -> None:
        self._costs, self._plan, self._page_cached = costs, plan, page_cached
        self._texts = texts
        self._layers, self._hw = costs.spec.layers, costs.hw
        self._clock = Clock(costs.hw, costs.policy.overlap, plan.unified)
        self._read_before: set[WeightsPart] = set()
        self._moved: dict[tuple[LayerState, int], float] = {}
        # Seconds of reading a KV block, by its size in bytes (few sizes occur).
        self._read_s = cache(self._hw.disk_read.seconds)
        self._phases, self._began = [0.0, 0.0], 0.0
        self._steps = SimulatedSteps(costs, plan, self._clock)

    def prediction(self, peak: dict[Tier, int]) -> Prediction:
        """Returns the clock's counts after the end of the loop."""
        self._end_step()
        prefill_s, decode_s = self._phases
        moved = {link: round(nbytes) for link, nbytes in self._clock.bytes.items()}
        return Prediction(prefill_s, decode_s, self._clock.busy, moved, peak)

    def begin(self, step: Step, times: int) -> Begun:
        self._end_step()
        clock = self._clock
        clock.is_prefill = step.token <= 0
        # A pass finds several tokens: one that is walked for each stands for a part of one.
        clock.weight = times if clock.is_prefill else times / self._costs.tokens_a_pass
        if not clock.is_prefill and not step.layer:
            clock.guess(self._costs.draft_s)
        return Begun(computed=self._plan.policy.pass_tokens)

    def _end_step(self) -> None:
        clock = self._clock
        self._phases[not clock.is_prefill] += (clock.now - self._began) * clock.weight
        self._began = clock.now

    # Moving

    def allocate(self, layout: Layout) -> Handle:
        return None

    def fetch(self, part: Part, buffers: Sequence[Handle], like: Loading | None = None) -> Loading:
        if like is not None:
            return Loading(like.read, like.copied, like.size)
        if isinstance(part, CachedPart):
            load = Loading(None, part.copied)
            if part.layouts:
                nbytes = [layout.nbytes for layout in part.layouts]
                seconds = sum(map(self._read_s, nbytes))
                load.read = self._clock.read(sum(nbytes), True, "disk_read", seconds)
            return load
        if isinstance(part, WeightsPart):
            return self._read_weights(part)
        is_state = isinstance(part, ReplacedPart) and part.slot.content == "cache"
        load = Loading(None, part.copied, passes_by=not is_state)
        if is_state:
            load.ready = part.slot.payload or 0.0
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
        for nbytes, link in ((direct, "disk_read"), (cached, source)):
            if nbytes:
                seconds = getattr(self._hw, link).seconds(nbytes, largest)
                load.read = self._clock.read(nbytes, False, link, seconds)
        return load

    def copy(self, load: Loading) -> None:
        clock = self._clock
        clock.finish_read(load.read)
        if load.passes_by:
            load.ready = clock.pass_by("host_to_device", load.copied)
        else:
            load.ready = clock.move("host_to_device", load.copied, load.ready, load.size)

    def wait_read(self, load: Loading) -> None:
        self._clock.finish_read(load.read)

    def detach(self, load: Loading) -> None:
        pass

    def drop(self, load: Loading, is_used: bool) -> None:
        pass

    def shrink(self, step: Step, rows: int) -> None:
        assert self._texts is not None, "rows are finished"
        self._texts.shrink(step.batch, rows)

    def shrink_state(self, state: LayerState, cache: Handle, replaced: Handle) -> None:
        pass

    def keep(self, made: ReplacedPart | PromptPart | LayerState, computed: float) -> None:
        match made:
            case ReplacedPart():
                if made.home != "device":
                    # A recurrent state has the size of many tokens' keys, so its load waits for it.
                    made.slot.payload = self._clock.move("device_to_host", made.nbytes, computed)
            case PromptPart():
                for block in made.blocks:
                    self._to_home(made.state, block)
            case LayerState(sealed=block):
                if made.homes[block] != "device":
                    nbytes = made.sizes[block].open // made.running.lengths[block]
                    self._clock.move("device_to_host", nbytes)

    def _to_home(self, state: LayerState, block: int) -> None:
        """Moves a sealed block from the device to the memory of its home."""
        if state.homes[block] != "device":
            nbytes = state.sizes[block].sealed
            self._moved[state, block] = self._clock.move("device_to_host", nbytes)

    def open_block(self, state: LayerState, buffer: Handle | None) -> None:
        pass

    def quantize(self, state: LayerState, block: int) -> None:
        # Blocks are quantized on the device; one in pinned memory is first copied there.
        clock, costs, running = self._clock, self._costs, state.running
        is_away = state.homes[block] != "device"
        ready = clock.move("host_to_device", state.sizes[block].open if is_away else 0)
        elements = costs.kv_elements(state.layer, running.rows, running.lengths[block])
        clock.wait(clock.compute(costs.quantize_s(elements), ready))
        self._to_home(state, block)

    def write(self, part: ReplacedPart | SealedPart) -> float:
        if isinstance(part, ReplacedPart):
            return self._clock.move("disk_write", part.nbytes)
        written = 0.0
        for block in part.blocks:
            moved = self._moved.pop((part.state, block), 0.0)
            nbytes = part.state.sizes[block].sealed
            written = self._clock.move("disk_write", nbytes, moved)
        return written

    def is_done(self, handle: Loading | float) -> bool:
        if isinstance(handle, Loading):
            return self._clock.read_done(handle.read)
        return handle <= self._clock.now

    def wait(self, write: float) -> None:
        self._clock.wait(write)

    # Computing

    def compute(self, step: Step, inputs: Inputs) -> float:
        return self._steps.compute(step, inputs)

    def finish(self, step: Step, computed: float) -> int | None:
        self._clock.wait(computed)
        if self._texts is None or self._layers[step.layer].kind != "head":
            return None
        return self._texts.rows_left(step)


def _sampled(count: int, sample: int | None) -> dict[int, int]:
    """Returns the tokens to simulate, and how many tokens each stands for; the prompt's is one."""
    last = count - 1
    if sample is None or last <= sample:
        return dict.fromkeys(range(count), 1)
    cuts = [1 + last * i // sample for i in range(sample + 1)]
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
    sample: number of decoding tokens to simulate, at even distances, or None for all. Skipped
        tokens count like these, but KV blocks that fill up in between are not written.
    """
    simulation, ledger = Simulation(costs, plan, page_cached), planned_ledger(plan)
    BlockLoop(plan, simulation, ledger, _sampled(plan.shape.gen_len, sample)).run()
    return simulation.prediction(ledger.peak)


def simulate_texts(
    costs: Costs, plan: BlockPlan, texts: SimulatedTexts, page_cached: frozenset[str]
) -> Prediction:
    """Predicts the time and traffic of a run of texts of different lengths.

    plan: without any batch; texts let theirs enter it.
    """
    simulation, ledger = Simulation(costs, plan, page_cached, texts), planned_ledger(plan)
    BlockLoop(plan, simulation, ledger, arrivals=texts).run()
    return simulation.prediction(ledger.peak)
