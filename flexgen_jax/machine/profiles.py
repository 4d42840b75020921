"""This machine's hardware profile: from the cache, or measured."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from flexgen_jax.caches import cache_folder, read_cached, write_cached
from flexgen_jax.machine.limits import (
    detect_budgets,
    existing,
)
from flexgen_jax.machine.profiler import machine_key, measure, stages
from flexgen_jax.machine.start import start_jax
from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.loading import resolve_dtype
from flexgen_jax.policy.fit import Budgets
from flexgen_jax.policy.hardware import (
    PROFILE_VERSION,
    UNSTEADY,
    DiskReads,
    HardwareProfile,
)
from flexgen_jax.progress import Progress

RUNS_KEPT = 20
"""Number of runs whose disk rates are kept with a profile."""

TELLING_BYTES = 2e9
"""Least bytes of direct reads with which a run says something of the disk."""


def cached_profile(dtype: str, offload_dir: Path) -> HardwareProfile | None:
    """Returns the cached profile of this machine, these versions and this disk, corrected by what
    runs have seen of the disk; None if there is none."""
    path = _cache_file(dtype, offload_dir)
    profile = _measured(path)
    return profile.corrected(_seen(path)) if profile is not None else None


def _measured(path: Path) -> HardwareProfile | None:
    text = read_cached(path)
    return None if text is None else HardwareProfile.from_json(text)


def _seen(path: Path) -> list[float]:
    """Returns the disk's rates that runs have seen, relative to a cached profile's."""
    rates: list[float] = read_cached(_seen_file(path)) or []
    return rates[-RUNS_KEPT:]


def _seen_file(path: Path) -> Path:
    return path.with_suffix(".disk.json")


def record_disk_reads(
    dtype: str, offload_dir: Path, reads: Sequence[DiskReads], busy_s: float
) -> None:
    """Keeps how fast a run's direct reads were with the cached profile, if there is one, to correct
    later plans."""
    path = _cache_file(dtype, offload_dir)
    profile = _measured(path)
    if profile is not None and sum(read.nbytes for read in reads) >= TELLING_BYTES:
        rate = round(profile.disk_rate_seen(reads, busy_s), 3)
        write_cached(_seen_file(path), [*_seen(path), rate][-RUNS_KEPT:])


def measured_profile(
    dtype: str, offload_dir: Path, unified: bool, progress: Progress
) -> HardwareProfile:
    """Measures this machine, in one to three minutes.

    The profile is kept for later runs, unless the machine was too busy for reliable figures.
    """
    with progress.counting("measuring this machine", stages(dtype)) as tell:
        profile = measure(dtype, offload_dir, unified, tell)
    if profile.spread() > UNSTEADY:
        progress.say(
            f"flexgen-jax: this machine's speed varied by {100 * profile.spread():.0f} % while it "
            "was measured, so plans may be bad. This profile is not kept: later runs use one from "
            "before, or measure again, best with nothing else running"
        )
        return profile
    path = _cache_file(dtype, offload_dir)
    write_cached(path, profile.to_json())
    with suppress(OSError):
        _seen_file(path).unlink()  # what runs have seen was relative to the profile before
    return profile


def set_up(offload_dir: Path | None) -> tuple[bool, Path]:
    """Prepares for measuring; returns whether host and device are one RAM, and the folder of the
    disk tier."""
    return start_jax(), (offload_dir or cache_folder("offload")).expanduser()


def this_machine(
    config: ModelConfig,
    dtype: str,
    offload_dir: Path | None,
    limits: tuple[int | None, int | None, int | None],
    progress: Progress,
) -> tuple[str, HardwareProfile, Budgets]:
    """Returns the resolved dtype, this machine's profile, and its budgets within the given limits.

    The machine is measured if it never was. limits: bytes of device memory, host memory and disk.
    """
    unified, folder = set_up(offload_dir)
    kind = resolve_dtype(dtype, config, unified)
    profile = cached_profile(kind, folder) or measured_profile(kind, folder, unified, progress)
    return kind, profile, detect_budgets(*limits, folder, "", unified)


def _cache_file(dtype: str, offload_dir: Path) -> Path:
    disk = existing(offload_dir).stat().st_dev
    key = {**machine_key(dtype), "disk": disk, "profile": PROFILE_VERSION}
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder("profiles") / f"{digest}.json"
