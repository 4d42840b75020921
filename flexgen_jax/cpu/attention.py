"""Attention on the CPU, called from inside XLA's programs.

Keys and values are read where they lie, at memory speed, from within the program of a step: if the
step were split into programs, XLA's threads would keep spinning beside the compute kernels. Each
function returns None if XLA's own code should be used.
"""

from __future__ import annotations

from functools import lru_cache

import jax
import jax.numpy as jnp

from flexgen_jax.cpu.host_attention import MANY_HEADS, heads_together
from flexgen_jax.cpu.jit.decode_attention import attention_handler
from flexgen_jax.cpu.jit.prefill_attention import chunk_handler, prompt_handler
from flexgen_jax.cpu.targets import register
from flexgen_jax.layers.attention import KVBlock, KVPair, Partial, merge
from flexgen_jax.layers.quantization import Kept, QuantizedArray, plain
from flexgen_jax.models.parts import AttentionSpec

MIN_KERNEL_ELEMENTS = 1 << 20
"""Below this many elements of keys and values, XLA's own attention is fast enough."""

FEW_OF_A_PROMPT = 1 << 18
"""Below this many elements of a prompt batch's keys and values, XLA's attention is fast enough."""


def decode_attention(
    query: jax.Array,
    blocks: tuple[KVBlock, ...],
    starts: jax.Array,
    position: jax.Array,
    first_valid: jax.Array,
    spec: AttentionSpec,
) -> Partial | None:
    """Attends from one new token per sequence to some KV blocks, or returns None; see
    `layers.kernels.Kernels.decode_attention`."""
    batch, heads, _, size = query.shape
    rows = batch * heads
    if 2 * rows * size * sum(key.shape[2] for key, _ in blocks) < MIN_KERNEL_ELEMENTS:
        return None
    if spec.group >= MANY_HEADS:
        return _attend_as_rows(query, blocks, starts, position, first_valid, spec)
    bits = next((key.storage.bits for key, _ in blocks if isinstance(key, QuantizedArray)), 16)
    target = _target(size, str(query.dtype), bits)
    if target is None:
        return None
    lengths = jnp.array([key.shape[2] for key, _ in blocks], jnp.int32)
    starts = jnp.asarray(starts, jnp.int32)
    first = jnp.maximum(first_valid[None, :] - starts[:, None], 0)
    stop = jnp.minimum(lengths, position - starts)
    leaves = jax.tree.leaves(blocks)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((rows, size), (rows,))]
    asked = query.astype(jnp.float32).reshape(rows, size)
    softcap = jnp.array([spec.softcap or 0], jnp.float32)
    out, lse = jax.ffi.ffi_call(target, shapes)(asked, first, stop, softcap, *leaves)
    return out.reshape(query.shape), lse.reshape(query.shape[:3])


def prefill_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    first_valid: jax.Array,
    spec: AttentionSpec,
) -> tuple[jax.Array, KVPair] | None:
    """Computes prompts' attention to themselves, or returns None; see
    `layers.kernels.Kernels.prefill_attention`."""
    batch, tokens, kv_heads, size = key.shape
    dtype = query.dtype
    if query.size + value.size < FEW_OF_A_PROMPT:
        return None
    target = _prompt_target(size, str(dtype))
    if target is None:
        return None
    kept = jax.ShapeDtypeStruct((batch * kv_heads, tokens, size), dtype)
    call = jax.ffi.ffi_call(target, (kept, kept, jax.ShapeDtypeStruct(query.shape, jnp.float32)))
    keys, values, out = call(query, key, value, first_valid, _limits(spec))
    key, value = (x.reshape(batch, kv_heads, tokens, size) for x in (keys, values))
    return out.astype(dtype), (key, value)


def chunk_attention(
    query: jax.Array,
    key: Kept,
    value: Kept,
    first_valid: jax.Array,
    lead: jax.Array,
    spec: AttentionSpec,
) -> Partial | None:
    """Attends with several tokens per sequence to one KV block, or returns None; see
    `layers.attention.chunk_attention`."""
    batch, heads, asked, size = query.shape
    rows, kv_heads, tokens = batch * heads, key.shape[1], key.shape[2]
    if asked == 1 or 2 * rows * tokens * size < FEW_OF_A_PROMPT:
        return None
    target = _chunk_target(size, str(query.dtype))
    if target is None:
        return None
    keys, values = (plain(x).reshape(batch * kv_heads, tokens, size) for x in (key, value))
    asked_rows = query.reshape(rows, asked, size)
    out, lse = _call_chunk(
        target=target,
        query=asked_rows,
        block=(keys, values),
        first_valid=first_valid,
        lead=lead,
        limits=_limits(spec, step=1),
    )
    return out.reshape(query.shape), lse.reshape(query.shape[:3])


def _call_chunk(
    target: str,
    query: jax.Array,
    block: tuple[jax.Array, jax.Array],
    first_valid: jax.Array,
    lead: jax.Array,
    limits: jax.Array,
) -> Partial:
    """Calls a handler that `chunk_handler` made."""
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (query.shape, query.shape[:2])]
    where = (first_valid.astype(jnp.int32), lead.astype(jnp.int32).reshape(1), limits)
    out, lse = jax.ffi.ffi_call(target, shapes)(query, *block, *where)
    return out, lse


def _attend_as_rows(
    query: jax.Array,
    blocks: tuple[KVBlock, ...],
    starts: jax.Array,
    position: jax.Array,
    first_valid: jax.Array,
    spec: AttentionSpec,
) -> Partial | None:
    """Computes `decode_attention` if so many heads share keys and values that compute binds: a
    head's queries are to the chunk's handler as tokens are, of one index."""
    batch, _, _, size = query.shape
    target = _chunk_target(size, str(query.dtype))
    if target is None:
        return None
    asked = query.reshape(-1, heads_together(spec, batch), size)
    partials = []
    for start, (key, value) in zip(starts, blocks, strict=True):
        tokens = key.shape[2]
        keys, values = (plain(x).reshape(-1, tokens, size) for x in (key, value))
        attended = _call_chunk(
            target=target,
            query=asked,
            block=(keys, values),
            first_valid=jnp.maximum(first_valid - start, 0),
            lead=position - start - 1,
            limits=_limits(spec, step=0),
        )
        partials.append(attended)
    out, lse = merge(partials)
    return out.reshape(query.shape), lse.reshape(query.shape[:3])


def _limits(spec: AttentionSpec, *, step: int | None = None) -> jax.Array:
    """Returns window and softcap, each 0 for none, as the compute kernels take them; step: for
    chunks, 0 if all queries are of one token, of which `first_valid` says what it sees, else 1."""
    window = 0 if step == 0 else spec.window or 0
    limits = [window, spec.softcap or 0] + ([] if step is None else [step])
    return jnp.array(limits, jnp.float32)


@lru_cache
def _target(size: int, dtype: str, bits: int) -> str | None:
    """Returns the name of the registered function for this head size and cache format; None if it
    cannot be used."""
    name = f"flexgen_jax_attend_{size}_{dtype}_{bits}"
    return register(name, lambda: attention_handler(name, size, dtype, bits))


@lru_cache
def _prompt_target(size: int, dtype: str) -> str | None:
    name = f"flexgen_jax_attend_prompt_{size}_{dtype}"
    return register(name, lambda: prompt_handler(name, size, dtype))


@lru_cache
def _chunk_target(size: int, dtype: str) -> str | None:
    name = f"flexgen_jax_attend_chunk_{size}_{dtype}"
    return register(name, lambda: chunk_handler(name, size, dtype))
