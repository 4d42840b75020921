"""A new token's attention to all KV blocks in one kernel.

A place of the grid folds the tiles of every block, for query heads that share one KV head of a
sequence: online softmax, as in FlashAttention (Dao et al. 2022, section 3.1). Few sequences are
divided along their tokens as well, so that all multiprocessors read; the parts are merged by their
log-sum-exp. Packed blocks are unpacked tile by tile. Latent attention keeps one array, which is
keys and values at once and is loaded once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from flexgen_jax.gpu.head_parts import (
    Part,
    Side,
    arrays_of,
    can_load,
    load_parts,
    parts_of,
    storage_of,
    width_of,
)
from flexgen_jax.gpu.online_softmax import State, empty, finished, folded, scores_of
from flexgen_jax.gpu.triton import (
    MIN_ROWS,
    NARROW,
    call,
    load,
    power_of_two,
    store,
)
from flexgen_jax.layers.attention import KVBlock, Partial, merge
from flexgen_jax.models.formats.storage import Storage

TILE, WIDE_TILE = 64, 32
"""Tokens whose keys and values are multiplied together, of heads up to `NARROW_HEAD`, and wider."""

NARROW_HEAD, LARGEST_HEAD = 256, 576
"""Elements of the largest head whose results four warps hold, and of the largest one whose tiles
fit a multiprocessor."""

MAX_QUERY_HEADS = 64
"""Query heads per program if there are enough programs; elsewhere it has `MIN_ROWS`."""

MAX_BLOCKS = 64
"""Maximum KV blocks per kernel; each block is one to six arguments."""

PLACES, WIDE_PLACES = 264, 132
"""Places of a grid that keep the multiprocessors of a large GPU busy, two on each, or one with
heads wider than `NARROW_HEAD`."""

MAX_MERGED_PROGRAMS = 8
"""Maximum programs per head that XLA merges in one kernel, together with the result's consumer:
more of them are reduced along an axis, by three kernels."""

MIN_PLACE_TOKENS = 512
"""The fewest tokens that are worth a place of their own."""


class BlockShape(NamedTuple):
    """Tokens of a block, how its keys and its values are kept, None for plain ones, and whether the
    two are one."""

    tokens: int
    key: Storage | None
    value: Storage | None
    is_one: bool

    @staticmethod
    def of(block: KVBlock) -> BlockShape:
        key, value = block
        return BlockShape(key.shape[2], storage_of(key), storage_of(value), key is value)


class Shape(NamedTuple):
    """A kernel's static parameters: the blocks, query heads of a KV head, those of a place, tokens
    of a tile and of a place, the parts of a head, the softcap, and whether JAX interprets it."""

    blocks: tuple[BlockShape, ...]
    group: int
    rows: int
    tile: int
    tokens: int
    parts: tuple[Part, ...]
    softcap: float | None
    interprets: bool

    @property
    def warps(self) -> int:
        """Warps of a place, whose registers hold the results of its heads."""
        return 8 if width_of(self.parts) > NARROW_HEAD and self.rows > MIN_ROWS else 4


def can_attend(query: jax.Array, blocks: Sequence[tuple[Any, Any]]) -> bool:
    """Returns whether the kernel takes these arguments of `attend`."""
    if query.dtype not in NARROW or len(blocks) > MAX_BLOCKS or query.shape[3] > LARGEST_HEAD:
        return False
    sides = [side for block in blocks for side in block]
    packed = {storage.packing for side in sides if (storage := storage_of(side)) is not None}
    are_alike = len(packed) <= 1 and all(side.shape[3] == query.shape[3] for side in sides)
    return are_alike and all(can_load(side, query.dtype) for side in sides)


def attend(
    query: jax.Array,
    blocks: Sequence[KVBlock],
    starts: jax.Array,
    position: jax.Array,
    first_valid: jax.Array,
    softcap: float | None,
    has_large_tiles: bool = True,
    interprets: bool = False,
) -> Partial:
    """Attends to one or more KV blocks; see `Kernels.decode_attention`.

    has_large_tiles: whether a multiprocessor has room for `MAX_QUERY_HEADS` queries of wide heads.
    """
    batch, heads, _, head_dim = query.shape
    kv_heads = blocks[0][0].shape[1]
    shape = _shape_of(query, blocks, softcap, has_large_tiles, interprets)
    tiles = pl.cdiv(shape.group, shape.rows)
    total = sum(block.tokens for block in shape.blocks)
    places = pl.cdiv(total, shape.tokens)
    indices = jnp.concatenate([starts.astype(jnp.int32), jnp.reshape(position, 1)])
    of_head = pl.BlockSpec(
        (None, None, shape.group, head_dim), lambda b, h, p: (b, h // tiles, 0, 0)
    )
    inputs = [
        (query.reshape(batch, kv_heads, shape.group, head_dim), of_head),
        (indices, pl.BlockSpec(indices.shape, lambda b, h, p: (0,))),
        (first_valid, pl.BlockSpec((1,), lambda b, h, p: (b,))),
    ]
    for array in _arrays(blocks):
        size = (None, None, *array.shape[2:])
        inputs.append((array, pl.BlockSpec(size, lambda b, h, p: (b, h // tiles, 0, 0))))
    out_shape = (batch, kv_heads, places, shape.group, head_dim)
    outputs = [
        (
            jax.ShapeDtypeStruct(out_shape, jnp.float32),
            pl.BlockSpec(
                (None, None, None, *out_shape[3:]), lambda b, h, p: (b, h // tiles, p, 0, 0)
            ),
        ),
        (
            jax.ShapeDtypeStruct(out_shape[:-1], jnp.float32),
            pl.BlockSpec((None, None, None, shape.group), lambda b, h, p: (b, h // tiles, p, 0)),
        ),
    ]
    out, lse = call(
        partial(_kernel, shape=shape),
        grid=(batch, kv_heads * tiles, places),
        inputs=inputs,
        outputs=outputs,
        warps=shape.warps,
        stages=2,
        interprets=interprets,
    )
    out, lse = _merged(out, lse)
    return out.reshape(query.shape), lse.reshape(batch, heads, 1)


def _shape_of(
    query: jax.Array,
    blocks: Sequence[KVBlock],
    softcap: float | None,
    has_large_tiles: bool,
    interprets: bool,
) -> Shape:
    """Returns a kernel's shape: heads and tokens are divided among more places while these keep
    more multiprocessors busy."""
    batch, heads, _, head_dim = query.shape
    kv_heads, shapes = blocks[0][0].shape[1], tuple(map(BlockShape.of, blocks))
    group, total = heads // kv_heads, sum(block.tokens for block in shapes)
    parts = parts_of(head_dim, [side for block in shapes for side in (block.key, block.value)])
    rows = min(MAX_QUERY_HEADS, max(MIN_ROWS, power_of_two(group)))
    is_narrow = width_of(parts) <= NARROW_HEAD
    num_places, tile = (PLACES, TILE) if is_narrow else (WIDE_PLACES, WIDE_TILE)
    are_few = batch * kv_heads * pl.cdiv(group, MIN_ROWS) <= num_places
    if not is_narrow and (are_few or not has_large_tiles):
        rows = MIN_ROWS
    of_heads = batch * kv_heads * pl.cdiv(group, rows)
    places = max(1, min(num_places // of_heads, total // MIN_PLACE_TOKENS))
    tokens = pl.cdiv(total, places * tile) * tile
    return Shape(shapes, group, rows, tile, tokens, parts, softcap, interprets)


def _arrays(blocks: Sequence[KVBlock]) -> Iterator[jax.Array]:
    """Yields the arrays of all blocks, those of keys before those of values that are others."""
    for key, value in blocks:
        yield from arrays_of(key)
        if value is not key:
            yield from arrays_of(value)


def _sides(refs: Sequence[Any], shape: Shape) -> Iterator[tuple[Side, Side]]:
    """Yields the keys and the values of each block, from the references to `_arrays`."""
    remaining_refs = iter(refs)

    def taken(storage: Storage | None) -> Side:
        count = 1 if storage is None else len(storage.leaves)
        return Side(tuple(next(remaining_refs) for _ in range(count)), storage, shape.interprets)

    for block in shape.blocks:
        key = taken(block.key)
        yield key, key if block.is_one else taken(block.value)


def _merged(out: jax.Array, lse: jax.Array) -> Partial:
    """Merges the places of each head, the third axis."""
    places = out.shape[2]
    if places <= MAX_MERGED_PROGRAMS:
        return merge([(out[:, :, n], lse[:, :, n]) for n in range(places)])
    peak = lse.max(2, keepdims=True)
    weights = jnp.exp(lse - peak)
    total = weights.sum(2)
    mixed = (out * weights[..., None]).sum(2) / total[..., None]
    return mixed, peak[:, :, 0] + jnp.log(total)


def _kernel(query_ref: Any, indices_ref: Any, first_ref: Any, *refs: Any, shape: Shape) -> None:
    """Attends with queries of a group, [group, head_dim], to some tokens of all blocks.

    indices_ref: the index of each block's first token, and of the new token; first_ref: of the
    sequence's first token; refs: keys and values by block, [token, ...], and the outputs.
    """
    *cache, out_ref, lse_ref = refs
    tiles = pl.cdiv(shape.group, shape.rows)
    query_rows = (pl.program_id(1) % tiles) * shape.rows + jnp.arange(shape.rows)
    is_head = query_rows < shape.group if shape.group % shape.rows else None
    query = tuple(load(query_ref, *part.at(query_rows, is_head)) for part in shape.parts)
    # A place has tokens from `begin` on.
    begin = pl.program_id(2) * shape.tokens
    first = jnp.maximum(first_ref[0], begin)
    stop = jnp.minimum(indices_ref[len(shape.blocks)], begin + shape.tokens)
    state = empty(shape.rows, [part.width for part in shape.parts])
    for index, block in enumerate(_sides(cache, shape)):
        start, length = indices_ref[index], shape.blocks[index].tokens
        fold = partial(
            _fold,
            query=query,
            block=block,
            seen=(first - start, stop - start),
            length=length,
            shape=shape,
        )
        low = jnp.clip(first - start, 0, length) // shape.tile
        high = pl.cdiv(jnp.clip(stop - start, 0, length), shape.tile)
        state = jax.lax.fori_loop(low, high, fold, state)
    out, lse = finished(state)
    for part, values in zip(shape.parts, out, strict=True):
        place, mask = part.at(query_rows, is_head)
        store(out_ref, place, values, mask)
    store(lse_ref, (query_rows,), lse, is_head)


def _fold(
    tile: jax.Array,
    state: State,
    query: tuple[jax.Array, ...],
    block: tuple[Side, Side],
    seen: tuple[jax.Array, jax.Array],
    length: int,
    shape: Shape,
) -> State:
    """Adds a tile of a block to the state; query: the parts of the heads.

    seen: the range of the block's tokens to attend to.
    """
    places = tile * shape.tile + jnp.arange(shape.tile)
    is_token = places < length if length % shape.tile else None

    def tile_of(side: Side) -> tuple[jax.Array, ...]:
        return load_parts(side, shape.parts, places, is_token, query[0].dtype)

    key = tile_of(block[0])
    value = key if block[1] is block[0] else tile_of(block[1])
    is_seen = ((places >= seen[0]) & (places < seen[1]) & (places < length))[None, :]
    return folded(state, scores_of(query, key), is_seen, value, shape.softcap)
