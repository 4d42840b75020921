"""The feed-forward part of a layer with experts: routing, one expert at a time, and their sum.

An expert computes only the tokens that chose it, some at a time, in a loop whose length is found
while it runs: so its program does not depend on the routing, and takes no time for an expert that
nobody chose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

from flexgen_jax.layers.kernels import Kernels
from flexgen_jax.layers.linear import Linear
from flexgen_jax.layers.mlp import MLP
from flexgen_jax.layers.norm import Norm
from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.parts import ExpertsSpec, Routing

TINY = 1e-20
"""Added to the denominator of the normalized weights."""


class Router(nn.Module):
    """Chooses the experts of every token, and computes what all tokens go through."""

    config: ModelConfig
    spec: ExpertsSpec
    kernels: Kernels
    dtype: jnp.dtype = jnp.float32
    matmul_bits: int = 16

    @nn.compact
    def __call__(self, hidden: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Routes tokens, [token, hidden], that have been through attention.

        Returns the experts' input, [token, hidden]; the numbers of the chosen experts, int32
        [token, top]; their shares, fp32 [token, top]; and the result of the shared block, fp32
        [token, hidden], zeros without one or if the experts are next to a dense block (`Beside`).
        """
        spec = self.spec
        x, share, experts = self._choose(hidden)
        if spec.routing.is_beside:
            x = Norm(self.config.norm, self.kernels, self.dtype, name="experts_norm")(hidden)
        if spec.is_normalised:
            total = share.sum(-1, keepdims=True) + TINY
            share = share / jnp.maximum(total, spec.routing.least_sum)
        share = share * spec.routing.scale
        if spec.routing.is_beside:
            ones, shape = nn.initializers.ones, (spec.count,)
            expert_scale = self.param("router_expert_scale", ones, shape, self.dtype)
            share = share * expert_scale.astype(jnp.float32)[experts]
        out = jnp.zeros(x.shape, jnp.float32)
        if spec.shared is not None and not spec.routing.is_beside:
            block = MLP(spec.shared, self.kernels, self.dtype, self.matmul_bits, name="shared")
            out = block(x).astype(jnp.float32)
            if spec.is_shared_gated:
                gate = Linear(1, self.kernels, False, self.dtype, name="shared_gate")(x)
                out = jax.nn.sigmoid(gate.astype(jnp.float32)) * out
        return x, experts, share, out

    @nn.compact
    def guess(self, hidden: jax.Array) -> jax.Array:
        """Returns the experts that these hidden states would choose, int32 [token, top]."""
        return self._choose(hidden)[2]

    def _choose(self, hidden: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the router's input (the experts' input unless they are next to a dense block),
        and weights and numbers of the chosen experts."""
        spec, routing = self.spec, self.spec.routing
        if routing.is_beside:
            x = Norm(replace(self.config.norm, is_affine=False), self.kernels, self.dtype)(hidden)
            ones, size = nn.initializers.ones, hidden.shape[-1]
            scale = self.param("router_scale", ones, (size,), self.dtype)
            x = x * scale * jnp.asarray(size**-0.5, self.dtype)
        else:
            x = Norm(self.config.norm, self.kernels, self.dtype, name="mlp_norm")(hidden)
        dtype = jnp.dtype("float32") if routing.is_precise else self.dtype
        router = Linear(spec.count, self.kernels, routing.has_bias, dtype, name="router")
        products = router(x.astype(dtype)).astype(jnp.float32)
        is_softmax = routing.scores == "softmax"
        scores = jax.nn.softmax(products) if is_softmax else jax.nn.sigmoid(products)
        ranking = scores
        if routing.has_correction:
            zeros = nn.initializers.zeros
            ranking = scores + self.param("router_correction", zeros, (spec.count,), jnp.float32)
        if routing.groups > 1:
            ranking = of_best_groups(ranking, routing)
        _, experts = jax.lax.top_k(ranking, spec.top)
        return x, jnp.take_along_axis(scores, experts, axis=-1), experts.astype(jnp.int32)


class Beside(nn.Module):
    """Finishes a layer whose experts are next to a dense block: the two results have norms of their
    own, and so has their sum (Gemma 4)."""

    config: ModelConfig
    spec: ExpertsSpec
    kernels: Kernels
    dtype: jnp.dtype = jnp.float32
    matmul_bits: int = 16

    @nn.compact
    def __call__(self, hidden: jax.Array, experts: jax.Array) -> jax.Array:
        """Returns the layer's result, [token, hidden], from hidden states after attention and the
        sum of the experts, fp32."""
        norm = partial(Norm, self.config.norm, self.kernels, self.dtype)
        assert self.spec.shared is not None, "experts are beside a dense block"
        block = MLP(self.spec.shared, self.kernels, self.dtype, self.matmul_bits, name="shared")
        out = norm(name="shared_result_norm")(block(norm(name="mlp_norm")(hidden)))
        out = out + norm(name="experts_result_norm")(experts.astype(self.dtype))
        hidden = hidden + norm(name="mlp_result_norm")(out)
        if not self.config.has_layer_scale:
            return hidden
        return hidden * self.param("layer_scale", nn.initializers.ones, (1,), self.dtype)


def of_best_groups(scores: jax.Array, routing: Routing) -> jax.Array:
    """Returns scores, [token, expert], with -inf for the experts outside of the best groups."""
    grouped = scores.reshape(scores.shape[0], routing.groups, -1)
    largest, _ = jax.lax.top_k(grouped, min(routing.group_best, grouped.shape[2]))
    _, best = jax.lax.top_k(largest.sum(-1), routing.top_groups)
    is_best = jax.nn.one_hot(best, routing.groups, dtype=bool).any(1)
    return jnp.where(is_best[..., None], grouped, -jnp.inf).reshape(scores.shape)


MAX_LONE_SIZE = 4
"""If an expert computes at most this number of tokens at once, as on a CPU, a single token is
computed alone, in half the time."""


def add_expert(
    block: Callable[..., jax.Array],
    size: int,
    given: tuple[jax.Array, ...],
    experts: jax.Array,
    share: jax.Array,
    number: jax.Array,
    out: jax.Array,
) -> jax.Array:
    """Returns `out`, fp32 [token, hidden], with one expert's result for the tokens that chose it.

    block: the expert; size: tokens that it computes at once; given: its arguments, which have a row
    for each token; number: int32 [], that of the expert; further arguments are results of `Router`.
    """
    tokens = experts.shape[0]
    weight = jnp.where(experts == number, share, 0).sum(-1)
    is_mine = (experts == number).any(-1)
    count = is_mine.sum()
    # More places than tokens: with a single step, XLA would move the body out of the loop, and run
    # it even if the number of steps is 0.
    places = (-(-tokens // size) + 1) * size
    (mine,) = jnp.nonzero(is_mine, size=places, fill_value=tokens)

    def add_step(step: jax.Array, out: jax.Array, size: int) -> jax.Array:
        rows = jax.lax.dynamic_slice_in_dim(mine, step * size, size)
        inputs = [jnp.take(x, rows, axis=0, mode="fill", fill_value=0) for x in given]
        weights = jnp.take(weight, rows, mode="fill", fill_value=0)
        weighted = block(*inputs).astype(jnp.float32) * weights[:, None]
        return out.at[rows].add(weighted, mode="drop")

    steps = (count + size - 1) // size
    has_lone = 1 < size <= MAX_LONE_SIZE
    if has_lone:
        is_lone = (count == 1).astype(steps.dtype)
        out = jax.lax.fori_loop(0, is_lone, partial(add_step, size=1), out)
        steps = steps * (1 - is_lone)
    summed: jax.Array = jax.lax.fori_loop(0, steps, partial(add_step, size=size), out)
    return summed
