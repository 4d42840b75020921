"""Starts JAX with the settings that a run needs, which come too late once it is running."""

from __future__ import annotations

import os
from contextlib import suppress

from flexgen_jax.cpu import is_cpu
from flexgen_jax.machine.jax_settings import allow_pinned, jax_has_started, may_find_gpu
from flexgen_jax.machine.limits import free_ram
from flexgen_jax.offload.allocator import tune_allocator


def start_jax(host_memory: int | None = None) -> bool:
    """Starts JAX, unless it is running; returns whether the device on which it computes is a CPU.

    host_memory: bytes of the host tier, which must be pinned memory for a GPU; None is all that is
    free.
    """
    tune_allocator(may_find_gpu(os.environ))
    with suppress(ImportError):  # a JAX with other internals keeps programs without checksums
        from flexgen_jax.machine.program_cache import check_programs

        check_programs()
    allow_pinned(host_memory or free_ram(), os.environ, jax_has_started())
    return is_cpu()
