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
    """Reads chunks a few at a time: urgent ones first, else in order.

    TensorStore would start them all at once, and while the processor is busy computing, what
    is read but not yet copied to its place piles up: 200 MB for two layers of OPT-1.3B.
    """

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._lock = threading.Lock()
        self._urgent: deque[_Piece] = deque()
        self._waiting: deque[_Piece] = deque()
        self._active = 0

    def read(self, pieces: Sequence[tuple[Any, np.ndarray]], is_urgent: bool) -> Future[None]:
        """Starts reading each store into its array; the future is done when all are."""
        whole = _Whole(len(pieces))
        with self._lock:
            queue = self._urgent if is_urgent else self._waiting
            queue.extend(_Piece(store, out, whole) for store, out in pieces)
        self._start_next()
        return whole.future

    def _start_next(self) -> None:
        while True:
            piece = None
            try:
                with self._lock:
                    queue = self._urgent or self._waiting
                    if self._active >= self._at_once or not queue:
                        return
                    self._active += 1
                    piece = queue.popleft()
                done = partial(self._done, piece.whole)
                ts.array(piece.out).write(piece.store).add_done_callback(done)
            except BaseException as error:  # Ctrl-C too must not lose the piece
                if piece is not None:
                    self._finish(piece.whole, error)
                raise

    def _done(self, whole: _Whole, piece: Any) -> None:
        self._finish(whole, piece.exception())
        self._start_next()

    def _finish(self, whole: _Whole, error: BaseException | None) -> None:
        with self._lock:
            self._active -= 1
            whole.left -= 1
            whole.error = whole.error or error
            if whole.left:
                return
        if whole.error is None:
            whole.future.set_result(None)
        else:
            whole.future.set_exception(whole.error)


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
