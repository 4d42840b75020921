"""What a device's programs compute the large parts of a layer with."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax

from flexgen_jax.layers.attention import KVPair, Partial, attend_blocks, attend_prompt
from flexgen_jax.layers.linear import rounded
from flexgen_jax.layers.quantization import Kept


class Kernels(NamedTuple):
    """These functions, or what takes and returns the same."""

    attend: Callable[..., Partial] = attend_blocks
    attend_prompt: Callable[..., tuple[jax.Array, KVPair]] = attend_prompt
    dense: Callable[[jax.Array, Kept, jax.Array | None], jax.Array] = rounded
    logits: Callable[..., jax.Array] = dense


BY_XLA = Kernels()
"""What any device can do."""
