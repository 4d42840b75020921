"""Writes a timeline for https://ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from flexgen_jax.errors import (
    UserError,
    first_line,
)

PROCESS = 1
"""The process id in a trace: there is one process, and its tracks are threads."""


class Trace:
    """A file of spans in the Trace Event Format's array form, written during the run.

    Each track is a row; overlapping spans of one track get a second, third, ... row. The format
    allows the closing bracket to be missing, so the trace of a killed run opens too. Safe to use
    from several threads. Raises `UserError` if the file cannot be opened; later errors end the
    trace, not the run, and are raised by `close`.
    """

    def __init__(self, path: Path, title: str = "flexgen_jax") -> None:
        """title: the name of the process in the trace."""
        self._path = path
        self._lock = threading.Lock()
        self._rows: dict[str, list[float]] = {}
        self._order: dict[str, int] = {}
        self._is_first = True
        self._error: UserError | None = None
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise self._failed(error) from None
        self._write({"ph": "M", "tid": 0, "name": "process_name", "args": {"name": title}})

    def _failed(self, error: OSError) -> UserError:
        return UserError(
            f"cannot write --trace {self._path}: {error.strerror or first_line(error)}"
        )

    def span(self, track: str, name: str, start: float, end: float, **details: Any) -> None:
        """Adds a span from `start` to `end`, in seconds of one clock."""
        with self._lock:
            if self._file.closed or self._error is not None:
                return
            row = self._row(track, start, end)
            self._write(
                {
                    "ph": "X",
                    "name": name,
                    "ts": round(start * 1e6, 1),
                    "dur": round((end - start) * 1e6, 1),
                    "tid": row,
                    "args": details,
                }
            )

    def _row(self, track: str, start: float, end: float) -> int:
        """Returns the first row of the track whose last span had ended by `start`, or a new row if
        there is none. Spans come in the order of their ends."""
        rows = self._rows.setdefault(track, [])
        order = self._order.setdefault(track, len(self._order))
        lane = next((lane for lane, last in enumerate(rows) if last <= start), len(rows))
        thread = 1000 * order + lane
        if lane == len(rows):
            rows.append(end)
            about = {"ph": "M", "tid": thread}
            name = f"{track} ({lane + 1})" if lane else track
            self._write({**about, "name": "thread_name", "args": {"name": name}})
            self._write({**about, "name": "thread_sort_index", "args": {"sort_index": thread}})
        rows[lane] = end
        return thread

    def _write(self, event: dict[str, Any]) -> None:
        try:
            self._file.write("[\n" if self._is_first else ",\n")
            self._file.write(json.dumps({**event, "pid": PROCESS}))
        except OSError as error:
            self._error = self._failed(error)
        self._is_first = False

    def close(self) -> None:
        """Completes the file; raises the first `UserError` that writing it met."""
        with self._lock:
            if self._file.closed:
                return
            try:
                self._file.write("[]\n" if self._is_first else "\n]\n")
            except OSError as error:
                self._error = self._error or self._failed(error)
            try:
                self._file.close()
            except OSError as error:  # writing the buffer failed; the file is closed anyway
                self._error = self._error or self._failed(error)
            if self._error is not None:
                raise self._error
