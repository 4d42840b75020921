"""Experts that the CPU computes where their weights lie, instead of copying these to the device.

An expert's weights are megabytes, the hidden states of a few tokens are kilobytes. So the hidden
states come to the host, and the sum of the experts' results returns to the device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from flexgen_jax.layers import programs
from flexgen_jax.layers.programs import Programs
from flexgen_jax.layers.quantization import Kept
from flexgen_jax.models.spec import LayerSpec
from flexgen_jax.offload.device import Device
from flexgen_jax.offload.weights import WeightStore

Weights = Mapping[str, Kept]


def sum_on_host(
    device: Device,
    weights: WeightStore,
    layer: LayerSpec,
    loaded: Weights,
    numbers: Collection[int],
    routed: Sequence[jax.Array],
) -> Any:
    """Computes some experts on the CPU; returns the sum of their results, fp32 [token, hidden], on
    its way to the device.

    loaded: their weights in host memory, by path in the layer; routed: the results of `route`
    without the last, on their way to the host.
    """
    inputs = [np.asarray(x) for x in routed]
    with device.metrics.timing("host_compute", "layers", f"{len(numbers)} experts"):
        of_experts = {n: weights.expert_of_cpu(layer, n, loaded) for n in numbers}
        out = np.zeros(inputs[0].shape, np.float32)
        added = add_experts(device.host_programs, layer, of_experts, inputs, np.int32, out)
        summed = np.asarray(added)
    return device.memories.send(summed, "activations", "results of experts")


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
        numbers_there = [as_array(n) for n in (*group, *(-1,) * padding)]
        out = add(arrays, out, numbers_there, *routed)
    return out
