"""Programs that write to KV blocks, or attend to them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from flexgen_jax.layers.attention import Block, Partial, first_seen, merge, sides
from flexgen_jax.layers.decoder import T
from flexgen_jax.layers.decoder import append as append_token
from flexgen_jax.layers.groups import in_groups
from flexgen_jax.layers.programs.table import (
    Traceable,
    Traced,
    floats,
    ints,
    program,
    rows_of,
)
from flexgen_jax.layers.quantization import Kept, quantize_as
from flexgen_jax.layers.rotary import Rows
from flexgen_jax.layers.sparse_attention import Ranked, rank
from flexgen_jax.layers.sparse_attention import attend_ranked as attend_to_ranked
from flexgen_jax.models.formats.storage import kv_storage
from flexgen_jax.models.spec import LayerSpec
from flexgen_jax.models.tensor_spec import Formats


def sealed(formats: Formats, block: T) -> Any:
    """Returns a full block as the cache keeps it, quantized or not."""
    if formats.cache_bits == 16:
        return block
    return jax.tree.map(
        lambda x: quantize_as(x, kv_storage(x.shape, formats.dtype, formats.cache_bits)), block
    )


@program
def append(model: Traceable, layer: LayerSpec, rows: int, tail: int) -> Traced:
    """Appends a token to a tail: (tail, which is donated, what the layer keeps of the token, index)
    -> tail."""
    arguments = (model.tail(layer, rows, tail), model.tail(layer, rows, 1), ints())
    return Traced(append_token, arguments, donated=(0,))


@program
def seal(model: Traceable, layer: LayerSpec, rows: int, tail: int) -> Traced:
    """Seals a full tail: (tail) -> the block as the cache keeps it."""

    def run(tail: tuple[jax.Array, ...]) -> Any:
        return sealed(model.formats, tail)

    return Traced(run, (model.tail(layer, rows, tail),))


@program
def attend(
    model: Traceable, layer: LayerSpec, rows: int, blocks: tuple[int, ...], tail: int
) -> Traced:
    """Attends to KV blocks: (query, blocks, starts, position, rows) -> partial result.

    The tail is the last of the blocks, unless its length is 0; starts: int32 [block], the index of
    each block's first token.
    """
    kernels, attention = model.kernels, layer.attention

    def run(
        query: jax.Array,
        blocks: tuple[Block, ...],
        starts: jax.Array,
        position: jax.Array,
        rows: Rows,
    ) -> Partial:
        first = first_seen(position, rows.first_valid, attention.window)
        cache = tuple(map(sides, blocks))
        return kernels.decode_attention(query, cache, starts, position, first, attention)

    cache = model.blocks(layer, rows, blocks, tail)
    placed = (ints(len(cache)), ints(), rows_of(rows))
    return Traced(run, (model.query(layer, rows), cache, *placed))


@program
def attend_chunk(model: Traceable, layer: LayerSpec, rows: int, asked: int, tokens: int) -> Traced:
    """Attends with a chunk's last `asked` tokens to an earlier KV block of `tokens` tokens:
    (partial result, which is donated, query, block, start of the block, index of the first of the
    tokens, rows) -> partial result of both.
    """
    kernels, attention = model.kernels, layer.attention

    def run(
        partial: Partial,
        query: jax.Array,
        block: Block,
        start: jax.Array,
        at: jax.Array,
        rows: Rows,
    ) -> Partial:
        first = jnp.maximum(rows.first_valid - start, 0)
        own = kernels.chunk_attention(query, *sides(block), first, at - start, attention)
        return merge([partial, own])

    arguments = (
        model.partial(layer, rows, asked),
        model.query(layer, rows, asked),
        model.block(layer, rows, tokens),
        ints(),
        ints(),
        rows_of(rows),
    )
    return Traced(run, arguments, donated=(0,))


@program
def attend_prefix(
    model: Traceable, layer: LayerSpec, rows: int, asked: int, blocks: tuple[int, ...]
) -> Traced:
    """Attends with `asked` tokens of each sequence to KV blocks of one row, which all sequences
    share: (query, blocks) -> partial result."""
    kernels, formats, attention = model.kernels, model.formats, layer.attention

    def run(query: jax.Array, blocks: tuple[Block, ...]) -> Partial:
        batch, heads, tokens, size = query.shape
        none = jnp.zeros(1, jnp.int32)

        def some(query: jax.Array) -> Partial:
            """Attends with the tokens of some sequences, which are to the prefix as those of
            one."""
            rows = query.shape[0]
            asked = query.swapaxes(0, 1).reshape(1, heads, rows * tokens, size)
            partials = [
                kernels.chunk_attention(
                    asked, *sides(block), none, jnp.int32(block[0].shape[2]), attention
                )
                for block in blocks
            ]
            out, lse = merge(partials)
            out = out.reshape(heads, rows, tokens, size).swapaxes(0, 1)
            return out, lse.reshape(heads, rows, tokens).swapaxes(0, 1)

        together = kernels.sizes.prefill_sequences(batch, tokens, formats.weight_bits)
        attended: Partial = in_groups(some, together, query)
        return attended

    return Traced(run, (model.query(layer, rows, asked), model.blocks(layer, 1, blocks)))


@program
def rank_tokens(
    model: Traceable,
    layer: LayerSpec,
    rows: int,
    blocks: tuple[int, ...],
    tail: int,
    room: int,
) -> Traced:
    """Ranks tokens for sparse attention: (query, keys of blocks and tail, starts, position, rows)
    -> `Ranked` with at most `room` candidates."""
    attention, tuning = layer.attention, model.kernels.tuning

    def run(
        query: jax.Array,
        keys: tuple[Kept, ...],
        starts: jax.Array,
        position: jax.Array,
        rows: Rows,
    ) -> Ranked:
        first = first_seen(position, rows.first_valid, attention.window)
        return rank(query, keys, starts, position, first, room, tuning, attention.softcap)

    keys = tuple(sides(block)[0] for block in model.blocks(layer, rows, blocks, tail))
    placed = (ints(len(keys)), ints(), rows_of(rows))
    return Traced(run, (model.query(layer, rows), keys, *placed))


@program
def attend_ranked(
    model: Traceable,
    layer: LayerSpec,
    rows: int,
    blocks: tuple[int, ...],
    tail: int,
    room: int,
) -> Traced:
    """Attends to ranked tokens: (values of blocks and tail, `Ranked` with at most `room` of them,
    counts) -> partial result."""

    def run(values: tuple[Kept, ...], ranked: Ranked, counts: jax.Array) -> Any:
        return attend_to_ranked(values, ranked, counts, tuning=model.kernels.tuning)

    values = tuple(sides(block)[1] for block in model.blocks(layer, rows, blocks, tail))
    room = min(room, sum(value.shape[2] for value in values))
    heads = layer.attention.query_shape(rows)[:2]
    ranked: Any = (floats(*heads, room), ints(*heads, room), floats(*heads, 1))
    return Traced(run, (values, Ranked(*ranked), ints(*heads)))
