"""Answers in a terminal, as their tokens come."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import click

from flexgen_jax.engine.llm import LLM
from flexgen_jax.models.answer_stream import AnswerStream, PlainStream
from flexgen_jax.models.text_reader import Piece
from flexgen_jax.requests.outputs import RequestOutput
from flexgen_jax.requests.sampling import SamplingParams


class Shown:
    """Writes an answer's pieces to stdout, reasoning dimmed where that is a terminal, and left out
    elsewhere.

    begin: text before the first token; reasoning, content: the text so far; first_at: time of
    the first token."""

    def __init__(self, stream: AnswerStream, begin: str = "") -> None:
        self._stream, self._begin = stream, begin
        self._is_terminal = sys.stdout.isatty()
        self.tokens, self.first_at = 0, float("nan")
        self.reasoning = self.content = ""

    def add(self, token: int) -> None:
        """Shows what a token adds."""
        self.first_at = self.first_at if self.tokens else time.perf_counter()
        self.tokens += 1
        self._show(self._stream.add(token))

    def end(self) -> None:
        """Shows what was held back, and ends the line."""
        self._show(self._stream.end())
        click.echo()

    def _show(self, pieces: list[Piece]) -> None:
        click.echo(self._begin, nl=False)
        self._begin = ""
        for kind, text, _ in pieces:
            if kind == "content":
                text = text if self.content or not self.reasoning else text.lstrip("\n")
                if not self.content and self.reasoning and text and self._is_terminal:
                    click.echo("\n")
                self.content += text
                click.echo(text, nl=False)
            else:
                self.reasoning += text
                if self._is_terminal:
                    click.echo(click.style(text, dim=True), nl=False)
        sys.stdout.flush()


def show_text(
    llm: LLM, ids: list[int], params: SamplingParams, has_reasoning: bool, begin: str = ""
) -> tuple[Shown, RequestOutput]:
    """Prints a completion token by token. has_reasoning: whether it may start with reasoning;
    begin: text before it. Raises `PromptError` for an impossible
    prompt."""
    tokenizer = llm.tokenizer
    assert tokenizer is not None, "the prompt was encoded"
    stops = llm.resolved(params, len(ids)).stop
    stream = (AnswerStream if has_reasoning else PlainStream)(tokenizer, ids, stops)
    shown = Shown(stream, begin)
    (result,) = llm.generate(
        prompt_token_ids=[ids],
        sampling_params=params,
        on_token=lambda _, token: shown.add(token),
        on_error="raise",
    )
    shown.end()
    return shown, result


@contextmanager
def interrupting(stop: Callable[[], object]) -> Iterator[None]:
    """Calls `stop` at the first Ctrl-C; the second one raises `KeyboardInterrupt` as usual."""
    is_stopping = False

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        nonlocal is_stopping
        if is_stopping:
            raise KeyboardInterrupt
        is_stopping = True
        stop()

    before: Any = signal.signal(signal.SIGINT, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
