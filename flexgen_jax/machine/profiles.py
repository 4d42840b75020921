"""This machine's hardware profile: from the cache, measured, or assumed from a few rates."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

from flexgen_jax.caches import cache_folder, read_cached, write_cached
from flexgen_jax.cpu import is_cpu
from flexgen_jax.machine.limits import (
    detect_budgets,
    existing,
)
from flexgen_jax.machine.profiler import machine_key, measure_in_child, stages
from flexgen_jax.machine.profiler import measure as measure_here
from flexgen_jax.machine.quick_probe import assumed_machine
from flexgen_jax.machine.start import start_jax
from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.loading import resolve_dtype
from flexgen_jax.policy.hardware import (
    NUM_DISK_RATES,
    PROFILE_VERSION,
    UNSTEADY,
    DiskReads,
    HardwareProfile,
)
from flexgen_jax.progress import Progress
from flexgen_jax.search.fit import Budgets

RUNS_KEPT = 20
"""Number of runs whose rates are kept with a profile."""

DISK, PRODUCTS = "disk", "products"
"""Rates that runs observe; also parts of file names."""

TELLING_BYTES = 2e9
"""Minimum bytes of direct reads for a run to count as a disk measurement."""


def cached_profile(dtype: str, offload_dir: Path) -> HardwareProfile | None:
    """Returns the measured profile of this machine, these versions and this disk, corrected by the
    disk rates of runs; None if there is none."""
    return _read(_cache_file(dtype, offload_dir))


def known_profile(dtype: str, offload_dir: Path) -> HardwareProfile | None:
    """Returns the measured profile, or else an assumed one of an earlier run; None if there is
    none."""
    path = _cache_file(dtype, offload_dir)
    return _read(path) or _read(_assumed(path))


def assumed_profile(
    dtype: str, offload_dir: Path, unified: bool, progress: Progress
) -> HardwareProfile:
    """Returns the known profile, or makes an assumed one in about five seconds, and says so."""
    profile = known_profile(dtype, offload_dir)
    if profile is None:
        profile = assumed_machine(dtype, offload_dir, unified)
        write_cached(_assumed(_cache_file(dtype, offload_dir)), profile.to_json())
    if profile.is_assumed:
        progress.say_once(f"flexgen-jax: planning for {profile.in_words}")
    return profile


def _read(path: Path) -> HardwareProfile | None:
    """Returns a cached profile, corrected by the rates of runs."""
    text = read_cached(path)
    if text is None:
        return None
    return HardwareProfile.from_json(text).corrected(_seen(path, DISK), _seen(path, PRODUCTS))


def _assumed(path: Path) -> Path:
    return path.with_suffix(".assumed.json")


def _seen(path: Path, name: str) -> list[float]:
    """Returns the rates that runs have seen, relative to a cached profile's."""
    rates: list[float] = read_cached(path.with_suffix(f".{name}.json")) or []
    return rates[-RUNS_KEPT:]


def _add_seen(path: Path, kind: str, rate: float) -> None:
    rates = [*_seen(path, kind), round(rate, 3)][-RUNS_KEPT:]
    write_cached(path.with_suffix(f".{kind}.json"), rates)


def record_disk_reads(
    dtype: str, offload_dir: Path, reads: Sequence[DiskReads], busy_s: float
) -> None:
    """Keeps how fast a run's direct reads were with the cached profile, if there is one, to correct
    later plans."""
    if sum(read.nbytes for read in reads) < TELLING_BYTES:
        return
    measured = _cache_file(dtype, offload_dir)
    for path in (measured, _assumed(measured)):
        text = read_cached(path)
        if text is not None:
            profile = HardwareProfile.from_json(text)
            _add_seen(path, DISK, profile.disk_rate_seen(reads, busy_s))
            return


def record_products(dtype: str, offload_dir: Path, speed: float) -> None:
    """Keeps how fast a run that was bound by computing was, relative to the assumed profile, to
    correct later plans."""
    path = _assumed(_cache_file(dtype, offload_dir))
    planned_with = median(_seen(path, PRODUCTS)[-NUM_DISK_RATES:] or [1.0])
    _add_seen(path, PRODUCTS, speed * planned_with)


def measured_profile(
    dtype: str, offload_dir: Path, unified: bool, progress: Progress
) -> HardwareProfile:
    """Measures this machine, in three to seven minutes.

    The profile is kept for later runs, unless the machine was too busy for reliable figures.
    """
    with progress.counting("measuring this machine", stages(dtype)) as tell:
        profile = measure(dtype, offload_dir, unified, tell)
    if profile.spread() > UNSTEADY:
        progress.say(
            f"flexgen-jax: this machine's speed varied by {100 * profile.spread():.0f} % during "
            "its measurement, so plans may be bad. This profile is not stored; later runs use an "
            "earlier or a generic one. Measure again, with nothing else running"
        )
        return profile
    path = _cache_file(dtype, offload_dir)
    write_cached(path, profile.to_json())
    with suppress(OSError):  # these rates were relative to the old profile
        path.with_suffix(f".{DISK}.json").unlink()
    return profile


def measure(
    dtype: str, offload_dir: Path, unified: bool, tell: Callable[[str], object]
) -> HardwareProfile:
    """Measures in a process of its own, or here where this process has the GPU."""
    run = measure_in_child if is_cpu() else measure_here
    return run(dtype, offload_dir, unified, tell)


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
    """Returns the resolved dtype, this machine's profile, assumed if it was never measured, and its
    budgets within the given limits.

    limits: bytes of device memory, host memory and disk.
    """
    unified, folder = set_up(offload_dir)
    resolved_dtype = resolve_dtype(dtype, config, unified)
    profile = assumed_profile(resolved_dtype, folder, unified, progress)
    return resolved_dtype, profile, detect_budgets(*limits, folder, "", unified)


def _cache_file(dtype: str, offload_dir: Path) -> Path:
    disk = existing(offload_dir).stat().st_dev
    key = {**machine_key(dtype), "disk": disk, "profile": PROFILE_VERSION}
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder("profiles") / f"{digest}.json"
