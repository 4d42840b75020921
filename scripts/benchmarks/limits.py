"""Runs a command under a memory limit that counts the page cache, with a cold cache. Needs root."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Outcome:
    """The outcome of a command. returncode is None if it ran out of time, peak_bytes if it had no
    cgroup; is_cold: whether the page cache was empty when it began."""

    returncode: int | None
    seconds: float
    peak_bytes: int | None
    output: str
    is_cold: bool = False


@contextmanager
def memory_cgroup(limit: int) -> Iterator[Path]:
    """Makes a fresh memory cgroup, version 1 or 2, of `limit` bytes, and removes it afterwards."""
    is_v1 = (_V1 / "memory.limit_in_bytes").exists()
    group = (_V1 if is_v1 else _V2) / f"flexgen-{uuid.uuid4().hex[:8]}"
    group.mkdir()
    try:
        (group / ("memory.limit_in_bytes" if is_v1 else "memory.max")).write_text(str(limit))
        yield group
    finally:
        for _ in range(50):
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)


@contextmanager
def inside(limit: int | None) -> Iterator[None]:
    """Holds this process to a memory cgroup, if there is a limit."""
    if limit is None:
        yield
        return
    with memory_cgroup(limit) as group:
        (group / "cgroup.procs").write_text(str(os.getpid()))
        try:
            yield
        finally:
            (group.parent / "cgroup.procs").write_text(str(os.getpid()))


def drop_page_cache() -> bool:
    """Empties the page cache; returns whether that was allowed: it takes root, and containers often
    have the kernel's settings read-only."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


def entering(group: Path) -> list[str]:
    """Returns the beginning of a command that runs in a cgroup."""
    return ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$0" "$@"']


def run_limited(
    command: Sequence[str],
    limit: int | None,
    timeout: float,
    settings: Mapping[str, str | None] | None = None,
) -> Outcome:
    """Runs `command` in its own cgroup of `limit` bytes, or without a limit, after dropping the
    page cache; settings: environment variables for it, None to take one away."""
    is_cold = drop_page_cache()
    merged = {**os.environ, **(settings or {})}
    environment = {name: value for name, value in merged.items() if value is not None}
    if limit is None:
        outcome = _run([], command, timeout, None, environment)
    else:
        with memory_cgroup(limit) as group:
            outcome = _run(entering(group), command, timeout, group, environment)
    return replace(outcome, is_cold=is_cold)


def _run(
    enter: Sequence[str],
    command: Sequence[str],
    timeout: float,
    group: Path | None,
    environment: Mapping[str, str],
) -> Outcome:
    started = time.perf_counter()
    process = subprocess.Popen(
        [*enter, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=environment,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
        returncode: int | None = process.returncode
    except subprocess.TimeoutExpired:
        _kill(process)
        output, _ = process.communicate()
        returncode = None
    finally:
        _kill(process)
    seconds = time.perf_counter() - started
    return Outcome(returncode, seconds, _peak(group), output or "")


def _kill(process: subprocess.Popen[str]) -> None:
    """Kills the process and those that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _peak(group: Path | None) -> int | None:
    """Returns the most memory that a cgroup's processes have had, in bytes, page cache included."""
    if group is None:
        return None
    peak = group / "memory.max_usage_in_bytes"
    peak = peak if peak.exists() else group / "memory.peak"
    return int(peak.read_text())
