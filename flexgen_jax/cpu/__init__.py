"""Kernels for processors. What is imported here is all that other rooms use of this one."""

from flexgen_jax.cpu.backend import CpuKernels, kernels_of_device
from flexgen_jax.cpu.features import Features, features
from flexgen_jax.cpu.host_attention import Candidates, HostAttention, HostBlock

__all__ = [
    "Candidates",
    "CpuKernels",
    "Features",
    "HostAttention",
    "HostBlock",
    "features",
    "kernels_of_device",
]
