"""Measures the disk, with arrays that are written first and read again and again."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median, quantiles

import numpy as np

from flexgen_jax.machine.compute_probe import Sample, rate_of, timed
from flexgen_jax.offload.disk.folder import DiskArray, OffloadFolder
from flexgen_jax.offload.metrics import Metrics
from flexgen_jax.offload.tiers import Memories, writable_view
from flexgen_jax.offload.watcher import Watcher
from flexgen_jax.policy.hardware import Rate

MB = 1 << 20
DISK_SIZES = ((MB // 8, 64 * MB), (1 * MB, 128 * MB), (8 * MB, 3072 * MB))
"""Sizes in bytes of one array, and of all arrays written and read.

KV blocks of few tokens are small. The total is large because a virtual disk serves small amounts
from its host's memory, faster than the disk.
"""

ROOMY = 4
"""If the free disk space is below this multiple of the total, only a twelfth of the total is
used."""

NUM_PASS_PARTS = 3
"""A pass over the large arrays has this number of parts, one at a time: recently read data is not
read again."""

STEADY, PASSES = 0.1, 24
"""The disk is steady once its last `NUM_PASS_PARTS` passes differ by at most this share. After
`PASSES` passes its rate is accepted anyway."""


@dataclass
class _Files:
    """Arrays of one size, and the rates of their direct reads in byte/s, in the order of time."""

    size: int
    arrays: list[DiskArray]
    written: Sample
    rates: list[float] = field(default_factory=list)

    @property
    def nbytes(self) -> float:
        return float(self.size * len(self.arrays))


class DiskProbe:
    """A disk with arrays to read.

    disk_sizes: as `DISK_SIZES`; syncs: whether all that is written is on the disk first.

    Freshly written data may come from a cache, and the disk may still be writing it. So `read` is
    called now and then while the rest of the machine is measured.
    """

    def __init__(
        self,
        offload_dir: Path,
        disk_sizes: Sequence[tuple[int, int]] = DISK_SIZES,
        syncs: bool = True,
    ) -> None:
        self._folder = OffloadFolder(offload_dir)
        self._passes = 0
        self._buffer = host_memory((disk_sizes[-1][0] // 2,))
        self._buffer[:] = np.random.default_rng(0).integers(0, 65535, self._buffer.shape, np.uint16)
        try:
            self._files = [self._write(offload_dir, *sizes) for sizes in disk_sizes]
            if syncs:
                os.sync()
        except BaseException:
            self.close()
            raise

    def _write(self, offload_dir: Path, size: int, total: int) -> _Files:
        is_tight = shutil.disk_usage(offload_dir).free < ROOMY * total
        count = total // size // (12 if is_tight else 1)
        shape = (size // 2,)
        arrays = [
            self._folder.scratch_array(f"profile-{size}-{i}", shape, shape, np.dtype(np.uint16))
            for i in range(count)
        ]
        started = time.perf_counter()
        futures = [array.write(self._buffer[: size // 2]) for array in arrays]
        for future in futures:
            future.result()
        return _Files(size, arrays, Sample(time.perf_counter() - started, 0.0))

    def read(self) -> None:
        """Makes a pass of reads; of the large arrays, over a part that was not read just before."""
        for files in self._files:
            num_parts = NUM_PASS_PARTS if files is self._files[-1] else 1
            part_arrays = files.arrays[self._passes % num_parts :: num_parts]
            started = time.perf_counter()
            read_all(part_arrays, self._buffer[: files.size // 2])
            files.rates.append(files.size * len(part_arrays) / (time.perf_counter() - started))
        self._passes += 1

    def settle(self) -> None:
        """Reads until the rate is steady, or for `PASSES` passes."""
        while self._passes < PASSES and not self._is_steady():
            self.read()

    def _is_steady(self) -> bool:
        last = self._files[-1].rates[-NUM_PASS_PARTS:]
        return len(last) == NUM_PASS_PARTS and max(last) <= (1 + STEADY) * min(last)

    def reads(self) -> Rate:
        """The rate of direct reads: of each size the median pass."""
        points = []
        # Small arrays may be few enough to come from the memory of a virtual disk's host.
        limit = median(self._files[-1].rates)
        for files in self._files:
            lower_quartile, _, upper_quartile = (
                quantiles(files.rates, n=4) if len(files.rates) > 1 else (1, 1, 1)
            )
            rate = min(median(files.rates), limit)
            spread = (upper_quartile - lower_quartile) / median(files.rates)
            points.append((float(files.size), files.nbytes, Sample(files.nbytes / rate, spread)))
        return rate_of(points)

    def range(self) -> tuple[float, float]:
        """The slowest and the fastest pass over the large arrays, relative to the median."""
        rates = self._files[-1].rates
        return min(rates) / median(rates), max(rates) / median(rates)

    def writes(self) -> Rate:
        return rate_of([(float(f.size), f.nbytes, f.written) for f in self._files])

    def cached_reads(self) -> Rate:
        """The rate of reads from the page cache."""
        points = []
        for files in self._files:
            warm = [
                replace(array, direct=False) for array in files.arrays[: 128 * MB // files.size]
            ]
            read = partial(read_all, warm, self._buffer[: files.size // 2])
            points.append((float(files.size), float(files.size * len(warm)), timed(read, 5)))
        return rate_of(points)

    def reader(self, page_cached: bool) -> Callable[[], object]:
        """Returns a function that reads four large arrays, from the disk or from the page cache."""
        arrays = [replace(array, direct=not page_cached and array.direct) for array in self._large]
        return partial(read_all, arrays, self._buffer)

    @property
    def _large(self) -> list[DiskArray]:
        return self._files[-1].arrays[:4]

    def close(self) -> None:
        self._folder.clear_scratch()
        self._folder.close()


def host_memory(shape: tuple[int, ...]) -> np.ndarray:
    """Returns host memory of 16-bit numbers as a run reads it from disk."""
    return writable_view(Memories(Watcher(Metrics())).host_array(shape, np.dtype(np.uint16)))


def read_all(arrays: list[DiskArray], out: np.ndarray) -> None:
    futures = [array.read_into(out) for array in arrays]
    for future in futures:
        future.result()
