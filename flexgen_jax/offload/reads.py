"""Reads of chunk files straight into the memory where they are wanted.

A chunk is an uncompressed file. TensorStore would read it into memory of its own and copy
that: 0.3 s of processor time per GB against 0.07, and what was read but not yet copied piled
up to several hundred MB while both cores were busy computing.
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
    """The beginning of a file, and the memory it is wanted in; direct bypasses the page cache."""

    path: Path
    out: np.ndarray
    direct: bool


def whole_pages(nbytes: int) -> np.ndarray:
    """Zeroed memory, uint8 [nbytes], that begins at a page; `MemoryError` if there is none."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        pages = mmap.mmap(-1, max(1, nbytes), flags)
    except OSError as error:
        raise MemoryError(f"host memory: no {nbytes} bytes: {error.strerror}") from None
    return np.frombuffer(pages, np.uint8, nbytes)


class ReadQueue:
    """Reads files in order, a few at a time; urgent ones do not wait for the others."""

    def __init__(self, at_once: int) -> None:
        self._lanes = tuple(ThreadPoolExecutor(at_once, "flexgen-read") for _ in range(2))

    def read(self, pieces: Sequence[Piece], is_urgent: bool) -> Future[None]:
        """Starts reading all pieces; the future is done when all are."""
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
        """Waits for what is under way."""
        for lane in self._lanes:
            lane.shutdown()


class _Whole:
    """A read of several pieces, and the first error among them."""

    def __init__(self, left: int) -> None:
        self._lock = threading.Lock()
        self._left = left
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
    """Fills `out`; raises `OSError` that names the file where that is too short."""
    out = piece.out.reshape(-1).view(np.uint8)
    flags = os.O_RDONLY | (os.O_DIRECT if piece.direct else 0)
    descriptor = os.open(piece.path, flags)
    try:
        done = 0
        if not piece.direct or out.ctypes.data % PAGE == 0:
            whole = out.size // PAGE * PAGE if piece.direct else out.size
            done = _fill(descriptor, out[:whole], 0)
        if done < out.size:
            done += _fill_by_copy(descriptor, out[done:], done)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(piece.path)) from None
    finally:
        os.close(descriptor)
    if done < out.size:
        raise OSError(f"{piece.path} is damaged: {done} of {out.size} bytes are there")


def _fill(descriptor: int, out: np.ndarray, offset: int) -> int:
    """Reads into `out` until it is full or the file ends; returns the bytes read."""
    done = 0
    while done < out.size:
        count = os.preadv(descriptor, [out[done:].data], offset + done)
        done += count
        if count == 0 or done % PAGE:
            break
    return done


def _fill_by_copy(descriptor: int, out: np.ndarray, offset: int) -> int:
    """The same for memory, or an end, that a direct read cannot reach."""
    done = 0
    bounce = whole_pages(min(BOUNCE_BYTES, -(-out.size // PAGE) * PAGE))
    while done < out.size:
        count = min(_fill(descriptor, bounce, offset + done), out.size - done)
        out[done : done + count] = bounce[:count]
        done += count
        if count < bounce.size:
            break
    return done
