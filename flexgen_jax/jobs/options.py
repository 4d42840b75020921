"""A job's options, its summary, and the interface that runs its requests."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Protocol

from flexgen_jax.jobs.lines import Form, Line
from flexgen_jax.requests.outputs import OnToken, RequestOutput, TokenLogprob
from flexgen_jax.requests.requests import Request


@dataclass(frozen=True)
class JobOptions:
    """Options of a job."""

    # The requests, one per line: a file (gzip and zstd are recognized), "-" for standard input, or
    # the lines themselves.
    source: Path | bytes
    # The file of records. Journal, manifest and progress lie next to it.
    results: Path
    # For requests without their own seed.
    seed: int = 0
    # Default number of new tokens of a conversation. None: the model folder's default, or 512.
    chat_tokens: int | None = None
    # Maximum number of requests to begin; None for all.
    limit: int | None = None
    # Seconds between two journals.
    journal_s: float = 60.0
    # Whether the records are put into the input's order at the end.
    is_ordered: bool = False
    # A JSON file that shows the job's progress.
    progress_file: Path | None = None
    # Whether lines whose record is an error run again.
    retries_errors: bool = False
    # The date for chat templates; None: the job's start.
    now: datetime | None = None
    # The only form that a line may have; None for any.
    form: Form | None = None
    # Whether a line may bring its own chat template, a program that may run forever.
    accepts_templates: bool = True
    # Prefix of the records' ids; None: the input's digest.
    record_prefix: str | None = None
    # Identifies the model; None: the fingerprint of its files, whose hash is computed once.
    model_id: str | None = None


@dataclass
class Summary:
    """The outcome of a job's run."""

    # Lines of the input, lines with a record, and records that are errors.
    total: int
    finished: int = 0
    errors: int = 0
    # New tokens of this run, and tokens that the journal had.
    tokens: int = 0
    taken_up: int = 0
    seconds: float = 0.0
    # The most common error message, and its count.
    commonest: tuple[str, int] | None = None
    # Further messages.
    notes: list[str] = field(default_factory=list)


@dataclass
class State:
    """An unfinished line."""

    line: Line
    # The finished choices.
    done: dict[int, RequestOutput] = field(default_factory=dict)
    # The log-probabilities of the tokens that an earlier run computed for the other choices.
    earlier: dict[int, list[TokenLogprob]] = field(default_factory=dict)


class Runner(Protocol):
    """Runs a job's requests: an `LLM`, a `fleet.Fleet` of copies, or a server's shared engine."""

    def stream(
        self, requests: Iterable[Request], on_token: OnToken | None = None
    ) -> Generator[RequestOutput, None, None]:
        """See `LLM.stream`."""

    def unfinished(self) -> list[tuple[str, list[int], list[TokenLogprob]]]:
        """See `LLM.unfinished`."""

    def untaken(self) -> list[RequestOutput]:
        """See `LLM.untaken`."""
