"""The model's two ends: token ids to hidden states, hidden states to logits."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from flexgen_jax.layers.attention import capped
from flexgen_jax.layers.kernels import Kernels
from flexgen_jax.layers.linear import Linear, parameter
from flexgen_jax.layers.norm import Norm
from flexgen_jax.layers.quantization import take_rows
from flexgen_jax.layers.rotary import Rows
from flexgen_jax.models.config import ModelConfig

_init = nn.initializers.normal(0.02)


class Embedding(nn.Module):
    """Token embeddings, and learned position embeddings where a model has them.

    Token embeddings are projected to the hidden size if theirs differs.
    """

    config: ModelConfig
    kernels: Kernels
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, token_ids: jax.Array, start: jax.Array, rows: Rows) -> jax.Array:
        """Embeds token_ids, int32 [batch, token]; returns [batch, token, hidden].

        start: int32 [], the index of the first column in the left-padded sequences. Where positions
        are learned, padding has position -1, as in transformers, and the table's row of a position
        is `position_offset` further down.
        """
        config = self.config
        shape = (config.vocab_size, config.embed_size)
        table = parameter(self, "tokens", _init, shape, self.dtype)
        hidden = take_rows(table, token_ids)
        if config.embed_scale != 1:
            hidden = hidden * jnp.asarray(config.embed_scale, self.dtype)
        if config.projects_embeddings:
            project = Linear(config.hidden_size, self.kernels, False, self.dtype, name="project_in")
            hidden = project(hidden)
        if config.position_offset is None:
            return hidden
        shape = (config.max_positions + config.position_offset, config.hidden_size)
        position_table = parameter(self, "positions", _init, shape, self.dtype)
        positions = jnp.maximum(rows.positions(start, token_ids.shape[1]), -1)
        return hidden + take_rows(position_table, positions + config.position_offset)


class Head(nn.Module):
    """Final norm, projection and the product with the (often tied) output table."""

    config: ModelConfig
    kernels: Kernels
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, hidden: jax.Array, before_table: bool = False) -> jax.Array:
        """Returns the logits, fp32 [..., vocabulary], of hidden states [..., hidden]; with
        `before_table` what the table is multiplied with."""
        config = self.config
        if config.final_norm:
            hidden = Norm(config.norm, self.kernels, self.dtype, name="norm")(hidden)
        if config.projects_embeddings:
            project = Linear(config.embed_size, self.kernels, False, self.dtype, name="project_out")
            hidden = project(hidden)
        if before_table:
            return hidden
        shape = (config.vocab_size, config.embed_size)
        table = parameter(self, "tokens", _init, shape, self.dtype)
        return capped(self.kernels.logits(hidden, table), config.logit_softcap)
