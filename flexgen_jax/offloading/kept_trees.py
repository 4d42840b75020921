"""Pytrees in their tiers: leaves in memory, and leaves in files that are written behind."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

import numpy as np

from flexgen_jax.errors import first_line
from flexgen_jax.layers.quantization import Kept
from flexgen_jax.offload.disk.folder import (
    OffloadError,
    OffloadFolder,
    WeightFolder,
    row_ranges,
)
from flexgen_jax.offload.tiered import TieredTensors
from flexgen_jax.offload.tiers import Memories
from flexgen_jax.offloading.entries import Entry, layout_of, unchanging, without_flags
from flexgen_jax.offloading.trees import FlatTree, parts_of
from flexgen_jax.policy.placement import Splitter
from flexgen_jax.policy.policy import Placement, Tier
from flexgen_jax.progress import logger
from flexgen_jax.schedule.ledger import Ledger

MIN_OFFLOADED_BYTES = 64 << 10
"""Leaves of fewer bytes stay on the device: they are not worth moving."""

WRITES_AHEAD = 2
"""Trees whose leaves may wait for the disk."""


class KeptTrees:
    """Trees by name, each leaf in the tier that the placement gives it.

    root: the folder of leaves on disk; stored_as: the name for later processes, None to delete them
    with this process; set before the first tree comes.
    """

    def __init__(self, memories: Memories, placement: Placement, root: Path) -> None:
        self.entries: dict[str, Entry] = {}
        self.stored_as: str | None = None
        self.tensors = TieredTensors(memories, Ledger({}), "layers")
        self._splitter = Splitter(placement)
        self._root = root
        self._disk: OffloadFolder | None = None
        self._files: WeightFolder | None = None
        self._writing = ThreadPoolExecutor(1, "flexgen-write")
        self._writes: deque[Entry] = deque()

    def folder(self) -> WeightFolder:
        """Returns the folder of the arrays on disk."""
        if self._files is None:
            try:
                self._disk = OffloadFolder(self._root)
            except OffloadError as error:
                raise without_flags(error) from None
            if self.stored_as is None:
                self._files = self._disk.scratch_weights()
            else:
                self._files = self._disk.weights(f"layers-{quote(self.stored_as, safe='')}")
        return self._files

    def placed(self, name: str, flat: FlatTree) -> Entry:
        """Returns what a tree will be here, with the tier of every leaf."""
        storages = flat.storages()
        large = [
            path for path, storage in storages.items() if storage.nbytes >= MIN_OFFLOADED_BYTES
        ]
        homes = self._splitter.split(storages[path].nbytes for path in large)
        tiers: dict[str, Tier] = dict.fromkeys(storages, "device")
        tiers |= dict(zip(large, homes, strict=True))
        return Entry(
            structure=flat.structure,
            shapes={path: leaf.shape for path, leaf in flat.leaves.items()},
            storages=storages,
            tiers=tiers,
            keys={path: f"{name}{path}" for path in storages},
            layouts={path: layout_of(storage) for path, storage in storages.items()},
        )

    def enter(self, name: str, entry: Entry, flat: FlatTree) -> None:
        """Keeps a tree that was not here."""
        for path, storage in entry.storages.items():
            self.tensors.reserve(entry.keys[path], storage, entry.tiers[path])
        self.entries[name] = entry
        try:
            self.replace(entry, flat)
        except BaseException:
            self.discard(name)
            raise

    def replace(self, entry: Entry, flat: FlatTree) -> None:
        """Stores a tree's leaves, replacing the existing ones."""
        in_memory, on_disk = dict[str, list[np.ndarray]](), dict[str, Kept]()
        for path, leaf in flat.leaves.items():
            if entry.tiers[path] == "disk":
                on_disk[path] = unchanging(leaf)
            else:
                in_memory[path] = parts_of(leaf)
        self.finish(entry)
        while len(self._writes) >= WRITES_AHEAD:
            self.settle()
        entry.failure = None
        entry.generation += 1
        for path, arrays in in_memory.items():
            self._keep(entry, path, arrays)
        if on_disk:
            entry.writing = self._writing.submit(self._write, entry, on_disk)
            self._writes.append(entry)

    def _keep(self, entry: Entry, path: str, parts: list[np.ndarray]) -> None:
        """Keeps a leaf in memory: a copy, since it may lie in the memory of a stream."""
        key, tier = entry.keys[path], entry.tiers[path]

        def fill(views: list[np.ndarray]) -> None:
            for view, array in zip(views, parts, strict=True):
                view[...] = array

        self.tensors.drop(key)
        self.tensors.make(key, entry.storages[path], tier, fill)

    def _write(self, entry: Entry, leaves: Mapping[str, Kept]) -> None:
        """Writes new leaves next to the old ones, and then deletes the old ones."""
        before, files = entry.version, self.folder()
        version = 0 if before is None else before + 1
        stored = {path: entry.stored(path, version) for path in leaves}
        stays = self.stored_as is not None
        try:
            for path, leaf in leaves.items():
                if stays and all(files.has(*array) for array in stored[path]):
                    continue
                for (name, shape, dtype), part in zip(stored[path], parts_of(leaf), strict=True):
                    pieces = (part[a:b] for a, b in row_ranges(part.shape, part.itemsize))
                    files.write(name, shape, dtype, pieces)
        except BaseException:
            if not stays:
                self._remove_files(entry, version)
            raise
        for path, arrays in stored.items():
            self.tensors.keep_files(entry.keys[path], [files.open(*array) for array in arrays])
        entry.version = version
        if before is not None:
            self._remove_files(entry, before)

    def _remove_files(self, entry: Entry, version: int) -> None:
        for path in (path for path, tier in entry.tiers.items() if tier == "disk"):
            for name, *_ in entry.stored(path, version):
                self.folder().remove(name)

    def finish(self, entry: Entry) -> None:
        """Waits for the write of a tree."""
        writing, entry.writing = entry.writing, None
        error = None if writing is None else writing.exception()
        if error is not None:
            entry.failure = first_line(error)

    def settle(self) -> bool:
        """Waits for the write that waits longest; returns whether there was any."""
        if not self._writes:
            return False
        self.finish(self._writes.popleft())
        return True

    def used(self) -> dict[Tier, int]:
        """Returns the bytes of all trees, by tier."""
        return self.tensors.used()

    def discard(self, name: str) -> None:
        """Lets a tree go."""
        entry = self.entries[name]
        self.finish(entry)
        for key in entry.keys.values():
            self.tensors.drop(key)
        if entry.version is not None and self.stored_as is None:
            self._remove_files(entry, entry.version)
        del self.entries[name]

    def close(self) -> None:
        """Frees everything; waits for running writes."""
        self._writing.shutdown()
        while self.settle():
            pass
        for name, entry in self.entries.items():
            if entry.failure is not None:
                logger().warning("flexgen-jax: %s could not be written: %s", name, entry.failure)
        self.tensors.close()
        self.entries.clear()
        if self._disk is not None:
            self._disk.close()
