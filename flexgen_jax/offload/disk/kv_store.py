"""The KV cache of sequences, kept over runs and processes: computed prefixes are loaded again.

    <folder>/lock                       held while files are added or evicted
    <folder>/<model>/<key>.kv           one piece: `TOKENS` tokens of a sequence, or those that are
                                        left at its end, in all layers; an end also has what
                                        recurrent layers keep of all tokens up to there
    <folder>/<model>/<key>.<id>.part    one that is being written, held by a lock of its own

A piece's key is the hash of the key before it and of its own tokens, so it stands for all tokens up
to its end. A file has a header of at least a page (model, key, checksum of every array), then the
arrays of all layers in order. It appears complete or not at all; a damaged file is removed, and its
content is computed again. Those used longest ago are evicted first.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import struct
import time
import uuid
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flexgen_jax.errors import UserError
from flexgen_jax.offload.disk.kv_pieces import (
    KEY_BYTES,
    MAGIC,
    TOKENS,
    PieceKey,
    PieceLayout,
    StoredPiece,
    StoredSequence,
    bytes_of,
    keys_of,
)

MODEL_FOLDER = re.compile("[0-9a-f]{40}")
PIECE_FILE = re.compile(r"[0-9a-f]{40}(\.kv|\.[0-9a-f]{32}\.part)")
"""Names of folders and files of a store; others in its folder are left alone."""

MAX_OPEN_PIECES = 256
"""Maximum pieces written together; each is an open file."""

READERS = 4


class KVStoreError(UserError, OSError):
    """The folder of a KV store cannot be used."""


class KVStore:
    """Pieces of one model's sequences, of at most `cap` bytes together.

    model: names the model, its weights and everything else that changes the numbers; layout: the
    layout of a piece; write_limit: the bytes that this process may write, None for no limit.
    written: those that it has; evicted: how many pieces it has removed to make room.
    """

    def __init__(
        self,
        folder: Path,
        cap: int,
        model: str,
        layout: PieceLayout,
        write_limit: int | None = None,
    ) -> None:
        self.layout, self._cap, self._write_limit = layout, cap, write_limit
        self._model = hashlib.blake2b(
            repr((model, layout)).encode(), digest_size=KEY_BYTES
        ).digest()
        self._root = folder.expanduser()
        self._folder = self._root / self._model.hex()
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise KVStoreError(
                f"{folder}: the KV store cannot be created there: {error}"
            ) from error
        self._pool = ThreadPoolExecutor(READERS, "kv-store")
        self._finishing: list[Future[None]] = []
        with self._locked():
            self._make_room(0)
        self.evicted = self.written = 0

    def stored_tokens(self, ids: Sequence[int]) -> int:
        """Returns the number of stored leading tokens of a sequence, up to an end if there are
        ends."""
        digests = [b""]
        for key in keys_of(ids, has_end=False):
            if key.tokens < TOKENS or not self._path(key).exists():
                break
            digests.append(key.digest)
        has_ends = self.layout.has_ends
        # An end may be after any piece, so that looking for each file would take long.
        names = set(os.listdir(self._folder)) if has_ends and len(digests) > 1 else None
        # After the last full piece first; without ends, only there.
        for number in reversed(range(0 if has_ends else len(digests) - 1, len(digests))):
            start = number * TOKENS
            for tokens in range(min(len(ids) - start, TOKENS), 0, -1):
                key = PieceKey.of(digests[number], ids[start : start + tokens], has_ends)
                is_there = self._path(key).exists() if names is None else key.file_name in names
                if is_there:
                    return start + tokens
        return 0 if has_ends else TOKENS * (len(digests) - 1)

    def open(self, ids: Sequence[int]) -> StoredSequence | None:
        """Returns the stored pieces of a sequence; None if a piece is not there. Its files stay
        readable until it is closed, even if they are evicted."""
        with ExitStack() as files:
            pieces = []
            for key in keys_of(ids, self.layout.has_ends):
                piece = self._opened(key)
                if piece is None:
                    return None
                files.callback(os.close, piece.file)
                pieces.append(piece)
            _touch([piece.path for piece in pieces])
            return StoredSequence(pieces, self.layout, self._pool, files.pop_all())

    def _opened(self, key: PieceKey) -> StoredPiece | None:
        path = self._path(key)
        try:
            file = os.open(path, os.O_RDONLY)
        except OSError:  # it is not there, or too many files are open
            return None
        header = os.pread(file, self.layout.header_bytes, 0)
        start, nbytes = self._start_of(key), self.layout.nbytes(key.tokens, key.is_end)
        if os.fstat(file).st_size != nbytes or not header.startswith(start):
            os.close(file)
            path.unlink(missing_ok=True)
            return None
        sums = struct.unpack_from(f"<{len(self.layout.arrays)}I", header, len(start))
        return StoredPiece(path, file, key, sums)

    def _start_of(self, key: PieceKey) -> bytes:
        """Returns the first bytes of a piece's file, which say whose it is."""
        return MAGIC + self._model + key.digest

    def _path(self, key: PieceKey) -> Path:
        return self._folder / key.file_name

    # Writing

    def draft(self, ids: Sequence[int]) -> Draft | None:
        """Makes room for those pieces of a sequence that are not there; None if it lacks none, or
        there is no room."""
        keys = list(keys_of(ids, self.layout.has_ends))
        missing = [(n, key) for n, key in enumerate(keys) if not self._path(key).exists()]
        sizes = [self.layout.nbytes(key.tokens, key.is_end) for _, key in missing]
        totals = list(accumulate(sizes, initial=0))
        fitting = bisect_right(totals, self._cap) - 1
        is_useless = self.layout.has_ends and fitting < len(missing)  # without its end
        is_partial, fitting = fitting > MAX_OPEN_PIECES, min(fitting, MAX_OPEN_PIECES)
        missing, nbytes = missing[:fitting], totals[fitting]
        is_over = self._write_limit is not None and self.written + nbytes > self._write_limit
        if not missing or is_useless or is_over:
            return None
        draft = Draft([], self.layout, [self._path(key) for key in keys], is_partial)
        with self._locked():
            if not self._make_room(nbytes):
                return None  # others are being written
            try:
                for number, key in missing:
                    draft.parts.append(self._new_part(number, key))
            except BaseException:
                self.drop(draft)
                raise
        self.written += nbytes
        return draft

    def _new_part(self, number: int, key: PieceKey) -> PieceDraft:
        path = self._folder / f"{key.digest.hex()}.{uuid.uuid4().hex}.part"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            os.ftruncate(file, self.layout.nbytes(key.tokens, key.is_end))
        except BaseException:
            os.close(file)
            path.unlink()
            raise
        return PieceDraft(number, key, path, file, [0] * len(self.layout.arrays))

    def finish(self, draft: Draft) -> None:
        """Starts putting a draft's pieces in their place, all of whose arrays are written."""
        self._finishing = [future for future in self._finishing if not future.done()]
        self._finishing.append(self._pool.submit(self._finish, draft))

    def settle(self) -> None:
        """Waits until all drafts are in their place."""
        for future in self._finishing:
            future.result()

    def _finish(self, draft: Draft) -> None:
        try:
            for draft_piece in draft.parts:
                sums = struct.pack(f"<{len(draft_piece.sums)}I", *draft_piece.sums)
                os.pwrite(draft_piece.file, self._start_of(draft_piece.key) + sums, 0)
            with self._locked():  # who makes room must see each file once
                while draft.parts:
                    draft_piece = draft.parts[0]
                    os.rename(draft_piece.path, self._path(draft_piece.key))
                    os.close(draft.parts.pop(0).file)
                _touch(draft.pieces)
        except OSError:  # such as a full disk: missing pieces are computed again
            self.drop(draft)

    def drop(self, draft: Draft) -> None:
        """Removes a draft's files that were not committed."""
        while draft.parts:
            draft_piece = draft.parts.pop()
            draft_piece.path.unlink(missing_ok=True)
            os.close(draft_piece.file)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with open(self._root / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _make_room(self, wanted: int) -> bool:
        """Removes files of dead processes, and the least recently used pieces of any model; returns
        whether there is room."""
        used_bytes, pieces = 0, list[tuple[int, str, int]]()
        for path in self._files():
            with suppress(FileNotFoundError):
                is_part = path.endswith(".part")
                if is_part and _is_left(path):
                    os.unlink(path)
                    continue
                status = os.stat(path)
                used_bytes += status.st_size
                pieces += [] if is_part else [(status.st_mtime_ns, path, status.st_size)]
        for _, path, nbytes in sorted(pieces):
            if used_bytes + wanted <= self._cap:
                break
            with suppress(FileNotFoundError):
                os.unlink(path)
                self.evicted += 1
            used_bytes -= nbytes
        return used_bytes + wanted <= self._cap

    def _files(self) -> Iterator[str]:
        """Yields the paths of all pieces and parts, of any model."""
        for folder in os.scandir(self._root):
            if MODEL_FOLDER.fullmatch(folder.name):
                names = (entry.name for entry in os.scandir(folder.path))
                yield from (f"{folder.path}/{name}" for name in names if PIECE_FILE.fullmatch(name))

    def close(self) -> None:
        """Waits for running writes."""
        self._pool.shutdown()


class PieceDraft(NamedTuple):
    """A piece that is being written. number: its place in the sequence; sums: the checksums of the
    arrays written so far."""

    number: int
    key: PieceKey
    path: Path
    file: int
    sums: list[int]


@dataclass(frozen=True)
class Draft:
    """Pieces of a sequence that are being written. pieces: the files of all of its pieces;
    is_partial: whether others are to be written when these are in their place."""

    parts: list[PieceDraft]
    layout: PieceLayout
    pieces: Sequence[Path]
    is_partial: bool = False

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The tokens of each piece, from the first to before the last number."""
        starts = [
            (draft_piece.number * TOKENS, draft_piece.key.tokens) for draft_piece in self.parts
        ]
        return [(start, start + tokens) for start, tokens in starts]

    def write(self, place: int, layer: int, arrays: Sequence[np.ndarray]) -> None:
        """Writes a layer's arrays of the piece at an index of `spans`, growing arrays as [token,
        ...]. Only an end has arrays that do not grow."""
        draft_piece = self.parts[place]
        offsets = self.layout.offsets(draft_piece.key.tokens, draft_piece.key.is_end)
        numbered_arrays = zip(self.layout.layers[layer], self.layout.numbers(layer), strict=True)
        numbers = [
            number for entry, number in numbered_arrays if entry.grows or draft_piece.key.is_end
        ]
        for number, array in zip(numbers, arrays, strict=True):
            data = bytes_of(np.ascontiguousarray(array))
            draft_piece.sums[number] = zlib.crc32(data)
            os.pwrite(draft_piece.file, data, offsets[number])


def _touch(pieces: Sequence[Path]) -> None:
    """Marks a sequence's pieces as recently used, the first piece most recently, so that its last
    pieces are evicted first."""
    now = time.time_ns()
    for number, path in enumerate(pieces):
        with suppress(FileNotFoundError):
            os.utime(path, ns=(now - number, now - number))


def _is_left(path: str) -> bool:
    """Returns whether no process is writing a part any more."""
    with open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
