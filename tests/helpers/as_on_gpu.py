"""Lets the tests run as on a GPU, as far as a CPU can: host and device are two memories, data is
copied between them, and kernels are XLA's own, with a GPU's sizes."""

from __future__ import annotations

import os

ASKED = "FLEXGEN_TEST_AS_ON_GPU"
"""The environment variable that asks for it; any text does."""


def is_asked() -> bool:
    return bool(os.environ.get(ASKED))


def pretend() -> None:
    """Changes the defaults of `LLM`; called before the rooms that use them are imported."""
    from flexgen_jax import cpu
    from flexgen_jax.engine.options import EngineOptions
    from flexgen_jax.gpu import DeviceKernels
    from flexgen_jax.policy.hardware import KernelSizes

    kernels, real = DeviceKernels(KernelSizes.of_gpu()), EngineOptions.__post_init__
    cpu.kernels_of_device = lambda: kernels

    def check(options: EngineOptions) -> None:
        real(options)
        if options.unified is None:
            object.__setattr__(options, "unified", False)

    EngineOptions.__post_init__ = check  # type: ignore[method-assign]


def has_gpu() -> bool:
    import jax

    return bool(jax.devices()[0].platform != "cpu")
