"""Programs of an attention layer for one token per sequence, or for several consecutive tokens,
including draft tokens."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from flexgen_jax.layers.attention import Block, Partial
from flexgen_jax.layers.programs.table import (
    CHECKS,
    Traceable,
    Traced,
    Weights,
    apply,
    checked,
    decoding_program,
    ints,
)
from flexgen_jax.layers.rotary import Rows
from flexgen_jax.layers.self_attention import Arrays
from flexgen_jax.models.spec import LayerSpec


@decoding_program
def decode(
    model: Traceable,
    layer: LayerSpec,
    rows: int,
    blocks: tuple[int, ...],
    tail: int,
    room: int = 0,
    appends: bool = False,
    tokens: int = 1,
) -> Traced:
    """Decodes: (weights, hidden, blocks, tail, checks, position, rows, counts) -> hidden, new keys
    and values, checks.

    position: the index of the first of the tokens. room: for sparse attention the most tokens that
    are attended to; if it is 0, attention is dense and there is no argument `counts`. With
    `appends`, the tail is donated and returned with the new keys and values, instead of these.
    """
    module = model.decoder(layer)

    def run(
        weights: Weights,
        hidden: jax.Array,
        blocks: tuple[Block, ...],
        tail: Arrays,
        checks: jax.Array,
        position: jax.Array,
        rows: Rows,
        *counts: jax.Array,
    ) -> Any:
        hidden, new = apply(
            module,
            weights,
            *(hidden, blocks, tail, position, rows, *counts),
            adapters=rows.chosen,
            max_tokens=room,
            appends=appends,
            method="decode",
        )
        return hidden, new, checked(checks, jnp.isfinite(hidden).all())

    arguments = (
        model.weights(layer),
        model.hidden(rows, tokens),
        model.blocks(layer, rows, blocks),
        model.tail(layer, rows, tail),
        CHECKS,
        ints(),
        model.rows(rows),
        *((ints(rows),) if room else ()),
    )
    return Traced(run, arguments, donated=(3,) if appends else ())


@decoding_program
def decode_joined(
    model: Traceable,
    layers: tuple[int, ...],
    rows: int,
    blocks: tuple[int, ...],
    tail: int,
) -> Traced:
    """Decodes one token in several layers, whose indices are given, as `decode` does with `appends`
    in each: (a list of weights, hidden, a list of blocks, a list of tails, checks, position, rows)
    -> hidden, a list of tails, checks. The tails are donated.

    A GPU computes a layer's token in less time than it takes to dispatch a program for it.
    """
    specs = [model.spec.layers[index] for index in layers]
    modules = [model.decoder(spec) for spec in specs]

    def run(
        weights: list[Weights],
        hidden: jax.Array,
        blocks: list[tuple[Block, ...]],
        tails: list[Arrays],
        checks: jax.Array,
        position: jax.Array,
        rows: Rows,
    ) -> Any:
        appended = []
        for module, own, sealed, opened in zip(modules, weights, blocks, tails, strict=True):
            if model.formats.weight_bits < 16:  # else XLA would unpack many layers' weights at once
                hidden, own = jax.lax.optimization_barrier((hidden, own))
            hidden, opened = apply(
                module,
                own,
                *(hidden, sealed, opened, position, rows),
                adapters=rows.chosen,
                appends=True,
                method="decode",
            )
            checks = checked(checks, jnp.isfinite(hidden).all())
            appended.append(opened)
        return hidden, appended, checks

    arguments = (
        [model.weights(spec) for spec in specs],
        model.hidden(rows, 1),
        [model.blocks(spec, rows, blocks) for spec in specs],
        [model.tail(spec, rows, tail) for spec in specs],
        CHECKS,
        ints(),
        model.rows(rows),
    )
    return Traced(run, arguments, donated=(3,))


@decoding_program
def project(model: Traceable, layer: LayerSpec, rows: int, tokens: int = 1) -> Traced:
    """Computes `decode` up to attention: (weights, hidden, position, rows) -> query, new keys and
    values."""
    module = model.decoder(layer)

    def run(weights: Weights, hidden: jax.Array, position: jax.Array, rows: Rows) -> Any:
        where = (hidden, position, rows)
        return apply(module, weights, *where, adapters=rows.chosen, method="project")

    return Traced(run, (model.weights(layer), model.hidden(rows, tokens), ints(), model.rows(rows)))


@decoding_program
def finish(model: Traceable, layer: LayerSpec, rows: int, places: int, tokens: int = 1) -> Traced:
    """Computes `decode` after attention: (weights, hidden, checks, query, new keys and values, a
    list of partial results, one for each place, the rows' adapters if they choose) -> hidden,
    checks."""
    module = model.decoder(layer)

    def run(
        weights: Weights,
        hidden: jax.Array,
        checks: jax.Array,
        query: jax.Array,
        new: Arrays,
        partials: list[Partial],
        *adapters: jax.Array,
    ) -> Any:
        attended = (hidden, query, new, partials)
        hidden = apply(module, weights, *attended, adapters=adapters, method="finish")
        return hidden, checked(checks, jnp.isfinite(hidden).all())

    partials = [model.partial(layer, rows, tokens)] * places
    arguments = (
        model.weights(layer),
        model.hidden(rows, tokens),
        CHECKS,
        model.query(layer, rows, tokens),
        model.tail(layer, rows, tokens),
        partials,
        *model.adapters(rows),
    )
    return Traced(run, arguments)
