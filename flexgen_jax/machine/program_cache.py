"""JAX's cache of compiled programs with a checksum of every entry.

An entry is machine code: a flipped bit in it ends the process by a signal. JAX's own cache does not
notice that. A damaged entry is removed here, so that its program is compiled again.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

from jax._src import compilation_cache, lru_cache

from flexgen_jax.caches import cache_folder

untyped_cache: Any = lru_cache
untyped_compilation: Any = compilation_cache

MAGIC = b"flexgen-jax program 1\n"
CHECKSUM_BYTES = 4
EVICTED_SHARE = 0.1
"""Share of the cache that is evicted at once when it is full."""


class CheckedCache(untyped_cache.LRUCache):  # type: ignore[misc]
    """A cache whose files begin with `MAGIC` and the CRC-32 of key and content.

    JAX's cache reads the whole folder each time it adds a program. This one counts the bytes that
    it adds, and reads the folder at the start and when the cache is full.
    """

    _folder_bytes: int | None = None

    def get(self, key: str) -> bytes | None:
        content = super().get(key)
        if content is None:
            return None
        begin = len(MAGIC) + CHECKSUM_BYTES
        if content.startswith(MAGIC) and content[len(MAGIC) : begin] == _sum(key, content[begin:]):
            return bytes(content[begin:])
        (self.path / f"{key}-cache").unlink(missing_ok=True)
        (self.path / f"{key}-atime").unlink(missing_ok=True)
        return None

    def put(self, key: str, value: bytes) -> None:
        super().put(key, MAGIC + _sum(key, value) + value)

    def _evict_if_needed(self, *, additional_size: int = 0) -> None:
        if not self.eviction_enabled:  # the user allows any size
            return
        if self._folder_bytes is None:
            with os.scandir(str(self.path)) as entries:
                self._folder_bytes = sum(entry.stat().st_size for entry in entries)
        self._folder_bytes += additional_size
        if self._folder_bytes > self.max_size:
            free_bytes = max(additional_size, int(EVICTED_SHARE * self.max_size))
            super()._evict_if_needed(additional_size=free_bytes)
            self._folder_bytes = None


def _sum(key: str, value: bytes) -> bytes:
    return zlib.crc32(value, zlib.crc32(key.encode())).to_bytes(CHECKSUM_BYTES, "little")


def check_programs() -> None:
    """Makes JAX check the programs in this package's folder, and no others.

    JAX has no public interface for that.
    """

    def make(path: str, **options: Any) -> Any:
        is_ours = Path(path).is_relative_to(cache_folder("programs"))
        return (CheckedCache if is_ours else untyped_cache.LRUCache)(path, **options)

    untyped_compilation.LRUCache = make
