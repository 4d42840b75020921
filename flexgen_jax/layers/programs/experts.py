"""Programs of a layer's experts, which follow its attention."""

from __future__ import annotations

from functools import partial
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
    """Chooses experts: (weights without theirs, hidden states after attention) -> the results of
    `layers.experts.Router`, for rows times `tokens` tokens."""
    router = _router(model, layer)

    def run(weights: Weights, hidden: jax.Array) -> Any:
        return apply(router, weights, hidden.reshape(-1, hidden.shape[-1]))

    return Traced(run, (model.weights(layer), model.hidden(rows, tokens)))


@program
def guess(model: Traceable, layer: LayerSpec, rows: int, tokens: int = 1) -> Traced:
    """Guesses a layer's experts: (its tensors for routing, hidden states of the layer before) ->
    numbers of experts, int32 [batch x token, top]."""
    router = _router(model, layer)

    def run(weights: Weights, hidden: jax.Array) -> Any:
        flat = hidden.reshape(-1, hidden.shape[-1])
        return apply(router, weights, flat, method="guess")

    weights = {tensor.path: abstract(model.formats.weight(tensor)) for tensor in layer.routing}
    return Traced(run, (weights, model.hidden(rows, tokens)))


@program
def expert(model: Traceable, layer: LayerSpec, tokens: int) -> Traced:
    """Adds an expert's result: (its weights, the results of `route` without the last, number of the
    expert, result so far, which is donated) -> result."""
    experts, hidden = _experts(layer), model.spec.hidden_size
    block = MLP(experts.expert, model.kernels, model.dtype, model.formats.matmul_bits)
    size = experts.rows_at_once(tokens, model.kernels.sizes.expert_rows)

    def run(weights: Weights, *routed: jax.Array) -> jax.Array:
        return add_expert(partial(apply, block, weights), size, *routed)

    arguments = (
        model.weights(layer, 0),
        model.array(tokens, hidden),
        ints(tokens, experts.top),
        floats(tokens, experts.top),
        ints(),
        floats(tokens, hidden),
    )
    return Traced(run, arguments, donated=(5,))


@program
def combine(model: Traceable, rows: int, tokens: int) -> Traced:
    """Ends a layer with experts: (hidden states after attention, checks, result of all experts) ->
    hidden, checks including this layer."""

    def run(hidden: jax.Array, checks: jax.Array, out: jax.Array) -> Any:
        hidden = hidden + out.reshape(hidden.shape).astype(hidden.dtype)
        return hidden, _checked_again(checks, hidden)

    out = floats(rows * tokens, model.spec.hidden_size)
    return Traced(run, (model.hidden(rows, tokens), CHECKS, out))


@program
def combine_beside(model: Traceable, layer: LayerSpec, rows: int, tokens: int) -> Traced:
    """Finishes a layer with experts next to a dense block, which it computes: (weights without
    theirs, hidden states after attention, checks, result of all experts) -> hidden, checks."""
    ending = Beside(
        config=model.config,
        spec=_experts(layer),
        kernels=model.kernels,
        dtype=model.dtype,
        matmul_bits=model.formats.matmul_bits,
    )

    def run(weights: Weights, hidden: jax.Array, checks: jax.Array, out: jax.Array) -> Any:
        ended = apply(ending, weights, hidden.reshape(out.shape), out)
        hidden = ended.reshape(hidden.shape)
        return hidden, _checked_again(checks, hidden)

    out = floats(rows * tokens, model.spec.hidden_size)
    return Traced(run, (model.weights(layer), model.hidden(rows, tokens), CHECKS, out))


def ending(layer: LayerSpec, rows: int, tokens: int) -> tuple[Program[Any], dict[str, Any]]:
    """Returns the program that finishes a layer with experts, and its shape arguments."""
    shape = {"rows": rows, "tokens": tokens}
    if _experts(layer).routing.is_beside:
        return combine_beside, {"layer": layer, **shape}
    return combine, shape


def _checked_again(checks: jax.Array, hidden: jax.Array) -> jax.Array:
    """Returns checks with a layer, which counts already, as the first with numbers that are not
    finite, if its hidden states have some and no layer before had."""
    is_finite = jnp.isfinite(hidden).all()
    first = jnp.where((checks[1] == 0) & ~is_finite, checks[0], checks[1])
    return checks.at[1].set(first)
