"""Runs a job: reads requests, lets the engine continue them, and keeps what is done."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from flexgen_jax.engine.llm import LLM
from flexgen_jax.engine.outputs import RequestOutput, TokenLogprob
from flexgen_jax.engine.requests import LEAST_PREFIX, Prefix, Request, common_length
from flexgen_jax.errors import UserError
from flexgen_jax.jobs.answers import answer, failure
from flexgen_jax.jobs.lines import MOST_CHOICES, Line, LineError, read_line
from flexgen_jax.jobs.store import Disk, Journal, Manifest, Results

WINDOW = 512
"""Lines that are read together and sorted by length, so that prompts of a batch are alike."""

LEAST_COMMON = 4 * LEAST_PREFIX
"""A beginning that all prompts share is worth a pass of its own from so many characters on."""

REPORT_S = 2.0
"""Seconds between two versions of the progress file."""


@dataclass(frozen=True)
class JobOptions:
    """What a job does.

    source: a file of requests, a line each; results: where their records go. seed: of requests
    without their own; chat_tokens: new tokens of a conversation that does not say how many; limit:
    the most requests to begin, None for all; journal_s: seconds between two journals; is_ordered:
    whether the results are put into the input's order at the end; progress_file: a file that says
    how far the job is, as JSON.
    """

    source: Path
    results: Path
    seed: int = 0
    chat_tokens: int = 512
    limit: int | None = None
    journal_s: float = 60.0
    is_ordered: bool = False
    progress_file: Path | None = None


class InputFacts(NamedTuple):
    """A digest of a file's bytes, and how many of its lines are not blank."""

    digest: str
    lines: int

    @classmethod
    def of(cls, path: Path) -> InputFacts:
        found, lines = hashlib.sha256(), 0
        try:
            with open(path, "rb") as file:
                for content in file:
                    found.update(content)
                    lines += bool(content.strip())
        except OSError as error:
            raise UserError(f"cannot read the requests {path}: {error.strerror}") from None
        return cls(found.hexdigest(), lines)


@dataclass
class Summary:
    """What a run of a job did.

    total: lines of the input; finished: those that have a record; errors: those of them that could
    not be run; tokens: new tokens of this run; taken_up: tokens that the journal had.
    """

    total: int
    finished: int = 0
    errors: int = 0
    tokens: int = 0
    taken_up: int = 0
    seconds: float = 0.0


@dataclass
class State:
    """A line that is not finished. done: its finished choices; earlier: the log-probabilities of
    what an earlier run has made of the others."""

    line: Line
    done: dict[int, RequestOutput] = field(default_factory=dict)
    earlier: dict[int, list[TokenLogprob]] = field(default_factory=dict)


class Job:
    """One run of a job; `run` returns when every line has its record, or raises what broke it
    off."""

    def __init__(self, llm: LLM, options: JobOptions, disk: Disk | None = None) -> None:
        self._llm, self._options = llm, options
        self._disk = disk or Disk()
        self._facts = InputFacts.of(options.source)
        self._states: dict[int, State] = {}
        self._kept: dict[int, dict[str, Any]] = {}
        self._names: set[bytes] = set()
        self._prefix: Prefix | None = None
        self._journal = Journal(options.results, self._disk)
        self.summary = Summary(self._facts.lines)
        self._began = self._journal_due = self._report_due = 0.0
        self._done_before = 0

    def run(self) -> Summary:
        self._began = time.monotonic()
        self._journal_due = self._began + self._options.journal_s
        with closing(Results(self._options.results, self._disk)) as self._results:
            self._done_before = self._results.done
            manifest = Manifest(self._options.results, self._disk)
            self._kept = self._journal.read()
            manifest.check(self._depends_on(), not (self._results.done or self._kept))
            self._continue()
            self._journal.remove()
            if self._options.is_ordered:
                self._results.put_in_order()
            self.summary.finished = self._results.done
            self.summary.errors = self._results.errors
        self.summary.seconds = time.monotonic() - self._began
        self._report(force=True)
        return self.summary

    def _depends_on(self) -> dict[str, Any]:
        return {
            "input": self._facts.digest,
            "model": self._llm.fingerprint,
            "seed": self._options.seed,
            "tokens of conversations": self._options.chat_tokens,
        }

    def _continue(self) -> None:
        """Runs all lines that have no record; what is unfinished when this is broken off goes to
        the journal."""
        with closing(self._llm.stream(self._requests(), self._on_token)) as stream:
            try:
                for result in stream:
                    self._take(result)
                    self._results.sync()
            except BaseException:
                self._write_journal()
                raise

    # Requests

    def _requests(self) -> Iterator[Request]:
        """Yields the requests of all lines that have no record; the engine's reader calls it from
        a thread of its own."""
        window: list[Request] = []
        for line in self._lines():
            try:
                window += self._asked(line)
            except UserError as error:
                is_plain = line.form == "plain"
                self._fail(line.number, LineError(str(error), line.name, is_plain))
            if len(window) >= WINDOW:
                yield from self._sorted(window)
                window = []
        yield from self._sorted(window)

    def _lines(self) -> Iterator[Line]:
        begun = 0
        with open(self._options.source, "rb") as file:
            for number, content in enumerate(file, 1):
                if not content.strip():
                    continue
                if self._results.has(number):
                    self._remember(_name_in(content))
                    continue
                if begun == self._options.limit:
                    return
                begun += 1
                try:
                    line = read_line(content, number, self._options.chat_tokens, self._options.seed)
                    if not self._remember(line.name):
                        is_plain = line.form == "plain"
                        raise LineError(
                            f"{line.name!r} is an earlier line's id", line.name, is_plain
                        )
                except LineError as error:
                    self._remember(error.name)
                    self._fail(number, error)
                else:
                    yield line

    def _remember(self, name: str | None) -> bool:
        """Notes a line's id; returns whether it is new."""
        if name is None:
            return True
        found = hashlib.blake2b(name.encode(), digest_size=8).digest()
        is_new = found not in self._names
        self._names.add(found)
        return is_new

    def _fail(self, number: int, error: LineError) -> None:
        self._results.add(failure(number, error, self._facts.digest))

    def _asked(self, line: Line) -> list[Request]:
        """Returns a line's requests, less those that the journal has as finished."""
        prompts: Sequence[tuple[str | None, Sequence[int] | None]]
        if line.messages is not None:
            prompts = [self._llm.chat_prompt(line.messages)]
        else:
            prompts = [(p, None) if isinstance(p, str) else (None, p) for p in line.prompts]
        state = State(line)
        requests = []
        for choice in range(line.choices):
            text, ids = prompts[choice // line.count]
            kept = self._kept.get(line.number, {}).get(str(choice), {})
            request = Request(
                f"{line.number}.{choice}",
                prompt=text if ids is None else None,
                prompt_token_ids=ids,
                sampling_params=line.params,
                continued=tuple(kept.get("tokens", ())),
                place=choice if line.has_seed else line.number * MOST_CHOICES + choice,
            )
            logprobs = [_logprob(x) for x in kept.get("logprobs", ())]
            if "finish_reason" in kept:
                state.done[choice] = _finished(request, kept, logprobs)
            else:
                state.earlier[choice] = logprobs
                requests.append(request)
            self.summary.taken_up += len(request.continued)
        self._states[line.number] = state
        if not requests:
            self._give(state)
        return requests

    def _sorted(self, window: Sequence[Request]) -> Iterator[Request]:
        """Yields requests, the shortest prompts first, with the beginning that all of the first
        window share."""
        if self._prefix is None:
            self._prefix = _shared(window)
        for request in sorted(window, key=_length):
            yield replace(request, prefix=self._prefix or None)

    # Results

    def _on_token(self, _id: str, _token: int) -> None:
        self.summary.tokens += 1
        now = time.monotonic()
        if now >= self._journal_due:
            self._write_journal()
            self._journal_due = now + self._options.journal_s
        if now >= self._report_due:
            self._results.sync()
            self._report()

    def _take(self, result: RequestOutput) -> None:
        """Takes the result of a choice; when it is its line's last, the line's record is made."""
        number, choice = map(int, result.id.split("."))
        state = self._states.get(number)
        if state is None:
            return  # another choice of this line was impossible
        if result.error is not None:
            is_plain = state.line.form == "plain"
            self._fail(number, LineError(result.error, state.line.name, is_plain))
            del self._states[number]
            return
        if result.logprobs is not None:
            result = replace(result, logprobs=[*state.earlier[choice], *result.logprobs])
        state.done[choice] = result
        if len(state.done) == state.line.choices:
            self._give(state)

    def _give(self, state: State) -> None:
        results = [state.done[choice] for choice in range(state.line.choices)]
        made = answer(state.line, results, self._llm.name, self._facts.digest, self._llm.decode)
        self._results.add(made)
        del self._states[state.line.number]

    def _write_journal(self) -> None:
        """Keeps what there is of all lines that have no record, those included that the engine has
        not begun again."""
        kept: dict[int, dict[str, Any]] = {
            line: texts for line, texts in self._kept.items() if not self._results.has(line)
        }
        for number, state in list(self._states.items()):
            for choice, result in state.done.items():
                own = {"tokens": result.token_ids, "text": result.text}
                own |= {"finish_reason": result.finish_reason, "prompt": result.prompt_token_ids}
                kept.setdefault(number, {})[str(choice)] = own | _logprobs(result.logprobs or [])
        for name, tokens, logprobs in self._llm.unfinished():
            number, choice = map(int, name.split("."))
            if number in self._states and tokens:
                earlier = self._states[number].earlier.get(choice, [])
                every = [*earlier, *logprobs]
                if self._states[number].line.params.logprobs is not None:
                    tokens = tokens[: len(every)]  # an interruption may come between the two
                own = {"tokens": list(tokens)} | _logprobs(every[: len(tokens)])
                kept.setdefault(number, {})[str(choice)] = own
        self._journal.write(kept)

    def _report(self, force: bool = False) -> None:
        """Writes the progress file, if there is one and it is old."""
        now, path = time.monotonic(), self._options.progress_file
        if path is None or (now < self._report_due and not force):
            self._report_due = max(self._report_due, now + REPORT_S)
            return
        self._report_due = now + REPORT_S
        seconds, done = now - self._began, self._results.done
        each = seconds / max(done - self._done_before, 1)
        content = {
            "requests": self._facts.lines,
            "finished": done,
            "errors": self._results.errors,
            "tokens": self.summary.tokens,
            "token_s": self.summary.tokens / max(seconds, 1e-9),
            "eta_s": each * (self._facts.lines - done) if done > self._done_before else None,
        }
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps(content) + "\n")
        part.replace(path)


def _name_in(content: bytes) -> str | None:
    """Returns the id of a line, if it has one."""
    try:
        raw = json.loads(content)
        name = raw.get("custom_id" if "custom_id" in raw or "body" in raw else "id")
    except (ValueError, AttributeError, TypeError, RecursionError):
        return None
    return name if isinstance(name, str) else None


def _shared(window: Sequence[Request]) -> Prefix:
    """Returns the beginning that all prompts share; nothing if it is short."""
    texts = [r.prompt for r in window if r.prompt is not None]
    ids = [tuple(r.prompt_token_ids) for r in window if r.prompt_token_ids is not None]
    if len(window) < 2 or (texts and ids):
        return ""
    if texts:
        count = common_length(texts)
        return texts[0][:count] if count >= LEAST_COMMON else ""
    count = common_length(ids)
    return ids[0][:count] if count >= LEAST_PREFIX else ""


def _length(request: Request) -> int:
    if request.prompt is not None:
        return len(request.prompt)
    return 4 * len(request.prompt_token_ids or ())  # a token has about four characters


def _logprobs(found: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {"logprobs": [[x.logprob, x.top] for x in found]} if found else {}


def _logprob(raw: Any) -> TokenLogprob:
    logprob, top = raw
    return TokenLogprob(logprob, tuple((token, other) for token, other in top))


def _finished(
    request: Request, kept: Mapping[str, Any], logprobs: list[TokenLogprob]
) -> RequestOutput:
    """Returns a choice's result from the journal."""
    return RequestOutput(
        request.prompt,
        list(kept["prompt"]),
        kept["text"],
        list(kept["tokens"]),
        kept["finish_reason"],
        request.id,
        logprobs=None if request.sampling_params.logprobs is None else logprobs,
    )
