"""Messages about long work, in a terminal and in a log."""

from __future__ import annotations

import io

import pytest

from flexgen_jax.progress import ERASE, Progress


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
