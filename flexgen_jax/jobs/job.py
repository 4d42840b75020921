"""Runs a job: reads requests, runs them, and stores results."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import replace
from datetime import datetime
from typing import Any

from flexgen_jax.engine.llm import LLM
from flexgen_jax.errors import UserError
from flexgen_jax.jobs.answers import answer, failure
from flexgen_jax.jobs.choices import done, finished_choice, logprobs_json, read_logprob
from flexgen_jax.jobs.lines import MAX_CHOICES, URLS, Line, LineError, Prompt, line_name, read_line
from flexgen_jax.jobs.options import JobOptions, Runner, State, Summary
from flexgen_jax.jobs.source import InputFacts, JobInput, numbered_lines
from flexgen_jax.jobs.store import RECORD_FORMAT, Disk, Journal, Manifest, Results
from flexgen_jax.progress import seconds_left
from flexgen_jax.requests.outputs import RequestOutput
from flexgen_jax.requests.prefix_sharing import groups_of
from flexgen_jax.requests.requests import Request

WINDOW = 512
"""Number of lines that are read and sorted by length together, so that prompts of a batch have
similar lengths."""

CHARACTERS = 4
"""Characters of a token, about."""

REPORT_S = 2.0
"""Seconds between two versions of the progress file."""


CHAT_TOKENS = 512
"""New tokens of a conversation where neither it nor the model's folder says how many."""


class Job:
    """One run of a job; `run` returns when every line has its record, or raises what broke it
    off."""

    def __init__(
        self,
        llm: LLM,
        options: JobOptions,
        runner: Runner | None = None,
        disk: Disk | None = None,
    ) -> None:
        """llm: reads prompts and writes records, and runs the requests unless a `runner` does."""
        self._llm, self._options, self._runner = llm, options, runner or llm
        self._disk = disk or Disk()
        self._manifest = Manifest(options.results, self._disk)
        self._manifest.check_ownership()
        self._source = JobInput(options.source, options.results)
        self._facts = InputFacts("", 0, 0)
        self._states: dict[int, State] = {}
        self._kept: dict[int, dict[str, Any]] = {}
        self._names: set[bytes] = set()
        self._journal = Journal(options.results, self._disk)
        self._hashed: Future[dict[str, Any]] | None = None
        self.summary = Summary(0)
        self._began = self._journal_due = self._report_due = 0.0
        self._done_before = 0
        self._now = datetime.now()
        max_tokens = options.chat_tokens or llm.sampling_defaults.max_tokens
        self._chat_tokens = max_tokens or CHAT_TOKENS

    def run(self) -> Summary:
        self._began = time.monotonic()
        self._journal_due = self._began + self._options.journal_s
        with closing(Results(self._options.results, self._disk)) as self._results:
            self._source.open()
            self._facts = InputFacts.of(self._source, self._manifest.recorded("input size"))
            self.summary.total = self._facts.lines
            self._kept = self._journal.read()
            if damaged := self._results.damaged + self._journal.damaged:
                self._llm.note(f"damaged records of an earlier run: {damaged}; recomputing them")
            self._begin_or_go_on()
            if self._options.retries_errors:
                self._results.forget_errors()
            self._done_before = self._results.done
            self._continue()
            self._results.sync(is_due=True)
            self._complete_manifest()
            unfinished = self._left()
            if unfinished:  # that `limit` did not let begin
                self._journal.write(unfinished)
            else:
                self._journal.remove()
            if self._options.is_ordered:
                self._results.put_in_order()
            self.summary.finished = self._results.done
            self.summary.errors = self._results.errors
            self.summary.commonest = self._results.commonest_error
        if self.summary.finished == self.summary.total:
            self._source.forget()
        if self.summary.taken_up and self._llm.dtype != "float32":
            self._llm.note(
                f"completions that continue after an interruption may differ in {self._llm.dtype} "
                "from those of an uninterrupted job; in float32 they are equal"
            )
        self.summary.seconds = time.monotonic() - self._began
        self._report(force=True)
        return self.summary

    def _begin_or_go_on(self) -> None:
        """Writes the manifest of a new job, or compares it with the resumed job's; lines may
        have come after those that it had."""
        settings = {
            "input": self._facts.digest,
            "seed": self._options.seed,
            "tokens of conversations": self._chat_tokens,
            "chat template": None if self._options.model_id else self._llm.chat_fingerprint,
            "sampling defaults": str(self._llm.sampling_defaults),
            "record format": RECORD_FORMAT,
        }
        recorded_input, is_new = (
            self._manifest.recorded("input"),
            not (self._results.done or self._kept),
        )
        settings |= self._model_entries(is_new)
        recorded = None if is_new else self._manifest.recorded("time of conversations")
        now_text = None if self._options.now is None else self._options.now.isoformat()
        moment = str(now_text or recorded or datetime.now().isoformat())
        settings["time of conversations"] = moment
        self._now = datetime.fromisoformat(moment)
        if not is_new:
            begins_alike = recorded_input == self._facts.earlier
            self._manifest.check(
                {**settings, "input": recorded_input} if begins_alike else settings
            )
        settings["input size"] = self._facts.size
        if is_new or recorded_input != settings["input"]:
            self._manifest.write(settings)
        if settings["model"] is None:
            self._hashed = _in_background(lambda: {**settings, "model": self._llm.fingerprint})

    def _model_entries(self, is_new: bool) -> dict[str, str | None]:
        """Returns the manifest's entries of the model. The hash of all its files is computed in the
        background of a new job, and compared only if the files' times differ."""
        if self._options.model_id is not None:
            return {"model files": None, "model": self._options.model_id}
        files = self._llm.files_fingerprint
        recorded = None if is_new else self._manifest.recorded("model")
        if is_new or files == self._manifest.recorded("model files"):
            return {"model files": files, "model": recorded}
        return {"model files": files, "model": self._llm.fingerprint if recorded else "other files"}

    def _complete_manifest(self) -> None:
        """Writes the hash of the model's files to the manifest, once it is computed."""
        if self._hashed is not None and self._hashed.done():
            hashed, self._hashed = self._hashed, None
            if hashed.exception() is None:  # without it, the files' times tell the model
                self._manifest.write(hashed.result())

    def _continue(self) -> None:
        """Runs all lines that have no record; unfinished requests go to the journal at an
        interruption."""
        with closing(self._runner.stream(self._requests(), self._on_token)) as stream:
            try:
                for result in stream:
                    self._take(result)
                    self._results.sync()
            except UserError:  # a full disk may be too small for the journal, too
                with suppress(UserError):
                    self._write_journal()
                raise
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
                prompts = line.prompts_for(self._llm, self._now)
            except UserError as error:
                self._fail(line.number, line.error(str(error)))
            else:
                window += self._asked(line, prompts)
            if len(window) >= WINDOW:
                yield from self._sorted(window)
                window = []
        yield from self._sorted(window)

    def _lines(self) -> Iterator[Line]:
        num_begun, bytes_left, last = 0, self._facts.size, 0
        lines_left = self._facts.lines
        with self._source.opened() as file:
            for number, whole in numbered_lines(file):
                content = whole[:bytes_left]  # lines appended meanwhile are for the next run
                bytes_left -= len(content)
                if number == last or not content.strip():
                    if not lines_left:
                        return  # within a last line that is too long
                    continue
                last = number
                lines_left -= 1
                if self._results.has(number):
                    self._remember(line_name(content))
                    continue
                if num_begun == self._options.limit:
                    return
                num_begun += 1
                try:
                    line = read_line(content, number, self._chat_tokens, self._options.seed)
                    self._check(line)
                except LineError as error:
                    self._remember(line_name(content))
                    self._fail(number, error)
                else:
                    yield line

    def _check(self, line: Line) -> None:
        """Raises `LineError` for a line that this job does not accept."""
        if not self._remember(line.name):
            raise line.error(f"{line.name!r} is an earlier line's id")
        form = self._options.form
        if form is not None and line.form != form:
            url = next(url for url, form_of_url in URLS.items() if form_of_url == form)
            raise line.error(f'"url" must be {url!r}, the batch\'s endpoint')
        if line.chat is not None and line.chat.template and not self._options.accepts_templates:
            raise line.error('"chat_template" is not accepted from clients')

    def _remember(self, name: str | None) -> bool:
        """Notes a line's id; returns whether it is new."""
        if name is None:
            return True
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        is_new = digest not in self._names
        self._names.add(digest)
        return is_new

    @property
    def _record_prefix(self) -> str:
        return self._options.record_prefix or self._facts.digest[:12]

    def _fail(self, number: int, error: LineError) -> None:
        self._results.add(failure(number, error, self._record_prefix))

    def _asked(self, line: Line, prompts: Sequence[Prompt]) -> list[Request]:
        """Returns a line's requests, less those that the journal has as finished."""
        state = State(line)
        requests = []
        for choice in range(line.choices):
            earlier = self._kept.get(line.number, {}).get(str(choice), {})
            request = line.request(
                f"{line.number}.{choice}",
                prompts[choice // line.count],
                self._llm,
                continued=tuple(earlier.get("tokens", ())),
                place=choice if line.has_seed else line.number * MAX_CHOICES + choice,
            )
            logprobs = [read_logprob(x) for x in earlier.get("logprobs", ())]
            if "finish_reason" in earlier:
                state.done[choice] = finished_choice(request, earlier, logprobs)
            else:
                state.earlier[choice] = logprobs
                requests.append(request)
            self.summary.taken_up += len(request.continued)
        self._states[line.number] = state
        if not requests:
            self._give(state)
        return requests

    def _sorted(self, window: Sequence[Request]) -> Iterator[Request]:
        """Yields requests, the shortest prompts first, with those together that share a prefix."""
        texts = [n for n, request in enumerate(window) if request.prompt is not None]
        failed_indices = [n for n, request in enumerate(window) if request.prompt is None]
        of_texts = groups_of([window[n].prompt for n in texts], CHARACTERS)
        of_others = groups_of([tuple(window[n].prompt_token_ids or ()) for n in failed_indices])
        groups = dict(zip(texts, ((0, group) for group in of_texts), strict=True))
        groups |= dict(zip(failed_indices, ((1, group) for group in of_others), strict=True))
        longest = dict[tuple[int, int], int]()
        for n, group in groups.items():
            longest[group] = max(longest.get(group, 0), _length(window[n]))
        order = sorted(groups, key=lambda n: (longest[groups[n]], groups[n], _length(window[n])))
        yield from (window[n] for n in order)

    # Results

    def _on_token(self, _id: str, _token: int) -> None:
        self.summary.tokens += 1
        now = time.monotonic()
        if now >= self._journal_due:
            self._write_journal()
            self._journal_due = now + self._options.journal_s
        if now >= self._report_due:
            self._results.sync()
            self._complete_manifest()
            self._report()

    def _take(self, result: RequestOutput) -> None:
        """Takes the result of a choice; when it is its line's last, the line's record is made."""
        number, choice = map(int, result.id.split("."))
        state = self._states.get(number)
        if state is None:
            return  # another choice of this line was impossible
        if result.error is not None:
            self._fail(number, state.line.error(result.error))
            del self._states[number]
            return
        state.done[choice] = self._whole(result)
        if len(state.done) == state.line.choices:
            self._give(state)

    def _whole(self, result: RequestOutput) -> RequestOutput:
        """Returns a result, extended by the log-probabilities of an earlier run's tokens."""
        if result.logprobs is None:
            return result
        number, choice = map(int, result.id.split("."))
        earlier = self._states[number].earlier[choice]
        return replace(result, logprobs=[*earlier, *result.logprobs])

    def _left(self) -> dict[int, dict[str, Any]]:
        """Returns the last journal's entries for lines without a record."""
        return {line: dict(x) for line, x in self._kept.items() if not self._results.has(line)}

    def _give(self, state: State) -> None:
        results = [state.done[choice] for choice in range(state.line.choices)]
        record = answer(state.line, results, self._llm, self._record_prefix)
        self._results.add(record)
        del self._states[state.line.number]

    def _write_journal(self) -> None:
        """Saves the tokens of all lines without a record, including lines that the engine has not
        resumed yet."""
        entries = self._left()
        for result in self._runner.untaken():
            number, choice = map(int, result.id.split("."))
            if number in self._states and result.error is None:
                entries.setdefault(number, {})[str(choice)] = done(self._whole(result))
        for number, state in list(self._states.items()):
            for choice, result in state.done.items():
                entries.setdefault(number, {})[str(choice)] = done(result)
        for name, tokens, logprobs in self._runner.unfinished():
            number, choice = map(int, name.split("."))
            if number in self._states and tokens:
                earlier = self._states[number].earlier.get(choice, [])
                every = [*earlier, *logprobs]
                if self._states[number].line.params.logprobs is not None:
                    tokens = tokens[: len(every)]  # an interruption may occur between them
                entry = {"tokens": list(tokens)} | logprobs_json(every[: len(tokens)])
                entries.setdefault(number, {})[str(choice)] = entry
        self._journal.write(entries)

    def _report(self, force: bool = False) -> None:
        """Writes the progress file, if there is one and it is old."""
        now, path = time.monotonic(), self._options.progress_file
        if path is None or (now < self._report_due and not force):
            self._report_due = max(self._report_due, now + REPORT_S)
            return
        self._report_due = now + REPORT_S
        partial = path.with_name(path.name + ".part")
        with suppress(OSError):  # which is no reason to end a job
            partial.write_text(json.dumps(self.progress()) + "\n")
            partial.replace(path)

    def progress(self) -> dict[str, Any]:
        """Returns the job's counts, from any thread: requests, finished requests (errors included),
        errors, tokens of this run, and the remaining seconds, None while they are unknown."""
        seconds, tokens = time.monotonic() - self._began, self.summary.tokens
        has_begun = self.summary.total > 0
        done, errors = (self._results.done, self._results.errors) if has_begun else (0, 0)
        num_new, num_left = done - self._done_before, self.summary.total - done
        return {
            "requests": self.summary.total,
            "finished": done,
            "errors": errors,
            "tokens": tokens,
            "token_s": tokens / max(seconds, 1e-9),
            "eta_s": seconds_left(seconds, num_new, num_left),
        }


def _length(request: Request) -> int:
    if request.prompt is not None:
        return len(request.prompt)
    return CHARACTERS * len(request.prompt_token_ids or ())


def _in_background(compute: Callable[[], dict[str, Any]]) -> Future[dict[str, Any]]:
    """Computes a value in a daemon thread of lowest priority."""
    future: Future[dict[str, Any]] = Future()

    def run() -> None:
        with suppress(OSError, AttributeError):  # systems where threads have no priority
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        try:
            future.set_result(compute())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name="hash", daemon=True).start()
    return future
