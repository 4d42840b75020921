"""Measures how fast a disk reads existing files, past the page cache.

A profile reads data that it has just written. A virtual disk has some of that in its host's memory,
and how much and how fast changes within minutes. So a benchmark's bound takes the rate at which a
run's weights are read right before or after the run.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from flexgen_jax.offload.disk.direct_reads import Piece, ReadQueue, whole_pages
from flexgen_jax.offload.disk.folder import CHUNK_BYTES, READS_AT_ONCE

SMALLEST = 1 << 20
"""The least size in bytes of the files that are read: large enough for the disk's full speed."""

MOST_BYTES = 3 << 30
ENOUGH_S = 3.0


def read_rate(folder: Path) -> float | None:
    """Returns the byte/s of direct reads of the large files below a folder; None if there are none,
    or if the file system has no direct reads."""
    found = ((path, path.stat().st_size) for path in sorted(folder.rglob("*")) if path.is_file())
    files = [(path, size) for path, size in found if SMALLEST <= size <= CHUNK_BYTES]
    buffers = deque(whole_pages(CHUNK_BYTES) for _ in range(2 * READS_AT_ONCE))
    for buffer in buffers:
        buffer[:] = 0  # the first touch of fresh memory takes longer than to read into it
    try:
        return _rate(files, buffers)
    except OSError:
        return None


def _rate(files: Sequence[tuple[Path, int]], buffers: deque[np.ndarray]) -> float | None:
    under_way: deque[Future[None]] = deque()
    queue, done = ReadQueue(READS_AT_ONCE), 0
    started = time.perf_counter()
    try:
        for path, size in files:
            if len(under_way) == len(buffers):
                under_way.popleft().result()
            under_way.append(queue.read([Piece(path, (buffers[0][:size],), True)], False))
            buffers.rotate(-1)
            done += size
            if done >= MOST_BYTES or time.perf_counter() - started > ENOUGH_S:
                break
    finally:
        queue.close()
    for read in under_way:
        read.result()
    return done / (time.perf_counter() - started) if done else None
