"""Programs that write to KV blocks, or attend to them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp

from flexgen_jax.layers.attention import (
    MASKED,
    Block,
    Partial,
    chunk_attention,
    first_seen,
    merge,
    sides,
)
from flexgen_jax.layers.decoder import T
from flexgen_jax.layers.decoder import append as append_tokens
from flexgen_jax.layers.groups import in_groups
from flexgen_jax.layers.programs.table import (
    Traceable,
    Traced,
    floats,
    ints,
    program,
)
from flexgen_jax.layers.quantization import Kept, quantize_as
from flexgen_jax.layers.rotary import Rows
from flexgen_jax.layers.self_attention import attend_earlier
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
def append(model: Traceable, layer: LayerSpec, rows: int, tail: int, tokens: int = 1) -> Traced:
    """Appends tokens to a tail: (donated tail, cached arrays of the tokens, index)
    -> tail."""
    arguments = (model.tail(layer, rows, tail), model.tail(layer, rows, tokens), ints())
    return Traced(append_tokens, arguments, donated=(0,))


@program
def seal(model: Traceable, layer: LayerSpec, rows: int, tail: int) -> Traced:
    """Seals a full tail: (tail) -> the block as the cache keeps it."""

    def run(tail: tuple[jax.Array, ...]) -> Any:
        return sealed(model.formats, tail)

    return Traced(run, (model.tail(layer, rows, tail),))


@program
def attend(
    model: Traceable,
    layer: LayerSpec,
    rows: int,
    blocks: tuple[int, ...],
    tail: int,
    tokens: int = 1,
) -> Traced:
    """Attends to KV blocks of tokens before `position`: (query, blocks, starts, position, rows) ->
    partial result.

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
        return attend_earlier(
            query=query,
            blocks=tuple(map(sides, blocks)),
            starts=starts,
            position=position,
            end=position,
            first_valid=rows.first_valid,
            spec=attention,
            kernels=kernels,
        )

    cache = model.blocks(layer, rows, blocks, tail)
    placed = (ints(len(cache)), ints(), model.rows(rows))
    return Traced(run, (model.query(layer, rows, tokens), cache, *placed))


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
        model.rows(rows),
    )
    return Traced(run, arguments, donated=(0,))


@program
def attend_prefix(
    model: Traceable,
    layer: LayerSpec,
    rows: int,
    asked: int,
    sharing: int,
    blocks: tuple[int, ...],
    is_first: bool = False,
) -> Traced:
    """Attends with `asked` tokens of some sequences of a batch to the KV blocks of one row, which
    they share: (partial result, which is donated, query, blocks, at, start, rows) -> partial
    result.

    at: int32 [5], the first of `sharing` sequences that are computed; the range of rows that share
    the blocks; how many tokens are before those of the blocks, and how many columns of the blocks
    are padding. start: the index of the first query's token. With `is_first`, there is no partial
    result yet, and sequences without blocks get an empty one.
    """
    kernels, formats, attention = model.kernels, model.formats, layer.attention
    seen = _seen(blocks, attention.window)

    def some(blocks: tuple[Block, ...], padding: jax.Array, query: jax.Array, at: Any) -> Partial:
        """Attends with the tokens of some sequences, which are to the prefix as those of one.

        padding: how many columns of the blocks are none of its tokens; at: int32 [batch, token],
        the column that each query would have.
        """
        batch, heads, tokens, size = query.shape
        queries = query.swapaxes(0, 1).reshape(1, heads, batch * tokens, size)
        partials = []
        for number, start in seen:
            key, value = sides(blocks[number])
            first = jnp.maximum(padding - start, 0)[None]
            if attention.window is None:
                lead = jnp.int32(key.shape[2])
                own = kernels.chunk_attention(queries, key, value, first, lead, attention)
            else:
                own = chunk_attention(
                    query=queries,
                    key=key,
                    value=value,
                    first_valid=first,
                    lead=at.reshape(-1) - start,
                    at_once=kernels.sizes.scored_heads(heads, max(batch * tokens, key.shape[2])),
                    window=attention.window,
                    softcap=attention.softcap,
                )
            partials.append(own)
        out, lse = merge(partials)
        out = out.reshape(heads, batch, tokens, size).swapaxes(0, 1)
        return out, lse.reshape(heads, batch, tokens).swapaxes(0, 1)

    def run(partial: Partial | None, query: jax.Array, *placed: Any) -> Partial:
        blocks, at, start, of_rows = placed
        row, begin, end, before, padding = at
        position = of_rows.positions(start, asked) - before + padding
        own = jax.lax.dynamic_slice_in_dim(query, row, sharing)
        position = jax.lax.dynamic_slice_in_dim(position, row, sharing)
        together = kernels.sizes.prefill_sequences(sharing, asked, formats.weight_bits)
        attended = in_groups(
            lambda query, at: some(blocks, padding, query, at), together, own, position
        )
        shares = (row + jnp.arange(sharing) >= begin) & (row + jnp.arange(sharing) < end)
        attended = (attended[0], jnp.where(shares[:, None, None], attended[1], MASKED))
        if partial is None:
            partial = (
                jnp.zeros(query.shape, jnp.float32),
                jnp.full(query.shape[:3], MASKED, jnp.float32),
            )
        earlier = [jax.lax.dynamic_slice_in_dim(x, row, sharing) for x in partial]
        merged = attended if is_first else merge([(earlier[0], earlier[1]), attended])
        out, lse = (
            jax.lax.dynamic_update_slice_in_dim(into, x, row, 0)
            for into, x in zip(partial, merged, strict=True)
        )
        return out, lse

    partial = None if is_first else model.partial(layer, rows, asked)
    placed = (model.blocks(layer, 1, blocks), ints(5), ints(), model.rows(rows))
    arguments = (partial, model.query(layer, rows, asked), *placed)
    return Traced(run, arguments, donated=() if is_first else (0,))


def _seen(blocks: Sequence[int], window: int | None) -> list[tuple[int, int]]:
    """Returns the numbers and first columns of the blocks of a prefix that tokens after it may see.

    With blocks of 64, 64 and 32 tokens, a window of 20 needs the last block, a window of 40 the
    last two.
    """
    starts, total = (0, *accumulate(blocks)), sum(blocks)
    after = [total - starts[number + 1] for number in range(len(blocks))]
    chosen = [n for n in range(len(blocks)) if window is None or after[n] < window - 1]
    return [(number, starts[number]) for number in chosen or [len(blocks) - 1]]


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
    placed = (ints(len(keys)), ints(), model.rows(rows))
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
