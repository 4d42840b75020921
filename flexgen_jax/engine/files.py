"""Reads prompts from files, and writes finished texts to a file from which an interrupted run can
continue."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, NamedTuple

from flexgen_jax.engine.outputs import RequestOutput
from flexgen_jax.errors import UserError


class Prompt(NamedTuple):
    """A prompt, and its place in the input, such as "prompts.txt, line 3"."""

    text: str
    where: str


def read_prompts(path: Path) -> list[Prompt]:
    """Reads the prompts of a file: one per line or, for a .jsonl file, the "prompt" of each line's
    object.

    Blank lines are skipped; "-" is standard input. Raises `UserError` that names the line.
    """
    name = "standard input" if str(path) == "-" else str(path)
    content, prompts = read_text(path, "--prompts-file"), list[Prompt]()
    # Not `splitlines`, which also splits at other characters that may be part of a text.
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            where, line = f"{name}, line {number}", line.removesuffix("\r")
            is_json = path.suffix == ".jsonl"
            prompts.append(Prompt(_prompt_in(line, where) if is_json else line, where))
    if not prompts:
        raise UserError(f"{name} has no prompts; write one a line")
    return prompts


def read_text(path: Path, flag: str) -> str:
    """Reads a file, or for "-" standard input; raises `UserError` that names the flag."""
    try:
        content = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        return content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {flag} {path}: {error}") from None


def _prompt_in(line: str, where: str) -> str:
    try:
        value = json.loads(line)
        prompt = value["prompt"] if isinstance(value, dict) else None
        if isinstance(prompt, str):
            prompt.encode()  # fails for half of a pair of surrogates
    except (ValueError, KeyError, RecursionError):
        prompt = None
    if not isinstance(prompt, str):
        raise UserError(f'{where} is not an object with a text as "prompt": {{"prompt": "..."}}')
    return prompt


RESULT = ("prompt", "text", "token_ids", "finish_reason")


def as_json(result: RequestOutput) -> dict[str, Any]:
    """Returns the fields of a finished text that are written to a file, and of one that could not
    be made its error."""
    why = {} if result.error is None else {"error": result.error}
    return {name: getattr(result, name) for name in RESULT} | why


def lock(file: IO[bytes], held: str) -> None:
    """Locks a file until it is closed, where its file system has locks; raises `UserError`, which
    says `held`, if another process has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{held}; choose another file") from None
    except OSError:
        pass  # a file system without locks


class OutputFile:
    """A file of finished texts as lines of JSON; each line is in the file before the next text is
    made.

    A line has "run", a digest of everything that the texts depend on; "index", the prompt's index;
    and the fields of `as_json`. A file that exists already must be of this run and these prompts.
    Its texts are then in `finished`, by index, and an incomplete last line is cut off. now: the
    time that prompts depend on, None if they do not; that of a file that exists already is kept.
    """

    def __init__(
        self, path: Path, run: str, prompts: Sequence[str], now: str | None = None
    ) -> None:
        self._path, self._run, self._prompts = path, run, prompts
        self.now = now
        self.finished: dict[int, dict[str, Any]] = {}
        try:
            self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 - closed in `close`
        except OSError as error:
            raise UserError(f"cannot write --output {path}: {error.strerror}") from None
        try:
            if stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
                lock(self._file, f"--output {path} is being written by another run")
                self._take_up()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._file.close()

    def write(self, index: int, result: RequestOutput) -> None:
        """Adds the text of a prompt, unless it could not be made; raises `UserError` if it cannot
        be written."""
        if result.error is not None:
            return
        content = as_json(replace(result, prompt=self._prompts[index]))
        when = {} if self.now is None else {"now": self.now}
        line = json.dumps({"run": self._run, "index": index, **when, **content}) + "\n"
        rest = memoryview(line.encode())
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise UserError(
                f"cannot write --output {self._path}: {error.strerror}; once it can be, the same "
                "command goes on with what is not in it"
            ) from None
        self.finished[index] = content

    def results(self) -> list[dict[str, Any]]:
        """Returns all texts in the file, in the prompts' order, with the fields of `as_json`."""
        return [content for _, content in sorted(self.finished.items())]

    def _take_up(self) -> None:
        self._file.seek(0)
        content = self._file.readall()
        *lines, rest = content.split(b"\n")
        for number, line in enumerate(lines, 1):
            record = self._read(line, number)
            self.finished[record["index"]] = {key: record[key] for key in RESULT}
            self.now = record.get("now", self.now)
        if rest:
            begin = f'{{"run": "{self._run}"'.encode()
            if not (begin.startswith(rest) or rest.startswith(begin)):
                raise self._foreign(len(lines) + 1)
            self._file.truncate(len(content) - len(rest))

    def _read(self, line: bytes, number: int) -> Mapping[str, Any]:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise self._foreign(number) from None
        if not isinstance(record, Mapping) or record.get("run") != self._run:
            raise self._foreign(number)
        index = record.get("index")
        if not isinstance(index, int) or not 0 <= index < len(self._prompts):
            raise self._foreign(number)
        if record.get("prompt") != self._prompts[index] or not record.keys() >= set(RESULT):
            raise self._foreign(number)
        return record

    def _foreign(self, number: int) -> UserError:
        return UserError(
            f"--output {self._path}, line {number}, is not of this run: the prompts, the model or "
            "flags that texts depend on were others; choose another file"
        )
