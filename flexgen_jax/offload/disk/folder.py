"""The offload folder: TensorStore arrays on disk that survive crashes.

    offload folder/
      weights/<fingerprint>/<tensor>/    a zarr3 array and done.json, put here by one rename
      weights/<fingerprint>.lock         held while tensors are written
      runs/<id>/                         KV blocks and hidden states of a running process
      runs/<id>.lock                     held as long as that process lives

A tensor's folder appears atomically, so every folder is usable after `kill -9`.
A run's folder whose lock is free belongs to a dead process and is removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import shutil
import stat
import uuid
import zlib
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import tensorstore as ts

from flexgen_jax.errors import MachineError, UserError
from flexgen_jax.offload.disk.direct_reads import PAGE, Piece, ReadQueue, read_file, whole_pages

CHUNK_BYTES = 8 << 20
"""Size of a chunk file: large enough for the disk's full speed, small enough to overlap."""

READS_AT_ONCE = 8
"""Reads under way at once. KV blocks of few tokens are small: with fewer reads, the disk would wait
for busy cores to ask for more."""
COPIES_AT_ONCE = 2


NOT_DAMAGE = ("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "UNKNOWN")
"""Parts of TensorStore's messages that mean it could not look at a tensor, not that it is
damaged."""


class OffloadError(MachineError, OSError):
    """The offload folder cannot be used, or something in it is damaged."""


def row_ranges(shape: tuple[int, ...], itemsize: int, multiple: int = 1) -> list[tuple[int, int]]:
    """Returns ranges (start, stop) of the first axis, whose starts are multiples of `multiple`.

    Each has about a chunk's bytes and, if possible, whole pages.
    """
    row = max(1, int(np.prod(shape[1:])) * itemsize)
    step = CHUNK_BYTES // row
    step = max(multiple, step - step % multiple)
    if step < shape[0]:
        step = step - step % math.lcm(PAGE // math.gcd(row, PAGE), multiple) or step
    return [(start, min(start + step, shape[0])) for start in range(0, shape[0], step)]


@dataclass(frozen=True, eq=False)
class DiskArray:
    """A TensorStore array in chunk files; each file holds a range of one axis: the first axis, or
    the first axis after the `index` of a read.

    direct: reads bypass the page cache.
    """

    path: Path
    store: Any
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    dtype: np.dtype
    queue: ReadQueue
    direct: bool

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize

    def read_into(
        self, out: np.ndarray, index: tuple[int, ...] = (), is_urgent: bool = False
    ) -> Future[None]:
        """Starts reading self[index] into the memory of `out`; returns a future.

        Reads that the next steps need are urgent; weights, needed only layers later, give way to
        them.
        """
        step = self.chunk[len(index)]
        starts = range(0, out.shape[0], step)
        pieces = [
            self.piece((*index, start // step), out[start : start + step]) for start in starts
        ]
        return self.queue.read(pieces, is_urgent)

    def piece(self, index: tuple[int, ...], *outs: np.ndarray) -> Piece:
        """Returns the piece that fills `outs` from the beginning of a chunk; trailing zeros of
        `index` may be left out."""
        numbers = index + (0,) * (len(self.shape) - len(index))
        # The layout of zarr3's default chunk keys.
        return Piece(self.path / "c" / "/".join(map(str, numbers)), outs, self.direct)

    def write(self, data: np.ndarray, index: Any = ()) -> Any:
        """Starts writing `data`, which must not change until the returned future is done."""
        target = self.store[index] if index != () else self.store
        return target.write(data, can_reference_source_data_indefinitely=True)


class OffloadFolder:
    """One process's hold on an offload folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            for folder in (root / "weights", root / "runs"):
                folder.mkdir(mode=0o700, exist_ok=True)
                _check_private(folder)
            self._lock, self._run = _start_run(root / "runs")
        except OSError as error:
            raise OffloadError(
                f"cannot use the offload folder {root}: {error.strerror or error}; choose "
                "another with --offload-dir"
            ) from None
        remove_dead_runs(root)
        self._queue = ReadQueue(READS_AT_ONCE)
        self._direct = _has_direct_io(self._run)
        limits = {
            "file_io_mode": {"mode": "direct"} if self._direct else {},
            "file_io_concurrency": {"limit": READS_AT_ONCE},
            "data_copy_concurrency": {"limit": COPIES_AT_ONCE},
            "cache_pool": {"total_bytes_limit": 0},
        }
        # No file is synced by itself: a mixture of experts has a hundred thousand. What a power cut
        # leaves of one is found by its checksum when it is opened.
        self._scratch = ts.Context({**limits, "file_io_sync": False})
        self._cached_scratch = ts.Context({**limits, "file_io_mode": {}, "file_io_sync": False})

    def weights(self, fingerprint: str) -> WeightFolder:
        path = self.root / "weights" / fingerprint
        return WeightFolder(path, self._scratch, self._queue, self._direct)

    def scratch_weights(self) -> WeightFolder:
        """Returns a folder of tensors that live as long as this run."""
        path = self._run / f"tensors-{uuid.uuid4().hex}"
        return WeightFolder(path, self._scratch, self._queue, self._direct)

    def scratch_array(
        self,
        name: str,
        shape: tuple[int, ...],
        chunk: tuple[int, ...],
        dtype: np.dtype,
        is_cached: bool = False,
    ) -> DiskArray:
        """Creates an array that lives as long as this run.

        is_cached: go through the page cache, for data that is read back so soon that it should not
        wait for the disk behind everything else.
        """
        path = self._run / name
        context = self._cached_scratch if is_cached else self._scratch
        store = _open(path, shape, chunk, dtype, context, create=True)
        direct = self._direct and not is_cached
        return DiskArray(path, store, shape, chunk, dtype, self._queue, direct)

    def remove(self, array: DiskArray) -> None:
        """Removes an array that `scratch_array` created."""
        shutil.rmtree(array.path, ignore_errors=True)

    def clear_scratch(self) -> None:
        for child in self._run.iterdir():
            shutil.rmtree(child, ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self._run, ignore_errors=True)
        if not self._run.exists():
            self._run.with_suffix(".lock").unlink(missing_ok=True)
        self._lock.close()
        self._queue.close()


def remove_dead_runs(root: Path) -> None:
    """Removes the runs of killed processes from an offload folder, if it exists."""
    runs = root / "runs"
    try:
        _check_private(runs)
        entries = list(runs.iterdir())
    except OSError:
        return  # there is no such folder, or it is not ours
    for lock in (path for path in entries if path.suffix == ".lock"):
        with contextlib.suppress(OSError), open(lock) as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails for a live run's lock
            shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
            if not lock.with_suffix("").exists():
                lock.unlink()
    for folder in entries:
        # A live run creates its lock before its folder.
        if folder.suffix != ".lock" and not folder.with_suffix(".lock").exists():
            shutil.rmtree(folder, ignore_errors=True)


def _start_run(runs: Path) -> tuple[IO[str], Path]:
    """Starts a new run; returns its lock, held, and its folder."""
    while True:
        folder = runs / uuid.uuid4().hex
        path = folder.with_suffix(".lock")
        lock = open(path, "w")  # noqa: SIM115 - held as long as the run lives
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Before we locked it, another process may have removed it as a dead run's.
        if path.exists() and path.stat().st_ino == os.fstat(lock.fileno()).st_ino:
            folder.mkdir(mode=0o700)
            return lock, folder
        lock.close()


def _check_private(folder: Path) -> None:
    """Raises `OSError` if another user could write to the folder: its content is loaded as
    weights."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise OSError(f"{folder} belongs to another user or is writable by others")


class WeightFolder:
    """The stored tensors of one checkpoint in one dtype and width."""

    def __init__(self, path: Path, context: Any, queue: ReadQueue, direct: bool) -> None:
        """Opens the folder at `path`; direct: the file system can read past the page cache."""
        self.path = path
        self._context = context
        self._queue = queue
        self._direct = direct

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the folder's lock, so that there is one writer at a time; a second process waits,
        and then finds the tensors complete."""
        try:
            self.path.mkdir(mode=0o700, exist_ok=True)
            lock_file = open(self.path.with_suffix(".lock"), "w")  # noqa: SIM115 - closed below
        except OSError as error:
            raise OffloadError(f"cannot write to {self.path}: {error.strerror}") from None
        with lock_file as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for leftover in self.path.glob("*.part"):
                shutil.rmtree(leftover, ignore_errors=True)
            yield

    def has(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> bool:
        """Returns whether the tensor is stored whole; its owner, size and checksum are verified.

        A damaged tensor, or another model's, is removed, so that the caller writes it again.
        """
        folder = self.path / name
        try:
            done = json.loads((folder / "done.json").read_text())
            is_ours = all(done[key] == value for key, value in self._owner(name).items())
            is_whole = is_ours and done["bytes"] == _payload_bytes(folder)
            if is_whole and done["crc32"] == _checksum(self.open(name, shape, dtype)):
                return True
        except OSError as error:
            # Errors other than a missing or short file say nothing about the stored data.
            if error.errno not in (None, errno.ENOENT, errno.ENOTDIR):
                raise OffloadError(
                    f"cannot read {folder}: {error.strerror}; fix its permissions, or choose "
                    "another folder with --offload-dir"
                ) from None
            if any(status in str(error) for status in NOT_DAMAGE):
                raise
        except (ValueError, KeyError, TypeError):
            pass
        shutil.rmtree(folder, ignore_errors=True)
        return False

    def _owner(self, name: str) -> dict[str, str]:
        """Returns the entries of done.json that identify the stored tensor and its model."""
        return {"model": self.path.name, "tensor": name}

    def remove(self, name: str) -> None:
        """Removes a stored tensor."""
        shutil.rmtree(self.path / name, ignore_errors=True)

    def open(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> DiskArray:
        """Opens a stored tensor for reading."""
        return self._array(self.path / name, shape, dtype, self._direct)

    def _array(
        self,
        path: Path,
        shape: tuple[int, ...],
        dtype: np.dtype,
        direct: bool,
        create: bool = False,
    ) -> DiskArray:
        chunk = _chunk(shape, dtype)
        store = _open(path, shape, chunk, dtype, self._context, create)
        return DiskArray(path, store, shape, chunk, dtype, self._queue, direct)

    def write(
        self, name: str, shape: tuple[int, ...], dtype: np.dtype, pieces: Iterator[np.ndarray]
    ) -> None:
        """Stores a tensor from consecutive ranges of its rows; visible once it is complete."""
        folder, partial = self.path / name, self.path / f"{name}.part"
        array = self._array(partial, shape, dtype, self._direct, create=True)
        start, crc, pending = 0, 0, None
        try:
            for piece in pieces:
                crc = zlib.crc32(_as_bytes(piece), crc)
                if pending is not None:
                    pending.result()
                pending = array.write(piece, slice(start, start + piece.shape[0]))
                start += piece.shape[0]
            if pending is not None:
                pending.result()
            done = self._owner(name) | {"bytes": _payload_bytes(partial), "crc32": crc}
            (partial / "done.json").write_text(json.dumps(done))
            os.rename(partial, folder)
        except BaseException as error:
            if pending is not None:
                pending.exception()  # wait, or it would go on writing into a removed folder
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError | ValueError) and not isinstance(error, UserError):
                raise OffloadError(f"cannot write {folder}: {error}") from None
            raise


def _chunk(shape: tuple[int, ...], dtype: np.dtype) -> tuple[int, ...]:
    start, stop = row_ranges(shape, dtype.itemsize)[0]
    return (stop - start, *shape[1:])


def _open(
    path: Path,
    shape: tuple[int, ...],
    chunk: tuple[int, ...],
    dtype: np.dtype,
    context: Any,
    create: bool = False,
) -> Any:
    metadata = {
        "shape": list(shape),
        "data_type": dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
    }
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{path}/"},
        "metadata": metadata,
        "create": create,
        "open": not create,
        # A missing chunk is damage, never zeros.
        "fill_missing_data_reads": False,
        "store_data_equal_to_fill_value": True,
    }
    try:
        return ts.open(spec, context=context).result()
    except ValueError as error:
        reason = str(error).split(" [tensorstore_spec")[0]
        raise OffloadError(f"cannot open {path}: {reason}") from None


def _checksum(array: DiskArray) -> int:
    crc, step = 0, array.chunk[0]
    chunk = whole_pages(int(np.prod(array.chunk)) * array.dtype.itemsize)
    row = chunk.size // step
    for number, start in enumerate(range(0, array.shape[0], step)):
        rows = chunk[: row * min(step, array.shape[0] - start)]
        read_file(array.piece((number,), rows))
        crc = zlib.crc32(rows.data, crc)
    return crc


def _as_bytes(piece: np.ndarray) -> Any:
    return np.ascontiguousarray(piece).view(np.uint8).reshape(-1)


def _payload_bytes(folder: Path) -> int:
    def fail(error: OSError) -> None:
        raise error

    walked = os.walk(folder, onerror=fail)
    files = (Path(base) / name for base, _, names in walked for name in names)
    return sum(file.stat().st_size for file in files if file.name != "done.json")


def _has_direct_io(folder: Path) -> bool:
    """Returns whether files in this folder can bypass the page cache, which offloading would only
    thrash."""
    probe = folder / "probe"
    try:
        descriptor = os.open(probe, os.O_CREAT | os.O_RDWR | os.O_DIRECT, 0o600)
    except (OSError, AttributeError):
        return False
    else:
        os.close(descriptor)
        return True
    finally:
        probe.unlink(missing_ok=True)
