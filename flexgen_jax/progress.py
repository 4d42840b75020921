"""Progress bars on stderr for long work, with throughput and the estimated time left; and messages
of the logger "flexgen_jax"."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

from tqdm import tqdm

_BAR = "{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"


EVERY_S = 0.2
"""Seconds between two looks at how far a run is."""


class _BesideBars(logging.Handler):
    """Writes messages to stderr, above existing progress bars; those that are to be said once
    in a process only the first time."""

    def __init__(self) -> None:
        super().__init__()
        self._said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        message = self.format(record)
        if getattr(record, "is_once", False) and message in self._said:
            return
        self._said.add(message)
        tqdm.write(message, file=sys.stderr)


def logger() -> logging.Logger:
    """Returns the package's logger. Unless it has been told where messages go, they go to
    stderr."""
    named = logging.getLogger("flexgen_jax")
    if not named.handlers:
        named.addHandler(_BesideBars())
        named.propagate = False
    if named.level == logging.NOTSET:
        named.setLevel(logging.INFO)
    return named


def seconds_left(seconds: float, done: int, left: int) -> float | None:
    """Returns the estimated seconds for `left` parts, if `done` parts took `seconds`; None while
    nothing is finished."""
    return seconds / done * left if done > 0 else None


class Amount(NamedTuple):
    """Tokens that are made, and that will be in all as far as is known; finished requests."""

    done: int
    total: int
    requests: int


ERASE = "\r\x1b[2K"
"""Erases a terminal's line."""

Bars = bool | Literal["placing"]
"""Which progress bars are shown: all bars, none, or only those before the first token."""


class Progress:
    """Progress bars, as `shown` says, and messages, which appear as the logger says."""

    def __init__(self, shown: Bars) -> None:
        self._shown, self._counts = bool(shown), shown is True
        self._has_line, self._compiled = False, 0

    @contextmanager
    def placing(
        self, total_bytes: int, what: str = "placing weights"
    ) -> Iterator[Callable[[int], object]]:
        """Shows a bar of placed weights; yields a function to call with the bytes just placed."""
        bar: Any = tqdm(
            total=total_bytes,
            desc=what,
            unit="B",
            unit_scale=True,
            disable=not self._shown,
            leave=False,
        )
        with bar:
            yield bar.update

    @contextmanager
    def counting(self, what: str, total: int) -> Iterator[Callable[[str], object]]:
        """Shows a bar of `total` parts of `what`.

        Yields a function to call with the name of each part when it begins.
        """
        bar: Any = tqdm(total=total, desc=what, bar_format=_BAR, disable=not self._shown)

        def begin(part: str) -> None:
            bar.set_postfix_str(part, refresh=False)
            bar.update()

        with bar:
            yield begin

    def compiling(self, count: int) -> None:
        """Says how many programs were compiled: in a line of the terminal that `compiled` erases,
        or once on a line of its own where stderr is none."""
        if count == self._compiled or not logger().isEnabledFor(logging.INFO):
            return
        self._compiled = count
        if not sys.stderr.isatty():
            self.say_once("flexgen-jax: compiling programs, which are cached for later runs")
        elif not self._counts:
            message = f"compiling programs, cached for later runs: {count}"
            sys.stderr.write(f"{ERASE}flexgen-jax: {message}")
            sys.stderr.flush()
            self._has_line = True

    @contextmanager
    def erasing(self) -> Iterator[None]:
        """Erases what `compiling` shows at the end, also after an error."""
        try:
            yield
        finally:
            self.compiled()

    def compiled(self) -> None:
        """Erases what `compiling` shows."""
        if self._has_line:
            sys.stderr.write(ERASE)
            sys.stderr.flush()
        self._has_line, self._compiled = False, 0

    def say(self, message: str) -> None:
        """Prints a message on a line of its own."""
        logger().info(message)

    def say_once(self, message: str) -> None:
        """Prints a message, unless this process has printed it already."""
        logger().info(message, extra={"is_once": True})

    def detail(self, message: str) -> None:
        """Prints a message that only those want to see who ask for more."""
        logger().debug(message)

    @contextmanager
    def generating(
        self, amount: Callable[[], Amount], compiling_s: Callable[[], float] = lambda: 0.0
    ) -> Iterator[Callable[[], object]]:
        """Shows a bar of tokens, with finished requests, tokens per second and the time left.

        Yields a function to call after every step; amount: returns the finished parts;
        compiling_s: seconds of compiling so far, which count in no rate.
        """
        started = due = time.perf_counter()
        begun, compiled_s = amount().done, compiling_s()
        bar: Any = tqdm(
            total=1, desc="generating", bar_format=_BAR, disable=not self._counts, leave=False
        )

        def step() -> None:
            nonlocal due
            now = time.perf_counter()
            if not self._counts or now < due:
                return
            done, total, requests = amount()
            took = time.perf_counter() - now
            due = now + max(EVERY_S, 50 * took)  # looking at a million requests takes a while
            bar.total = max(total - begun, 1)
            rate = (done - begun) / max(now - started - compiling_s() + compiled_s, 1e-9)
            bar.set_postfix_str(f"{requests} done, {rate:.1f} token/s", refresh=False)
            bar.update(done - begun - bar.n)

        with bar:
            yield step
