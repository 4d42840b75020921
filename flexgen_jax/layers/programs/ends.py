"""Programs of a model's ends: the embedding, and the head, which chooses or scores tokens."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from flexgen_jax.layers.embedding import Embedding, Head
from flexgen_jax.layers.groups import in_groups
from flexgen_jax.layers.programs.table import (
    CHECKS,
    Traceable,
    Traced,
    Weights,
    apply,
    checked,
    floats,
    ints,
    program,
)
from flexgen_jax.layers.rotary import Branches, Rows
from flexgen_jax.layers.sampling import (
    Choice,
    adjust,
    greedy,
    log_probabilities,
    only_allowed,
    sample,
)
from flexgen_jax.models.parts import Pooling


@program
def embed(model: Traceable, rows: int, tokens: int, branches: Branches | None = None) -> Traced:
    """Embeds tokens: (weights, ids [batch, token], start, rows) -> hidden, checks. branches: what
    the rows end with."""
    module = Embedding(model.config, model.kernels, model.dtype)

    def run(weights: Weights, ids: jax.Array, start: jax.Array, rows: Rows) -> Any:
        rows = rows.with_branches(branches, ids.shape[1])
        hidden = apply(module, weights, ids, start, rows)
        return hidden, checked(jnp.zeros(2, jnp.int32), jnp.isfinite(hidden).all())

    placed = (ints(rows, tokens), ints(), model.rows(rows))
    return Traced(run, (model.weights(model.spec.embedding), *placed))


@program
def head(model: Traceable, rows: int, choice: Choice, tokens: int = 1) -> Traced:
    """Chooses tokens: (weights, hidden [batch, token, hidden], checks, unless the choice is greedy
    the further arguments of `sample`, if some logits are adjusted those of `adjust`, if only some
    tokens are allowed that of `only_allowed`) -> ids [batch x token, 1], checks; with
    log-probabilities, the ids come with `log_probabilities`. Each token's further arguments are
    those of a row."""
    module = Head(model.config, model.kernels, model.dtype)

    def run(weights: Weights, hidden: jax.Array, checks: jax.Array, *given: jax.Array) -> Any:
        logits = apply(module, weights, hidden.reshape(-1, hidden.shape[-1]))
        changed = logits
        if choice.is_masked:
            *given, allowed = given  # type: ignore[assignment]
            changed = only_allowed(changed, allowed)
        if choice.adjusted:
            changed = adjust(changed, *given[-3:])
        sampling = given[:-3] if choice.adjusted else given
        ids = greedy(changed) if choice.is_greedy else sample(changed, *sampling)
        checks = checked(checks, jnp.isfinite(logits).all())
        if choice.logprobs is None:
            return ids[:, None], checks
        return (ids[:, None], *log_probabilities(logits, ids, choice.logprobs)), checks

    arguments = [model.weights(model.spec.head), model.hidden(rows, tokens), CHECKS]
    rows *= tokens
    if not choice.is_greedy:
        keys, each = jax.ShapeDtypeStruct((rows, 2), jnp.uint32), floats(rows)
        arguments += [each, ints(rows), each, each, keys, ints(rows), ints()]
    if choice.adjusted:
        changes = (rows, choice.adjusted)
        arguments += [ints(*changes), floats(*changes), floats(*changes)]
    if choice.is_masked:
        words = -(-model.config.vocab_size // 32)
        arguments += [jax.ShapeDtypeStruct((rows, words), jnp.uint32)]
    return Traced(run, arguments)


@program
def score(model: Traceable, rows: int, tokens: int, scored: int, top: int | None = None) -> Traced:
    """Scores the last `scored` of a batch's tokens: (weights, hidden, checks, targets [batch,
    scored]) -> scores, checks.

    The scores are log-probabilities, fp32, and whether the targets are the greedy choices, each
    [batch, scored]; with `top` the log-probabilities, and the ids and log-probabilities of the
    likeliest tokens, each [batch, scored, top]."""
    module = Head(model.config, model.kernels, model.dtype)

    def run(weights: Weights, hidden: jax.Array, checks: jax.Array, targets: jax.Array) -> Any:
        hidden = hidden[:, -targets.shape[1] :]

        def some(rows: jax.Array, wanted: jax.Array) -> tuple[jax.Array, ...]:
            logits = apply(module, weights, rows)
            if top is not None:
                return log_probabilities(logits, wanted, top)
            logprobs = jax.nn.log_softmax(logits)
            logprobs = jnp.take_along_axis(logprobs, wanted[:, None], axis=1)
            return logprobs[:, 0], greedy(logits) == wanted

        together = min(model.kernels.sizes.scored_rows, targets.size)
        tokens = hidden.reshape(-1, hidden.shape[-1])
        scores = in_groups(some, together, tokens, targets.reshape(-1))
        is_finite = jnp.isfinite(scores[0]).all()
        shaped = tuple(x.reshape(*targets.shape, *x.shape[1:]) for x in scores)
        return shaped, checked(checks, is_finite)

    arguments = (model.hidden(rows, tokens), CHECKS, ints(rows, scored))
    return Traced(run, (model.weights(model.spec.head), *arguments))


@program
def pool(model: Traceable, rows: int, tokens: int, pooling: Pooling) -> Traced:
    """Makes vectors of prompts: (weights, hidden [batch, token, hidden], checks, the index of each
    row's first token int32 [batch]) -> fp32 [batch, hidden], checks. With "last", one token of the
    hidden states suffices."""
    module = Head(model.config, model.kernels, model.dtype)

    def run(weights: Weights, hidden: jax.Array, checks: jax.Array, first: jax.Array) -> Any:
        count = hidden.shape[1]
        if pooling == "last":
            hidden = hidden[:, -1:]
        elif pooling == "cls":
            hidden = jnp.take_along_axis(hidden, first[:, None, None], axis=1)
        states = apply(module, weights, hidden, True).astype(jnp.float32)
        if pooling == "mean":
            is_real = jnp.arange(count)[None, :, None] >= first[:, None, None]
            pooled = jnp.where(is_real, states, 0).sum(1) / (count - first)[:, None]
        else:
            pooled = states[:, 0]
        return pooled, checked(checks, jnp.isfinite(pooled).all())

    arguments = (model.hidden(rows, tokens), CHECKS, ints(rows))
    return Traced(run, (model.weights(model.spec.head), *arguments))
