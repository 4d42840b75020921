"""The arrays of the KV cache: blocks in memory, each open or sealed, and records on disk.

Which blocks there are, and when they are opened, sealed and written, is decided by
`policy/cache_blocks.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flexgen_jax.cpu import HostBlock
from flexgen_jax.layers.decoder import KVBlock
from flexgen_jax.layers.quantization import Kept, QuantizedArray, assemble
from flexgen_jax.offload.device import Device
from flexgen_jax.offload.disk.direct_reads import whole_pages
from flexgen_jax.offload.disk.folder import OffloadFolder
from flexgen_jax.offload.disk.records import Records
from flexgen_jax.offload.prefetch import Load, Write, ended_on_error
from flexgen_jax.offload.tiers import HostBuffer, writable_view
from flexgen_jax.offload.watcher import counted
from flexgen_jax.policy.placement import CacheKey, Part
from flexgen_jax.policy.plan import BlockPlan, CachedPart


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """What a step needs of a layer's cache. As a pytree, its leaves are what moves to the device.

    blocks: the KV blocks with their values on the device, the open one last (there is none
    for a prompt's chunk); keys: the keys of blocks whose values stay on the host, if the device
    ranks them; on_host: all of these blocks; here, there: the shapes of the blocks on the device
    and on the host; sealed: number of sealed blocks.
    """

    blocks: tuple[KVBlock, ...]
    keys: tuple[Kept, ...]
    on_host: tuple[HostBlock, ...] = field(metadata={"static": True})
    here: Part = field(metadata={"static": True})
    there: Part = field(metadata={"static": True})
    sealed: int = field(metadata={"static": True})


@dataclass
class Block:
    """A KV block in memory.

    views: the arrays' memory while the block is open, where the CPU may write to it; used: number
    of tokens that are written.
    """

    arrays: KVBlock
    views: tuple[np.ndarray, ...] = ()
    used: int = 0


class KVCache:
    """The keys and values of all decoder layers for the batches that are there.

    folder: None if the plan puts no KV blocks on disk.
    """

    def __init__(self, plan: BlockPlan, device: Device, folder: OffloadFolder | None) -> None:
        self._plan, self._device, self._folder = plan, device, folder
        self._memories = device.memories
        self._blocks: dict[CacheKey, Block] = {}
        self._files: dict[tuple[int, int, int], Records] = {}
        self._rows: dict[tuple[int, int], int] = {}
        self._writes: list[Write] = []
        # Memory of finished writes, reused: the first touch of fresh memory takes longer than the
        # copy.
        self._spare: defaultdict[int, list[np.ndarray]] = defaultdict(list)
        self._is_read = False

    def keep(self, key: CacheKey, arrays: KVBlock) -> None:
        """Keeps a sealed block in the memory of its home, for disk on the host."""
        if self._plan.cache.homes[key] != "device":
            arrays = self._memories.to_host(arrays, "cache", _name(key))
        self._blocks[key] = Block(arrays)

    def open(self, key: CacheKey, buffer: HostBuffer | None) -> None:
        """Makes an empty block, in a host buffer if there is one."""
        if buffer is not None:
            first, second = buffer.arrays
            self._blocks[key] = Block((first, second), buffer.views)
            return
        (leaf, _) = self._plan.open_layout(key).leaves
        arrays = (jnp.zeros(leaf.shape, leaf.dtype), jnp.zeros(leaf.shape, leaf.dtype))
        views: tuple[np.ndarray, ...] = ()
        if self._memories.unified:
            # To write one token, XLA's CPU backend would convert a whole 16-bit block to fp32 and
            # back.
            views = tuple(map(writable_view, jax.block_until_ready(arrays)))
        self._blocks[key] = Block(arrays, views)

    def ask(self, key: CacheKey, new: KVBlock) -> None:
        """Starts moving a token's key and value to where `append` will want them."""
        if self._blocks[key].views:
            self._memories.ask(new, "cache", _name(key))

    def append(self, key: CacheKey, new: KVBlock) -> None:
        """Writes one token's key and value to the open block."""
        block = self._blocks[key]
        if block.views:
            for view, array in zip(block.views, new, strict=True):
                view[:, :, block.used] = np.asarray(array)[:, :, 0]
        else:
            append = self._device.programs.append(*self._shape(key))
            block.arrays = append(block.arrays, new, self._memories.numbers(block.used))
        block.used += 1

    def replace(self, key: CacheKey, arrays: KVBlock) -> None:
        """Takes an open block to which a program has appended a token."""
        block = self._blocks[key]
        block.arrays, block.used = arrays, block.used + 1

    def quantize(self, key: CacheKey) -> None:
        """Quantizes a full block on the device."""
        block = self._blocks[key]
        opened = self._memories.to_device(block.arrays, "cache", "a full KV block")
        sealed = self._device.programs.seal(*self._shape(key))(opened)
        if block.views:  # the CPU will write to them
            jax.block_until_ready(sealed)
        self.keep(key, sealed)

    def write(self, keys: Sequence[CacheKey]) -> Write:
        """Starts writing sealed blocks of one layer and batch to disk, from a copy of their own;
        frees the blocks."""
        futures: list[Any] = []
        copies: list[np.ndarray] = []
        write = Write(_name(keys[0]), futures, lambda: self._written(write, copies))
        self._writes.append(write)  # so that `close` waits for those that began before an error
        for key in keys:
            block, records = self._blocks.pop(key), self._stored(key)
            views = block.views or [np.asarray(leaf) for leaf in jax.tree.leaves(block.arrays)]
            spare = self._spare[records.nbytes]
            copies.append(spare.pop() if spare else whole_pages(records.nbytes))
            futures.append(records.write(key.layer, views, copies[-1]))
        nbytes = sum(map(self._plan.kv_bytes, keys))
        counted(self._memories.metrics, "disk_write", "cache", write.what, nbytes, futures)
        return write

    def _written(self, write: Write, copies: list[np.ndarray]) -> None:
        self._writes.remove(write)
        for copy in copies:
            self._spare[copy.size].append(copy)

    def _shape(self, key: CacheKey) -> tuple[Any, int, int]:
        """Returns a block's layer, and its numbers of rows and tokens."""
        layer = self._plan.spec.decoders[key.layer]
        return layer, self._plan.batches[key.batch].rows, self._plan.block_tokens(key)

    def _stored(self, key: CacheKey) -> Records:
        """Returns the disk records of one KV block of a batch: one record per layer, of the leaves
        of its keys and then of its values."""
        name = (self._rows_of(key), key.block, key.batch)
        if name not in self._files:
            assert self._folder is not None, "the policy puts KV blocks on disk"
            count = len(self._plan.spec.decoders)
            largest = max(self._plan.kv_bytes(key._replace(layer=i)) for i in range(count))
            file = f"kv-{key.batch}-{key.block}-{name[0]}"
            self._files[name] = Records.create(self._folder, file, count, largest)
        return self._files[name]

    def _rows_of(self, key: CacheKey) -> int:
        """Returns the rows of a layer's and batch's blocks."""
        return self._rows.setdefault(key[:2], self._plan.batches[key.batch].rows)

    def shrink(self, part: CachedPart, load: Load[LayerCache], rows: np.ndarray) -> None:
        """Leaves these rows in a layer's blocks, and in a load of them that has been copied; blocks
        of the disk are then in memory."""
        origin, arrived = load.tree, load.arriving
        blocks = zip(origin.blocks, arrived.blocks, strict=True)
        on_host = iter(origin.on_host)
        here: list[KVBlock] = []
        there: list[HostBlock] = []
        for number in range(len(origin.blocks) + len(origin.on_host)):
            key = CacheKey(part.layer, part.batch, number)
            if self._plan.cache.stays_on_host(key):
                start, block = next(on_host)
                there.append(HostBlock(start, self._shrunk(key, part, block, rows)))
            else:
                arrays, copied = next(blocks)
                kept = self._shrunk(key, part, arrays, rows)
                is_copy = self._memories.on_host(jax.tree.leaves(arrays)[0])
                here.append(take_block(copied, rows) if is_copy else kept)
        keys = tuple(take_block(key, rows) for key in arrived.keys)
        load.put(replace(arrived, blocks=tuple(here), keys=keys, on_host=tuple(there)))
        self._rows[part[:2]] = len(rows)
        if part.layer == len(self._plan.spec.decoders) - 1:
            self._remove_files(part.batch, but_for=len(rows))

    def _shrunk(
        self, key: CacheKey, part: CachedPart, arrays: KVBlock, rows: np.ndarray
    ) -> KVBlock:
        """Returns a block with these rows, and keeps it."""
        is_open = key.block == part.sealed
        if not self._memories.unified and not self._memories.on_host(jax.tree.leaves(arrays)[0]):
            block = Block(take_block(arrays, rows))
        else:
            layout = self._plan.open_layout(key) if is_open else self._plan.kv_layout(key)
            buffer = self._memories.buffer(layout)
            for leaf, view in zip(jax.tree.leaves(arrays), buffer.views, strict=True):
                np.take(np.asarray(leaf), rows, axis=0, out=view, mode="clip")
            found = buffer.arrays if is_open else self._assembled(key, buffer, len(rows))
            block = Block((found[0], found[1]), buffer.views if is_open else ())
        before = self._blocks.get(key)
        block.used = before.used if before is not None else 0
        self._blocks[key] = block
        return block.arrays

    def _remove_files(self, batch: int, but_for: int = 0) -> None:
        """Removes a batch's files, but for those of so many rows."""
        for name in [name for name in self._files if name[2] == batch and name[0] != but_for]:
            assert self._folder is not None, "there are files"
            self._folder.remove(self._files.pop(name).store)

    def fetch(self, part: CachedPart, buffers: Sequence[HostBuffer]) -> Load[LayerCache]:
        """Starts bringing a layer's blocks to where attention runs; those on disk are read into the
        buffers."""
        if not self._is_read:
            self._is_read = True
            self._spare.clear()
        left, reads = iter(buffers), list[Any]()
        here: list[KVBlock] = []
        there: list[HostBlock] = []
        start, plan = 0, self._plan.cache
        lengths = plan.lengths(part.batch)[: part.sealed + (not part.is_prompt)]
        with ended_on_error(reads):
            for number, length in enumerate(lengths):
                key = CacheKey(part.layer, part.batch, number)
                block = self._blocks.get(key)
                if block is None:
                    buffer = next(left)
                    reads.append(self._stored(key).read_into(key.layer, buffer.views))
                    block = Block(self._assembled(key, buffer, self._rows_of(key)))
                if plan.stays_on_host(key) and not part.is_prompt:
                    there.append(HostBlock(start, block.arrays))
                else:
                    here.append(block.arrays)
                start += length
        keys = () if plan.keys_stay else tuple(key for _, (key, _) in there)
        if part.is_prompt:
            shapes = (Part(lengths, 0, (0, *accumulate(lengths))[:-1]), Part((), 0, ()))
        else:
            shapes = (plan.part(*part[:3], False), plan.part(*part[:3], True))
        cache = LayerCache(tuple(here), keys, tuple(there), *shapes, part.sealed)
        name = _name(part)
        if reads:
            nbytes = sum(buffer.layout.nbytes for buffer in buffers)
            counted(self._memories.metrics, "disk_read", "cache", name, nbytes, reads)
        return Load("cache", name, cache, reads)

    def _assembled(self, key: CacheKey, buffer: HostBuffer, rows: int) -> KVBlock:
        """Returns the keys and values that a read will put into a buffer."""
        storage, count = self._plan.kv_storage(key, rows), len(buffer.arrays) // 2
        return assemble(storage, buffer.arrays[:count]), assemble(storage, buffer.arrays[count:])

    def leave(self, batch: int) -> None:
        """Frees the blocks of a batch, in memory and on disk; nothing is being written for it."""
        for key in [key for key in self._blocks if key.batch == batch]:
            del self._blocks[key]
        self._remove_files(batch)
        for where in [where for where in self._rows if where[1] == batch]:
            del self._rows[where]
        self._is_read = self._is_read and bool(self._blocks)

    def close(self) -> None:
        """Waits for the writes that nobody will read, and frees all blocks."""
        for write in self._writes:
            write.end()
        self._blocks.clear()
        self._spare.clear()


@jax.jit
def take_rows_of(tree: Any, rows: np.ndarray) -> Any:
    """Returns these rows of all arrays of a tree."""
    return jax.tree.map(lambda x: jnp.take(x, rows, axis=0), tree)


def take_block(block: Any, rows: np.ndarray) -> Any:
    """Returns these rows of arrays that are kept, on the device."""

    def take(kept: Kept) -> Kept:
        leaves = take_rows_of(jax.tree.leaves(kept), rows)
        if not isinstance(kept, QuantizedArray):
            taken: jax.Array = leaves[0]
            return taken
        shape = (len(rows), *kept.shape[1:])
        return QuantizedArray(replace(kept.storage, shape=shape), *leaves)

    return jax.tree.map(take, block, is_leaf=lambda x: isinstance(x, jax.Array | QuantizedArray))


def _name(where: CacheKey | CachedPart) -> str:
    return f"KV cache of decoder layer {where.layer}, batch {where.batch}"
