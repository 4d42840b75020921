"""The order in which chunks are read from disk."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import tensorstore as ts


class ReadQueue:
    """Reads chunks in order, a few at a time; urgent ones do not wait for the others.

    TensorStore would start them all at once, and while the processor is busy computing, what
    is read but not yet copied to its place piles up: 200 MB for two layers of OPT-1.3B.
    """

    def __init__(self, at_once: int) -> None:
        self._lock = threading.Lock()
        self._lanes = (_Lane(at_once), _Lane(at_once))

    def read(self, pieces: Sequence[tuple[Any, np.ndarray]], is_urgent: bool) -> Future[None]:
        """Starts reading each store into its array; the future is done when all are."""
        whole = _Whole(len(pieces))
        lane = self._lanes[is_urgent]
        with self._lock:
            lane.waiting.extend(_Piece(store, out, whole) for store, out in pieces)
        self._start_next(lane)
        return whole.future

    def _start_next(self, lane: _Lane) -> None:
        while True:
            piece = None
            try:
                with self._lock:
                    if lane.active >= lane.at_once or not lane.waiting:
                        return
                    lane.active += 1
                    piece = lane.waiting.popleft()
                done = partial(self._done, lane, piece.whole)
                ts.array(piece.out).write(piece.store).add_done_callback(done)
            except BaseException as error:  # Ctrl-C too must not lose the piece
                if piece is not None:
                    self._finish(lane, piece.whole, error)
                raise

    def _done(self, lane: _Lane, whole: _Whole, piece: Any) -> None:
        self._finish(lane, whole, piece.exception())
        self._start_next(lane)

    def _finish(self, lane: _Lane, whole: _Whole, error: BaseException | None) -> None:
        with self._lock:
            lane.active -= 1
            whole.left -= 1
            whole.error = whole.error or error
            if whole.left:
                return
        if whole.error is None:
            whole.future.set_result(None)
        else:
            whole.future.set_exception(whole.error)


class _Lane:
    """Chunks that wait, and how many are being read."""

    def __init__(self, at_once: int) -> None:
        self.at_once = at_once
        self.active = 0
        self.waiting: deque[_Piece] = deque()


class _Whole:
    """A read of several pieces, and the first error among them."""

    def __init__(self, left: int) -> None:
        self.left = left
        self.error: BaseException | None = None
        self.future: Future[None] = Future()


class _Piece(NamedTuple):
    store: Any
    out: np.ndarray
    whole: _Whole
