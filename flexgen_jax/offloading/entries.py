"""A stored pytree, and its transfer to the device."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple
from urllib.parse import quote

import jax
import jax.numpy as jnp
import numpy as np

from flexgen_jax.errors import UserError
from flexgen_jax.layers.quantization import Kept
from flexgen_jax.models.formats.storage import Storage
from flexgen_jax.offload.disk.folder import OffloadError
from flexgen_jax.offload.tiered import Stored, stored_leaf
from flexgen_jax.offload.tiers import Memories
from flexgen_jax.offloading.stream_memory import LayerMemory
from flexgen_jax.policy.parts import Layout
from flexgen_jax.policy.policy import TIERS, Tier

MAX_NAME_CHARS = 150
"""Characters of a file name that identify its content; of longer ones the rest is hashed."""


@dataclass(eq=False)
class Entry:
    """A tree that is kept.

    keys: of its leaves, by path; version: of those on disk; generation: how often it was put;
    writing: a write to disk under way; failure: what its last write failed with.
    """

    structure: Any
    shapes: dict[str, tuple[int, ...]]
    storages: dict[str, Storage]
    tiers: dict[str, Tier]
    keys: dict[str, str]
    layouts: dict[str, Layout]
    version: int | None = None
    generation: int = 0
    writing: Future[None] | None = None
    failure: str | None = None

    @property
    def nbytes(self) -> dict[Tier, int]:
        """Bytes of all leaves, by tier."""
        nbytes: dict[Tier, int] = dict.fromkeys(TIERS, 0)
        for path, storage in self.storages.items():
            nbytes[self.tiers[path]] += storage.nbytes
        return nbytes

    @property
    def on_disk(self) -> list[Layout]:
        """The layouts of the arrays to read from disk."""
        return [self.layouts[path] for path, tier in self.tiers.items() if tier == "disk"]

    @property
    def moved(self) -> int:
        """Bytes that are not on the device."""
        away = [path for path, tier in self.tiers.items() if tier != "device"]
        return sum(self.storages[path].nbytes for path in away)

    def stored(self, path: str, version: int) -> list[Stored]:
        """Returns the names, shapes and dtypes of a leaf's arrays on disk."""
        key = quote(self.keys[path], safe="")
        if len(key) > MAX_NAME_CHARS:
            key = key[:MAX_NAME_CHARS] + blake2b(key.encode(), digest_size=12).hexdigest()
        return [stored_leaf(f"{key}@{version}", leaf) for leaf in self.storages[path].leaves]


@lru_cache(maxsize=1024)
def layout_of(storage: Storage) -> Layout:
    """Returns the layout of a tensor's buffer; there is one object for equal tensors."""
    return Layout(storage.leaves, storage.nbytes)


class Arriving(NamedTuple):
    """A tree on its way to the device. generation: of the tree as it was at the start."""

    generation: int
    name: str
    memory: LayerMemory
    moved: Future[dict[str, Kept]]


class Markers:
    """Keeps a stream from running ahead of the device, where layers are copied to it: each marker
    is computed after the work dispatched for a layer."""

    def __init__(self, memories: Memories) -> None:
        self._memories = memories
        self._last: jax.Array | None = None

    def wait_for_last(self) -> None:
        """Sets a marker, and waits for the previous marker."""
        if self._memories.unified:
            return
        last, self._last = self._last, jnp.zeros((), device=self._memories.device) + 1
        if last is not None:
            last.block_until_ready()


def unchanging(leaf: Kept) -> Kept:
    """Returns a leaf that whoever gave it cannot change while it waits for the disk."""
    copy: Kept = np.array(leaf) if isinstance(leaf, np.ndarray) else leaf  # type: ignore[assignment]
    return copy


def shaped(leaf: Kept, shape: tuple[int, ...]) -> Kept:
    """Returns a leaf as it was given: a scalar was kept as an array of one element."""
    return leaf.reshape(()) if isinstance(leaf, jax.Array) and shape == () else leaf


def described(storages: Mapping[str, Storage]) -> str:
    return ", ".join(f"{path} {s.dtype}{list(s.shape)}" for path, s in storages.items())


def without_flags(error: OffloadError) -> UserError:
    """Returns an error that names the argument instead of the command-line flag."""
    return UserError(str(error).replace("--offload-dir", "`folder`"))
