"""A job's options, its summary, and its interface to an engine."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from flexgen_jax.engine.outputs import OnToken, RequestOutput, TokenLogprob
from flexgen_jax.engine.requests import Request
from flexgen_jax.jobs.lines import Line
from flexgen_jax.models.chat import ChatOptions
from flexgen_jax.models.defaults import SamplingDefaults
from flexgen_jax.models.reasoning import Reasoning


@dataclass(frozen=True)
class JobOptions:
    """Options of a job.

    source: a file of requests, a line each, which gzip or zstd may have compressed, or a stream;
    "-" is standard input; or, as bytes, the lines themselves. results: where their records go.
    seed: of requests without their own; chat_tokens: default number of new tokens of a
    conversation, None for the model folder's default, or 512; limit: the most requests to begin,
    None for all; journal_s: seconds between two journals; is_ordered: whether the results are put
    into the input's order at the end; progress_file: a file that says how far the job is, as JSON.
    retries_errors: whether lines whose record is an error are run again. now: the date for chat
    templates, None for the start of the job.
    """

    source: Path | bytes
    results: Path
    seed: int = 0
    chat_tokens: int | None = None
    limit: int | None = None
    journal_s: float = 60.0
    is_ordered: bool = False
    progress_file: Path | None = None
    retries_errors: bool = False
    now: datetime | None = None


@dataclass
class Summary:
    """What a run of a job did.

    total: lines of the input; finished: those that have a record; errors: requests that could not
    run; tokens: new tokens of this run; taken_up: tokens that the journal had; commonest: the most
    common error message, and its count; notes: further messages.
    """

    total: int
    finished: int = 0
    errors: int = 0
    tokens: int = 0
    taken_up: int = 0
    seconds: float = 0.0
    commonest: tuple[str, int] | None = None
    notes: list[str] = field(default_factory=list)


@dataclass
class State:
    """A line that is not finished. done: its finished choices; earlier: the log-probabilities of
    what an earlier run has made of the others."""

    line: Line
    done: dict[int, RequestOutput] = field(default_factory=dict)
    earlier: dict[int, list[TokenLogprob]] = field(default_factory=dict)


class Engine(Protocol):
    """A job's interface to an `LLM`, or to a `fleet.Fleet` of copies."""

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def files_fingerprint(self) -> str: ...

    @property
    def chat_fingerprint(self) -> str | None: ...

    @property
    def chat_tells_time(self) -> bool: ...

    @property
    def sampling_defaults(self) -> SamplingDefaults: ...

    @property
    def notes(self) -> list[str]: ...

    def note(self, note: str) -> None: ...

    def chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions | None = None
    ) -> tuple[str, list[int]]: ...

    def reasoning(self, result: RequestOutput) -> Reasoning | None: ...

    def piece(self, token_id: int) -> bytes: ...

    def is_hidden(self, token_id: int) -> bool: ...

    def stream(
        self, requests: Iterable[Request], on_token: OnToken | None = None
    ) -> Generator[RequestOutput, None, None]: ...

    def unfinished(self) -> list[tuple[str, list[int], list[TokenLogprob]]]: ...

    def untaken(self) -> list[RequestOutput]: ...
