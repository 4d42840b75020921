"""Compute kernels for an NVIDIA GPU, in Pallas. Other packages use only the names imported here."""

from flexgen_jax.gpu.backend import DeviceKernels, GpuKernels, kernels_of_gpu

__all__ = ["DeviceKernels", "GpuKernels", "kernels_of_gpu"]
