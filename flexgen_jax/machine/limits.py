"""The memory and disk space that this machine has left."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import jax

from flexgen_jax.cpu import is_cpu
from flexgen_jax.errors import UserError
from flexgen_jax.machine.jax_settings import DEFAULT_GPU_SHARE, FRACTION, PINNED, pinned_bytes
from flexgen_jax.offload.disk.folder import OffloadError, remove_dead_runs
from flexgen_jax.search.fit import Budgets, human

SAFETY = 0.9
"""Fraction of the free memory that a plan may use; the allocator holds the rest unused."""

RUNTIME_BYTES = 250_000_000
"""Bytes of RAM that this process takes after its memory was detected, besides what a plan counts:
libraries that start, programs that are compiled, and pages of their files in use."""

_CGROUPS = (
    # (limit, usage, statistics, the statistics that count reclaimable memory)
    (
        *("memory.max", "memory.current", "memory.stat"),
        ("inactive_file", "active_file", "slab_reclaimable"),
    ),
    (
        *("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat"),
        ("total_inactive_file", "total_active_file"),
    ),
)
"""Page cache counts as free, also that of the pages of libraries: this process's own need is in
`RUNTIME_BYTES`."""


def available_memory() -> int:
    """Returns the bytes of RAM that can still be used, within the limits of the process's memory
    cgroups."""
    free = _meminfo("MemAvailable")
    for folder in _cgroup_folders():
        for limit_name, usage_name, stat_name, reclaimable in _CGROUPS:
            with contextlib.suppress(OSError, ValueError):
                limit = int((folder / limit_name).read_text())
                usage = int((folder / usage_name).read_text())
                stats = dict(line.split() for line in (folder / stat_name).read_text().splitlines())
                free = min(free, limit - usage + sum(int(stats.get(x, 0)) for x in reclaimable))
    return max(free, 0)


def storage_read_bytes() -> int | None:
    """Returns the bytes that the storage has read for this process so far, without page cache hits;
    None if the system does not tell."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/io").read_text().splitlines():
            if line.startswith("read_bytes:"):
                return int(line.split()[1])
    return None


def _meminfo(name: str) -> int:
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_folders() -> list[Path]:
    """Returns the folders of the process's memory cgroup and those above it, version 1 or 2."""
    folders: list[Path] = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "" or "memory" in controllers.split(","):
                root = Path("/sys/fs/cgroup") / ("memory" if controllers else "")
                inside = root / path.lstrip("/")
                folders += [inside, *(p for p in inside.parents if p.is_relative_to(root))]
    return folders


def detect_budgets(
    device_memory: int | None,
    host_memory: int | None,
    disk_space: int | None,
    offload_dir: Path,
    fingerprint: str,
    unified: bool,
    say: Callable[[str], object] = lambda _: None,
) -> Budgets:
    """Returns the budgets: the requested budgets, and the machine's memory where none is requested.

    fingerprint: of the weights; the bytes that an earlier run stored of them count as free disk
    space; say: called with the name of the host budget's limit, unless it is the RAM. Runs that
    were killed are removed from the offload folder first. Raises `UserError` if a request exceeds
    the machine's memory. RAM that device and host share is an exception; its limit is stored with
    the budgets.
    """
    remove_dead_runs(offload_dir)
    ram = free_ram()
    free = _free_disk(offload_dir, fingerprint)
    if not free:
        try:
            check_folder(offload_dir)
        except OffloadError as error:
            say(f"flexgen-jax: {error}")
    return Budgets(
        device=_device_budget(device_memory, ram, unified),
        host=_host_budget(host_memory, ram, unified, say),
        disk=free if disk_space is None else min(disk_space, free),
        shared=ram if unified else None,
    )


def check_folder(offload_dir: Path) -> None:
    """Raises `OffloadError` if the offload folder is not there and cannot be made."""
    try:
        offload_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OffloadError(
            f"the offload folder {offload_dir} cannot be created ({error.strerror or error}), so "
            "nothing can be offloaded to disk; choose another one with --offload-dir"
        ) from None


def free_ram() -> int:
    """Returns the bytes of RAM that plans may use."""
    return max(0, int(SAFETY * available_memory()) - RUNTIME_BYTES)


def _device_budget(budget: int | None, ram: int, unified: bool) -> int:
    stats = None if unified else jax.local_devices()[0].memory_stats()
    most = stats["bytes_limit"] if stats else None
    if budget is None:
        return ram if most is None else int(SAFETY * most)
    if most is not None and budget > most:
        raise UserError(
            f"--device-memory {human(budget)} exceeds JAX's share of this GPU, {human(most)}; "
            f"use less, or raise {FRACTION} to at most {DEFAULT_GPU_SHARE} before JAX starts"
        )
    return budget


def _host_budget(budget: int | None, ram: int, unified: bool, say: Callable[[str], object]) -> int:
    if unified:
        return ram if budget is None else budget
    installed = _meminfo("MemTotal")
    if budget is not None and budget > installed:
        raise UserError(
            f"--host-memory {human(budget)} exceeds this machine's RAM of {human(installed)}; "
            "use less, or remove the flag"
        )
    wanted = ram if budget is None else budget
    most = wanted if is_cpu() else pinned_bytes(os.environ)
    if wanted <= most:
        return wanted
    limit = f"{human(most)}, for which {PINNED} leaves room; set it before JAX starts"
    if budget is not None:
        raise UserError(f"--host-memory {human(budget)} is more than {limit}, or ask for less")
    say(f"flexgen-jax: of {human(ram)} of free RAM, the host tier has only {limit}")
    return most


def existing(folder: Path) -> Path:
    """Returns the folder, or the nearest parent that exists, which is on the same disk."""
    return next(p for p in (folder, *folder.absolute().parents) if os.path.exists(p))


def _free_disk(offload_dir: Path, fingerprint: str) -> int:
    free = shutil.disk_usage(existing(offload_dir)).free
    for base, _, names in os.walk(offload_dir / "weights" / fingerprint):
        for name in names:
            with contextlib.suppress(OSError):  # another process may be renaming it
                free += os.stat(os.path.join(base, name)).st_size
    return free
