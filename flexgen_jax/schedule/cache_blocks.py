"""Opens, seals and writes KV blocks, and reserves their memory; see `running.py`.

An open block whose home is the disk is kept on the host until it is full.
"""

from __future__ import annotations

from collections.abc import Sequence

from flexgen_jax.policy.plan import BlockPlan
from flexgen_jax.policy.policy import TIERS, Tier
from flexgen_jax.schedule.backend import Backend
from flexgen_jax.schedule.buffers import Ring
from flexgen_jax.schedule.ledger import Ledger
from flexgen_jax.schedule.passes import Handle
from flexgen_jax.schedule.running import CachedPart, LayerState, Running, SealedPart

PENDING_WRITES = 3
"""Number of steps whose KV blocks, and of steps whose hidden states, may wait for the disk."""


class CacheBlocks:
    """Opens, seals and writes KV blocks, and reserves their memory."""

    def __init__(self, plan: BlockPlan, backend: Backend, ledger: Ledger, ring: Ring) -> None:
        self._plan, self._backend, self._ledger, self._ring = plan, backend, ledger, ring
        self._is_quantized = plan.formats.cache_bits < 16
        self._writing: dict[LayerState, None] = {}
        self._is_read = False
        self._max_open = 0

    def enter(self, running: Running, others: Sequence[Running]) -> None:
        """Admits a batch to a running group: acquires the buffers of its first open blocks in
        pinned memory.

        New pinned memory, for each layer, would hold up the prefill.
        """
        first = len(running.blocks.prompt)
        states = [
            state
            for state in running.layers
            if not self._plan.unified
            and first < len(state.homes)
            and state.homes[first] != "device"
        ]
        layouts = [state.sizes[first].open_layout for state in states]
        if not others:
            # Prompts come now, and need the memory of other buffers; batches that enter with this
            # one take over those for open blocks.
            self._is_read = False
            self._ring.trim(next(iter(layouts), None), self._max_open)
        self._max_open = max(self._max_open, len(running.layers) * (len(others) + 1))
        running.closing.callback(self._forget, running)
        for state, buffer in zip(states, self._ring.acquire(layouts), strict=True):
            state.first = buffer

    def _forget(self, running: Running) -> None:
        """Releases the memory of a batch that ends, and lets its buffers go."""
        for state in running.layers:
            self._writing.pop(state, None)
            state.first = state.buffer = state.write = None
            state.kept = []
            for tier, nbytes in state.reserved.items():
                self._ledger.release(tier, nbytes)

    def release_buffers(self, running: Running, after: int) -> None:
        """Ends the writes of a batch that leaves, and releases its buffers, which step number
        `after` was the last to use."""
        for state in running.layers:
            if state.write is not None:
                self._finish(state)
            buffers = [*state.kept, state.buffer, state.first]
            self._ring.release([buffer for buffer in buffers if buffer is not None], after)

    def part(self, state: LayerState, tokens: int) -> CachedPart:
        """Returns the blocks of a layer and batch to attend to, after their disk writes.

        tokens: number of cached tokens; skipped tokens are caught up first.
        """
        if state.tokens < tokens:
            self._skip(state, tokens)
        if not self._is_read:
            # Read buffers must not add to memory that the prompts' blocks still hold.
            self._is_read = True
            while self._writing:
                self._finish(next(iter(self._writing)))
        elif state.write is not None:
            self._finish(state)
        assert state.part is not None, "the prompt has been computed"
        return state.part

    def shrink(self, state: LayerState, after: int) -> None:
        """Accounts for the shrunk row count of a layer's blocks from step number `after` on."""
        self._ring.release(state.kept, after)
        if state.buffer is not None:
            self._ring.release([state.buffer], after)
        state.kept, state.buffer = [], None
        held = state.held(state.sealed)
        held_now = {"device": held["device"], "host": held["host"] + held["disk"], "disk": 0}
        for tier in TIERS:
            grown = held_now[tier] - state.reserved[tier]
            self._reserve(state, tier, max(0, grown))
            self._release(state, tier, max(0, -grown))
        on_disk = [n for n in range(state.sealed) if state.homes[n] == "disk"]
        if on_disk:
            self._write(state, on_disk, held["disk"])
        state.part = state.cached(state.sealed)

    def bytes_to_shrink(self, running: Running) -> dict[Tier, int]:
        """Returns the most bytes that shrinking a batch takes for a moment: a few layers' blocks of
        the disk while they are written again, and the files of all."""
        on_disk = [state.held(state.sealed)["disk"] for state in running.layers]
        largest = (PENDING_WRITES + 1) * max(on_disk)
        return {"host": min(largest, sum(on_disk)), "disk": sum(on_disk)}

    def put_prompt(self, token: int, state: LayerState, computed: Handle) -> None:
        """Stores the blocks of a prompt or chunk; after the last chunk, opens the first block of
        generated tokens."""
        new_blocks = state.of_prompt(token)
        self._reserve(state, "device", new_blocks.held["device"])
        self._reserve(state, "host", new_blocks.held["host"] + new_blocks.held["disk"])
        self._backend.keep(new_blocks, computed)
        on_disk = [block for block in new_blocks.blocks if state.homes[block] == "disk"]
        if on_disk:
            self._write(state, on_disk, new_blocks.held["disk"])
        state.sealed += len(new_blocks.blocks)
        state.tokens += sum(state.running.lengths[block] for block in new_blocks.blocks)
        state.full_at = state.tokens
        if token < 0:
            state.part = state.earlier(state.sealed)
        else:
            self._open(state)

    def put_token(self, state: LayerState, computed: Handle) -> None:
        """Stores a layer's cached arrays of a token, or of a whole pass; seals the open block when
        it is full and more tokens follow."""
        self._backend.keep(state, computed)
        state.tokens += state.running.passes.cached
        if state.tokens == state.full_at and state.sealed + 1 < len(state.running.lengths):
            self._seal(state)
            self._open(state)

    def _memory(self, state: LayerState, block: int) -> Tier:
        """Returns the tier of a block's memory, which for a block of the disk is the host."""
        return "device" if state.homes[block] == "device" else "host"

    def _open(self, state: LayerState) -> None:
        """Opens the next block, if there will be one."""
        state.buffer = None
        block, lengths = state.sealed, state.running.lengths
        state.part = state.cached(block)
        if block == len(lengths):
            return
        state.full_at += lengths[block]
        sizes = state.sizes[block]
        if state.homes[block] == "device" or self._plan.unified:
            self._reserve(state, self._memory(state, block), sizes.open)
            self._backend.open_block(state, None)
        else:
            first, state.first = state.first, None
            state.buffer = first or self._ring.acquire([sizes.open_layout])[0]
            self._backend.open_block(state, state.buffer.handle)

    def _seal(self, state: LayerState, is_computed: bool = True) -> None:
        """Seals the open block, which is full, and sends it to its home.

        is_computed: whether the block's tokens were computed, or left out.
        """
        block, buffer = state.sealed, state.buffer
        sizes = state.sizes[block]
        state.sealed += 1
        if self._is_quantized:
            if is_computed:
                self._quantize(state, block)
            if buffer is not None:
                self._release_buffer(state)
                buffer = None
            else:
                self._release(state, self._memory(state, block), sizes.open)
            self._reserve(state, self._memory(state, block), sizes.sealed)
        if state.homes[block] == "disk":
            if buffer is not None:  # a copy is written
                self._reserve(state, "host", sizes.sealed)
            if is_computed:
                self._write(state, [block], sizes.sealed)
            else:
                self._reserve(state, "disk", sizes.sealed)
                self._release(state, "host", sizes.sealed)
            if buffer is not None:
                self._release_buffer(state)
        elif buffer is not None:
            state.kept.append(buffer)

    def _quantize(self, state: LayerState, block: int) -> None:
        """Quantizes a full block on the device; a block in pinned memory is copied there."""
        is_copied = state.homes[block] != "device" and not self._plan.unified
        nbytes = state.sizes[block].open if is_copied else 0
        with self._ledger.reserving("device", nbytes):
            self._backend.quantize(state, block)

    def _release_buffer(self, state: LayerState) -> None:
        """Releases the buffer of a sealed block; frees it if the next block has another layout."""
        buffer, following = state.buffer, state.sealed
        assert buffer is not None, "the block had one"
        is_last = following == len(state.homes)
        if is_last or state.sizes[following].open_layout is not buffer.layout:
            self._ring.discard(buffer)
        else:
            self._ring.release([buffer], 0)

    def skip(self, batches: Sequence[Running], token: int) -> None:
        """Reserves the memory of tokens that the loop left out before a token, in all layers of
        some batches; blocks are sealed one by one, as in a real run."""
        tokens = {running: running.span(token).start for running in batches}
        states = [
            running.layers[layer]
            for layer in range(len(self._plan.spec.decoders))
            for running in batches
        ]
        states = [state for state in states if state.part is not None]
        for _ in range(max(len(running.blocks.generated) for running in batches)):
            for state in states:
                self._skip(state, min(tokens[state.running], state.full_at))

    def _skip(self, state: LayerState, tokens: int) -> None:
        """Reserves the memory of tokens that are left out; nothing is moved for them."""
        while state.full_at <= tokens:
            self._seal(state, is_computed=False)
            self._open(state)
        state.tokens = max(state.tokens, tokens)

    def _write(self, state: LayerState, blocks: Sequence[int], nbytes: int) -> None:
        """Writes sealed blocks to disk; those of at most `PENDING_WRITES` steps wait for it."""
        if state.write is not None:
            self._finish(state)
        self._reserve(state, "disk", nbytes)
        state.write = (self._backend.write(SealedPart(state, blocks)), nbytes)
        self._writing[state] = None
        for written in list(self._writing):
            if written.write is not None and self._backend.is_done(written.write[0]):
                self._finish(written)
        while len(self._writing) > PENDING_WRITES:
            self._finish(next(iter(self._writing)))

    def _finish(self, state: LayerState) -> None:
        """Waits for the write of a layer and batch, and releases its memory."""
        assert state.write is not None, "there is one"
        (write, nbytes), state.write = state.write, None
        del self._writing[state]
        self._backend.wait(write)
        self._release(state, "host", nbytes)

    def _reserve(self, state: LayerState, tier: Tier, nbytes: int) -> None:
        self._ledger.reserve(tier, nbytes)
        state.reserved[tier] += nbytes

    def _release(self, state: LayerState, tier: Tier, nbytes: int) -> None:
        self._ledger.release(tier, nbytes)
        state.reserved[tier] -= nbytes
