"""Records on disk: several arrays in one file, which one read brings to their places in memory.

A KV block in few bits is six arrays, four of them small; reading them one by one does not reach the
disk's full speed.
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
    """Records of equally sized arrays.

    A record has first the whole pages of every array, which a direct read puts into place, and then
    the rest of each. store: uint8 [record, chunk, byte]; each chunk is a file.
    """

    store: DiskArray

    @classmethod
    def create(cls, folder: OffloadFolder, name: str, count: int, nbytes: int) -> Records:
        """Creates room for `count` records of `nbytes` bytes, rounded up to whole pages, that lives
        as long as this run."""
        chunks = -(-nbytes // CHUNK_BYTES)
        size = -(-nbytes // (chunks * PAGE)) * PAGE
        shape = (count, chunks, size)
        return cls(folder.scratch_array(name, shape, (1, 1, size), np.dtype(np.uint8)))

    @property
    def nbytes(self) -> int:
        """Bytes of one record, rounded up to whole pages."""
        return self.store.shape[1] * self.store.shape[2]

    def write(self, index: int, arrays: Sequence[np.ndarray], record: np.ndarray) -> Any:
        """Starts writing a record of these arrays, which may change at once; returns a future.

        record: page-aligned memory for the record, uint8 [nbytes], which must not change until the
        future is done.
        """
        start = 0
        for view in _parts([np.ascontiguousarray(array) for array in arrays]):
            record[start : start + view.size] = view
            start += view.size
        return self.store.write(record.reshape(self.store.shape[1:]), (index,))

    def read_into(self, index: int, outs: Sequence[np.ndarray]) -> Future[None]:
        """Starts reading a record into the memory of `outs`, ahead of all reads that are not
        urgent; returns a future."""
        chunks = _cut(_parts(outs), self.store.shape[2])
        pieces = [self.store.piece((index, chunk), *views) for chunk, views in enumerate(chunks)]
        return self.store.queue.read(pieces, is_urgent=True)


def _parts(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns views of the arrays' bytes, in the order of a record."""
    views = [array.reshape(-1).view(np.uint8) for array in arrays]
    whole = [view.size // PAGE * PAGE for view in views]
    views_to_write = [view[:size] for view, size in zip(views, whole, strict=True)]
    views_to_write += [view[size:] for view, size in zip(views, whole, strict=True)]
    return [view_part for view_part in views_to_write if view_part.size]


def _cut(parts: Sequence[np.ndarray], size: int) -> list[list[np.ndarray]]:
    """Groups the parts into chunks of `size` bytes, cutting parts that reach into the next
    chunk."""
    chunks: list[list[np.ndarray]] = [[]]
    room = size
    for view in parts:
        while view.size:
            if room == 0:
                chunks.append([])
                room = size
            chunks[-1].append(view[:room])
            num_taken = min(room, view.size)
            view, room = view[num_taken:], room - num_taken
    return chunks
