"""Offloading for JAX programs of one's own: pytrees in tiers that are streamed to the device, trees
in few bits, and plans for machines. See docs/library.md."""

from __future__ import annotations

from flexgen_jax.layers.quantization import QuantizedArray
from flexgen_jax.offloading.params import TieredParams, checkpoint_layers
from flexgen_jax.offloading.planning import LayerPlan, plan_layers, profile
from flexgen_jax.offloading.quantized import (
    QuantizedKernel,
    dequantize_tree,
    matmul,
    quantize_tree,
)
from flexgen_jax.offloading.tiered import TieredArrays
from flexgen_jax.policy.hardware import HardwareProfile
from flexgen_jax.policy.policy import Placement

__all__ = [
    "HardwareProfile",
    "LayerPlan",
    "Placement",
    "QuantizedArray",
    "QuantizedKernel",
    "TieredArrays",
    "TieredParams",
    "checkpoint_layers",
    "dequantize_tree",
    "matmul",
    "plan_layers",
    "profile",
    "quantize_tree",
]
