"""Batches of OpenAI's interface: jobs whose requests run among those of the server's clients.

A batch is a `jobs.job.Job`. Its files lie in a folder, so that a restarted server continues it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from flexgen_jax.errors import MachineError
from flexgen_jax.jobs.job import Job
from flexgen_jax.jobs.lines import URLS
from flexgen_jax.jobs.options import JobOptions
from flexgen_jax.jobs.store import Disk, unsealed
from flexgen_jax.progress import logger
from flexgen_jax.server.engine import Engine
from flexgen_jax.server.errors import RefusedError
from flexgen_jax.server.files import Files, read_record
from flexgen_jax.server.page import job_row
from flexgen_jax.server.shared_runner import MAX_RETRY_S, MIN_RETRY_S, SharedRunner

BATCH_ID = re.compile(r"batch_[0-9a-f]{24}")

JOURNAL_S = 10.0
"""Seconds between two journals of a batch."""

MAX_RUNNING_BATCHES = 256
"""The maximum number of batches that run at the same time, each in a thread."""

PENDING = ("validating", "in_progress", "finalizing", "cancelling")
TIMES = ("in_progress", "finalizing", "completed", "failed", "cancelling", "cancelled", "expired")


class Batches:
    """The batches of a folder, and the tasks that run them.

    model_id: identifies the engine's model. A server leaves batches of other models alone.
    """

    def __init__(self, folder: Path, engine: Engine, files: Files, model_id: str = "-") -> None:
        self._folder = folder / "batches"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._engine, self._files = engine, files
        self._model_id = hashlib.sha256(model_id.encode()).hexdigest()[:16]
        self._running: dict[str, RunningBatch] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._threads = ThreadPoolExecutor(MAX_RUNNING_BATCHES, thread_name_prefix="batch")

    def start(self) -> None:
        """Resumes unfinished batches of an earlier server."""
        for description in self.all():
            if description["status"] not in PENDING:
                continue
            if description.get("model_id", self._model_id) == self._model_id:
                try:
                    self._run(description)
                except OSError as error:  # a later server tries again
                    logger().error("flexgen-jax: %s: %s", description["id"], error)
            else:
                logger().warning(
                    "flexgen-jax: %s is unfinished and was begun with another model; a server of "
                    "that model continues it",
                    description["id"],
                )

    async def stop(self) -> None:
        """Interrupts all batches; a later server resumes them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._threads.shutdown()

    def add(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Begins a batch; returns its description."""
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
            "model_id": self._model_id,
        }
        self._run(description)
        return description

    def get(self, batch_id: str) -> dict[str, Any]:
        """Returns a batch's description; raises `RefusedError` for an unknown id."""
        if batch_id in self._running:
            return self._running[batch_id].current()
        if BATCH_ID.fullmatch(batch_id):
            record = read_record(self._folder / f"{batch_id}.json")
            if record is not None:
                return record
        raise RefusedError(404, f"batch {batch_id!r} does not exist")

    def all(self) -> list[dict[str, Any]]:
        """Returns the descriptions of all batches, newest first."""
        records = map(read_record, self._folder.glob("batch_*.json"))
        descriptions = [self.get(record["id"]) for record in records if record is not None]
        return sorted(descriptions, key=lambda batch: (-batch["created_at"], batch["id"]))

    def progress(self) -> list[dict[str, Any]]:
        """Returns the progress of unfinished batches, as rows of the page."""
        return [batch.row for batch in self._running.values()]

    def cancel(self, batch_id: str) -> dict[str, Any]:
        """Ends a batch with the results so far."""
        description = self.get(batch_id)
        if description["status"] not in PENDING:
            raise RefusedError(400, f"the batch {batch_id!r} is {description['status']}")
        batch = self._running.get(batch_id)
        if batch is not None:
            batch.cancel()
            return batch.current()
        # One of another model, which no server may continue.
        _enter(description, "cancelling")
        self._run(description)
        return description

    def _run(self, description: dict[str, Any]) -> None:
        """Runs a batch in a task. Its input is linked, so that a client may delete the file."""
        input_path = self._files.content(description["input_file_id"])
        batch = RunningBatch(self._folder, description, self._engine, self._save, self._model_id)
        batch.keep_input(input_path)
        self._save(description)
        self._running[description["id"]] = batch
        task = asyncio.create_task(self._run_until_done(batch))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run_until_done(self, batch: RunningBatch) -> None:
        """Runs a batch, and again after faults of the machine, such as a full disk."""
        batch_id, retry_s = batch.description["id"], MIN_RETRY_S
        while True:
            try:
                await batch.run(self._threads)
                await asyncio.to_thread(batch.write_files, self._files)
                batch.close()
                break
            except (MachineError, OSError) as error:
                logger().error("flexgen-jax: %s: %s; retrying in %.0f s", batch_id, error, retry_s)
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, MAX_RETRY_S)
            saved = read_record(self._folder / f"{batch_id}.json")
            if saved is not None and saved["status"] not in PENDING:
                break  # finished by another server of this folder
        del self._running[batch_id]

    def _save(self, description: Mapping[str, Any]) -> None:
        path = self._folder / f"{description['id']}.json"
        Disk().write_whole(path, [json.dumps(description).encode()])


class RunningBatch:
    """An unfinished batch. description: its JSON for clients, without the current counts."""

    def __init__(
        self,
        folder: Path,
        description: dict[str, Any],
        engine: Engine,
        save: Callable[[Mapping[str, Any]], object],
        model_id: str,
    ) -> None:
        self.description = description
        self._engine, self._save, self._model_id = engine, save, model_id
        self._input = folder / f"{description['id']}.input"
        self._results = folder / f"{description['id']}.results"
        self._runner: SharedRunner | None = None
        self._job: Job | None = None

    def keep_input(self, path: Path) -> None:
        """Links or copies the input, unless an earlier server has."""
        if self._input.exists() or not path.exists():
            return
        try:
            os.link(path, self._input)
        except OSError:  # a file system without links
            partial = self._input.with_suffix(".part")
            shutil.copyfile(path, partial)
            partial.replace(self._input)

    def current(self) -> dict[str, Any]:
        """Returns the description with the current counts."""
        if self._job is not None and (progress := self._job.progress())["requests"]:
            self.description["request_counts"] = {
                "total": progress["requests"],
                "completed": progress["finished"] - progress["errors"],
                "failed": progress["errors"],
            }
        return self.description

    @property
    def row(self) -> dict[str, Any]:
        """The progress, as a row of the page."""
        nothing = {"requests": 0, "finished": 0, "errors": 0, "eta_s": None}
        return job_row(
            self.description["id"], nothing if self._job is None else self._job.progress()
        )

    def cancel(self) -> None:
        """Submits no more requests, and cancels running ones."""
        if self._runner is not None:
            self._runner.cancel()
        _enter(self.description, "cancelling")
        self._save(self.current())

    async def run(self, threads: ThreadPoolExecutor) -> None:
        """Runs the job. An error that another try would meet again is kept as the batch's error."""
        if self.description["status"] == "cancelling" or self.description["errors"] is not None:
            return
        try:
            self._runner = SharedRunner(self._engine, self.description["id"], self._begin)
            self._job = Job(self._engine.llm, self._options, self._runner)
            future = asyncio.get_running_loop().run_in_executor(threads, self._job.run)
            try:
                await asyncio.shield(future)
            except asyncio.CancelledError:
                self._runner.stop()
                await asyncio.gather(future, return_exceptions=True)
                raise
        except (MachineError, OSError):
            raise
        except Exception as error:
            logger().error("flexgen-jax: %s failed: %s", self.description["id"], error)
            data = [{"code": "server_error", "message": str(error), "line": None, "param": None}]
            self.description["errors"] = {"object": "list", "data": data}

    @property
    def _options(self) -> JobOptions:
        batch_id = self.description["id"]
        return JobOptions(
            source=self._input,
            results=self._results,
            seed=int(batch_id[-6:], 16),
            journal_s=JOURNAL_S,
            form=URLS[self.description["endpoint"]],
            accepts_templates=False,
            record_prefix=batch_id,
            model_id=self._model_id,
        )

    def _begin(self) -> None:
        if self.description["status"] == "validating":
            _enter(self.description, "in_progress")
            with suppress(OSError):  # the status is saved again at the end
                self._save(self.current())

    def write_files(self, files: Files) -> None:
        """Writes the records to an output file and an error file, again if they exist already."""
        counts = Counter(purpose for purpose, _ in self._records())
        for purpose in counts:
            name = f"{self.description['id']}_{purpose}"
            file_id = f"file-{hashlib.sha256(name.encode()).hexdigest()[:24]}"
            lines = (line for kind, line in self._records() if kind == purpose)
            files.add(f"{name}.jsonl", "batch_output", lines, file_id)
            self.description[f"{purpose}_file_id"] = file_id
        total = self.current()["request_counts"]["total"]
        self.description["request_counts"] = {
            "total": max(total, counts.total()),
            "completed": counts["output"],
            "failed": counts["error"],
        }

    def close(self) -> None:
        """Enters the final state, and deletes the job's files."""
        self._job = None
        final = "cancelled" if self.description["status"] == "cancelling" else "completed"
        if self.description["errors"] is not None:
            final = "failed"
        self._save({**self.description, "status": final, f"{final}_at": int(time.time())})
        _enter(self.description, final)
        for path in (self._input, *self._results.parent.glob(f"{self._results.name}*")):
            path.unlink(missing_ok=True)

    def _records(self) -> Iterator[tuple[str, bytes]]:
        """Yields the records as lines, each with its purpose: "output" for a result, "error"."""
        if not self._results.exists():
            return
        with open(self._results, "rb") as file:
            for line in file:
                record = unsealed(line)
                if record is not None:
                    yield "output" if record["error"] is None else "error", line


def _enter(description: dict[str, Any], status: str) -> None:
    """Changes a batch's status, and notes the time of the first change to it."""
    description["status"] = status
    description[f"{status}_at"] = description[f"{status}_at"] or int(time.time())
