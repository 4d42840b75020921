"""Computes a layer's experts, and loads those that are chosen."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from flexgen_jax.layers import programs
from flexgen_jax.models.spec import LayerSpec
from flexgen_jax.offload.batch import Computed, arrays_of
from flexgen_jax.offload.device import Device
from flexgen_jax.offload.host_experts import add_experts, sum_on_host
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
        if plan.host_experts:
            _ = device.memories.cpu  # raises `UserError` before any step if there is none

    def compute(
        self,
        step: Step,
        shared: Weights,
        weights: Weights,
        computed: Computed,
        choice: ChosenExperts | None,
    ) -> None:
        """Computes a layer's experts, each for the tokens that chose it.

        shared: the tensors that all tokens use, by path; weights: all of the layer's that are
        loaded; `choice` loads further chosen experts.
        """
        layer, hidden = self._layers[step.layer], computed.hidden
        assert hidden is not None, "attention gives hidden states"
        rows, tokens, _ = hidden.shape
        route = self._programs.get(programs.route, layer=layer, rows=rows, tokens=tokens)
        chosen = arrays_of(step.batch).placed.chosen
        *routed, out = route(shared, hidden, *chosen)
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
        on_host = {n for path in loaded if (n := layer.by_path[path].expert) is not None}
        on_device = {
            number: {t.own_path: weights[t.path] for t in layer.expert_tensors[number]}
            for number in numbers
            if number not in on_host
        }
        as_array = self._device.memories.numbers  # kept there: a copy would wait behind weights
        outs = [add_experts(self._programs, layer, on_device, routed, as_array, out)]
        if on_host:
            outs.append(sum_on_host(self._device, self._weights, layer, loaded, on_host, routed))
        program, shape = programs.ending(layer, rows, tokens, places=len(outs))
        combine, arguments = self._programs.get(program, **shape), (hidden, computed.checks, outs)
        is_beside = "layer" in shape
        ended = combine(shared, *arguments, *chosen) if is_beside else combine(*arguments)
        computed.hidden, computed.checks = ended

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
        chosen = arrays_of(step.batch).placed.chosen
        numbers = program(self._weights.routing(layer), hidden, *chosen)
        return set(np.unique(np.asarray(numbers)).tolist())


def shared_weights(layer: LayerSpec, weights: Weights) -> Weights:
    """Returns the tensors of a layer that all tokens use, by path."""
    if layer.experts is None:
        return weights
    return {path: weights[path] for path in layer.shared_paths}
