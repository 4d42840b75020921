"""Several arrays in one file on disk, which one read brings to where each of them is wanted.

A KV block in few bits is six arrays, of which four are small. Read one by one, those of 12
sequences came at 0.8 GB/s from a disk that does 2.4.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from flexgen_jax.offload.disk.direct_reads import PAGE
from flexgen_jax.offload.disk.folder import CHUNK_BYTES, DiskArray, OffloadFolder


@dataclass(frozen=True, eq=False)
class Records:
    """So many records of arrays of the same sizes.

    First come the whole pages of every array, which a direct read puts into place, and then what is
    left of each. store: uint8 [record, chunk, byte], of which a chunk is a file.
    """

    store: DiskArray

    @classmethod
    def create(cls, folder: OffloadFolder, name: str, count: int, nbytes: int) -> Records:
        """Room for `count` records of `nbytes` bytes, in whole pages, as long as this run."""
        chunks = -(-nbytes // CHUNK_BYTES)
        size = -(-nbytes // (chunks * PAGE)) * PAGE
        shape = (count, chunks, size)
        return cls(folder.scratch_array(name, shape, (1, 1, size), np.dtype(np.uint8)))

    @property
    def nbytes(self) -> int:
        """Of one record, in whole pages."""
        return self.store.shape[1] * self.store.shape[2]

    def write(self, index: int, arrays: Sequence[np.ndarray], record: np.ndarray) -> Any:
        """Starts writing a record of these arrays, which may change at once; returns a future.

        record: memory for it, uint8 [nbytes] from the beginning of a page, which must not change
        before the future is done.
        """
        start = 0
        for part in _parts([np.ascontiguousarray(array) for array in arrays]):
            record[start : start + part.size] = part
            start += part.size
        return self.store.write(record.reshape(self.store.shape[1:]), (index,))

    def read_into(self, index: int, outs: Sequence[np.ndarray]) -> Future[None]:
        """Starts reading a record into the memory of `outs`, ahead of all that is not urgent."""
        chunks = _cut(_parts(outs), self.store.shape[2])
        pieces = [self.store.piece((index, chunk), *parts) for chunk, parts in enumerate(chunks)]
        return self.store.queue.read(pieces, is_urgent=True)


def _parts(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The arrays' bytes in the order in which a record has them."""
    views = [array.reshape(-1).view(np.uint8) for array in arrays]
    whole = [view.size // PAGE * PAGE for view in views]
    parts = [view[:size] for view, size in zip(views, whole, strict=True)]
    parts += [view[size:] for view, size in zip(views, whole, strict=True)]
    return [part for part in parts if part.size]


def _cut(parts: Sequence[np.ndarray], size: int) -> list[list[np.ndarray]]:
    """The parts by chunks of so many bytes, those that reach into the next one cut."""
    chunks: list[list[np.ndarray]] = [[]]
    room = size
    for part in parts:
        while part.size:
            if room == 0:
                chunks.append([])
                room = size
            chunks[-1].append(part[:room])
            taken = min(room, part.size)
            part, room = part[taken:], room - taken
    return chunks
