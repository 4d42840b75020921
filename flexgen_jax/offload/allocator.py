"""Settings of the C library's allocator: tuned before JAX starts, trimmed during a run."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys


def tune_allocator(has_gpu: bool) -> None:
    """Lets XLA's temporaries on the CPU reuse memory instead of faulting in fresh pages.

    By default glibc gives large blocks back to the system at once, which makes attention in bf16
    much slower. With one arena, memory freed by one thread is usable by every thread, which saves
    much memory in offloaded runs. Where a GPU computes, threads keep arenas of their own and do not
    wait for each other. Call this before JAX starts its threads. Other C libraries are left alone.
    """
    if not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        trim_threshold, mmap_threshold, arena_max = -1, -3, -8
        if not has_gpu:
            libc.mallopt(arena_max, 1)
        libc.mallopt(mmap_threshold, 32 << 20)
        libc.mallopt(trim_threshold, 512 << 20)


def release_memory() -> None:
    """Returns unused memory to the system, after a garbage collection; the allocator would keep
    it."""
    gc.collect()
    trim_heap()


def trim_heap() -> None:
    """Returns the heap's free memory to the system, without a garbage collection."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
