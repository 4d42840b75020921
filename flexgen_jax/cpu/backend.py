"""Chooses the compute kernels of a device's programs, where the device may be a CPU."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from flexgen_jax.cpu import attention, delta, low_rank, matmul
from flexgen_jax.cpu.processor import features
from flexgen_jax.gpu import DeviceKernels, kernels_of_gpu
from flexgen_jax.layers.attention import KVPair, Partial
from flexgen_jax.layers.delta_rule import Sides
from flexgen_jax.layers.quantization import Kept
from flexgen_jax.layers.tuning import Tuning
from flexgen_jax.models.parts import AttentionSpec
from flexgen_jax.models.tensor_spec import Formats
from flexgen_jax.policy.hardware import KernelSizes

CPU_TUNING = Tuning(
    lanes=8,
    kernel_first_rows=matmul.FEW_ROWS,
    doubles_lone_row=True,
    has_barriers=True,
    turns_heads=True,
)
"""Settings for XLA's CPU backend: it adds one element after the other, copies a product's right
operand, is slow with a lone 16-bit row and with kernels whose inputs are not last, and unpacks
inside loops."""


@dataclass(frozen=True)
class CpuKernels(DeviceKernels):
    """Compute kernels generated for this processor; XLA's own are used where these are no faster or
    do not exist. See `layers.kernels.Kernels`."""

    tuning: Tuning = CPU_TUNING

    @property
    def in_words(self) -> str:
        return f"cpu ({features()})"

    def decode_attention(
        self,
        query: jax.Array,
        blocks: tuple[tuple[Kept, Kept], ...],
        starts: jax.Array,
        position: jax.Array,
        first_valid: jax.Array,
        spec: AttentionSpec,
    ) -> Partial:
        args = (query, blocks, starts, position, first_valid, spec)
        attended = attention.decode_attention(*args)
        return super().decode_attention(*args) if attended is None else attended

    def prefill_attention(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        first_valid: jax.Array,
        spec: AttentionSpec,
    ) -> tuple[jax.Array, KVPair]:
        args = (query, key, value, first_valid, spec)
        attended = attention.prefill_attention(*args)
        return super().prefill_attention(*args) if attended is None else attended

    def chunk_attention(
        self,
        query: jax.Array,
        key: Kept,
        value: Kept,
        first_valid: jax.Array,
        lead: jax.Array,
        spec: AttentionSpec,
    ) -> Partial:
        args = (query, key, value, first_valid, lead, spec)
        attended = attention.chunk_attention(*args)
        return super().chunk_attention(*args) if attended is None else attended

    def matmul(
        self, x: jax.Array, kernel: Kept, bias: jax.Array | None, bits: int = 16
    ) -> jax.Array:
        bits = bits if matmul.gains_by_rounding(x, kernel) else 16
        if bits == 8:
            product = matmul.matmul_int8(x, kernel, bias)
        else:
            product = matmul.matmul(x, kernel, bias, x.dtype)
        return super().matmul(x, kernel, bias, bits) if product is None else product

    def add_low_rank(
        self,
        out: jax.Array,
        x: jax.Array,
        a: jax.Array,
        b: jax.Array,
        adapters: jax.Array | None,
    ) -> jax.Array:
        args = (out, x, a, b, adapters)
        added = low_rank.add_low_rank(*args)
        return super().add_low_rank(*args) if added is None else added

    def logits(self, x: jax.Array, table: Kept) -> jax.Array:
        product = matmul.matmul(x, table, None, jnp.float32)
        return super().logits(x, table) if product is None else product

    def delta_step(self, sides: Sides, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        made = delta.delta_step(sides, state)
        return super().delta_step(sides, state) if made is None else made

    def compiler_options(
        self, formats: Formats, is_lone: bool = False
    ) -> dict[str, str | bool] | None:
        """Returns XLA's options for a program: vectors of the processor's full width; where weights
        are unpacked, the order that needs the least memory, since by default XLA unpacks all of a
        layer first; for a lone row in fp32, XLA's own products, which read weights faster than the
        library's (YNNPACK)."""
        options: dict[str, str | bool] = {"xla_cpu_prefer_vector_width": "512"}
        if (formats.weight_bits, formats.cache_bits, formats.matmul_bits) != (16, 16, 16):
            options["xla_cpu_scheduler_type"] = "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"
        if is_lone and (formats.dtype, formats.weight_bits) == ("float32", 16):
            options["xla_cpu_experimental_ynn_fusion_type"] = ""
        return options


def is_cpu() -> bool:
    """Returns whether the device on which JAX computes is a CPU."""
    return bool(jax.devices()[0].platform == "cpu")


def cpu_device() -> jax.Device | None:
    """Returns the CPU as JAX's device; None if JAX was started without it."""
    try:
        device: jax.Device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None
    return device


def kernels_of_device() -> DeviceKernels:
    """Returns the kernels for the device on which JAX computes."""
    return kernels_of_cpu() if is_cpu() else kernels_of_gpu(jax.devices()[0])


def kernels_of_cpu() -> DeviceKernels:
    """Returns the CPU's kernels, whatever the device is."""
    return CpuKernels(KernelSizes())
