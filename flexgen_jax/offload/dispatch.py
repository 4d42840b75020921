"""Shared code for dispatching steps: programs of a layer, and who counts the device as busy."""

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
from flexgen_jax.policy.plan import BlockPlan
from flexgen_jax.schedule.backend import Inputs
from flexgen_jax.schedule.waves import Step


def sharing_rows(sharing: int, rows: int) -> int:
    """Returns the number of rows to compile for, if `sharing` rows attend to a shared prefix.
    Rounding keeps the number of programs small."""
    return int(min(1 << (sharing - 1).bit_length(), rows))


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

    def watch(self, step: Step, loads: Sequence[Load[Any]], result: Any, name: str = "") -> None:
        """Counts the device as busy from the arrival of its inputs until its result."""
        if self.device.metrics.is_timed:
            label = f"{self._layers[step.layer].name}{name}"
            label += f", token {step.token}, batch {step.batch.number}"
            arrivals = [load.arrival for load in loads if load.arrival is not None]
            self.device.watch("layers", label, arrivals, result)

    def to_prefixes(
        self,
        step: Step,
        query: jax.Array,
        start: int,
        caches: Sequence[LayerCache],
        partial: Any = None,
    ) -> Any:
        """Returns the partial result of attention to the prefixes, merged with a given partial
        result: all rows that share a prefix attend to it as one.

        start: the index of the query's first token; caches: those of `Running.prefixes`.
        """
        rows, _, num_queries, _ = query.shape
        numbers = self.device.memories.numbers
        of_prefix = dict(zip(step.batch.prefixes, caches, strict=True))
        for prefix, begin, end in step.batch.shared:
            cache, prefix_batch = of_prefix[prefix], arrays_of(prefix).given
            sharing = sharing_rows(end - begin, rows)
            attend = self.device.programs.get(
                programs.attend_prefix,
                layer=self._layers[step.layer],
                rows=rows,
                asked=num_queries,
                sharing=sharing,
                blocks=cache.here.lengths,
                is_first=partial is None,
            )
            padding = int(prefix_batch.first_valid[0])
            positions = (
                min(begin, rows - sharing),
                begin,
                end,
                prefix_batch.tokens_before(0),
                padding,
            )
            placed = (numbers(positions), numbers(start), arrays_of(step.batch).placed)
            partial = attend(partial, query, cache.blocks, *placed)
        return partial

    def ask_for(self, step: Step, row: tuple[Any, ...]) -> None:
        """Starts moving a token's cached arrays to the open block, unless it is the last token."""
        if step.token + 1 < step.batch.shape.gen_len:
            self._cache.ask(step.batch.layers[step.layer - 1], row)


def hidden_of(inputs: Inputs) -> jax.Array:
    """Returns a step's hidden states on the device."""
    (hidden,) = inputs.hidden.arriving
    array: jax.Array = hidden
    return array
