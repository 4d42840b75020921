"""The KV cache of one block of batches: write-once KV blocks and one open tail per layer and batch.

    prompt blocks          sealed blocks of generated tokens        tail
    [0 ... 127][128 ...]   [32 tokens][32 tokens]                   [x x x . . . .]

A sealed block never changes, wherever it is. The tail of a block whose home is the disk is kept on
the host until it is full.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flexgen_jax.cpu import HostBlock
from flexgen_jax.layers.decoder import KVBlock
from flexgen_jax.layers.quantization import Kept, assemble
from flexgen_jax.models.checkpoint import numpy_dtype
from flexgen_jax.models.spec import LayerSpec
from flexgen_jax.models.storage import Storage
from flexgen_jax.offload.context import Runtime
from flexgen_jax.offload.disk.direct_reads import whole_pages
from flexgen_jax.offload.disk.records import Records
from flexgen_jax.offload.prefetch import Load, finish
from flexgen_jax.offload.tiers import HostBuffer, writable_view
from flexgen_jax.offload.watcher import counted
from flexgen_jax.policy.memory import PENDING_WRITES
from flexgen_jax.policy.placement import CacheKey, CachePlan, Part
from flexgen_jax.policy.policy import Tier

LayerBatch = tuple[int, int]
"""A decoder layer, counted from 0, and a batch: which part of the cache is meant."""


class Moving(NamedTuple):
    """The part of a layer's cache that goes to the device: KV blocks, the tail as the last one, and
    keys of blocks whose values stay on the host."""

    blocks: tuple[KVBlock, ...]
    keys: tuple[Kept, ...]


class Split(NamedTuple):
    """Where attention finds a layer's cache.

    here: the part with its values on the device; there: the part with its values on the host;
    blocks: the KV blocks of `there`; sealed: how many blocks are sealed.
    """

    here: Part
    there: Part
    blocks: tuple[HostBlock, ...]
    sealed: int


KVLoad = Load[Moving]
"""A load of a layer's cache, whose `staying` is a `Split`."""


@dataclass
class Tail:
    """The open block: room for `length` tokens, of which `used` are written.

    views: the arrays' memory, where the CPU may write to it; buffers: the pool's buffers behind it,
    if any.
    """

    key: CacheKey
    length: int
    arrays: KVBlock
    views: tuple[np.ndarray, ...] = ()
    buffers: tuple[HostBuffer, ...] = ()
    used: int = 0


@dataclass
class PendingWrite:
    """A write to disk under way, and the host memory that it holds."""

    layer_batch: LayerBatch
    future: Any
    nbytes: int
    record: np.ndarray


class KVCache:
    """The keys and values of all decoder layers for the batches of one block."""

    def __init__(self, runtime: Runtime, plan: CachePlan, batch_sizes: list[int]) -> None:
        self._runtime = runtime
        self._plan = plan
        self._batch_sizes = batch_sizes
        self._blocks: dict[CacheKey, KVBlock] = {}
        self._tails: dict[LayerBatch, Tail] = {}
        self._tokens: dict[LayerBatch, int] = {}
        self._sealed: dict[LayerBatch, int] = {}
        self._pending: list[PendingWrite] = []
        # Memory of finished writes, reused: the first touch of fresh memory takes longer than the
        # copy.
        self._spare: defaultdict[int, list[np.ndarray]] = defaultdict(list)
        self._buffers: list[HostBuffer] = []
        self._reserved: dict[Tier, int] = {"device": 0, "host": 0, "disk": 0}
        self._is_read = False
        self._files: dict[tuple[int, int], Records] = {}

    def _stored(self, key: CacheKey) -> Records:
        """Returns the disk records of one KV block of a batch: one record per layer, of the leaves
        of its keys and then of its values."""
        if (key.batch, key.block) not in self._files:
            name, layers = f"kv-{key.batch}-{key.block}", self._num_layers
            sizes = (self._nbytes(key._replace(layer=layer)) for layer in range(layers))
            records = Records.create(self._runtime.disk(), name, layers, max(sizes))
            self._files[key.batch, key.block] = records
        return self._files[key.batch, key.block]

    @property
    def _num_layers(self) -> int:
        return len(self._runtime.spec.decoders)

    def _shape(self, key: CacheKey) -> tuple[int, int, int, int]:
        """Shape of the block's keys, or values."""
        attention = self._runtime.spec.decoders[key.layer].attention
        tokens = self._plan.lengths(key.batch)[key.block]
        return attention.kv_shape(self._batch_sizes[key.batch], tokens)

    def _layer(self, decoder: int) -> LayerSpec:
        return self._runtime.spec.decoders[decoder]

    def _storage(self, key: CacheKey) -> Storage:
        """Returns the storage of the sealed block's keys, which is that of its values too."""
        return self._runtime.formats.kv(self._shape(key))

    def _nbytes(self, key: CacheKey) -> int:
        """Returns the bytes of the sealed block's keys and values together."""
        return self._runtime.formats.kv_bytes(self._shape(key))

    def _open_nbytes(self, key: CacheKey) -> int:
        """Returns the bytes of a block's keys and values while it is open, in full precision."""
        return self._runtime.formats.open_kv_bytes(self._shape(key))

    def tokens(self, layer_batch: LayerBatch) -> int:
        """Returns how many tokens have been handed over and can be loaded."""
        return self._tokens.get(layer_batch, 0)

    @property
    def has_all_prompts(self) -> bool:
        """Whether all layers of all batches have handed over the KV cache of their prompts."""
        return len(self._tokens) == self._num_layers * len(self._batch_sizes)

    def put_prompt(self, layer_batch: LayerBatch, blocks: tuple[KVBlock, ...]) -> None:
        """Stores the prompt's blocks; those whose home is the disk wait for their computation."""
        for block, arrays in enumerate(blocks):
            key = CacheKey(*layer_batch, block)
            home = self._plan.homes[key]
            self._reserve("device" if home == "device" else "host", self._nbytes(key))
            self._store(key, arrays, ())
        self._tokens[layer_batch] = sum(self._plan.prompt[layer_batch[1]])
        self._sealed[layer_batch] = len(blocks)
        self._open_tail(layer_batch)

    def put_token(self, layer_batch: LayerBatch, new: KVBlock) -> None:
        """Stores one token's key and value; seals the tail when it is full."""
        tail = self._tails[layer_batch]
        if tail.views:
            moved = self._runtime.memories.to_host(new, "cache", _name(layer_batch))
            for view, array in zip(tail.views, moved, strict=True):
                view[:, :, tail.used] = np.asarray(array)[:, :, 0]
        else:
            append = self._runtime.programs.append(
                self._layer(layer_batch[0]), self._batch_sizes[layer_batch[1]], tail.length
            )
            tail.arrays = append(tail.arrays, new, np.int32(tail.used))
        tail.used += 1
        self._tokens[layer_batch] += 1
        if tail.used == tail.length:
            self._seal(tail)
            self._sealed[layer_batch] += 1
            self._open_tail(layer_batch)

    def _seal(self, tail: Tail) -> None:
        """Stores a full tail as a sealed block, quantized on the device if the policy says so."""
        runtime, key = self._runtime, tail.key
        if runtime.formats.cache_bits == 16:
            self._store(key, tail.arrays, tail.buffers)
            return
        layer, rows = self._layer(key.layer), self._batch_sizes[key.batch]
        program = runtime.programs.seal(layer, rows, tail.length)
        sealed = jax.block_until_ready(
            program(runtime.memories.to_device(tail.arrays, "cache", "a full KV block"))
        )
        tier = self._tail_tier(key)
        if tail.buffers:
            for buffer in tail.buffers:
                runtime.pool.release(buffer, None)
        else:
            self._release(tier, self._open_nbytes(key))
        self._reserve(tier, self._nbytes(key))
        self._store(key, sealed, ())

    def _tail_tier(self, key: CacheKey) -> Tier:
        return "device" if self._plan.homes[key] == "device" else "host"

    def _open_tail(self, layer_batch: LayerBatch) -> None:
        """Opens a tail for the next generated tokens, if there will be any."""
        lengths = self._plan.lengths(layer_batch[1])
        self._tails.pop(layer_batch, None)
        if self._sealed[layer_batch] == len(lengths):
            return
        key = CacheKey(*layer_batch, self._sealed[layer_batch])
        length = lengths[key.block]
        shape, dtype = self._shape(key), self._runtime.numpy_dtype
        is_unified = self._runtime.memories.unified
        if self._plan.homes[key] == "device" or is_unified:
            self._reserve(self._tail_tier(key), self._open_nbytes(key))
            arrays = (jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
            jax.block_until_ready(arrays)
            # To write one token, XLA's CPU backend would convert a whole 16-bit tail to fp32 and
            # back.
            views = tuple(writable_view(array) for array in arrays) if is_unified else ()
            self._tails[layer_batch] = Tail(key, length, arrays, views)
        else:
            first, second = (self._runtime.pool.acquire(shape, dtype) for _ in range(2))
            arrays, views = (first.array, second.array), (first.view, second.view)
            self._tails[layer_batch] = Tail(key, length, arrays, views, (first, second))

    def _store(self, key: CacheKey, arrays: KVBlock, buffers: tuple[HostBuffer, ...]) -> None:
        """Puts a complete block into its home tier. The memory of `arrays` is already reserved,
        that of `buffers` by the pool."""
        home = self._plan.homes[key]
        if home != "device" and not buffers:
            arrays = self._runtime.memories.to_host(arrays, "cache", _name(key[:2]))
        if home != "disk":
            self._blocks[key] = arrays
            self._buffers += buffers
            return
        views = [buffer.view for buffer in buffers]
        views = views or [np.asarray(leaf) for leaf in jax.tree.leaves(arrays)]
        nbytes = self._nbytes(key)
        self._reserve("disk", nbytes)
        if buffers:
            self._reserve("host", nbytes)
        records = self._stored(key)
        spare = self._spare[records.nbytes]
        record = spare.pop() if spare else whole_pages(records.nbytes)
        write = records.write(key.layer, views, record)
        self._pending.append(PendingWrite((key.layer, key.batch), write, nbytes, record))
        for buffer in buffers:
            self._runtime.pool.release(buffer, None)
        metrics = self._runtime.metrics
        counted(metrics, "disk_write", "cache", _name(key[:2]), nbytes, [write])
        self._settle(lambda write: write.future.done())
        steps = list(dict.fromkeys(write.layer_batch for write in self._pending))
        overdue = steps[: max(0, len(steps) - PENDING_WRITES)]
        self._settle(lambda write: write.layer_batch in overdue)

    def _settle(self, is_chosen: Any) -> None:
        """Waits for the chosen writes and releases their memory; raises their errors."""
        for write in [write for write in self._pending if is_chosen(write)]:
            finish([write.future], f"writing the {_name(write.layer_batch)}")
            self._pending = [other for other in self._pending if other is not write]
            self._spare[write.record.size].append(write.record)
            self._release("host", write.nbytes)

    def start(self, layer_batch: LayerBatch) -> KVLoad:
        """Starts bringing the sealed blocks and the tail of a layer's cache to where attention
        runs."""
        # Buffers for reading must not come on top of what the prompts' blocks still hold.
        is_first, self._is_read = not self._is_read, True
        self._settle(lambda write: is_first or write.layer_batch == layer_batch)
        if is_first:
            self._spare.clear()
        load: KVLoad = Load("cache", _name(layer_batch), Moving((), ()))
        tail, sealed = self._tails[layer_batch], self._sealed[layer_batch]
        here: list[KVBlock] = []
        there: list[HostBlock] = []
        start = 0
        with load.abandoned_on_error(self._runtime.pool):
            for block, length in enumerate(self._plan.lengths(layer_batch[1])[: sealed + 1]):
                key = CacheKey(*layer_batch, block)
                arrays = tail.arrays if block == sealed else self._blocks.get(key)
                arrays = arrays or self._read(key, load)
                if self._plan.stays_on_host(key):
                    there.append(HostBlock(start, arrays))
                else:
                    here.append(arrays)
                start += length
        if load.reads:
            nbytes = sum(buffer.view.nbytes for buffer in load.buffers)
            metrics = self._runtime.metrics
            counted(metrics, "disk_read", "cache", load.what, nbytes, load.reads)
        keys = () if self._plan.keys_stay else tuple(key for _, (key, _) in there)
        load.tree = Moving(tuple(here), keys)
        part_here, part_there = (self._plan.part(*layer_batch, sealed, at) for at in (False, True))
        load.staying = Split(part_here, part_there, tuple(there), sealed)
        return load

    def _read(self, key: CacheKey, load: KVLoad) -> KVBlock:
        """Starts reading a block from disk into buffers that belong to the load."""
        storage, buffers = self._storage(key), list[HostBuffer]()
        for leaf in 2 * storage.leaves:
            # Waiting for the step that is being computed would delay the next one.
            kind = numpy_dtype(leaf.dtype)
            buffers.append(self._runtime.pool.acquire(leaf.shape, kind, may_wait=False))
            load.buffers.append(buffers[-1])
        views = [buffer.view for buffer in buffers]
        load.reads.append(self._stored(key).read_into(key.layer, views))
        arrays, count = [buffer.array for buffer in buffers], len(storage.leaves)
        return assemble(storage, arrays[:count]), assemble(storage, arrays[count:])

    def _reserve(self, tier: Tier, nbytes: int) -> None:
        self._runtime.ledger.reserve(tier, nbytes)
        self._reserved[tier] += nbytes

    def _release(self, tier: Tier, nbytes: int) -> None:
        self._runtime.ledger.release(tier, nbytes)
        self._reserved[tier] -= nbytes

    def close(self) -> None:
        """Releases everything, including writes that nobody will read."""
        for write in self._pending:
            write.future.exception()
        for tail in self._tails.values():
            self._buffers += tail.buffers
        for buffer in self._buffers:
            self._runtime.pool.release(buffer, None)
        for tier, nbytes in self._reserved.items():
            self._runtime.ledger.release(tier, nbytes)
        self._pending, self._tails, self._blocks, self._buffers = [], {}, {}, []
        self._reserved = {"device": 0, "host": 0, "disk": 0}


def _name(layer_batch: LayerBatch) -> str:
    return f"KV cache of decoder layer {layer_batch[0]}, batch {layer_batch[1]}"
