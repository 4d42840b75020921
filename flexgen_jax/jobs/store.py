"""Files of a job: results, which are only added to; a journal of unfinished texts; and a manifest
of what the job depends on. Whatever moment a job is killed at, they are valid."""

from __future__ import annotations

import fcntl
import json
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from math import inf
from pathlib import Path
from typing import IO, Any

from flexgen_jax.errors import UserError

SYNC_S = 1.0
"""Results are forced to the disk together, when the oldest of them has waited for so long."""


KINDS_OF_ERRORS = 1000
"""Messages of errors that are counted."""


class Disk:
    """The operations by which a job changes files; tests replace them by ones that fail."""

    def write(self, file: IO[bytes], content: bytes) -> int:
        """Writes some of the content; returns how many bytes."""
        return file.write(content)

    def sync(self, file: IO[bytes]) -> None:
        os.fsync(file.fileno())

    def replace(self, old: Path, new: Path) -> None:
        os.replace(old, new)

    def write_all(self, file: IO[bytes], content: bytes) -> None:
        rest = memoryview(content)
        while rest:
            rest = rest[self.write(file, bytes(rest)) :]

    def write_whole(self, path: Path, content: Iterable[bytes]) -> None:
        """Replaces a file's content, given in parts: all of it, or, if that fails, nothing."""
        part = beside(path, "part")
        try:
            with open(part, "wb", buffering=0) as file:
                for some in content:
                    self.write_all(file, some)
                self.sync(file)
            self.replace(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def beside(path: Path, what: str) -> Path:
    """Returns the path of a file that belongs to a file of results."""
    return path.with_name(f"{path.name}.{what}")


class Results:
    """A file of records, a line of JSON each, of which each has its line in the input as "line".

    May be used from several threads. finished: whether a line of the input has its record, as a
    byte; done: the number of records; errors: of those that say why a line could not be run; said:
    what these say, of which few kinds are kept.
    """

    def __init__(self, path: Path, disk: Disk) -> None:
        self._path, self._disk, self._lock = path, disk, threading.Lock()
        self._finished, self.done, self.errors = bytearray(), 0, 0
        self._said: Counter[str] = Counter()
        self._waits_since: float | None = None
        try:
            self._file: IO[bytes] = open(path, "a+b", buffering=0)  # noqa: SIM115 - see `close`
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from None
        try:
            _lock(self._file, path)
            self._take_up()
        except BaseException:
            self._file.close()
            raise

    def has(self, line: int) -> bool:
        return line < len(self._finished) and bool(self._finished[line])

    def add(self, record: Mapping[str, Any]) -> None:
        """Adds a record; raises `UserError` if it cannot be written, and leaves the file as it
        was."""
        content = json.dumps(record).encode() + b"\n"
        with self._lock:
            before = os.fstat(self._file.fileno()).st_size
            try:
                self._disk.write_all(self._file, content)
                self._sync(time.monotonic())
            except OSError as error:
                os.truncate(self._file.fileno(), before)
                raise self._failed(error) from None
            self._mark(record)

    def sync(self, is_due: bool = False) -> None:
        """Forces what is written to the disk, if that is due, or said to be."""
        with self._lock:
            try:
                self._sync(inf if is_due else time.monotonic())
            except OSError as error:
                raise self._failed(error) from None

    def close(self) -> None:
        try:
            self._disk.sync(self._file)
        except OSError as error:
            raise self._failed(error) from None
        finally:
            self._file.close()

    @property
    def commonest_error(self) -> tuple[str, int] | None:
        """What most errors say, without their lines' numbers, and how many do; None without
        errors."""
        return next(iter(self._said.most_common(1)), None)

    def forget_errors(self) -> None:
        """Takes out the records of lines that could not be run."""
        if not self.errors:
            return

        def good() -> Iterator[bytes]:
            with open(self._path, "rb") as file:
                yield from (line for line in file if json.loads(line)["error"] is None)

        self._rewrite(good())
        self._finished, self.done, self.errors = bytearray(), 0, 0
        self._said.clear()
        self._take_up()

    def _rewrite(self, content: Iterable[bytes]) -> None:
        """Replaces the file's content, and goes on with the new file."""
        try:
            self._disk.write_whole(self._path, content)
        except OSError as error:
            raise self._failed(error) from None
        old, self._file = self._file, open(self._path, "a+b", buffering=0)  # noqa: SIM115
        _lock(self._file, self._path)
        old.close()

    def put_in_order(self) -> None:
        """Rewrites the file in the order of the input's lines."""
        places: list[tuple[int, int, int]] = []
        at = 0
        with open(self._path, "rb") as file:
            for content in file:
                places.append((json.loads(content)["line"], at, len(content)))
                at += len(content)

            def ordered() -> Iterator[bytes]:
                for _, begin, size in sorted(places):
                    file.seek(begin)
                    yield file.read(size)

            self._rewrite(ordered())

    def _sync(self, now: float) -> None:
        if self._waits_since is None and now < inf:
            self._waits_since = now
        elif self._waits_since is not None and now - self._waits_since >= SYNC_S:
            self._disk.sync(self._file)
            self._waits_since = None

    def _mark(self, record: Mapping[str, Any]) -> None:
        line = int(record["line"])
        if line >= len(self._finished):
            self._finished.extend(bytes(line + 1 - len(self._finished)))
        self._finished[line] = 1
        self.done += 1
        error = record["error"]
        if error is not None:
            self.errors += 1
            message = error.get("message", "") if isinstance(error, Mapping) else error
            said = re.sub(r"^line \d+: ", "", str(message))
            if said in self._said or len(self._said) < KINDS_OF_ERRORS:
                self._said[said] += 1

    def _failed(self, error: OSError) -> UserError:
        return UserError(
            f"cannot write {self._path}: {error.strerror}; what is in it is kept, and once it can "
            "be written the same command goes on"
        )

    def _take_up(self) -> None:
        """Finds the records that there are, and cuts off a line that was not written whole."""
        whole = 0
        with open(self._path, "rb") as file:
            for number, content in enumerate(file, 1):
                if not content.endswith(b"\n"):
                    break
                try:
                    self._mark(json.loads(content))
                except (ValueError, KeyError, TypeError, RecursionError):
                    raise UserError(
                        f"{self._path}, line {number}, is no record of a job; choose another file"
                    ) from None
                whole += len(content)
        os.truncate(self._path, whole)


class Journal:
    """The texts that were not finished when a job was broken off: for each line of the input and
    choice of it, its tokens, and if it is finished its result. It is written as a whole, beside the
    results."""

    def __init__(self, results: Path, disk: Disk) -> None:
        self._path, self._disk = beside(results, "journal"), disk

    def read(self) -> dict[int, dict[str, Any]]:
        """Returns what was kept by line; nothing if there is no journal."""
        try:
            raw = json.loads(self._path.read_bytes())
            return {int(line): dict(kept) for line, kept in raw.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise UserError(
                f"cannot read the journal {self._path}: {error}; delete it, and unfinished texts "
                "begin anew"
            ) from None

    def write(self, kept: Mapping[int, Any]) -> None:
        try:
            self._disk.write_whole(self._path, [json.dumps(kept).encode()])
        except OSError as error:
            raise UserError(
                f"cannot write the journal {self._path}: {error.strerror}; results are kept, and "
                "once it can be written the same command goes on"
            ) from None

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


NOT_COMPARED = frozenset(("input size",))
"""Entries of a manifest that are there to be read."""


class Manifest:
    """What a job's results depend on, by name; a job is taken up only if it is the same."""

    def __init__(self, results: Path, disk: Disk) -> None:
        self._results, self._path, self._disk = results, beside(results, "manifest"), disk

    def check_ownership(self) -> None:
        """Raises `UserError` for a file of something else, before it is touched."""
        if self._results.name == "-" or (self._results.exists() and not self._results.is_file()):
            raise UserError(
                f"{self._results} is no regular file, from which a job could go on; choose another"
            )
        has_content = self._results.is_file() and self._results.stat().st_size > 0
        if has_content and not self._path.is_file():
            raise UserError(
                f"{self._results} is there already, without the manifest {self._path.name} of a "
                "job; choose another file"
            )

    def recorded(self, name: str) -> Any:
        """Returns what the manifest of an earlier run says; None if it says nothing."""
        return self._read().get(name)

    def write(self, content: Mapping[str, Any]) -> None:
        """Writes the manifest of a job that begins, or whose input has more lines now."""
        try:
            self._disk.write_whole(self._path, [json.dumps(content, indent=2).encode() + b"\n"])
        except OSError as error:
            raise UserError(f"cannot write {self._path}: {error.strerror}") from None

    def check(self, content: Mapping[str, Any]) -> None:
        """Raises `UserError` if an earlier run's manifest differs, and says in what."""
        old = self._read()
        if not old:
            raise UserError(
                f"{self._results} has results, but its manifest {self._path} cannot be read; "
                "choose another file"
            )
        names = {*content, *old} - NOT_COMPARED
        differs = [name for name in names if old.get(name) != content.get(name)]
        if differs:
            what = ", ".join(f"the {name}" for name in sorted(differs))
            hint = ""
            if "input" in differs:
                hint = " (requests, with what is asked of each); lines may only be added at its end"
            raise UserError(
                f"{self._results} is of a job that differs in {what}{hint}; choose another file, "
                "or give what that job was given"
            )

    def _read(self) -> dict[str, Any]:
        """Returns the manifest, an empty one if it cannot be read."""
        try:
            raw = json.loads(self._path.read_bytes())
        except (OSError, ValueError):
            return {}
        return raw if isinstance(raw, dict) else {}


def _lock(file: IO[bytes], path: Path) -> None:
    """Locks a file until it is closed, where its file system has locks; raises `UserError` if
    another process has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{path} is being written by another job; choose another file") from None
    except OSError:
        pass  # a file system without locks
