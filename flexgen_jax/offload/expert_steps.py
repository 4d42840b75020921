"""Computes a layer's experts, and loads those that are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from flexgen_jax.layers import programs
from flexgen_jax.models.spec import LayerSpec
from flexgen_jax.offload.batch import Computed
from flexgen_jax.offload.device import Device
from flexgen_jax.offload.host_experts import HostExperts, add_experts
from flexgen_jax.offload.weights import WeightStore
from flexgen_jax.policy.plan import BlockPlan
from flexgen_jax.schedule.backend import ChosenExperts
from flexgen_jax.schedule.waves import Step

Weights = dict[str, Any]


class ExpertSteps:
    """Dispatches the programs of experts."""

    def __init__(self, device: Device, weights: WeightStore, plan: BlockPlan) -> None:
        self._device, self._weights = device, weights
        self._layers, self._programs = device.spec.layers, device.layer_programs(plan)
        # How often each expert was chosen, by layer, where experts are loaded when they are.
        self.chosen: dict[int, np.ndarray] = {}
        self._host: HostExperts | None = None
        if plan.host_experts:
            self._host = HostExperts(device.host_programs, weights, device.metrics)

    def compute(
        self, step: Step, weights: Weights, computed: Computed, choice: ChosenExperts | None
    ) -> None:
        """Computes a layer's experts, each for the tokens that chose it.

        weights: the layer's loaded tensors, by path; `choice` loads further chosen experts.
        """
        layer, hidden = self._layers[step.layer], computed.hidden
        assert hidden is not None, "attention gives hidden states"
        rows, tokens, _ = hidden.shape
        route = self._programs.get(programs.route, layer=layer, rows=rows, tokens=tokens)
        shared = shared_weights(layer, weights)
        *routed, out = route(shared, hidden)
        numbers, loaded = list(range(len(layer.expert_tensors))), Weights()
        if choice is not None:
            guessed = self._guess(step, hidden) if choice.guesses else set()
            if choice.uses_host:
                self._device.memories.ask(routed, "activations", "input of experts")
            numbers = self._asked(layer, np.asarray(routed[1]))
            loads = choice.load(numbers, guessed)
            for load in loads.copied:
                weights |= load.arriving
            for load in loads.on_host:
                loaded |= load.tree
        there = {layer.by_path[path].expert for path in loaded}
        on_device = {
            number: {t.own_path: weights[t.path] for t in layer.expert_tensors[number]}
            for number in numbers
            if number not in there
        }
        as_array = self._device.memories.numbers  # kept there: a copy would wait behind weights
        outs = [add_experts(self._programs, layer, on_device, routed, as_array, out)]
        if there:
            outs.append(self._on_host(layer, loaded, routed))
        program, shape = programs.ending(layer, rows, tokens, places=len(outs))
        combine = self._programs.get(program, **shape)
        expert_arguments = (hidden, computed.checks, outs)
        ended = (
            combine(shared, *expert_arguments) if "layer" in shape else combine(*expert_arguments)
        )
        computed.hidden, computed.checks = ended

    def _on_host(self, layer: LayerSpec, loaded: Weights, routed: Sequence[jax.Array]) -> Any:
        """Returns the sum of the results of experts whose weights are loaded to host memory, on its
        way to the device."""
        assert self._host is not None, "the plan computes experts on the host"
        numbers = sorted({layer.by_path[path].expert or 0 for path in loaded})
        summed = self._host.compute(layer, loaded, numbers, [np.asarray(x) for x in routed])
        return self._device.memories.send(summed, "activations", "results of experts")

    def _asked(self, layer: LayerSpec, choices: np.ndarray) -> list[int]:
        """Returns the experts that are among some tokens' choices, those of most tokens first, and
        counts these."""
        assert layer.experts is not None, "some are chosen"
        counts = np.bincount(choices.ravel(), minlength=layer.experts.count)
        self.chosen[layer.index] = self.chosen.get(layer.index, 0) + counts
        by_use = np.argsort(-counts, kind="stable")
        numbers: list[int] = by_use[: np.count_nonzero(counts)].tolist()
        return numbers

    def _guess(self, step: Step, hidden: jax.Array) -> set[int]:
        """Returns the experts that the next layer would choose for a step's hidden states: most of
        those that it will."""
        layer = self._layers[step.layer + 1]
        rows, tokens, _ = hidden.shape
        program = self._programs.get(programs.guess, layer=layer, rows=rows, tokens=tokens)
        numbers = program(self._weights.routing(layer), hidden)
        return set(np.unique(np.asarray(numbers)).tolist())


def shared_weights(layer: LayerSpec, weights: Weights) -> Weights:
    """Returns the tensors of a layer that all tokens use, by path."""
    if layer.experts is None:
        return weights
    return {path: weights[path] for path in layer.shared_paths}
