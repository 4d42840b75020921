"""Reads of chunk files directly into the memory where they are wanted.

A chunk is an uncompressed file. TensorStore would read it into memory of its own and copy it from
there, which costs much more processor time, and data that waits for its copy piles up while all
cores are busy computing.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

PAGE = 4096
"""Address, offset and length of a direct read are multiples of this."""

BOUNCE_BYTES = 1 << 20


class Piece(NamedTuple):
    """A position in a file, and the arrays to fill from there in order.

    direct: whether the read bypasses the page cache.
    """

    path: Path
    outs: Sequence[np.ndarray]
    direct: bool


def whole_pages(nbytes: int) -> np.ndarray:
    """Returns zeroed memory, uint8 [nbytes], that begins at a page; raises `MemoryError` if there
    is none."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        pages = mmap.mmap(-1, max(1, nbytes), flags)
    except OSError as error:
        raise MemoryError(
            f"cannot allocate {nbytes} bytes of host memory: {error.strerror}"
        ) from None
    return np.frombuffer(pages, np.uint8, nbytes)


class ReadQueue:
    """A queue that reads files in order, a few at a time; urgent reads do not wait for other
    reads."""

    def __init__(self, at_once: int) -> None:
        self._lanes = tuple(ThreadPoolExecutor(at_once, "flexgen-read") for _ in range(2))

    def read(self, pieces: Sequence[Piece], is_urgent: bool) -> Future[None]:
        """Starts reading all pieces; the returned future is done after all reads."""
        whole = _Whole(len(pieces))
        started = 0
        try:
            for piece in pieces:
                self._lanes[is_urgent].submit(whole.read, piece)
                started += 1
        except BaseException as error:  # Ctrl-C too must not leave a future that never ends
            whole.finish(len(pieces) - started, error)
            whole.future.exception()
            raise
        return whole.future

    def close(self) -> None:
        """Waits for the reads under way."""
        for lane in self._lanes:
            lane.shutdown()


class _Whole:
    """A read of several pieces, which keeps the first error among them."""

    def __init__(self, num_reads: int) -> None:
        self._lock = threading.Lock()
        self._left = num_reads
        self._error: BaseException | None = None
        self.future: Future[None] = Future()

    def read(self, piece: Piece) -> None:
        error: BaseException | None = None
        try:
            read_file(piece)
        except BaseException as caught:
            error = caught
        self.finish(1, error)

    def finish(self, count: int, error: BaseException | None) -> None:
        with self._lock:
            self._left -= count
            self._error = self._error or error
            if self._left:
                return
        if self._error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(self._error)


def read_file(piece: Piece) -> None:
    """Fills a piece's `outs` from its file; raises `OSError` that names the file if it is too
    short."""
    views = [out.reshape(-1).view(np.uint8) for out in piece.outs]
    flags = os.O_RDONLY | (os.O_DIRECT if piece.direct else 0)
    descriptor = os.open(piece.path, flags)
    try:
        done = _fill_all(descriptor, *(_straight(views) if piece.direct else (views, [])))
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(piece.path)) from None
    finally:
        os.close(descriptor)
    if done < _size(views):
        raise OSError(f"{piece.path} is damaged: it has {done} of {_size(views)} bytes")


def _size(views: list[np.ndarray]) -> int:
    return sum(view.size for view in views)


def _straight(views: list[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Splits `views` into the part for one direct read (consecutive whole pages) and the rest."""
    straight = []
    for index, view in enumerate(views):
        whole = view.size // PAGE * PAGE if view.ctypes.data % PAGE == 0 else 0
        straight.append(view[:whole])
        if whole < view.size:
            return straight, [view[whole:], *views[index + 1 :]]
    return straight, []


def _fill_all(descriptor: int, straight: list[np.ndarray], tail: list[np.ndarray]) -> int:
    """Reads a file into `straight` and then, through a bounce buffer, into `tail`; returns the
    bytes read. A small file takes one system call."""
    size = _size(straight)
    if not tail:
        return _fill(descriptor, straight, 0)
    bounce = whole_pages(min(BOUNCE_BYTES, -(-_size(tail) // PAGE) * PAGE))
    done = _fill(descriptor, [*straight, bounce], 0)
    while tail and done > size:
        count = min(done - size, _size(tail))
        _spread(bounce[:count], tail)
        tail, size = _after(tail, count), size + count
        if not tail or count < bounce.size:
            break
        done = size + _fill(descriptor, [bounce], size)
    return min(done, size)


def _fill(descriptor: int, views: list[np.ndarray], offset: int) -> int:
    """Reads from `offset` on into the views until they are full or the file ends; returns the bytes
    read."""
    done = 0
    while remaining := _after(views, done):
        count = os.preadv(descriptor, [view.data for view in remaining], offset + done)
        done += count
        if count == 0 or done % PAGE:
            break
    return done


def _after(views: list[np.ndarray], count: int) -> list[np.ndarray]:
    """Returns the part of the views after their first `count` bytes."""
    remaining = []
    for view in views:
        if count < view.size:
            remaining.append(view[count:])
        count = max(0, count - view.size)
    return remaining


def _spread(source: np.ndarray, views: list[np.ndarray]) -> None:
    """Copies `source` into the views, which together are at least as long."""
    for view in views:
        count = min(source.size, view.size)
        view[:count] = source[:count]
        source = source[count:]
