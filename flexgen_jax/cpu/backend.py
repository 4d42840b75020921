"""What the device's programs compute with."""

from __future__ import annotations

import jax

from flexgen_jax.cpu.attention import attend_inline, attend_prompt_inline
from flexgen_jax.cpu.matmul import dense_inline, int8_inline, logits_inline
from flexgen_jax.layers.kernels import BY_XLA, Kernels

INLINE = Kernels(attend_inline, attend_prompt_inline, dense_inline, int8_inline, logits_inline)


def kernels_of_device() -> Kernels:
    """Foreign functions where the device is a CPU."""
    return INLINE if jax.default_backend() == "cpu" else BY_XLA
