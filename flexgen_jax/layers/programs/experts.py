"""Programs of a layer's experts, which follow its attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from flexgen_jax.layers.experts import Beside, Router, add_expert
from flexgen_jax.layers.mlp import MLP
from flexgen_jax.layers.programs.table import (
    CHECKS,
    Program,
    Traceable,
    Traced,
    Weights,
    abstract,
    apply,
    floats,
    ints,
    program,
)
from flexgen_jax.models.parts import ExpertsSpec
from flexgen_jax.models.spec import LayerSpec


def _experts(layer: LayerSpec) -> ExpertsSpec:
    assert layer.experts is not None, "the layer has experts"
    return layer.experts


def _router(model: Traceable, layer: LayerSpec) -> Router:
    return Router(
        config=model.config,
        spec=_experts(layer),
        kernels=model.kernels,
        dtype=model.dtype,
        matmul_bits=model.formats.matmul_bits,
    )


@program
def route(model: Traceable, layer: LayerSpec, rows: int, tokens: int) -> Traced:
    """Chooses experts: (weights without theirs, hidden states after attention, the rows' adapters
    if they choose) -> the results of `layers.experts.Router`, for rows times `tokens` tokens, with
    the tokens' adapters before the last."""
    router = _router(model, layer)

    def run(weights: Weights, hidden: jax.Array, *adapters: jax.Array) -> Any:
        of_tokens = _of_tokens(adapters, tokens)
        flat = hidden.reshape(-1, hidden.shape[-1])
        *routed, out = apply(router, weights, flat, adapters=of_tokens)
        return *routed, *of_tokens, out

    return Traced(run, (model.weights(layer), model.hidden(rows, tokens), *model.adapters(rows)))


def _of_tokens(adapters: Sequence[jax.Array], tokens: int) -> list[jax.Array]:
    """Returns the number of each token's adapter, for rows of `tokens` tokens, () if rows do not
    choose."""
    return [jnp.repeat(numbers, tokens) for numbers in adapters]


@program
def guess(model: Traceable, layer: LayerSpec, rows: int, tokens: int = 1) -> Traced:
    """Guesses a layer's experts: (its tensors for routing, hidden states of the layer before, the
    rows' adapters if they choose) -> numbers of experts, int32 [batch x token, top]."""
    router = _router(model, layer)

    def run(weights: Weights, hidden: jax.Array, *adapters: jax.Array) -> Any:
        flat = hidden.reshape(-1, hidden.shape[-1])
        of_tokens = _of_tokens(adapters, tokens)
        return apply(router, weights, flat, adapters=of_tokens, method="guess")

    weights = {tensor.path: abstract(model.formats.weight(tensor)) for tensor in layer.routing}
    return Traced(run, (weights, model.hidden(rows, tokens), *model.adapters(rows)))


MAX_EXPERTS = 8
"""The most experts of one program: each adds to the time of compiling it."""


def num_experts(layer: LayerSpec) -> int:
    """Returns the number of experts of the program `add_experts`: as many as a token chooses, or an
    equal part of them.

        8 chosen -> 8;  10 chosen -> 5
    """
    top = _experts(layer).top
    return -(-top // -(-top // MAX_EXPERTS))


@program
def add_experts(model: Traceable, layer: LayerSpec, tokens: int) -> Traced:
    """Adds the results of `num_experts` experts: (weights of each, result so far, which is donated,
    the number of each, the results of `route` without the last) -> result. An expert with the
    number -1 adds nothing and takes no time."""
    experts, hidden, count = _experts(layer), model.spec.hidden_size, num_experts(layer)
    block = MLP(experts.expert, model.kernels, model.dtype, model.formats.matmul_bits)
    size = experts.rows_at_once(tokens, model.kernels.sizes.expert_rows)

    def run(
        weights: Sequence[Weights],
        out: jax.Array,
        numbers: Sequence[jax.Array],
        x: jax.Array,
        choices: jax.Array,
        share: jax.Array,
        *adapters: jax.Array,
    ) -> jax.Array:
        for number, expert_weights in zip(numbers, weights, strict=True):

            def of_expert(
                x: jax.Array, *adapters: jax.Array, weights: Weights = expert_weights
            ) -> jax.Array:
                result: jax.Array = apply(block, weights, x, adapters=adapters)
                return result

            out = add_expert(of_expert, size, (x, *adapters), choices, share, number, out)
        return out

    arguments = (
        [model.weights(layer, 0)] * count,
        floats(tokens, hidden),
        [ints()] * count,
        model.array(tokens, hidden),
        ints(tokens, experts.top),
        floats(tokens, experts.top),
        *model.adapters(tokens),
    )
    return Traced(run, arguments, donated=(1,))


@program
def combine(model: Traceable, rows: int, tokens: int, places: int = 1) -> Traced:
    """Ends a layer with experts: (hidden states after attention, checks, results of the experts of
    each of `places`: the device, the host) -> hidden, checks including this layer."""

    def run(hidden: jax.Array, checks: jax.Array, outs: Sequence[jax.Array]) -> Any:
        hidden = hidden + _sum(outs).reshape(hidden.shape).astype(hidden.dtype)
        return hidden, _checked_again(checks, hidden)

    out = floats(rows * tokens, model.spec.hidden_size)
    return Traced(run, (model.hidden(rows, tokens), CHECKS, [out] * places))


@program
def combine_beside(
    model: Traceable, layer: LayerSpec, rows: int, tokens: int, places: int = 1
) -> Traced:
    """Finishes a layer with experts next to a dense block, which it computes: (weights without
    theirs, the arguments of `combine`, the rows' adapters if they choose) -> hidden, checks."""
    ending = Beside(
        config=model.config,
        spec=_experts(layer),
        kernels=model.kernels,
        dtype=model.dtype,
        matmul_bits=model.formats.matmul_bits,
    )

    def run(
        weights: Weights,
        hidden: jax.Array,
        checks: jax.Array,
        outs: Sequence[jax.Array],
        *adapters: jax.Array,
    ) -> Any:
        given = (hidden.reshape(outs[0].shape), _sum(outs))
        ended = apply(ending, weights, *given, adapters=_of_tokens(adapters, tokens))
        hidden = ended.reshape(hidden.shape)
        return hidden, _checked_again(checks, hidden)

    out, hidden = floats(rows * tokens, model.spec.hidden_size), model.hidden(rows, tokens)
    arguments = (model.weights(layer), hidden, CHECKS, [out] * places, *model.adapters(rows))
    return Traced(run, arguments)


def _sum(outs: Sequence[jax.Array]) -> jax.Array:
    first, *others = outs
    return sum(others, start=first)


def ending(
    layer: LayerSpec, rows: int, tokens: int, places: int = 1
) -> tuple[Program[Any], dict[str, Any]]:
    """Returns the program that finishes a layer with experts, and its shape arguments."""
    shape = {"rows": rows, "tokens": tokens, "places": places}
    if _experts(layer).routing.is_beside:
        return combine_beside, {"layer": layer, **shape}
    return combine, shape


def _checked_again(checks: jax.Array, hidden: jax.Array) -> jax.Array:
    """Returns checks with a layer, which counts already, as the first with numbers that are not
    finite, if its hidden states have some and no layer before had."""
    is_finite = jnp.isfinite(hidden).all()
    first = jnp.where((checks[1] == 0) & ~is_finite, checks[0], checks[1])
    return checks.at[1].set(first)
