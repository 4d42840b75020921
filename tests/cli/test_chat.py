"""`flexgen-jax chat`: what is typed, what is answered, and Ctrl-C."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flexgen_jax import LLM, SamplingParams
from tests.helpers.command_line import run

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"


@pytest.fixture
def folder(checkpoint: Callable[[], Path], tmp_path: Path) -> Path:
    """A tiny model with a chat template."""
    for file in checkpoint().iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


def flags(folder: Path, tokens: int) -> list[object]:
    fixed = ["--percent", *(100, 0) * 3, "--dtype", "float32", "--temperature", 0]
    return ["chat", "--model", folder, "--max-tokens", tokens, *fixed]


def test_rounds_are_answered_as_by_the_library(folder: Path) -> None:
    """With the system message, what was said before, and messages of several lines."""
    saved = folder / "saved.json"
    typed = ["/system Be short.", "hi", "two\\", "lines", '"""', "a", "", "b", '"""']
    result = run(*flags(folder, 5), input="\n".join([*typed, f"/save {saved}", "/exit", "no"]))
    assert result.exit_code == 0, result.stderr
    asked = ["hi", "two\nlines", "a\n\nb"]
    messages, answers = [{"role": "system", "content": "Be short."}], []
    with LLM(folder, dtype="float32") as llm:
        for text in asked:
            messages.append({"role": "user", "content": text})
            params = SamplingParams(max_tokens=5, temperature=0)
            answers.append(llm.chat(messages, params)[0].text)
            messages.append({"role": "assistant", "content": answers[-1]})
    assert result.stdout == "".join(f"{answer}\n" for answer in answers)
    assert json.loads(saved.read_text()) == messages
    again = run(*flags(folder, 5), "--load", saved, input="/reset\nhi\n")
    assert again.stdout == f"{answers[0]}\n"


def test_what_cannot_be_answered_is_said_and_forgotten(folder: Path) -> None:
    result = run(*flags(folder, 3), input=f"{'x' * 5000}\nhi\n/save\n/what\n")
    assert result.exit_code == 0
    assert "context" in result.stderr
    assert "/save needs" in result.stderr
    assert "/reset" in result.stderr
    assert len(result.stdout.splitlines()) == 1


def test_a_model_without_a_template_is_refused() -> None:
    result = run("chat", input="hi\n")
    assert result.exit_code == 2
    assert "--model" in result.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no terminals")
def test_ctrl_c_ends_a_text_and_not_the_program(folder: Path) -> None:
    """In a terminal, where tokens come one by one."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "flexgen_jax", *map(str, flags(folder, 400)), "--no-progress"]
    child = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs)
    seen = ""

    def until(text: str, count: int = 1) -> None:
        nonlocal seen
        deadline = time.monotonic() + 60
        while seen.count(text) < count:
            assert time.monotonic() < deadline, seen
            if select.select([ours], [], [], 1)[0]:
                seen += os.read(ours, 4096).decode(errors="replace")

    try:
        until("> ")
        os.write(ours, b"hi\n")
        until("hi\r\n")
        child.send_signal(signal.SIGINT)  # before the first token, or amid the answer
        until("> ", 2)
        assert "Traceback" not in seen
        os.write(ours, b"/exit\n")
        assert child.wait(60) == 0
    finally:
        child.kill()
        os.close(ours)
        os.close(theirs)
