"""Progress bars on stderr for long work, with throughput and the estimated time left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

_BAR = "{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"


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
    def generating(
        self, total_steps: int, num_tokens: Callable[[], int]
    ) -> Iterator[Callable[[], object]]:
        """Shows a bar of steps, with tokens per second.

        Yields a function to call after every step; num_tokens: returns the tokens made so far.
        """
        started = time.perf_counter()
        bar: Any = tqdm(
            total=total_steps,
            desc="generating",
            bar_format=_BAR,
            disable=not self._shown,
            leave=False,
        )

        def step() -> None:
            bar.update()
            if self._shown:
                rate = num_tokens() / max(time.perf_counter() - started, 1e-9)
                bar.set_postfix_str(f"{rate:.1f} token/s", refresh=False)

        with bar:
            yield step
