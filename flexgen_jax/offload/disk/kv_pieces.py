"""The pieces of a KV store: the cached arrays of a range of tokens, their file name, and their
reader."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flexgen_jax.offload.disk.direct_reads import PAGE

TOKENS = 64
"""Tokens of a piece, but for a sequence's last one, which may have fewer."""

MAGIC = b"flexgen-jax KV 2"

KEY_BYTES = 20


class DamagedError(Exception):
    """A piece is not what was written; it has been removed."""


class KeptArray(NamedTuple):
    """An array that a layer keeps of a sequence: its shape and dtype per token, or in total if it
    does not grow."""

    shape: tuple[int, ...]
    dtype: np.dtype
    grows: bool = True

    def nbytes(self, tokens: int, is_end: bool) -> int:
        """Returns its bytes in a piece of `tokens` tokens."""
        count = tokens if self.grows else int(is_end)
        return count * int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True)
class PieceLayout:
    """Where the arrays of a piece are in its file. layers: the state of each layer."""

    layers: tuple[tuple[KeptArray, ...], ...]

    @property
    def arrays(self) -> list[KeptArray]:
        return [array for layer in self.layers for array in layer]

    @property
    def has_ends(self) -> bool:
        """Whether a sequence's last piece differs from earlier pieces."""
        return not all(array.grows for array in self.arrays)

    @property
    def header_bytes(self) -> int:
        """Bytes before the arrays: magic, model, key and checksums, rounded up to whole pages."""
        return -(-(len(MAGIC) + 2 * KEY_BYTES + 4 * len(self.arrays)) // PAGE) * PAGE

    def offsets(self, tokens: int, is_end: bool) -> list[int]:
        """Returns the offsets of a piece's arrays, and the end of the last array."""
        sizes = [array.nbytes(tokens, is_end) for array in self.arrays]
        return list(accumulate(sizes, initial=self.header_bytes))

    def nbytes(self, tokens: int, is_end: bool = False) -> int:
        """Returns the bytes of a piece's file."""
        return self.offsets(tokens, is_end)[-1]

    def sequence_bytes(self, tokens: int) -> int:
        """Returns the bytes of the arrays of a whole sequence."""
        return sum(array.nbytes(tokens, self.has_ends) for array in self.arrays)

    def numbers(self, layer: int) -> range:
        """The numbers of a layer's arrays among all."""
        before = sum(map(len, self.layers[:layer]))
        return range(before, before + len(self.layers[layer]))


class PieceKey(NamedTuple):
    """Names a piece of `tokens` tokens by all tokens up to its end."""

    digest: bytes
    tokens: int
    is_end: bool

    @property
    def file_name(self) -> str:
        return f"{self.digest.hex()}.kv"

    @classmethod
    def of(cls, before: bytes, ids: Sequence[int], is_end: bool) -> PieceKey:
        """Returns the key of some tokens after those of the digest `before`."""
        named = before + np.asarray(ids, "<i4").tobytes() + b"end" * is_end
        digest = hashlib.blake2b(named, digest_size=KEY_BYTES).digest()
        return cls(digest, len(ids), is_end)


def keys_of(ids: Sequence[int], has_end: bool) -> Iterator[PieceKey]:
    """Yields the keys of the pieces of a sequence; has_end: whether the last piece is an end."""
    digest = b""
    for start in range(0, len(ids), TOKENS):
        is_end = has_end and start + TOKENS >= len(ids)
        key = PieceKey.of(digest, ids[start : start + TOKENS], is_end)
        digest = key.digest
        yield key


class StoredPiece(NamedTuple):
    """A piece that is open. sums: the checksums of its arrays."""

    path: Path
    file: int
    key: PieceKey
    sums: tuple[int, ...]


@dataclass(frozen=True)
class StoredSequence:
    """The stored pieces of a sequence."""

    pieces: Sequence[StoredPiece]
    layout: PieceLayout
    pool: ThreadPoolExecutor
    files: ExitStack

    @property
    def tokens(self) -> int:
        return sum(piece.key.tokens for piece in self.pieces)

    def read(self) -> Iterator[list[np.ndarray]]:
        """Yields the arrays layer by layer, growing arrays as [token, ...]; two
        layers are read ahead. Raises `DamagedError`."""
        layers = range(len(self.layout.layers))
        ahead = deque(self._start(layer) for layer in layers[:2])
        try:
            for layer in layers:
                if layer + 2 in layers:
                    ahead.append(self._start(layer + 2))
                arrays, reads = ahead[0]
                for read in reads:
                    read.result()
                ahead.popleft()
                yield arrays
        finally:  # the files are closed next
            for _, reads in ahead:
                for read in reads:
                    read.exception()

    def _start(self, layer: int) -> tuple[list[np.ndarray], list[Future[None]]]:
        layer_arrays, numbers = self.layout.layers[layer], self.layout.numbers(layer)
        of_tokens = (self.tokens,)
        arrays = [
            np.empty(of_tokens * entry.grows + entry.shape, entry.dtype) for entry in layer_arrays
        ]
        reads: list[Future[None]] = []
        for entry, array, number in zip(layer_arrays, arrays, numbers, strict=True):
            outs = [array]
            if entry.grows:
                outs = [array[start : start + TOKENS] for start in range(0, self.tokens, TOKENS)]
            pieces = self.pieces[-len(outs) :]
            for piece, out in zip(pieces, outs, strict=True):
                reads.append(self.pool.submit(self._read, piece, number, out))
        return arrays, reads

    def _read(self, piece: StoredPiece, number: int, out: np.ndarray) -> None:
        place, key = bytes_of(out), piece.key
        offset = self.layout.offsets(key.tokens, key.is_end)[number]
        read = os.preadv(piece.file, [place], offset)
        if read != place.nbytes or zlib.crc32(place) != piece.sums[number]:
            piece.path.unlink(missing_ok=True)
            raise DamagedError(f"{piece.path}: array {number} is damaged")

    def close(self) -> None:
        self.files.close()


def bytes_of(array: np.ndarray) -> memoryview:
    """Returns the memory of a contiguous array."""
    place: Any = array.reshape(-1).view(np.uint8)
    return memoryview(place)
