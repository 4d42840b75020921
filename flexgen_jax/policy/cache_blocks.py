"""The KV cache of the batches that are there: which blocks are open, sealed, on their way to disk.

    prompt blocks          sealed blocks of generated tokens        open block
    [0 ... 127][128 ...]   [32 tokens][32 tokens]                   [x x x . . . .]

A sealed block never changes, wherever it is. An open block whose home is the disk is kept on the
host until it is full.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flexgen_jax.policy.backend import Backend, Handle
from flexgen_jax.policy.buffers import Buffer, Ring
from flexgen_jax.policy.ledger import Ledger
from flexgen_jax.policy.placement import CacheKey
from flexgen_jax.policy.plan import BlockPlan, CachedPart, Layout
from flexgen_jax.policy.policy import TIERS, Tier

PENDING_WRITES = 3
"""Number of steps whose KV blocks, and of steps whose hidden states, may wait for the disk."""

LayerBatch = tuple[int, int]
"""A decoder layer, counted from 0, and a batch: which part of the cache is meant."""


@dataclass(eq=False, slots=True)
class Filling:
    """How far the cache of one layer and batch is filled.

    tokens, sealed: cached tokens, sealed blocks; full_at: the number of tokens with which the open
    block is full; buffer: the host buffer of the open block, if it has one; kept: those of sealed
    blocks that stay in theirs; part: what a step attends to.
    """

    tokens: int
    sealed: int
    full_at: int
    part: CachedPart
    kept: list[Buffer]
    buffer: Buffer | None = None


class CacheBlocks:
    """Opens, seals and writes KV blocks, and reserves their memory."""

    def __init__(self, plan: BlockPlan, backend: Backend, ledger: Ledger, ring: Ring) -> None:
        self._plan, self._backend, self._ledger, self._ring = plan, backend, ledger, ring
        self._homes = plan.cache.homes
        self._is_quantized = plan.formats.cache_bits < 16
        self._layers = range(len(plan.spec.decoders))
        self._filled: dict[LayerBatch, Filling] = {}
        self._first: dict[LayerBatch, Buffer] = {}
        self._pending: dict[LayerBatch, tuple[Handle, int]] = {}
        self._is_read = False
        self._most_open = 0
        self._reserved: dict[LayerBatch, dict[Tier, int]] = {}
        self._batches: set[int] = set()

    @property
    def has_all_prompts(self) -> bool:
        """Whether all layers of all batches have handed over the KV cache of their prompts."""
        return len(self._filled) == len(self._layers) * len(self._batches)

    def enter(self, batch: int) -> None:
        """Takes in a batch: acquires the buffers of its first open blocks in pinned memory."""
        layouts = self._plan.first_buffers(batch)
        if not self._batches:
            # Prompts come now, and need the memory of other buffers; batches that enter with this
            # one take over those for open blocks.
            self._ring.trim(next(iter(layouts.values()), None), self._most_open)
        self._batches.add(batch)
        self._most_open = max(self._most_open, len(self._layers) * len(self._batches))
        for layer in self._layers:
            self._reserved[layer, batch] = dict.fromkeys(TIERS, 0)
        for layer, buffer in zip(layouts, self._ring.acquire(layouts.values()), strict=True):
            self._first[layer, batch] = buffer

    def leave(self, batch: int, after: int) -> None:
        """Frees what a batch has, which step number `after` was the last to use."""
        for layer in self._layers:
            where = (layer, batch)
            if where in self._pending:
                self._finish(where)
            filling = self._filled.pop(where, None)
            held = list(filling.kept) if filling else []
            held += [filling.buffer] if filling and filling.buffer else []
            held += [self._first.pop(where)] if where in self._first else []
            self._ring.release(held, after)
            for tier, nbytes in self._reserved.pop(where).items():
                self._ledger.release(tier, nbytes)
        self._batches.discard(batch)
        if not self._batches:
            self._is_read = False

    def has(self, where: LayerBatch, tokens: int) -> bool:
        """Returns whether so many tokens are cached, or made up for."""
        return self._filled[where].tokens >= tokens

    def part(self, where: LayerBatch, tokens: int) -> CachedPart:
        """Returns the cache of a layer and batch to attend to, once its writes to disk are done.

        tokens: number of cached tokens; those that the loop left out are made up for.
        """
        filling = self._filled[where]
        if filling.tokens < tokens:
            self._skip(where, filling, tokens)
        if not self._is_read:
            # Buffers for reading must not come on top of what the prompts' blocks still hold.
            self._is_read = True
            while self._pending:
                self._finish(next(iter(self._pending)))
        elif where in self._pending:
            self._finish(where)
        return filling.part

    def layouts(self, where: LayerBatch) -> tuple[Layout, ...]:
        """Returns the layouts of the buffers into which what is cached is read from disk."""
        return self._filled[where].part.layouts

    def asks_host(self, where: LayerBatch) -> bool:
        """Returns whether the CPU attends to a part of what is cached."""
        return self._filled[where].part.asks_host

    def shrink(self, where: LayerBatch, load: Handle, after: int) -> None:
        """Leaves a layer's blocks with the rows that the plan gives their batch now.

        load: of these blocks with all rows; after: number of the step that it is for.
        """
        filling, plan = self._filled[where], self._plan
        self._backend.shrink_cache(filling.part, load)
        self._ring.release(filling.kept, after)
        if filling.buffer is not None:
            self._ring.release([filling.buffer], after)
        filling.kept, filling.buffer = [], None
        held = plan.held(*where, filling.sealed)
        held_now = {"device": held["device"], "host": held["host"] + held["disk"], "disk": 0}
        for tier in TIERS:
            more = held_now[tier] - self._reserved[where][tier]
            self._reserve(where, tier, max(0, more))
            self._release(where, tier, max(0, -more))
        keys = [CacheKey(*where, block) for block in range(filling.sealed)]
        if on_disk := [key for key in keys if self._homes[key] == "disk"]:
            self._write(where, on_disk, held["disk"])
        filling.part = plan.cached(*where, filling.sealed)

    def bytes_to_shrink(self, batch: int) -> dict[Tier, int]:
        """Returns the most bytes that shrinking a batch takes for a moment: a few layers' blocks of
        the disk while they are written again, and the files of all."""
        wheres = [(layer, batch) for layer in self._layers]
        on_disk = [self._plan.held(*at, self._filled[at].sealed)["disk"] for at in wheres]
        largest = (PENDING_WRITES + 1) * max(on_disk)
        return {"host": min(largest, sum(on_disk)), "disk": sum(on_disk)}

    def put_prompt(self, token: int, where: LayerBatch, computed: Handle) -> None:
        """Stores the blocks of a prompt or of a chunk of it; after the last one, opens the first
        block of generated tokens."""
        keys, held, on_disk = self._plan.prompt(token, *where)
        self._reserve(where, "device", held["device"])
        self._reserve(where, "host", held["host"] + held["disk"])
        self._backend.keep_prompt(keys, computed)
        if on_disk:
            self._write(where, on_disk, held["disk"])
        if where not in self._filled:
            self._filled[where] = Filling(0, 0, 0, self._plan.earlier(*where, 0), [])
        filling = self._filled[where]
        filling.sealed += len(keys)
        filling.tokens += sum(map(self._plan.block_tokens, keys))
        filling.full_at = filling.tokens
        if token < 0:
            filling.part = self._plan.earlier(*where, filling.sealed)
        else:
            self._open(where, filling)

    def put_token(self, where: LayerBatch, computed: Handle) -> None:
        """Stores one token's keys and values; seals the open block when it is full."""
        filling = self._filled[where]
        self._backend.append(CacheKey(*where, filling.sealed), computed)
        filling.tokens += 1
        if filling.tokens == filling.full_at:
            self._seal(where, filling)
            self._open(where, filling)

    def _memory(self, key: CacheKey) -> Tier:
        """Returns the tier of a block's memory, which for a block of the disk is the host."""
        return "device" if self._homes[key] == "device" else "host"

    def _open(self, where: LayerBatch, filling: Filling) -> None:
        """Opens the next block, if there will be one."""
        lengths = self._plan.cache.lengths(where[1])
        filling.buffer = None
        filling.part = self._plan.cached(*where, filling.sealed)
        if filling.sealed == len(lengths):
            return
        key = CacheKey(*where, filling.sealed)
        filling.full_at += lengths[key.block]
        if self._homes[key] == "device" or self._plan.unified:
            self._reserve(where, self._memory(key), self._plan.open_kv_bytes(key))
            self._backend.open_block(key, None)
        else:
            layout, first = self._plan.open_layout(key), self._first.pop(where, None)
            filling.buffer = first or self._ring.acquire([layout])[0]
            self._backend.open_block(key, filling.buffer.handle)

    def _seal(self, where: LayerBatch, filling: Filling, is_computed: bool = True) -> None:
        """Seals the open block, which is full, and sends it to its home.

        is_computed: whether the block's tokens were computed, or left out.
        """
        key, plan, buffer = CacheKey(*where, filling.sealed), self._plan, filling.buffer
        filling.sealed += 1
        if self._is_quantized:
            if is_computed:
                self._quantize(key)
            if buffer is not None:
                self._release_buffer(where, filling)
                buffer = None
            else:
                self._release(where, self._memory(key), plan.open_kv_bytes(key))
            self._reserve(where, self._memory(key), plan.kv_bytes(key))
        if self._homes[key] == "disk":
            if buffer is not None:  # what is written is a copy of it
                self._reserve(where, "host", plan.kv_bytes(key))
            if is_computed:
                self._write(where, [key], plan.kv_bytes(key))
            else:
                self._reserve(where, "disk", plan.kv_bytes(key))
                self._release(where, "host", plan.kv_bytes(key))
            if buffer is not None:
                self._release_buffer(where, filling)
        elif buffer is not None:
            filling.kept.append(buffer)

    def _quantize(self, key: CacheKey) -> None:
        """Quantizes a full block on the device, to which one in pinned memory is copied."""
        is_copied = self._homes[key] != "device" and not self._plan.unified
        nbytes = self._plan.open_kv_bytes(key) if is_copied else 0
        with self._ledger.reserving("device", nbytes):
            self._backend.quantize(key)

    def _release_buffer(self, where: LayerBatch, filling: Filling) -> None:
        """Releases the buffer of a sealed block, for good if the next block has another layout."""
        assert filling.buffer is not None
        following = CacheKey(*where, filling.sealed)
        is_last = following not in self._homes
        if is_last or self._plan.open_layout(following) is not filling.buffer.layout:
            self._ring.discard(filling.buffer)
        else:
            self._ring.release([filling.buffer], 0)

    def skip(self, tokens: Mapping[int, int]) -> None:
        """Reserves the memory of tokens that the loop left out, in all layers of some batches.

        tokens: by batch, the number of cached tokens with these. One block of all of them is sealed
        after the other, as it would be.
        """
        wheres = [(n, batch) for n in range(len(self._plan.spec.decoders)) for batch in tokens]
        filled = [(where, self._filled[where]) for where in wheres if where in self._filled]
        for _ in range(max(len(self._plan.cache.generated[batch]) for batch in tokens)):
            for where, filling in filled:
                self._skip(where, filling, min(tokens[where[1]], filling.full_at))

    def _skip(self, where: LayerBatch, filling: Filling, tokens: int) -> None:
        """Reserves the memory of tokens that are left out; nothing is moved for them."""
        while filling.full_at <= tokens:
            self._seal(where, filling, is_computed=False)
            self._open(where, filling)
        filling.tokens = max(filling.tokens, tokens)

    def _write(self, where: LayerBatch, keys: list[CacheKey], nbytes: int) -> None:
        """Writes sealed blocks to disk; those of at most `PENDING_WRITES` steps wait for it."""
        if where in self._pending:
            self._finish(where)
        self._reserve(where, "disk", nbytes)
        self._pending[where] = (self._backend.write_blocks(keys), nbytes)
        for other, (write, _) in list(self._pending.items()):
            if self._backend.is_done(write):
                self._finish(other)
        while len(self._pending) > PENDING_WRITES:
            self._finish(next(iter(self._pending)))

    def _finish(self, where: LayerBatch) -> None:
        """Waits for the write of a layer and batch, and releases its memory."""
        write, nbytes = self._pending.pop(where)
        self._backend.wait(write)
        self._release(where, "host", nbytes)

    def _reserve(self, where: LayerBatch, tier: Tier, nbytes: int) -> None:
        self._ledger.reserve(tier, nbytes)
        self._reserved[where][tier] += nbytes

    def _release(self, where: LayerBatch, tier: Tier, nbytes: int) -> None:
        self._ledger.release(tier, nbytes)
        self._reserved[where][tier] -= nbytes

    def close(self) -> None:
        """Releases the memory of all blocks."""
        for reserved in self._reserved.values():
            for tier, nbytes in reserved.items():
                self._ledger.release(tier, nbytes)
        self._reserved.clear()
        self._filled.clear()
        self._pending.clear()
