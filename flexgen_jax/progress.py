"""Progress bars on stderr for long work, with throughput and the estimated time left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from tqdm import tqdm

_BAR = "{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"


EVERY_S = 0.2
"""Seconds between two looks at how far a run is."""


class Amount(NamedTuple):
    """Tokens that are made, and that will be in all as far as is known; finished requests."""

    done: int
    total: int
    requests: int


class Progress:
    """Progress bars, which appear only if `shown` is true, and messages, which always appear."""

    def __init__(self, shown: bool) -> None:
        self._shown = shown

    @contextmanager
    def placing(self, total_bytes: int) -> Iterator[Callable[[int], object]]:
        """Shows a bar of placed weights; yields a function to call with the bytes just placed."""
        bar: Any = tqdm(
            total=total_bytes,
            desc="placing weights",
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

    def say(self, message: str) -> None:
        """Prints a message on a line of its own."""
        tqdm.write(message, file=sys.stderr)

    @contextmanager
    def generating(self, amount: Callable[[], Amount]) -> Iterator[Callable[[], object]]:
        """Shows a bar of tokens, with finished requests, tokens per second and the time left.

        Yields a function to call after every step; amount: returns what is done so far.
        """
        started = due = time.perf_counter()
        begun = amount().done
        bar: Any = tqdm(
            total=1, desc="generating", bar_format=_BAR, disable=not self._shown, leave=False
        )

        def step() -> None:
            nonlocal due
            now = time.perf_counter()
            if not self._shown or now < due:
                return
            done, total, requests = amount()
            took = time.perf_counter() - now
            due = now + max(EVERY_S, 50 * took)  # looking at a million requests takes a while
            bar.total = max(total - begun, 1)
            rate = (done - begun) / (now - started)
            bar.set_postfix_str(f"{requests} done, {rate:.1f} token/s", refresh=False)
            bar.update(done - begun - bar.n)

        with bar:
            yield step
