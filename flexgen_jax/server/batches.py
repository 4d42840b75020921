"""Batches of OpenAI's interface: files of requests that run next to clients' requests.

Finished lines of a batch are in two files, one record per line. A restarted server reads them and
continues with the missing lines.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from flexgen_jax.engine.requests import Request
from flexgen_jax.jobs.answers import answer, failure
from flexgen_jax.jobs.lines import URLS, Line, LineError, read_line
from flexgen_jax.jobs.source import numbered_lines
from flexgen_jax.jobs.store import sealed, unsealed
from flexgen_jax.progress import logger, seconds_left
from flexgen_jax.server.bodies import chat_tokens_of, requests_of
from flexgen_jax.server.engine import Engine, EngineError, Text
from flexgen_jax.server.errors import RefusedError
from flexgen_jax.server.files import Files, read_record, write_whole

BATCH_ID = re.compile(r"batch_[0-9a-f]{24}")

MIN_WAITING_TEXTS = 16
"""Texts of batches that may wait at least, so that there are rows to fill."""

LEAST_LATER_S, MOST_LATER_S = 5.0, 60.0
"""Seconds before a line is retried after a fault of the machine."""

LOOK_S = 0.05
"""Seconds between two looks at whether more texts of a batch may be asked for."""

UNDER_WAY = ("validating", "in_progress", "cancelling")
TIMES = ("in_progress", "finalizing", "completed", "failed", "cancelling", "cancelled", "expired")


class Batches:
    """The batches of a folder, and the tasks that run them."""

    def __init__(self, folder: Path, engine: Engine, files: Files) -> None:
        self._folder = folder / "batches"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._engine, self._files = engine, files
        self._running: dict[str, Running] = {}

    def start(self) -> None:
        """Resumes unfinished batches of an earlier server."""
        for description in self.all():
            if description["status"] in UNDER_WAY:
                self._run(description)

    async def stop(self) -> None:
        """Stops where it is; a later server resumes them."""
        tasks = [running.task for running in self._running.values() if running.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def add(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Begins a batch; returns what is said of it."""
        endpoint, file_id = body.get("endpoint"), body.get("input_file_id")
        if not isinstance(endpoint, str) or endpoint not in URLS:
            endpoints = ", ".join(URLS)
            raise RefusedError(400, f'"endpoint" must be one of {endpoints}, not {endpoint!r}')
        if not isinstance(file_id, str):
            raise RefusedError(400, f'"input_file_id" must be the id of a file, not {file_id!r}')
        self._files.get(file_id)
        description = {
            "id": f"batch_{secrets.token_hex(12)}",
            "object": "batch",
            "endpoint": endpoint,
            "errors": None,
            "input_file_id": file_id,
            "completion_window": str(body.get("completion_window", "24h")),
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": int(time.time()),
            "expires_at": None,
            **{f"{name}_at": None for name in TIMES},
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": body.get("metadata"),
        }
        self._keep(description)
        self._run(description)
        return description

    def get(self, batch_id: str) -> dict[str, Any]:
        """Returns a batch's description; raises `RefusedError` if there is none of this id."""
        if batch_id in self._running:
            return self._running[batch_id].said
        if BATCH_ID.fullmatch(batch_id):
            record = read_record(self._folder / f"{batch_id}.json")
            if record is not None:
                return record
        raise RefusedError(404, f"batch {batch_id!r} does not exist")

    def all(self) -> list[dict[str, Any]]:
        """Returns the descriptions of all batches, newest first."""
        records = map(read_record, self._folder.glob("batch_*.json"))
        descriptions = [self.get(record["id"]) for record in records if record is not None]
        return sorted(descriptions, key=lambda said: (-said["created_at"], said["id"]))

    def progress(self) -> list[dict[str, Any]]:
        """Returns how far the batches are that are under way."""
        return [running.progress for running in self._running.values()]

    def cancel(self, batch_id: str) -> dict[str, Any]:
        """Ends a batch with the texts that it has."""
        description = self.get(batch_id)
        running = self._running.get(batch_id)
        if running is None or description["status"] not in UNDER_WAY:
            raise RefusedError(400, f"the batch {batch_id!r} is {description['status']}")
        running.cancel()
        self._keep(description)
        return description

    def _run(self, said: dict[str, Any]) -> None:
        running = Running(self._folder, said, self._engine, self._files, self._keep)
        self._running[said["id"]] = running
        running.task = asyncio.create_task(self._until_done(running))

    async def _until_done(self, running: Running) -> None:
        try:
            await running.run()
        except Exception as error:
            logger().error("flexgen-jax: %s failed: %s", running.said["id"], error, exc_info=True)
            running.fail([{"code": "server_error", "message": str(error)}])
        self._running.pop(running.said["id"], None)

    def _keep(self, said: Mapping[str, Any]) -> None:
        write_whole(self._folder / f"{said['id']}.json", json.dumps(said).encode())


class Running:
    """One batch under way. said: its description for clients."""

    def __init__(
        self, folder: Path, said: dict[str, Any], engine: Engine, files: Files, keep: Any
    ) -> None:
        self.said = said
        self.task: asyncio.Task[None] | None = None
        self._engine, self._files, self._keep = engine, files, keep
        self._answers = folder / f"{said['id']}.answers"
        self._errors = folder / f"{said['id']}.errors"
        self._texts: set[Text] = set()
        # Lines that are read, whose texts are not asked for yet.
        self._coming = 0
        # When this server began with it, and the lines that had a record then.
        self._began, self._done_before = time.monotonic(), 0

    @property
    def is_cancelled(self) -> bool:
        return bool(self.said["status"] == "cancelling")

    @property
    def progress(self) -> dict[str, Any]:
        """How far it is. eta_s: remaining seconds, None if unknown."""
        counts = self.said["request_counts"]
        done, total = counts["completed"] + counts["failed"], counts["total"]
        seconds, num_new = time.monotonic() - self._began, done - self._done_before
        return {
            "name": self.said["id"],
            "done": done,
            "failed": counts["failed"],
            "total": total,
            "eta_s": seconds_left(seconds, num_new, total - done),
        }

    def cancel(self) -> None:
        """Asks for no more texts, and ends those under way."""
        self._enter("cancelling")
        self._engine.cancel(list(self._texts))

    def fail(self, errors: list[dict[str, Any]]) -> None:
        """Ends it without results."""
        self.said["errors"] = {"object": "list", "data": errors}
        self._enter("failed")
        self._keep(self.said)

    async def run(self) -> None:
        """Runs the lines that have no record yet."""
        source = self._files.content(self.said["input_file_id"])
        count = await asyncio.to_thread(lambda: sum(1 for _ in _lines(source)))
        counts = self.said["request_counts"]
        done = {*_numbers(self._answers), *(failed := _numbers(self._errors))}
        counts |= {"total": count, "completed": len(done) - len(failed), "failed": len(failed)}
        self._began, self._done_before = time.monotonic(), len(done)
        if not self.is_cancelled:
            self._enter("in_progress")
        self._keep(self.said)
        with open(self._answers, "ab") as answers, open(self._errors, "ab") as errors:
            async with asyncio.TaskGroup() as group:
                for number, content in _lines(source):
                    if number in done:
                        continue
                    await self._turn()
                    if self.is_cancelled:
                        break
                    self._coming += 1
                    group.create_task(self._line(number, content, answers, errors))
        await asyncio.to_thread(self._finish)

    async def _turn(self) -> None:
        """Waits until more texts may be asked for."""
        while not self.is_cancelled and not self._may_ask():
            await asyncio.sleep(LOOK_S)

    def _may_ask(self) -> bool:
        """Returns whether more texts may be asked for: no more wait than fill the next rows, and
        after a client has come, the rows of one batch stay free for the next one."""
        engine, policy = self._engine, self._engine.llm.policy
        rows = MIN_WAITING_TEXTS if policy is None else policy.batch_size
        if engine.waiting + self._coming >= max(MIN_WAITING_TEXTS, rows):
            return False
        if policy is None or policy.num_batches == 1 or not engine.has_clients:
            return True
        free_rows = rows * (policy.num_batches - 1) - engine.running - engine.waiting
        return self._coming < free_rows

    async def _line(
        self, number: int, content: bytes, answers: IO[bytes], errors: IO[bytes]
    ) -> None:
        """Runs a line, and writes its record."""
        counts = self.said["request_counts"]
        try:
            record = await self._answered(number, content)
        except LineError as error:
            counts["failed"] += 1
            _append(errors, failure(number, error, self.said["id"]))
            return
        if record is not None:
            counts["completed"] += 1
            _append(answers, record)

    async def _answered(self, number: int, content: bytes) -> dict[str, Any] | None:
        """Returns a line's record; None if it was cancelled. Raises `LineError`."""
        engine, wait_s = self._engine, LEAST_LATER_S
        while True:
            try:
                line, requests = await asyncio.to_thread(self._read, number, content)
                texts = engine.submit(requests, is_batch=True)
            finally:
                self._coming -= 1
            self._texts |= {*texts}
            try:
                results = [await text.result() for text in texts]
                break
            except EngineError as error:
                if error.status < 500:
                    raise line.error(str(error)) from None
            finally:
                self._texts -= {*texts}
                engine.cancel(texts)
            await self._later(wait_s)
            wait_s = min(2 * wait_s, MOST_LATER_S)
            self._coming += 1
            if self.is_cancelled:
                self._coming -= 1
                return None
        if any(result.finish_reason == "cancelled" for result in results):
            return None
        for result in results:
            if result.error is not None:
                raise line.error(result.error)
        return await asyncio.to_thread(answer, line, results, engine.llm, self.said["id"])

    async def _later(self, seconds: float) -> None:
        """Waits after a fault of the machine, which leaves lines without a record; for ever, until
        the server ends, if the engine does not run any more."""
        await asyncio.sleep(seconds)
        while self._engine.is_broken:
            await asyncio.sleep(MOST_LATER_S)

    def _read(self, number: int, content: bytes) -> tuple[Line, list[Request]]:
        """Returns what a line asks for, and the requests of its texts."""
        line = read_line(content, number, chat_tokens_of(self._engine.llm), 0)
        if URLS[self.said["endpoint"]] != line.form:
            raise line.error(f'"url" must be {self.said["endpoint"]!r}, the batch\'s endpoint')
        try:
            return line, requests_of(line, self._engine.llm, self._engine.next_id)
        except RefusedError as error:
            raise line.error(str(error)) from None

    def _finish(self) -> None:
        """Makes files of the records."""
        was_cancelled = self.is_cancelled
        self._enter("finalizing" if not was_cancelled else "cancelling")
        for path, purpose in ((self._answers, "output"), (self._errors, "error")):
            if path.stat().st_size:
                file_id = self.said[f"{purpose}_file_id"] or self._files.new_id()
                write_whole(self._files.content(file_id), path.read_bytes())
                self._files.name(file_id, f"{self.said['id']}_{purpose}.jsonl", "batch_output")
                self.said[f"{purpose}_file_id"] = file_id
        self._enter("cancelled" if was_cancelled else "completed")
        self._keep(self.said)
        self._answers.unlink(missing_ok=True)
        self._errors.unlink(missing_ok=True)

    def _enter(self, status: str) -> None:
        self.said["status"] = status
        self.said[f"{status}_at"] = self.said[f"{status}_at"] or int(time.time())


def _lines(source: Path) -> Iterator[tuple[int, bytes]]:
    """Yields the lines that are not blank with their numbers from 1; of one that is too long, the
    first piece."""
    last = 0
    with open(source, "rb") as file:
        for number, content in numbered_lines(file):
            if number != last and content.strip():
                yield number, content
                last = number


def _append(file: IO[bytes], record: dict[str, Any]) -> None:
    """Writes a record, at once."""
    file.write(sealed(record))
    file.flush()


def _numbers(path: Path) -> set[int]:
    """Returns the lines that have a record in a file. Damaged records, and an incomplete last
    record, are removed."""
    if not path.exists():
        return set()
    lines = path.read_bytes().splitlines(keepends=True)
    records = [(line, record) for line in lines if (record := unsealed(line)) is not None]
    if len(records) < len(lines):
        write_whole(path, b"".join(line for line, _ in records))
    return {record["line"] for _, record in records}
