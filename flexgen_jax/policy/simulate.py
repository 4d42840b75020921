"""A discrete-event simulation of a run on the links and processors of a profile.

It goes through the real schedule, with the look-ahead and placement of `offload/executor.py`, but
only counts bytes of every transfer and the time at which each would be done. Each of four links
carries one transfer after the other, except that two lanes of reads share the disk. The device
computes one program after the other; on a unified machine the CPU's attention is one of these.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import pairwise

from flexgen_jax.policy.clock import Cached, CacheSizes, Clock, Loading
from flexgen_jax.policy.cost_model import Costs
from flexgen_jax.policy.memory import PENDING_WRITES, BlockShape, plan_cache
from flexgen_jax.policy.placement import place_activations, place_weights
from flexgen_jax.policy.policy import Ahead, Tier
from flexgen_jax.policy.schedule import LookAhead, Step


@dataclass(frozen=True)
class Prediction:
    """Predicted time and traffic of one block of batches.

    prefill_s, decode_s: seconds; busy_s: seconds by resource; bytes: bytes by transfer.
    """

    prefill_s: float
    decode_s: float
    busy_s: dict[str, float]
    bytes: dict[str, int]

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.decode_s

    @property
    def binding(self) -> str:
        """The resource that is busy for the longest time."""
        return max(self.busy_s, key=lambda name: self.busy_s[name])


class Simulation:
    """Simulates one block of batches on its way through the model; there are no arrays."""

    def __init__(
        self,
        costs: Costs,
        shape: BlockShape,
        unified: bool,
        page_cached: frozenset[str],
        sample: int | None,
    ) -> None:
        policy = costs.policy
        self.costs, self.shape, self.unified = costs, shape, unified
        self._layers = costs.spec.layers
        self.page_cached = page_cached
        self._policy, self._ahead = policy, Ahead.of(policy)
        self._clock = Clock(costs.hw, policy.overlap, unified)
        self._tiers = place_weights(costs.spec, costs.formats.dtype, policy)
        self._plan = plan_cache(costs.config, policy, self.shape)
        self._states = place_activations(len(self._layers) - 1, len(shape.batch_sizes), policy)
        self._loads = {kind: dict[Hashable, Loading]() for kind in ("weights", "cache", "hidden")}
        self._warm: set[int] = set()
        self._writes: dict[tuple[int, int], float] = {}
        self._pending: deque[float] = deque(maxlen=PENDING_WRITES + 1)
        self._visit, self._next_visits = -1, list[Step]()
        self._hidden: dict[int, tuple[int, int]] = {}
        self._hidden_disk: set[int] = set()
        self._hidden_writes: dict[int, float] = {}
        self._sizes = CacheSizes(costs, self._plan, shape.batch_sizes)
        self._cached_until: dict[tuple[int, int], int] = {}
        self._prompts = len(costs.spec.decoders) * len(shape.batch_sizes)
        self._projected: dict[Step, float] = {}
        self._tokens, self._weight = _sampled(shape.gen_len, sample)
        self._weight_loads = [self._weights_of(layer) for layer in range(len(self._layers))]

    def run(self) -> Prediction:
        """Goes through all steps and returns the prediction."""
        shape = (len(self._tokens), len(self._layers), len(self.shape.batch_sizes))
        phases, last = [0.0, 0.0], 0.0
        before: tuple[Step, float] | None = None
        ahead = LookAhead(self._policy.order.steps(*shape))
        self._read_ahead(ahead, -1)
        for step in ahead:
            self._clock.weight = self._weight[step.token]
            self._copy_ahead(step, ahead)
            done = self._compute(step, ahead)
            if before is not None:
                self._retire(*before)
            before = (step, done)
            if not self._policy.overlap:
                self._retire(*before)
                before = None
            self._read_ahead(ahead, step.visit)
            phases[step.token > 0] += (self._clock.now - last) * self._weight[step.token]
            last = self._clock.now
        if before is not None:
            self._retire(*before)
            phases[before[0].token > 0] += self._clock.now - last
        return Prediction(phases[0], phases[1], self._clock.busy, self._clock.bytes)

    # Weights

    def _weights_of(self, layer: int) -> tuple[int, int, int, float]:
        """Returns a layer's bytes that are read from disk, read from the page cache, and copied to
        the device, and the bytes of its largest read."""
        direct = cached = copied = 0
        largest = 1
        for tensor in self._layers[layer].tensors:
            nbytes = self.costs.formats.weight(tensor).nbytes
            tier = self._tiers[tensor.key]
            copied += 0 if tier == "device" else nbytes
            if tier == "disk":
                largest = max(largest, nbytes)
                if tensor.key in self.page_cached:
                    cached += nbytes
                else:
                    direct += nbytes
        return direct, cached, copied, float(largest)

    def _start_weights(self, layer: int) -> Loading:
        direct, cached, copied, size = self._weight_loads[layer]
        clock = self._clock
        load = Loading(None, copied, size)
        if layer in self._warm and self._layers[layer].kind != "decoder":
            return load  # the ends are read once a block
        source = "page_cache" if layer in self._warm else "disk_read"
        self._warm.add(layer)
        for nbytes, how in ((direct, "disk_read"), (cached, source)):
            if nbytes:
                seconds = getattr(self.costs.hw, how).seconds(nbytes, size)
                load.read = clock.read(nbytes, False, how, seconds)
        return load

    # The KV cache

    def _position(self, step: Step) -> int:
        return self.shape.prompt_lens[step.batch] + self._tokens[step.token] - 1

    def _start_cache(self, step: Step) -> Loading:
        where = (step.layer - 1, step.batch)
        cached, clock = self._sizes.of(*where), self._clock
        clock.wait(self._writes.pop(where, 0.0))
        position = self._position(step)
        sealed = self._sizes.sealed(step.batch, position)
        load = Loading(None, cached.moved[sealed])
        if sealed < len(cached.lengths) and cached.homes[sealed] != "device":
            share = self._policy.moved_share if cached.there[sealed] else 1.0
            rows, length = self.shape.batch_sizes[step.batch], cached.lengths[sealed]
            tail = self.costs.open_kv_bytes(self._layers[step.layer], rows, length)
            load.copied += int(share * tail)
        if cached.read[sealed]:
            load.read = clock.read(cached.read[sealed], True, "disk_read", cached.read_s[sealed])
        return load

    def _is_cached(self, step: Step) -> bool:
        if self._policy.order.prefills_first and len(self._cached_until) < self._prompts:
            return False
        until = self._cached_until.get((step.layer - 1, step.batch), -1)
        return step.token > 0 and self._is_decoder(step) and until >= step.token - 1

    def _is_decoder(self, step: Step) -> bool:
        return self._layers[step.layer].kind == "decoder"

    # Hidden states

    def _is_waiting(self, step: Step) -> bool:
        if self._hidden.get(step.batch) != (step.token, step.layer - 1):
            return False
        home, _ = self._state(step, step.layer - 1)
        return home != "disk" or step.batch in self._hidden_disk

    def _start_hidden(self, step: Step) -> Loading:
        home, nbytes = self._state(step, step.layer - 1)
        if step.batch in self._hidden_disk and step.batch not in self._hidden_writes:  # not in RAM
            seconds = self.costs.hw.page_cache.seconds(nbytes)
            return Loading(self._clock.read(nbytes, True, "page_cache", seconds), nbytes)
        return Loading(None, 0 if home == "device" else nbytes)

    def _state(self, step: Step, layer: int) -> tuple[Tier, int]:
        """Returns the tier and bytes of the hidden states that a layer makes of a step's tokens."""
        is_one = step.token > 0 or self._only_last(layer)
        tokens = 1 if is_one else self.shape.prompt_lens[step.batch]
        nbytes = self.costs.hidden_bytes(self.shape.batch_sizes[step.batch], tokens)
        return self._states.home(tokens, layer, step.batch), nbytes

    def _only_last(self, layer: int) -> bool:
        """Returns whether a layer's hidden states are needed for a prompt's last token only."""
        return layer == len(self._layers) - 2 and not self.shape.scores_prompts

    # Loads ahead

    def _read_ahead(self, ahead: LookAhead, visit: int) -> None:
        depth = self._ahead
        following = ahead.steps(1)
        if following and following[0].visit != visit:  # else nothing has changed
            weights = self._loads["weights"]
            for step in ahead.visits(visit, depth.weight_reads, self._is_decoder):
                if step.visit not in weights:
                    weights[step.visit] = self._start_weights(step.layer)
        for step in ahead.steps(depth.cache_reads, self._is_decoder):
            if step not in self._loads["cache"] and self._is_cached(step):
                self._loads["cache"][step] = self._start_cache(step)
        for step in ahead.steps(depth.hidden_reads):
            if step not in self._loads["hidden"] and self._is_waiting(step):
                self._loads["hidden"][step] = self._start_hidden(step)

    def _copy_ahead(self, step: Step, ahead: LookAhead) -> None:
        depth = self._ahead
        if step.visit != self._visit:
            self._visit = step.visit
            self._next_visits = ahead.visits(step.visit, depth.weight_copies)
        keys: list[tuple[str, Hashable]] = [("weights", s.visit) for s in self._next_visits]
        if depth.cache_copies:
            keys += [(kind, s) for s in ahead.steps(1) for kind in ("cache", "hidden")]
        for kind, key in keys:
            load = self._loads[kind].get(key)
            if load is not None and load.ready < 0 and self._clock.read_done(load.read):
                load.ready = self._copy(kind, load)

    def _copy(self, kind: str, load: Loading) -> float:
        if kind == "hidden":
            return self._clock.pass_by("host_to_device", load.copied)
        return self._clock.move("host_to_device", load.copied, 0.0, load.size)

    def _take(self, kind: str, key: Hashable, start: Loading | None) -> float:
        """Waits for a load's disk read; returns the time at which the load is on the device."""
        load = self._loads[kind].get(key) or start
        assert load is not None
        self._clock.finish_read(load.read)
        if load.ready < 0:
            load.ready = self._copy(kind, load)
        self._loads[kind][key] = load
        return load.ready

    # Steps

    def _compute(self, step: Step, ahead: LookAhead) -> float:
        costs, clock = self.costs, self._clock
        layer = self._layers[step.layer]
        kind = layer.kind
        rows = self.shape.batch_sizes[step.batch]
        weights = self._loads["weights"]
        start = None if step.visit in weights else self._start_weights(step.layer)
        ready = self._take("weights", step.visit, start)
        fixed = costs.hw.step_s
        if not self.unified:
            clock.now, fixed = clock.now + fixed, 0.0
        if kind == "embedding":
            done = clock.compute(fixed, ready)
        else:
            start = None if step in self._loads["hidden"] else self._start_hidden(step)
            ready = max(ready, self._take("hidden", step, start))
            self._loads["hidden"].pop(step)
            if kind == "head":
                scored = self.shape.scores_prompts
                formed = rows * (self.shape.prompt_lens[step.batch] if scored else 1)
                done = clock.compute(fixed + costs.head_s(formed), ready)
            elif step.token == 0:
                tokens = self.shape.prompt_lens[step.batch]
                seconds = costs.prefill_s(layer, rows, tokens, self._only_last(step.layer))
                done = clock.compute(fixed + seconds, ready)
            else:
                done = self._decode(step, ahead, ready, fixed)
        if kind != "head":
            self._put_hidden(step, done)
        following = ahead.steps(1)
        if not following or following[0].visit != step.visit:
            weights.pop(step.visit)
        return done

    def _decode(self, step: Step, ahead: LookAhead, ready: float, fixed: float) -> float:
        costs, clock, layer = self.costs, self._clock, self._layers[step.layer]
        start = None if step in self._loads["cache"] else self._start_cache(step)
        ready = max(ready, self._take("cache", step, start))
        self._loads["cache"].pop(step)
        rows = self.shape.batch_sizes[step.batch]
        cached = self._sizes.of(step.layer - 1, step.batch)
        position = self._position(step)
        sealed = self._sizes.sealed(step.batch, position)
        there, total = 0, 0
        for block, length in enumerate(cached.lengths[: sealed + 1]):
            used = min(length, position - total)
            total += length
            there += used if cached.there[block] else 0
        here = position - there
        if not any(cached.there[: sealed + 1]):
            return clock.compute(
                fixed + costs.linear_s(layer, rows) + costs.device_attention_s(layer, rows, here),
                ready,
            )
        asked = costs.query_bytes(layer, rows)
        projected = self._projected.pop(step, None)
        if projected is None:
            projected = clock.compute(costs.project_s(layer, rows), ready)
        on_device, on_host = costs.split_attention_s(layer, rows, here, there)
        if on_device:
            clock.compute(on_device, ready)
        if self._policy.overlap:
            for later in ahead.steps(1):
                if later.visit == step.visit and self._is_waiting(later):
                    if later not in self._loads["hidden"]:
                        self._loads["hidden"][later] = self._start_hidden(later)
                    at = self._take("hidden", later, None)
                    self._projected[later] = clock.compute(costs.project_s(layer, rows), at)
        arrived = clock.pass_by("device_to_host", asked, projected)
        clock.host_compute(on_host, arrived)
        partial = rows * (layer.attention.query_size + layer.attention.num_heads) * 4
        back = clock.pass_by("host_to_device", partial)
        rest = costs.linear_s(layer, rows) - costs.project_s(layer, rows) + costs.hw.split_s
        return clock.compute(fixed + rest, back)

    def _put_hidden(self, step: Step, done: float) -> None:
        self._hidden[step.batch] = (step.token, step.layer)
        self._clock.wait(self._hidden_writes.pop(step.batch, 0.0))
        self._hidden_disk.discard(step.batch)
        home, nbytes = self._state(step, step.layer)
        if home != "device":
            self._clock.move("device_to_host", nbytes, done)

    def _retire(self, step: Step, done: float) -> None:
        """Waits for a step and stores its results."""
        clock, layer = self._clock, self._layers[step.layer]
        clock.wait(done)
        if layer.kind != "head":
            self._settle_hidden(step)
        if layer.kind != "decoder" or step.token >= len(self._tokens) - 1:
            return
        where = (step.layer - 1, step.batch)
        self._cached_until[where] = step.token
        rows, cached = self.shape.batch_sizes[step.batch], self._sizes.of(*where)
        if step.token == 0:
            blocks = range(len(self._plan.prompt[step.batch]))
            self._store(where, rows, cached, list(blocks), on_device=True)
            return
        position = self._position(step)
        block = self._sizes.sealed(step.batch, position)
        if cached.homes[block] != "device":
            clock.move("device_to_host", self.costs.open_kv_bytes(layer, rows, 1))
        if self._sizes.sealed(step.batch, position + 1) > block:
            is_quantized = self._policy.cache_bits < 16
            if is_quantized:
                # Blocks are quantized on the device; one in pinned memory is first copied there.
                away = cached.homes[block] != "device"
                length = cached.lengths[block]
                opened = self.costs.open_kv_bytes(layer, rows, length) if away else 0
                ready = clock.move("host_to_device", opened)
                elements = self.costs.kv_elements(layer, rows, length)
                clock.wait(clock.compute(self.costs.quantize_s(elements), ready))
            self._store(where, rows, cached, [block], on_device=is_quantized)

    def _store(
        self, where: tuple[int, int], rows: int, cached: Cached, blocks: list[int], on_device: bool
    ) -> None:
        """Sends full blocks to their homes; at most `PENDING_WRITES` steps wait for the disk."""
        layer, costs = self._layers[where[0] + 1], self.costs
        sizes = {block: costs.kv_bytes(layer, rows, cached.lengths[block]) for block in blocks}
        away = sum(n for block, n in sizes.items() if cached.homes[block] != "device")
        moved = self._clock.move("device_to_host", away) if on_device and away else 0.0
        written = {block: n for block, n in sizes.items() if cached.homes[block] == "disk"}
        for nbytes in written.values():
            done = self._clock.move("disk_write", nbytes, moved)
            self._writes[where] = done
        if written:
            self._pending.append(self._writes[where])
            if len(self._pending) > PENDING_WRITES:
                self._clock.wait(self._pending[0])

    def _settle_hidden(self, step: Step) -> None:
        home, nbytes = self._state(step, step.layer)
        if self._hidden.get(step.batch) == (step.token, step.layer) and home == "disk":
            self._hidden_disk.add(step.batch)
            self._hidden_writes[step.batch] = self._clock.move("disk_write", nbytes)
            if len(self._hidden_writes) > PENDING_WRITES:
                self._clock.wait(self._hidden_writes.pop(next(iter(self._hidden_writes))))


def _sampled(count: int, sample: int | None) -> tuple[list[int], list[int]]:
    """Returns the tokens to simulate, and how many tokens each stands for; the prompt's is one."""
    rest = count - 1
    if sample is None or rest <= sample:
        return list(range(count)), [1] * count
    cuts = [1 + rest * i // sample for i in range(sample + 1)]
    spans = list(pairwise(cuts))
    return [0, *((low + high) // 2 for low, high in spans)], [1, *(b - a for a, b in spans)]


def simulate(
    costs: Costs,
    shape: BlockShape,
    unified: bool,
    page_cached: frozenset[str] = frozenset(),
    sample: int | None = None,
) -> Prediction:
    """Predicts the time and traffic of a block of batches of this shape.

    page_cached: keys of tensors on disk that the operating system keeps in RAM after the first
        read.
    sample: number of decoding tokens to simulate, at even distances, or None for all. The others
        count like these, but KV blocks that fill up between them are not written.
    """
    return Simulation(costs, shape, unified, page_cached, sample).run()
