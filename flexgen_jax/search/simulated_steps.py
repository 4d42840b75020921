"""The computing of simulated steps: how long each takes on the clock's processors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle
from random import Random
from typing import NamedTuple

from flexgen_jax.policy.plan import BlockPlan
from flexgen_jax.schedule.backend import ChosenExperts, Inputs
from flexgen_jax.schedule.running import LayerState
from flexgen_jax.schedule.waves import Step
from flexgen_jax.search.clock import Clock
from flexgen_jax.search.costs import Costs

GUESSED = 0.8
"""Share of the chosen experts that the layer before guesses (Eliseev and Mazur 2023, "Fast
Inference of Mixture-of-Experts Language Models with Offloading", section 3.2)."""


NUM_DRAWS = 500
"""Different draws of experts; further steps use them again, because drawing takes long."""

LEAST_SHARE = 1e-3
"""Experts with a smaller share are drawn as often as with this one."""


class Attended(NamedTuple):
    """The tokens of a layer's sealed blocks on the device and on the host, and whether the open
    block is on the host."""

    here: int
    there: int
    is_open_there: bool


class SimulatedSteps:
    """Computes steps on a clock; see `Simulation`."""

    def __init__(self, costs: Costs, plan: BlockPlan, clock: Clock) -> None:
        self._costs, self._plan, self._clock = costs, plan, clock
        self._layers, self._hw = costs.spec.layers, costs.hw
        # When the queries of steps are there that were computed ahead.
        self._projected: dict[Step, float] = {}
        # The visit whose weights are unpacked.
        self._unpacked_for = -1
        self._draws = cycle(_draws(costs.setting.experts.shares))

    def compute(self, step: Step, inputs: Inputs) -> float:
        clock, costs = self._clock, self._costs
        layer, rows = self._layers[step.layer], step.batch.rows
        ready = max((load.ready for load in inputs.of_visit), default=0.0)
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
            batch = step.batch.shape
            tokens = self._plan.policy.pass_tokens if step.token > 0 else 1
            formed = rows * (batch.prompt_len if batch.scores_prompt else tokens)
            return clock.compute(fixed + costs.head_s(formed), ready)
        for load in (inputs.cache, inputs.replaced):
            ready = ready if load is None else max(ready, load.ready)
        if step.token > 0:
            return self._decode(step, inputs, ready, fixed)
        span, only_last = step.batch.span(step.token), step.batch.only_last(step.layer)
        before = span.start if inputs.cache is not None else 0
        prefill = costs.prefill_s(layer, rows, span.tokens, only_last, before)
        tokens = rows * (1 if only_last else span.tokens)
        return clock.compute(fixed + prefill + self._prefix_s(step, tokens), ready)

    def _prefix_s(self, step: Step, tokens: int) -> float:
        """Returns the seconds of a step's attention from `tokens` tokens to its prefixes."""
        layer, batch = self._layers[step.layer], step.batch
        return sum(
            self._costs.prefix_s(
                layer, tokens * (stop - start) // batch.rows, prefix.shape.prompt_len
            )
            for prefix, start, stop in batch.shared
        )

    def _decode(self, step: Step, inputs: Inputs, ready: float, fixed: float) -> float:
        """Decodes; where blocks stay on the host, the query goes there and a result comes back."""
        clock, costs, layer = self._clock, self._costs, self._layers[step.layer]
        rows = step.batch.rows
        here, there, asks_host = self._tokens(step)
        computed = rows * self._plan.policy.pass_tokens
        routed_s = costs.experts_s(layer, computed) if inputs.experts is not None else 0.0
        linear = costs.linear_s(layer, computed) + self._prefix_s(step, computed) - routed_s
        if not asks_host:
            attention = costs.device_attention_s(layer, rows, here)
            routed = clock.compute(fixed + linear + attention, ready)
            return self._through_experts(step, inputs, routed, routed_s)
        project = costs.project_s(layer, rows)
        projected = self._projected.pop(step, None)
        if projected is None:
            projected = clock.compute(project, ready)
        on_device, on_host = costs.split_attention_s(layer, rows, here, there)
        if on_device:
            clock.compute(on_device, ready)
        if inputs.early is not None:
            later, hidden = inputs.early
            project_s = costs.project_s(layer, later.batch.rows)
            self._projected[later] = clock.compute(project_s, hidden.ready)
        query_bytes = costs.query_bytes(layer, rows)
        clock.host_compute(on_host, clock.pass_by("device_to_host", query_bytes, projected))
        partial = rows * (layer.attention.query_size + layer.attention.num_heads) * 4
        back = clock.pass_by("host_to_device", partial)
        routed = clock.compute(fixed + linear - project + self._hw.split_s, back)
        return self._through_experts(step, inputs, routed, routed_s)

    def _through_experts(self, step: Step, inputs: Inputs, routed: float, seconds: float) -> float:
        """Loads the experts that are chosen, once it is known which, and computes them, some of
        them on the host; seconds: of all of them on the device."""
        experts = inputs.experts
        if experts is None:
            return routed
        clock, costs, layer = self._clock, self._costs, self._layers[step.layer]
        rows = step.batch.rows * self._plan.policy.pass_tokens
        clock.wait(routed)
        right = round(GUESSED * experts.expected)
        wrong = range(experts.total - experts.expected + right, experts.total)
        loads = experts.load(self._chosen(experts), [*range(right), *wrong])
        count, on_host = max(1, experts.expected), len(loads.on_host)
        copied = max((load.ready for load in loads.copied), default=routed)
        computed = clock.compute(seconds * (count - on_host) / count, copied)
        if not on_host:
            return computed
        hidden = costs.hidden_bytes(rows, 1)
        host_s = costs.host_experts_s(layer, rows, on_host, len(loads.copied))
        clock.host_compute(host_s, clock.pass_by("device_to_host", hidden, routed))
        summed = clock.pass_by("host_to_device", 4 * rows * layer.hidden_size)
        return clock.compute(self._hw.split_s, max(computed, summed))

    def _chosen(self, experts: ChosenExperts) -> Sequence[int]:
        """Returns the numbers of a step's experts: drawn by how often each is chosen, if that is
        known, since the hits of a cache depend on it; else the first ones."""
        shares = self._costs.setting.experts.shares
        is_known = len(shares) == experts.total
        numbers = next(self._draws) if is_known else range(experts.total)
        return numbers[: experts.expected]

    def _tokens(self, step: Step) -> tuple[int, int, bool]:
        """Returns the cached tokens on the device and on the host, and whether the host has
        blocks."""
        running, state = step.batch, step.batch.layers[step.layer - 1]
        if not state.homes:
            return 0, 0, False
        position = running.span(step.token).start
        sealed = running.sealed(position)
        if state.payload is None:
            state.payload = {}
        attended: dict[int, Attended] = state.payload
        if sealed not in attended:
            attended[sealed] = _attended(state, sealed)
        on_device, on_host, is_open_there = attended[sealed]
        opened = position - on_device - on_host
        if is_open_there:
            return on_device, on_host + opened, True
        return on_device + opened, on_host, on_host > 0


def _draws(shares: Sequence[float]) -> Iterator[Sequence[int]]:
    """Yields orders of experts in which those that are chosen more often tend to come first
    (Efraimidis and Spirakis 2006, "Weighted random sampling with a reservoir", section 2)."""
    generator = Random(0)  # noqa: S311 # not for secrets
    for _ in range(NUM_DRAWS):
        keys = [generator.random() ** (1 / max(share, LEAST_SHARE)) for share in shares]
        yield sorted(range(len(shares)), key=keys.__getitem__, reverse=True)


def _attended(state: LayerState, sealed: int) -> Attended:
    lengths, tokens = state.running.lengths, [0, 0]
    for block in range(sealed):
        tokens[state.stays_on_host(block)] += lengths[block]
    on_device, on_host = tokens
    return Attended(on_device, on_host, sealed < len(lengths) and state.stays_on_host(sealed))
