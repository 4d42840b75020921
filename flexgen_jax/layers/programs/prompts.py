"""Programs of a decoder layer for prompts and their chunks, and for layers that do not attend."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from flexgen_jax.layers.attention import Block, Partial
from flexgen_jax.layers.groups import Segment, in_groups, in_segments
from flexgen_jax.layers.programs.cache import sealed
from flexgen_jax.layers.programs.table import (
    CHECKS,
    Traceable,
    Traced,
    Weights,
    apply,
    checked,
    ints,
    program,
)
from flexgen_jax.layers.quantization import QuantizedArray, assemble, dequantize
from flexgen_jax.layers.rotary import Branches, Rows
from flexgen_jax.models.spec import LayerSpec
from flexgen_jax.models.tensor_spec import Formats


@program
def prefill(
    model: Traceable,
    layer: LayerSpec,
    rows: int,
    cuts: tuple[int, ...],
    only_last: bool = False,
    segments: tuple[Segment, ...] = (),
    branches: Branches | None = None,
) -> Traced:
    """Prefills a layer that attends: (weights, hidden, checks, rows) -> hidden, blocks, checks.

    Hidden states of all tokens, or with `only_last` of the last token. The KV blocks have
    `cuts` tokens. segments: padding to leave out; by default none; branches: what the rows end
    with.
    """
    module, formats, sizes = model.decoder(layer), model.formats, model.kernels.sizes

    def some(weights: Weights, skipped: int, hidden: jax.Array, *each: jax.Array) -> Any:
        """Prefills some sequences, whose first `skipped` tokens are padding, with zeros for these.

        Returns their hidden states, the stored leaves of their KV blocks, and whether each
        sequence's hidden states are finite, which is checked while they are in the CPU's cache.
        """
        hidden, rows = hidden[:, skipped:], Rows(*each)
        rows = rows._replace(first_valid=rows.first_valid - skipped)
        rows = rows.with_branches(branches, hidden.shape[1])
        hidden, arrays = apply(
            module,
            weights,
            *(hidden, rows),
            adapters=rows.chosen,
            only_last=only_last,
            branches=branches,
            method="prefill",
        )
        hidden = hidden if only_last else _padded(hidden, skipped, axis=1)
        arrays = tuple(_padded(x, skipped, axis=x.ndim - 2) for x in arrays)
        blocks = [[jax.tree.leaves(x) for x in block] for block in _cut(formats, arrays, cuts)]
        return hidden, blocks, jnp.isfinite(hidden).all((1, 2))

    def run(weights: Weights, hidden: jax.Array, checks: jax.Array, rows: Rows) -> Any:
        batch, tokens, _ = hidden.shape

        def at_once(rows: int, skipped: int) -> int:
            return sizes.prefill_sequences(rows, tokens - skipped, formats.weight_bits)

        hidden, leaves, is_finite = in_segments(
            partial(some, weights), segments or [(batch, 0)], at_once, hidden, *rows.of_each
        )
        blocks = [
            _assembled(formats, layer, batch, length, arrays)
            for length, arrays in zip(cuts, leaves, strict=True)
        ]
        return hidden, tuple(blocks), checked(checks, is_finite.all())

    hidden = model.hidden(rows, sum(cuts))
    return Traced(run, (model.weights(layer), hidden, CHECKS, model.rows(rows)))


def _cut(formats: Formats, arrays: tuple[jax.Array, ...], cuts: Sequence[int]) -> list[Block]:
    """Returns sealed blocks of `cuts` tokens from a layer's cached arrays of all tokens."""
    blocks, start = list[Block](), 0
    for length in cuts:
        part = tuple(x[..., start : start + length, :] for x in arrays)
        blocks.append(sealed(formats, part))
        start += length
    return blocks


def _assembled(
    formats: Formats, layer: LayerSpec, rows: int, tokens: int, leaves: Sequence[Any]
) -> Block:
    """Returns a KV block from the stored leaves of its arrays."""
    each = zip(layer.growing, leaves, strict=True)
    return tuple(assemble(formats.sealed(leaf, rows, tokens), x) for leaf, x in each)


def _padded(x: jax.Array, tokens: int, axis: int) -> jax.Array:
    """Returns an array with zeros for `count` tokens before it."""
    return jnp.pad(x, [(tokens * (n == axis), 0) for n in range(x.ndim)]) if tokens else x


@program
def project_chunk(model: Traceable, layer: LayerSpec, rows: int, tokens: int, asked: int) -> Traced:
    """Computes the prefill of a prompt's chunk up to attention to earlier tokens: (weights, hidden,
    start, rows) -> query, partial result, KV block.

    Query and result are those of the last `asked` tokens.
    """
    module, formats = model.decoder(layer), model.formats

    def run(weights: Weights, hidden: jax.Array, start: jax.Array, rows: Rows) -> Any:
        batch, tokens, _ = hidden.shape

        def some(hidden: jax.Array, *each: jax.Array) -> Any:
            rows = Rows(*each)
            given = (hidden, start, rows, asked)
            query, partial, block = apply(
                module, weights, *given, adapters=rows.chosen, method="project_chunk"
            )
            return query, partial, [jax.tree.leaves(x) for x in sealed(formats, block)]

        size = model.kernels.sizes.prefill_sequences(batch, tokens, formats.weight_bits)
        query, partial, leaves = in_groups(some, size, hidden, *rows.of_each)
        return query, partial, _assembled(formats, layer, batch, tokens, leaves)

    hidden = model.hidden(rows, tokens)
    return Traced(run, (model.weights(layer), hidden, ints(), model.rows(rows)))


@program
def finish_chunk(model: Traceable, layer: LayerSpec, rows: int, tokens: int, asked: int) -> Traced:
    """Computes the prefill of a chunk after attention: (weights, hidden, checks, partial result of
    attention to everything, the rows' adapters if they choose) -> hidden states of the last `asked`
    tokens, checks."""
    module, formats = model.decoder(layer), model.formats

    def run(
        weights: Weights,
        hidden: jax.Array,
        checks: jax.Array,
        partial: Partial,
        *adapters: jax.Array,
    ) -> Any:
        def some(hidden: jax.Array, attended: jax.Array, *adapters: jax.Array) -> Any:
            given = (hidden, attended)
            hidden = apply(module, weights, *given, adapters=adapters, method="finish_chunk")
            return hidden, jnp.isfinite(hidden).all((1, 2))

        batch, tokens, _ = hidden.shape
        size = model.kernels.sizes.prefill_sequences(batch, tokens, formats.weight_bits)
        hidden, is_finite = in_groups(some, size, hidden, partial[0], *adapters)
        return hidden, checked(checks, is_finite.all())

    hidden, partial = model.hidden(rows, tokens), model.partial(layer, rows, asked)
    return Traced(run, (model.weights(layer), hidden, CHECKS, partial, *model.adapters(rows)))


@program
def mix(
    model: Traceable,
    layer: LayerSpec,
    rows: int,
    tokens: int,
    asked: int,
    blocks: tuple[int, ...] = (),
    tail: int = 0,
    cuts: tuple[int, ...] = (),
    donates: bool = False,
    has_guesses: bool = False,
) -> Traced:
    """Computes some tokens in a layer that does not attend: (weights, hidden, KV blocks of earlier
    tokens, what is replaced with every token, index of the first token, checks, rows, and with
    `has_guesses` how many of the tokens are none) -> hidden states of the last `asked` tokens, what
    the layer keeps of all tokens, what is replaced, checks.

    The open block comes last, unless its length `tail` is 0. The cached arrays are sealed blocks of
    `cuts` tokens, or without `cuts` the tokens for the open block. donates: whether the recurrent
    state may be overwritten.
    """
    module, formats, sizes = model.decoder(layer), model.formats, model.kernels.sizes
    # Growing arrays are joined with all rows' blocks.
    at_once = rows if layer.growing else sizes.prefill_sequences(rows, tokens, formats.weight_bits)

    def run(
        weights: Weights,
        hidden: jax.Array,
        blocks: tuple[Block, ...],
        state: tuple[jax.Array, ...],
        start: jax.Array,
        checks: jax.Array,
        rows: Rows,
        *known: jax.Array,
    ) -> Any:
        def some(hidden: jax.Array, *each: jax.Array) -> Any:
            count = len(rows.of_each)
            state, own_rows = each[count:], Rows(*each[:count])
            given = (hidden, blocks, state, start, own_rows, asked, *known)
            return apply(module, weights, *given, adapters=own_rows.chosen, method="mix")

        hidden, new, state = in_groups(some, at_once, hidden, *rows.of_each, *state)
        kept = _cut(formats, new, cuts) if cuts else new
        return hidden, kept, state, checked(checks, jnp.isfinite(hidden).all())

    arguments = (
        model.weights(layer),
        model.hidden(rows, tokens),
        model.blocks(layer, rows, blocks if layer.growing else (), tail if layer.growing else 0),
        model.state(layer, rows),
        ints(),
        CHECKS,
        model.rows(rows),
        *((ints(),) if has_guesses else ()),
    )
    return Traced(run, arguments, donated=(3,) if donates else ())


@program
def unpack(model: Traceable, layer: LayerSpec) -> Traced:
    """Unpacks a decoder layer's weights: (weights) -> weights in the dtype."""

    def run(weights: Weights) -> Weights:
        return {
            path: dequantize(kept) if isinstance(kept, QuantizedArray) else kept
            for path, kept in weights.items()
        }

    return Traced(run, (model.weights(layer),))
