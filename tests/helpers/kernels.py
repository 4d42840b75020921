"""The implementations of `layers.kernels.Kernels` that tests compare."""

from __future__ import annotations

from flexgen_jax.cpu.backend import CPU_TUNING, CpuKernels
from flexgen_jax.layers.kernels import XlaKernels
from flexgen_jax.policy.hardware import KernelSizes

XLA = XlaKernels(KernelSizes())
"""XLA's own code as accelerators run it."""

XLA_ON_CPU = XlaKernels(KernelSizes(), CPU_TUNING)
"""XLA's own code as its CPU backend likes it."""

CPU = CpuKernels(KernelSizes())
"""Generated code, and XLA's own beside it."""
