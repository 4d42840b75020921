"""The input of a job: a file of lines, perhaps compressed, or a stream that can be read once."""

from __future__ import annotations

import gzip
import hashlib
import io
import shutil
import stat
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from flexgen_jax.errors import UserError
from flexgen_jax.jobs.store import beside

STDIN = Path("-")
"""In place of a file, standard input."""

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
"""What compressed files begin with."""

PIECE_BYTES = 1 << 20


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
        sha, lines, size, earlier = hashlib.sha256(), 0, 0, None
        try:
            with source.opened() as file:
                for content in file:
                    left = (earlier_size or 0) - size  # bytes of the earlier input from here on
                    if 0 < left <= len(content):
                        head, tail = content[:left], content[left:]
                        if head.endswith(b"\n") or not tail.strip():
                            before = sha.copy()
                            before.update(head)
                            earlier = before.hexdigest()
                    sha.update(content)
                    size += len(content)
                    lines += bool(content.strip())
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(f"cannot read the requests {source}: {error}") from None
        return cls(sha.hexdigest(), size, lines, earlier)


class JobInput:
    """The lines of a job's input, which may be read again and again.

    What can be read once, such as standard input or a pipe, is first copied to a file beside the
    results. Files that gzip or zstd have compressed are known by their first bytes.
    """

    def __init__(self, path: Path, results: Path) -> None:
        self._name = "standard input" if path == STDIN else str(path)
        self._given = self._path = path
        self._copy: Path | None = None
        if path == STDIN or not _is_regular(path):
            self._path = self._copy = beside(results, "input")

    def open(self) -> None:
        """Copies a stream to its file, when nothing else writes these results."""
        if self._copy is not None:
            self._spool(self._given, self._copy)

    def __str__(self) -> str:
        return self._name

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
                with _unpacked(raw, self._name) as file:
                    yield file
            else:
                yield raw

    def forget(self) -> None:
        """Removes the copy of a stream, when the job is finished."""
        if self._copy is not None:
            self._copy.unlink(missing_ok=True)

    def _spool(self, path: Path, copy: Path) -> None:
        part = beside(copy, "part")
        try:
            with open(part, "wb") as file:
                if path == STDIN:
                    if sys.stdin is None:
                        raise UserError("standard input is closed; give a file with -i")
                    shutil.copyfileobj(sys.stdin.buffer, file, PIECE_BYTES)
                else:
                    with open(path, "rb") as stream:
                        shutil.copyfileobj(stream, file, PIECE_BYTES)
            part.replace(copy)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise UserError(f"cannot copy {self._name} to {copy}: {error.strerror}") from None


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
            f"{name} is compressed by zstd: pip install zstandard, or give it uncompressed"
        ) from None
    try:
        with io.BufferedReader(_Frames(raw, zstandard.ZstdDecompressor()), PIECE_BYTES) as file:
            yield cast("IO[bytes]", file)
    except zstandard.ZstdError as error:
        raise OSError(str(error)) from None


class _Frames(io.RawIOBase):
    """The content of zstd's frames, one after the other; raises `EOFError` if the last one is cut
    off, which the library's own reader does not notice."""

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
