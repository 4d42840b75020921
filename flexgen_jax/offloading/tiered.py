"""Pytrees whose leaves lie on the device, the host and the disk, and are streamed to the device."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self

from flexgen_jax.caches import cache_folder
from flexgen_jax.errors import UserError
from flexgen_jax.offload.metrics import Metrics
from flexgen_jax.offload.tiers import Memories
from flexgen_jax.offload.watcher import Watcher
from flexgen_jax.offloading.entries import Entry, described
from flexgen_jax.offloading.kept_trees import KeptTrees
from flexgen_jax.offloading.room import Room
from flexgen_jax.offloading.streams import Streams
from flexgen_jax.offloading.trees import flattened
from flexgen_jax.policy.policy import TIERS, Placement, Tier
from flexgen_jax.units import parse_bytes


class TieredArrays:
    """Pytrees by name, such as a model's layers or their activations, each leaf in the tier that
    the placement gives it.

    placement: fractions of the bytes on the device and the host, the rest on disk; they apply to
        all trees together, in order of arrival. Leaves of less than 64 KiB stay on the device.
    folder: where leaves on disk lie, by default in the user's cache; they go with the process.
    device_memory, host_memory, disk_space: limits, bytes or "2GB"; None for none.
    unified: whether the device computes with host memory itself; None for the default, which is
        True on a CPU.

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
        limits = dict(zip(TIERS, sizes, strict=True))
        self._memories = Memories(Watcher(Metrics()), unified)
        root = Path(folder or cache_folder("offload")).expanduser()
        self._trees = KeptTrees(self._memories, placement, root)
        self._room = Room(limits, self._trees.used)
        self._streams = Streams(self._memories, self._trees, self._room, self._entry)
        self._is_closed = False

    def __iter__(self) -> Iterator[str]:
        """Yields the names in order of arrival."""
        return iter(self._trees.entries)

    def __len__(self) -> int:
        return len(self._trees.entries)

    def __contains__(self, name: object) -> bool:
        return name in self._trees.entries

    @property
    def nbytes(self) -> dict[Tier, int]:
        """Bytes of all trees, by tier."""
        return self._trees.used()

    def peak_bytes(self, ahead: int = 2) -> dict[Tier, int]:
        """Returns the most bytes that are in use while all trees are streamed with this look-ahead:
        the trees themselves, and `ahead` + 2 of the largest one on its way."""
        largest = self._streams.largest(self._trees.entries.values())
        return {
            tier: placed_bytes + (ahead + 2) * largest[tier]
            for tier, placed_bytes in self.nbytes.items()
        }

    def put(self, name: str, tree: Any) -> None:
        """Stores a tree, replacing the tree of this name; returns when its memory is free or its
        write to disk is under way, as of two trees at most.

        A tree that takes another's place has the same structure, shapes and dtypes. If its write
        fails, every access raises an error until the tree is put again. Arrays must not be donated
        to a computation after they were put.
        """
        self._check_open()
        flat = flattened(tree, name)
        entry = self._trees.entries.get(name)
        if entry is None:
            entry = self._trees.placed(name, flat)
            self._room.check(entry.nbytes, name)
            self._trees.enter(name, entry, flat)
            return
        if (flat.structure, flat.storages()) != (entry.structure, entry.storages):
            raise UserError(
                f"{name} is {described(entry.storages)} and cannot be replaced by "
                f"{described(flat.storages())}; remove it first"
            )
        self._trees.replace(entry, flat)

    def remove(self, name: str) -> None:
        """Lets a tree go."""
        self._entry(name)
        if self._trees.stored_as is not None:
            raise UserError(f"{name} is stored for later processes and cannot be removed")
        self._trees.discard(name)

    def _entry(self, name: str) -> Entry:
        self._check_open()
        entries = self._trees.entries
        if name not in entries:
            close = difflib.get_close_matches(name, entries, 5, 0) if entries else []
            hint = f"; the closest of {len(self)} names: {', '.join(close)}" if close else ""
            raise UserError(f"there is nothing named {name!r}{hint}")
        return entries[name]

    def __getitem__(self, name: str) -> Any:
        """A tree on the device, which may be kept."""
        return self._streams.one(name)

    def stream(
        self, order: Iterable[str] | None = None, ahead: int = 2
    ) -> Iterator[tuple[str, Any]]:
        """Yields names and their trees on the device, while the next ones are on their way.

        order: names, possibly repeated; None for all, once. ahead: how many trees are on their way
        while one is computed with. Memory stays within `peak_bytes`: so use a yielded tree only
        until the next one, or copy it, and do not donate it. A tree that is put during the stream
        is yielded in its new state.
        """
        self._check_open()
        names = list(self if order is None else order)
        for name in names:
            self._entry(name)  # which must be there before it begins
        if not isinstance(ahead, int) or ahead < 0:
            raise UserError(f"ahead must be an integer >= 0, not {ahead}")
        return self._streams.begin(names, ahead)

    def _check_open(self) -> None:
        if self._is_closed:
            raise UserError("this object is closed; create another one")

    def close(self) -> None:
        """Frees everything; waits for running writes."""
        if self._is_closed:
            return
        self._is_closed = True
        self._streams.close()
        self._trees.close()
        self._memories.watcher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
