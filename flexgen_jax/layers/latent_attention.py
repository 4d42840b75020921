"""Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1)."""

from __future__ import annotations

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

from flexgen_jax.layers.linear import Linear, parameter
from flexgen_jax.layers.norm import Norm
from flexgen_jax.layers.quantization import Kept
from flexgen_jax.layers.rotary import Rows
from flexgen_jax.layers.self_attention import Arrays, SelfAttention
from flexgen_jax.models.parts import LatentAttentionSpec


class Kernel(nn.Module):
    """A kernel, [out, in], that is multiplied from both sides."""

    features: int
    into: int
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self) -> Kept:
        shape = (self.features, self.into)
        return parameter(self, "kernel", nn.initializers.normal(0.02), shape, self.dtype)


class LatentAttention(SelfAttention):
    """Attention to one vector per token, which is expanded to the heads' keys and values; see
    `LatentAttentionSpec`.

    Within a prompt they are made. Attention to cached tokens never expands them: with U the part of
    a head's kernel that makes its key, and c the kept vector, q . (U c) = (q U) . c, so that U is
    applied to a single query instead of all keys; the sum of values in the same way (section
    2.1.2).
    """

    spec: LatentAttentionSpec

    def setup(self) -> None:
        spec = self.spec
        product = partial(Linear, kernels=self.kernels, dtype=self.dtype, bits=self.matmul_bits)
        queries = spec.num_heads * spec.key_size
        if spec.q_rank is None:
            self.q = product(queries, use_bias=False)
        else:
            self.q_down = product(spec.q_rank, use_bias=spec.qkv_bias)
            self.q_norm = Norm(spec.rank_norm, self.kernels, self.dtype)
            self.q_up = product(queries, use_bias=False)
        self.kv_down = product(spec.head_dim, use_bias=spec.qkv_bias)
        self.kv_norm = Norm(spec.rank_norm, self.kernels, self.dtype)
        features = spec.num_heads * (spec.plain + spec.value)
        self.kv_up = Kernel(features, spec.kv_rank, self.dtype)
        self.out = product(self.config.hidden_size, use_bias=spec.out_bias)

    def _asked(self, x: jax.Array, start: jax.Array, rows: Rows) -> jax.Array:
        plain_part, rotated = self._queries(x, start, rows)
        moved = self._by_heads(plain_part, (0, self.spec.plain), is_inverse=True)
        heads = jnp.concatenate([moved, rotated], axis=-1)
        return self._scaled(heads, start, rows).swapaxes(1, 2)

    def _kept(self, x: jax.Array, start: jax.Array, rows: Rows) -> Arrays:
        down = self.kv_down(x)
        vector = self.kv_norm(down[..., : self.spec.kv_rank])
        rotated = self._rotated(down[..., None, self.spec.kv_rank :], start, rows)
        return (jnp.concatenate([vector, rotated[:, :, 0]], axis=-1)[:, None],)

    def _result(self, x: jax.Array, attended: jax.Array) -> jax.Array:
        vectors = attended[..., : self.spec.kv_rank].astype(self.dtype).swapaxes(1, 2)
        values = self._by_heads(vectors, (self.spec.plain, self.spec.value), is_inverse=False)
        return self.out(values.reshape(*values.shape[:2], -1))

    def _of_prompt(
        self, x: jax.Array, rows: Rows
    ) -> tuple[tuple[jax.Array, jax.Array, jax.Array], Arrays | None]:
        spec, start = self.spec, jnp.int32(0)
        (row,) = self._kept(x, start, rows)
        vector, shared = row[:, 0, :, : spec.kv_rank], row[:, 0, :, None, spec.kv_rank :]
        key_and_value = self.kernels.matmul(vector, self.kv_up(), None, self.matmul_bits)
        key_and_value = key_and_value.reshape(*x.shape[:2], spec.num_heads, -1)
        rotated = jnp.broadcast_to(shared, (*key_and_value.shape[:3], spec.rotated))
        key = jnp.concatenate([key_and_value[..., : spec.plain], rotated], axis=-1)
        query = jnp.concatenate(self._queries(x, start, rows), axis=-1)
        sides = (self._scaled(query, start, rows), key, key_and_value[..., spec.plain :])
        query, key, value = (_padded(side, spec.wide) for side in sides)
        return (query, key, value), (row,)

    def _prompt_result(self, x: jax.Array, attended: jax.Array) -> jax.Array:
        values = attended[..., : self.spec.value]
        return self.out(values.reshape(*values.shape[:2], -1))

    def _queries(self, x: jax.Array, start: jax.Array, rows: Rows) -> tuple[jax.Array, jax.Array]:
        """Returns the plain and the rotated part of the heads' queries, [batch, token, head,
        element]."""
        spec = self.spec
        heads = self.q(x) if spec.q_rank is None else self.q_up(self.q_norm(self.q_down(x)))
        heads = heads.reshape(*x.shape[:2], spec.num_heads, spec.key_size)
        return heads[..., : spec.plain], self._rotated(heads[..., spec.plain :], start, rows)

    def _by_heads(self, x: jax.Array, features: tuple[int, int], is_inverse: bool) -> jax.Array:
        """Multiplies x, [batch, token, head, element], by the part of the heads' kernels that makes
        keys or values; see `Kernels.matmul_by_heads`."""
        rows = x.reshape(-1, *x.shape[2:])
        out = self.kernels.matmul_by_heads(rows, self.kv_up(), features, is_inverse)
        return out.reshape(*x.shape[:3], -1)


def _padded(x: jax.Array, size: int) -> jax.Array:
    """Returns x with zeros after its last axis, up to a size."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])
