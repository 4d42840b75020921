"""Files of a job: results, which are only added to; a journal of unfinished requests; and a
manifest of the job's inputs. They are valid whenever a job is killed. Every record has a checksum;
a damaged one is computed again."""

from __future__ import annotations

import fcntl
import json
import os
import re
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from math import inf
from pathlib import Path
from typing import IO, Any

from flexgen_jax.caches import checksum
from flexgen_jax.errors import MachineError, UserError

SYNC_S = 1.0
"""Results are forced to the disk together, when the oldest of them has waited for so long."""


KINDS_OF_ERRORS = 1000
"""Messages of errors that are counted."""


class Disk:
    """The file operations of a job; tests replace them by ones that fail."""

    def write(self, file: IO[bytes], content: bytes) -> int:
        """Writes some of the content; returns how many bytes."""
        return file.write(content)

    def sync(self, file: IO[bytes]) -> None:
        os.fsync(file.fileno())

    def replace(self, old: Path, new: Path) -> None:
        os.replace(old, new)

    def write_all(self, file: IO[bytes], content: bytes) -> None:
        remaining = memoryview(content)
        while remaining:
            remaining = remaining[self.write(file, bytes(remaining)) :]

    def write_whole(self, path: Path, content: Iterable[bytes]) -> None:
        """Replaces a file's content, given in parts: all of it, or, if that fails, nothing."""
        partial = beside(path, "part")
        try:
            with open(partial, "wb", buffering=0) as file:
                for piece in content:
                    self.write_all(file, piece)
                self.sync(file)
            self.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def beside(path: Path, suffix: str) -> Path:
    """Returns the path of a file that belongs to a file of results."""
    return path.with_name(f"{path.name}.{suffix}")


RECORD_FORMAT = 2
"""Version of the records of results and journals, which the manifest names."""

CHECKSUM = re.compile(rb', "crc32": (\d+)}\n')
"""The end of a record's line."""

DAMAGED_MARKS = b'"crc32": ', b'"line": ', b"\0"
"""A damaged record has at least one of these: a part of every record, or the zeros that a power cut
leaves in a file."""


def sealed(record: Mapping[str, Any]) -> bytes:
    """Returns a record as a line of JSON whose last entry, "crc32", is the CRC-32 of the line
    without that entry."""
    content = json.dumps(record).encode()
    return content[:-1] + b', "crc32": %d}\n' % zlib.crc32(content)


def unsealed(line: bytes) -> dict[str, Any] | None:
    """Returns the record of a line, None of a damaged one."""
    end = CHECKSUM.search(line)
    if end is None or end.end() < len(line):
        return None
    content = line[: end.start()] + b"}"
    if zlib.crc32(content) != int(end.group(1)):
        return None
    record: dict[str, Any] = json.loads(content)
    return record


class Results:
    """A file with one JSON record per line; "line" is the number of the input line.

    May be used from several threads. finished: whether a line of the input has its record, as a
    byte; done: the number of records; errors: of those that say why a line could not be run; said:
    the error messages, of which only a few kinds are kept; damaged: the number of damaged records,
    which were removed when the file was opened.
    """

    def __init__(self, path: Path, disk: Disk) -> None:
        self._path, self._disk, self._lock = path, disk, threading.Lock()
        self._finished, self.done, self.errors, self.damaged = bytearray(), 0, 0, 0
        self._said: Counter[str] = Counter()
        self._waits_since: float | None = None
        try:
            self._file: IO[bytes] = open(path, "a+b", buffering=0)  # noqa: SIM115 - see `close`
        except OSError as error:
            raise MachineError(f"cannot write {path}: {error.strerror}") from None
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
        content = sealed(record)
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
        """Syncs the file to disk if it is due, or if `now` is set."""
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
        """The most common error message, without line numbers, and its count; None without
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
        """Replaces the file's content and continues with the new file."""
        try:
            self._disk.write_whole(self._path, content)
        except OSError as error:
            raise self._failed(error) from None
        old_file, self._file = self._file, open(self._path, "a+b", buffering=0)  # noqa: SIM115
        _lock(self._file, self._path)
        old_file.close()

    def put_in_order(self) -> None:
        """Rewrites the file in the order of the input's lines."""
        places: list[tuple[int, int, int]] = []
        offset = 0
        with open(self._path, "rb") as file:
            for content in file:
                places.append((json.loads(content)["line"], offset, len(content)))
                offset += len(content)

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
            error_text = re.sub(r"^line \d+: ", "", str(message))
            if error_text in self._said or len(self._said) < KINDS_OF_ERRORS:
                self._said[error_text] += 1

    def _failed(self, error: OSError) -> MachineError:
        return MachineError(
            f"cannot write {self._path}: {error.strerror}; its records are kept: run the same "
            "command again once it can be written"
        )

    def _take_up(self) -> None:
        """Finds the records that there are, cuts off a line that was not written whole, and removes
        damaged records."""
        whole, damaged = 0, set[int]()
        with open(self._path, "rb") as file:
            for number, content in enumerate(file):
                if not content.endswith(b"\n"):
                    break
                record = unsealed(content)
                if record is None and not any(mark in content for mark in DAMAGED_MARKS):
                    raise UserError(
                        f"{self._path}, line {number + 1}, is not a record of a job; choose "
                        "another file"
                    )
                if record is None:
                    damaged.add(number)
                else:
                    self._mark(record)
                whole += len(content)
        os.truncate(self._path, whole)
        self.damaged = len(damaged)
        if damaged:
            with open(self._path, "rb") as file:
                self._rewrite(line for number, line in enumerate(file) if number not in damaged)


class Journal:
    """The requests that were not finished when a job was interrupted: for each line of the input
    and each of its choices, the tokens, and if it is finished its result. It is written as a whole,
    next to the results.

    damaged: the number of choices that `read` found damaged, 1 for a file that is not JSON.
    """

    def __init__(self, results: Path, disk: Disk) -> None:
        self._path, self._disk = beside(results, "journal"), disk
        self.damaged = 0

    def read(self) -> dict[int, dict[str, Any]]:
        """Returns the undamaged choices by line; nothing if there is no journal."""
        try:
            lines = json.loads(self._path.read_bytes())
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise UserError(f"cannot read the journal {self._path}: {error.strerror}") from None
        except (ValueError, RecursionError):
            self.damaged = 1
            return {}
        entries: dict[int, dict[str, Any]] = {}
        for line, choices in lines.items() if isinstance(lines, dict) else ():
            for choice, entry in choices.items() if isinstance(choices, dict) else ():
                crc = entry.pop("crc32", None) if isinstance(entry, dict) else None
                if crc is None or crc != checksum(line, choice, entry):
                    self.damaged += 1
                else:
                    entries.setdefault(int(line), {})[choice] = entry
        return entries

    def write(self, records: Mapping[int, Mapping[str, Mapping[str, Any]]]) -> None:
        content = {
            str(line): {
                choice: {**own, "crc32": checksum(str(line), choice, own)}
                for choice, own in choices.items()
            }
            for line, choices in records.items()
        }
        try:
            self._disk.write_whole(self._path, [json.dumps(content).encode()])
        except OSError as error:
            raise MachineError(
                f"cannot write the journal {self._path}: {error.strerror}; finished results "
                "are kept. Free space, then run the same command again"
            ) from None

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


NOT_COMPARED = frozenset(("input size", "model files"))
"""Entries of a manifest that are there to be read."""


class Manifest:
    """The inputs that a job's results depend on, by name, with a checksum. A job is resumed only if
    they are the same."""

    def __init__(self, results: Path, disk: Disk) -> None:
        self._results, self._path, self._disk = results, beside(results, "manifest"), disk

    def check_ownership(self) -> None:
        """Raises `UserError` for a file of something else, before it is touched."""
        if self._results.name == "-" or (self._results.exists() and not self._results.is_file()):
            raise UserError(
                f"{self._results} is not a regular file, so the job could not be resumed; "
                "choose another file"
            )
        has_content = self._results.is_file() and self._results.stat().st_size > 0
        if has_content and not self._path.is_file():
            raise UserError(
                f"{self._results} exists but is not the output of a job ({self._path.name} is "
                "missing); choose another file"
            )

    def recorded(self, name: str) -> Any:
        """Returns the manifest of an earlier run; None if it says nothing."""
        return self._read().get(name)

    def write(self, content: Mapping[str, Any]) -> None:
        """Writes the manifest of a job that begins, or whose input has more lines now."""
        try:
            whole = {**content, "crc32": checksum(content)}
            self._disk.write_whole(self._path, [json.dumps(whole, indent=2).encode() + b"\n"])
        except OSError as error:
            raise MachineError(f"cannot write {self._path}: {error.strerror}") from None

    def check(self, content: Mapping[str, Any]) -> None:
        """Raises `UserError` with the differences if an earlier run's manifest differs."""
        recorded = self._read()
        if not recorded:
            raise UserError(
                f"{self._results} has results, but its manifest {self._path} is damaged; choose "
                "another file, or delete both to start over"
            )
        names = {*content, *recorded} - NOT_COMPARED
        differs = [name for name in names if recorded.get(name) != content.get(name)]
        if differs:
            differences = ", ".join(f"the {name}" for name in sorted(differs))
            hint = ""
            if "input" in differs:
                hint = " (its requests); lines may only be appended to it"
            raise UserError(
                f"{self._results} belongs to a job with different settings: {differences}{hint}; "
                "choose another file, or use the settings of that job"
            )

    def _read(self) -> dict[str, Any]:
        """Returns the manifest, an empty one if it cannot be read or is damaged."""
        try:
            raw = json.loads(self._path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(raw, dict) or raw.pop("crc32", None) != checksum(raw):
            return {}
        return raw


def _lock(file: IO[bytes], path: Path) -> None:
    """Locks a file until it is closed, where its file system has locks; raises `UserError` if
    another process has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise MachineError(f"another job is writing {path}; choose another file") from None
    except OSError:
        pass  # a file system without locks
