"""Decodes a token in several layers by one program, where all that they need is on the device.

The first layer's step dispatches the programs of all that follow; the steps of the other layers
find their results here.
"""

from __future__ import annotations

import jax

from flexgen_jax.layers import programs
from flexgen_jax.layers.attention import Block
from flexgen_jax.offload.batch import Computed, arrays_of
from flexgen_jax.offload.dispatch import Dispatch, hidden_of
from flexgen_jax.offload.kv_cache import KVCache
from flexgen_jax.offload.weights import WeightStore
from flexgen_jax.schedule.backend import Inputs
from flexgen_jax.schedule.joined import joined_layers
from flexgen_jax.schedule.running import Running
from flexgen_jax.schedule.waves import Step


class JoinedSteps:
    """The results of layers that were computed together."""

    def __init__(self, dispatch: Dispatch, weights: WeightStore, cache: KVCache) -> None:
        self._dispatch, self._weights, self._cache = dispatch, weights, cache
        self._joined = joined_layers(dispatch.plan)
        self._spec = dispatch.device.spec
        self._computed: dict[Running, dict[int, Computed]] = {}

    def forget(self, running: Running) -> None:
        """Forgets a batch that ends."""
        self._computed.pop(running, None)

    def take(self, step: Step, inputs: Inputs) -> Computed | None:
        """Returns a step's result; None if its layer is not joined with others."""
        if not self._joined:
            return None
        computed = self._computed.setdefault(step.batch, {})
        if step.layer not in computed and step.layer in self._joined and self._can_join(step):
            computed.update(self._compute(step, inputs))
        return computed.pop(step.layer, None)

    def _can_join(self, step: Step) -> bool:
        """Returns whether no layer's cache changes before its own step, and none is to be asked
        for."""
        running = step.batch
        return not running.shared and not running.shrinks_at(step.token)

    def _compute(self, step: Step, inputs: Inputs) -> dict[int, Computed]:
        """Dispatches the programs of this layer and all that follow, which the device computes
        while the loop walks through their steps."""
        computed = dict[int, Computed]()
        hidden, before = hidden_of(inputs), arrays_of(step.batch).checks
        layer, checks = step.layer, before
        while layer in self._joined:
            layers = self._joined[layer]
            hidden, tails, checks = self._dispatched(step, layers, hidden, checks)
            # Whoever waits for a layer is not to wait for its program: the device would have
            # nothing to do before the next token is dispatched.
            for number, tail in zip(layers, tails, strict=True):
                computed[number] = Computed(before, hidden, tail, is_appended=True)
            layer = layers.stop
        computed[layer - 1].checks = checks
        return computed

    def _dispatched(
        self, step: Step, layers: range, hidden: jax.Array, checks: jax.Array
    ) -> tuple[jax.Array, list[Block], jax.Array]:
        running, arrays = step.batch, arrays_of(step.batch)
        states = [running.layers[layer - 1] for layer in layers]
        blocks = [self._cache.resident(state) for state in states]
        device_places, _ = states[0].places(states[0].sealed)
        program = self._dispatch.get_joined(
            programs.decode_joined,
            step,
            layers,
            blocks=device_places.lengths,
            tail=device_places.tail,
        )
        computed: tuple[jax.Array, list[Block], jax.Array] = program(
            [self._weights.resident(self._spec.layers[layer]) for layer in layers],
            hidden,
            [tuple(sealed) for *sealed, _ in blocks],
            [opened for *_, opened in blocks],
            checks,
            *arrays.moments[step.token].where,
        )
        return computed
