"""What a device's programs compute the large parts of a layer with."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax

from flexgen_jax.layers.attention import KVPair, Partial, attend_blocks, attend_prompt
from flexgen_jax.layers.int8_products import rounded_int8
from flexgen_jax.layers.linear import rounded
from flexgen_jax.layers.quantization import Kept

Dense = Callable[[jax.Array, Kept, jax.Array | None], jax.Array]


class Kernels(NamedTuple):
    """These functions, or what takes and returns the same."""

    attend: Callable[..., Partial] = attend_blocks
    attend_prompt: Callable[..., tuple[jax.Array, KVPair]] = attend_prompt
    dense: Dense = rounded
    dense_int8: Dense = rounded_int8
    logits: Callable[..., jax.Array] = dense

    def multiplying(self, bits: int) -> Kernels:
        """With products of so many bits in the place of 16."""
        return self if bits == 16 else self._replace(dense=self.dense_int8)


BY_XLA = Kernels()
"""What any device can do."""
