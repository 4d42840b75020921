"""The input of a job: a file of lines, perhaps compressed, a stream that can be read once, or lines
that the caller made."""

from __future__ import annotations

import gzip
import hashlib
import io
import shutil
import stat
import sys
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from flexgen_jax.errors import UserError
from flexgen_jax.jobs.lines import MAX_LINE_BYTES
from flexgen_jax.jobs.store import beside

STDIN = Path("-")
"""Standard input instead of a file."""

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
"""What compressed files begin with."""

PIECE_BYTES = 1 << 20


def numbered_lines(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yields the lines of a file with their numbers from 1. A line of more than `MAX_LINE_BYTES`
    comes in pieces of one number, so that it takes no more memory."""
    number, has_ended = 0, True
    while content := file.readline(MAX_LINE_BYTES):
        number += has_ended
        has_ended = content.endswith(b"\n")
        yield number, content


@dataclass(frozen=True)
class InputFacts:
    """What a job knows of its whole input.

    digest: of its bytes; size: how many these are; lines: how many lines are not blank; earlier:
    the digest of the bytes that an earlier run had, None if there are fewer or if they do not end
    with a line.
    """

    digest: str
    size: int
    lines: int
    earlier: str | None = None

    @classmethod
    def of(cls, source: JobInput, earlier_size: int | None = None) -> InputFacts:
        """Reads the input. earlier_size: how many bytes an earlier run had."""
        sha, lines, last, size, earlier = hashlib.sha256(), 0, 0, 0, None
        try:
            with source.opened() as file:
                for number, content in numbered_lines(file):
                    bytes_left = (
                        earlier_size or 0
                    ) - size  # bytes of the earlier input from here on
                    if 0 < bytes_left <= len(content):
                        head, tail = content[:bytes_left], content[bytes_left:]
                        if head.endswith(b"\n") or not tail.strip():
                            before = sha.copy()
                            before.update(head)
                            earlier = before.hexdigest()
                    sha.update(content)
                    size += len(content)
                    if number != last and content.strip():
                        lines, last = lines + 1, number
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(f"cannot read the requests {source}: {error}") from None
        return cls(sha.hexdigest(), size, lines, earlier)


class JobInput:
    """The lines of a job's input, which may be read again and again.

    Input that can be read only once, such as standard input or a pipe, is first copied to a file
    next to the results, and so are lines in memory. Files that gzip or zstd have compressed are
    known by their first bytes.
    """

    def __init__(self, source: Path | bytes, results: Path) -> None:
        self._given, self._copy = source, beside(results, "input")
        self._is_copied = isinstance(source, bytes) or source == STDIN or not _is_regular(source)
        self._path = self._copy if isinstance(source, bytes) or self._is_copied else source

    def open(self) -> None:
        """Copies a stream or given lines to a file, when nothing else writes these results."""
        if self._is_copied:
            self._spool()

    def __str__(self) -> str:
        if isinstance(self._given, bytes):
            return "that are given"
        return "standard input" if self._given == STDIN else str(self._given)

    @contextmanager
    def opened(self) -> Iterator[IO[bytes]]:
        """Opens the input at its beginning, uncompressed."""
        with open(self._path, "rb") as raw:
            magic = raw.read(4)
            raw.seek(0)
            if magic.startswith(GZIP):
                with gzip.open(raw) as file:
                    yield cast("IO[bytes]", file)
            elif magic == ZSTD:
                with _unpacked(raw, str(self)) as file:
                    yield file
            else:
                yield raw

    def forget(self) -> None:
        """Removes the copy, when the job is finished."""
        if self._is_copied:
            self._copy.unlink(missing_ok=True)

    def _spool(self) -> None:
        partial = beside(self._copy, "part")
        try:
            with open(partial, "wb") as file, self._stream() as stream:
                shutil.copyfileobj(stream, file, PIECE_BYTES)
            partial.replace(self._copy)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise UserError(f"cannot write {self._copy}: {error.strerror}") from None

    def _stream(self) -> AbstractContextManager[IO[bytes]]:
        """Opens an input that can be read only once."""
        if isinstance(self._given, bytes):
            return io.BytesIO(self._given)
        if self._given != STDIN:
            return open(self._given, "rb")
        if sys.stdin is None:
            raise UserError("standard input is closed; give a file with -i")
        return nullcontext(sys.stdin.buffer)


def _is_regular(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        raise UserError(f"cannot read the requests {path}: {error.strerror}") from None


@contextmanager
def _unpacked(raw: IO[bytes], name: str) -> Iterator[IO[bytes]]:
    try:
        import zstandard
    except ImportError:
        raise UserError(
            f"{name} is compressed with zstd: pip install zstandard, or decompress it"
        ) from None
    try:
        with io.BufferedReader(_Frames(raw, zstandard.ZstdDecompressor()), PIECE_BYTES) as file:
            yield cast("IO[bytes]", file)
    except zstandard.ZstdError as error:
        raise OSError(str(error)) from None


class _Frames(io.RawIOBase):
    """The content of consecutive zstd frames; raises `EOFError` if the last frame is cut off, which
    the library's reader does not detect."""

    def __init__(self, raw: IO[bytes], decompressor: Any) -> None:
        self._raw, self._decompressor = raw, decompressor
        self._frame: Any = None
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            piece = self._raw.read(PIECE_BYTES)
            if not piece:
                if self._frame is not None:
                    raise EOFError("it is cut off")
                return 0
            self._frame = self._frame or self._decompressor.decompressobj()
            self._ready = memoryview(self._frame.decompress(piece))
            if self._frame.eof:
                self._raw.seek(-len(self._frame.unused_data), io.SEEK_CUR)
                self._frame = None
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count
