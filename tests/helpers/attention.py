"""Random KV caches in every format, and attention to them in NumPy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from flexgen_jax.layers.quantization import Kept, quantize_as
from flexgen_jax.models.formats.storage import kv_storage
from flexgen_jax.models.parts import AttentionSpec
from tests.helpers.numpy_quantization import dequantized

LENGTHS, POSITION, KV_HEADS = (7, 5, 4), 14, 3
FORMATS = [("float32", 16), ("bfloat16", 16), ("float16", 16), ("bfloat16", 8), ("float32", 4)]
FORMATS += [("float16", 4)]

SPECS = {
    "plain": AttentionSpec(KV_HEADS, KV_HEADS, 1),
    "groups": AttentionSpec(4 * KV_HEADS, KV_HEADS, 1),
    "softcap": AttentionSpec(2 * KV_HEADS, KV_HEADS, 1, softcap=0.7),
    "many heads": AttentionSpec(64 * KV_HEADS, KV_HEADS, 1, softcap=0.9),
}
"""Variants of attention, but for the elements of a head."""


def numpy_attention(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    valid: np.ndarray,
    softcap: float | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns softmax(query key^T) value and the log-sum-exp of the scores, in fp64.

    query: [batch, head, token, head_dim]; key, value: the same with KV heads; valid: bool [batch,
    token].
    """
    group = query.shape[1] // key.shape[1]
    key, value = np.repeat(key, group, 1), np.repeat(value, group, 1)
    scores = np.einsum("bhqd,bhtd->bhqt", query.astype(np.float64), key)
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    scores = np.where(valid[:, None, None], scores, -np.inf)
    peak = scores.max(-1, keepdims=True)
    weights = np.exp(scores - peak)
    total = weights.sum(-1, keepdims=True)
    out = np.einsum("bhqt,bhtd->bhqd", weights / total, value)
    return out, (peak + np.log(total))[..., 0]


def kept(x: np.ndarray, dtype: str, bits: int) -> tuple[Kept, np.ndarray]:
    """Returns an array as the cache keeps it, and the numbers it stands for, fp64."""
    array = jnp.asarray(x.astype(dtype))
    whole = np.asarray(array, np.float32)
    if bits == 16:
        return array, whole.astype(np.float64)
    storage = kv_storage(x.shape, dtype, bits)
    stands_for = dequantized(np.asarray(array), bits, storage.group_size, storage.axis)
    return quantize_as(array, storage), stands_for.astype(np.float64)


def random_blocks(
    seed: int, dtype: str, bits: int, tail_bits: int, head_dim: int, batch: int = 4
) -> tuple[list[tuple[Kept, Kept]], list[np.ndarray]]:
    """Returns random blocks of `LENGTHS` tokens, and the keys and values they stand for, fp64.

    The last block is kept in `tail_bits`, the others in `bits`.
    """
    rng = np.random.default_rng(seed)
    blocks, sides = [], ([], [])
    for length in LENGTHS:
        shape, is_tail = (batch, KV_HEADS, length, head_dim), length == LENGTHS[-1]
        drawn = [rng.normal(size=shape).astype(np.float32) for _ in sides]
        pair = [kept(x, dtype, tail_bits if is_tail else bits) for x in drawn]
        (key, whole_key), (value, whole_value) = pair
        blocks.append((key, value))
        sides[0].append(whole_key)
        sides[1].append(whole_value)
    return blocks, [np.concatenate(side, axis=2) for side in sides]
