"""What all steps are dispatched with: programs of a layer, and who counts the device as busy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from flexgen_jax.layers import programs
from flexgen_jax.layers.programs import Program
from flexgen_jax.offload.batch import arrays_of
from flexgen_jax.offload.device import Device
from flexgen_jax.offload.kv_cache import KVCache, LayerCache
from flexgen_jax.offload.prefetch import Load
from flexgen_jax.policy.backend import Inputs
from flexgen_jax.policy.plan import BlockPlan
from flexgen_jax.policy.waves import Step


class Dispatch:
    """Dispatches programs of decoder layers."""

    def __init__(self, device: Device, plan: BlockPlan, cache: KVCache) -> None:
        self.device, self.plan = device, plan
        self._cache = cache
        self._layers = device.spec.layers
        self._programs = device.layer_programs(plan)

    def get(self, kind: Program[Any], step: Step, **shape: Any) -> Any:
        """Returns a program of a step's decoder layer, for its batch's rows."""
        rows = arrays_of(step.batch).given.size
        return self._programs.get(kind, layer=self._layers[step.layer], rows=rows, **shape)

    def get_joined(self, kind: Program[Any], step: Step, layers: range, **shape: Any) -> Any:
        """Returns a program of several decoder layers, for the rows of a step's batch."""
        alike = tuple(self.device.spec.alike[layer] for layer in layers)
        rows = arrays_of(step.batch).given.size
        return self._programs.get(kind, layers=alike, rows=rows, **shape)

    def watch(self, step: Step, loads: Sequence[Load[Any]], result: Any, part: str = "") -> None:
        """Counts the device as busy from when what it waits for has arrived until the result."""
        if self.device.metrics.is_timed:
            what = f"{self._layers[step.layer].name}{part}"
            what += f", token {step.token}, batch {step.batch.number}"
            arrivals = [load.arrival for load in loads if load.arrival is not None]
            self.device.watch("layers", what, arrivals, result)

    def to_prefix(self, step: Step, query: jax.Array, shared: LayerCache | None) -> list[Any]:
        """Returns the partial result of attention to the prefix, if there is one: all rows attend
        to it as one."""
        if shared is None:
            return []
        rows, _, asked, _ = query.shape
        attend = self.device.programs.get(
            programs.attend_prefix,
            layer=self._layers[step.layer],
            rows=rows,
            asked=asked,
            blocks=shared.here.lengths,
        )
        return [attend(query, shared.blocks)]

    def ask_for(self, step: Step, new: tuple[Any, ...]) -> None:
        """Starts moving what a layer keeps of a token to the open block, unless it is the last
        token, to which nothing will come back."""
        if step.token + 1 < step.batch.shape.gen_len:
            self._cache.ask(step.batch.layers[step.layer - 1], new)


def hidden_of(inputs: Inputs) -> jax.Array:
    """Returns a step's hidden states on the device."""
    (hidden,) = inputs.hidden.arriving
    array: jax.Array = hidden
    return array
