"""The arrays of KV blocks: in memory, each open or sealed, and as records on disk.

Which blocks there are, and when they are opened, sealed and written, is decided by
`schedule/cache_blocks.py`.
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
from flexgen_jax.layers import programs
from flexgen_jax.layers.attention import Block
from flexgen_jax.layers.quantization import Kept, QuantizedArray, assemble
from flexgen_jax.offload.batch import arrays_of
from flexgen_jax.offload.device import Device
from flexgen_jax.offload.disk.direct_reads import whole_pages
from flexgen_jax.offload.disk.folder import OffloadFolder
from flexgen_jax.offload.disk.records import Records
from flexgen_jax.offload.prefetch import Load, Write, ended_on_error, finish
from flexgen_jax.offload.tiers import HostBuffer, writable_view
from flexgen_jax.offload.watcher import counted
from flexgen_jax.policy.plan import BlockPlan
from flexgen_jax.schedule.passes import BlocksAt
from flexgen_jax.schedule.running import CachedPart, LayerState, PromptPart, Running, SealedPart


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """A layer's KV blocks for one step. As a pytree, its leaves are the arrays to move to the
    device."""

    # With their values on the device, the open one last (there is none for a prompt's chunk).
    blocks: tuple[Block, ...]
    # The keys of blocks whose values stay on the host, if the device ranks them.
    keys: tuple[Kept, ...]
    # All blocks whose values stay on the host.
    on_host: tuple[HostBlock, ...] = field(metadata={"static": True})
    # The shapes of the blocks on the device and on the host.
    here: BlocksAt = field(metadata={"static": True})
    there: BlocksAt = field(metadata={"static": True})
    # Number of sealed blocks.
    sealed: int = field(metadata={"static": True})


@dataclass
class BlockArrays:
    """A KV block in memory.

    views: the arrays' memory while the block is open, where the CPU may write to it; used: number
    of tokens that are written.
    """

    arrays: Block
    views: tuple[np.ndarray, ...] = ()
    used: int = 0


@dataclass(eq=False)
class StateArrays:
    """A layer's KV blocks at runtime: the payload of a `LayerState`."""

    # Those in memory, by number.
    blocks: dict[int, BlockArrays]
    # The rows of all of them.
    rows: int


class KVCache:
    """The KV blocks of all decoder layers for the admitted batches.

    folder: None if the plan puts no KV blocks on disk.
    """

    def __init__(self, plan: BlockPlan, device: Device, folder: OffloadFolder | None) -> None:
        self._plan, self._device, self._folder = plan, device, folder
        self._memories = device.memories
        self._writes: dict[Write, Running] = {}
        # Memory of finished writes, reused: the first touch of fresh memory takes longer than the
        # copy.
        self._spare: defaultdict[int, list[np.ndarray]] = defaultdict(list)
        self._is_read = False

    def enter(self, running: Running) -> None:
        """Admits a batch; its blocks are freed when it closes."""
        for state in running.layers:
            state.payload = StateArrays({}, running.rows)
        running.closing.callback(self._forget, running)

    def keep(self, made: PromptPart, blocks: Sequence[Block]) -> None:
        """Keeps sealed blocks in the memory of their homes, for disk on the host."""
        for number, block in zip(made.blocks, blocks, strict=True):
            self._keep(made.state, number, block)

    def _keep(self, state: LayerState, number: int, arrays: Block) -> None:
        if state.homes[number] != "device":
            arrays = self._memories.to_host(arrays, "cache", _name(state))
        state.payload.blocks[number] = BlockArrays(arrays)

    def open(self, state: LayerState, buffer: HostBuffer | None) -> None:
        """Makes an empty block, in a host buffer if there is one."""
        if buffer is not None:
            state.payload.blocks[state.sealed] = BlockArrays(tuple(buffer.arrays), buffer.views)
            return
        leaves = state.sizes[state.sealed].open_layout.leaves
        arrays = tuple(jnp.zeros(leaf.shape, leaf.kind) for leaf in leaves)
        views: tuple[np.ndarray, ...] = ()
        if self._memories.unified:
            # To write one token, XLA's CPU backend would convert a whole 16-bit block to fp32 and
            # back.
            views = tuple(map(writable_view, jax.block_until_ready(arrays)))
        state.payload.blocks[state.sealed] = BlockArrays(arrays, views)

    def ask(self, state: LayerState, row: Block) -> None:
        """Starts moving the cached arrays of new tokens to the place where `append` needs them."""
        if state.payload.blocks[state.sealed].views:
            self._memories.ask(row, "cache", _name(state))

    def append(self, state: LayerState, row: Block) -> None:
        """Writes the cached arrays of a token, or of a whole pass, to the open block."""
        block: BlockArrays = state.payload.blocks[state.sealed]
        cached = state.running.passes.cached
        if block.views:
            for view, array in zip(block.views, row, strict=True):
                into = view[..., block.used : block.used + cached, :]
                into[...] = np.asarray(array)[..., :cached, :]
        else:  # entries of draft tokens will be overwritten
            tokens = row[0].shape[-2]
            append = self._program(programs.append, state, state.sealed, tokens=tokens)
            block.arrays = append(block.arrays, row, self._memories.numbers(block.used))
        block.used += cached

    def replace(self, state: LayerState, arrays: Block) -> None:
        """Stores an open block after a program has appended tokens to it."""
        block: BlockArrays = state.payload.blocks[state.sealed]
        block.arrays, block.used = arrays, block.used + state.running.passes.cached

    def quantize(self, state: LayerState, number: int) -> None:
        """Quantizes a full block on the device."""
        block: BlockArrays = state.payload.blocks[number]
        opened = self._memories.to_device(block.arrays, "cache", "a full KV block")
        sealed = self._program(programs.seal, state, number)(opened)
        if block.views:  # the CPU will write to them
            jax.block_until_ready(sealed)
        self._keep(state, number, sealed)

    def _program(
        self, kind: programs.Program[Any], state: LayerState, number: int, **shape: int
    ) -> Any:
        """Returns a program that works on an open block."""
        running = state.running
        tail = running.lengths[number]
        return self._device.programs.get(
            kind, layer=state.layer, rows=running.rows, tail=tail, **shape
        )

    def write(self, part: SealedPart) -> Write:
        """Starts writing sealed blocks of one layer and batch to disk, from a copy of their own;
        frees the blocks."""
        state, futures, copies = part.state, list[Any](), list[np.ndarray]()

        def written() -> None:
            del self._writes[write]
            for copy in copies:
                self._spare[copy.size].append(copy)

        write = Write(_name(state), futures, written)
        self._writes[write] = state.running  # waited for even if an error comes next
        for number in part.blocks:
            block: BlockArrays = state.payload.blocks.pop(number)
            records = self._records(state, number)
            views = block.views or [np.asarray(leaf) for leaf in jax.tree.leaves(block.arrays)]
            spare = self._spare[records.nbytes]
            copies.append(spare.pop() if spare else whole_pages(records.nbytes))
            futures.append(records.write(state.index, views, copies[-1]))
        nbytes = sum(state.sizes[number].sealed for number in part.blocks)
        counted(self._memories.metrics, "disk_write", "cache", write.what, nbytes, futures)
        return write

    def _records(self, state: LayerState, number: int) -> Records:
        """Returns the disk records of one KV block of a batch: one record per layer, with the
        leaves array by array."""
        running, rows = state.running, state.payload.rows
        files = arrays_of(running).files
        if (rows, number) not in files:
            assert self._folder is not None, "the policy puts KV blocks on disk"
            largest = max(other_state.sizes[number].sealed for other_state in running.growing)
            name = f"kv-{running.number}-{number}-{rows}"
            files[rows, number] = Records.create(self._folder, name, len(running.layers), largest)
        return files[rows, number]

    def resident(self, state: LayerState) -> list[Block]:
        """Returns a layer's blocks, all in memory, the open block last."""
        blocks: dict[int, BlockArrays] = state.payload.blocks
        return [blocks[number].arrays for number in range(state.sealed + 1)]

    def read(self, state: LayerState, number: int) -> HostBuffer:
        """Returns a sealed block that is on disk, once it is written."""
        for write in [write for write, owner in self._writes.items() if owner is state.running]:
            finish(write.futures, write.what)
        buffer = self._memories.buffer(state.sizes[number].layout)
        self._records(state, number).read_into(state.index, buffer.views).result()
        return buffer

    def shrink(self, state: LayerState, load: Load[LayerCache], rows: np.ndarray) -> None:
        """Leaves these rows in a layer's blocks, and in a load of them that has been copied; blocks
        of the disk are then in memory."""
        origin, arrived = load.tree, load.arriving
        blocks = zip(origin.blocks, arrived.blocks, strict=True)
        on_host = iter(origin.on_host)
        on_device: list[Block] = []
        there: list[HostBlock] = []
        for number in range(len(origin.blocks) + len(origin.on_host)):
            if state.stays_on_host(number):
                start, block = next(on_host)
                there.append(HostBlock(start, self._shrunk(state, number, block, rows)))
            else:
                arrays, copied = next(blocks)
                shrunk = self._shrunk(state, number, arrays, rows)
                is_copy = self._memories.on_host(jax.tree.leaves(arrays)[0])
                on_device.append(take_block(copied, rows) if is_copy else shrunk)
        keys = tuple(take_block(key, rows) for key in arrived.keys)
        load.put(replace(arrived, blocks=tuple(on_device), keys=keys, on_host=tuple(there)))
        state.payload.rows = len(rows)
        if state is state.running.growing[-1]:
            self._remove_files(state.running, except_of=len(rows))

    def _shrunk(self, state: LayerState, number: int, arrays: Block, rows: np.ndarray) -> Any:
        """Returns a block with these rows, and keeps it."""
        is_open, blocks = number == state.sealed, state.payload.blocks
        if not self._memories.unified and not self._memories.on_host(jax.tree.leaves(arrays)[0]):
            block = BlockArrays(take_block(arrays, rows))
        else:
            sizes = state.sizes[number]
            buffer = self._memories.buffer(sizes.open_layout if is_open else sizes.layout)
            for leaf, view in zip(jax.tree.leaves(arrays), buffer.views, strict=True):
                np.take(np.asarray(leaf), rows, axis=0, out=view, mode="clip")
            shrunk = buffer.arrays if is_open else self._assembled(state, number, buffer, len(rows))
            block = BlockArrays(tuple(shrunk), buffer.views if is_open else ())
        block.used = blocks[number].used if number in blocks else 0
        blocks[number] = block
        return block.arrays

    def fetch(self, part: CachedPart, buffers: Sequence[HostBuffer]) -> Load[LayerCache]:
        """Starts bringing a layer's blocks to where they are computed with; those on disk are read
        into the buffers."""
        if not self._is_read:
            self._is_read = True
            self._spare.clear()
        state, free_buffers, reads = part.state, iter(buffers), list[Any]()
        on_device: list[Block] = []
        on_host: list[HostBlock] = []
        start = 0
        lengths = state.running.lengths[: part.sealed + (not part.is_prompt)]
        with ended_on_error(reads):
            for number, length in enumerate(lengths):
                block = state.payload.blocks.get(number)
                if block is None:
                    buffer, rows = next(free_buffers), state.payload.rows
                    records = self._records(state, number)
                    reads.append(records.read_into(state.index, buffer.views))
                    block = BlockArrays(self._assembled(state, number, buffer, rows))
                if state.stays_on_host(number) and not part.is_prompt:
                    on_host.append(HostBlock(start, block.arrays))
                else:
                    on_device.append(block.arrays)
                start += length
        keys_stay = self._plan.policy.attends_on_host
        places = state.places(part.sealed)
        if part.is_prompt:
            starts = (0, *accumulate(lengths))[:-1]
            places = (BlocksAt(lengths, 0, starts), BlocksAt((), 0, ()))
        cache = LayerCache(
            blocks=tuple(on_device),
            keys=() if keys_stay else tuple(block[0] for _, block in on_host),
            on_host=tuple(on_host),
            here=places[0],
            there=places[1],
            sealed=part.sealed,
        )
        name = _name(state)
        if reads:
            nbytes = sum(buffer.layout.nbytes for buffer in buffers)
            counted(self._memories.metrics, "disk_read", "cache", name, nbytes, reads)
        return Load("cache", name, cache, reads)

    def _assembled(self, state: LayerState, number: int, buffer: HostBuffer, rows: int) -> Block:
        """Returns the arrays of a sealed block that a read will put into a buffer."""
        tokens, leaves = state.running.lengths[number], iter(buffer.arrays)
        storages = [self._plan.formats.sealed(leaf, rows, tokens) for leaf in state.layer.growing]
        return tuple(
            assemble(storage, [next(leaves) for _ in storage.leaves]) for storage in storages
        )

    def _forget(self, running: Running) -> None:
        """Frees the blocks of a batch, in memory and on disk; waits for the end of its writes."""
        for write in [write for write, owner in self._writes.items() if owner is running]:
            write.end()
            del self._writes[write]
        for state in running.layers:
            state.payload = None
        self._remove_files(running)

    def _remove_files(self, running: Running, except_of: int = 0) -> None:
        """Removes a batch's files, except those for `rows` rows."""
        files = arrays_of(running).files
        for name in [name for name in files if name[0] != except_of]:
            assert self._folder is not None, "there are files"
            self._folder.remove(files.pop(name).store)


@jax.jit
def take_rows_of(tree: Any, rows: np.ndarray) -> Any:
    """Returns these rows of all arrays of a tree."""
    return jax.tree.map(lambda x: jnp.take(x, rows, axis=0), tree)


def take_block(block: Any, rows: np.ndarray) -> Any:
    """Returns these rows of arrays that are kept, on the device."""

    def take(kept: Kept) -> Kept:
        leaves = take_rows_of(jax.tree.leaves(kept), rows)
        if not isinstance(kept, QuantizedArray):
            kept_rows: jax.Array = leaves[0]
            return kept_rows
        shape = (len(rows), *kept.shape[1:])
        return QuantizedArray(replace(kept.storage, shape=shape), tuple(leaves))

    return jax.tree.map(take, block, is_leaf=lambda x: isinstance(x, jax.Array | QuantizedArray))


def _name(state: LayerState) -> str:
    return f"KV cache of decoder layer {state.index}, batch {state.running.number}"
