"""Messages about long work, in a terminal and in a log."""

from __future__ import annotations

import io

import pytest

from flexgen_jax.progress import ERASE, Progress
from flexgen_jax.units import scaled, significant


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_counts_programs_in_a_line_that_is_erased_before_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal, progress = Terminal(), Progress("placing")
    monkeypatch.setattr("sys.stderr", terminal)
    progress.compiling(0)
    with progress.erasing():
        progress.compiling(1)
        progress.compiling(2)
        progress.compiled()
    *_, shown, erased = terminal.getvalue().split(ERASE)
    assert shown == "flexgen-jax: compiling programs, cached for later runs: 2"
    assert erased == ""
    assert "\n" not in terminal.getvalue()


def test_a_log_says_once_that_programs_are_compiled(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(False)
    for count in range(4):
        progress.compiling(count)
        progress.compiled()
    assert capsys.readouterr().err.count("compiling programs") <= 1  # once in a process


def test_numbers_have_three_digits_and_no_exponent() -> None:
    numbers = (0.01234, 8.7654, 87.0, 999.9, 87842.0, 1.2e9)
    shown = ["0.0123", "8.77", "87", "1,000", "87,800", "1,200,000,000"]
    assert [significant(number) for number in numbers] == shown
    assert [scaled(x) for x in (1.03e12, 7.5e10, 1.25e8)] == ["1.03 T", "75 G", "125 M"]
