"""Pytrees whose leaves lie on the device, the host and the disk, and are streamed to the device."""

from __future__ import annotations

import difflib
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from flexgen_jax.errors import UserError, first_line
from flexgen_jax.layers.quantization import Kept
from flexgen_jax.machine.caches import cache_folder
from flexgen_jax.offload.disk.folder import (
    OffloadError,
    OffloadFolder,
    WeightFolder,
    row_ranges,
)
from flexgen_jax.offload.metrics import Metrics
from flexgen_jax.offload.prefetch import Load
from flexgen_jax.offload.tiered import TieredTensors
from flexgen_jax.offload.tiers import Memories
from flexgen_jax.offload.watcher import Watcher
from flexgen_jax.offloading.entries import (
    Arriving,
    Entry,
    Markers,
    described,
    layout_of,
    shaped,
    unchanging,
    without_flags,
)
from flexgen_jax.offloading.stream_memory import LayerMemory, StreamMemory, block_bytes
from flexgen_jax.offloading.trees import FlatTree, flattened, parts_of
from flexgen_jax.policy.ledger import Ledger
from flexgen_jax.policy.placement import Splitter
from flexgen_jax.policy.policy import TIERS, Placement, Tier
from flexgen_jax.progress import logger
from flexgen_jax.units import parse_bytes

SMALL = 64 << 10
"""Leaves of fewer bytes stay on the device: they are not worth moving."""

WRITES_AHEAD = 2
"""Trees whose leaves may wait for the disk."""


class TieredArrays:
    """Pytrees by name, such as a model's layers or their activations, each leaf in the tier that
    the placement gives it.

    placement: fractions of the bytes on the device and the host, the rest on disk; they hold over
        all trees together, in the order in which they come. Leaves of less than 64 KiB stay on the
        device.
    folder: where leaves on disk lie, by default in the user's cache; they go with the process.
    device_memory, host_memory, disk_space: limits, bytes or "2GB"; None for none.
    unified: whether the device computes with host memory itself; None for as it is, which is so on
        a CPU.

    One thread uses it at a time.

    Raises `UserError` where something would exceed a limit.
    """

    def __init__(
        self,
        placement: Placement,
        *,
        folder: str | Path | None = None,
        device_memory: str | int | None = None,
        host_memory: str | int | None = None,
        disk_space: str | int | None = None,
        unified: bool | None = None,
    ) -> None:
        if not isinstance(placement, Placement):
            raise UserError(f"placement must be a Placement, not {placement!r}")
        given = (device_memory, host_memory, disk_space)
        names = ("device_memory", "host_memory", "disk_space")
        sizes = [parse_bytes(size, name) for size, name in zip(given, names, strict=True)]
        self._limits: dict[Tier, int | None] = dict(zip(TIERS, sizes, strict=True))
        self._memories = Memories(Watcher(Metrics()), unified)
        self._tensors = TieredTensors(self._memories, Ledger({}), "layers")
        self._splitter = Splitter(placement)
        self._entries: dict[str, Entry] = {}
        self._root = Path(folder or cache_folder("offload")).expanduser()
        self._disk: OffloadFolder | None = None
        self._files: WeightFolder | None = None
        self._copying = ThreadPoolExecutor(1, "flexgen-copy")
        self._writing = ThreadPoolExecutor(1, "flexgen-write")
        self._writes: deque[Entry] = deque()
        self._streaming: dict[int, dict[Tier, int]] = {}
        self._memory: StreamMemory | None = None
        self._is_closed = False
        # Whether what is on disk outlives the process.
        self._is_kept = False

    # What there is

    def __iter__(self) -> Iterator[str]:
        """Yields the names, in the order in which they came."""
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    @property
    def nbytes(self) -> dict[Tier, int]:
        """Bytes of all trees, by tier."""
        return self._tensors.used()

    def peak_bytes(self, ahead: int = 2) -> dict[Tier, int]:
        """Returns the most bytes that are in use while all trees are streamed with this look-ahead:
        the trees themselves, and `ahead` + 2 of the largest one on its way."""
        largest = self._largest(self._entries.values())
        return {tier: used + (ahead + 2) * largest[tier] for tier, used in self.nbytes.items()}

    def _largest(self, entries: Collection[Entry]) -> dict[Tier, int]:
        """Returns what the largest of some trees takes on its way, by tier."""
        read = max((block_bytes(entry.on_disk) for entry in entries), default=0)
        moved = max((entry.moved for entry in entries), default=0)
        return {"device": 0 if self._memories.unified else moved, "host": read, "disk": 0}

    # Writing

    def put(self, name: str, tree: Any) -> None:
        """Keeps a tree, in place of what has this name; returns when its memory is free or its
        write to disk is under way, as of two trees at most.

        A tree that takes another's place has the same structure, shapes and dtypes. If its write
        fails, whoever asks for it is told, until it is put again. Arrays must not be donated to a
        computation after they were put.
        """
        self._check_open()
        flat = flattened(tree, name)
        entry = self._entries.get(name)
        if entry is None:
            entry = self._enter(name, flat)
            try:
                self._replace(entry, flat)
            except BaseException:
                self._discard(name, entry)
                raise
            return
        if (flat.structure, flat.storages()) != (entry.structure, entry.storages):
            raise UserError(
                f"{name} has {described(entry.storages)} and cannot be replaced by "
                f"{described(flat.storages())}; remove it first"
            )
        self._replace(entry, flat)

    def _replace(self, entry: Entry, flat: FlatTree) -> None:
        """Keeps a tree's leaves in place of those that are there."""
        in_memory = {
            path: parts_of(leaf)
            for path, leaf in flat.leaves.items()
            if entry.tiers[path] != "disk"
        }
        on_disk = {
            path: unchanging(leaf)
            for path, leaf in flat.leaves.items()
            if entry.tiers[path] == "disk"
        }
        self._finish(entry)
        while len(self._writes) >= WRITES_AHEAD:
            self._settle()
        entry.failure = None
        entry.generation += 1
        for path, parts in in_memory.items():
            self._keep(entry, path, parts)
        if on_disk:
            entry.writing = self._writing.submit(self._write, entry, on_disk)
            self._writes.append(entry)

    def _enter(self, name: str, flat: FlatTree) -> Entry:
        storages = flat.storages()
        large = [path for path, storage in storages.items() if storage.nbytes >= SMALL]
        chosen = self._splitter.split(storages[path].nbytes for path in large)
        tiers: dict[str, Tier] = dict.fromkeys(storages, "device")
        tiers |= dict(zip(large, chosen, strict=True))
        wanted: dict[Tier, int] = dict.fromkeys(TIERS, 0)
        for path, storage in storages.items():
            wanted[tiers[path]] += storage.nbytes
        self._check_room(wanted, name)
        entry = Entry(
            structure=flat.structure,
            shapes={path: leaf.shape for path, leaf in flat.leaves.items()},
            storages=storages,
            tiers=tiers,
            keys={path: f"{name}{path}" for path in storages},
            layouts={path: layout_of(storage) for path, storage in storages.items()},
        )
        for path, storage in storages.items():
            self._tensors.reserve(entry.keys[path], storage, tiers[path])
        self._entries[name] = entry
        return entry

    def _check_room(self, wanted: Mapping[Tier, int], what: str) -> None:
        """Raises `UserError` if a tier has no room for the bytes that are wanted of it."""
        for tier, nbytes in wanted.items():
            limit, used = self._limits[tier], self.nbytes[tier]
            used += sum(stream[tier] for stream in self._streaming.values())
            if limit is None:
                continue
            if tier == "host" and self._memory is not None:
                is_idle = id(self._memory) not in self._streaming
                if is_idle and used + nbytes + self._memory.nbytes > limit:
                    self._memory = None  # of the last stream
            if used + nbytes > limit:
                name = "disk_space" if tier == "disk" else f"{tier}_memory"
                raise UserError(
                    f"{what} needs {nbytes} bytes of {tier} memory beside {used} in use, and "
                    f"{name} allows {limit}: raise it, place more in a slower tier, or lower "
                    "`ahead`"
                )

    def _keep(self, entry: Entry, path: str, parts: list[np.ndarray]) -> None:
        """Keeps a leaf in memory: a copy, since it may lie in the memory of a stream."""
        key, tier = entry.keys[path], entry.tiers[path]

        def fill(views: list[np.ndarray]) -> None:
            for view, part in zip(views, parts, strict=True):
                view[...] = part

        self._tensors.drop(key)
        self._tensors.make(key, entry.storages[path], tier, fill)

    def _write(self, entry: Entry, leaves: Mapping[str, Kept]) -> None:
        """Writes leaves beside those whose place they take, and then lets these go."""
        before, files = entry.version, self._folder()
        version = 0 if before is None else before + 1
        stored = {path: entry.stored(path, version) for path in leaves}
        try:
            for path, leaf in leaves.items():
                if self._is_kept and all(files.has(*what) for what in stored[path]):
                    continue
                for (name, shape, dtype), part in zip(stored[path], parts_of(leaf), strict=True):
                    pieces = (part[a:b] for a, b in row_ranges(part.shape, part.itemsize))
                    files.write(name, shape, dtype, pieces)
        except BaseException:
            if not self._is_kept:
                self._remove_files(entry, version)
            raise
        for path, names in stored.items():
            self._tensors.keep_files(entry.keys[path], [files.open(*what) for what in names])
        entry.version = version
        if before is not None:
            self._remove_files(entry, before)

    def _remove_files(self, entry: Entry, version: int) -> None:
        for path in (path for path, tier in entry.tiers.items() if tier == "disk"):
            for name, *_ in entry.stored(path, version):
                self._folder().remove(name)

    def _folder(self) -> WeightFolder:
        if self._files is None:
            try:
                self._disk = OffloadFolder(self._root)
            except OffloadError as error:
                raise without_flags(error) from None
            self._files = self._opened(self._disk)
        return self._files

    def _opened(self, disk: OffloadFolder) -> WeightFolder:
        """Returns the folder of what is on disk."""
        return disk.scratch_weights()

    def _finish(self, entry: Entry) -> None:
        """Waits for the write of a tree."""
        writing, entry.writing = entry.writing, None
        error = None if writing is None else writing.exception()
        if error is not None:
            entry.failure = first_line(error)

    def _settle(self) -> bool:
        """Waits for the write that waits longest; returns whether there was any."""
        if not self._writes:
            return False
        self._finish(self._writes.popleft())
        return True

    def remove(self, name: str) -> None:
        """Lets a tree go."""
        entry = self._entry(name)
        if self._is_kept:
            raise UserError(f"{name} is stored for later processes, and cannot be removed")
        self._discard(name, entry)

    def _discard(self, name: str, entry: Entry) -> None:
        self._finish(entry)
        for key in entry.keys.values():
            self._tensors.drop(key)
        if entry.version is not None and not self._is_kept:
            self._remove_files(entry, entry.version)
        del self._entries[name]

    # Reading

    def _entry(self, name: str) -> Entry:
        self._check_open()
        if name not in self._entries:
            close = difflib.get_close_matches(name, self._entries, 5, 0) if self._entries else []
            known = f"; the closest of {len(self)} names: {', '.join(close)}" if close else ""
            raise UserError(f"there is nothing of the name {name!r}{known}")
        return self._entries[name]

    def __getitem__(self, name: str) -> Any:
        """A tree on the device, which may be kept."""
        entry = self._entry(name)
        read = block_bytes(entry.on_disk)
        self._check_room({"host": read}, name)
        memory = StreamMemory(self._memories, read, 1, self._settle)
        return self._arrived(self._start(name, memory), memory)

    def stream(
        self, order: Iterable[str] | None = None, ahead: int = 2
    ) -> Iterator[tuple[str, Any]]:
        """Yields names and their trees on the device, while the next ones are on their way.

        order: names, each as often as it is wanted; None for all, once. ahead: how many trees are
        on their way while one is computed with. Memory stays within `peak_bytes`: so keep what was
        yielded no longer than to the next tree, or copy it, and do not donate it. A tree that is
        put while the stream goes on is yielded as it is then.
        """
        self._check_open()
        names = list(self if order is None else order)
        entries = [self._entry(name) for name in names]  # which must be there before it begins
        if not isinstance(ahead, int) or ahead < 0:
            raise UserError(f"ahead must be a whole number of 0 or more, not {ahead}")
        largest = self._largest(entries)
        count = min(ahead + 2, len(names))
        self._check_room({tier: count * size for tier, size in largest.items()}, "a stream")
        return self._stream(names, ahead, largest)

    def _memory_of(self, nbytes: int, count: int) -> StreamMemory:
        """Returns memory for a stream: that of the last one, if it has as large blocks and is not
        in use, since to touch new memory takes a while."""
        last = self._memory
        if last is None or not last.suits(nbytes, count) or id(last) in self._streaming:
            last = self._memory = StreamMemory(self._memories, nbytes, count, self._settle)
        last.begin()
        return last

    def _stream(
        self, names: list[str], ahead: int, largest: Mapping[Tier, int]
    ) -> Iterator[tuple[str, Any]]:
        coming, upcoming = deque[Arriving](), iter(names)
        count = min(ahead + 2, len(names))
        needed = {tier: count * size for tier, size in largest.items()}
        self._check_room(needed, "a stream")  # again: others may have begun meanwhile
        memory = self._memory_of(largest["host"], count)
        self._streaming[id(memory)] = needed
        markers = Markers(self._memories)
        try:
            for name in names:
                while len(coming) <= ahead and (following := next(upcoming, None)) is not None:
                    coming.append(self._start(following, memory))
                tree = self._arrived(coming.popleft(), memory)
                yield name, tree
                del tree
                markers.wait_for_last()
        finally:
            for arriving in coming:
                arriving.moved.exception()
                arriving.memory.buffers.clear()
            del self._streaming[id(memory)]

    def _arrived(self, arriving: Arriving, memory: StreamMemory) -> Any:
        """Returns a tree on the device, of which the caller has the only reference."""
        name = arriving.name
        if arriving.generation != self._entry(name).generation:  # it was put meanwhile
            arriving.moved.exception()
            arriving.memory.hand_out()
            del arriving
            arriving = self._start(name, memory)
        try:
            return self._tree(name, arriving.moved.result())
        except OffloadError as error:
            raise without_flags(error) from None
        finally:
            arriving.memory.hand_out()

    def _start(self, name: str, memory: StreamMemory) -> Arriving:
        entry = self._entry(name)
        self._finish(entry)
        if entry.failure is not None:
            raise UserError(f"{name} could not be written: {entry.failure}; put it again")
        own = memory.take(entry.on_disk)
        load = self._tensors.load(name, entry.keys, own.buffers)
        moved = self._copying.submit(self._arrive, load, own, memory)
        return Arriving(entry.generation, name, own, moved)

    def _arrive(
        self, load: Load[dict[str, Kept]], own: LayerMemory, memory: StreamMemory
    ) -> dict[str, Kept]:
        """Waits for the reads of a tree and copies it to the device."""
        try:
            load.copy(self._memories)
        except BaseException:
            memory.give_up(own)
            raise
        moved = load.arriving
        memory.give_back(own, moved)
        return moved

    def _tree(self, name: str, leaves: Mapping[str, Kept]) -> Any:
        entry = self._entries[name]
        whole = [shaped(leaf, entry.shapes[path]) for path, leaf in leaves.items()]
        return jax.tree.unflatten(entry.structure, whole)

    # Ending

    def _check_open(self) -> None:
        if self._is_closed:
            raise UserError("this is closed; make another one")

    def close(self) -> None:
        """Frees everything; what is being written is waited for."""
        if self._is_closed:
            return
        self._is_closed, self._memory = True, None
        self._copying.shutdown()
        self._writing.shutdown()
        while self._settle():
            pass
        for name, entry in self._entries.items():
            if entry.failure is not None:
                logger().warning("flexgen-jax: %s could not be written: %s", name, entry.failure)
        self._tensors.close()
        self._entries.clear()
        if self._disk is not None:
            self._disk.close()
        self._memories.watcher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
