"""Computes a layer's experts, and loads those that are chosen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from flexgen_jax.layers import programs
from flexgen_jax.models.spec import LayerSpec
from flexgen_jax.offload.batch import Computed
from flexgen_jax.offload.device import Device
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

    def compute(
        self,
        step: Step,
        weights: Weights,
        experts: dict[int, Weights],
        computed: Computed,
        choice: ChosenExperts | None,
    ) -> None:
        """Computes a layer's experts one by one, each for the tokens that chose it.

        experts: the loaded experts; further chosen experts are loaded by `choice`.
        """
        layer, hidden = self._layers[step.layer], computed.hidden
        assert hidden is not None, "attention gives hidden states"
        rows, tokens, _ = hidden.shape
        route = self._programs.get(programs.route, layer=layer, rows=rows, tokens=tokens)
        *routed, out = route(weights, hidden)
        chosen_experts = set(experts)
        if choice is not None:
            guessed = self._guess(step, hidden) if choice.guesses else set()
            chosen_experts = self._asked(layer, np.asarray(routed[1]))
            for load in choice.load(chosen_experts, guessed):
                for number, expert_weights in of_experts(layer, load.arriving)[1].items():
                    experts.setdefault(number, {}).update(expert_weights)
        expert = self._programs.get(programs.expert, layer=layer, tokens=rows * tokens)
        for number in sorted(chosen_experts):
            out = expert(experts[number], *routed, self._device.memories.numbers(number), out)
        program, shape = programs.ending(layer, rows, tokens)
        combine = self._programs.get(program, **shape)
        expert_arguments = (hidden, computed.checks, out)
        ended = (
            combine(weights, *expert_arguments) if "layer" in shape else combine(*expert_arguments)
        )
        computed.hidden, computed.checks = ended

    def _asked(self, layer: LayerSpec, choices: np.ndarray) -> set[int]:
        """Returns the experts that are among some tokens' choices, and counts these."""
        assert layer.experts is not None, "some are chosen"
        counts = np.bincount(choices.ravel(), minlength=layer.experts.count)
        self.chosen[layer.index] = self.chosen.get(layer.index, 0) + counts
        return set(np.flatnonzero(counts).tolist())

    def _guess(self, step: Step, hidden: jax.Array) -> set[int]:
        """Returns the experts that the next layer would choose for a step's hidden states: most of
        those that it will."""
        layer = self._layers[step.layer + 1]
        rows, tokens, _ = hidden.shape
        program = self._programs.get(programs.guess, layer=layer, rows=rows, tokens=tokens)
        numbers = program(self._weights.routing(layer), hidden)
        return set(np.unique(np.asarray(numbers)).tolist())


def of_experts(layer: LayerSpec, weights: Mapping[str, Any]) -> tuple[Weights, dict[int, Weights]]:
    """Divides a layer's tensors, by path, into those of the layer and those of each expert, by path
    within it."""
    shared_weights: Weights = {}
    experts: dict[int, Weights] = {}
    if layer.experts is None:
        return dict(weights), experts
    for path, tensor_array in weights.items():
        tensor = layer.by_path[path]
        target = shared_weights if tensor.expert is None else experts.setdefault(tensor.expert, {})
        target[tensor.own_path] = tensor_array
    return shared_weights, experts
