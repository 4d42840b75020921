"""Chooses the compute kernels of a GPU's programs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import jax
import jax.numpy as jnp

from flexgen_jax.errors import UserError
from flexgen_jax.gpu import (
    decode_attention,
    head_product,
    lone_norm,
    packed_product,
    packed_tiles,
    prompt_attention,
)
from flexgen_jax.gpu.triton import MIN_CAPABILITY
from flexgen_jax.layers.attention import KVPair, Partial
from flexgen_jax.layers.kernels import XlaKernels
from flexgen_jax.layers.quantization import Kept, QuantizedArray
from flexgen_jax.layers.tuning import Tuning
from flexgen_jax.models.parts import AttentionSpec, NormSpec
from flexgen_jax.models.tensor_spec import Formats
from flexgen_jax.policy.hardware import KernelSizes

KERNELS_VARIABLE = "FLEXGEN_JAX_GPU_KERNELS"
"""The variable that leaves a GPU's products and attention to XLA."""

SMALL_MEMORY_CAPABILITIES = {(8, 6), (8, 9), (12, 0), (12, 1)}
"""Compute capabilities with 99 KB of shared memory for a block, where others have 163 or more:
those of GeForce cards, of an A10, an L4 and an RTX 6000."""

ADDED_ROWS = 8
"""Rows that XLA's sums multiply by packed weights in one kernel."""

GPU_TUNING = Tuning(orders_parts=True)
WITHOUT_TRITON = Tuning(
    orders_parts=True, doubles_lone_row=True, keeps_cache_narrow=True, added_rows=ADDED_ROWS
)
"""Settings for GPUs, and for GPUs without Triton support in XLA: the product of a lone
row would widen the whole kernel to fp32 first or unpack it in memory, and grouped attention would
widen the cache."""


@dataclass(frozen=True)
class DeviceKernels(XlaKernels):
    """XLA's own code, with sizes that a plan can count with."""

    sizes: KernelSizes
    tuning: Tuning = GPU_TUNING

    @property
    def in_words(self) -> str:
        """Who makes the compute kernels, as the report of a run says."""
        return "xla"

    def compiler_options(
        self, formats: Formats, is_lone: bool = False
    ) -> dict[str, str | bool] | None:
        """Returns XLA's options for a program: matmuls with a common operand are not merged,
        because XLA would copy all of their kernels in every step."""
        return {"xla_gpu_dot_merger_threshold_mb": "0"}


@dataclass(frozen=True)
class GpuKernels(DeviceKernels):
    """Kernels that Triton compiles, where XLA's own code moves more bytes or takes more launches;
    see `layers.kernels.Kernels`.

    has_large_tiles: whether a multiprocessor has the shared memory for tiles of more than 99 KB;
    interprets: whether JAX interprets the kernels, which is how they run without a GPU.
    """

    has_large_tiles: bool = True
    interprets: bool = False

    @property
    def in_words(self) -> str:
        return "triton"

    def decode_attention(
        self,
        query: jax.Array,
        blocks: tuple[tuple[Kept, Kept], ...],
        starts: jax.Array,
        position: jax.Array,
        first_valid: jax.Array,
        spec: AttentionSpec,
    ) -> Partial:
        if not decode_attention.can_attend(query, blocks):
            return super().decode_attention(query, blocks, starts, position, first_valid, spec)
        return decode_attention.attend(
            query=query,
            blocks=blocks,
            starts=starts,
            position=position,
            first_valid=first_valid,
            softcap=spec.softcap,
            has_large_tiles=self.has_large_tiles,
            interprets=self.interprets,
        )

    def prefill_attention(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        first_valid: jax.Array,
        spec: AttentionSpec,
    ) -> tuple[jax.Array, KVPair]:
        if not prompt_attention.can_attend(query, key, value):
            return super().prefill_attention(query, key, value, first_valid, spec)
        key, value = key.swapaxes(1, 2), value.swapaxes(1, 2)
        out, _ = prompt_attention.attend(
            query=query,
            key=key,
            value=value,
            first_valid=first_valid,
            lead=0,
            window=spec.window,
            softcap=spec.softcap,
            is_token_first=True,
            dtype=value.dtype,
            interprets=self.interprets,
        )
        return out, (key, value)

    def chunk_attention(
        self,
        query: jax.Array,
        key: Kept,
        value: Kept,
        first_valid: jax.Array,
        lead: jax.Array,
        spec: AttentionSpec,
    ) -> Partial:
        if not prompt_attention.can_attend(query, key, value):
            return super().chunk_attention(query, key, value, first_valid, lead, spec)
        return prompt_attention.attend(
            query=query,
            key=cast(jax.Array, key),
            value=cast(jax.Array, value),
            first_valid=first_valid,
            lead=lead,
            window=spec.window,
            softcap=spec.softcap,
            interprets=self.interprets,
        )

    def matmul(
        self, x: jax.Array, kernel: Kept, bias: jax.Array | None, bits: int = 16
    ) -> jax.Array:
        out = None if bits == 8 else self._product(x, kernel)
        if out is None:
            return super().matmul(x, kernel, bias, bits)
        if bias is not None:
            out = out + bias.astype(jnp.float32)
        return out.astype(x.dtype)

    def matmul_by_heads(
        self, x: jax.Array, kernel: Kept, features: tuple[int, int], is_inverse: bool
    ) -> jax.Array:
        if not head_product.can_multiply(x, kernel, features):
            return super().matmul_by_heads(x, kernel, features, is_inverse)
        return head_product.multiply(x, kernel, features, is_inverse, self.interprets)

    def logits(self, x: jax.Array, table: Kept) -> jax.Array:
        out = self._product(x, table)
        return super().logits(x, table) if out is None else out

    def normalize(
        self, x: jax.Array, spec: NormSpec, scale: jax.Array | None, bias: jax.Array | None
    ) -> jax.Array:
        if not lone_norm.can_normalize(x):
            return super().normalize(x, spec, scale, bias)
        return lone_norm.normalize(x, spec, scale, bias, self.interprets)

    def _product(self, x: jax.Array, kernel: Kept) -> jax.Array | None:
        """Returns `x @ kernel.T`, fp32 [..., out], of few rows; None if XLA's code is to do it."""
        if not isinstance(kernel, QuantizedArray):
            return None
        rows = x.reshape(-1, x.shape[-1])
        for product in (packed_product, packed_tiles):
            if product.can_multiply(rows, kernel):
                out: jax.Array = product.multiply(rows, kernel, self.interprets)
                return out.reshape(*x.shape[:-1], -1)
        return None


def kernels_of_gpu(
    device: jax.Device, environment: Mapping[str, str] | None = None
) -> DeviceKernels:
    """Returns the kernels for a GPU: Triton's where it compiles for the GPU, unless the variable
    `KERNELS_VARIABLE` says "xla"; else XLA's own. environment: of this process by default.

    Raises `UserError` if the variable says anything else.
    """
    environment = os.environ if environment is None else environment
    choice = environment.get(KERNELS_VARIABLE, "")
    if choice not in ("", "xla"):
        raise UserError(f"{KERNELS_VARIABLE}={choice!r}: set it to xla for XLA's code, or unset it")
    sizes, capability = KernelSizes.of_gpu(), str(getattr(device, "compute_capability", ""))
    is_nvidia = device.device_kind.startswith(("NVIDIA", "Tesla", "GeForce", "Quadro"))
    numbers = tuple(int(part) for part in capability.split(".") if part.isdecimal())
    if not is_nvidia or numbers < MIN_CAPABILITY:
        return DeviceKernels(sizes, WITHOUT_TRITON)
    has_large_tiles = numbers not in SMALL_MEMORY_CAPABILITIES
    return DeviceKernels(sizes) if choice else GpuKernels(sizes, GPU_TUNING, has_large_tiles)
