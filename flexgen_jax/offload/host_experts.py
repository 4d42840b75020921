"""Experts that the CPU computes where their weights lie, instead of copying these to the device.

An expert's weights are megabytes, the hidden states of a few tokens are kilobytes. So the hidden
states come to the host, and the sum of the experts' results returns to the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from flexgen_jax.layers import programs
from flexgen_jax.layers.programs import Programs
from flexgen_jax.layers.quantization import Kept
from flexgen_jax.models.spec import LayerSpec
from flexgen_jax.offload.metrics import Metrics
from flexgen_jax.offload.weights import WeightStore

Weights = Mapping[str, Kept]


class HostExperts:
    """Computes experts by the CPU's programs.

    weights: of the model; programs: compiled for the CPU.
    """

    def __init__(self, of_cpu: Programs, weights: WeightStore, metrics: Metrics) -> None:
        self._programs, self._weights, self._metrics = of_cpu, weights, metrics

    def compute(
        self, layer: LayerSpec, loaded: Weights, numbers: Sequence[int], routed: Sequence[Any]
    ) -> np.ndarray:
        """Returns the sum of some experts' results, fp32 [token, hidden].

        loaded: their weights in host memory, by path in the layer; routed: NumPy arrays of the
        results of `route` without the last.
        """
        operation = self._metrics.begin("host_compute", "layers", f"{len(numbers)} experts")
        try:
            of_experts = {n: self._weights.on_host(layer, n, loaded) for n in numbers}
            out = np.zeros(routed[0].shape, np.float32)
            added = add_experts(self._programs, layer, of_experts, routed, np.int32, out)
            return np.asarray(added)
        finally:
            self._metrics.end(operation)


def add_experts(
    compiled: Programs,
    layer: LayerSpec,
    weights: Mapping[int, Weights],
    routed: Sequence[Any],
    as_array: Callable[[int], Any],
    out: Any,
) -> Any:
    """Returns `out` with the results of some experts, several by one program.

    weights: of each expert, by its number; routed: the results of `route` without the last;
    as_array: makes an int32 [] of a number where the programs run.
    """
    add = compiled.get(programs.add_experts, layer=layer, tokens=len(routed[0]))
    count, numbers = programs.num_experts(layer), sorted(weights)
    for start in range(0, len(numbers), count):
        group = numbers[start : start + count]
        padding = count - len(group)
        arrays = [weights[number] for number in (*group, *group[:1] * padding)]
        out = add(arrays, *routed, [as_array(n) for n in (*group, *(-1,) * padding)], out)
    return out
