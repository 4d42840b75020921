"""Compute kernels for the CPU: attention and matrix products. Other packages use only the names
imported here."""

from flexgen_jax.cpu.backend import (
    CpuKernels,
    cpu_device,
    is_cpu,
    kernels_of_cpu,
    kernels_of_device,
)
from flexgen_jax.cpu.host_attention import Candidates, HostAttention, HostBlock
from flexgen_jax.cpu.matmul import multiplies
from flexgen_jax.cpu.processor import Features, core_count, features

__all__ = [
    "Candidates",
    "CpuKernels",
    "Features",
    "HostAttention",
    "HostBlock",
    "core_count",
    "cpu_device",
    "features",
    "is_cpu",
    "kernels_of_cpu",
    "kernels_of_device",
    "multiplies",
]
