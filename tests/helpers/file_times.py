"""A table of the seconds and compiled programs of each test file, slowest first."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

COMPILED = "/jax/core/compile/backend_compile_duration"


class FileTimes:
    """Counts on every worker, and writes the table where all results come together.

    path: the file to write.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._num_programs = 0
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._programs: Counter[str] = Counter()
        jax.monitoring.register_event_duration_secs_listener(self._observe)

    def _observe(self, event: str, _seconds: float, **_more: Any) -> None:
        self._num_programs += event == COMPILED

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        begin = self._num_programs
        try:
            return (yield)
        finally:
            item.user_properties.append(("programs", self._num_programs - begin))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        self._seconds[file] += report.duration
        if report.when == "call":
            self._programs[file] += dict(report.user_properties).get("programs", 0)  # type: ignore[operator]

    def pytest_terminal_summary(self) -> None:
        """Only the process that prints the results has any."""
        files = sorted(self._seconds, key=lambda file: -self._seconds[file])
        lines = [f"{self._seconds[x]:8.1f} s {self._programs[x]:6} programs  {x}" for x in files]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text("\n".join(lines) + "\n")
