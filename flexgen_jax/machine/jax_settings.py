"""Settings that JAX reads when it starts: where it keeps compiled programs, and how much of a GPU's
memory and of pinned host memory it may take."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping, MutableMapping
from importlib.util import find_spec
from math import ceil
from pathlib import Path

from flexgen_jax.caches import cache_folder
from flexgen_jax.errors import UserError

PROGRAMS_BYTES = 1 << 30
"""Limit of the compiled programs that are kept, in bytes."""

OTHERS_MAY_WRITE = 0o022

FRACTION, OLD_FRACTION = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
"""The share of a GPU's memory that JAX takes, and the variable's deprecated name; both together are
an error."""

DEFAULT_GPU_SHARE = "0.95"
"""JAX's default share of a GPU here; its own default is three quarters. The
rest is for the CUDA context and libraries."""

PINNED = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""The variable that limits pinned host memory, in GiB."""

PREALLOCATE = "XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE"
"""The variable that makes JAX pin the whole limit when it starts."""

PINNED_DEFAULT, PREALLOCATED_DEFAULT = 64, 16
"""The limit's defaults without and with `PREALLOCATE`, in GiB."""

GPU_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin", "jax_rocm60_plugin", "jax_rocm7_plugin")
"""Packages that let JAX use a GPU."""

GPU_DRIVERS = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""Files of the drivers of GPUs: NVIDIA's, Windows' for its Linux subsystem, and AMD's."""

STAGING_BYTES = 2 << 30
"""Pinned bytes through which XLA copies from memory that is not pinned."""

POOL_ROOM = 1 / 8
"""Share of the pool that is lost in the ends of its regions, relative to the memory in use. Regions
double in size, so there are few."""


def set_up_jax(environment: MutableMapping[str, str] | None = None) -> None:
    """Makes JAX keep compiled programs for later processes and use most of a GPU's memory.

    Call this before anything is computed with JAX, best before it is imported. The user's settings
    are kept. environment: of this process by default; JAX's own variables are set in it.
    """
    environment = os.environ if environment is None else environment
    keep_programs(environment)
    if FRACTION not in environment and OLD_FRACTION not in environment:
        environment[FRACTION] = DEFAULT_GPU_SHARE


def keep_programs(environment: MutableMapping[str, str]) -> None:
    """Makes JAX keep compiled programs for later processes, unless the user has set a folder for
    them already.

    Programs are machine code, so they are kept for this processor only, and only in a folder that
    is this user's and where nobody else may write. Without such a folder, each process compiles its
    own programs.
    """
    if "JAX_COMPILATION_CACHE_DIR" in environment:
        return
    folder = cache_folder("programs") / _processor()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder.stat()
    except OSError:
        return
    if state.st_uid != os.getuid() or state.st_mode & OTHERS_MAY_WRITE:
        return
    environment["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    environment.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    environment.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(PROGRAMS_BYTES))
    if "jax" in sys.modules and environment is os.environ:  # it has read its variables already
        config = sys.modules["jax"].config
        config.update("jax_compilation_cache_dir", str(folder))
        seconds = float(environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"])
        config.update("jax_persistent_cache_min_compile_time_secs", seconds)
        limit = int(environment["JAX_COMPILATION_CACHE_MAX_SIZE"])
        config.update("jax_compilation_cache_max_size", limit)


def _processor() -> str:
    """Returns a digest of the processor's model and features; JAX's own key does not tell
    processors apart."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    identity_lines = {
        line for line in lines if line.startswith(("model", "stepping", "flags", "Features"))
    }
    return hashlib.sha256("\n".join(sorted(identity_lines)).encode()).hexdigest()[:16]


def allow_pinned(nbytes: int, environment: MutableMapping[str, str], has_started: bool) -> None:
    """Sets JAX's limit of pinned host memory for a host tier of `nbytes` bytes. Does nothing if the
    user has set the limit, if it is pinned at the start, or if JAX has already read it.

    has_started: whether a JAX backend is running; see `jax_has_started`.
    """
    if not has_started and PINNED not in environment and not _preallocates(environment):
        pool = nbytes * (1 + POOL_ROOM) + STAGING_BYTES
        environment[PINNED] = str(ceil(pool / (1 << 30)))


def pinned_bytes(environment: Mapping[str, str]) -> int:
    """Returns the bytes of a host tier that JAX's limit of pinned memory leaves room for."""
    default = PREALLOCATED_DEFAULT if _preallocates(environment) else PINNED_DEFAULT
    limit_text = environment.get(PINNED, str(default))
    if not limit_text.strip().isdecimal():
        raise UserError(
            f"{PINNED}={limit_text!r} must be an integer number of GiB; change or unset it"
        )
    limit = int(limit_text) << 30
    return max(0, int((limit - STAGING_BYTES) / (1 + POOL_ROOM)))


def _preallocates(environment: Mapping[str, str]) -> bool:
    return environment.get(PREALLOCATE, "").lower() in ("1", "true")


def may_find_gpu(environment: Mapping[str, str]) -> bool:
    """Returns whether JAX is likely to find a GPU: its plugin is installed and not excluded, and
    there is a driver."""
    if environment.get("JAX_PLATFORMS") == "cpu" or not any(map(os.path.exists, GPU_DRIVERS)):
        return False
    return any(find_spec(name) is not None for name in GPU_PLUGINS)


def jax_has_started() -> bool:
    """Returns whether JAX has started a backend, so that settings come too late."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bridge is not None and bool(bridge.backends_are_initialized())
