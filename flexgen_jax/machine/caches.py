"""Files that are kept between runs, in the user's cache folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import MutableMapping
from pathlib import Path

PROGRAMS_BYTES = 1 << 30
"""Limit of the compiled programs that are kept, in bytes."""

OTHERS_MAY_WRITE = 0o022


def cache_folder(name: str) -> Path:
    """Returns the folder of this package with a name in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "flexgen_jax" / name


def keep_programs(environment: MutableMapping[str, str]) -> None:
    """Makes JAX, if it is imported after this, keep compiled programs for later processes, unless
    the user has set a folder for them already.

    environment: of this process; JAX's own variables are set in it. Programs are machine code, so
    they are kept for this processor only, and only in a folder that is this user's and where nobody
    else may write. Without such a folder, each process compiles its own programs.
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


def _processor() -> str:
    """Returns a digest of the processor's model and features; JAX's own key does not tell
    processors apart."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    kind = {line for line in lines if line.startswith(("model", "stepping", "flags", "Features"))}
    return hashlib.sha256("\n".join(sorted(kind)).encode()).hexdigest()[:16]
