"""One transformer layer, in its two phases: prefill of a prompt and decode of one token.

A layer with experts ends here after attention: `layers/experts.py` has what follows.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from flexgen_jax.layers.attention import Block, Partial, first_seen, sides
from flexgen_jax.layers.delta_net import GatedDeltaNet
from flexgen_jax.layers.kernels import Kernels
from flexgen_jax.layers.latent_attention import LatentAttention
from flexgen_jax.layers.mlp import MLP
from flexgen_jax.layers.norm import Norm
from flexgen_jax.layers.rotary import Branches, Rows
from flexgen_jax.layers.self_attention import Arrays, SelfAttention, attend_earlier
from flexgen_jax.layers.short_conv import ShortConv
from flexgen_jax.layers.sparse_attention import attend_top
from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.delta_net import DeltaNetSpec
from flexgen_jax.models.parts import AttentionSpec, LatentAttentionSpec, LayerParts, MLPSpec
from flexgen_jax.models.short_conv import ShortConvSpec

T = TypeVar("T", bound=tuple[jax.Array, ...])


def append(tail: T, new: T, at: jax.Array) -> T:
    """Writes new cached arrays into the tail (the open KV block) from index `at`, in place if it is
    donated; tokens beyond its end are dropped."""

    def written(into: jax.Array, x: jax.Array) -> jax.Array:
        tokens = x.shape[-2]
        if tokens == 1:
            return jax.lax.dynamic_update_slice_in_dim(into, x, at, axis=into.ndim - 2)
        return into.at[..., at + jnp.arange(tokens), :].set(x, mode="drop")

    appended: T = jax.tree.map(written, tail, new)
    return appended


MIXERS: dict[type, type[nn.Module]] = {
    AttentionSpec: SelfAttention,
    LatentAttentionSpec: LatentAttention,
    DeltaNetSpec: GatedDeltaNet,
    ShortConvSpec: ShortConv,
}
"""The module of each kind of mixer. It takes the config, the mixer, kernels, the dtype and
`matmul_bits`. One that does not attend has a method `mix`, see `DecoderLayer.mix`."""


class DecoderLayer(nn.Module):
    """Attention, or another mixer, and a feed-forward block, with residuals, and norms where
    `config.norm_place` says.

    parts: the parts of this layer; kernels: the functions of the large computations, XLA's own
    or faster ones for the machine; matmul_bits: 16, or 8 for products of 8-bit integers.
    """

    config: ModelConfig
    parts: LayerParts
    kernels: Kernels
    dtype: jnp.dtype = jnp.float32
    matmul_bits: int = 16

    def setup(self) -> None:
        config = self.config
        self.attention = MIXERS[type(self.parts.mixer)](
            config=config,
            spec=self.parts.mixer,
            kernels=self.kernels,
            dtype=self.dtype,
            matmul_bits=self.matmul_bits,
        )
        if isinstance(self.parts.mlp, MLPSpec):
            self.mlp = MLP(self.parts.mlp, self.kernels, self.dtype, self.matmul_bits)
        if config.has_layer_scale and isinstance(self.parts.mlp, MLPSpec):
            self.layer_scale = self.param("layer_scale", nn.initializers.ones, (1,), self.dtype)
        if config.norm_place != "result":
            self.attention_norm = Norm(config.norm, self.kernels, self.dtype)
            self.mlp_norm = Norm(config.norm, self.kernels, self.dtype)
        if config.norm_place in ("around", "result"):
            self.attention_result_norm = Norm(config.norm, self.kernels, self.dtype)
            self.mlp_result_norm = Norm(config.norm, self.kernels, self.dtype)

    def prefill(
        self,
        hidden: jax.Array,
        rows: Rows,
        only_last: bool = False,
        branches: Branches | None = None,
    ) -> tuple[jax.Array, Arrays]:
        """Runs a prompt's hidden states, [batch, token, hidden], through the layer.

        Returns the new hidden states, and the prompt's keys and values. With `only_last`, hidden
        states are those of the last token, [batch, 1, hidden], which is all that is used of the
        last layer; keys and values are those of all tokens. branches: what the rows end with.
        """
        x = self._attention_input(hidden)
        if only_last:
            out, block = self.attention.prefill_last(x, rows)
            hidden = hidden[:, -1:]
        elif branches is not None:
            out, block = self.attention.prefill_branches(x, rows, branches)
        else:
            out, block = self.attention.prefill(x, rows)
        return self._after_attention(hidden, out), block

    def decode(
        self,
        hidden: jax.Array,
        blocks: tuple[Block, ...],
        tail: Arrays,
        position: jax.Array,
        rows: Rows,
        counts: jax.Array | None = None,
        max_tokens: int = 0,
        appends: bool = False,
    ) -> tuple[jax.Array, Arrays]:
        """Runs the hidden states of a token, or of consecutive ones, [batch, token, hidden],
        through the layer.

        Returns the new hidden states, and the tokens' keys and values, or with `appends` the tail
        with these. `blocks` hold the tokens from 0 on and are full; `tail` holds the tokens after
        them up to `position` (int32 [], the index of the first new token), and has room for more.
        With `counts`, int32 [batch], attention is sparse: each sequence attends with its one token
        to that number of earlier tokens, which is at most `max_tokens`.
        """
        spec = self.parts.attention
        query, row = self.project(hidden, position, rows)
        starts = jnp.array([0, *accumulate(block[0].shape[2] for block in blocks)])
        itself, end = row, position
        if appends:  # before attention reads the tail; in the opposite order XLA would copy it
            tail = append(tail, row, position - starts[-1])
            if counts is None and hidden.shape[1] == 1:  # the token sees itself in the tail
                itself, end = (), position + 1
        cache = tuple(map(sides, (*blocks, tail)))
        if counts is None:
            here = attend_earlier(
                query=query,
                blocks=cache,
                starts=starts,
                position=position,
                end=end,
                first_valid=rows.first_valid,
                spec=spec,
                kernels=self.kernels,
            )
        else:
            here = attend_top(
                query=query,
                blocks=cache,
                starts=starts,
                position=position,
                first_valid=first_seen(position, rows.first_valid, spec.window),
                counts=counts,
                max_tokens=max_tokens,
                tuning=self.kernels.tuning,
                softcap=spec.softcap,
            )
        return self.finish(hidden, query, itself, [here]), tail if appends else row

    def project(
        self, hidden: jax.Array, position: jax.Array, rows: Rows
    ) -> tuple[jax.Array, Arrays]:
        """Computes `decode` up to attention: the query, and the new tokens' keys and values."""
        projected: tuple[jax.Array, Arrays]
        projected = self.attention.project(self._attention_input(hidden), position, rows)
        return projected

    def finish(
        self, hidden: jax.Array, query: jax.Array, new: Arrays, partials: list[Partial]
    ) -> jax.Array:
        """Computes `decode` after attention: hidden states from the partial results; new: () if
        these include the tokens' attention to themselves."""
        out = self.attention.join(self._attention_input(hidden), query, new, partials)
        return self._after_attention(hidden, out)

    def project_chunk(
        self, hidden: jax.Array, start: jax.Array, rows: Rows, queries: int
    ) -> tuple[jax.Array, Partial, Arrays]:
        """Runs a chunk of a prompt, [batch, token, hidden], through the layer up to attention to
        earlier tokens.

        start: int32 [], the index of the chunk's first token; queries: for how many of the last
        tokens hidden states are wanted. Returns their query, their attention within the chunk, and
        the chunk's keys and values.
        """
        projected: tuple[jax.Array, Partial, Arrays]
        x = self._attention_input(hidden)
        projected = self.attention.project_chunk(x, start, rows, queries)
        return projected

    def mix(
        self,
        hidden: jax.Array,
        blocks: tuple[Block, ...],
        state: tuple[jax.Array, ...],
        start: jax.Array,
        rows: Rows,
        queries: int,
        num_known: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        """Runs some tokens, [batch, token, hidden], through a layer that does not attend.

        blocks: the cached blocks of earlier tokens, from the first token on; the last block may
        have room for more; state: what it replaces with every token; start: int32 [], the index of
        the first token; queries: for how many of the last tokens hidden states are wanted;
        num_known: int32 [], how many of the tokens the new state has seen, None for all. Returns
        the hidden states, the cached arrays of all tokens, and the new recurrent state.
        """
        extra = () if num_known is None else (num_known,)
        out, row, state = self.attention.mix(
            self._attention_input(hidden), blocks, state, start, rows, *extra
        )
        return self._after_attention(hidden[:, -queries:], out[:, -queries:]), row, state

    def finish_chunk(self, hidden: jax.Array, attended: jax.Array) -> jax.Array:
        """Returns the hidden states of a chunk's last tokens, from the result of their
        attention."""
        hidden = hidden[:, -attended.shape[2] :]
        out = self.attention.join_chunk(self._attention_input(hidden), attended)
        return self._after_attention(hidden, out)

    def _attention_input(self, hidden: jax.Array) -> jax.Array:
        is_before = self.config.norm_place in ("before", "around")
        return self.attention_norm(hidden) if is_before else hidden

    def _after_attention(self, hidden: jax.Array, out: jax.Array) -> jax.Array:
        """Returns hidden states from those before the layer and attention's result."""
        place, has_experts = self.config.norm_place, not isinstance(self.parts.mlp, MLPSpec)
        if place in ("around", "result"):
            out = self.attention_result_norm(out)
        if self.config.is_parallel:
            return hidden + out + self.mlp(self.mlp_norm(hidden))
        hidden = hidden + out
        if place == "after":
            hidden = self.attention_norm(hidden)
        if has_experts:
            return hidden
        out = self.mlp(self.mlp_norm(hidden) if place in ("before", "around") else hidden)
        if place in ("around", "result"):
            out = self.mlp_result_norm(out)
        if place == "after":
            return self.mlp_norm(hidden + out)
        hidden = hidden + out
        return hidden * self.layer_scale if self.config.has_layer_scale else hidden
