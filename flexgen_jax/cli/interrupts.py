"""Ctrl-C at any moment: one line and exit status 130, within seconds.

Python raises `KeyboardInterrupt` between two of its own instructions. That is late while a library
compiles for seconds, and it is lost where a library calls Python and ignores errors, as JAX's
callbacks of the garbage collector do. This module loads nothing that takes time, so that it is
ready before anything else is imported.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NoReturn

PATIENCE_S = 2.0
"""Seconds that native code may delay Ctrl-C. Then a thread ends the process."""

AGAIN_S = 0.02
"""Seconds until an interrupt that was ignored is raised again."""

INTERRUPTED, TERMINATED = 130, 143
"""Exit statuses after Ctrl-C and SIGTERM, as a shell reports them."""

MESSAGE = "flexgen-jax: interrupted; finished results and placed weights are kept"


def end_interrupted() -> NoReturn:
    """Says that the command was interrupted, and ends the process."""
    with contextlib.suppress(OSError):
        os.write(2, f"\n{MESSAGE}\n".encode())
    end_at_once(INTERRUPTED)


def end_at_once(status: int) -> NoReturn:
    """Ends the process without Python's exit handlers: XLA's threads may crash during them."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)


class Interrupts:
    """Handles Ctrl-C in the main thread of a command, as a context.

    Inside the context, the first Ctrl-C raises `KeyboardInterrupt`, and the second one ends the
    process at once. If the first one is not raised within `PATIENCE_S`, a thread ends the process.
    A command may install a handler of its own, which this thread does not touch.
    """

    def __init__(self) -> None:
        self._signals, self._was_ignored = 0, False
        self._was_raised = threading.Event()
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._hook: Callable[[Any], Any] = sys.unraisablehook

    def __enter__(self) -> Interrupts:
        signal.signal(signal.SIGINT, self._raise)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        sys.unraisablehook = self._unraised
        threading.Thread(target=self._watch, name="interrupts", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends the process at once after an interrupt."""
        signal.signal(signal.SIGINT, lambda *_: end_interrupted())
        if isinstance(error, KeyboardInterrupt):
            end_interrupted()
        if isinstance(error, SystemExit):
            if error.code == 1 and self._signals:  # click makes this of an interrupt
                end_interrupted()
            if error.code in (INTERRUPTED, TERMINATED):
                end_at_once(error.code)

    def _raise(self, _number: int, _frame: FrameType | None) -> NoReturn:
        self._signals += 1
        self._was_raised.set()
        if self._signals > 1:
            end_interrupted()
        raise KeyboardInterrupt

    def _watch(self) -> None:
        """Waits for signals. The system writes them to a pipe even while the main thread is busy in
        native code."""
        while number := os.read(self._reader, 1):
            if number[0] != signal.SIGINT or signal.getsignal(signal.SIGINT) != self._raise:
                continue
            if not self._was_raised.wait(PATIENCE_S):
                end_interrupted()

    def _unraised(self, ignored: Any) -> None:
        """Raises an ignored interrupt again; ends the process the second time."""
        if not issubclass(ignored.exc_type, KeyboardInterrupt):
            self._hook(ignored)
            return
        if self._was_ignored:
            end_interrupted()
        self._was_ignored, self._signals = True, 0
        threading.Timer(AGAIN_S, signal.raise_signal, [signal.SIGINT]).start()
